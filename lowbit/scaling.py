"""Scalings and schemes: how a tensor is cut into blocks, and what is kept of each block's scale.

A *scaling* is a row of ``SCALINGS``: block shape, scale format, global scale. A *scheme* is a format with a scaling and
options, written ``"fp8_e4m3:row"``, ``"uint4:group128:affine"``, ``"int4:group32:e4m3"`` or by a short name
(``mxfp4``). No torch is needed here.

Source: docs/numerics.md section 5.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from lowbit import formats
from lowbit.formats import Format

__all__ = [
    "SCALE_FORMATS",
    "SCALINGS",
    "SHORT_NAMES",
    "SHORT_NAMES_8BIT",
    "ScaleFormat",
    "Scaling",
    "Scheme",
    "scheme",
    "scheme_8bit",
]


@dataclass(frozen=True)
class ScaleFormat:
    """What a block's scale is stored as. ``dtype`` is the stored tensor's torch dtype; ``id`` is what kernels see.

    ``roundings``: how scales may be rounded to it, the default first.
    """

    name: str
    id: int
    dtype: str
    roundings: tuple[str, ...]


#: fp32 scales are exact; bf16 and fp16 round up, so that nothing clips; of the others an option chooses.
SCALE_FORMATS: dict[str, ScaleFormat] = {
    row.name: row
    for row in (
        ScaleFormat("fp32", 0, "float32", ("nearest",)),
        ScaleFormat("bf16", 1, "bfloat16", ("ceil",)),
        ScaleFormat("fp16", 2, "float16", ("ceil",)),
        ScaleFormat("e8m0", 3, "uint8", ("floor", "ceil", "nearest")),
        ScaleFormat("fp8_e4m3", 4, "uint8", ("nearest", "ceil")),
    )
}

#: How a scale is rounded to its format: names are options of schemes, numbers are what kernels see.
SCALE_ROUNDINGS: dict[str, int] = {"nearest": 0, "floor": 1, "ceil": 2}

#: Formats whose E8M0 scales round to nearest: above this multiple of ``2**floor_log2(amax / max)`` the exponent is one
#: more. For FP4, whose maximum is 6, clipping 7.25 to 6 costs what rounding it to 8 at twice the step does.
_E8M0_NEAREST = {"fp4_e2m1": 7.25}


@dataclass(frozen=True)
class Scaling:
    """Blocks of ``rows x cols`` elements (``None``: the whole axis), each with one scale.

    A tensor of any rank is seen as ``[rows, cols]`` with cols its last axis; blocks at the edges are smaller.
    ``global_scale`` adds one fp32 scale for the whole tensor, the global scale, above the blocks' scales.
    """

    name: str
    rows: int | None
    cols: int | None
    scale_format: str = "fp32"
    global_scale: bool = False

    def transposed(self) -> Scaling:
        return replace(self, rows=self.cols, cols=self.rows)


def _sized(name: str, *sizes: str) -> Scaling:
    """Blocks of the sizes that go into a scaling's name, where they have no leading zeros."""
    extents = [int(size) for size in sizes]
    if min(extents) < 1:
        raise ValueError(f"a block needs at least one element along each axis, got {name.format(*sizes)}")
    rows, cols = extents if len(extents) == 2 else (1, *extents)
    return Scaling(name.format(*extents), rows, cols)


#: One row a scaling (or a family of them): a pattern for its name, and what it means. Names are API.
SCALINGS: dict[str, tuple[str, Callable[..., Scaling]]] = {
    "tensor": ("tensor", lambda name: Scaling(name, None, None)),
    "row": ("row", lambda name: Scaling(name, 1, None)),
    "col": ("col", lambda name: Scaling(name, None, 1)),
    "group{g}": (r"group(\d+)", lambda name, g: _sized("group{}", g)),
    "block{r}x{c}": (r"block(\d+)x(\d+)", lambda name, r, c: _sized("block{}x{}", r, c)),
    "mx": ("mx", lambda name: Scaling(name, 1, 32, "e8m0")),
    "nvfp4": ("nvfp4", lambda name: Scaling(name, 1, 16, "fp8_e4m3", global_scale=True)),
}

#: What a global scale spans; positions are what kernels see.
GLOBAL_SCALE_SPANS = (None, "tensor", "row")

#: Short scheme names. Names are API.
SHORT_NAMES: dict[str, str] = {
    "mxfp8": "fp8_e4m3:mx",
    "mxfp6": "fp6_e2m3:mx",
    "mxfp4": "fp4_e2m1:mx",
    "nvfp4": "fp4_e2m1:nvfp4",
    "nf4": "nf4:group64",
}
#: More short names for functions that take 8-bit schemes alone; recipes with these names quantize weights so. Elsewhere
#: ``int8`` is a format.
SHORT_NAMES_8BIT: dict[str, str] = {"fp8": "fp8_e4m3:row", "fp8-tensor": "fp8_e4m3:tensor", "int8": "int8:row"}
_LONG_TO_SHORT = {long: short for short, long in SHORT_NAMES.items()}

_GRAMMAR = (
    "a scheme is SHORT or FORMAT:SCALING, then options, such as 'int8:row', 'uint4:group128:affine', 'mxfp4:ceil'; "
    f"short names: {', '.join(SHORT_NAMES)}; scalings: {', '.join(SCALINGS)}; "
    "options: affine, e8m0 | bf16 | fp16 | e4m3, floor | ceil | nearest, full, global_row, T"
)

#: The scale format that an option asks for.
_SCALE_OPTIONS = {"e8m0": "e8m0", "bf16": "bf16", "fp16": "fp16", "e4m3": "fp8_e4m3"}
#: Options in the order of a scheme's canonical name; T comes last.
_OPTIONS = ("affine", *_SCALE_OPTIONS, *SCALE_ROUNDINGS, "full", "global_row", "T")


@dataclass(frozen=True)
class Scheme:
    """A format with a scaling: everything ``quantize`` needs to know. Made by ``scheme(text)``.

    ``block`` is ``(rows, cols)`` with ``None`` for a whole axis. ``rounding`` says how scales are rounded to their
    format. ``affine`` adds a zero point to each block. ``global_scale`` is what one fp32 scale above the blocks' scales
    spans: ``"tensor"``, ``"row"``, or ``None`` for schemes without one. ``full`` scales signed integers so that the
    element of largest magnitude takes the least code; such scales may be negative.
    """

    name: str
    format: Format
    block: tuple[int | None, int | None]
    scale_format: ScaleFormat
    rounding: str
    affine: bool = False
    global_scale: str | None = None
    full: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def amax_divisor(self) -> float:
        """A block's scale is its amax (affine: its range) over this."""
        format = self.format
        return float(format.qmax - format.qmin if self.affine else -format.qmin if self.full else format.max)

    @property
    def global_scale_divisor(self) -> float:
        """The global scale is the finite amax of what it spans over this, so that every block scale is in range."""
        return self.amax_divisor * formats.find(self.scale_format.name).max

    @property
    def zero_scale(self) -> float:
        """The scale of a block of zeros: 0 where no code of the format is zero, so that all of them decode to zero."""
        return 0.0 if self.format.value(self.format.zero_code) else 1.0

    @property
    def raise_above(self) -> int:
        """E8M0: the fraction (23 bits) of an amount in fp32 above which the floored exponent is raised by one."""
        if self.rounding == "floor":
            return 0x7FFFFF
        limit = _E8M0_NEAREST[self.format.name] if self.rounding == "nearest" else self.amax_divisor
        return formats.fp32_bits(limit) & 0x7FFFFF

    @property
    def both_ends(self) -> bool:
        """Whether scales are made from a block's minimum and maximum, not from its amax alone."""
        return self.affine or self.full

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

    def global_scale_shape(self, rows: int) -> tuple[int, int]:
        """Shape of the global scale of a tensor of ``rows`` rows, for a scheme that has one."""
        return (rows if self.global_scale == "row" else 1), 1

    def packed_cols(self, cols: int) -> int:
        """Bytes that a row of ``cols`` codes takes."""
        return packed_cols(cols, self.format.bits)

    def t(self) -> Scheme:
        """The same scheme for the transposed tensor."""
        words = self.name.split(":")
        return scheme(":".join(words[:-1] if words[-1] == "T" else [*words, "T"]))

    def with_format(self, format: str) -> Scheme:
        """The same scaling and options of another format. Raises ValueError where they do not go together."""
        return scheme(":".join([format, *_words(self.name)[1:]]))

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of the codes, scales (global ones too) and zero points of a tensor of that shape."""
        rows, cols = as_matrix(shape)
        scales = prod(self.scale_shape(rows, cols)) * self.scale_bits // 8
        global_scale = 4 * prod(self.global_scale_shape(rows)) if self.global_scale else 0
        return rows * self.packed_cols(cols) + scales + global_scale

    def params(self) -> list[int]:
        """The plain integers by which kernels know a scheme, in csrc's order; a block that spans its axis is 0."""
        return [
            *self.format.params(), *(extent or 0 for extent in self.block),
            self.scale_format.id, SCALE_ROUNDINGS[self.rounding], int(self.affine),
            GLOBAL_SCALE_SPANS.index(self.global_scale), int(self.full),
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


def scheme_8bit(text: str | Scheme) -> Scheme:
    """``scheme(text)``, which also knows ``SHORT_NAMES_8BIT``. Raises ValueError as ``scheme``."""
    return scheme(SHORT_NAMES_8BIT.get(text, text) if isinstance(text, str) else text)


#: Schemes by every name they were asked for; kept as ``formats.find`` keeps formats.
_parsed: dict[str, Scheme] = {}


def _parse(text: str) -> Scheme:
    words = _words(text)
    if len(words) < 2:
        what = f"format {words[0]!r} without a scaling" if words[0] in formats.FORMATS else f"unknown scheme {text!r}"
        raise ValueError(f"{what}; {_GRAMMAR}")
    format, scaling, options = formats.find(words[0]), find_scaling(words[1]), words[2:]
    if scaling is None:
        raise ValueError(f"unknown scaling {words[1]!r} in {text!r}; {_GRAMMAR}")
    return _build(text, format, scaling, options)


def _words(text: str) -> list[str]:
    """The words of a scheme's name, a short name spelled out."""
    words = text.split(":")
    if words[0] in SHORT_NAMES and (len(words) == 1 or find_scaling(words[1]) is None):
        return SHORT_NAMES[words[0]].split(":") + words[1:]
    return words


def _build(text: str, format: Format, scaling: Scaling, options: list[str]) -> Scheme:
    def fail(why: str) -> ValueError:
        return ValueError(f"scheme {text!r}: {why}")

    for option in options:
        if option not in _OPTIONS or options.count(option) > 1:
            raise fail(f"unknown or repeated option {option!r}; {_GRAMMAR}")
    if format.bits > 8 or format.kind == "exponent":
        raise fail(f"elements cannot have the format {format.name}; use one of at most 8 bits, such as fp8_e4m3")
    affine = "affine" in options
    if affine and format.kind != "integer":
        raise fail(f"a zero point needs an integer format, and {format.name} is none; leave out 'affine'")
    if format.kind == "integer" and not format.signed and not affine:
        raise fail(
            f"{format.name} cannot hold negative numbers without a zero point; add ':affine' or use {format.name[1:]}"
        )
    chosen = [option for option in options if option in _SCALE_OPTIONS]
    if len(chosen) > 1 or (chosen and scaling.scale_format != "fp32"):
        raise fail(f"one scale format at most; {scaling.name} has {scaling.scale_format}, and the options add {chosen}")
    scale_format = SCALE_FORMATS[_SCALE_OPTIONS[chosen[0]] if chosen else scaling.scale_format]
    if "T" in options:
        scaling = scaling.transposed()
    global_scale = _global_scale_of(scaling, scale_format, affine, format, "global_row" in options, fail)
    rounding = _rounding_of(format, scale_format, options, fail)
    full = "full" in options
    if full and (affine or format.kind != "integer"):
        raise fail("'full' is for signed integers without a zero point: affine ones use their whole range already")
    if full and scale_format.name == "e8m0":
        raise fail("'full' makes scales of either sign, and e8m0 has none; use fp32, bf16, fp16 or e4m3 scales")
    default = scale_format.roundings[0]
    kept = [o for o in _OPTIONS if o in options and o not in (default, "T")]
    return Scheme(
        _canonical(format, scaling, kept), format, (scaling.rows, scaling.cols), scale_format, rounding,
        affine, global_scale, full,
    )  # fmt: skip


def _global_scale_of(
    scaling: Scaling, kind: ScaleFormat, affine: bool, format: Format, row: bool, fail: Callable[[str], ValueError]
) -> str | None:
    """What the global scale spans; E4M3 scales, and no others, have one above them."""
    if kind.name != "fp8_e4m3":
        if row:
            raise fail("'global_row' says what the global scale above e4m3 scales spans; add ':e4m3', or use nvfp4")
        return None
    if affine:
        raise fail("a scheme with a global scale has no zero points; leave out 'affine', or 'e4m3'")
    if format.max < 1:
        raise fail(f"a global scale over {format.name}, whose maximum is below 1, could overflow; use fp32 scales")
    if row and scaling.rows != 1:
        raise fail(f"'global_row' needs blocks of one row, and those of {scaling.name} have {scaling.rows or 'all'}")
    return "row" if row else "tensor"


def _rounding_of(format: Format, kind: ScaleFormat, options: list[str], fail: Callable[[str], ValueError]) -> str:
    """How scales are rounded: as an option says, or by the default of their format."""
    asked = [o for o in options if o in SCALE_ROUNDINGS]
    if not asked:
        return kind.roundings[0]
    if len(kind.roundings) == 1 or len(asked) > 1 or asked[0] not in kind.roundings:
        raise fail(
            f"{asked} cannot round its scales: 'floor', 'ceil' and 'nearest' (one of them) are for e8m0 scales, 'ceil' "
            f"and 'nearest' for e4m3 ones, and these are {kind.name}"
        )
    if kind.name == "e8m0" and asked[0] == "nearest" and format.name not in _E8M0_NEAREST:
        raise fail(
            f"'nearest' e8m0 scales are known for {', '.join(_E8M0_NEAREST)} alone; use 'ceil' or 'floor' for "
            f"{format.name}"
        )
    return asked[0]


def _canonical(format: Format, scaling: Scaling, options: Sequence[str]) -> str:
    """The one name of a scheme: the short one if there is one; a transposed block's plain name if it has one."""
    for option, kind, global_scale in (("e8m0", "e8m0", False), ("e4m3", "fp8_e4m3", True)):
        if option in options:  # a scaling may have such scales of its own: int8:group32:e8m0 is int8:mx
            wanted = replace(scaling, scale_format=kind, global_scale=global_scale)
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
