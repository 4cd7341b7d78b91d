"""Host side of convolutions: selects how patches are read and quantized, and the matmul kernel."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.kernels import conv, integers, operands, weight_only
from lowbit.kernels import products as matrices
from lowbit.kernels.arguments import dense, dtype_of, pattern
from lowbit.kernels.launch import Rounding, quantize_dynamic, quantize_static
from lowbit.kernels.spec import Launch, format_spec, power_of_two, scale_spec
from lowbit.ops.conv import Conv, columns, out_sizes, spans_tensor
from lowbit.ops.matmul import ScaledMM, Side
from lowbit.ops.spec import stored_global, stored_scale
from lowbit.scaling import Scheme, scheme
from lowbit.tensor.quantized import scale_dtype, zero_dtype

__all__ = ["convolve", "quantized", "supports"]

#: The largest size of the third grid axis.
_GROUPS = 65535

#: The most output channels per input channel for which the depthwise kernel is used; a matrix instruction has 16.
_FEW = 8

#: The kernel for patches that corresponds to each kernel for rows.
_OF_PATCHES = {
    integers.integers: conv.conv_integers,
    weight_only.weight_only: conv.conv_weight_only,
    weight_only.add_shares: weight_only.add_shares,
}


def supports(call: Conv) -> str | None:
    """Why no kernel supports the call, or None."""
    if call.groups > _GROUPS:
        return f"its grid has at most {_GROUPS} groups, got {call.groups}"
    if call.input_scheme is not None:
        found = scheme(call.input_scheme)
        if found.global_scale:
            return f"its kernel takes inputs without global scales, got {found}"
        if spans_tensor(found):
            if found.format.bits != 8:
                return f"its kernel takes codes of 8 bits where one scale spans the input, got {found}"
        elif found.block != (1, None) or found.both_ends or found.format.kind == "codebook":
            return f"its kernel takes inputs with one scale a patch and no zero points, or one for all, got {found}"
    return matrices.supports(_product(call))


def _product(call: Conv) -> ScaledMM:
    """The matmul without data: all patches of one group, and the weights of all groups."""
    rows, depth = call.x.shape[0] * prod(out_sizes(call)), columns(call)
    a = _without_data((rows, depth), torch.uint8 if call.input_scheme else call.x.dtype)
    return ScaledMM(a, call.weight, depth, call.input_scheme, call.scheme)


def _without_data(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of which only shape and dtype are read, also under fake tensors."""
    return torch.empty((), dtype=dtype, device="meta").expand(shape)


def quantized(call: Conv) -> tuple[Conv, list[Launch]]:
    """The call with codes as input if one scale spans the input, and the launches that fill them."""
    if call.input_scheme is None or call.x.dtype == torch.uint8 or not spans_tensor(scheme(call.input_scheme)):
        return call, []
    found, x = scheme(call.input_scheme), call.x.contiguous()
    pixels, codes = x.flatten(0, -2), torch.empty_like(x, dtype=torch.uint8)
    scale, zero, to = call.input_scale, call.input_zero_point, codes.flatten(0, -2)
    if scale is not None:
        launches = quantize_static(pixels, found, scale, zero, None, to, Rounding())
    else:
        scale = torch.empty((1, 1), dtype=scale_dtype(found), device=x.device)
        zero = torch.empty((1, 1), dtype=zero_dtype(found), device=x.device) if found.affine else None
        launches = quantize_dynamic(pixels, found, None, to, scale, zero, Rounding())
    return call._replace(x=codes, input_scale=scale, input_zero_point=zero), launches


# -- patches -----------------------------------------------------------------------------------------------------------
def _arguments(call: Conv, made: Scheme | None = None) -> dict[str, Any]:
    """Sizes and constants with which kernels read patches, and quantize them in the scheme ``made``.

    A missing axis has one pixel and one tap.
    """
    missing = (1,) * (3 - len(call.kernel_size))
    padded = (before + after > 0 for before, after in zip(call.padding[::2], call.padding[1::2], strict=True))
    there = zip(call.kernel_size, call.stride, call.padding[::2], call.dilation, padded, strict=True)
    axes = [*((1, 1, 0, 1, False) for _ in missing), *there]
    sizes, places = (*missing, *call.x.shape[1:-1]), (*missing, *out_sizes(call))
    channels = call.x.shape[-1]
    return {
        "channels": channels, "each": channels // call.groups, "WINDOW": tuple(zip(*axes, strict=True)),
        "GROUPS": call.groups, "MADE": None if made is None else format_spec(made.format),
        "MADE_SCALE": None if made is None else scale_spec(made), "MADE_DTYPE": 0 if made is None else dtype_of(call.x),
        **{f"size_{axis}": size for axis, size in zip("dhw", sizes, strict=True)},
        **{f"places_{axis}": count for axis, count in zip("dhw", places, strict=True)},
    }  # fmt: skip


class _Patches(NamedTuple):
    """The left operand: pixels as codes or floats, their scales, launches, and arguments for reading patches.

    The argument ``MADE`` means that patches are quantized as they are read.
    """

    side: Side
    launches: list[Launch]
    arguments: dict[str, Any]


def _patches(call: Conv) -> _Patches:
    """The patches of a call that ``quantized`` returned."""
    x = call.x.contiguous()
    if call.input_scheme is None:
        return _Patches(Side("a", x.flatten(0, -2), None, None, None, None), [], _arguments(call))
    found = scheme(call.input_scheme)
    if not spans_tensor(found):
        return _quantized_as_read(call, x, found)
    side = Side("a", x.flatten(0, -2), found.name, call.input_scale, call.input_zero_point, None)
    return _Patches(side, [], _arguments(call))


def _quantized_as_read(call: Conv, x: Tensor, found: Scheme) -> _Patches:
    """Patches with one scale each, which one launch computes. The matmul kernel computes the codes.

    The depthwise kernel computes the scales too.
    """
    arguments = _arguments(call, found) | {"a_ptr": pattern(x)}
    side = Side("a", x.flatten(0, -2), f"{found.format.name}:row", None, None, None)
    if _is_depthwise(call):
        return _Patches(side, [], arguments)
    rows, depth = x.shape[0] * prod(out_sizes(call)), columns(call)
    scale = torch.empty((call.groups * rows, 1), device=x.device)
    k = min(128, max(16, power_of_two(depth)))
    m = 4096 // k
    own = {"out_ptr": scale, "rows": rows, "depth": depth, "count": -(-depth // k), "M": m, "K": k}
    one = Launch(conv.patch_scales, (-(-rows // m), 1, call.groups), arguments | own)
    return _Patches(side._replace(scale=scale), [one._replace(arguments=matrices.known(one))], arguments)


# -- products ----------------------------------------------------------------------------------------------------------
def convolve(call: Conv, out: Tensor) -> list[Launch]:
    """Fill ``out [N, *S', O]`` with floats for a call that ``quantized`` returned; see ``lowbit.ops.conv``."""
    patches, depth, y = _patches(call), columns(call), out.view(-1, out.shape[-1])
    b = Side(
        "b", call.weight, call.scheme, stored_scale(call.scale, call.scheme), call.zero_point,
        stored_global(call.global_scale),
    )  # fmt: skip
    a = patches.side
    if _is_depthwise(call):
        return [*patches.launches, _depthwise(call, patches, b, y)]
    of: dict[str, Any] = {"groups": call.groups, "patches": True}
    if matrices.are_integers(_product(call)):
        before, launches = [], matrices.multiply_integers(a, b, call.bias, y, depth, **of)
    else:
        left = _left(a, y.shape[0], patches.arguments["MADE"] is not None)
        before, launches = left.launches, matrices.multiply_floats(left, b, call.bias, y, depth, **of)
    made = [
        one._replace(kernel=_OF_PATCHES[one.kernel], arguments=one.arguments | patches.arguments) for one in launches
    ]
    return [*patches.launches, *before, *(one._replace(arguments=matrices.known(one)) for one in made)]


def _is_depthwise(call: Conv) -> bool:
    """Whether patches have one channel and few output channels, which have one scale each."""
    codebook = call.input_scheme is not None and scheme(call.input_scheme).format.kind == "codebook"
    whole = scheme(call.scheme).block_of(call.weight.shape[0], columns(call))[1] >= columns(call)
    few = call.weight.shape[0] <= call.groups * _FEW
    return call.groups == call.x.shape[-1] and few and whole and not codebook


def _depthwise(call: Conv, patches: _Patches, b: Side, out: Tensor) -> Launch:
    (rows, cols), a, right = out.shape, patches.side, scheme(call.scheme)
    left = None if a.scheme is None else scheme(a.scheme)
    n = min(64, max(16, power_of_two(cols)))
    m = min(2048 // n, max(16, power_of_two(rows)))
    arguments = {
        **operands.codes_of("a", a), **operands.codes_of("b", b), **matrices.result_of(call.bias, out, columns(call)),
        "a_zero_ptr": dense(a.zero_point), "b_zero_ptr": dense(b.zero_point),
        "table_ptr": operands.table_of(right.format, out.device) if right.format.kind == "codebook" else None,
        "b_block": right.block_of(cols, columns(call))[0],
        "A": None if left is None else format_spec(left.format), "A_SCALE": None if left is None else scale_spec(left),
        "A_AFFINE": left is not None and left.affine, "A_FP8": operands.fp8(left, out.device),
        "B": format_spec(right.format), "B_SCALE": scale_spec(right), "B_AFFINE": right.affine,
        "FP8": operands.fp8(right, out.device), "INTEGERS": matrices.are_integers(_product(call)), "M": m, "N": n,
        "EACH": cols // call.groups,
        **patches.arguments,
    }  # fmt: skip
    one = Launch(conv.depthwise, (-(-rows // m) * -(-cols // n),), arguments)
    return one._replace(arguments=matrices.known(one))


def _left(a: Side, rows: int, made: bool) -> operands.Decoded:
    """The left operand of a float matmul, with one scale per patch."""
    if made:
        decoded = _without_data(a.data.shape, torch.bfloat16)
        return operands.Decoded(
            decoded, [], operands.fp32_rows(a.scale), operands.fp8(scheme(str(a.scheme)), a.data.device)
        )
    left = operands.fp8_left(a, a.data.shape[1]) or operands.values(a, a.data.shape[1])
    return left if left.rows is None else left._replace(rows=left.rows._replace(block=rows))
