"""The table of number formats, from which everything else about a format is derived.

This module imports only the standard library, so the build can generate the C++ format table before torch is
installed. To add a format, add a row to ``FORMATS``.

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

#: Numbers of the kinds in kernels; generated into the C++ header.
KINDS = {"float": 0, "integer": 1, "codebook": 2, "exponent": 3}


def fp32_bits(value: float) -> int:
    """The 32 bits of ``value`` rounded to fp32 (nearest even)."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def power_of_two(value: float) -> int | None:
    """The exponent ``e`` if ``|value|`` is ``2**e``, else None."""
    fraction, exponent = frexp(abs(value))
    return exponent - 1 if fraction == 0.5 else None


def fp32_value(bits: int) -> float:
    """The fp32 number with these 32 ``bits``."""
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def _nearest_bits(exact: Fraction) -> int:
    """The 32 bits of a positive number rounded to fp32 once; rounding to a double first could round it twice."""
    bits = fp32_bits(float(exact))
    return min((bits - 1, bits, bits + 1), key=lambda near: (abs(Fraction(fp32_value(near)) - exact), near & 1))


@dataclass(frozen=True)
class Format:
    """A number format; made by a row of ``FORMATS`` or by ``float_format``."""

    #: The name by which functions, schemes and ops find it.
    name: str
    #: ``float``, ``integer``, ``codebook`` (a table of values) or ``exponent`` (E8M0: a power of two, no sign or zero).
    kind: str
    #: Bits per code.
    bits: int
    #: Exponent bits.
    exponent: int = 0
    #: Mantissa bits.
    mantissa: int = 0
    #: Exponent bias.
    bias: int = 0
    #: ``none``, ``ieee`` (the top exponent is Inf and NaN) or ``all_ones`` (only the all-ones magnitude is NaN).
    nan: str = "none"
    #: Whether there are negative values.
    signed: bool = True
    #: The values in ascending order, for codebooks.
    codebook: tuple[float, ...] = ()
    #: Name of the torch dtype with the same codes, if there is one.
    torch_dtype: str | None = None
    #: Reference of the definition.
    source: str = ""

    @property
    def layout(self) -> str:
        """Bits of sign, exponent and mantissa, such as ``1-4-3``; for other kinds the kind."""
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
        """The code of the largest finite value (integers: ``qmax``)."""
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
        """The code of the value nearest to zero; a codebook encodes NaN as this."""
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
        """The values of all codes; only for formats of at most 8 bits."""
        self.require_codes("a decode table")
        return tuple(self.value(code) for code in range(1 << self.bits))

    @cached_property
    def bits_table(self) -> tuple[int, ...]:
        """The fp32 bit patterns of all values; NaN is 0x7fc00000 with the code's sign."""
        sign = self.bits - 1
        return tuple(
            0x7FC00000 | (((code >> sign) << 31) if self.signed else 0) if isnan(value) else fp32_bits(value)
            for code, value in enumerate(self.table)
        )

    @cached_property
    def thresholds(self) -> tuple[int, ...]:
        """Codebooks: fp32 bits of the largest fp32 at or below each exact midpoint; code = number of them below x."""
        thresholds = []
        for low, high in zip(self.codebook, self.codebook[1:], strict=False):
            middle = (Fraction(low) + Fraction(high)) / 2
            bits = fp32_bits(float(middle))
            while Fraction(fp32_value(bits)) > middle:  # one step towards -Inf
                bits = bits - 1 if 0 < bits < 0x80000000 else 0x80000001 if bits == 0 else bits + 1
            thresholds.append(bits)
        return tuple(thresholds)

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """Codebooks: fp32 bits of 2**16 / (distance to the next entry), rounded to nearest; 0 for the last entry."""
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
        """The largest finite value, to which the amax of a block is scaled."""
        if self.kind == "float":
            field, fraction = self.max_code >> self.mantissa, self.max_code & ((1 << self.mantissa) - 1)
            if field == 0:
                return fraction * 2.0 ** (1 - self.bias - self.mantissa)
            return (fraction + (1 << self.mantissa)) * 2.0 ** (field - self.bias - self.mantissa)
        return self.value(self.max_code)

    @property
    def emin(self) -> int:
        """The exponent of the smallest normal value."""
        return 1 - self.bias

    @property
    def min_normal(self) -> float:
        """The smallest positive normal value (integers: 1; codebooks: the smallest positive entry)."""
        if self.kind == "float":
            return 2.0**self.emin
        return 2.0**-self.bias if self.kind == "exponent" else self.min_subnormal

    @property
    def min_subnormal(self) -> float:
        """The smallest positive value."""
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
        """Whether bf16 represents every value exactly."""
        return not any(bits & 0xFFFF for bits in self.bits_table)

    @property
    def num_finite(self) -> int:
        """Number of codes with a finite value; +0 and -0 are two."""
        if self.kind in ("integer", "codebook"):
            return 1 << self.bits
        return (self.max_code + 1) * (2 if self.signed else 1)

    # -- for kernels ---------------------------------------------------------------------------------------------
    def params(self) -> list[int]:
        """The integers that describe the format to kernels, in the order of ``FormatParams`` in csrc."""
        self.require_codes("kernels")
        return [
            KINDS[self.kind], self.bits, self.exponent, self.mantissa, self.bias, int(self.signed),
            self.max_code, self.inf_code, self.nan_code, self.qmin, self.qmax, self.codebook_index,
        ]  # fmt: skip

    @property
    def codebook_index(self) -> int:
        """Index of this codebook among the codebooks of ``FORMATS``; -1 for other kinds."""
        codebooks = [row for row in FORMATS.values() if row.kind == "codebook"]
        if self.kind == "codebook" and self not in codebooks:
            raise ValueError(f"kernels support only codebooks of FORMATS, not {self.name}; add a row to FORMATS")
        return codebooks.index(self) if self.kind == "codebook" else -1

    def require_codes(self, what: str) -> None:
        if self.bits > 8:
            raise ValueError(
                f"{what}: {self.name} has {self.bits} bits; only formats of at most 8 bits have codes; "
                f"lowbit.round_to rounds values to {self.name}"
            )


def _float(name: str, exponent: int, mantissa: int, bias: int, nan: str = "none", **more: str) -> Format:
    return Format(name, "float", 1 + exponent + mantissa, exponent, mantissa, bias, nan, **more)  # type: ignore[arg-type]


def _integer(bits: int, signed: bool) -> Format:
    name = f"{'' if signed else 'u'}int{bits}"
    dtype = name if bits == 8 else None
    source = "ONNX QuantizeLinear" + ("; two's complement codes" if signed else "")
    return Format(name, "integer", bits, signed=signed, torch_dtype=dtype, source=source)


_OFP8, _MX = "OCP OFP8 v1.0", "OCP Microscaling (MX) v1.0"
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def _codebook(name: str, values: Iterable[Fraction | float], source: str) -> Format:
    """A codebook of these values, sorted and rounded to fp32."""
    entries = tuple(sorted(fp32_value(fp32_bits(float(value))) for value in values))
    bits = (len(entries) - 1).bit_length()
    return Format(name, "codebook", bits, signed=entries[0] < 0, codebook=entries, source=source)


def _dynamic(bits: int, signed: bool) -> list[Fraction]:
    """A dynamic tree: 0, 1, and ``bits - 1`` decades below 1, each with twice as many values as the next smaller one.

    A decade's values are the midpoints of equal steps from a tenth of its end to the end.
    """
    values = [Fraction(0), Fraction(1)]
    for decade in range(bits - 1):
        end, steps = Fraction(1, 10 ** (bits - 2 - decade)), 2 ** (decade + (not signed))
        for step in range(steps):
            middle = end * (Fraction(1, 10) + Fraction(9, 10) * Fraction(2 * step + 1, 2 * steps))
            values += [middle, -middle] if signed else [middle]
    return values


def _expanded(y: Fraction) -> Fraction:
    """The inverse of the compander ``y = 2x / (1 + |x|)``."""
    return y / (2 - abs(y))


_TREE, _COMPANDER = "dynamic tree, arXiv 2110.02861", "compander of arXiv 2602.23349"

#: All named formats. Names are API.
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
        _integer(6, True),
        _integer(6, False),
        _integer(5, True),
        _integer(5, False),
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
    """A hash of the rows from which native code is generated."""
    rows = [(f.name, f.params(), f.codebook) for f in FORMATS.values() if f.bits <= 8]
    return sha256(repr(rows).encode()).hexdigest()[:16]


_CUSTOM = re.compile(r"e(\d)m(\d)(?:b(-?\d+))?(i?)(n?)")


def float_format(
    exponent: int, mantissa: int, bias: int | None = None, *, inf: bool = False, nan: bool | None = None
) -> Format:
    """A custom floating-point format of at most 8 bits, with a sign bit.

    Its name, such as ``e2m1b3`` or ``e4m3n``, contains all parameters, so functions also accept the name.

    Args:
        exponent: Exponent bits, at least 1.
        mantissa: Mantissa bits.
        bias: Exponent bias; by default ``2**(exponent - 1) - 1``.
        inf: Reserve the top exponent for Inf and NaN, as IEEE 754 does.
        nan: Without ``inf``, make only the code with all magnitude bits set NaN, as OFP8 E4M3 does.

    Returns:
        The format; the row of ``FORMATS`` if one has these parameters.

    Raises:
        ValueError: There are too many bits, or a value would not be a normal fp32 number.
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
    suffix = "" if bias == 2 ** (exponent - 1) - 1 else f"b{bias}"
    flags = "in" if inf else "n" if nan else ""
    name = f"e{exponent}m{mantissa}{suffix}{flags}"
    format = _float(name, exponent, mantissa, bias, kind, source="float_format()")
    if format.max_code < 1 or format.emin - mantissa < -126 or (1 << exponent) - bias > 127:
        raise ValueError(
            f"{name}: every value must be a normal fp32 number, "
            f"but it runs from 2**{format.emin - mantissa} to about 2**{(1 << exponent) - bias}; choose another bias"
        )
    return format


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
    """The format with this name (of ``FORMATS`` or ``float_format``), or the Format itself.

    Raises:
        TypeError: ``format`` is neither a Format nor a string.
        ValueError: The name is unknown, or a Format differs from the format with its name.
    """
    if isinstance(format, Format):
        named = find(format.name)
        if named is not format and named != format:  # ops look a format up by name, and would use the other
            raise ValueError(f"another format is named {format.name!r}; use float_format() for a custom format")
        return format
    if not isinstance(format, str):
        raise TypeError(f"a format is a Format or a name such as 'fp8_e4m3', got {type(format).__name__}")
    row = _cache.get(format)
    if row is None:
        row = _parse(format)
        if not tracing():
            _cache[format] = row
    return row


#: Formats by name. A plain dict, because torch.compile can trace reads of it; it cannot trace a write after a guard.
_cache: dict[str, Format] = dict(FORMATS)

#: Whether torch.compile is tracing. A hook that ``lowbit.ops`` sets, because this module does not import torch.
tracing: Callable[[], bool] = bool
