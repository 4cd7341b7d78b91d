"""The groups to measure: every op's workloads, from the table of ops, beside peers and the machine's limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from lowbit.backends import cpu, registry
from lowbit.bench import peers, probe
from lowbit.bench.timing import Case, Group
from lowbit.ops import OPS, OpSpec
from lowbit.ops.spec import Workload


class Item(NamedTuple):
    """A group that is not made yet: its inputs may be large."""

    op: str
    label: str
    subject: str
    make: Callable[[], Group]


def items(rows: int, cols: int) -> Iterator[Item]:
    """Everything there is to measure, on matrices ``[rows, cols]``."""
    for spec in OPS.values():
        for work in spec.workloads(rows, cols):
            label = " ".join(filter(None, (spec.name, work.variant)))
            yield Item(spec.name, label, work.subject, lambda s=spec, n=label, w=work: _group(s, n, w))


def _group(spec: OpSpec, label: str, work: Workload) -> Group:
    call = work.call()
    cost = spec.cost(call)
    others = peers.of(spec.name, call)
    return Group(
        spec.name, label, work.subject, cost.bytes, cost.flops, (*_ours(spec, call), *others), probe.limit(cost, call)
    )


def isas() -> list[str]:
    """Instruction sets of the compiled kernels, best last; one empty name where there are none to choose from."""
    return cpu.isas() if cpu.unavailable() is None else [""]


def _ours(spec: OpSpec, call: Any) -> Iterator[Case]:
    """lowbit's op on ``call`` with preallocated outputs: once for each instruction set."""
    outs = {
        name: torch.empty(shape, dtype=dtype)
        for name, (shape, dtype) in zip(spec.returns, spec.outputs(call), strict=True)
    }
    run = getattr(torch.ops.lowbit, f"{spec.name}_out")
    chosen = registry.explaining((spec.name,), lambda: run(*call, **outs)).chosen
    if chosen is None or chosen.backend == "reference":
        yield Case("lowbit reference", lambda: run(*call, **outs))
        return
    for isa in isas():
        enter: Callable[[], None] = (lambda isa=isa: torch.ops.lowbit_native.force_isa(isa)) if isa else (lambda: None)
        yield Case(f"lowbit {isa}".strip(), lambda: run(*call, **outs), enter)
