"""Prepares matmul operands for kernels: codes with scales or floats, in formats that are exact for them."""

from __future__ import annotations

from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lowbit import reference
from lowbit.formats import Format, find
from lowbit.kernels import decode_4bit
from lowbit.kernels.arguments import FP8, converts, dense, pattern
from lowbit.kernels.launch import dequantize
from lowbit.kernels.spec import Launch, scale_spec
from lowbit.ops.matmul import Side
from lowbit.scaling import Scheme, scheme

__all__ = [
    "TERMS",
    "Decoded",
    "RowScales",
    "codes_of",
    "fits_bf16",
    "folds",
    "fp8",
    "fp8_left",
    "fp32_rows",
    "global_rows",
    "in_bf16",
    "instructions",
    "is_exact",
    "kind",
    "leaves_blocks",
    "maybe_pattern",
    "of_left",
    "row_scales",
    "table_of",
    "values",
]  # fmt: skip

#: Number of 8-bit terms into which a float is split.
TERMS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


def kind(side: Side) -> str | None:
    """The kind of a side's format; None for a float matrix."""
    return None if side.scheme is None else scheme(side.scheme).format.kind


class RowScales(NamedTuple):
    """Row scales as ``scheme`` stores them; ``block`` rows share one."""

    scale: Tensor
    global_scale: Tensor | None
    block: int
    scheme: Scheme

    def expand(self, rows: int) -> Tensor:
        """The scale of each row, fp32 ``[rows]``."""
        plain = self.scale.dtype != torch.uint8 and self.global_scale is None
        scale = self.scale.float() if plain else reference.scale_value(self.scale, self.scheme, self.global_scale)
        if self.block >= rows:
            return scale[:, 0].expand(rows).contiguous()
        return scale[:, 0].repeat_interleave(self.block)[:rows].contiguous() if self.block > 1 else scale[:, 0]


def row_scales(side: Side, cols: int) -> RowScales:
    """The scales of a side with one scale per row."""
    assert side.scale is not None
    found = scheme(str(side.scheme))
    return RowScales(side.scale, side.global_scale, found.block_of(side.data.shape[0], cols)[0], found)


def fp32_rows(scale: Tensor, block: int = 1) -> RowScales:
    """fp32 scales ``[rows]`` or ``[rows, 1]``, each for ``block`` rows."""
    return RowScales(scale.view(-1, 1), None, block, scheme("int8:row"))


def of_left(rows: RowScales | None) -> dict[str, Any]:
    """Row scales of the left operand as arguments of an epilogue."""
    if rows is None:
        return {"a_scale_ptr": None, "a_global_ptr": None, "a_block": 1, "A_SCALE": None}
    return {
        "a_scale_ptr": maybe_pattern(rows.scale), "a_global_ptr": dense(rows.global_scale), "a_block": rows.block,
        "A_SCALE": scale_spec(rows.scheme),
    }  # fmt: skip


class Decoded(NamedTuple):
    """A left operand: floats with the launches that fill them, or codes in the FP8 format ``fp8``.

    Scales that are not applied yet are in ``rows``, or in ``blocks`` along K.
    """

    values: Tensor
    launches: list[Launch]
    rows: RowScales | None
    fp8: str = ""
    blocks: Side | None = None


def fits_bf16(side: Side, cols: int) -> bool:
    """Whether an operand without its row scales is exact in bf16."""
    if side.scheme is None:
        return side.data.dtype == torch.bfloat16
    found = scheme(side.scheme)
    if found.format.kind == "codebook":
        return False
    return found.scale_shape(side.data.shape[0], cols)[1] == 1 or folds(found, "bf16")


def values(side: Side, cols: int, by_block: bool = False) -> Decoded:
    """An operand as floats: in bf16 if its codes, or its codes times block scales, are exact in bf16.

    ``by_block``: scales that are not exact may be left for block sums.
    """
    if side.scheme is None:
        return Decoded(side.data, [], None)
    found, rows = scheme(side.scheme), side.data.shape[0]
    assert side.scale is not None
    out = partial(torch.empty, (rows, cols), device=side.data.device)
    left = by_block and leaves_blocks(side, cols)
    if not left and not fits_bf16(side, cols):
        made = out(dtype=torch.float32)
        return Decoded(made, dequantize(side.data, found, side.scale, side.zero_point, side.global_scale, made), None)
    made = out(dtype=torch.bfloat16)
    if not left and found.scale_shape(rows, cols)[1] > 1:
        return Decoded(made, dequantize(side.data, found, side.scale, None, _ones(side), made), global_rows(side))
    one = _filled(side.scale.shape, side.scale.dtype, _unit(found), side.data.device)
    launches = dequantize(side.data, found, one, side.zero_point, _ones(side), made)
    if left:
        return Decoded(made, launches, global_rows(side), blocks=side)
    return Decoded(made, launches, row_scales(side, cols))


def leaves_blocks(side: Side, cols: int) -> bool:
    """Whether codes are exact in bf16, but not their products with block scales along K."""
    if side.scheme is None:
        return False
    found = scheme(side.scheme)
    return found.format.kind != "codebook" and found.block_of(1, cols)[1] < cols and not folds(found, "bf16")


def in_bf16(side: Side, cols: int) -> Decoded:
    """An operand in bf16, rounded if necessary."""
    if fits_bf16(side, cols):
        return values(side, cols)
    if side.scheme is None:
        return Decoded(side.data.bfloat16(), [], None)
    assert side.scale is not None
    made = torch.empty((side.data.shape[0], cols), dtype=torch.bfloat16, device=side.data.device)
    launches = dequantize(side.data, scheme(side.scheme), side.scale, side.zero_point, side.global_scale, made)
    return Decoded(made, launches, None)


def global_rows(side: Side) -> RowScales | None:
    """The global scales of a side as row scales."""
    if side.global_scale is None:
        return None
    return fp32_rows(side.global_scale, side.data.shape[0] if side.global_scale.numel() == 1 else 1)


def _ones(side: Side) -> Tensor | None:
    """Ones in place of a side's global scales."""
    if side.global_scale is None:
        return None
    return _filled(side.global_scale.shape, torch.float32, 1.0, side.data.device)


@lru_cache(maxsize=256)
def _filled(shape: tuple[int, ...], dtype: torch.dtype, value: float, device: torch.device) -> Tensor:
    """A cached tensor of one value, so that later calls do not fill it."""
    return torch.full(shape, value, dtype=dtype, device=device)


@cache
def _unit(scheme: Scheme) -> float:
    """The stored value of a scale of 1."""
    if scheme.scale_format.dtype != "uint8":
        return 1.0
    with _disable_current_modes():
        codes = reference.decode(torch.arange(256, dtype=torch.uint8), find(scheme.scale_format.name))
        return int((codes == 1).nonzero())


def fp8_left(side: Side, cols: int, by_block: bool = False) -> Decoded | None:
    """FP8 codes for the kernel to decode, if scales span rows or, with ``by_block``, are left for block sums."""
    found = None if side.scheme is None else scheme(side.scheme)
    if found is None or not fp8(found, side.data.device):
        return None
    named = fp8(found, side.data.device)
    if found.scale_shape(side.data.shape[0], cols)[1] == 1:
        return Decoded(side.data, [], row_scales(side, cols), named)
    if by_block and leaves_blocks(side, cols):
        return Decoded(side.data, [], global_rows(side), named, side)
    return None


@cache
def _values_of(format: Format) -> Tensor:
    """The finite values of a format's codes, fp32."""
    with _disable_current_modes():  # a mode may make tensors fake
        values = _decoded(format)
        return values[values.isfinite()]


@cache
def _decoded(format: Format) -> Tensor:
    """The values of all codes of a format, fp32."""
    with _disable_current_modes():
        return reference.decode(torch.arange(1 << format.bits, dtype=torch.uint8), format)


@cache
def is_exact(format: Format, operand: str) -> bool:
    """Whether a format's values are exact in bf16 or fp16."""
    if operand == "bf16":
        return format.kind != "codebook"
    with _disable_current_modes():
        values = _values_of(format)
        return bool((values.half().float() == values).all())


@cache
def folds(scheme: Scheme, operand: str) -> bool:
    """Whether codes times block scales are exact in the operand format; bf16 has the range of every power of two."""
    if scheme.affine or scheme.format.kind == "codebook" or scheme.scale_format.dtype != "uint8":
        return False
    scale = find(scheme.scale_format.name)
    if scale.kind == "exponent":
        return operand == "bf16"
    dtype = torch.float16 if operand == "fp16" else torch.bfloat16
    with _disable_current_modes():
        product = _values_of(scheme.format)[:, None] * _values_of(scale)
        return bool((product.to(dtype).float() == product).all())


def fp8(scheme: Scheme | None, device: torch.device) -> str:
    """The name of an FP8 format that hardware converts, or that is the upper half of fp16."""
    name = "" if scheme is None else FP8.get(scheme.format.name, "")
    return "" if name == "e4m3" and not converts(name, device) else name


@cache
def table_of(format: Format, device: torch.device) -> Tensor:
    """The values of a codebook."""
    return torch.tensor(format.codebook, dtype=torch.float32, device=device)


def _terms(values: Tensor) -> Tensor:
    """Each of ``values`` as the sum of three numbers that are exact in bf16: fp32 ``[3, ...]``."""
    rest, terms = values, []
    for _ in range(3):
        terms.append((rest.view(torch.int32) & -0x10000).view(torch.float32))
        rest = rest - terms[-1]
    return torch.stack(terms)


@cache
def instructions(format: Format, operand: str) -> tuple[str, str]:
    """PTX that decodes a 4-bit format: each code to one number, or to three that add up to it."""
    if format.kind == "integer":
        return decode_4bit.integers(format.signed, operand)
    values = _decoded(format)
    values = values[None] if is_exact(format, operand) else _terms(values)
    dtype = torch.float16 if operand == "fp16" else torch.bfloat16
    return decode_4bit.tables((values.to(dtype).view(torch.int16).int() & 0xFFFF).tolist())


def codes_of(name: str, side: Side) -> dict[str, Any]:
    """A side's codes and scales as kernel arguments."""
    data = side.data
    return {
        f"{name}_ptr": data, f"{name}_stride_r": data.stride(0), f"{name}_stride_c": data.stride(1),
        f"{name}_bytes": data.shape[1], f"{name}_scale_ptr": maybe_pattern(side.scale),
        f"{name}_global_ptr": dense(side.global_scale),
    }  # fmt: skip


def maybe_pattern(x: Tensor | None) -> Tensor | None:
    """An optional tensor as a kernel argument: contiguous, as integers."""
    return None if x is None else pattern(x.contiguous())
