"""Optimizer steps by the ops ``optimizer_step`` (one parameter) and ``optimizer_steps_`` (many parameters).

Source: docs/numerics.md section 11.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.functional.quantizers import quantize
from lowbit.op_calls import call
from lowbit.ops.optim import OptimizerStep
from lowbit.ops.steps import OptimizerSteps, step_
from lowbit.optim.shards import Part, local
from lowbit.optim.states import Storage, Stored, is_aligned
from lowbit.torch_private import foreach_copy_

__all__ = ["ParamLayout", "Work", "advance", "advance_joined", "advance_listed", "direction", "mean_of"]


@dataclass(frozen=True)
class ParamLayout:
    """Facts about a parameter and its states that stay the same from step to step.

    Attributes:
        name: For messages.
        rule: Name of the update rule, a key of ``RULES`` or a rule of the optimizer's class.
        part: The part of the parameter on this process.
        moments: Storage of each moment.
        rounding: Rounding of the states.
        stream: Random stream of the moments; the weights use the next stream.
        few: Whether the tensor has so few elements that its states are fp32.
        aligned: Whether no block of a state spans several parts.
        place: Its entry of ``OptimizerSteps.places``.
        kinds: Format of each moment.
    """

    name: str
    rule: str
    part: Part
    moments: dict[str, Storage]
    rounding: str
    stream: int
    few: bool
    aligned: bool
    place: tuple[int, ...] = field(init=False)
    kinds: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        place = self.part.cols, self.stream, self.part.offset, self.part.pitch
        object.__setattr__(self, "place", place)
        object.__setattr__(self, "kinds", tuple(storage.kind for storage in self.moments.values()))


@dataclass(slots=True)
class Work:
    """One parameter ``source`` in a step; ``param`` and ``grad`` are this process' shards.

    ``step`` counts from 1. ``rng`` is int64 ``[seed, step]``.
    """

    layout: ParamLayout
    source: Tensor
    param: Tensor
    grad: Tensor
    state: dict[str, Any]
    group: dict[str, Any]
    step: int = 0
    rng: Tensor | None = None

    @property
    def part(self) -> Part:
        return self.layout.part

    def local(self, name: str) -> Tensor:
        """This process' shard of a state."""
        state: Tensor = self.state[name]
        return state if self.layout.part.mesh is None else local(state)

    @property
    def master(self) -> Tensor | None:
        return self.local("master") if "master" in self.state else None

    @property
    def rounds_weights(self) -> bool:
        """Whether the parameter is rounded stochastically."""
        return self.group["master"] == "stochastic" and self.param.dtype == torch.bfloat16

    def other(self, rule: str, moments: dict[str, Storage], **changes: Any) -> Work:
        """The same parameter with another rule."""
        return replace(self, layout=replace(self.layout, rule=rule, moments=moments), **changes)


def advance(work: Work, factors: Sequence[float]) -> None:
    """Step a parameter and its states in place by the rule of ``work``."""
    part = work.part
    moments = [Stored(storage, *_stored(work.state, name)) for name, storage in work.layout.moments.items()]
    if work.layout.aligned:
        _op(work, factors, moments)
        return
    numbers = [_decoded(part, moment) for moment in moments]
    if part.numel:
        floats = [Stored(Storage("fp32", m.storage.shape), n, None) for m, n in zip(moments, numbers, strict=True)]
        _op(work, factors, floats)
    for moment, number in zip(moments, numbers, strict=True):
        _encode(work, moment, number)


def direction(
    work: Work, grad: Tensor, moments: dict[str, Storage], factors: Sequence[float], rule: str = "momentum"
) -> Tensor:
    """The update of a rule, fp32, for this process' shard; the parameter stays as it is.

    Args:
        work: The parameter.
        grad: This process' shard of the gradient, in the shape of the moments.
        moments: The moments of the rule, all of one shape. They are sharded as ``Part.of_state`` says.
        factors: The factors of the rule.
        rule: A key of ``RULES``.
    """
    update = torch.zeros(grad.shape, device=grad.device)
    state = {name: value for name, value in work.state.items() if name != "master"}
    shape = next(iter(moments.values())).shape
    layout = work.layout
    if shape != work.part.shape:
        part = work.part.of_state(shape)
        layout = replace(layout, part=part, aligned=all(is_aligned(part, storage) for storage in moments.values()))
    advance(replace(work, layout=layout).other(rule, moments, param=update, grad=grad, state=state), factors)
    return update


def mean_of(keep: float, nesterov: bool = False) -> tuple[float, ...]:
    """Factors with which ``direction`` returns the moving average of gradients, optionally with Nesterov momentum."""
    shares = (1 - keep, keep) if nesterov else (0.0, 1.0)
    return 0.0, keep, 1 - keep, *shares, -1.0


def advance_joined(works: Sequence[Work], factors: Sequence[float]) -> list[Tensor]:
    """Step several parameters in one op. They have one dtype, fp32 moments and no master weights.

    Returns:
        Their moments, concatenated.
    """
    flat = [[_flat(work.param) for work in works]]
    flat += [[_flat(work.local(name)) for work in works] for name in works[0].layout.moments]
    param, *moments = (torch.cat(tensors) for tensors in flat)
    grad = torch.cat([_flat(work.grad) for work in works])
    step_(_arguments(works[0], factors, param, grad, None, [("fp32", moment, None) for moment in moments]))
    sizes = [work.part.numel for work in works]
    foreach_copy_(
        [tensor for tensors in flat for tensor in tensors],
        [piece for joined in (param, *moments) for piece in joined.split(sizes)],
    )
    return moments


def advance_listed(
    first: Work, columns: Sequence[Sequence[Tensor]], places: Sequence[int], factors: Sequence[float], look: int
) -> Tensor:
    """Step many parameters in one op, with the ``columns``, ``places`` and ``look`` of ``OptimizerSteps``.

    They have one group, dtype, and format of states and master weights. No block spans several parts.

    Returns:
        For each parameter, whether all of its states are finite.
    """
    layout = first.layout
    rounding, weights = _roundings(first, layout.kinds)
    rng = first.rng if "stochastic" in (rounding, weights) else None
    kinds = (*layout.kinds, "fp32", "fp32")[:2]
    steps = OptimizerSteps._make((*columns, places, layout.rule, factors, *kinds, rounding, weights, rng, look))
    finite: Tensor = call("optimizer_steps_", *steps)
    torch.autograd.graph.increment_version(steps.params)  # states are in no graph
    return finite


def _roundings(work: Work, kinds: Sequence[str]) -> tuple[str, str]:
    """Rounding of states with formats ``kinds``, and rounding of the parameter."""
    rounding = work.layout.rounding if any(kind != "fp32" for kind in kinds) else "nearest"
    return rounding, "stochastic" if work.rounds_weights else "nearest"


def _flat(x: Tensor) -> Tensor:
    return x if x.dim() == 1 else x.reshape(-1)


def _stored(state: dict[str, Any], name: str) -> tuple[Tensor, Tensor | None]:
    scale = state.get(f"{name}_scale")
    return local(state[name]), None if scale is None else local(scale)


def _op(work: Work, factors: Sequence[float], moments: Sequence[Stored]) -> None:
    part = work.part
    if not part.numel:
        return
    rows, cols = part.rows, part.cols
    matrices = [
        (m.storage.kind, m.codes.view(rows, -1), None if m.scale is None else m.scale.view(rows, -1)) for m in moments
    ]
    param = work.param if work.param.is_contiguous() else work.param.contiguous()
    master = work.master
    step_(
        _arguments(
            work, factors, param.view(rows, cols), work.grad.reshape(rows, cols),
            None if master is None else master.view(rows, cols), matrices,
        )
    )  # fmt: skip
    if param is not work.param:
        work.param.copy_(param)


def _arguments(
    work: Work, factors: Sequence[float], param: Tensor, grad: Tensor, master: Tensor | None,
    moments: Sequence[tuple[str, Tensor, Tensor | None]],
) -> OptimizerStep:  # fmt: skip
    first, second = (*moments, *((("fp32", None, None),) * 2))[:2]
    rounding, weights = _roundings(work, [m[0] for m in moments])
    random = (work.rng, work.layout.stream, work.part.offset, work.part.pitch)
    return OptimizerStep(
        param, grad, master, first[1], first[2], second[1], second[2], work.layout.rule, factors, first[0], second[0],
        rounding, weights, *(random if "stochastic" in (rounding, weights) else (None, 0, 0, None)),
    )  # fmt: skip


# -- blocks that span several parts ------------------------------------------------------------------------------------
def _each(kind: str) -> str:
    """The scheme with one scale per element, so that each element can have the scale of its block."""
    format, _scaling, *options = kind.split(":")
    return ":".join((format, "group1", *options))


def _decoded(part: Part, moment: Stored) -> Tensor:
    """The moment in fp32 ``[rows, cols]``, by the scales of the full tensor's blocks."""
    assert moment.scale is not None  # floats have no blocks
    if not part.numel:
        return moment.scale.new_empty(part.rows, part.cols, dtype=torch.float32)
    scale = moment.scale.view(-1)[part.indices(moment.scale.device) // moment.storage.block]
    codes = moment.codes.view(part.rows, -1)
    kind = _each(moment.storage.kind)
    numbers: Tensor = call("dequantize", codes, kind, part.cols, scale, None, None, torch.float32)
    return numbers


def _encode(work: Work, moment: Stored, numbers: Tensor) -> None:
    """Store ``numbers`` in the moment, with the scales of the full tensor's blocks."""
    part, storage = work.part, moment.storage
    assert moment.scale is not None
    blocks = part.indices(numbers.device) // storage.block
    bits = (numbers.view(torch.int32) & 0x7FFFFFFF).view(-1)
    amax = bits.new_zeros(moment.scale.numel()).scatter_reduce_(0, blocks.view(-1), bits, "amax")
    for group in part.groups:
        dist.all_reduce(amax, dist.ReduceOp.MAX, group)  # as integers, of which NaN is the largest
    kind = _each(storage.kind)
    scales = quantize(amax.view(torch.float32)[:, None], kind).scale
    moment.scale.copy_(scales.view_as(moment.scale))
    if not part.numel:
        return
    rounding = work.layout.rounding
    random = (work.rng, work.layout.stream, part.offset, part.pitch) if rounding == "stochastic" else (None, 0, 0, None)
    codes = call("quantize_static", numbers, kind, moment.scale.view(-1)[blocks], None, None, rounding, *random)
    moment.codes.copy_(codes.view_as(moment.codes))
