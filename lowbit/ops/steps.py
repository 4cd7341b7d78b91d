"""optimizer_steps_: one step of a rule on many tensors at once, in place; each has what ``optimizer_step`` gives it.

It is no row of the table of ops, whose arguments are single tensors: lowbit/backends/steps.py makes it an op.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.op_calls import fill
from lowbit.ops.optim import REPLACED, OptimizerStep

__all__ = ["SCHEMA", "OptimizerSteps", "each", "step_"]

#: The arguments as a torch schema has them.
SCHEMA = (
    "Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] masters, Tensor(c!)[] first, Tensor(d!)[] first_scale, "
    "Tensor(e!)[] second, Tensor(f!)[] second_scale, int[] places, str rule, float[] factors, str first_scheme, "
    "str second_scheme, str rounding, str param_rounding, Tensor? rng, int look"
)


class OptimizerSteps(NamedTuple):
    """Arguments of many ``OptimizerStep``, which share their rule, its factors, schemes, roundings and ``rng``.

    Lists are empty of what tensors do not have. Tensors are contiguous, of any shape, but gradients may lie otherwise.
    ``places``: four numbers of each: the columns of the rows that it is stepped in, then ``stream``, ``offset`` and
    ``pitch``. ``look``: moments in floats of at most so many elements are looked at.

    The op answers uint8, one a tensor: 1 where the scales that it left, and the moments looked at, are finite.
    """

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    masters: Sequence[Tensor]
    first: Sequence[Tensor]
    first_scale: Sequence[Tensor]
    second: Sequence[Tensor]
    second_scale: Sequence[Tensor]
    places: Sequence[int]
    rule: str
    factors: Sequence[float]
    first_scheme: str
    second_scheme: str
    rounding: str
    param_rounding: str
    rng: Tensor | None
    look: int


def each(call: OptimizerSteps) -> Iterator[OptimizerStep]:
    """The step of every tensor, on views of its rows."""
    kept = (call.masters, call.first, call.first_scale, call.second, call.second_scale)
    for i, (param, grad) in enumerate(zip(call.params, call.grads, strict=True)):
        cols, *place = call.places[4 * i : 4 * i + 4]
        rows = param.numel() // cols
        own = [tensors[i].view(rows, -1) if tensors else None for tensors in kept]
        matrix = param.view(rows, cols), grad.reshape(rows, cols)
        rest = call[OptimizerSteps._fields.index("rule") : -1]  # in the order of OptimizerStep, as far as they go
        yield OptimizerStep._make((*matrix, *own, *rest, *place))


def step_(call: OptimizerStep) -> None:
    """The op ``optimizer_step`` in place of its own arguments."""
    outs = {
        f"new_{name}": call[0].new_empty(0, dtype=torch.uint8) if tensor is None else tensor
        for name, tensor in ((name, getattr(call, name)) for name in REPLACED)
    }
    fill("optimizer_step", *call, **outs)
