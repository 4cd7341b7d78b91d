"""The ops that move a training state, and the keys of its random bits. Source: docs/numerics.md section 7.

They change the tensors that they are given and return nothing, so compiled code holds them as nodes of its graph.
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
#: The last counter word of a derivation.
_TAG = crc32(b"lowbit.train")
_LOW = 0xFFFFFFFF


@torch.library.custom_op("lowbit::train_derive_", mutates_args=("keys",))
def derive_(keys: Tensor, rng: Tensor, micro_batch: Tensor, replica: int) -> None:
    """``keys`` int64 ``[2, 2]``: (seed, step) of the random bits of data, and of those of the weight.

    ``rng`` int64 ``[2]``: the seed of the training and its step. ``micro_batch`` int64 ``[]``.
    """
    _derive(keys, rng, micro_batch, replica)


@torch.library.custom_op("lowbit::train_next_micro_batch_", mutates_args=("keys", "micro_batch"))
def next_micro_batch_(keys: Tensor, rng: Tensor, micro_batch: Tensor, replica: int) -> None:
    """The next micro-batch of the step begins, and has keys of its own.

    A backward pass begins none: compiled code that is recomputed runs this once more, after its forward has moved on.
    """
    if not in_backward():
        micro_batch += 1
    _derive(keys, rng, micro_batch, replica)


@torch.library.custom_op("lowbit::train_advance_", mutates_args=("keys", "rng", "micro_batch", "amax"))
def advance_(keys: Tensor, rng: Tensor, micro_batch: Tensor, amax: Tensor, pending: Tensor, replica: int) -> None:
    """A step of the optimizer is done: the next one has other keys, and this one's magnitudes in its histories.

    ``amax`` fp32 ``[operands, steps]``, the newest first; ``pending`` fp32 ``[operands]``, of the step that is done. An
    operand that was not seen in it, or held zeros alone, keeps its history as it is.
    """
    rng[1] += 1
    micro_batch.fill_(-1)
    _derive(keys, rng, micro_batch, replica)
    moved = torch.cat([pending[:, None], amax[:, :-1]], 1)
    amax.copy_(torch.where(pending[:, None] > 0, moved, amax))


@torch.library.custom_op("lowbit::train_record_", mutates_args=("pending",))
def record_(pending: Tensor, magnitudes: Tensor) -> None:
    """``pending``, fp32 ``[1]``, is at least each of ``magnitudes`` that is finite, so recording twice changes nothing.

    ``record_eagerly`` is the same without the time that an op takes.
    """
    record_eagerly(pending, magnitudes)


@record_.register_vmap
def _record_all(info: Any, in_dims: Any, pending: Tensor, magnitudes: Tensor) -> tuple[None, None]:
    record_(pending, magnitudes)
    return None, None


def record_eagerly(pending: Tensor, magnitudes: Tensor) -> None:
    """For code that is neither compiled nor transformed by torch.func, which refuses to change what it captured."""
    pending.copy_(torch.maximum(pending, torch.where(magnitudes.isfinite(), magnitudes, 0.0).max()))


def _derive(keys: Tensor, rng: Tensor, micro_batch: Tensor, replica: int) -> None:
    """The weight is the same on every replica and in every micro-batch, so it takes 0 for both."""
    seed, step = rng[0], rng[1]
    batch, zero = micro_batch.clamp(min=0), torch.zeros_like(micro_batch)
    counter = [torch.stack([batch, zero]), torch.stack([torch.full_like(batch, replica), zero])]
    counter = [word & _LOW for word in (*counter, torch.zeros_like(counter[0]), torch.full_like(counter[0], _TAG))]
    low, high, _, _ = philox4x32(counter, (seed & _LOW, (seed >> 32) & _LOW))
    keys.copy_(torch.stack([low | (high << 32), step.expand(2)], 1))
