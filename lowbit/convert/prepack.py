"""prepack_ and unprepack_: convert quantized layers to the packed layout of the CPU kernels, and back."""

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
from lowbit.tensor.pages import side_by_side
from lowbit.tensor.prepack import refusal

__all__ = ["no_gain_by_packing", "prepack_", "unprepack_"]

#: The adapter of every layer: packing depends on the weight alone.
_EVERY = Adapter(lambda layer, make: layer, lambda layer, quantized, plain: None, lambda layer: None)


def prepack_(model: nn.Module) -> Report:
    """Convert the quantized weights of ``model`` to the layout of the CPU kernels, in place, for inference.

    Every ``QuantLinear`` whose recipe multiplies integers by integers (``int8``, ``w4a8``), also inside attention,
    becomes a ``PackedLinear``. Results are bit-identical. Layers that share a weight share the packed weight.
    ``state_dict``, copies, pickles and ``save_model`` of a packed model contain unpacked tensors, so files do not
    depend on the layout.

    A packed model has no backward pass and stays on the CPU, and its biases no longer require grad. ``unprepack_``
    undoes this.

    Args:
        model: A quantized model.

    Returns:
        The report, with the reason for each layer that was not packed.

    Raises:
        ValueError: The model has no quantized layers, or is one itself. The model is unchanged.
        TypeError: ``model`` is not an nn.Module.
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
    """Undo ``prepack_`` in place: packed layers become bit-identical QuantLinears.

    Args:
        model: A quantized model. Layers that are not packed stay as they are.

    Returns:
        The report of the unpacked layers.

    Raises:
        ValueError: The model has no quantized layers, or is one itself. The model is unchanged.
        TypeError: ``model`` is not an nn.Module.
    """
    packer = _Packer()
    task = Task("unprepack_", "PackedLinear", _to_unpack, packer.unpack, _measure, _put_plain, optional=True)
    return convert(model, task)[0]


def _to_pack(names: list[str], module: nn.Module) -> Verdict:
    if kind(module) == "packed":
        return Verdict(reason="packed already")
    if isinstance(module, QuantConv | QuantEmbedding):
        words = "a convolution" if isinstance(module, QuantConv) else "an embedding"
        return Verdict(reason=f"the packed layout is for Linear layers, and it is {words}")
    if not isinstance(module, QuantLinear):
        return Verdict(inside=True)
    reason = _refusal(module)
    return Verdict(adapter=_EVERY) if reason is None else Verdict(reason=reason)


def _refusal(layer: QuantLinear) -> str | None:
    """Why a layer cannot be packed, or would not be faster on this CPU; None if it gains."""
    weight, input = layer.scheme, layer.recipe.input
    if layer.recipe.reordered:
        return "packed layers have their columns in the order of the input"
    if layer.recipe.static:
        return "packed layers support dynamic input scales only, and this layer's are static"
    reason = refusal(weight, input)
    if reason is not None or input is None:
        return reason
    device = layer.codes.device.type
    if device != "cpu":
        return f"the packed layout is for CPUs, and this layer is on {device}"
    return no_gain_by_packing(weight, input, layer.in_features)


def no_gain_by_packing(weight: Scheme, input: Scheme, cols: int) -> str | None:
    """Why packing an integer weight ``[N, cols]`` would not make ``linear`` faster on this CPU; None if it would.

    Every instruction set can read the packed layout. This function packs on those with a gain in docs/measured.md.
    """
    error = loading_error()
    if error is not None:
        return f"the native kernels, which read the packed layout, are not available: {error}"
    for scheme in (weight, input):
        block = scheme.block[1]
        if block is not None and block % 8 and block < cols:
            return f"the groups of {scheme} are not whole words of the packed layout"
    isa = torch.ops.lowbit_native.isa()
    if isa == "avx2":  # its kernel multiplies packed 4-bit codes by signed bytes without a zero point
        supported = weight.format.bits == 8 or (input.format.signed and not input.affine)
        return None if supported else f"with AVX2, packed 4-bit weights need signed inputs, not {input}"
    if isa == "avx512" and "avx512_vnni" in features():
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


def _put_packed(model: nn.Module, layers: dict[int, Any]) -> None:
    for layer in layers.values():
        # There is no backward pass, and a bias that requires grad would make every call record a graph.
        if layer.bias is not None and layer.bias.requires_grad:
            layer.trains_bias = True
            layer.bias.requires_grad_(False)
    distinct = {id(layer.packed): layer.packed for layer in layers.values()}
    moved = dict(zip(distinct, side_by_side(list(distinct.values())), strict=True))
    for layer in layers.values():
        layer.packed = moved[id(layer.packed)]
    swap(model, layers)


def _put_plain(model: nn.Module, layers: dict[int, Any]) -> None:
    packed = [layer for layer in model.modules() if id(layer) in layers]
    swap(model, layers)
    for layer in packed:
        if layer.bias is not None and layer.trains_bias:
            layer.bias.requires_grad_()


class _Packer:
    """Makes the layers of one conversion. Layers that shared a weight share it again."""

    def __init__(self) -> None:
        self.layers: dict[Any, Any] = {}

    def pack(self, layer: QuantLinear, adapter: Adapter, recipe: Any) -> PackedLinear:
        key = (id(layer.codes), id(layer.scale), layer.recipe)
        first: PackedLinear | None = self.layers.get(key)
        if first is not None:
            return first.with_bias(layer.bias)
        packed = self.layers[key] = PackedLinear(layer.weight, layer.bias, layer.recipe)
        return packed

    def unpack(self, layer: PackedLinear, adapter: Adapter, recipe: Any) -> QuantLinear:
        plain = layer.unpacked()
        first: QuantLinear = self.layers.setdefault(id(layer.packed), plain)
        if first is not plain:
            plain.share_weight(first)
        return plain


def _measure(layer: Any, new: Any, recipe: Any) -> dict[str, Any]:
    weights = layer.out_features * layer.in_features
    weight_bytes = sum(t.nbytes for t in (*new.parameters(), *new.buffers()) if t is not new.bias)
    return measured(layer, new, weights, 8.0 * weight_bytes / max(weights, 1))
