"""Writes a model as a graph."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.convert.engine import quantized_layers
from lowbit.interop.files import refuse_adapters, require_library
from lowbit.interop.graphs.replacing import replaced
from lowbit.interop.graphs.rows import Inputs, Target
from lowbit.models.batches import arguments
from lowbit.models.check import uncompiled
from lowbit.report import Report, report_on
from lowbit.serialize import huggingface

__all__ = ["write"]


@torch.no_grad()
def write(model: nn.Module, path: str | Path, batch: Any = None, *, target: Target) -> Report:
    """Write a model as a graph, in which the axes of batches and of token sequences may have any length.

    Args:
        model: A model in fp32 on the CPU, quantized or not.
        path: The file.
        batch: An example batch: a tensor, a tuple of arguments, or a dict of keyword arguments. None: the dummy inputs
            of a model of transformers.
        target: The format.

    Returns:
        The report, with a row for each quantized layer.

    Raises:
        ImportError: A package that the format needs is not installed.
        ValueError: A layer has no operator, or the model has adapters that are not merged.
        RuntimeError: torch cannot export the model.
    """
    model, path = uncompiled(model), Path(path)
    for name in target.packages:
        require_library(name)
    refuse_adapters(model, f"{target.name} has none")
    report = report_on("export", model, quantized_layers(model), f"written to {path}")
    if batch is None:
        if not huggingface.is_pretrained(model):
            raise ValueError(
                f"export: {target.name!r} needs an example batch: lb.export(model, {target.name!r}, path, batch=batch)"
            )
        batch = dict(model.dummy_inputs)  # type: ignore[operator, arg-type]
    training = model.training
    model.eval()
    path.parent.mkdir(parents=True, exist_ok=True)
    config = getattr(model, "config", None) if huggingface.is_pretrained(model) else None
    cached = getattr(config, "use_cache", None)
    try:
        if cached is not None:
            config.use_cache = False  # type: ignore[union-attr]
        with replaced(model, target, saving=True):
            target.save(model, _inputs(model, batch), path)
    finally:
        if cached is not None:
            config.use_cache = cached  # type: ignore[union-attr]
        model.train(training)
    rows = [target.row_of(layer.recipe) for layer in quantized_layers(model).values()]
    notes = dict.fromkeys(row.note for row in rows if row is not None and row.note is not None)
    return replace(report, notes=(*report.notes, *notes))


def _inputs(model: nn.Module, batch: Any) -> Inputs:
    args, kwargs = arguments(model, batch)
    names = list(inspect.signature(model.forward).parameters)
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    return Inputs(args, kwargs, values, {name: _dynamic(value) for name, value in values.items()})


def _dynamic(value: Any) -> Any:
    """The axes that may have any length: the first one, and the second one of token ids and masks."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return None
    axes = [0, 1] if (value.dim() == 2 and not value.is_floating_point()) or value.dim() == 3 else [0]
    return dict.fromkeys(axes, torch.export.Dim.AUTO)
