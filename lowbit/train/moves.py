"""The ops that advance a training state, and derive the keys of its random bits. Source: docs/numerics.md section 7.

They modify their arguments and return nothing, so compiled code keeps them as nodes of its graph.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from lowbit.autograd import in_backward
from lowbit.reference import philox4x32

__all__ = ["DATA", "WEIGHT", "advance_", "derive_", "next_micro_batch_", "record_", "record_eagerly"]

#: The rows of ``keys``: for activations and gradients, and for the weight.
DATA, WEIGHT = 0, 1
#: Last counter word of the key derivation, which separates it from other uses of Philox.
_TAG = crc32(b"lowbit.train")
_LOW = 0xFFFFFFFF


@torch.library.custom_op("lowbit::train_derive_", mutates_args=("keys",))
def derive_(keys: Tensor, rng: Tensor, micro_batch: Tensor, replica: int) -> None:
    """Compute ``keys`` int64 ``[2, 2]``: (seed, step) for the random bits of data, and of the weight.

    ``rng`` int64 ``[2]`` has the seed and step of the training; ``micro_batch`` is int64 ``[]``.
    """
    _derive(keys, rng, micro_batch, replica)


@torch.library.custom_op("lowbit::train_next_micro_batch_", mutates_args=("keys", "micro_batch"))
def next_micro_batch_(keys: Tensor, rng: Tensor, micro_batch: Tensor, replica: int) -> None:
    """Start the next micro-batch of the step, with new keys.

    The number stays in a backward pass, because compiled code that is recomputed runs this op again.
    """
    if not in_backward():
        micro_batch += 1
    _derive(keys, rng, micro_batch, replica)


@torch.library.custom_op("lowbit::train_advance_", mutates_args=("keys", "rng", "micro_batch", "amax"))
def advance_(keys: Tensor, rng: Tensor, micro_batch: Tensor, amax: Tensor, pending: Tensor, replica: int) -> None:
    """Start the next step: new keys, and this step's magnitudes enter the histories.

    ``amax`` is fp32 ``[operands, steps]``, newest first; ``pending`` is fp32 ``[operands]``, the magnitudes of the
    finished step. The history of an operand that was not used, or was all zeros, stays as it is.
    """
    rng[1] += 1
    micro_batch.fill_(-1)
    _derive(keys, rng, micro_batch, replica)
    moved = torch.cat([pending[:, None], amax[:, :-1]], 1)
    amax.copy_(torch.where(pending[:, None] > 0, moved, amax))


@torch.library.custom_op("lowbit::train_record_", mutates_args=("pending",))
def record_(pending: Tensor, magnitudes: Tensor) -> None:
    """Raise ``pending``, fp32 ``[1]``, to the largest finite magnitude; recording twice changes nothing.

    ``record_eagerly`` does the same without the overhead of an op.
    """
    record_eagerly(pending, magnitudes)


@record_.register_vmap
def _record_all(info: Any, in_dims: Any, pending: Tensor, magnitudes: Tensor) -> tuple[None, None]:
    record_(pending, magnitudes)
    return None, None


def record_eagerly(pending: Tensor, magnitudes: Tensor) -> None:
    """``record_`` for eager code. Inside torch.func transforms writing to captured tensors is an error."""
    pending.copy_(torch.maximum(pending, torch.where(magnitudes.isfinite(), magnitudes, 0.0).max()))


def _derive(keys: Tensor, rng: Tensor, micro_batch: Tensor, replica: int) -> None:
    """The weight is equal on every replica and in every micro-batch, so its key uses 0 for both."""
    seed, step = rng[0], rng[1]
    batch, zero = micro_batch.clamp(min=0), torch.zeros_like(micro_batch)
    counter = [torch.stack([batch, zero]), torch.stack([torch.full_like(batch, replica), zero])]
    counter = [word & _LOW for word in (*counter, torch.zeros_like(counter[0]), torch.full_like(counter[0], _TAG))]
    low, high, _, _ = philox4x32(counter, (seed & _LOW, (seed >> 32) & _LOW))
    keys.copy_(torch.stack([low | (high << 32), step.expand(2)], 1))
