"""Reference of blocks and their scales (section 5)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lowbit.formats import Format, find
from lowbit.reference.codec import F32_INF, F32_MAGNITUDE, F32_SIGN, encode_magnitude, from_bits, to_bits
from lowbit.scaling import SUPERBLOCK, Scheme, as_matrix
from lowbit.tensor.quantized import scale_dtype, zero_dtype


def spread(per_block: Tensor, block: tuple[int, int], rows: int, cols: int) -> Tensor:
    """``[R, C]`` to ``[rows, cols]``: each element gets the value of its block."""
    return per_block.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :cols]


def in_blocks(values: Tensor, scheme: Scheme, fill: float = 0.0) -> Tensor:
    """``values [rows, cols]`` as ``[R, r, C, c]``; blocks at the edges, and empty axes, are padded with ``fill``."""
    rows, cols = values.shape
    r, c = scheme.block_of(rows, cols)
    R, C = scheme.scale_shape(rows, cols)
    return torch.nn.functional.pad(values, (0, C * c - cols, 0, R * r - rows), value=fill).reshape(R, r, C, c)


def block_amax(values: Tensor, scheme: Scheme) -> Tensor:
    """The maximum of ``values: [rows, cols]`` (non-negative, or bool) over each block, ``[R, C]``."""
    return in_blocks(values, scheme).amax((1, 3))


def e8m0_code(amount: Tensor, divisor: float, raise_above: int) -> Tensor:
    """E8M0 codes of ``amount / divisor`` (positive, finite fp32): floored, plus 1 if the fraction exceeds the limit."""
    mantissa, exponent = torch.frexp(amount.double())
    exponent_max = torch.frexp(torch.tensor(divisor, dtype=torch.float64))[1]
    raised = mantissa > (raise_above / (1 << 23) + 1) / 2
    return (exponent.long() - int(exponent_max) + raised.long()).clamp(-127, 127) + 127


def round_up(scale: Tensor, format: Format) -> Tensor:
    """Codes of fp32 ``scale >= 0`` (not NaN), rounded towards +Inf and clipped to the format's maximum."""
    dropped = 23 - format.mantissa
    bits = to_bits(scale)
    shift = (dropped + (format.emin - ((bits >> 23) - 127)).clamp(min=0)).clamp(max=40)
    significand = ((bits & 0x7FFFFF) | (1 << 23)).where(bits > 0, 0)
    kept = (significand + (1 << shift) - 1) >> shift
    code = (((bits >> 23) - 127).clamp(min=format.emin) - format.emin << format.mantissa) + kept
    return code.clamp(max=format.max_code)


def make_scale(amount: Tensor, scheme: Scheme) -> Tensor:
    """Stored scales of blocks with the amax (affine: range) ``amount``, fp32 and finite, without a global scale."""
    if scheme.scale_format.name == "e8m0":
        code = e8m0_code(amount.where(amount > 0, 1.0), scheme.amax_divisor, scheme.raise_above)
        return code.where(amount > 0, 127 if scheme.zero_scale else 0).to(torch.uint8)
    scale = normal_scale(amount, scheme.amax_divisor, scheme.zero_scale)
    if scheme.scale_format.name == "fp32":
        return scale
    code = round_up(scale, find(scheme.scale_format.name))
    return code.to(torch.int16).view(scale_dtype(scheme))


def normal_scale(amount: Tensor, divisor: float, zero_scale: float = 1.0) -> Tensor:
    """``fp32(amount / divisor)``, a normal number; ``zero_scale`` for an amount of 0."""
    scale = amount / torch.tensor(divisor, device=amount.device)
    return scale.clamp(2.0**-126, torch.finfo(torch.float32).max).where(amount > 0, zero_scale)


def make_block_scale(amax: Tensor, global_scale: Tensor, scheme: Scheme) -> Tensor:
    """Schemes with a global scale: E4M3 codes of amax / divisor / global_scale."""
    ratio = quotient(
        amax / torch.tensor(scheme.amax_divisor, device=amax.device), global_scale.expand(amax.shape[0], 1)
    )
    format = find(scheme.scale_format.name)
    if scheme.rounding == "nearest":
        return encode_magnitude(to_bits(ratio), format, saturate=True).to(torch.uint8)
    code = round_up(ratio.abs().nan_to_num(nan=0.0), format)
    code = code.where(~ratio.isnan(), format.nan_code)
    return (code | (to_bits(ratio) >> 31 << 7)).to(torch.uint8)


def negated_where(scale: Tensor, where: Tensor) -> Tensor:
    """Stored scales (numbers or E4M3 codes), negated where ``where`` is true."""
    if scale.dtype == torch.uint8:
        return scale ^ (where.to(torch.uint8) << 7)
    return torch.where(where, -scale, scale)


def nan_scale(scheme: Scheme) -> float | int:
    """The stored scale of a block that contains Inf or NaN."""
    dtype = scheme.scale_format.dtype
    return find(scheme.scale_format.name).nan_code if dtype == "uint8" else float("nan")


def scale_value(scale: Tensor, scheme: Scheme, global_scale: Tensor | None) -> Tensor:
    """The fp32 scale ``[R, C]`` for decoding, block scale times global scale; NaN has the sign of the product too."""
    if scale.dtype == torch.uint8:
        format = find(scheme.scale_format.name)
        table = torch.tensor(format.bits_table, dtype=torch.int64, device=scale.device)
        scale = from_bits(table[scale.long() & (len(table) - 1)])
    if global_scale is None:
        return from_bits(to_bits(scale))
    if scheme.superblocks:
        global_scale = of_blocks(global_scale, scheme, scale.shape[1])[0]
    sign = (to_bits(scale) ^ to_bits(global_scale)) & F32_SIGN
    return from_bits(to_bits(scale.float() * global_scale) & F32_MAGNITUDE | sign)


def of_blocks(global_scale: Tensor, scheme: Scheme, blocks: int) -> tuple[Tensor, Tensor]:
    """The global scale of each of the ``blocks`` of a row, and that of its minimum, from those of superblocks.

    Without minima both are the same.
    """
    count = global_scale.shape[1] // (1 + scheme.minimum)
    wide = SUPERBLOCK // (scheme.block[1] or 1)
    first, last = (
        part.repeat_interleave(wide, 1)[:, :blocks]
        for part in (global_scale[:, :count], global_scale[:, -count or None :])
    )
    return first, last


def minimum_value(minimum: Tensor, scheme: Scheme, global_scale: Tensor | None) -> Tensor:
    """The fp32 number ``[R, C]`` that decoding adds, from the stored minimum."""
    if global_scale is None:
        return minimum.float()
    return -(of_blocks(global_scale, scheme, minimum.shape[1])[1] * minimum.float())


def quotient(x: Tensor, scale: Tensor) -> Tensor:
    """``|x| / |scale|`` with sign(x) xor sign(scale), also for NaN; a scale of 0 counts as Inf."""
    size = from_bits(to_bits(scale) & F32_MAGNITUDE)
    magnitude = to_bits(x.float().abs() / size.where(size != 0, torch.inf)) & F32_MAGNITUDE
    return from_bits(magnitude | ((to_bits(x) ^ to_bits(scale)) & F32_SIGN))


def global_scale(x: Tensor, scheme: Scheme) -> Tensor:
    """The global scale, fp32 ``[1, 1]`` or ``[rows, 1]``: finite amax divided by ``global_scale_divisor``.

    Of superblocks: ``superblock_scales``.
    """
    if scheme.superblocks:
        return superblock_scales(x.reshape(as_matrix(tuple(x.shape))), scheme)
    magnitude = to_bits(x).reshape(as_matrix(tuple(x.shape)))
    magnitude = magnitude & F32_MAGNITUDE
    finite = magnitude.where(magnitude < F32_INF, 0)
    finite = finite if scheme.global_scale == "row" else finite.reshape(1, -1)
    amax = from_bits(torch.nn.functional.pad(finite, (0, 1)).amax(1, keepdim=True))
    return normal_scale(amax, scheme.global_scale_divisor)


def block_range(x: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """``min(0, minimum)`` and ``max(0, maximum)`` of each block's finite elements, fp32 ``[R, C]``; +0 if none."""
    finite = x.float().where(x.float().isfinite(), 0.0)
    return -block_amax((-finite).clamp(min=0.0) + 0.0, scheme) + 0.0, block_amax(finite.clamp(min=0.0) + 0.0, scheme)


# -- minima and superblocks --------------------------------------------------------------------------------------------
def round_down(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Finite fp32 ``x`` rounded towards -Inf to a finite number of a 16-bit ``dtype``; fp32 stays."""
    if dtype == torch.float32:
        return x
    format = find({torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype])
    magnitude, positive = x.abs(), x > 0
    code = round_up(magnitude, format).to(torch.int16)
    code = code - (positive & (code.view(dtype).float() > magnitude)).to(torch.int16)
    value = code.view(dtype)
    return torch.where(positive, value, -value)


def block_ends(x: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """The least and the largest finite element of each block, fp32 ``[R, C]``; 0 for a block without any."""
    high, low = (
        in_blocks(values.where(x.float().isfinite(), -torch.inf), scheme, -torch.inf).amax((1, 3))
        for values in (x.float(), -x.float())
    )
    return (0.0 - low).where(low.isfinite(), 0.0) + 0.0, high.where(high.isfinite(), 0.0) + 0.0


def _step(low: Tensor, high: Tensor, scheme: Scheme) -> Tensor:
    """The unrounded scale of blocks from ``low`` to ``high``; without minima, of their amax."""
    amount = (high - low).clamp(0.0, torch.finfo(torch.float32).max) if scheme.minimum else torch.maximum(-low, high)
    return amount / torch.tensor(scheme.amax_divisor, device=amount.device)


def _integers(amount: Tensor, unit: Tensor, scheme: Scheme, least: int) -> Tensor:
    """The integer scale nearest to ``amount / unit``, at least ``least``."""
    most = find(scheme.scale_format.name).max
    return quotient(amount, unit).nan_to_num(nan=0.0).round().clamp(least, most).to(torch.uint8)


def _superblock_scale(amount: Tensor, scheme: Scheme) -> Tensor:
    """The fp16 number of each superblock, as fp32: the largest of its ``amount [R, C]`` over the largest integer."""
    wide = SUPERBLOCK // (scheme.block[1] or 1)
    padded = torch.nn.functional.pad(amount, (0, -amount.shape[1] % wide))
    largest = padded.reshape(amount.shape[0], -1, wide).amax(2)
    scale = normal_scale(largest, find(scheme.scale_format.name).max)
    return round_up(scale, find("fp16")).to(torch.int16).view(torch.float16).float()


def superblock_scales(x: Tensor, scheme: Scheme) -> Tensor:
    """The global scales of the superblocks of ``x [rows, cols]``; with minima, followed by those of the minima."""
    low, high = block_ends(x, scheme)
    units = []
    if scheme.minimum:
        low = low.clamp(max=0.0)
        units = [_superblock_scale(-low, scheme)]
        stored = _integers(-low, of_blocks(units[0].repeat(1, 2), scheme, low.shape[1])[1], scheme, 0)
        low = minimum_value(stored, scheme, units[0].repeat(1, 2))
    scale = _superblock_scale(_step(low, high, scheme), scheme)
    wide = replace(scheme, block=(1, SUPERBLOCK))
    scale = scale.masked_fill(in_blocks(~x.isfinite(), wide).amax((1, 3)), torch.nan)
    return torch.cat([scale, *units], 1)


def of_range(low: Tensor, high: Tensor, scheme: Scheme, global_scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Stored scales and minima of blocks with elements from ``low`` to ``high``, finite fp32 ``[R, C]``."""
    if global_scale is None:
        minimum = round_down(low, scale_dtype(scheme))
        amount = (high - minimum.float()).clamp(0.0, torch.finfo(torch.float32).max)
        return make_scale(amount, scheme), minimum
    unit, unit_of_minimum = of_blocks(global_scale, scheme, low.shape[1])
    if not scheme.minimum:
        return _integers(_step(low, high, scheme), unit, scheme, 1), None
    minimum = _integers(-low.clamp(max=0.0), unit_of_minimum, scheme, 0)
    return _integers(_step(minimum_value(minimum, scheme, global_scale), high, scheme), unit, scheme, 1), minimum


def _of_ends(x: Tensor, scheme: Scheme, global_scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    scale, minimum = of_range(*block_ends(x, scheme), scheme, global_scale)
    if global_scale is not None:
        return scale, minimum
    broken = block_amax(~x.isfinite(), scheme)
    assert minimum is not None
    return scale.masked_fill(broken, torch.nan), minimum.masked_fill(broken, 0)


def block_scales(x: Tensor, scheme: Scheme, global_scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Stored scales ``[R, C]``, and zero points or minima of affine schemes, for ``x [rows, cols]``."""
    if scheme.reference_only:
        return _of_ends(x, scheme, global_scale)
    amax_bits = block_amax(to_bits(x) & F32_MAGNITUDE, scheme)
    broken = amax_bits >= F32_INF
    amax = from_bits(amax_bits.where(~broken, 0))
    if not scheme.affine:
        scale = make_scale(amax, scheme) if global_scale is None else make_block_scale(amax, global_scale, scheme)
        if scheme.full:
            low, high = block_range(x, scheme)
            scale = negated_where(scale, high > -low)
        return scale.masked_fill(broken, nan_scale(scheme)), None
    low, high = block_range(x, scheme)
    scale = make_scale((high - low).clamp(max=torch.finfo(torch.float32).max), scheme)
    qmin, qmax = scheme.format.qmin, scheme.format.qmax
    zero_point = (qmin - (low / scale_value(scale, scheme, None))).round().clamp(qmin, qmax)
    return scale.masked_fill(broken, nan_scale(scheme)), zero_point.masked_fill(broken, 0).to(zero_dtype(scheme))
