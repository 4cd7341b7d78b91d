"""calibrate: chooses quantized weights and static input scales with data, block by block."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowbit.calibrate.blockwise import Blockwise
from lowbit.calibrate.calibration import Calibration
from lowbit.calibrate.choice import resolve
from lowbit.calibrate.identity import digest
from lowbit.calibrate.methods import Method
from lowbit.calibrate.resume import Finished, run_of
from lowbit.convert.select import DEFAULT_SKIP, Skip
from lowbit.files import exclusive
from lowbit.models.batches import batches_in
from lowbit.models.check import check_model, uncompiled
from lowbit.models.losses import Loss
from lowbit.models.names import patterns_in
from lowbit.progress import Progress, reporting
from lowbit.recipes import LayerRecipes, Recipe

__all__ = ["calibrate"]


@torch.no_grad()
def calibrate(
    model: nn.Module,
    recipe: str | Recipe | LayerRecipes | Mapping[Any, str | Recipe | None],
    batches: Iterable[Any] | None,
    method: str | Method | Iterable[str | Method] | None = None,
    *,
    skip: Skip = DEFAULT_SKIP,
    directory: str | Path | None = None,
    loss: Loss | None = None,
    progress: Progress | bool | None = None,
) -> Calibration:
    """Choose quantized weights and static input scales for ``model``, which is not changed.

    A model with a stack of blocks is calibrated block by block. Each block sees the inputs that the quantized blocks
    before it produce, and the inputs of only one block are in memory. Other models are calibrated as a whole.
    ``guided-gptq`` first runs the model forward and backward, one batch at a time, with checkpointed blocks.

    Warns about layers that no batch reaches. Their weights are quantized without data.

    Args:
        model: The model in high precision.
        recipe: As for ``quantize_``.
        batches: Inputs of the model: each a tensor, a tuple of positional or a dict of keyword arguments. Use a few
            thousand tokens, or a few hundred images, from the model's domain. Tokens with 0 in a dict's
            ``attention_mask`` [B, T] are padding and do not count. None: only for methods without data.
        method: One name, or several such as ``("smoothquant", "gptq")``. ``METHODS`` choose the weights; the default
            with data is ``"guided-gptq"``, or ``"gptq"`` if the loss has no gradient. Without data the default is that
            of ``quantize_``. ``OBSERVERS`` choose static input scales (default ``"minmax"``). ``TRANSFORMS`` change the
            model first, in the order in which they are named.
        skip: As for ``quantize_``.
        directory: Each finished block is saved here, and the result at the end. A call with the same model, recipe,
            method, data and loss resumes after the last finished block, with a bit-identical result. A custom loss or
            Method counts as unchanged if its code, closure and referenced globals are unchanged.
        loss: ``loss(output, batch)`` returns a scalar, which ``guided-gptq`` differentiates. Default: the next-token
            cross-entropy if the model returns logits of token ids, otherwise a random projection of its outputs.
        progress: ``progress(what, done, total)`` is called before each block. None: a bar if standard error is a
            terminal. False: nothing.

    Returns:
        The Calibration for ``quantize_(model, recipe, calibration=...)``.

    Raises:
        ValueError: As ``quantize_``. A method or static scales need data and there is none, or the method does not
            support a weight's scheme. The inputs of a layer have NaN or Inf. ``directory`` contains another run, or the
            data, loss or method cannot be compared with a saved run (for example because it cannot be pickled).
        TypeError: A batch has another type, or batches are passed as the recipe.
    """
    started = time.perf_counter()
    check_model(model)
    if not isinstance(recipe, str | Recipe | LayerRecipes | Mapping):
        raise TypeError(
            f"calibrate: the recipe comes before the batches, calibrate(model, recipe, batches); the recipe is a "
            f"{type(recipe).__name__}"
        )
    recipes, choice = resolve(recipe, method, "calibrate")
    data = batches_in(batches)
    if batches is not None and not data:
        raise ValueError("calibrate: there are no batches (an iterator yields them only once); give batches, or None")
    skip = patterns_in(skip, "skip")
    model = uncompiled(model)
    with nullcontext() if directory is None else exclusive(Path(directory), "calibrate"):
        finished = None
        if directory is not None:
            finished = Finished(directory, run_of(digest(model.state_dict()), recipes, choice, skip, data, loss))
            calibration = finished.result()
            if calibration is not None:
                return calibration
        run = Blockwise(model, data, recipes, choice, skip, finished, loss)
        with reporting(progress, "calibrating") as progress:
            run.all(progress)
        run.calibration.seconds = time.perf_counter() - started
        if finished is not None:
            finished.finish(run.calibration)
        return run.calibration
