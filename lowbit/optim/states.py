"""Formats of optimizer states, the rows of STATES, and the shapes of their codes and scales.

The format depends only on the full tensor's shape, so the numbers are the same with every sharding.
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

#: Tensors with fewer elements have fp32 states, as in bitsandbytes and torchao.
FEW = 4096


@dataclass(frozen=True)
class States:
    """A format of optimizer states.

    Attributes:
        name: Key of ``STATES``.
        bits: Bits per element.
        signed: Format or scheme of first moments.
        root: Format or scheme of the square roots of second moments.
        rounding: Default rounding. With 8 bits, stochastic rounding keeps a slow average moving. With 4 bits, its
            noise costs more than that saves.
    """

    name: str
    bits: int
    signed: str
    root: str
    rounding: str = "stochastic"


#: All formats of states. ``bits=8`` and other bit widths select the first row with that width. Saved states name their
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
    """The row with this bit width or name.

    Raises:
        ValueError: There is none.
    """
    rows = [row for row in STATES.values() if bits in (row.name, row.bits)]
    if rows:
        return rows[0]
    widths = list(dict.fromkeys(row.bits for row in STATES.values()))
    hint = did_you_mean(bits, STATES) if isinstance(bits, str) else ""
    raise ValueError(f"bits must be {', '.join(map(str, widths))}, or one of {', '.join(STATES)}; got {bits!r}{hint}")


class Storage(NamedTuple):
    """Format of one state of a tensor of ``shape``.

    ``kind`` is the name of a float format, or of a scheme that quantizes the flattened tensor.
    """

    kind: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, row: States, shape: Sequence[int], signed: bool) -> Storage:
        """The format of the row, unless the tensor has few elements, or 4-bit codes that do not come in pairs."""
        size = tuple(shape)
        if prod(size) < FEW:
            row = STATES["fp32"]
        elif row.bits < 8 and _cut(size, 2) is None:
            row = find(8)
        return cls(row.signed if signed else row.root, size)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of a float state, None if it is quantized."""
        return FLOAT_STATES.get(self.kind)

    @property
    def block(self) -> int:
        """Consecutive elements of the flattened tensor that share a scale; 1 for floats."""
        return 1 if self.dtype is not None else scaling.scheme(self.kind).block[1] or 1

    def codes_shape(self) -> tuple[int, ...]:
        """Shape of the codes: the tensor's shape, or with two 4-bit codes per byte half the columns."""
        if self.dtype is not None or scaling.scheme(self.kind).format.bits == 8:
            return self.shape
        packed = _cut(self.shape, 2)
        assert packed is not None
        return packed

    def scale_shape(self) -> tuple[int, ...]:
        """Shape of the scales, one per block: like the tensor's if blocks fill its rows, else one row."""
        if self.dtype is not None:
            return ()
        return _cut(self.shape, self.block) or (-(-prod(self.shape) // self.block),)

    def scale_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, scaling.scheme(self.kind).scale_format.dtype)
        return dtype

    def zero_code(self) -> int:
        """The byte whose codes stand for 0."""
        format = scaling.scheme(self.kind).format
        return format.zero_code if format.bits == 8 else format.zero_code * 17


def _cut(shape: tuple[int, ...], size: int) -> tuple[int, ...] | None:
    """The shape with groups of ``size`` along the last axis, or along all axes but the first; None if neither fits."""
    if shape[-1] % size == 0:
        return (*shape[:-1], shape[-1] // size)
    rest = prod(shape[1:])
    return (shape[0], rest // size) if len(shape) > 1 and rest % size == 0 else None


class Stored(NamedTuple):
    """A state: codes and scales, or floats without scales."""

    storage: Storage
    codes: Tensor
    scale: Tensor | None

    def numbers(self) -> Tensor:
        """The full state in fp32. If it is sharded, all processes must call this."""
        codes = whole(self.codes)
        if self.scale is None:
            return codes.float()
        shape, kind = self.storage.shape, self.storage.kind
        scale = whole(self.scale).reshape(1, -1)
        numbers: Tensor = call("dequantize", codes.reshape(-1), kind, prod(shape), scale, None, None, torch.float32)
        return numbers.reshape(shape)


def zeros(part: Part, storage: Storage, name: str, device: torch.device) -> Stored:
    """A zero state of the parameter ``name``, sharded like the parameter.

    Scales of blocks that span several parts are replicated.

    Raises:
        ValueError: 4-bit codes cannot be sharded like the parameter.
    """
    if storage.dtype is not None:
        floats = torch.zeros(part.local_shape(storage.shape), dtype=storage.dtype, device=device)
        return Stored(storage, part.tensor(floats, storage.shape), None)
    shape = storage.codes_shape()
    if not part.cuts_alike(shape):
        raise ValueError(
            f"{name} {list(storage.shape)} is sharded as {part.placements} between codes of {storage.kind} that share "
            "a byte; use bits=8 in its group, or another sharding"
        )
    local_codes = torch.full(part.local_shape(shape), storage.zero_code(), dtype=torch.uint8, device=device)
    codes = part.tensor(local_codes, shape)
    shape, dtype = storage.scale_shape(), storage.scale_dtype()
    if not is_aligned(part, storage):
        return Stored(storage, codes, torch.zeros(shape, dtype=dtype, device=device))
    scale = torch.zeros(part.local_shape(shape), dtype=dtype, device=device)
    return Stored(storage, codes, part.tensor(scale, shape))


def is_aligned(part: Part, storage: Storage) -> bool:
    """Whether no block spans several parts, and scales can be sharded like the parameter."""
    return storage.dtype is not None or (part.holds_blocks(storage.block) and part.cuts_alike(storage.scale_shape()))


def encoded(part: Part, storage: Storage, name: str, numbers: Tensor) -> Stored:
    """The numbers of a full tensor, rounded to nearest, sharded as by ``zeros``."""
    stored = zeros(part, storage, name, numbers.device)
    if stored.scale is None:
        local(stored.codes).copy_(part.shard_of(numbers))
        return stored
    q = quantize(numbers.reshape(-1), storage.kind)
    fill(part, stored.codes, q.codes.reshape(storage.codes_shape()))
    fill(part, stored.scale, q.scale.reshape(storage.scale_shape()))
    return stored


def fill(part: Part, target: Tensor, source: Tensor) -> None:
    """Copy a full tensor to one that is sharded like the parameter, or replicated."""
    shard = local(target)
    shard.copy_(part.shard_of(source) if shard.shape != source.shape else source)
