"""What states of optimizers are kept in: the rows of STATES, and the shapes of a tensor's codes and scales.

All that decides is the whole tensor's shape, so that every sharding of it keeps the same numbers.
Source: docs/optimizers.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit import scaling
from lowbit.functional.quantizers import quantize
from lowbit.name_tables import did_you_mean
from lowbit.op_calls import call
from lowbit.ops.optim import FLOAT_STATES, STATE_SCHEME
from lowbit.optim.shards import Part, local, whole

__all__ = ["FEW", "STATES", "States", "Storage", "Stored", "encoded", "fill", "find", "is_aligned", "zeros"]

#: Tensors of fewer elements keep their states in fp32, as bitsandbytes and torchao do.
FEW = 4096


@dataclass(frozen=True)
class States:
    """What the states of ``bits`` are kept in: ``signed`` a first moment, ``root`` the root of a second one.

    ``rounding``: unless another is asked for. Of 8 bits, stochastic rounding keeps a slow mean moving; of 4, its noise
    costs more than that saves.
    """

    name: str
    bits: int
    signed: str
    root: str
    rounding: str = "stochastic"


#: Every way to keep states. The first row of a width is what the width's number stands for. Saved states name their
#: row, so a row never changes, nor does ``FEW``.
STATES: dict[str, States] = {
    row.name: row
    for row in (
        States("fp32", 32, "fp32", "fp32", "nearest"),
        States("bf16", 16, "bf16", "bf16"),
        States("fp8", 8, STATE_SCHEME, STATE_SCHEME),
        States("dynamic8", 8, "dynamic8:group256", "udynamic8:group256"),
        States("compand8", 8, "compand8:group32:bf16", "ucompand8:group32:bf16"),
        States("dynamic4", 4, "dynamic4:group128", "ulog4:group128", "nearest"),
    )
}


def find(bits: int | str) -> States:
    """The row of a width or of a name. Raises ValueError for others."""
    rows = [row for row in STATES.values() if bits in (row.name, row.bits)]
    if rows:
        return rows[0]
    widths = list(dict.fromkeys(row.bits for row in STATES.values()))
    hint = did_you_mean(bits, STATES) if isinstance(bits, str) else ""
    raise ValueError(f"bits is {', '.join(map(str, widths))}, or one of {', '.join(STATES)}; got {bits!r}{hint}")


class Storage(NamedTuple):
    """What one state of a tensor of ``shape`` is kept in: a float format, or a scheme on its elements seen flat."""

    kind: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, row: States, shape: Sequence[int], signed: bool) -> Storage:
        """By the row, unless the tensor has few elements, or codes of 4 bits that do not come in pairs."""
        size = tuple(shape)
        if prod(size) < FEW:
            row = STATES["fp32"]
        elif row.bits < 8 and _packed(size) is None:
            row = find(8)
        return cls(row.signed if signed else row.root, size)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of a state that is kept as a float; None of codes."""
        return FLOAT_STATES.get(self.kind)

    @property
    def block(self) -> int:
        """Elements that share a scale, counted along the tensor seen flat; 1 of floats."""
        return 1 if self.dtype is not None else scaling.scheme(self.kind).block[1] or 1

    def codes_shape(self) -> tuple[int, ...]:
        """Of codes: the tensor's own shape; of 4 bits, with half the columns."""
        if self.dtype is not None or scaling.scheme(self.kind).format.bits == 8:
            return self.shape
        packed = _packed(self.shape)
        assert packed is not None
        return packed

    def scale_shape(self) -> tuple[int, ...]:
        """A scale for each block: in the tensor's shape where blocks fill its rows, else in one row."""
        if self.dtype is not None:
            return ()
        return _cut(self.shape, self.block) or (-(-prod(self.shape) // self.block),)

    def scale_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, scaling.scheme(self.kind).scale_format.dtype)
        return dtype

    def zero_code(self) -> int:
        """The byte of codes that are 0 with a scale of 0."""
        format = scaling.scheme(self.kind).format
        return format.zero_code if format.bits == 8 else format.zero_code * 17


def _cut(shape: tuple[int, ...], size: int) -> tuple[int, ...] | None:
    """The shape whose last axis counts groups of ``size``, of two axes where only all but the first can be cut."""
    if shape[-1] % size == 0:
        return (*shape[:-1], shape[-1] // size)
    rest = prod(shape[1:])
    return (shape[0], rest // size) if len(shape) > 1 and rest % size == 0 else None


def _packed(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    return _cut(shape, 2)


class Stored(NamedTuple):
    """A state that is kept as ``kept`` says: codes and scales, or floats without scales."""

    kept: Storage
    codes: Tensor
    scale: Tensor | None

    def numbers(self) -> Tensor:
        """fp32, of the whole tensor's shape; every process takes part where it is cut."""
        codes = whole(self.codes)
        if self.scale is None:
            return codes.float()
        size, scale = prod(self.kept.shape), whole(self.scale).reshape(1, -1)
        given = (codes.reshape(-1), self.kept.kind, size, scale, None, None, torch.float32)
        numbers: Tensor = call("dequantize", *given)
        return numbers.reshape(self.kept.shape)


def zeros(part: Part, kept: Storage, name: str, device: torch.device) -> Stored:
    """A state of zeros of the parameter ``name``, placed as its part says.

    Codes and scales are placed as the parameter is; scales of blocks that lie in several parts are on every process.
    Raises ValueError where codes of 4 bits cannot be cut as the parameter is.
    """
    if kept.dtype is not None:
        held = torch.zeros(part.local_shape(kept.shape), dtype=kept.dtype, device=device)
        return Stored(kept, part.tensor(held, kept.shape), None)
    shape = kept.codes_shape()
    if not part.cuts_alike(shape):
        raise ValueError(
            f"{name} {list(kept.shape)} is sharded as {part.placements} between codes of {kept.kind} that share a "
            "byte; use bits=8 in its group, or another sharding"
        )
    codes = torch.full(part.local_shape(shape), kept.zero_code(), dtype=torch.uint8, device=device)
    shape, dtype = kept.scale_shape(), kept.scale_dtype()
    if not is_aligned(part, kept):
        return Stored(kept, part.tensor(codes, kept.codes_shape()), torch.zeros(shape, dtype=dtype, device=device))
    scale = torch.zeros(part.local_shape(shape), dtype=dtype, device=device)
    return Stored(kept, part.tensor(codes, kept.codes_shape()), part.tensor(scale, shape))


def is_aligned(part: Part, kept: Storage) -> bool:
    """Whether no block lies in several parts, and scales are cut as the parameter is."""
    return kept.dtype is not None or (part.holds_blocks(kept.block) and part.cuts_alike(kept.scale_shape()))


def encoded(part: Part, kept: Storage, name: str, numbers: Tensor) -> Stored:
    """The numbers of a whole tensor, rounded to nearest, placed as ``zeros`` places them."""
    made = zeros(part, kept, name, numbers.device)
    if made.scale is None:
        local(made.codes).copy_(part.of_whole(numbers))
        return made
    q = quantize(numbers.reshape(-1), kept.kind)
    fill(part, made.codes, q.codes.reshape(kept.codes_shape()))
    fill(part, made.scale, q.scale.reshape(kept.scale_shape()))
    return made


def fill(part: Part, target: Tensor, source: Tensor) -> None:
    """Copies a whole tensor to one that is placed as the parameter is, or is on every process."""
    mine = local(target)
    mine.copy_(part.of_whole(source) if mine.shape != source.shape else source)
