"""The numerics specification in code: slow, obvious, any device. Every other backend equals this in every bit.

Bits are handled as int64, so that no step overflows; real arithmetic is fp32, one rounding at a time, and divides by
tensors only (a division by a Python number becomes a multiplication by its reciprocal on CUDA).

Legend: ``rows, cols`` of the matrix; ``r, c`` of a block; ``R, C`` numbers of blocks.  Source: docs/numerics.md.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit import packing
from lowbit.formats import FORMATS, Format, find
from lowbit.quantized import scale_dtype, zero_dtype
from lowbit.scaling import Scheme, as_matrix

F32_SIGN, F32_MAGNITUDE, F32_INF, F32_NAN = 0x80000000, 0x7FFFFFFF, 0x7F800000, 0x7FC00000


class Rng(NamedTuple):
    """What stochastic rounding depends on (section 7); ``pitch`` is the row length of the whole tensor."""

    seed: int
    step: int = 0
    stream: int = 0
    offset: int = 0
    pitch: int | None = None


# -- bits (sections 1, 2) ------------------------------------------------------------------------------------------
def to_bits(x: Tensor) -> Tensor:
    """The fp32 bit patterns of ``x`` (fp32, bf16 or fp16), as int64 in ``[0, 2**32)``; a NaN keeps its sign."""
    bits = x.float().contiguous().view(torch.int32).long() & 0xFFFFFFFF
    if x.dtype != torch.float16:
        return bits
    return bits & F32_MAGNITUDE | (x.contiguous().view(torch.int16).long() & 0x8000) << 16  # torch drops NaN's sign


def from_bits(bits: Tensor) -> Tensor:
    """fp32 numbers from bit patterns held in int64."""
    return bits.where(bits < F32_SIGN, bits - (1 << 32)).to(torch.int32).view(torch.float32)


def require_subnormals(x: Tensor) -> None:
    """Raise where torch would flush subnormal numbers: no reference can be trusted there."""
    tiny = torch.full((1,), 1e-39)
    if x.device.type == "cpu" and x.numel() and bool(tiny * 1 == 0):
        raise RuntimeError(
            "the reference backend cannot run under torch.set_flush_denormal(True), which would change its results; "
            "switch it off, or install the compiled extension (lowbit doctor says how), which is immune to it"
        )


def round_magnitude(magnitude: Tensor, format: Format, noise: Tensor | None = None) -> Tensor:
    """Codes on the format's grid with unbounded exponent, for fp32 ``magnitude`` bits (sign cleared, NaN excluded).

    Nearest-even, or stochastic with ``noise`` (16 random bits an element).
    """
    field, fraction = magnitude >> 23, magnitude & 0x7FFFFF
    significand = fraction.where(field == 0, fraction | (1 << 23))
    exponent = (field - 127).clamp(min=-126)
    shift = (23 - format.mantissa + (format.emin - exponent).clamp(min=0)).clamp(max=40)
    kept = significand >> shift
    rest = significand - (kept << shift)
    if noise is None:
        half = (1 << shift) >> 1
        kept = kept + ((rest > half) | ((rest == half) & (rest > 0) & (kept % 2 == 1))).long()
    else:
        kept = kept + ((((rest << 16) >> shift) + noise) >> 16)
    return ((exponent.clamp(min=format.emin) - format.emin) << format.mantissa) + kept


def encode_magnitude(bits: Tensor, format: Format, saturate: bool, noise: Tensor | None = None) -> Tensor:
    """Codes of a float format for fp32 ``bits``, NaN, overflow and sign included (section 2)."""
    magnitude, negative = bits & F32_MAGNITUDE, bits >= F32_SIGN
    code = round_magnitude(magnitude.clamp(max=F32_INF), format, noise)
    over = format.max_code
    if not saturate and (format.has_inf or format.has_nan):
        over = format.inf_code if format.has_inf else format.nan_code
    code = torch.where(code > format.max_code, over, code)
    sign = negative.long() << (format.bits - 1)
    if format.has_nan:
        return torch.where(magnitude > F32_INF, format.nan_code, code) | sign
    return torch.where(magnitude > F32_INF, format.max_code, code | sign)


def cast(y: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 to ``dtype``, nearest-even by integer arithmetic; every NaN becomes the canonical one (section 6)."""
    bits = to_bits(y)
    bits = torch.where((bits & F32_MAGNITUDE) > F32_INF, F32_NAN, bits)
    if dtype == torch.float32:
        return from_bits(bits)
    format = next(f for f in FORMATS.values() if f.torch_dtype == str(dtype).removeprefix("torch."))
    code = round_magnitude(bits & F32_MAGNITUDE, format)
    nan_code = format.inf_code | (1 << (format.mantissa - 1))
    code = torch.where((bits & F32_MAGNITUDE) > F32_INF, nan_code, code.clamp(max=format.inf_code))
    code = code + ((bits >= F32_SIGN).long() << 15)
    return code.where(code < 1 << 15, code - (1 << 16)).to(torch.int16).view(dtype)


# -- stochastic rounding (section 7) -------------------------------------------------------------------------------
def philox4x32(counter: list[Tensor], key: tuple[int, int]) -> list[Tensor]:
    """Philox4x32-10 of Salmon et al., SC 2011: four 32-bit words held in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        high0, low0 = (p0 >> 32) & 0xFFFFFFFF, p0 & 0xFFFFFFFF
        high1, low1 = (p1 >> 32) & 0xFFFFFFFF, p1 & 0xFFFFFFFF
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def noise16(rows: int, cols: int, rng: Rng, device: torch.device) -> Tensor:
    """The 16 random bits of every element of ``[rows, cols]``, a function of its index in the whole tensor alone."""
    pitch = cols if rng.pitch is None else rng.pitch
    row = torch.arange(rows, dtype=torch.int64, device=device)[:, None]
    col = torch.arange(cols, dtype=torch.int64, device=device)[None, :]
    index = rng.offset + row * pitch + col  # wraps as uint64 does
    block = (index >> 3) & ((1 << 61) - 1)
    fixed = [torch.full_like(block, word & 0xFFFFFFFF) for word in (rng.step, rng.stream)]
    words = philox4x32(
        [block & 0xFFFFFFFF, block >> 32, *fixed], (rng.seed & 0xFFFFFFFF, (rng.seed >> 32) & 0xFFFFFFFF)
    )
    word = torch.stack(words).gather(0, ((index & 7) >> 1)[None])[0]
    half: Tensor = (word >> (16 * (index & 1))) & 0xFFFF
    return half


# -- blocks and their scales (section 5) ---------------------------------------------------------------------------
def spread(per_block: Tensor, block: tuple[int, int], rows: int, cols: int) -> Tensor:
    """``[R, C]`` to ``[rows, cols]``: every element gets its block's entry."""
    return per_block.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :cols]


def in_blocks(values: Tensor, scheme: Scheme) -> Tensor:
    """``values: [rows, cols]`` as ``[R, r, C, c]``, edge blocks (and an axis without elements) filled up with 0."""
    rows, cols = values.shape
    r, c = scheme.block_of(rows, cols)
    R, C = scheme.scale_shape(rows, cols)
    return torch.nn.functional.pad(values, (0, C * c - cols, 0, R * r - rows)).reshape(R, r, C, c)


def block_amax(values: Tensor, scheme: Scheme) -> Tensor:
    """The maximum of ``values: [rows, cols]`` (non-negative, or bool) over each block, ``[R, C]``."""
    return in_blocks(values, scheme).amax((1, 3))


def e8m0_code(amount: Tensor, divisor: float, raise_above: int) -> Tensor:
    """E8M0 codes of ``amount / divisor`` (positive fp32, finite): floored, and one more for fractions above a limit."""
    mantissa, exponent = torch.frexp(amount.double())
    exponent_max = torch.frexp(torch.tensor(divisor, dtype=torch.float64))[1]
    raised = mantissa > (raise_above / (1 << 23) + 1) / 2
    return (exponent.long() - int(exponent_max) + raised.long()).clamp(-127, 127) + 127


def round_up(scale: Tensor, format: Format) -> Tensor:
    """fp32 ``scale >= 0`` (not NaN) rounded towards +Inf to a format, its largest finite value at most: codes."""
    dropped = 23 - format.mantissa
    bits = to_bits(scale)
    shift = (dropped + (format.emin - ((bits >> 23) - 127)).clamp(min=0)).clamp(max=40)
    significand = ((bits & 0x7FFFFF) | (1 << 23)).where(bits > 0, 0)
    kept = (significand + (1 << shift) - 1) >> shift
    code = (((bits >> 23) - 127).clamp(min=format.emin) - format.emin << format.mantissa) + kept
    return code.clamp(max=format.max_code)


def make_scale(amount: Tensor, scheme: Scheme) -> Tensor:
    """Stored scales of blocks whose amax (affine: range) is ``amount``, fp32 and finite; ``outer`` excluded."""
    if scheme.scale_format.name == "e8m0":
        code = e8m0_code(amount.where(amount > 0, 1.0), scheme.amax_divisor, scheme.raise_above)
        return code.where(amount > 0, 127).to(torch.uint8)
    scale = normal_scale(amount, scheme.amax_divisor)
    if scheme.scale_format.name == "fp32":
        return scale
    code = round_up(scale, find(scheme.scale_format.name))
    return code.to(torch.int16).view(scale_dtype(scheme))


def normal_scale(amount: Tensor, divisor: float) -> Tensor:
    """``fp32(amount / divisor)``, a normal number; 1 for an amount of 0."""
    scale = amount / torch.tensor(divisor, device=amount.device)
    return scale.clamp(2.0**-126, torch.finfo(torch.float32).max).where(amount > 0, 1.0)


def make_inner_scale(amax: Tensor, outer: Tensor, scheme: Scheme) -> Tensor:
    """Below a global scale: the block's E4M3 code, of amax / divisor / outer."""
    inner = quotient(amax / torch.tensor(scheme.amax_divisor, device=amax.device), outer.expand(amax.shape[0], 1))
    format = find(scheme.scale_format.name)
    if scheme.rounding == "nearest":
        return encode_magnitude(to_bits(inner), format, saturate=True).to(torch.uint8)
    code = round_up(inner.abs().nan_to_num(nan=0.0), format)
    code = code.where(~inner.isnan(), format.nan_code)
    return (code | (to_bits(inner) >> 31 << 7)).to(torch.uint8)


def negated_where(scale: Tensor, where: Tensor) -> Tensor:
    """Stored scales (numbers, or E4M3 codes) with their sign changed where asked."""
    if scale.dtype == torch.uint8:
        return scale ^ (where.to(torch.uint8) << 7)
    return torch.where(where, -scale, scale)


def nan_scale(scheme: Scheme) -> float | int:
    """What stands for the scale of a block that holds Inf or NaN."""
    dtype = scheme.scale_format.dtype
    return find(scheme.scale_format.name).nan_code if dtype == "uint8" else float("nan")


def scale_value(scale: Tensor, scheme: Scheme, outer: Tensor | None) -> Tensor:
    """The one fp32 scale of each block, ``[R, C]``: what decodes. Its sign is that of the product, NaN included."""
    if scale.dtype == torch.uint8:
        format = find(scheme.scale_format.name)
        scale = from_bits(torch.tensor(format.bits_table, dtype=torch.int64, device=scale.device)[scale.long()])
    if outer is None:
        return from_bits(to_bits(scale))
    sign = (to_bits(scale) ^ to_bits(outer)) & F32_SIGN
    return from_bits(to_bits(scale.float() * outer) & F32_MAGNITUDE | sign)


def outer_scale(x: Tensor, scheme: Scheme) -> Tensor:
    """The global scale, fp32 ``[1, 1]`` or ``[rows, 1]``: finite amax over the largest product of both levels."""
    magnitude = to_bits(x).reshape(as_matrix(tuple(x.shape)))
    magnitude = magnitude & F32_MAGNITUDE
    finite = magnitude.where(magnitude < F32_INF, 0)
    finite = finite if scheme.outer == "row" else finite.reshape(1, -1)
    amax = from_bits(torch.nn.functional.pad(finite, (0, 1)).amax(1, keepdim=True))
    return normal_scale(amax, scheme.outer_divisor)


def block_range(x: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """``min(0, least)`` and ``max(0, largest)`` of each block's finite elements, fp32 ``[R, C]``; +0 for none."""
    finite = x.float().where(x.float().isfinite(), 0.0)
    return -block_amax((-finite).clamp(min=0.0) + 0.0, scheme) + 0.0, block_amax(finite.clamp(min=0.0) + 0.0, scheme)


def block_scales(x: Tensor, scheme: Scheme, outer: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scales ``[R, C]`` as stored, and zero points (int8/uint8) of affine schemes, for ``x: [rows, cols]``."""
    amax_bits = block_amax(to_bits(x) & F32_MAGNITUDE, scheme)
    broken = amax_bits >= F32_INF
    amax = from_bits(amax_bits.where(~broken, 0))
    if not scheme.affine:
        scale = make_scale(amax, scheme) if outer is None else make_inner_scale(amax, outer, scheme)
        if scheme.full:
            low, high = block_range(x, scheme)
            scale = negated_where(scale, high > -low)
        return scale.masked_fill(broken, nan_scale(scheme)), None
    low, high = block_range(x, scheme)
    scale = make_scale((high - low).clamp(max=torch.finfo(torch.float32).max), scheme)
    qmin, qmax = scheme.format.qmin, scheme.format.qmax
    zero_point = (qmin - (low / scale_value(scale, scheme, None))).round().clamp(qmin, qmax)
    return scale.masked_fill(broken, nan_scale(scheme)), zero_point.masked_fill(broken, 0).to(zero_dtype(scheme))


# -- elements (sections 2 to 4) ------------------------------------------------------------------------------------
def encode(
    x: Tensor, format: Format, rng: Rng | None = None, saturate: bool = True, zero_point: Tensor | None = None
) -> Tensor:
    """Codes (uint8, one a byte) of ``x``, already divided by its scale; ``rng`` asks for stochastic rounding.

    ``x: [rows, cols]``; ``zero_point`` broadcasts to it. NaN, Inf, -0 and overflow: sections 2 to 4.
    """
    require_subnormals(x)
    bits = to_bits(x)
    noise = None if rng is None else noise16(x.shape[0], x.shape[1], rng, x.device)
    if format.kind == "float":
        return encode_magnitude(bits, format, saturate, noise).to(torch.uint8)
    if format.kind == "codebook":
        steps = from_bits(torch.tensor(format.thresholds, dtype=torch.int64, device=x.device))
        count = (x.float()[..., None] > steps).sum(-1)
        return count.masked_fill(x.isnan(), format.zero_code).to(torch.uint8)
    zero = torch.zeros((), device=x.device) if zero_point is None else zero_point.float()
    whole = x.float().round() if noise is None else _integer_stochastic(x.float(), bits, noise)
    q = (whole + zero).clamp(format.qmin, format.qmax)
    return (q.where(~x.isnan(), zero).to(torch.int64) & ((1 << format.bits) - 1)).to(torch.uint8)


def _integer_stochastic(x: Tensor, bits: Tensor, noise: Tensor) -> Tensor:
    magnitude = bits & F32_MAGNITUDE
    field = magnitude >> 23
    significand = (magnitude & 0x7FFFFF).where(field == 0, (magnitude & 0x7FFFFF) | (1 << 23))
    shift = (23 - (field - 127).clamp(min=-126)).clamp(0, 40)
    floor = significand >> shift
    rest = significand - (floor << shift)
    rounded = (floor + ((((rest << 16) >> shift) + noise) >> 16)).float()
    return torch.where(magnitude >= 0x4B000000, x, torch.copysign(rounded, x))  # 2**23 and above are whole already


def decode(codes: Tensor, format: Format, dtype: torch.dtype = torch.float32) -> Tensor:
    """The exact values of ``codes`` (uint8, one a byte) in ``dtype``; a NaN keeps its code's sign."""
    table = torch.tensor(format.bits_table, dtype=torch.int64, device=codes.device)
    bits = table[codes.long() & ((1 << format.bits) - 1)]
    y = cast(from_bits(bits), dtype)
    negative_nan = bits == F32_NAN | F32_SIGN
    if not bool(negative_nan.any()):
        return y
    return torch.where(negative_nan, -y, y) if dtype == torch.float32 else _negate_where(y, negative_nan)


def _negate_where(y: Tensor, where: Tensor) -> Tensor:
    return (y.view(torch.int16) | (where.to(torch.int16) << 15)).view(y.dtype)


# -- tensors (sections 3, 5, 6, 10) --------------------------------------------------------------------------------
def quotient(x: Tensor, scale: Tensor) -> Tensor:
    """``|x| / |scale|`` with sign(x) xor sign(scale), a NaN's too; a scale of 0 divides as Inf."""
    size = from_bits(to_bits(scale) & F32_MAGNITUDE)
    magnitude = to_bits(x.float().abs() / size.where(size != 0, torch.inf)) & F32_MAGNITUDE
    return from_bits(magnitude | ((to_bits(x) ^ to_bits(scale)) & F32_SIGN))


def divide(x: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    """Quotients of ``x: [rows, cols]`` by the scales ``[R, C]`` of its blocks."""
    return quotient(x, spread(scale, scheme.block_of(*x.shape), *x.shape))


def quantize_static(
    x: Tensor, scheme: Scheme, scale: Tensor, zero_point: Tensor | None, outer: Tensor | None, rng: Rng | None
) -> Tensor:
    """Codes ``[rows, cols]`` (one a byte) of ``x`` for the scales given."""
    require_subnormals(x)
    zero = None if zero_point is None else spread(zero_point, scheme.block_of(*x.shape), *x.shape)
    return encode(divide(x, scale_value(scale, scheme, outer), scheme), scheme.format, rng, True, zero)


def quantize(x: Tensor, scheme: Scheme, outer: Tensor | None, rng: Rng | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes ``[rows, cols]`` (one a byte), scales and zero points of ``x``. Inf or NaN in a block: canonical codes."""
    require_subnormals(x)
    scale, zero_point = block_scales(x, scheme, outer)
    codes = quantize_static(x, scheme, scale, zero_point, outer, rng)
    broken = spread(scale_value(scale, scheme, outer).isnan(), scheme.block_of(*x.shape), *x.shape)
    format = scheme.format
    canonical = {
        "integer": 0,
        "codebook": format.zero_code,
        "float": format.nan_code if format.has_nan else format.max_code,
    }
    return codes.masked_fill(broken, canonical[format.kind]), scale, zero_point


def dequantize(
    codes: Tensor, scheme: Scheme, scale: Tensor, zero_point: Tensor | None, outer: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``code value * s`` in fp32, then one rounding to ``dtype``; ``codes: [rows, cols]``, one a byte."""
    require_subnormals(scale)
    block = scheme.block_of(*codes.shape)
    value = decode(codes, scheme.format)
    if zero_point is not None:
        value = value - spread(zero_point.float(), block, *codes.shape)
    return cast(value * spread(scale_value(scale, scheme, outer), block, *codes.shape), dtype)


def fake_quantize_backward(
    grad: Tensor, x: Tensor, scheme: Scheme, scale: Tensor, zero_point: Tensor | None, outer: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Straight-through gradient of ``x``; LSQ gradient of each block's scale (arXiv 1902.08153), fp32 ``[R, C]``."""
    block, format = scheme.block_of(*x.shape), scheme.format
    v = divide(x, scale_value(scale, scheme, outer), scheme)
    zero = torch.zeros_like(v) if zero_point is None else spread(zero_point.float(), block, *x.shape)
    if format.kind == "integer":
        kept = (v.round() + zero >= format.qmin) & (v.round() + zero <= format.qmax)
    else:
        kept = v.abs() <= format.max
    level = decode(encode(v, format, None, True, zero), format) - zero
    slope = torch.where(kept, level - v, level) * grad.float()
    grad_scale = in_blocks(slope, scheme).sum((1, 3))
    return grad.where(kept, 0.0), grad_scale


# -- matrix product (section 9) ------------------------------------------------------------------------------------
class Operand(NamedTuple):
    """One side of scaled_mm: a float matrix (``scheme`` None) or codes ``[rows, K]`` one a byte with their scales."""

    data: Tensor
    scheme: Scheme | None = None
    scale: Tensor | None = None
    zero_point: Tensor | None = None
    outer: Tensor | None = None

    @property
    def factors_out(self) -> bool:
        """Whether every row has one scale (and zero point), so that the scale can wait for the epilogue."""
        return self.scheme is None or self.scheme.scale_shape(*self.data.shape)[1] == 1

    def values(self, scaled: bool) -> Tensor:
        """fp64 matrix of the operand's values, in units of its scale unless ``scaled``."""
        if self.scheme is None or self.scale is None:
            return self.data.double()
        if scaled:
            return dequantize(self.data, self.scheme, self.scale, self.zero_point, self.outer, torch.float32).double()
        value = decode(self.data, self.scheme.format).double()
        if self.zero_point is None:
            return value
        return value - spread(self.zero_point.double(), self.scheme.block_of(*self.data.shape), *self.data.shape)

    def element_scales(self) -> Tensor:
        """fp32 ``[rows, K]``: the one scale of each element."""
        assert self.scheme is not None and self.scale is not None
        block = self.scheme.block_of(*self.data.shape)
        return spread(scale_value(self.scale, self.scheme, self.outer), block, *self.data.shape)

    def row_scale(self) -> Tensor:
        """fp32 ``[rows, 1]``: the scale of each row, where they factor out."""
        rows = self.data.shape[0]
        if self.scheme is None or self.scale is None:
            return torch.ones(rows, 1, device=self.data.device)
        return spread(scale_value(self.scale, self.scheme, self.outer), self.scheme.block_of(*self.data.shape), rows, 1)


#: Elements of a segment of an integer product, at most, and of the blocks along K that make one.
SEGMENT, MIN_INTEGER_BLOCK = 512, 8


def integer_segments(a: Operand, b: Operand) -> list[int] | None:
    """Where the segments of an integer product begin, and K at the end; None for products that are summed as floats."""
    cols, blocks = a.data.shape[1], []
    for x in (a, b):
        if x.scheme is None or x.scheme.format.kind != "integer":
            return None
        if not x.factors_out:
            blocks.append(x.scheme.block_of(*x.data.shape)[1])
    if any(block < MIN_INTEGER_BLOCK for block in blocks):
        return None
    edges = sorted({0, cols}.union(*(range(0, cols, block) for block in blocks)))
    if not blocks:
        return edges
    return [k for begin, end in pairwise(edges) for k in range(begin, end, SEGMENT)] + [cols]


def _sum_of_integers(a: Operand, b: Operand, edges: list[int]) -> Tensor:
    """fp32 sum over segments, in the order of K, of exact sums by scales."""
    left, right = a.values(False), b.values(False)
    a_scale, b_scale = (x.element_scales() for x in (a, b))
    total = torch.zeros(left.shape[0], right.shape[0], device=left.device)
    for begin, end in pairwise(edges):
        exact = (left[:, begin:end] @ right[:, begin:end].T).float()
        total = total + exact * (a_scale[:, begin, None] * b_scale[:, begin])
    return total


def scaled_mm(a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``a [M, K] @ b [N, K].T``: exact products summed in fp64, then scales, bias and cast in fp32, in that order.

    Integers whose scales change along K are summed exactly in each segment. NaN is canonical.
    """
    require_subnormals(a.data)
    whole = a.factors_out and b.factors_out
    edges = integer_segments(a, b)
    if edges is not None and not whole:
        total = _sum_of_integers(a, b, edges)
    else:
        total = (a.values(not whole) @ b.values(not whole).T).float()
    total = total + 0.0  # sums begin at +0
    if whole:
        total = total * (a.row_scale() * b.row_scale().T)
    if bias is not None:
        total = total + bias.float()
    return cast(total.masked_fill(total.isnan(), torch.nan), dtype)


def unpack(codes: Tensor, scheme: Scheme, cols: int) -> Tensor:
    """Codes one a byte from stored codes ``[rows, packed cols]``."""
    return packing.unpack(codes, scheme.format.bits, cols)
