"""optimizer_steps_: ``optimizer_step`` on many tensors at once, in place, with bit-identical results.

It is not in the table of ops, because it takes lists of tensors. lowbit/backends/steps.py registers it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.op_calls import fill
from lowbit.ops.optim import REPLACED, OptimizerStep

__all__ = ["SCHEMA", "OptimizerSteps", "each", "step_"]

#: The arguments in torch schema syntax.
SCHEMA = (
    "Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] masters, Tensor(c!)[] first, Tensor(d!)[] first_scale, "
    "Tensor(e!)[] second, Tensor(f!)[] second_scale, int[] places, str rule, float[] factors, str first_scheme, "
    "str second_scheme, str rounding, str param_rounding, Tensor? rng, int look"
)


class OptimizerSteps(NamedTuple):
    """Arguments of many ``OptimizerStep`` that share rule, factors, schemes, roundings and ``rng``.

    Tensors are contiguous, of any shape; gradients may have other strides. A list is empty if no tensor has this part.
    The op returns one uint8 per tensor: 1 if its new scales and the inspected moments are finite.

    Attributes:
        places: Four numbers per tensor: the columns of its rows, then ``stream``, ``offset`` and ``pitch``.
        look: Float moments of at most this many elements are inspected.
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
    """The ``OptimizerStep`` of every tensor, on views of its rows."""
    states = (call.masters, call.first, call.first_scale, call.second, call.second_scale)
    for i, (param, grad) in enumerate(zip(call.params, call.grads, strict=True)):
        cols, *place = call.places[4 * i : 4 * i + 4]
        rows = param.numel() // cols
        state = [tensors[i].view(rows, -1) if tensors else None for tensors in states]
        matrix = param.view(rows, cols), grad.reshape(rows, cols)
        rest = call[OptimizerSteps._fields.index("rule") : -1]  # the same fields in the same order as in OptimizerStep
        yield OptimizerStep._make((*matrix, *state, *rest, *place))


def step_(call: OptimizerStep) -> None:
    """Run the op ``optimizer_step`` with its own arguments as outputs."""
    outs = {
        f"new_{name}": call[0].new_empty(0, dtype=torch.uint8) if tensor is None else tensor
        for name, tensor in ((name, getattr(call, name)) for name in REPLACED)
    }
    fill("optimizer_step", *call, **outs)
