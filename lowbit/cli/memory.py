"""``lowbit doctor --memory``: what training a model takes of memory, and what to do where it is too much. ``find`` is
what names of models stand for, also in ``lowbit fit``.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.cli.console import errors, out, print_json
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.machine import multiplies
from lowbit.plan.checklist import checklist
from lowbit.serialize.huggingface import is_directory, without_weights
from lowbit.tiled.fused_loss import can_fuse_loss

__all__ = ["find", "report"]


def report(
    name: str, rows: int, length: int, optimizer: str, precision: str | None, recipe: str | None, json: bool
) -> None:
    """Print the estimate of a step of the model called ``name``, and the checklist."""
    model, batch, loss = find(name, rows, length, "--memory")
    with errors.status(f"estimating {name}"):
        found = checklist(model, batch, loss, optimizer=optimizer, precision=precision, recipe=recipe)
    if json:
        print_json(found.as_dict())
        return
    fast = "this processor multiplies bf16" if multiplies("bf16") else "bf16 is slower than fp32 on this processor"
    out.print(f"{name}: a step of training, estimated ({fast})\n", markup=False)
    out.print(str(found.plain), markup=False, soft_wrap=True)
    out.print("\nwhat would save memory, best first", style="bold")
    out.print(str(found), markup=False, soft_wrap=True)


#: A loss of output and batch; None for the model's own.
_Loss = Callable[[Any, Any], Tensor] | None


def find(name: str, rows: int, length: int, option: str) -> tuple[nn.Module, Any, _Loss]:
    """The model, a batch and a loss. ``option``: what of the command line names it, for messages.

    Raises ValueError for a name that is no model's, and for a model of which no batch is known.
    """
    told = f"{option} {name}"
    if name == "demo":
        config = GPTConfig()
        return GPT(config), torch.zeros(rows, min(length, config.context), dtype=torch.long), None
    if is_directory(Path(name)):
        model = without_weights(Path(name)).train()
        return model, _batch_of(model, rows, length, told), None
    if ":" not in name:
        raise ValueError(
            f"{told}: expected 'demo', a directory with a config.json of transformers, or MODULE:FUNCTION, a "
            f"function that returns a model and a batch, and a loss where it is not the model's own"
        )
    path, _, function = name.partition(":")
    sys.path.insert(0, "")
    try:
        made = getattr(importlib.import_module(path), function)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"{told}: {error}; expected MODULE:FUNCTION that can be imported from here") from None
    finally:
        sys.path.remove("")
    if not (isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module)):
        got = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise ValueError(f"{told}: expected (model, batch) or (model, batch, loss) from {function}(), got {got}")
    model, batch, loss = made if len(made) == 3 else (*made, None)
    return model, batch, loss


def _batch_of(model: Any, rows: int, length: int, told: str) -> dict[str, Any]:
    """What a model of transformers is trained on, by the name of its main input."""
    config, kind = model.config, model.main_input_name
    if kind == "pixel_values":
        side = getattr(config, "image_size", 224)
        high, wide = side if isinstance(side, list | tuple) else (side, side)
        return {kind: torch.zeros(rows, getattr(config, "num_channels", 3), high, wide, dtype=model.dtype)}
    if kind != "input_ids":
        raise ValueError(
            f"{told}: {type(model).__name__} is given {kind}, of which no batch is known here; write a function "
            f"that returns the model and a batch, and give MODULE:FUNCTION"
        )
    ids = torch.zeros(rows, length, dtype=torch.long)
    if getattr(config, "is_encoder_decoder", False):
        labels = "labels" in inspect.signature(type(model).forward).parameters
        return {"input_ids": ids, "labels" if labels else "decoder_input_ids": ids}
    return {"input_ids": ids, "labels": ids} if can_fuse_loss(model) else {"input_ids": ids}
