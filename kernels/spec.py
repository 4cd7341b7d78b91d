"""Compile-time arguments of kernels: formats and schemes as tuples, and tiles. No tensors.

``Launch`` is a kernel with its arguments: ``start`` runs it, ``aot`` compiles it.
"""

from __future__ import annotations

import math
import os
from functools import cache, lru_cache
from typing import Any, NamedTuple

from lowbit.formats import Format, fp32_bits, fp32_value
from lowbit.scaling import GLOBAL_SCALE_SPANS, Scheme

#: Input and output dtypes, and their numbers in kernels.
DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}

#: Whether kernels are interpreted on the host. A program then costs by its number of operations, not elements.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


class Target(NamedTuple):
    """The size of tiles: at most ``whole`` elements if a block must fit, else ``usual`` elements."""

    whole: int
    usual: int


#: Arguments whose value hardly changes the machine code: kernels are not specialized for them.
GENERAL = (
    "rows", "block_r", "block_c", "blocks_r", "blocks_c", "pieces_r", "pieces_c", "tiles_c", "count", "pieces",
    "share", "first_blocks", "second_blocks", "stream_id", "param_stream_id", "offset", "pitch", "other_blocks_r",
    "other_blocks_c", "other_pieces_r", "other_pieces_c", "other_stream_id",
    "f0", "f1", "f2", "f3", "f4", "f5", "f6",
)  # fmt: skip

#: Arguments of matmuls without specialization. Arguments that align vector loads, such as the depth, are excluded.
GENERAL_OF_PRODUCTS = (
    "rows", "a_block", "b_block", "blocks", "steps", "count", "share", "shares", "segments", "length",
    "a_block_r", "b_block_r", "a_block_c", "b_block_c", "a_blocks", "b_blocks",
    "experts", "size_d", "size_h", "size_w", "places_d", "places_h", "places_w",
)  # fmt: skip

TARGET = Target(1 << 17, 1 << 17) if INTERPRETED else Target(1 << 14, 1 << 12)

#: The fewest programs per launch if a program takes several tiles: many per multiprocessor.
PROGRAMS = 1 << 12

#: The fewest columns of a tile, if the tensor has them: fewer would waste parts of memory sectors.
SECTOR = 32


@cache
def format_spec(format: Format) -> tuple[Any, ...]:
    """``FMT``: ``Format.params()``, then for codebooks the code nearest zero, thresholds, entries and weights.

    The threshold of an entry separates it from the entry before. The first entry has 0.
    """
    cuts = (0.0, *(fp32_value(bits) for bits in format.thresholds))
    values = tuple(fp32_value(fp32_bits(value)) for value in format.codebook)
    weights = tuple(fp32_value(bits) for bits in format.weights)
    return (*format.params(), format.zero_code, cuts, values, weights)


@cache
def scale_spec(scheme: Scheme) -> tuple[Any, ...]:
    """The kernel argument ``SCALE``; see ``scales``."""
    divisor = fp32_value(fp32_bits(scheme.amax_divisor))
    kind = scheme.scale_format.name
    return (
        scheme.scale_format.id, scheme.raise_above if kind == "e8m0" else int(scheme.rounding == "ceil"),
        int(scheme.affine), GLOBAL_SCALE_SPANS.index(scheme.global_scale),
        divisor, math.frexp(divisor)[1] - 1, int(scheme.full),
        fp32_value(fp32_bits(scheme.global_scale_divisor)) if scheme.global_scale else 1.0,
        fp32_bits(scheme.zero_scale),
    )  # fmt: skip


class Axis(NamedTuple):
    """One axis of a tiling: ``group`` blocks per tile, each padded to ``padded``, or ``pieces`` tiles per block."""

    block: int
    blocks: int
    group: int
    padded: int
    pieces: int
    exact: bool

    @property
    def span(self) -> int:
        return self.group * self.padded

    @property
    def tiles(self) -> int:
        return -(-self.blocks // self.group) * self.pieces


class Tiling(NamedTuple):
    """How a matrix in blocks is divided among programs."""

    rows: Axis
    cols: Axis

    @property
    def one_pass(self) -> bool:
        """Whether each program has whole blocks, and so can compute their scales."""
        return self.rows.pieces == self.cols.pieces == 1

    @property
    def grid(self) -> tuple[int]:
        return (self.rows.tiles * self.cols.tiles,)

    @property
    def warps(self) -> int:
        return max(4, min(16, self.rows.span * self.cols.span // 1024))

    def constexpr(self) -> tuple[int | bool, ...]:
        """The kernel argument ``TILE``."""
        r, c = self.rows, self.cols
        return r.group, r.padded, r.exact, c.group, c.padded, c.exact

    def arguments(self) -> dict[str, int]:
        r, c = self.rows, self.cols
        return {
            "block_r": r.block, "block_c": c.block, "blocks_r": r.blocks, "blocks_c": c.blocks,
            "pieces_r": r.pieces, "pieces_c": c.pieces, "tiles_c": c.tiles,
        }  # fmt: skip

    def packs(self, bits: int) -> bool:
        """Whether a tile can store packed codes: its rows are whole bytes that no other tile shares."""
        return bits == 8 or (self.cols.exact and self.cols.span % (2 if bits == 4 else 8) == 0)

    def eights(self, offset: int, pitch: int) -> bool:
        """Whether the tile's rows start at multiples of eight elements of the whole tensor."""
        return self.cols.exact and self.cols.span % 8 == 0 and offset % 8 == 0 and pitch % 8 == 0


def power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _axis(block: int, size: int, span: int, cut: bool) -> Axis:
    """An axis of ``size`` in blocks of ``block``, with tiles of about ``span``. ``cut``: blocks may be split."""
    block = min(block, size)
    blocks, padded = -(-size // block), power_of_two(block)
    if cut and padded > span:
        return Axis(block, blocks, 1, span, -(-block // span), blocks == 1 or block % span == 0)
    group = min(power_of_two(blocks), max(1, span // padded))
    return Axis(block, blocks, group, padded, 1, blocks == 1 or block == padded)


@lru_cache(maxsize=4096)
def tiling(rows: int, cols: int, block: tuple[int, int], target: Target = TARGET) -> Tiling:
    """The tiles of a ``rows x cols`` matrix in blocks of ``block``: whole blocks if they fit, else pieces."""
    tall, wide = power_of_two(min(block[0], rows)), power_of_two(min(block[1], cols))
    if tall * max(wide, min(SECTOR, power_of_two(cols))) <= target.whole:
        across = _axis(block[1], cols, max(target.usual // tall, min(SECTOR, power_of_two(cols))), cut=False)
        return Tiling(_axis(block[0], rows, max(1, target.usual // across.span), cut=False), across)
    across = _axis(block[1], cols, target.usual // min(tall, 16), cut=True)
    return Tiling(_axis(block[0], rows, max(1, target.usual // across.span), cut=True), across)


def shared_tiling(rows: int, cols: int, block: tuple[int, int], span: tuple[int, int]) -> Tiling | None:
    """Tiles of ``span``, powers of two no larger than the matrix needs, in blocks of ``block``.

    None if blocks do not fill the tiles.
    """
    found = Tiling(_axis(block[0], rows, span[0], cut=True), _axis(block[1], cols, span[1], cut=True))
    axes = tuple(zip(found, span, strict=True))
    return found if all(axis.exact and axis.span == wanted for axis, wanted in axes) else None


class StepTiles(NamedTuple):
    """How the matrix of an optimizer step is divided among programs: tiles of ``rows`` by ``span`` elements, in rows of
    ``cols``, a power of two.
    """

    rows: int
    cols: int
    span: int

    @property
    def warps(self) -> int:
        return max(4, min(8, self.rows * self.cols // 256))

    def eights(self, offset: int, pitch: int) -> bool:
        """See ``Tiling.eights``."""
        return self.span % 8 == 0 and offset % 8 == 0 and pitch % 8 == 0

    def cut(self, block: int) -> tuple[int, int, int]:
        """The kernel argument ``CUT`` for blocks along rows; a block is at most as long as a row."""
        block = min(block, self.cols)
        return block, power_of_two(-(-self.cols // block)), power_of_two(block)


def step_tiles(rows: int, cols: int, run: int, usual: int = TARGET.usual // 4) -> StepTiles:
    """The tiles of an optimizer step: columns in multiples of ``run``, or all columns if one run is as long.

    ``usual``: about the number of elements per tile, few enough that all numbers of a step stay in registers.
    """
    if run >= cols:
        span = wide = max(8, power_of_two(cols))
    else:
        span = run * min(max(1, usual // power_of_two(run)), power_of_two(-(-cols // run)))
        wide = power_of_two(span)
    return StepTiles(min(power_of_two(rows), max(1, usual // wide)), wide, span)


class Launch(NamedTuple):
    """A kernel with its grid and options. ``arguments`` are by name, including constants."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int = 4
    stages: int = 3
