"""Benchmark groups: the workloads of all ops, with peers and the machine's limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.backends import cpu, registry
from lowbit.bench import peers, probe
from lowbit.bench.timing import CACHES, Case, Group, rotating
from lowbit.ops import OPS, Cost, OpSpec
from lowbit.testing import WORKLOADS, Workload


class Item(NamedTuple):
    """A group that is made on demand, because its inputs may be large."""

    op: str
    label: str
    subject: str
    make: Callable[[], Group]


def items(rows: int, cols: int) -> Iterator[Item]:
    """All groups, on matrices ``[rows, cols]``."""
    for spec in OPS.values():
        yield from (item(spec, work) for work in WORKLOADS[spec.name](rows, cols))


def item(spec: OpSpec, work: Workload) -> Item:
    label = " ".join(filter(None, (spec.name, work.variant)))
    return Item(spec.name, label, work.subject, lambda: _group(spec, label, work))


def _group(spec: OpSpec, label: str, work: Workload) -> Group:
    call = work.call()
    cost = spec.cost(call)
    calls = [call, *(_copy(call) for _ in range(_copies(cost) - 1))]
    others = [list(peers.of(spec.name, one)) for one in calls]
    return Group(
        spec.name, label, work.subject, cost.bytes, cost.flops,
        (*_ours(spec, calls, cost), *(rotating(same) for same in zip(*others, strict=True))), probe.limits(cost, call),
    )  # fmt: skip


def _copies(cost: Cost) -> int:
    """The number of operands that take turns: enough that a memory-bound matmul reads them from memory."""
    bound_by_memory = 0 < cost.flops < 64 * cost.bytes
    return -(-CACHES // cost.bytes) if bound_by_memory and cost.bytes > 1 << 20 else 1


def _copy(call: Any) -> Any:
    return type(call)(*(value.clone() if isinstance(value, Tensor) else value for value in call))


def isas() -> list[str]:
    """Instruction sets of the compiled kernels, best last; one empty name if there is no choice."""
    return cpu.isas() if cpu.unavailable() is None else [""]


def _outs(spec: OpSpec, call: Any) -> dict[str, Tensor]:
    """Outputs to fill: the call's own tensors if an op works in place."""
    made = {n: torch.empty(s, dtype=d) for n, (s, d) in zip(spec.returns, spec.outputs(call), strict=True)}
    given = {name: getattr(call, argument) for name, argument in spec.in_place.items()}
    return made | {name: tensor for name, tensor in given.items() if tensor is not None}


#: The most operations for scalar kernels, which would take minutes above.
_FOR_SCALAR = 1 << 30


def _ours(spec: OpSpec, calls: list[Any], cost: Cost) -> Iterator[Case]:
    """lowbit's op on ``calls`` in turn with preallocated outputs: one case per instruction set."""
    run = getattr(torch.ops.lowbit, f"{spec.name}_out")
    outs = [_outs(spec, call) for call in calls]

    def case(who: str, enter: Callable[[], None]) -> Case:
        enter()
        made = [lambda c=call, o=out: run(*c, **o) for call, out in zip(calls, outs, strict=True)]  # type: ignore[misc]
        return rotating([Case(who, one, enter) for one in made])

    chosen = registry.explaining((spec.name,), lambda: run(*calls[0], **outs[0])).chosen
    if chosen is None or chosen.backend == "reference":
        yield case("lowbit reference", lambda: None)
        return
    for isa in isas():
        if isa != "scalar" or cost.flops < _FOR_SCALAR:
            force: Callable[[], None] = partial(torch.ops.lowbit_native.force_isa, isa) if isa else lambda: None
            yield case(f"lowbit {isa}".strip(), force)
