"""The whole of encode as a few hundred intervals of fp32 patterns: every rounding boundary of a format, exact.

Made from the rationals of oracles.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise

import numpy as np
from support.oracles import (
    F32_INF,
    F32_NAN,
    SIGN,
    block_scale,
    encode,
    floor_log2,
    from_bits,
    limits,
    magnitudes,
    nan_code,
    onto_grid,
    power,
    to_bits,
    value_of,
)  # fmt: skip

from lowbit.formats import Format
from lowbit.scaling import Scheme


@dataclass(frozen=True)
class Segments:
    """Codes of all fp32 patterns of one sign: ``codes[i]`` from magnitude ``starts[i]`` to before ``starts[i + 1]``."""

    starts: np.ndarray
    codes: np.ndarray

    def fill(self, out: np.ndarray, begin: int) -> None:
        """The codes of the magnitudes ``begin, begin + 1, ...``: one fill an interval."""
        edges = [*np.clip(self.starts.astype(np.int64) - begin, 0, len(out)).tolist(), len(out)]
        for i, code in enumerate(self.codes):
            out[edges[i] : edges[i + 1]] = code


def _first_above(value: Fraction, or_equal: bool) -> int:
    """The least fp32 magnitude pattern of a number > (or >=) ``value >= 0``."""
    bits = to_bits(value)
    found = from_bits(bits)
    return bits + 1 if found < value or (found == value and not or_equal) else bits


@cache
def scale_segments(scheme: Scheme, global_scale: Fraction | None) -> Segments:
    """Stored scales (E8M0 or E4M3 codes, which rise with the amax) of blocks of one positive number, by bisection."""

    def code(bits: int) -> int:
        return block_scale([bits], scheme, global_scale).stored

    starts, last = [0, 1], F32_INF - 1
    while (now := code(starts[-1])) != code(last):
        low, high = starts[-1], last  # code(low) == now != code(high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if code(middle) == now else (low, middle)
        starts.append(high)
    starts.append(F32_INF)
    return Segments(np.array(starts), np.array([code(bits) for bits in starts]))


@cache
def segments(f: Format, saturate: bool, negative: bool) -> Segments:
    """Every rounding boundary of a format, exact: midpoints of neighbours, with ties settled by section 2."""
    steps: list[tuple[int, int]] = []
    if f.kind == "codebook":
        zero = nan_code(f, False)
        entries = [value_of(f, code) for code in range(1 << f.bits)]
        middles = [(low + high) / 2 for low, high in pairwise(entries)]
        steps.append((0, sum(m < 0 for m in middles)))
        if negative:
            steps += [(_first_above(-m, True), k) for k, m in reversed(list(enumerate(middles))) if m < 0]
        else:
            steps += [(_first_above(m, False), k + 1) for k, m in enumerate(middles) if m >= 0]
        return _table(steps, zero)
    if f.kind == "integer":
        low, high = limits(f)
        last, mask, sign = (-low if negative else high), (1 << f.bits) - 1, -1 if negative else 1
        steps = [(0, 0)]
        steps += [(_first_above(Fraction(2 * q - 1, 2), q % 2 == 0), sign * q & mask) for q in range(1, last + 1)]
        return _table(steps, 0)
    values = magnitudes(f)
    beyond = values[-1] + power(max(floor_log2(values[-1]), 1 - f.bias) - f.mantissa)
    sign = negative << (f.bits - 1)
    over = encode(f, F32_INF, saturate)
    for code, (low, high) in enumerate(zip(values, [*values[1:], beyond], strict=True)):
        middle = (low + high) / 2
        up = onto_grid(middle, f.mantissa, 1 - f.bias) == high
        steps.append((_first_above(middle, up), (code + 1 if high < beyond else over) | sign))
    return _table([(0, sign), *steps], nan_code(f, negative))


def _table(steps: list[tuple[int, int]], nan: int) -> Segments:
    starts, codes = zip(*steps, (F32_INF + 1, nan), strict=True)
    return Segments(np.array(starts, np.uint32), np.array(codes, np.uint8))


def expected_codes(f: Format, saturate: bool, bits: np.ndarray) -> np.ndarray:
    """The codes of fp32 patterns, from the boundaries."""
    magnitude = bits & np.uint32(0x7FFFFFFF)
    both = []
    for negative in (False, True):
        s = segments(f, saturate, negative)
        both.append(s.codes[np.searchsorted(s.starts, magnitude, "right") - 1])
    return np.where(bits >> 31, both[1], both[0])


def neighbourhood(f: Format) -> np.ndarray:
    """Patterns at every rounding boundary and value of a format, +-2 ulp, both signs, with Inf and NaN."""
    found = {0, 1, 0x7F7FFFFF, F32_INF, F32_INF + 1, F32_NAN, 0x7FFFFFFF}
    for negative in (False, True):
        found |= set(segments(f, True, negative).starts.tolist()) | set(segments(f, False, negative).starts.tolist())
    found |= {to_bits(abs(v)) for c in range(1 << f.bits) if isinstance(v := value_of(f, c), Fraction)}
    near = {m + d for m in found for d in (-2, -1, 0, 1, 2) if 0 <= m + d < SIGN}
    magnitudes_ = np.array(sorted(near), np.uint32)
    return np.concatenate([magnitudes_, magnitudes_ | np.uint32(SIGN)])
