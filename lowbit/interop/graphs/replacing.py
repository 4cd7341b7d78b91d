"""Replaces quantized layers by the modules that write them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lowbit.interop.graphs.rows import Target
from lowbit.nn.base import kind
from lowbit.nn.conv import QuantConv
from lowbit.nn.embedding import QuantEmbedding
from lowbit.nn.linear import QuantLinear
from lowbit.nn.packed import PackedLinear

__all__ = ["replace_", "replaced"]


@contextmanager
def replaced(model: nn.Module, target: Target, saving: bool = False) -> Iterator[nn.Module]:
    """Replace the quantized layers of a model by modules that write operators of a format, within the block.

    Args:
        model: A model in fp32 on the CPU.
        target: The format.
        saving: Whether the format's own ``save`` follows, which some rows need.

    Raises:
        ValueError: A layer has no operator, is prepared for training, or has another dtype than fp32.
    """
    places = _put(model, _replacements(model, target, saving))
    try:
        yield model
    finally:
        for parent, name, child in places:
            parent._modules[name] = child


def replace_(model: nn.Module, target: Target) -> None:
    """The same for good. Raises ValueError likewise; the model is unchanged then."""
    _put(model, _replacements(model, target, saving=False))


def _put(model: nn.Module, replacements: dict[int, nn.Module]) -> list[tuple[nn.Module, str, nn.Module]]:
    """Put the replacements in place. Returns each parent, name and former child."""
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is not None and id(child) in replacements
    ]
    for parent, name, child in places:
        parent._modules[name] = replacements[id(child)]
    return places


def _replacements(model: nn.Module, target: Target, saving: bool) -> dict[int, nn.Module]:
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
            replacement = _made(module, target, saving)
        except ValueError as error:
            raise ValueError(f"layer {name!r}: {error}") from None
        if replacement is not None:
            replacements[id(module)] = replacement
            inside |= set(map(id, module.modules()))
    return replacements


def _made(module: nn.Module, target: Target, saving: bool) -> nn.Module | None:
    """The module that writes a quantized layer; None for other modules."""
    if isinstance(module, QuantEmbedding):
        return target.embedding(module)
    if isinstance(module, PackedLinear):
        module = module.unpacked()
    if not isinstance(module, QuantLinear | QuantConv):
        return None
    recipe = module.recipe
    row = target.row_of(recipe)
    if isinstance(module, QuantConv):
        if row is None or row.convolution is None:
            raise ValueError(f"recipe {recipe.name!r}: {target.name} has convolutions with {target.convolutions} only")
        return row.convolution(module)
    refusal = target.refuses(recipe)
    if row is None or refusal is not None:
        assert refusal is not None
        raise ValueError(f"recipe {recipe.name!r}: {refusal.why}; the nearest recipe that works is {refusal.nearest!r}")
    if not (row.complete or saving):
        raise ValueError(f"recipe {recipe.name!r}: only lb.export writes it to {target.name}; the others can use int4")
    return row.make(module)
