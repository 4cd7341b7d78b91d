"""calibrate: codes and scales of a model's weights, chosen with data, one block of the model after the other."""

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
from lowbit.calibrate.choice import planned
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
    """Choose codes and scales for the weights of ``model``, which stays as it is, and return them.

    ``recipe``, ``skip``: as for ``quantize_``.
    ``batches``: what the model is called with: a tensor as it is, a tuple by position, a dict by keyword. A few
    thousand tokens, or some hundred images, of what the model will see. Where a dict's ``attention_mask`` [B, T] is 0,
    tokens are padding and do not count. None: only for methods that need no data.
    ``method``: a name or several. Of weights one of ``lowbit.calibrate.METHODS``; None: the best known, with data
    ``guided-gptq`` (``gptq`` for a model whose loss has no gradient), without that of ``quantize_``.
    Of static input scales one of ``OBSERVERS``; by default ``minmax``. Before them any of ``TRANSFORMS``, in the order
    given: ``("smoothquant", "gptq")``.
    ``directory``: where each block is saved when it is finished, and the result at the end. A call with the same model,
    recipe, method, data and loss goes on after the last finished block, and finds the same bits. A loss or a Method of
    one's own is the same where its code is, and what the code closes over or reaches by global names.
    ``loss(output, batch)``: what ``guided-gptq`` differentiates, a scalar; by default the cross-entropy of the next
    token where the model answers with logits of token ids, else a random projection of its outputs.
    ``progress(what, done, total)`` is called before each block. None: a bar where standard error is a terminal; False:
    nothing.

    A model that is a stack of blocks is taken one block after the other. The inputs that a block's layers are measured
    by are those that the quantized blocks before it give, and no more than one block's are held. Other models are taken
    whole. ``guided-gptq`` first runs the whole model forward and backward, one batch at a time, its blocks
    checkpointed.

    Raises ValueError: as ``quantize_``; for a directory of another run; with a directory, for data, a loss or a method
    that cannot be told from others, such as what pickle cannot write; for a method or static scales that need data
    without any; for a method that has nothing to offer for a weight; for NaN or Inf in a layer's inputs. TypeError for
    batches of other types, and for batches in the place of the recipe.
    Warns of layers that no batch reaches; their weights are chosen without data.
    """
    started = time.perf_counter()
    check_model(model)
    if not isinstance(recipe, str | Recipe | LayerRecipes | Mapping):
        raise TypeError(
            f"calibrate: the recipe comes before the batches, calibrate(model, recipe, batches); the recipe is a "
            f"{type(recipe).__name__}"
        )
    chosen, choice = planned(recipe, method, "calibrate")
    data = batches_in(batches)
    if batches is not None and not data:
        raise ValueError("calibrate: there are no batches (an iterator gives them once); give some, or None")
    skip = patterns_in(skip, "skip")
    model = uncompiled(model)
    with nullcontext() if directory is None else exclusive(Path(directory), "calibrate"):
        finished = None
        if directory is not None:
            finished = Finished(directory, run_of(digest(model.state_dict()), chosen, choice, skip, data, loss))
            whole = finished.whole()
            if whole is not None:
                return whole
        run = Blockwise(model, data, chosen, choice, skip, finished, loss)
        with reporting(progress, "calibrating") as progress:
            run.all(progress)
        run.found.seconds = time.perf_counter() - started
        if finished is not None:
            finished.finish(run.found)
        return run.found
