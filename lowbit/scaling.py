"""Scalings and schemes: how a tensor is cut into blocks, and what is kept of each block's scale.

A *scaling* is a row of ``SCALINGS``: block shape, scale format, second (outer) level. A *scheme* is a format with a
scaling and options, written ``"fp8_e4m3:row"``, ``"uint4:group128:affine"``, ``"int8:tensor:e8m0"`` or by a short
name (``mxfp4``). No torch is needed here.

Source: docs/numerics.md section 5.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from lowbit import formats
from lowbit.formats import Format

__all__ = ["SCALE_FORMATS", "SCALINGS", "SHORT_NAMES", "ScaleFormat", "Scaling", "Scheme", "scheme"]


@dataclass(frozen=True)
class ScaleFormat:
    """What a block's scale is stored as. ``dtype`` is the stored tensor's torch dtype; ``id`` is what kernels see."""

    name: str
    id: int
    dtype: str
    rounding: str


#: fp32 scales are exact; bf16 and fp16 round up, so that nothing clips; e8m0 floors (or ceils); e4m3 is nearest.
SCALE_FORMATS: dict[str, ScaleFormat] = {
    row.name: row
    for row in (
        ScaleFormat("fp32", 0, "float32", "nearest"),
        ScaleFormat("bf16", 1, "bfloat16", "up"),
        ScaleFormat("fp16", 2, "float16", "up"),
        ScaleFormat("e8m0", 3, "uint8", "floor"),
        ScaleFormat("fp8_e4m3", 4, "uint8", "nearest"),
    )
}


@dataclass(frozen=True)
class Scaling:
    """Blocks of ``rows x cols`` elements (``None``: the whole axis), each with one scale.

    A tensor of any rank is seen as ``[rows, cols]`` with cols its last axis; blocks at the edges are smaller.
    ``outer`` adds one fp32 scale for the whole tensor above the blocks' scales.
    """

    name: str
    rows: int | None
    cols: int | None
    scale_format: str = "fp32"
    outer: bool = False

    def transposed(self) -> Scaling:
        return replace(self, rows=self.cols, cols=self.rows)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(f"a block needs at least one element along each axis, got {text}")
    return value


#: One row a scaling (or a family of them): a pattern for its name, and what it means. Names are API.
SCALINGS: dict[str, tuple[str, Callable[..., Scaling]]] = {
    "tensor": ("tensor", lambda name: Scaling(name, None, None)),
    "row": ("row", lambda name: Scaling(name, 1, None)),
    "col": ("col", lambda name: Scaling(name, None, 1)),
    "group{g}": (r"group(\d+)", lambda name, g: Scaling(name, 1, _positive(g))),
    "block{r}x{c}": (r"block(\d+)x(\d+)", lambda name, r, c: Scaling(name, _positive(r), _positive(c))),
    "mx": ("mx", lambda name: Scaling(name, 1, 32, "e8m0")),
    "nvfp4": ("nvfp4", lambda name: Scaling(name, 1, 16, "fp8_e4m3", outer=True)),
}

#: Short scheme names. Names are API.
SHORT_NAMES: dict[str, str] = {
    "mxfp8": "fp8_e4m3:mx",
    "mxfp6": "fp6_e2m3:mx",
    "mxfp4": "fp4_e2m1:mx",
    "nvfp4": "fp4_e2m1:nvfp4",
    "nf4": "nf4:group64",
}
_LONG_TO_SHORT = {long: short for short, long in SHORT_NAMES.items()}

_GRAMMAR = (
    "a scheme is SHORT or FORMAT:SCALING, then options, such as 'int8:row', 'uint4:group128:affine', 'mxfp4:ceil'; "
    f"short names: {', '.join(SHORT_NAMES)}; scalings: {', '.join(SCALINGS)}; "
    "options: affine, e8m0 | bf16 | fp16, floor | ceil, dq, T"
)


@dataclass(frozen=True)
class Scheme:
    """A format with a scaling: everything ``quantize`` needs to know. Made by ``scheme(text)``.

    ``block`` is ``(rows, cols)`` with ``None`` for a whole axis. ``ceil`` picks the E8M0 scale that never clips.
    ``affine`` adds a zero point to each block. ``outer`` is the second, fp32 level over the whole tensor.
    """

    name: str
    format: Format
    block: tuple[int | None, int | None]
    scale_format: ScaleFormat
    ceil: bool = False
    affine: bool = False
    outer: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def amax_divisor(self) -> float:
        """A block's scale is its amax (affine: its range) over this."""
        return float(self.format.qmax - self.format.qmin) if self.affine else self.format.max

    @property
    def outer_divisor(self) -> float:
        """The outer scale is the tensor's finite amax over this, so that the largest block scale is in range."""
        return self.format.max * formats.find(self.scale_format.name).max

    @property
    def scale_bits(self) -> int:
        """Bits of one stored scale (zero point included)."""
        return {"float32": 32, "bfloat16": 16, "float16": 16, "uint8": 8}[self.scale_format.dtype] + 8 * self.affine

    def block_of(self, rows: int, cols: int) -> tuple[int, int]:
        """The block as two integers, for a tensor of ``rows x cols``."""
        return self.block[0] or max(rows, 1), self.block[1] or max(cols, 1)

    def scale_shape(self, rows: int, cols: int) -> tuple[int, int]:
        """Shape of the scale (and zero point) of a tensor of ``rows x cols``: ``[ceil(rows/r), ceil(cols/c)]``."""
        r, c = self.block
        return (1 if r is None else -(-rows // r)), (1 if c is None else -(-cols // c))

    def packed_cols(self, cols: int) -> int:
        """Bytes that a row of ``cols`` codes takes."""
        return packed_cols(cols, self.format.bits)

    def t(self) -> Scheme:
        """The same scheme for the transposed tensor."""
        words = self.name.split(":")
        return scheme(":".join(words[:-1] if words[-1] == "T" else [*words, "T"]))

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of the codes, scales and zero points of a tensor of that shape."""
        rows, cols = as_matrix(shape)
        scales = prod(self.scale_shape(rows, cols)) * self.scale_bits // 8
        return rows * self.packed_cols(cols) + scales + 4 * self.outer

    def params(self) -> list[int]:
        """The plain integers by which kernels know a scheme, in csrc's order; a block that spans its axis is 0."""
        return [
            *self.format.params(), *(extent or 0 for extent in self.block),
            self.scale_format.id, int(self.ceil), int(self.affine), int(self.outer),
        ]  # fmt: skip


def packed_cols(cols: int, bits: int) -> int:
    """Bytes that a row of ``cols`` codes of ``bits`` bits takes."""
    return -(-cols * bits // 8)


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """``[rows, cols]`` of a tensor of any rank: cols is the last axis; a scalar is ``[1, 1]``."""
    return (prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def find_scaling(name: str) -> Scaling | None:
    for pattern, make in SCALINGS.values():
        match = re.fullmatch(pattern, name)
        if match:
            return make(name, *match.groups())
    return None


def scheme(text: str | Scheme) -> Scheme:
    """The scheme that ``text`` names, or the Scheme itself.

    Raises ValueError, with the grammar, for what is not one, and for a Scheme made by hand that its name does not
    stand for.
    """
    if isinstance(text, Scheme):
        named = scheme(text.name)
        if named is not text and named != text:  # ops know a scheme by its name, and would compute in the other
            raise ValueError(f"{text.name!r} names another scheme than this one; {_GRAMMAR}")
        return text
    if not isinstance(text, str):
        raise TypeError(f"a scheme is named by a string, got {type(text).__name__}; {_GRAMMAR}")
    found = _parsed.get(text)
    if found is None:
        found = _parse(text)
        if not formats.tracing():
            _parsed[text] = found
    return found


#: Schemes by every name they were asked for; kept as ``formats.find`` keeps formats.
_parsed: dict[str, Scheme] = {}


def _parse(text: str) -> Scheme:
    words = text.split(":")
    if words[0] in SHORT_NAMES and (len(words) == 1 or find_scaling(words[1]) is None):
        words = SHORT_NAMES[words[0]].split(":") + words[1:]
    if len(words) < 2:
        what = f"format {words[0]!r} without a scaling" if words[0] in formats.FORMATS else f"unknown scheme {text!r}"
        raise ValueError(f"{what}; {_GRAMMAR}")
    format, scaling, options = formats.find(words[0]), find_scaling(words[1]), words[2:]
    if scaling is None:
        raise ValueError(f"unknown scaling {words[1]!r} in {text!r}; {_GRAMMAR}")
    return _build(text, format, scaling, options)


def _build(text: str, format: Format, scaling: Scaling, options: list[str]) -> Scheme:
    def fail(why: str) -> ValueError:
        return ValueError(f"scheme {text!r}: {why}")

    known = {"affine", "e8m0", "bf16", "fp16", "floor", "ceil", "dq", "T"}
    for option in options:
        if option not in known or options.count(option) > 1:
            raise fail(f"unknown or repeated option {option!r}; {_GRAMMAR}")
    if format.bits > 8 or format.kind == "exponent":
        raise fail(f"{format.name} is no format for elements; use one of at most 8 bits, such as fp8_e4m3 or int8")
    affine = "affine" in options
    if affine and format.kind != "integer":
        raise fail(f"a zero point needs an integer format, and {format.name} is none; leave out 'affine'")
    if format.kind == "integer" and not format.signed and not affine:
        raise fail(
            f"{format.name} cannot hold negative numbers without a zero point; add ':affine' or use {format.name[1:]}"
        )
    chosen = [o for o in options if o in ("e8m0", "bf16", "fp16", "dq")]
    if len(chosen) > 1 or (chosen and scaling.scale_format != "fp32"):
        raise fail(f"one scale format at most; {scaling.name} has {scaling.scale_format}, and the options add {chosen}")
    if "dq" in options and format.kind != "codebook":
        raise fail(
            "'dq' (scales quantized to fp8 below one fp32 scale) is for codebooks; use the nvfp4 scaling instead"
        )
    outer = scaling.outer or "dq" in options
    if affine and outer:
        raise fail("a scheme with two levels of scales has no zero points; leave out 'affine', or use a group scaling")
    name = "fp8_e4m3" if outer else (chosen or [scaling.scale_format])[0]
    rounding = [o for o in options if o in ("floor", "ceil")]
    if rounding and (name != "e8m0" or len(rounding) > 1):
        raise fail("'floor' or 'ceil' says how an e8m0 scale is rounded; this scheme has none to round, or says both")
    if "T" in options:
        scaling = scaling.transposed()
    ceil = "ceil" in options
    kept = [o for o in ("affine", "e8m0", "bf16", "fp16", "ceil", "dq") if o in options]
    return Scheme(
        _canonical(format, scaling, kept),
        format,
        (scaling.rows, scaling.cols),
        SCALE_FORMATS[name],
        ceil,
        affine,
        outer,
    )


def _canonical(format: Format, scaling: Scaling, options: Sequence[str]) -> str:
    """The one name of a scheme: the short one if there is one; a transposed block's plain name if it has one."""
    for option, kind, outer in (("e8m0", "e8m0", False), ("dq", "fp8_e4m3", True)):
        if option in options:  # a scaling may have such scales of its own: int8:group32:e8m0 is int8:mx
            wanted = replace(scaling, scale_format=kind, outer=outer)
            for row in filter(None, map(find_scaling, SCALINGS)):
                for turned in (row, row.transposed()):
                    if turned == replace(wanted, name=row.name):
                        return _canonical(format, turned, [o for o in options if o != option])
    for pattern, make in SCALINGS.values():
        for name in (scaling.name, "row", "col", f"group{scaling.cols}", f"block{scaling.rows}x{scaling.cols}"):
            match = re.fullmatch(pattern, name)
            if match and make(name, *match.groups()) == replace(scaling, name=name):
                base = f"{format.name}:{name}"
                return ":".join([_LONG_TO_SHORT.get(base, base), *options])
    base = f"{format.name}:{scaling.name}"
    return ":".join([_LONG_TO_SHORT.get(base, base), *options, "T"])
