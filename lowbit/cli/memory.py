"""``lowbit doctor --memory``: memory of a training step, and a checklist to reduce it."""

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
from lowbit.interop import KINDS, format_of
from lowbit.machine import multiplies
from lowbit.memory import checklist
from lowbit.serialize.huggingface import is_directory, without_weights
from lowbit.tiled.fused_loss import takes_labels

__all__ = ["find", "report"]


def report(
    name: str, rows: int, length: int, optimizer: str, precision: str | None, recipe: str | None, json: bool
) -> None:
    """Print the memory estimate of one training step, and the checklist."""
    model, batch, loss = find(name, rows, length, "--memory")
    with errors.status(f"estimating {name}"):
        results = checklist(model, batch, loss, optimizer=optimizer, precision=precision, recipe=recipe)
    if json:
        print_json(results.as_dict())
        return
    bf16 = "this CPU has bf16 matmuls" if multiplies("bf16") else "bf16 is slower than fp32 on this CPU"
    out.print(f"{name}: one training step, estimated ({bf16})\n", markup=False)
    out.print(str(results.plain), markup=False, soft_wrap=True)
    out.print("\nways to save memory, best first", style="bold")
    out.print(str(results), markup=False, soft_wrap=True)


#: A loss of output and batch; None for the model's own.
_Loss = Callable[[Any, Any], Tensor] | None


def find(name: str, rows: int, length: int, option: str) -> tuple[nn.Module, Any, _Loss]:
    """Build the model that the command line names, with a batch and a loss.

    Args:
        name: ``demo``, the path of a Hugging Face model or of one in ``FORMATS``, or ``MODULE:FUNCTION``.
        rows: Rows of the batch, unless a function returns it.
        length: Tokens per row, unless a function returns the batch.
        option: The option or argument that has the name, for error messages.

    Raises:
        ValueError: The name is not a model, or the model's input is of an unknown kind.
    """
    prefix = f"{option} {name}"
    if name == "demo":
        config = GPTConfig()
        return GPT(config), torch.zeros(rows, min(length, config.context), dtype=torch.long), None
    row = format_of(name)
    if row is not None or is_directory(Path(name)):
        directory = Path(name)
        model = (without_weights(directory) if row is None else row.contents(directory).model).train()
        return model, _batch_of(model, rows, length, prefix), None
    if ":" not in name:
        raise ValueError(
            f"{prefix}: expected 'demo', a Hugging Face model directory (config.json), {KINDS}, or MODULE:FUNCTION, a "
            f"function that returns (model, batch) or (model, batch, loss)"
        )
    path, _, function = name.partition(":")
    sys.path.insert(0, "")
    try:
        result = getattr(importlib.import_module(path), function)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{prefix}: {error}; expected MODULE:FUNCTION that can be imported from the current directory"
        ) from None
    finally:
        sys.path.remove("")
    if not (isinstance(result, tuple) and len(result) in (2, 3) and isinstance(result[0], nn.Module)):
        got = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise ValueError(f"{prefix}: expected (model, batch) or (model, batch, loss) from {function}(), got {got}")
    model, batch, loss = result if len(result) == 3 else (*result, None)
    return model, batch, loss


def _batch_of(model: Any, rows: int, length: int, prefix: str) -> dict[str, Any]:
    """A training batch of zeros for a Hugging Face model; ``prefix`` begins error messages."""
    config, main_input = model.config, model.main_input_name
    if main_input == "pixel_values":
        side = getattr(config, "image_size", 224)
        height, width = side if isinstance(side, list | tuple) else (side, side)
        return {main_input: torch.zeros(rows, getattr(config, "num_channels", 3), height, width, dtype=model.dtype)}
    if main_input != "input_ids":
        raise ValueError(
            f"{prefix}: the input of {type(model).__name__} is {main_input}, which lowbit cannot create; write a "
            f"function that returns (model, batch), and pass MODULE:FUNCTION"
        )
    ids = torch.zeros(rows, length, dtype=torch.long)
    if getattr(config, "is_encoder_decoder", False):
        labels = "labels" in inspect.signature(type(model).forward).parameters
        return {"input_ids": ids, "labels" if labels else "decoder_input_ids": ids}
    return {"input_ids": ids, "labels": ids} if takes_labels(model) else {"input_ids": ids}
