"""conv: a convolution over 1, 2 or 3 spatial axes in one op, as a matmul of patches of ``x`` and the weight.

Axes are in channels-last order: ``x [N, *S, C]``, result ``[N, *S', O]``. The weight is the matrix
``[O, taps * C / groups]``, with one tap per kernel position. For an nn.Conv2d it is
``weight.movedim(1, -1).flatten(1)``, so channels of one pixel share a scale along K. With one row (one patch of ``x``)
per output position, each group is bit-identical to ``linear``. No kernel stores all patches in memory.

The scaling of the input scheme decides how x is quantized. With one scale per tensor, each element of ``x`` is
quantized once, and padding is the code of zero. With finer scales, each patch has its own scales, like a row in
``linear``. Source: docs/numerics.md section 9.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lowbit import reference, scaling
from lowbit.ops import matmul
from lowbit.ops.linear import input_scales, scale_arguments, weight_scales
from lowbit.ops.matmul import ScaledMM
from lowbit.ops.spec import (
    FLOATS,
    Cost,
    Numerics,
    OpSpec,
    Out,
    require,
    require_codes,
    require_float,
    require_input,
    require_scales,
)
from lowbit.scaling import Scheme
from lowbit.tensor import packing
from lowbit.tensor.quantized import Scales


class Window(NamedTuple):
    """The arguments of ``Conv`` that say which pixels each output reads. ``padding``: two numbers per axis."""

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    def padded(self, x: Tensor) -> Tensor:
        """``x [N, *S, C]`` with its padding."""
        pairs = zip(self.padding[-2::-2], self.padding[::-2], strict=True)
        return F.pad(x, (0, 0, *(size for pair in pairs for size in pair)))

    def unfold(self, x: Tensor) -> Tensor:
        """The patches of ``x [N, *S, C]``: ``[N, *S', groups, taps * C / groups]``."""
        x, axes = self.padded(x), range(1, 1 + len(self.kernel_size))
        for axis, size, stride, dilation in zip(axes, self.kernel_size, self.stride, self.dilation, strict=True):
            x = x.unfold(axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
        split: Tensor = x.unflatten(len(axes) + 1, (self.groups, -1))  # [N, *S', groups, C / groups, *taps]
        return split.movedim(len(axes) + 2, -1).flatten(len(axes) + 2)

    def filters(self, matrix: Tensor) -> Tensor:
        """A weight ``[O, taps * C / groups]`` in torch's layout: ``[O, C / groups, *kernel_size]``."""
        filters: Tensor = matrix.unflatten(1, (*self.kernel_size, -1))  # type: ignore[no-untyped-call]
        return filters.movedim(-1, 1)

    def convolve(self, x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        """torch's convolution of ``x [N, *S, C]`` with a weight ``[O, taps * C / groups]``: ``[N, *S', O]``."""
        images = self.padded(x).movedim(-1, 1)
        zeros = (0,) * len(self.kernel_size)
        y = torch.convolution(
            images, self.filters(matrix), bias, self.stride, zeros, self.dilation, False, zeros, self.groups
        )
        return y.movedim(1, -1)

    def gradients(
        self, grad: Tensor, x: Tensor, matrix: Tensor, wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of ``convolve`` for ``x`` and ``matrix``; None if not ``wanted``. Each reads only the other."""
        zeros = (0,) * len(self.kernel_size)
        images = self.padded(x).movedim(-1, 1)
        of_images, of_filters, _ = torch.ops.aten.convolution_backward(
            grad.movedim(-1, 1), images, self.filters(matrix), None, self.stride, zeros, self.dilation, False, zeros,
            self.groups, (*wanted, False),
        )  # fmt: skip
        of_x = of_matrix = None
        if wanted[0]:
            of_x = of_images.movedim(1, -1)
            for axis, size in enumerate(x.shape[1:-1]):
                of_x = of_x.narrow(1 + axis, self.padding[2 * axis], size)
        if wanted[1]:
            of_matrix = of_filters.movedim(1, -1).flatten(1)
        return of_x, of_matrix


class Conv(NamedTuple):
    """The arguments of ``conv``.

    Attributes:
        x: ``[N, *S, C]`` float, or 8-bit codes in ``input_scheme`` with ``input_scale``.
        weight: Stored codes ``[O, packed taps * C / groups]``. As in layers, floating-point scales may be integers with
            the same bits.
        kernel_size, stride, dilation: One number per axis of S.
        padding: Two numbers per axis: the zeros before and after it.
        input_scheme, out_scheme: As in ``linear``, for a result ``[N * S', O]``. ``input_scale`` is one per tensor.
    """

    x: Tensor
    weight: Tensor
    scheme: str
    scale: Tensor
    zero_point: Tensor | None
    global_scale: Tensor | None
    bias: Tensor | None
    kernel_size: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int = 1
    input_scheme: str | None = None
    out_dtype: torch.dtype = torch.bfloat16
    input_scale: Tensor | None = None
    input_zero_point: Tensor | None = None
    input_global_scale: Tensor | None = None
    out_scheme: str | None = None
    out_scale: Tensor | None = None
    out_zero_point: Tensor | None = None


def window(call: Conv) -> Window:
    sizes, strides, zeros, dilations = map(tuple, (call.kernel_size, call.stride, call.padding, call.dilation))
    return Window(sizes, strides, zeros, dilations, call.groups)


def spans_tensor(scheme: Scheme) -> bool:
    """Whether x is quantized once, with one scale, instead of patch by patch."""
    return scheme.block == (None, None)


def out_sizes(call: Conv) -> tuple[int, ...]:
    """S', the output size along each axis; 0 or less if the kernel is larger than the padded input."""
    axes = zip(call.x.shape[1:-1], call.kernel_size, call.stride, call.padding[::2], call.padding[1::2], call.dilation,
               strict=True)  # fmt: skip
    return tuple((size + before + after - d * (k - 1) - 1) // s + 1 for size, k, s, before, after, d in axes)


def columns(call: Conv) -> int:
    """The length of a patch of one group."""
    return call.x.shape[-1] // call.groups * prod(call.kernel_size)


# -- patches -----------------------------------------------------------------------------------------------------------
def pixels(x: Tensor) -> Tensor:
    """``x [N, *S, C]`` as ``[N * S + 1, C]``: the last row is zeros, for padding."""
    rows = x.reshape(-1, x.shape[-1])
    return torch.cat([rows, rows.new_zeros(1, x.shape[-1])])


def coded_pixels(call: Conv, scales: Scales) -> Tensor:
    """``pixels`` for an x that holds codes: the last row is the codes of zeros."""
    zeros = torch.zeros(1, call.x.shape[-1], device=scales.scale.device)  # x is on meta when a backend asks its kernels
    codes = reference.quantize_static(zeros, scaling.scheme(call.input_scheme or ""), *scales, None)
    return torch.cat([call.x.reshape(-1, call.x.shape[-1]), codes.to(call.x.device)])


def patches(source: Tensor, call: Conv, group: int, begin: int, end: int) -> Tensor:
    """Rows ``begin`` to ``end`` of a group's patch matrix. ``source``: ``pixels(x)`` or its codes."""
    outs, device = out_sizes(call), source.device
    position = torch.arange(begin, end, device=device)
    at = torch.zeros(end - begin, 1, dtype=torch.long, device=device)
    outside = torch.zeros(end - begin, 1, dtype=torch.bool, device=device)
    step = 1
    for axis in reversed(range(len(outs))):
        size, taps = call.x.shape[1 + axis], torch.arange(call.kernel_size[axis], device=device)
        along = (
            (position % outs[axis])[:, None] * call.stride[axis] + taps * call.dilation[axis] - call.padding[2 * axis]
        )
        position = position // outs[axis]
        at = (along[:, :, None] * step + at[:, None]).flatten(1)
        outside = (((along < 0) | (along >= size))[:, :, None] | outside[:, None]).flatten(1)
        step *= size
    at = (at + position[:, None] * step).masked_fill(outside, source.shape[0] - 1)
    channels = call.x.shape[-1] // call.groups
    return source[:, group * channels : (group + 1) * channels][at].flatten(1)


# -- weights -----------------------------------------------------------------------------------------------------------
class Weight(NamedTuple):
    """The weight rows of one group, with their scales."""

    codes: Tensor
    scheme: str
    scale: Tensor
    zero_point: Tensor | None
    global_scale: Tensor | None


def group_weight(call: Conv, group: int) -> Weight:
    """The weight of a group. Scales that several groups share are repeated if a slice would not fit the scheme."""
    weight = Weight(call.weight, call.scheme, *weight_scales(call))
    if call.groups == 1:
        return weight
    scheme = scaling.scheme(call.scheme)
    rows = call.weight.shape[0] // call.groups
    part = slice(group * rows, (group + 1) * rows)
    tall = scheme.block[0]
    if tall is not None and rows % tall:
        weight = _by_row(weight, scheme)
        tall = 1
    if tall is None:
        return weight._replace(codes=weight.codes[part])
    blocks = slice(group * rows // tall, (group + 1) * rows // tall)
    global_scale = weight.global_scale
    return Weight(
        weight.codes[part], weight.scheme, weight.scale[blocks],
        None if weight.zero_point is None else weight.zero_point[blocks],
        global_scale[part]
        if global_scale is not None and scaling.scheme(weight.scheme).global_scale in ("row", "superblock")
        else global_scale,
    )  # fmt: skip


def _by_row(weight: Weight, scheme: Scheme) -> Weight:
    """The same weight in a scheme with scales per row."""
    rows, tall = weight.codes.shape[0], scheme.block[0]
    assert tall is not None

    def repeated(scales: Tensor) -> Tensor:
        return scales.repeat_interleave(tall, 0)[:rows]

    cols = scheme.block[1]
    options = [
        option
        for option, has in (
            ("min" if scheme.minimum else "affine", scheme.affine), ("global_row", scheme.global_scale is not None),
        )
        if has
    ]  # fmt: skip
    if scheme.scale_format.name != "fp32":
        options.insert(0, {"fp8_e4m3": "e4m3"}.get(scheme.scale_format.name, scheme.scale_format.name))
    words = [scheme.format.name, "row" if cols is None else f"group{cols}", *options]
    global_scale = weight.global_scale
    return Weight(
        weight.codes, scaling.scheme(":".join(words)).name, repeated(weight.scale),
        None if weight.zero_point is None else repeated(weight.zero_point),
        None if global_scale is None else global_scale.expand(rows, 1),
    )  # fmt: skip


# -- the definition ----------------------------------------------------------------------------------------------------
def product(call: Conv, group: int, a: Tensor, scales: Scales | None, out_dtype: torch.dtype) -> ScaledMM:
    """The matmul of some patches of a group (floats, or codes with ``scales``) and the weight."""
    w = group_weight(call, group)
    rows = w.codes.shape[0]
    bias = None if call.bias is None else call.bias[group * rows : (group + 1) * rows]
    return ScaledMM(
        a, w.codes, columns(call), call.input_scheme, w.scheme, *scale_arguments(scales),
        w.scale, w.zero_point, w.global_scale, bias, out_dtype,
    )  # fmt: skip


def products(call: Conv) -> list[ScaledMM]:
    """The matmul of each group over all its patches, quantized by the reference."""
    source, rows = pixels(call.x), call.x.shape[0] * prod(out_sizes(call))
    dtype = call.out_dtype if call.out_scheme is None else torch.float32
    groups = range(call.groups)
    if call.input_scheme is None:
        return [product(call, g, patches(source, call, g, 0, rows), None, dtype) for g in groups]
    scheme = scaling.scheme(call.input_scheme)
    global_scale = reference.global_scale(source, scheme) if scheme.global_scale == "tensor" else None
    calls: list[ScaledMM] = []
    scales = input_scales(call)
    if scales is not None and call.x.dtype == torch.uint8:
        codes = coded_pixels(call, scales)
    elif scales is not None:
        codes = reference.quantize_static(source, scheme, *scales, None)
    elif spans_tensor(scheme):
        codes, scale, zero = reference.quantize(source, scheme, global_scale, None)
        scales = Scales(scale, zero, global_scale)
    for g in groups:
        if spans_tensor(scheme):
            operand = patches(codes, call, g, 0, rows)
        else:
            operand = patches(source, call, g, 0, rows)
            group_scale = reference.global_scale(operand, scheme) if scheme.global_scale == "row" else global_scale
            operand, scale, zero = reference.quantize(operand, scheme, group_scale, None)
            scales = Scales(scale, zero, group_scale)
        calls.append(product(call, g, packing.pack(operand, scheme.format.bits), scales, dtype))
    return calls


# -- the op ------------------------------------------------------------------------------------------------------------
def _outputs(call: Conv) -> list[Out]:
    shape, cols = (call.x.shape[0], *out_sizes(call)), call.weight.shape[0]
    if call.out_scheme is not None:
        return [((*shape, scaling.scheme(call.out_scheme).packed_cols(cols)), torch.uint8)]
    return [((*shape, cols), call.out_dtype)]


def _check(call: Conv) -> None:
    require_input("conv", call.x, call.input_scheme, call.input_scale)
    _check_geometry(call)
    require_codes("conv", "weight", call.weight)
    scheme, cols = scaling.scheme(call.scheme), columns(call)
    rows = call.weight.shape[0]
    require(
        call.weight.dim() == 2 and call.weight.shape[1] == scheme.packed_cols(cols) and rows % call.groups == 0,
        f"lowbit.conv: with {call.x.shape[-1]} channels in {call.groups} groups and a kernel of "
        f"{list(call.kernel_size)}, the weight in {scheme} must be [out channels, a multiple of {call.groups}; "
        f"{scheme.packed_cols(cols)}] bytes, got {list(call.weight.shape)}",
    )
    require_scales("conv", scheme, rows, cols, *weight_scales(call))
    require(call.out_dtype in FLOATS, f"lowbit.conv: out_dtype must be a 16- or 32-bit float, got {call.out_dtype}")
    if call.bias is not None:
        require_float("conv", "bias", call.bias)
        require(tuple(call.bias.shape) == (rows,), f"lowbit.conv: bias must be [{rows}], got {list(call.bias.shape)}")
    _check_scales(call)


def _check_geometry(call: Conv) -> None:
    axes = call.x.dim() - 2
    require(1 <= axes <= 3, f"lowbit.conv: x must be [N, *S, C] with 1 to 3 axes S, got {list(call.x.shape)}")
    for name, least, count in (("kernel_size", 1, axes), ("stride", 1, axes), ("dilation", 1, axes),
                               ("padding", 0, 2 * axes)):  # fmt: skip
        sizes = getattr(call, name)
        require(
            len(sizes) == count and all(v >= least for v in sizes),
            f"lowbit.conv: {name} must be {count} numbers of at least {least} for x {list(call.x.shape)}, "
            f"got {list(sizes)}",
        )
    channels = call.x.shape[-1]
    require(
        call.groups >= 1 and channels >= 1 and channels % call.groups == 0,
        f"lowbit.conv: x has {channels} channels, its last axis, which groups={call.groups} must divide",
    )
    require(
        all(size >= 1 for size in out_sizes(call)),
        f"lowbit.conv: the kernel {list(call.kernel_size)} with dilation {list(call.dilation)} is larger than the "
        f"padded input; got x {list(call.x.shape)} and padding {list(call.padding)}",
    )


def _check_scales(call: Conv) -> None:
    """Check that scales come with a scheme and fit it."""
    scheme = None if call.input_scheme is None else scaling.scheme(call.input_scheme)
    if call.input_scale is not None:
        if scheme is None:
            raise ValueError(
                "lowbit.conv: input_scale is the scale of an input_scheme; give that too, or leave input_scale out"
            )
        require(
            spans_tensor(scheme),
            f"lowbit.conv: a given input_scale is one for the tensor, and {scheme} has finer ones; use "
            f"'{scheme.format}:tensor' (with ':affine' for a zero point), or leave input_scale out",
        )
        require_scales("conv", scheme, 1, 1, call.input_scale, call.input_zero_point, call.input_global_scale)
    else:
        require(
            call.input_zero_point is None and call.input_global_scale is None,
            "lowbit.conv: input_zero_point and input_global_scale come with an input_scale; give that too",
        )
    if call.out_scheme is None:
        require(
            call.out_scale is None and call.out_zero_point is None,
            "lowbit.conv: out_scale and out_zero_point are those of an out_scheme; give that too",
        )
        return
    scheme, shape = scaling.scheme(call.out_scheme), (call.x.shape[0] * prod(out_sizes(call)), call.weight.shape[0])
    require(
        call.out_scale is not None and not scheme.global_scale,
        f"lowbit.conv: a result in {scheme} needs a given out_scale, and a scheme without a global scale; for scales "
        "made of the result, quantize what conv returns",
    )
    require_scales("conv", scheme, *shape, call.out_scale, call.out_zero_point, None)  # type: ignore[arg-type]


def _cost(call: Conv) -> Cost:
    elements = call.x.shape[0] * prod(out_sizes(call)) * call.weight.shape[0]
    moved = sum(t.numel() * t.element_size() for t in call if isinstance(t, Tensor))
    return Cost(2 * elements * columns(call), moved + elements * call.out_dtype.itemsize)


def _tolerance(call: Conv, numerics: Numerics) -> Tensor:
    bounds = [matmul.tolerance(product, numerics) for product in products(call)]
    if not bounds[0].dim():
        return bounds[0]
    return torch.cat(bounds, 1).reshape(call.x.shape[0], *out_sizes(call), call.weight.shape[0])


SPECS = (OpSpec("conv", Conv, ("out",), _outputs, _check, _cost, _tolerance),)
