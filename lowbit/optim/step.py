"""The step of one parameter by the op ``optimizer_step``, or of many at once: by ``optimizer_steps_``, or joined.

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
from lowbit.optim.states import Storage, Stored
from lowbit.torch_private import foreach_copy_

__all__ = ["ParamLayout", "Work", "advance", "advance_joined", "advance_listed", "direction", "mean_of"]


@dataclass(frozen=True)
class ParamLayout:
    """What stays of a parameter from step to step: its name and part, its rule, what its states are kept as.

    ``rounding``: of its states. ``stream``: of the random bits of its moments; the next one is of its weights.
    ``few``: of elements in all, so that its states are in fp32. ``aligned``: no block lies in several parts.
    ``place``: see ``OptimizerSteps``. ``kinds``: what its states are kept in.
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
        object.__setattr__(self, "kinds", tuple(kept.kind for kept in self.moments.values()))


@dataclass(slots=True)
class Work:
    """A parameter ``source`` in a step: this process' parts of it and of its gradient, and its states.

    ``rng``: [seed, step].
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
        """What this process holds of a state."""
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
        """The same parameter in another rule's step."""
        return replace(self, layout=replace(self.layout, rule=rule, moments=moments), **changes)


def advance(work: Work, factors: Sequence[float]) -> None:
    """One step of a parameter and its states by the work's rule, in place."""
    part = work.part
    kept = [Stored(kind, *_stored(work.state, name)) for name, kind in work.layout.moments.items()]
    if work.layout.aligned:
        _op(work, factors, kept)
        return
    numbers = [_decoded(part, m) for m in kept]
    if part.numel:
        floats = [Stored(Storage("fp32", m.kept.shape), n, None) for m, n in zip(kept, numbers, strict=True)]
        _op(work, factors, floats)
    for moment, number in zip(kept, numbers, strict=True):
        _encode(work, moment, number)


def direction(work: Work, grad: Tensor, moments: dict[str, Storage], factors: Sequence[float]) -> Tensor:
    """What the rule ``momentum`` makes of ``grad`` instead of a step: fp32, of this process' part."""
    made = torch.zeros(grad.shape, device=grad.device)
    state = {name: value for name, value in work.state.items() if name != "master"}
    advance(work.other("momentum", moments, param=made, grad=grad, state=state), factors)
    return made


def mean_of(keep: float, nesterov: bool = False) -> tuple[float, ...]:
    """The factors by which a direction is the mean of gradients, or with Nesterov's look ahead."""
    shares = (1 - keep, keep) if nesterov else (0.0, 1.0)
    return 0.0, keep, 1 - keep, *shares, -1.0


def advance_joined(works: Sequence[Work], factors: Sequence[float]) -> list[Tensor]:
    """The same of several parameters of one dtype, whose moments are in fp32 and which have no masters: in one op.

    Answers their moments, joined.
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
    """The same of parameters of one group, dtype and kind of states and masters, no block of which lies in several
    parts: in one op, which says of which all states are finite (``OptimizerSteps``, which begins with ``columns``).
    """
    layout = first.layout
    rounding, weights = _roundings(first, layout.kinds)
    rng = first.rng if "stochastic" in (rounding, weights) else None
    kinds = (*layout.kinds, "fp32", "fp32")[:2]
    given = OptimizerSteps._make((*columns, places, layout.rule, factors, *kinds, rounding, weights, rng, look))
    finite: Tensor = call("optimizer_steps_", *given)
    torch.autograd.graph.increment_version(given.params)  # no graph has states
    return finite


def _roundings(work: Work, kinds: Sequence[str]) -> tuple[str, str]:
    """How states in ``kinds``, and the parameter, are rounded."""
    rounding = work.layout.rounding if any(kind != "fp32" for kind in kinds) else "nearest"
    return rounding, "stochastic" if work.rounds_weights else "nearest"


def _flat(x: Tensor) -> Tensor:
    return x if x.dim() == 1 else x.reshape(-1)


def _stored(state: dict[str, Any], name: str) -> tuple[Tensor, Tensor | None]:
    scale = state.get(f"{name}_scale")
    return local(state[name]), None if scale is None else local(scale)


def _op(work: Work, factors: Sequence[float], kept: Sequence[Stored]) -> None:
    part = work.part
    if not part.numel:
        return
    rows, cols = part.rows, part.cols
    given = [
        (
            m.kept.kind,
            m.codes.view(rows, -1),
            None if m.scale is None else m.scale.view(rows, -1),
        )
        for m in kept
    ]
    param = work.param if work.param.is_contiguous() else work.param.contiguous()
    master = work.master
    step_(
        _arguments(
            work, factors, param.view(rows, cols), work.grad.reshape(rows, cols),
            None if master is None else master.view(rows, cols), given,
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


# -- blocks that lie in several parts ----------------------------------------------------------------------------------
def _each(kind: str) -> str:
    """The scheme with a scale for every element, which the block that an element is of decides."""
    format, _scaling, *options = kind.split(":")
    return ":".join((format, "group1", *options))


def _decoded(part: Part, moment: Stored) -> Tensor:
    """The moment's numbers, fp32 [rows, cols], by scales of the whole tensor's blocks."""
    assert moment.scale is not None  # floats have no blocks
    if not part.numel:
        return moment.scale.new_empty(part.rows, part.cols, dtype=torch.float32)
    scale = moment.scale.view(-1)[part.places(moment.scale.device) // moment.kept.block]
    codes = moment.codes.view(part.rows, -1)
    numbers: Tensor = call("dequantize", codes, _each(moment.kept.kind), part.cols, scale, None, None, torch.float32)
    return numbers


def _encode(work: Work, moment: Stored, numbers: Tensor) -> None:
    """Stores numbers as the moment is kept, with scales from the blocks of the whole tensor."""
    part, kept = work.part, moment.kept
    assert moment.scale is not None
    blocks = part.places(numbers.device) // kept.block
    bits = (numbers.view(torch.int32) & 0x7FFFFFFF).view(-1)
    amax = bits.new_zeros(moment.scale.numel()).scatter_reduce_(0, blocks.view(-1), bits, "amax")
    for group in part.groups:
        dist.all_reduce(amax, dist.ReduceOp.MAX, group)  # as integers, of which NaN is the largest
    scales = quantize(amax.view(torch.float32)[:, None], _each(kept.kind)).scale
    moment.scale.copy_(scales.view_as(moment.scale))
    if not part.numel:
        return
    word = work.layout.rounding
    random = (work.rng, work.layout.stream, part.offset, part.pitch) if word == "stochastic" else (None, 0, 0, None)
    codes = call("quantize_static", numbers, _each(kept.kind), moment.scale.view(-1)[blocks], None, None, word, *random)
    moment.codes.copy_(codes.view_as(moment.codes))
