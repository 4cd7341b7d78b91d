"""Scalings and schemes: how a tensor is divided into blocks, and how each block's scale is computed and stored.

A *scaling* is a row of ``SCALINGS``: block shape, scale format, global scale. A *scheme* is a format with a scaling and
options, written ``"fp8_e4m3:row"``, ``"uint4:group128:affine"``, ``"int4:group32:e4m3"`` or as a short name
(``mxfp4``). Works without torch.

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
    """The format in which scales of blocks are stored."""

    name: str
    #: Its number in kernels.
    id: int
    #: torch dtype of the stored tensor.
    dtype: str
    #: Supported roundings of scales; the first is the default.
    roundings: tuple[str, ...]


#: fp32 scales are exact. bf16 and fp16 scales round up, so that no element clips. For e8m0 and e4m3 an option chooses.
#: Integers are the scales of superblocks.
SCALE_FORMATS: dict[str, ScaleFormat] = {
    row.name: row
    for row in (
        ScaleFormat("fp32", 0, "float32", ("nearest",)),
        ScaleFormat("bf16", 1, "bfloat16", ("ceil",)),
        ScaleFormat("fp16", 2, "float16", ("ceil",)),
        ScaleFormat("e8m0", 3, "uint8", ("floor", "ceil", "nearest")),
        ScaleFormat("fp8_e4m3", 4, "uint8", ("nearest", "ceil")),
        ScaleFormat("uint6", 5, "uint8", ("nearest",)),
        ScaleFormat("int8", 6, "uint8", ("nearest",)),
    )
}

#: Roundings of scales: names are options of schemes, numbers are used in kernels.
SCALE_ROUNDINGS: dict[str, int] = {"nearest": 0, "floor": 1, "ceil": 2}

#: Formats whose E8M0 scales can round to nearest: the exponent is raised by 1 above this multiple of
#: ``2**floor_log2(amax / max)``. For FP4, whose maximum is 6, the error of clipping 7.25 to 6
#: equals the error with the doubled step.
_E8M0_NEAREST = {"fp4_e2m1": 7.25}


@dataclass(frozen=True)
class Scaling:
    """Blocks of ``rows x cols`` elements, each with one scale.

    A tensor of any rank is treated as ``[rows, cols]``; cols is its last axis. Blocks at the edges are smaller.
    """

    name: str
    #: Rows of a block; None for all rows.
    rows: int | None
    #: Columns of a block; None for all columns.
    cols: int | None
    #: Format of the scales, a key of ``SCALE_FORMATS``.
    scale_format: str = "fp32"
    #: Whether an additional fp32 scale multiplies the blocks' scales.
    global_scale: bool = False
    #: Whether each block has a minimum, as with the option ``min``.
    minimum: bool = False

    def transposed(self) -> Scaling:
        return replace(self, rows=self.cols, cols=self.rows)


def _sized(name: str, *sizes: str) -> Scaling:
    """A scaling of one-row groups or of blocks, from the sizes in its name. Drops leading zeros of the name."""
    extents = [int(size) for size in sizes]
    if min(extents) < 1:
        raise ValueError(f"a block needs at least one element along each axis, got {name.format(*sizes)}")
    rows, cols = extents if len(extents) == 2 else (1, *extents)
    return Scaling(name.format(*extents), rows, cols)


#: One row per scaling or family of scalings: a pattern of its name, and a function that makes it. Names are API.
SCALINGS: dict[str, tuple[str, Callable[..., Scaling]]] = {
    "tensor": ("tensor", lambda name: Scaling(name, None, None)),
    "row": ("row", lambda name: Scaling(name, 1, None)),
    "col": ("col", lambda name: Scaling(name, None, 1)),
    "group{g}": (r"group(\d+)", lambda name, g: _sized("group{}", g)),
    "block{r}x{c}": (r"block(\d+)x(\d+)", lambda name, r, c: _sized("block{}x{}", r, c)),
    "mx": ("mx", lambda name: Scaling(name, 1, 32, "e8m0")),
    "nvfp4": ("nvfp4", lambda name: Scaling(name, 1, 16, "fp8_e4m3", global_scale=True)),
    "super32": ("super32", lambda name: Scaling(name, 1, 32, "uint6", global_scale=True, minimum=True)),
    "super16": ("super16", lambda name: Scaling(name, 1, 16, "int8", global_scale=True)),
}

#: Columns of a superblock, whose blocks share a global scale.
SUPERBLOCK = 256

#: The span of a global scale; kernels use the index.
GLOBAL_SCALE_SPANS = (None, "tensor", "row", "superblock")

#: Short scheme names. Names are API.
SHORT_NAMES: dict[str, str] = {
    "mxfp8": "fp8_e4m3:mx",
    "mxfp6": "fp6_e2m3:mx",
    "mxfp4": "fp4_e2m1:mx",
    "nvfp4": "fp4_e2m1:nvfp4",
    "nf4": "nf4:group64",
    "q4_k": "uint4:super32",
    "q5_k": "uint5:super32",
    "q6_k": "int6:super16",
}
#: More short names for functions that only take 8-bit schemes. Recipes with these names quantize weights in these
#: schemes. For other functions ``int8`` is a format.
SHORT_NAMES_8BIT: dict[str, str] = {"fp8": "fp8_e4m3:row", "fp8-tensor": "fp8_e4m3:tensor", "int8": "int8:row"}
_LONG_TO_SHORT = {long: short for short, long in SHORT_NAMES.items()}

_GRAMMAR = (
    "a scheme is SHORT or FORMAT:SCALING, then options, such as 'int8:row', 'uint4:group128:affine', 'mxfp4:ceil'; "
    f"short names: {', '.join(SHORT_NAMES)}; scalings: {', '.join(SCALINGS)}; "
    "options: affine | min, e8m0 | bf16 | fp16 | e4m3, floor | ceil | nearest, full, global_row, T"
)

#: Options that set the scale format.
_SCALE_OPTIONS = {"e8m0": "e8m0", "bf16": "bf16", "fp16": "fp16", "e4m3": "fp8_e4m3"}
#: Options in the order of a scheme's canonical name.
_OPTIONS = ("affine", *_SCALE_OPTIONS, "min", *SCALE_ROUNDINGS, "full", "global_row", "T")


@dataclass(frozen=True)
class Scheme:
    """A format with a scaling and options: all that ``quantize`` needs. Made by ``scheme(text)``."""

    #: Canonical name; ``scheme(name)`` returns an equal Scheme.
    name: str
    #: Format of the elements.
    format: Format
    #: ``(rows, cols)`` of a block; None for a whole axis.
    block: tuple[int | None, int | None]
    #: Format of the scales.
    scale_format: ScaleFormat
    #: How scales are rounded to their format.
    rounding: str
    #: Whether each block has a zero point or a minimum.
    affine: bool = False
    #: Span of the fp32 scale that multiplies the blocks' scales: ``"tensor"``, ``"row"``, ``"superblock"`` (256 columns
    #: of a row), or None if there is none.
    global_scale: str | None = None
    #: Signed integers only: map the element of largest magnitude to the most negative code. Scales may be negative.
    full: bool = False
    #: Whether ``zero_point`` holds a number that is added to ``scale * code``, in place of an integer.
    minimum: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def superblocks(self) -> bool:
        """Whether 256 columns share a global scale, and block scales are integers."""
        return self.global_scale == "superblock"

    @property
    def reference_only(self) -> bool:
        """Whether only the reference has kernels for the scheme."""
        return self.minimum or self.superblocks

    @property
    def amax_divisor(self) -> float:
        """A block's scale is its amax (affine: its range) divided by this."""
        format = self.format
        return float(format.qmax - format.qmin if self.affine else -format.qmin if self.full else format.max)

    @property
    def global_scale_divisor(self) -> float:
        """The global scale is the finite amax of its span divided by this, so that every block scale is in range."""
        return self.amax_divisor * formats.find(self.scale_format.name).max

    @property
    def zero_scale(self) -> float:
        """The scale of a block of zeros: 1, or 0 if the format has no code for zero."""
        return 0.0 if self.format.value(self.format.zero_code) else 1.0

    @property
    def raise_above(self) -> int:
        """E8M0: the 23-bit fp32 fraction above which the exponent is raised by one."""
        if self.rounding == "floor":
            return 0x7FFFFF
        limit = _E8M0_NEAREST[self.format.name] if self.rounding == "nearest" else self.amax_divisor
        return formats.fp32_bits(limit) & 0x7FFFFF

    @property
    def both_ends(self) -> bool:
        """Whether scales are computed from a block's minimum and maximum, not only from its amax."""
        return self.affine or self.full

    @property
    def scale_bits(self) -> int:
        """Bits of one stored scale, including its zero point or minimum."""
        bits = {"float32": 32, "bfloat16": 16, "float16": 16, "uint8": 8}[self.scale_format.dtype]
        return bits + (bits if self.minimum else 8 * self.affine)

    def block_of(self, rows: int, cols: int) -> tuple[int, int]:
        """Block size in a tensor of ``rows x cols``."""
        return self.block[0] or max(rows, 1), self.block[1] or max(cols, 1)

    def scale_shape(self, rows: int, cols: int) -> tuple[int, int]:
        """Shape of the scales and zero points of a tensor of ``rows x cols``: ``[ceil(rows/r), ceil(cols/c)]``."""
        r, c = self.block
        return (1 if r is None else -(-rows // r)), (1 if c is None else -(-cols // c))

    def global_scale_shape(self, rows: int, cols: int) -> tuple[int, int]:
        """Shape of the global scale of a tensor of ``rows x cols``, for schemes that have one.

        With minima, a row holds the global scales of its superblocks, then those of their minima.
        """
        if self.superblocks:
            return rows, (1 + self.minimum) * -(-cols // SUPERBLOCK)
        return (rows if self.global_scale == "row" else 1), 1

    def packed_cols(self, cols: int) -> int:
        """Bytes of a row of ``cols`` codes."""
        return packed_cols(cols, self.format.bits)

    def t(self) -> Scheme:
        """The same scheme for the transposed tensor."""
        words = self.name.split(":")
        return scheme(":".join(words[:-1] if words[-1] == "T" else [*words, "T"]))

    def with_format(self, format: str) -> Scheme:
        """The scheme with another format. Raises ValueError if the scaling or options do not support it."""
        return scheme(":".join([format, *_words(self.name)[1:]]))

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of the codes, scales, global scales and zero points of a tensor of this shape."""
        rows, cols = as_matrix(shape)
        scales = prod(self.scale_shape(rows, cols)) * self.scale_bits // 8
        global_scale = 4 * prod(self.global_scale_shape(rows, cols)) if self.global_scale else 0
        return rows * self.packed_cols(cols) + scales + global_scale

    def params(self) -> list[int]:
        """The integers that describe the scheme to kernels, in csrc's order; 0 for a block that spans its axis.

        Raises ValueError for a scheme that only the reference supports.
        """
        if self.reference_only:
            raise ValueError(f"only the reference supports {self}")
        return [
            *self.format.params(), *(extent or 0 for extent in self.block),
            self.scale_format.id, SCALE_ROUNDINGS[self.rounding], int(self.affine),
            GLOBAL_SCALE_SPANS.index(self.global_scale), int(self.full),
        ]  # fmt: skip


def packed_cols(cols: int, bits: int) -> int:
    """Bytes of a row of ``cols`` codes of ``bits`` bits."""
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
    """Parses the name of a scheme.

    Args:
        text: ``"FORMAT:SCALING"`` or a short name, followed by options, such as ``"uint4:group128:affine"`` or
            ``"mxfp4:ceil"``; or a Scheme, which is returned.

    Returns:
        The Scheme.

    Raises:
        TypeError: ``text`` is neither a Scheme nor a string.
        ValueError: The name does not follow the grammar, or a Scheme differs from the scheme with its name.
    """
    if isinstance(text, Scheme):
        named = scheme(text.name)
        if named is not text and named != text:  # ops look a scheme up by name, and would use the other
            raise ValueError(f"another scheme is named {text.name!r}; {_GRAMMAR}")
        return text
    if not isinstance(text, str):
        raise TypeError(f"a scheme is named by a string, got {type(text).__name__}; {_GRAMMAR}")
    parsed = _cache.get(text)
    if parsed is None:
        parsed = _parse(text)
        if not formats.tracing():
            _cache[text] = parsed
    return parsed


def scheme_8bit(text: str | Scheme) -> Scheme:
    """``scheme(text)`` that also accepts ``SHORT_NAMES_8BIT``."""
    return scheme(SHORT_NAMES_8BIT.get(text, text) if isinstance(text, str) else text)


#: Schemes by name; a plain dict for the same reason as ``formats._cache``.
_cache: dict[str, Scheme] = {}


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
    """The words of a scheme's name, with a short name replaced by its format and scaling."""
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
    minimum = "min" in options or scaling.minimum
    _check_superblocks(format, scaling, options, fail)
    if minimum and (format.kind != "integer" or format.signed or "affine" in options):
        raise fail(
            f"a minimum needs an unsigned integer format without 'affine', not {format.name}; use uint4 or uint5"
        )
    affine = "affine" in options or minimum
    if affine and format.kind != "integer":
        raise fail(f"a zero point needs an integer format, not {format.name}; leave out 'affine'")
    if format.kind == "integer" and not format.signed and not affine:
        raise fail(
            f"{format.name} cannot hold negative numbers without a zero point; add ':affine' or use {format.name[1:]}"
        )
    scale_options = [option for option in options if option in _SCALE_OPTIONS]
    if len(scale_options) > 1 or (scale_options and scaling.scale_format != "fp32"):
        raise fail(
            f"one scale format at most; {scaling.name} has {scaling.scale_format}, and the options add {scale_options}"
        )
    scale_format = SCALE_FORMATS[_SCALE_OPTIONS[scale_options[0]] if scale_options else scaling.scale_format]
    if "min" in options and scale_format.dtype == "uint8":
        raise fail(f"a minimum is stored like a scale, which cannot be {scale_format.name}; use fp32, bf16 or fp16")
    if "T" in options:
        scaling = scaling.transposed()
    global_scale = _global_scale_of(scaling, scale_format, affine, format, "global_row" in options, fail)
    rounding = _rounding_of(format, scale_format, options, fail)
    full = "full" in options
    if full and (affine or format.kind != "integer"):
        raise fail("'full' is for signed integers without a zero point: affine ones use their whole range already")
    if full and scale_format.name == "e8m0":
        nearest = _canonical(format, scaling, ["e8m0"] if scale_options else [])
        raise fail(
            f"'full' needs signed scales, and e8m0 has no sign; leave out 'full': {nearest} already uses the codes "
            f"{format.qmin} to {format.qmax}; or use fp32, bf16, fp16 or e4m3 scales"
        )
    default = scale_format.roundings[0]
    name = _canonical(format, scaling, [o for o in _OPTIONS if o in options and o not in (default, "T")])
    return Scheme(
        name, format, (scaling.rows, scaling.cols), scale_format, rounding, affine, global_scale, full, minimum,
    )  # fmt: skip


def _check_superblocks(format: Format, scaling: Scaling, options: list[str], fail: Callable[[str], ValueError]) -> None:
    """Raise ValueError if the scaling has superblocks, and the format or an option does not fit."""
    if scaling.scale_format not in ("uint6", "int8"):
        return
    if options:
        raise fail(f"{scaling.name} takes no options, got {', '.join(options)}; leave them out")
    if format.kind != "integer" or format.signed == scaling.minimum:
        raise fail(f"{scaling.name} needs {'un' if scaling.minimum else ''}signed integers, not {format.name}")


def _global_scale_of(
    scaling: Scaling,
    scale_format: ScaleFormat,
    affine: bool,
    format: Format,
    row: bool,
    fail: Callable[[str], ValueError],
) -> str | None:
    """The span of the global scale. All schemes with E4M3 scales and with superblocks have one, and no others."""
    if scale_format.name in ("uint6", "int8"):
        return "superblock"
    if scale_format.name != "fp8_e4m3":
        if row:
            raise fail("'global_row' needs a scheme with a global scale; add ':e4m3', or use nvfp4")
        return None
    if affine:
        raise fail("a scheme with a global scale has no zero points; leave out 'affine' or 'e4m3'")
    if format.max < 1:
        raise fail(f"a global scale could overflow for {format.name}, whose maximum is below 1; use fp32 scales")
    if row and scaling.rows != 1:
        raise fail(f"'global_row' needs blocks of one row, and those of {scaling.name} have {scaling.rows or 'all'}")
    return "row" if row else "tensor"


def _rounding_of(
    format: Format, scale_format: ScaleFormat, options: list[str], fail: Callable[[str], ValueError]
) -> str:
    """The rounding of scales: an option, or the default of the scale format."""
    roundings = [o for o in options if o in SCALE_ROUNDINGS]
    if not roundings:
        return scale_format.roundings[0]
    if len(scale_format.roundings) == 1 or len(roundings) > 1 or roundings[0] not in scale_format.roundings:
        raise fail(
            f"{roundings} cannot round its {scale_format.name} scales; use one of 'floor', 'ceil' and 'nearest' for "
            f"e8m0 scales, 'ceil' or 'nearest' for e4m3 scales, and none of them for others"
        )
    if scale_format.name == "e8m0" and roundings[0] == "nearest" and format.name not in _E8M0_NEAREST:
        raise fail(
            f"'nearest' e8m0 scales are only defined for {', '.join(_E8M0_NEAREST)}; use 'ceil' or 'floor' for "
            f"{format.name}"
        )
    return roundings[0]


def _canonical(format: Format, scaling: Scaling, options: Sequence[str]) -> str:
    """The canonical name of a scheme: the short name if there is one; without T if a plain scaling is equal."""
    for option, scale_format, global_scale in (("e8m0", "e8m0", False), ("e4m3", "fp8_e4m3", True)):
        if option in options:  # a scaling may imply this option: int8:group32:e8m0 is int8:mx
            target = replace(scaling, scale_format=scale_format, global_scale=global_scale)
            for row in filter(None, map(find_scaling, SCALINGS)):
                for candidate in (row, row.transposed()):
                    if candidate == replace(target, name=row.name):
                        return _canonical(format, candidate, [o for o in options if o != option])
    for pattern, make in SCALINGS.values():
        for name in (scaling.name, "row", "col", f"group{scaling.cols}", f"block{scaling.rows}x{scaling.cols}"):
            match = re.fullmatch(pattern, name)
            if match and make(name, *match.groups()) == replace(scaling, name=name):
                base = f"{format.name}:{name}"
                return ":".join([_LONG_TO_SHORT.get(base, base), *options])
    base = f"{format.name}:{scaling.name}"
    return ":".join([_LONG_TO_SHORT.get(base, base), *options, "T"])
