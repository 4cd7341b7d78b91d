"""Number formats: one table, everything else derived.

This module imports nothing outside the standard library, so that the build can generate the C++ format table from
it before torch exists. Adding a format means adding one row to ``FORMATS``.

Source: docs/numerics.md sections 2 to 4.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from hashlib import sha256
from math import frexp, inf, isnan, nan

__all__ = ["FORMATS", "Format", "find", "float_format", "fp32_bits", "fp32_value", "power_of_two"]

#: Numbers by which kernels know a format's kind; generated into the C++ header.
KINDS = {"float": 0, "integer": 1, "codebook": 2, "exponent": 3}


def fp32_bits(value: float) -> int:
    """The 32 bits of ``value`` rounded to fp32 (nearest even)."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def power_of_two(value: float) -> int | None:
    """``e`` where ``|value|`` is ``2**e``; None where it is no power of two."""
    fraction, exponent = frexp(abs(value))
    return exponent - 1 if fraction == 0.5 else None


def fp32_value(bits: int) -> float:
    """The number that 32 ``bits`` of fp32 stand for."""
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def _nearest_bits(exact: Fraction) -> int:
    """The 32 bits of a positive number rounded to fp32 once: by way of a double it could round twice."""
    bits = fp32_bits(float(exact))
    return min((bits - 1, bits, bits + 1), key=lambda near: (abs(Fraction(fp32_value(near)) - exact), near & 1))


@dataclass(frozen=True)
class Format:
    """One number format.

    ``kind`` is ``float`` (sign, exponent, mantissa), ``integer``, ``codebook`` (a table of values) or ``exponent``
    (E8M0: a power of two, no sign, no zero). ``nan`` is ``none``, ``ieee`` (top exponent holds Inf and NaN) or
    ``all_ones`` (only the code with every exponent and mantissa bit set is NaN).
    """

    name: str
    kind: str
    bits: int
    exponent: int = 0
    mantissa: int = 0
    bias: int = 0
    nan: str = "none"
    signed: bool = True
    codebook: tuple[float, ...] = ()
    torch_dtype: str | None = None
    source: str = ""

    @property
    def layout(self) -> str:
        """Bits of sign, exponent and mantissa, as ``1-4-3``; of other kinds, the kind."""
        if self.kind not in ("float", "exponent"):
            return self.kind
        return f"{int(self.signed)}-{self.exponent}-{self.mantissa}"

    def __str__(self) -> str:
        return self.name

    # -- codes ---------------------------------------------------------------------------------------------------
    @property
    def has_inf(self) -> bool:
        return self.nan == "ieee"

    @property
    def has_nan(self) -> bool:
        return self.nan != "none"

    @property
    def max_code(self) -> int:
        """The code of the largest finite value (for integers: of ``qmax``)."""
        if self.kind == "integer":
            return self.qmax
        if self.kind == "codebook":
            return len(self.codebook) - 1
        if self.kind == "exponent":
            return (1 << self.bits) - 2
        top = (1 << (self.exponent + self.mantissa)) - 1
        return {"none": top, "all_ones": top - 1, "ieee": top - (1 << self.mantissa)}[self.nan]

    @property
    def inf_code(self) -> int:
        """The code of +Inf, or -1."""
        return self.max_code + 1 if self.has_inf else -1

    @property
    def nan_code(self) -> int:
        """The canonical positive NaN code (all magnitude bits set), or -1."""
        return (1 << (self.bits - self.signed)) - 1 if self.has_nan else -1

    @property
    def zero_code(self) -> int:
        """The code of the value nearest to zero (what NaN becomes in a codebook)."""
        return min(range(len(self.codebook)), key=lambda k: abs(self.codebook[k])) if self.codebook else 0

    def value(self, code: int) -> float:
        """The exact value of ``code`` (an integer in ``[0, 2**bits)``)."""
        if not 0 <= code < 1 << self.bits:
            raise ValueError(f"{self.name} has codes 0..{(1 << self.bits) - 1}, got {code}")
        if self.kind == "integer":
            return float(code - (1 << self.bits) if self.signed and code >> (self.bits - 1) else code)
        if self.kind == "codebook":
            return self.codebook[code]
        if self.kind == "exponent":
            return nan if code == self.nan_code else 2.0 ** (code - self.bias)
        magnitude = code & ((1 << (self.bits - 1)) - 1)
        sign = -1.0 if code >> (self.bits - 1) else 1.0
        if magnitude > self.max_code:
            return sign * inf if magnitude == self.inf_code else sign * nan
        field, fraction = magnitude >> self.mantissa, magnitude & ((1 << self.mantissa) - 1)
        if field == 0:
            return sign * fraction * 2.0 ** (1 - self.bias - self.mantissa)
        return sign * (fraction + (1 << self.mantissa)) * 2.0 ** (field - self.bias - self.mantissa)

    @cached_property
    def table(self) -> tuple[float, ...]:
        """The value of every code; formats of at most 8 bits only."""
        self.require_codes("a decode table")
        return tuple(self.value(code) for code in range(1 << self.bits))

    @cached_property
    def bits_table(self) -> tuple[int, ...]:
        """The fp32 bit pattern of every code's value; a NaN is 0x7fc00000 with the code's sign."""
        sign = self.bits - 1
        return tuple(
            0x7FC00000 | (((code >> sign) << 31) if self.signed else 0) if isnan(value) else fp32_bits(value)
            for code, value in enumerate(self.table)
        )

    @cached_property
    def thresholds(self) -> tuple[int, ...]:
        """Codebooks: fp32 bits of the largest fp32 at or below each exact midpoint; code = number of them below x."""
        found = []
        for low, high in zip(self.codebook, self.codebook[1:], strict=False):
            middle = (Fraction(low) + Fraction(high)) / 2
            bits = fp32_bits(float(middle))
            while Fraction(fp32_value(bits)) > middle:  # one step towards -Inf
                bits = bits - 1 if 0 < bits < 0x80000000 else 0x80000001 if bits == 0 else bits + 1
            found.append(bits)
        return tuple(found)

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """Codebooks: fp32 bits of the number nearest 2**16 over the distance to the next entry; 0 of the last."""
        gaps = (Fraction(high) - Fraction(low) for low, high in zip(self.codebook, self.codebook[1:], strict=False))
        return (*(_nearest_bits(65536 / gap) for gap in gaps), 0)

    # -- range ---------------------------------------------------------------------------------------------------
    @property
    def qmin(self) -> int:
        return -(1 << (self.bits - 1)) if self.signed else 0

    @property
    def qmax(self) -> int:
        return (1 << (self.bits - self.signed)) - 1

    @property
    def max(self) -> float:
        """The largest finite value; what an amax is scaled to."""
        if self.kind == "float":
            field, fraction = self.max_code >> self.mantissa, self.max_code & ((1 << self.mantissa) - 1)
            if field == 0:
                return fraction * 2.0 ** (1 - self.bias - self.mantissa)
            return (fraction + (1 << self.mantissa)) * 2.0 ** (field - self.bias - self.mantissa)
        return self.value(self.max_code)

    @property
    def emin(self) -> int:
        """The exponent of the least normal value."""
        return 1 - self.bias

    @property
    def min_normal(self) -> float:
        """The least positive normal value (integers: 1; codebooks: the least positive entry)."""
        if self.kind == "float":
            return 2.0**self.emin
        return 2.0**-self.bias if self.kind == "exponent" else self.min_subnormal

    @property
    def min_subnormal(self) -> float:
        """The least positive value."""
        if self.kind == "float":
            return 2.0 ** (self.emin - self.mantissa)
        if self.kind == "codebook":
            return min(v for v in self.codebook if v > 0)
        return 2.0**-self.bias if self.kind == "exponent" else 1.0

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next larger value (codebooks: the widest gap)."""
        if self.kind == "codebook":
            return max(b - a for a, b in zip(self.codebook, self.codebook[1:], strict=False))
        return 2.0**-self.mantissa

    @property
    def in_bf16(self) -> bool:
        """Whether bf16 holds every value."""
        return not any(bits & 0xFFFF for bits in self.bits_table)

    @property
    def num_finite(self) -> int:
        """How many codes decode to a finite value; +0 and -0 are two."""
        if self.kind in ("integer", "codebook"):
            return 1 << self.bits
        return (self.max_code + 1) * (2 if self.signed else 1)

    # -- for kernels ---------------------------------------------------------------------------------------------
    def params(self) -> list[int]:
        """The plain integers by which kernels know a format; the order is that of ``FormatParams`` in csrc."""
        self.require_codes("kernels")
        return [
            KINDS[self.kind], self.bits, self.exponent, self.mantissa, self.bias, int(self.signed),
            self.max_code, self.inf_code, self.nan_code, self.qmin, self.qmax, self.codebook_index,
        ]  # fmt: skip

    @property
    def codebook_index(self) -> int:
        """The position of this codebook among those of ``FORMATS``; -1 for other kinds. Raises ValueError."""
        books = [row for row in FORMATS.values() if row.kind == "codebook"]
        if self.kind == "codebook" and self not in books:
            raise ValueError(f"kernels know the codebooks that are rows of FORMATS, and {self.name} is none")
        return books.index(self) if self.kind == "codebook" else -1

    def require_codes(self, what: str) -> None:
        if self.bits > 8:
            raise ValueError(f"{what}: {self.name} has {self.bits} bits; only formats of at most 8 bits have codes")


def _float(name: str, exponent: int, mantissa: int, bias: int, nan: str = "none", **more: str) -> Format:
    return Format(name, "float", 1 + exponent + mantissa, exponent, mantissa, bias, nan, **more)  # type: ignore[arg-type]


def _integer(bits: int, signed: bool) -> Format:
    name = f"{'' if signed else 'u'}int{bits}"
    dtype = name if bits == 8 else None
    source = "ONNX QuantizeLinear; int4 is stored as two's complement 4-bit codes"
    return Format(name, "integer", bits, signed=signed, torch_dtype=dtype, source=source)


_OFP8, _MX = "OCP OFP8 v1.0", "OCP Microscaling (MX) v1.0"
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def _codebook(name: str, values: Iterable[Fraction | float], source: str) -> Format:
    """The format whose entries are these values, in order and each rounded to fp32."""
    entries = tuple(sorted(fp32_value(fp32_bits(float(value))) for value in values))
    bits = (len(entries) - 1).bit_length()
    return Format(name, "codebook", bits, signed=entries[0] < 0, codebook=entries, source=source)


def _dynamic(bits: int, signed: bool) -> list[Fraction]:
    """A dynamic tree: 0, 1, and below it ``bits - 1`` decades, each with twice as many values as the one below.

    A decade's values are the middles of equal steps from a tenth of its end to the end.
    """
    values = [Fraction(0), Fraction(1)]
    for decade in range(bits - 1):
        end, steps = Fraction(1, 10 ** (bits - 2 - decade)), 2 ** (decade + (not signed))
        for step in range(steps):
            middle = end * (Fraction(1, 10) + Fraction(9, 10) * Fraction(2 * step + 1, 2 * steps))
            values += [middle, -middle] if signed else [middle]
    return values


def _expanded(y: Fraction) -> Fraction:
    """What the compander ``y = 2x / (1 + |x|)`` makes ``y`` of."""
    return y / (2 - abs(y))


_TREE, _COMPANDER = "dynamic tree, arXiv 2110.02861", "compander of arXiv 2602.23349"

#: Every named format. Names are API.
FORMATS: dict[str, Format] = {
    row.name: row
    for row in (
        _float("fp8_e4m3", 4, 3, 7, "all_ones", torch_dtype="float8_e4m3fn", source=_OFP8),
        _float("fp8_e5m2", 5, 2, 15, "ieee", torch_dtype="float8_e5m2", source=_OFP8),
        _float("fp6_e3m2", 3, 2, 3, source=_MX),
        _float("fp6_e2m3", 2, 3, 1, source=_MX),
        _float("fp4_e2m1", 2, 1, 1, source=_MX),
        Format("e8m0", "exponent", 8, 8, 0, 127, "all_ones", signed=False, torch_dtype="float8_e8m0fnu", source=_MX),
        _integer(8, True),
        _integer(8, False),
        _integer(4, True),
        _integer(4, False),
        _integer(3, True),
        _integer(3, False),
        _integer(2, True),
        _integer(2, False),
        _codebook("nf4", _NF4, "QLoRA, arXiv 2305.14314, appendix E"),
        _codebook("dynamic8", _dynamic(8, signed=True), _TREE),
        _codebook("udynamic8", _dynamic(8, signed=False), _TREE),
        _codebook("dynamic4", _dynamic(4, signed=True), f"{_TREE}; 4 bits as in arXiv 2309.01507"),
        _codebook("ulog4", (2.0 ** ((k - 15) / 2) for k in range(16)), "powers of the square root of 2, up to 1"),
        _codebook("compand8", (_expanded(Fraction(k, 127 + (k < 0))) for k in range(-128, 128)), _COMPANDER),
        _codebook("ucompand8", (_expanded(Fraction(k, 256)) for k in range(1, 257)), _COMPANDER),
        _float("fp16", 5, 10, 15, "ieee", torch_dtype="float16", source="IEEE 754 binary16"),
        _float("bf16", 8, 7, 127, "ieee", torch_dtype="bfloat16", source="Google Brain bfloat16"),
        _float("tf32", 8, 10, 127, "ieee", source="NVIDIA A100 whitepaper"),
        _float("fp32", 8, 23, 127, "ieee", torch_dtype="float32", source="IEEE 754 binary32"),
    )
}


def fingerprint() -> str:
    """A hash of what native code is generated from: it differs when a row with codes does."""
    rows = [(f.name, f.params(), f.codebook) for f in FORMATS.values() if f.bits <= 8]
    return sha256(repr(rows).encode()).hexdigest()[:16]


_CUSTOM = re.compile(r"e(\d)m(\d)(?:b(-?\d+))?(i?)(n?)")


def float_format(
    exponent: int, mantissa: int, bias: int | None = None, *, inf: bool = False, nan: bool | None = None
) -> Format:
    """A floating-point format of your own: 1 sign bit, ``exponent`` and ``mantissa`` bits, at most 8 in all.

    ``bias`` defaults to ``2**(exponent - 1) - 1``. ``inf`` reserves the top exponent for Inf and NaN as IEEE 754
    does; ``nan`` alone makes the one all-ones code NaN, as OFP8 E4M3 does. Parameters that equal a row of ``FORMATS``
    return that row. The name (``e2m1b3``, ``e4m3n``) says everything, so ``find(name)`` rebuilds the format.

    Raises: ValueError when the bits do not fit or a value would not be exact in fp32.
    """
    if exponent < 1 or mantissa < 0 or 1 + exponent + mantissa > 8:
        raise ValueError(
            f"a custom float format needs exponent >= 1, mantissa >= 0 and at most 8 bits with the sign; "
            f"got 1-{exponent}-{mantissa} ({1 + exponent + mantissa} bits)"
        )
    bias = 2 ** (exponent - 1) - 1 if bias is None else bias
    kind = "ieee" if inf else "all_ones" if nan else "none"
    if inf and (nan is False or exponent < 2 or mantissa < 1):
        raise ValueError("inf=True reserves the top exponent, and so needs exponent >= 2, mantissa >= 1 and NaN")
    for row in FORMATS.values():
        if row.kind == "float" and (row.exponent, row.mantissa, row.bias, row.nan) == (exponent, mantissa, bias, kind):
            return row
    shown = "" if bias == 2 ** (exponent - 1) - 1 else f"b{bias}"
    flags = "in" if inf else "n" if nan else ""
    made = _float(f"e{exponent}m{mantissa}{shown}{flags}", exponent, mantissa, bias, kind, source="float_format()")
    if made.max_code < 1 or made.emin - mantissa < -126 or (1 << exponent) - bias > 127:
        raise ValueError(
            f"{made.name}: every value must be a normal fp32 number, "
            f"but it runs from 2**{made.emin - mantissa} to about 2**{(1 << exponent) - bias}; choose another bias"
        )
    return made


def _parse(name: str) -> Format:
    match = _CUSTOM.fullmatch(name)
    if match:
        exponent, mantissa, bias, has_inf, has_nan = match.groups()
        return float_format(
            int(exponent), int(mantissa), int(bias) if bias else None, inf=bool(has_inf), nan=bool(has_nan) or None
        )
    raise ValueError(
        f"unknown format {name!r}; expected one of {', '.join(FORMATS)}, or a float_format() name such as e2m1b3"
    )


def find(format: str | Format) -> Format:
    """The format of that name (a row of ``FORMATS`` or a ``float_format`` name), or the Format itself.

    Raises ValueError for an unknown name, and for a Format made by hand that its name does not stand for.
    """
    if isinstance(format, Format):
        named = find(format.name)
        if named is not format and named != format:  # ops know a format by its name, and would compute in the other
            raise ValueError(f"{format.name!r} names another format than this one; make your own with float_format()")
        return format
    if not isinstance(format, str):
        raise TypeError(f"a format is a Format or a name such as 'fp8_e4m3', got {type(format).__name__}")
    found = _found.get(format)
    if found is None:
        found = _parse(format)
        if not tracing():
            _found[format] = found
    return found


#: Formats by every name they were asked for. A plain dict, since torch.compile looks through one without complaint;
#: but not through a change of one that it has just guarded.
_found: dict[str, Format] = dict(FORMATS)

#: Whether torch.compile is tracing this code. A hook, since this module knows no torch: ``lowbit.ops`` sets it.
tracing: Callable[[], bool] = bool
