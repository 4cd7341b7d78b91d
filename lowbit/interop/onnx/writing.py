"""Writes a model as an ONNX file."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.convert.engine import quantized_layers
from lowbit.convert.prepack import unprepack_
from lowbit.interop.files import refuse_adapters, require_library
from lowbit.interop.onnx import layers
from lowbit.interop.onnx.rows import refuses, row_of
from lowbit.models.batches import arguments
from lowbit.models.check import uncompiled
from lowbit.nn.base import kind
from lowbit.nn.conv import QuantConv
from lowbit.nn.embedding import QuantEmbedding
from lowbit.nn.linear import QuantLinear
from lowbit.report import Report, report_on
from lowbit.serialize import huggingface

__all__ = ["exportable", "write"]

#: The first opset with DequantizeLinear of FP8 and of blocks; FP4 needs 23.
_OPSET = 23


@contextmanager
def exportable(model: nn.Module) -> Iterator[nn.Module]:
    """Replace the quantized layers of a model by modules that write ONNX operators, within the block.

    ``torch.onnx.export(dynamo=True)`` and transformers' ``OnnxExporter`` export the model then. It cannot run.

    Args:
        model: A quantized model in fp32 on the CPU.

    Raises:
        ValueError: A layer has no operator, is prepared for training, or has another dtype than fp32.
    """
    replacements = _replacements(model)
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is not None and id(child) in replacements
    ]
    for parent, name, child in places:
        parent._modules[name] = replacements[id(child)]
    try:
        yield model
    finally:
        for parent, name, child in places:
            parent._modules[name] = child


def _replacements(model: nn.Module) -> dict[int, nn.Module]:
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.dtype in (torch.bfloat16, torch.float16) or not value.is_cpu:
            raise ValueError(
                f"{name!r} is {value.dtype} on {value.device}; expected fp32 on the CPU: call model.float().cpu()"
            )
    replacements: dict[int, nn.Module] = {}
    inside: set[int] = set()
    for name, module in model.named_modules():
        if kind(module) in ("qat", "training"):
            raise ValueError(f"layer {name!r} is prepared for training; call lowbit.qat.convert_ or unprepare_ first")
        if id(module) in inside:
            continue
        try:
            replacement = _made(module)
        except ValueError as error:
            raise ValueError(f"layer {name!r}: {error}") from None
        if replacement is not None:
            replacements[id(module)] = replacement
            inside |= set(map(id, module.modules()))
    return replacements


def _made(module: nn.Module) -> nn.Module | None:
    """The module that writes a quantized layer; None for other modules."""
    if isinstance(module, QuantEmbedding):
        return layers.Embedding(module)
    if not isinstance(module, QuantLinear | QuantConv):
        return None
    recipe = module.recipe
    refusal = refuses(recipe)
    row = row_of(recipe)
    if isinstance(module, QuantConv) and (row is None or row.name not in ("QuantizeLinear", "DequantizeLinear")):
        raise ValueError(
            f"recipe {recipe.name!r}: ONNX has convolutions with static inputs or FP8 weights only; use int8-static"
        )
    if row is None or refusal is not None:
        assert refusal is not None
        raise ValueError(f"recipe {recipe.name!r}: {refusal.why}; the nearest recipe that works is {refusal.nearest!r}")
    return layers.Conv(module) if isinstance(module, QuantConv) else row.make(module)


@torch.no_grad()
def write(model: nn.Module, path: str | Path, batch: Any = None) -> Report:
    """Write a model as an ONNX file, for ONNX Runtime; weights beyond 2 GB are in a file next to it.

    The axes of batches and of token sequences may have any length in the file.

    Args:
        model: A model in fp32 on the CPU, quantized or not.
        path: The file.
        batch: An example batch: a tensor, a tuple of arguments, or a dict of keyword arguments. None: the dummy inputs
            of a model of transformers.

    Returns:
        The report, with a row for each quantized layer.

    Raises:
        ImportError: onnx and onnxscript are not installed.
        ValueError: A layer has no operator, or the model has adapters that are not merged.
        RuntimeError: torch cannot export the model.
    """
    model, path = uncompiled(model), Path(path)
    for name in ("onnx", "onnxscript"):
        require_library(name)
    refuse_adapters(model, "onnx has none")
    report = report_on("export", model, quantized_layers(model), f"written to {path}")
    if batch is None:
        if not huggingface.is_pretrained(model):
            raise ValueError("export: 'onnx' needs an example batch: lb.export(model, 'onnx', path, batch=batch)")
        batch = dict(model.dummy_inputs)  # type: ignore[operator, arg-type]
    training, packed = model.training, [m for m in model.modules() if kind(m) == "packed"]
    if packed:
        unprepack_(model)
    model.eval()
    try:
        with exportable(model):
            program = _program(model, batch)
        path.parent.mkdir(parents=True, exist_ok=True)
        program.save(str(path))
    finally:
        model.train(training)
    rows = [row_of(module.recipe) for module in model.modules() if isinstance(module, QuantLinear)]
    notes = dict.fromkeys(row.note for row in rows if row is not None and row.note is not None)
    return replace(report, notes=(*report.notes, *notes))


def _program(model: nn.Module, batch: Any) -> Any:
    args, kwargs = arguments(model, batch)
    names = list(inspect.signature(model.forward).parameters)
    inputs = {**dict(zip(names, args, strict=False)), **kwargs}
    shapes = {name: _dynamic(value) for name, value in inputs.items()}
    config = getattr(model, "config", None) if huggingface.is_pretrained(model) else None
    cached = getattr(config, "use_cache", None)
    if cached is not None:
        config.use_cache = False  # type: ignore[union-attr]
    try:
        return torch.onnx.export(
            model, (), kwargs=inputs, dynamic_shapes=shapes, dynamo=True, opset_version=_OPSET, verbose=False
        )
    finally:
        if cached is not None:
            config.use_cache = cached  # type: ignore[union-attr]


def _dynamic(value: Any) -> Any:
    """The axes that may have any length: the first one, and the second one of token ids and masks."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return None
    axes = [0, 1] if (value.dim() == 2 and not value.is_floating_point()) or value.dim() == 3 else [0]
    return dict.fromkeys(axes, torch.export.Dim.AUTO)
