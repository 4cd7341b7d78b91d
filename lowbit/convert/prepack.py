"""prepack_ and unprepack_: a model's quantized layers in the layout that CPU kernels read, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lowbit.backends.native import features, loading_error
from lowbit.convert.adapters import Adapter
from lowbit.convert.engine import Task, convert, swap
from lowbit.convert.maker import measured
from lowbit.convert.select import Verdict
from lowbit.nn.base import kind
from lowbit.nn.conv import QuantConv
from lowbit.nn.embedding import QuantEmbedding
from lowbit.nn.linear import QuantLinear
from lowbit.nn.packed import PackedLinear
from lowbit.report import Report
from lowbit.scaling import Scheme
from lowbit.tensor.prepack import refusal

__all__ = ["no_gain_by_packing", "prepack_", "unprepack_"]

#: Stands for every layer here: what becomes of one depends on its weight alone.
_EVERY = Adapter(lambda layer, make: layer, lambda layer, made, plain: None, lambda layer: None)


def prepack_(model: nn.Module) -> Report:
    """Put the quantized weights of ``model``, in place, into the layout that CPU kernels read: for inference.

    Every ``QuantLinear`` whose recipe multiplies integers by integers (``int8``, ``w4a8``) becomes a ``PackedLinear``,
    also inside attention; its results keep every bit. The others stay as they are, and the report
    says why. ``state_dict``, copies, pickles and ``save_model`` of a packed model have plain tensors, made new, so
    that files do not depend on it. Layers that share a weight share the packed one.

    A packed model has no backward pass, so its biases no longer require grad, and it stays on the CPU: ``unprepack_``
    turns it back, biases too.
    Raises, with the model untouched: ValueError for a model without quantized layers or that is one itself; TypeError
    for what is no model.
    """
    packer = _Packer()
    embeddings = model.modules() if isinstance(model, nn.Module) else ()
    tables = {id(module.linear.codes) for module in embeddings if isinstance(module, QuantEmbedding)}

    def judge(names: list[str], module: nn.Module) -> Verdict:
        if isinstance(module, QuantLinear) and id(module.codes) in tables:
            return Verdict(reason="its weight is also an embedding's table, and packing would make a copy")
        return _to_pack(names, module)

    task = Task("prepack_", "QuantLinear", judge, packer.pack, _measure, _put_packed, optional=True)
    return convert(model, task)[0]


def unprepack_(model: nn.Module) -> Report:
    """Turn the layers of ``model`` that ``prepack_`` packed back, in place, into QuantLinears with the same bits.

    Quantized layers that are not packed stay as they are.
    Raises, with the model untouched: ValueError for a model without quantized layers or that is one itself; TypeError
    for what is no model.
    """
    packer = _Packer()
    task = Task("unprepack_", "PackedLinear", _to_unpack, packer.unpack, _measure, _put_plain, optional=True)
    return convert(model, task)[0]


def _to_pack(names: list[str], module: nn.Module) -> Verdict:
    if kind(module) == "packed":
        return Verdict(reason="packed already")
    if isinstance(module, QuantConv | QuantEmbedding):
        what = "a convolution" if isinstance(module, QuantConv) else "an embedding"
        return Verdict(reason=f"the packed layout is that of Linear layers, and it is {what}")
    if not isinstance(module, QuantLinear):
        return Verdict(inside=True)
    reason = _refusal(module)
    return Verdict(adapter=_EVERY) if reason is None else Verdict(reason=reason)


def _refusal(layer: QuantLinear) -> str | None:
    """Why a layer cannot be packed, or would be slower for it here; None where it gains."""
    weight, input = layer.scheme, layer.recipe.input
    if layer.recipe.static:
        return "packed layers support dynamic input scales only, and this layer's are static"
    reason = refusal(weight, input)
    if reason is not None or input is None:
        return reason
    device = layer.codes.device.type
    if device != "cpu":
        return f"the packed layout is the CPU's, and this layer is on {device}"
    return no_gain_by_packing(weight, input, layer.in_features)


def no_gain_by_packing(weight: Scheme, input: Scheme, cols: int) -> str | None:
    """Why ``linear_packed`` would be slower than ``linear`` here, on a weight ``[N, cols]`` of integers; None: is not.

    Every instruction set reads the packed layout; those are named here on which it was measured (docs/measured.md).
    """
    error = loading_error()
    if error is not None:
        return f"the native kernels, which read the packed layout, are not there: {error}"
    for scheme in (weight, input):
        block = scheme.block[1]
        if block is not None and (block % 8 or (scheme is weight and cols % block)):
            return f"the groups of {scheme} are not whole words of the packed layout at K = {cols}"
    isa = torch.ops.lowbit_native.isa()
    if isa == "avx2":  # 4-bit codes are multiplied as they are packed by signed bytes without a zero point
        served = weight.format.bits == 8 or (input.format.signed and not input.affine)
        return None if served else f"with AVX2, 4-bit weights are read packed under signed inputs only, not {input}"
    if isa == "avx512" and "avx512_vnni" in features() and "amx_int8" not in features():
        return None
    return f"no gain by the packed layout is recorded for the instruction set in use, {isa}"


def _to_unpack(names: list[str], module: nn.Module) -> Verdict:
    if kind(module) == "packed":
        return Verdict(adapter=_EVERY)
    return (
        Verdict(reason="not packed")
        if isinstance(module, QuantLinear | QuantConv | QuantEmbedding)
        else Verdict(inside=True)
    )


def _put_packed(model: nn.Module, made: dict[int, Any]) -> None:
    """Without a backward pass, a bias that requires grad would only have every call record one."""
    for layer in made.values():
        if layer.bias is not None and layer.bias.requires_grad:
            layer.trains_bias = True
            layer.bias.requires_grad_(False)
    swap(model, made)


def _put_plain(model: nn.Module, made: dict[int, Any]) -> None:
    old = [layer for layer in model.modules() if id(layer) in made]
    swap(model, made)
    for layer in old:
        if layer.bias is not None and layer.trains_bias:
            layer.bias.requires_grad_()


class _Packer:
    """Makes the layers of one conversion; those that share a weight get one again."""

    def __init__(self) -> None:
        self.made: dict[Any, Any] = {}

    def pack(self, layer: QuantLinear, adapter: Adapter, recipe: Any) -> PackedLinear:
        key = (id(layer.codes), id(layer.scale), layer.recipe)
        first: PackedLinear | None = self.made.get(key)
        if first is not None:
            return first.with_bias(layer.bias)
        made = self.made[key] = PackedLinear(layer.weight, layer.bias, layer.recipe)
        return made

    def unpack(self, layer: PackedLinear, adapter: Adapter, recipe: Any) -> QuantLinear:
        made = layer.unpacked()
        first: QuantLinear = self.made.setdefault(id(layer.packed), made)
        if first is not made:
            made.share_weight(first)
        return made


def _measure(layer: Any, made: Any, recipe: Any) -> dict[str, Any]:
    """What the report says of a layer."""
    weights = layer.out_features * layer.in_features
    held = sum(t.nbytes for t in (*made.parameters(), *made.buffers()) if t is not made.bias)
    return measured(layer, made, weights, 8.0 * held / max(weights, 1))
