"""Puts modules that write a format's operators in the place of quantized layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from lowbit.convert.engine import take_over
from lowbit.interop.graphs.layers import Layer
from lowbit.interop.graphs.rows import Target
from lowbit.models.adapters import has_adapters
from lowbit.nn.base import kind
from lowbit.nn.conv import QuantConv
from lowbit.nn.embedding import QuantEmbedding
from lowbit.nn.experts import QuantExperts
from lowbit.nn.linear import QuantLinear
from lowbit.nn.packed import PackedLinear
from lowbit.report import family

__all__ = ["put_operators_", "with_operators"]


class _Operator(NamedTuple):
    """The module that writes a layer, and a note for the report; None: the layer keeps its own forward."""

    module: Layer | None
    note: str | None = None


class _Operators(NamedTuple):
    """The modules that write layers, by the id of the layer, and the notes for the report."""

    modules: dict[int, Layer]
    notes: tuple[str, ...]


@contextmanager
def with_operators(model: nn.Module, target: Target, saving: bool = False) -> Iterator[tuple[str, ...]]:
    """Give a model the operators of a format in place of its quantized layers, within the block.

    Args:
        model: A model in fp32 on the CPU.
        target: The format.
        saving: Whether the format's own ``save`` follows, which some rows need.

    Yields:
        The notes of the operators, for the report.

    Raises:
        ValueError: A layer has no operator, is prepared for training or has another dtype than fp32; the model has
            adapters that are not merged, or is a quantized layer itself.
    """
    operators = _operators(model, target, saving)
    places = _put(model, operators.modules)
    try:
        yield operators.notes
    finally:
        for parent, name, child in places:
            parent._modules[name] = child


def put_operators_(model: nn.Module, target: Target) -> None:
    """The same for good. Raises ValueError likewise; the model is unchanged then."""
    _put(model, _operators(model, target, saving=False).modules)


def _put(model: nn.Module, operators: dict[int, Layer]) -> list[tuple[nn.Module, str, nn.Module]]:
    """Put the modules in place. Returns each parent, name and former child."""
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is not None and id(child) in operators
    ]
    for parent, name, child in places:
        parent._modules[name] = operators[id(child)]
    return places


def _operators(model: nn.Module, target: Target, saving: bool) -> _Operators:
    """The modules for all quantized layers."""
    _require_fp32(model)
    if has_adapters(model):
        raise ValueError(
            f"export: this {type(model).__name__} has adapters of peft, and {target.name} has none; merge them: "
            f"model = model.merge_and_unload()"
        )
    operators: dict[int, Layer] = {}
    notes: list[str | None] = []
    inside: set[int] = set()
    for name, module in model.named_modules():
        if kind(module) in ("qat", "training"):
            raise ValueError(f"layer {name!r} is prepared for training; call lowbit.qat.convert_ or unprepare_ first")
        if id(module) in inside:
            continue
        try:
            row = _operator(name, module, target, saving)
        except ValueError as error:
            raise ValueError(f"layer {name!r}: {error}") from None
        if row is None:
            continue
        notes.append(row.note)
        if row.module is None:
            continue
        if not name:
            raise ValueError("the model itself is a quantized layer; export nn.Sequential(model) instead")
        operators[id(module)] = row.module.stand_for(module)
        take_over(row.module, module)
        inside |= set(map(id, module.modules()))
    return _Operators(operators, tuple(dict.fromkeys(note for note in notes if note is not None)))


def _require_fp32(model: nn.Module) -> None:
    tensors = {name: (value.dtype, value.device) for name, value in (*model.named_parameters(), *model.named_buffers())}
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear | PackedLinear):
            tensors[f"{name}.weight"] = module.weight.dtype, torch.device("cpu")
    for name, (dtype, device) in tensors.items():
        if device.type == "meta":
            raise ValueError(f"{name!r} is on the meta device and has no values; load the model first")
        if device.type != "cpu" or (dtype.is_floating_point and dtype.itemsize > 1 and dtype != torch.float32):
            raise ValueError(f"{name!r} is {dtype} on {device}; expected fp32 on the CPU: call model.float().cpu()")


def _experts(name: str, experts: QuantExperts, target: Target) -> _Operator:
    """The module that writes the experts of a mixture; without an operator for them, each expert has its own layers."""
    row = target.experts_row_of(experts)
    if isinstance(row, str):
        return _Operator(None, f"in {family(name)} each expert computes every token: {row}")
    return _Operator(row.make(experts), row.note)


def _operator(name: str, module: nn.Module, target: Target, saving: bool) -> _Operator | None:
    """The module that writes a quantized layer; None for other modules."""
    if isinstance(module, QuantExperts):
        return _experts(name, module, target)
    if isinstance(module, QuantEmbedding):
        if module.linear.rotation is not None:
            raise ValueError("its weight is rotated by a Hadamard transform; quantize it with 'int8-weight-only'")
        if module.weight.scheme.reference_only:
            raise ValueError(
                f"{target.name} has no minima and no superblocks, as {module.weight.scheme} has; quantize it with "
                f"'int8-weight-only'"
            )
        return _Operator(target.embedding(module))
    if isinstance(module, PackedLinear):
        module = module.unpacked()
    if not isinstance(module, QuantLinear | QuantConv):
        return None
    recipe, row = module.recipe, target.row_of(module.recipe)
    conv = isinstance(module, QuantConv)
    refusal = target.refuses_convolutions(recipe) if conv else target.refuses(recipe)
    if row is None or refusal is not None:
        assert refusal is not None
        raise ValueError(f"recipe {recipe.name!r}: {refusal.why}; the nearest recipe that works is {refusal.nearest!r}")
    if not (row.complete or saving):
        raise ValueError(
            f"recipe {recipe.name!r}: only lb.export writes it to {target.name}; other exporters have int4"
        )
    if isinstance(module, QuantConv):
        assert row.convolution is not None
        return _Operator(row.convolution(module), row.note)
    return _Operator(row.make(module), row.note)
