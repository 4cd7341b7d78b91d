"""Writes a model as a graph."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from lowbit.convert.engine import quantized_layers
from lowbit.interop.files import require_library
from lowbit.interop.graphs.replacing import with_operators
from lowbit.interop.graphs.rows import Target
from lowbit.interop.graphs.tracing import inputs_of
from lowbit.models.check import uncompiled
from lowbit.report import Report, report_on
from lowbit.serialize import huggingface

__all__ = ["write"]


@torch.no_grad()
def write(model: nn.Module, path: str | Path, batch: Any = None, *, target: Target) -> Report:
    """Write a model as a graph, in which the axes of batches and of token sequences may have any length.

    The files get their names when all are complete.

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
        ValueError: A layer has no operator, the model has adapters that are not merged, or the path has another suffix
            than the format's.
        RuntimeError: torch cannot export the model.
    """
    model, path = uncompiled(model), Path(path)
    for name in target.packages:
        require_library(name)
    if target.suffix is not None and path.suffix != target.suffix:
        raise ValueError(f"export: {path} must end in {target.suffix} for {target.name!r}")
    report = report_on("export", model, quantized_layers(model), f"written to {path}")
    if batch is None:
        if not huggingface.is_pretrained(model):
            raise ValueError(
                f"export: {target.name!r} needs an example batch: lb.export(model, {target.name!r}, path, batch=batch)"
            )
        batch = dict(model.dummy_inputs)  # type: ignore[operator, arg-type]
    training = {module: module.training for module in model.modules()}
    config = getattr(model, "config", None) if huggingface.is_pretrained(model) else None
    cached = getattr(config, "use_cache", None)
    try:
        model.eval()
        if cached is not None:
            config.use_cache = False  # type: ignore[union-attr]
        with with_operators(model, target, saving=True) as notes:
            inputs = inputs_of(model, batch)
            path.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
                target.save(model, inputs, Path(folder) / path.name)
                for file in Path(folder).iterdir():
                    os.replace(file, path.parent / file.name)
    finally:
        if cached is not None:
            config.use_cache = cached  # type: ignore[union-attr]
        for module, mode in training.items():
            module.training = mode
    return replace(report, notes=(*report.notes, *notes))
