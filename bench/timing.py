"""Measures median times of cases that take turns, so that all see the machine in the same state.

A processor's memory bandwidth and clock drift within seconds. So a ratio is between medians of interleaved samples,
never between two runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle

#: More bytes than the caches hold. Operands used in turn have this total size, so they come from memory.
CACHES = 128 << 20


@dataclass(frozen=True)
class Case:
    """An implementation of a group's work. ``run`` fills preallocated memory. ``enter`` is called before, untimed."""

    who: str
    run: Callable[[], object]
    enter: Callable[[], None] = field(default=lambda: None)


@dataclass(frozen=True)
class Group:
    """Cases that do the same work, and ``limits`` of this machine, which are measured together with them.

    The slowest limit applies: memory-bound work cannot be faster than memory, other work not faster than arithmetic.
    ``bytes``: the fewest bytes that must move. ``flops``: multiplications and additions; 0 if only bytes matter.
    """

    section: str
    op: str
    subject: str
    bytes: int
    flops: int
    cases: tuple[Case, ...]
    limits: tuple[Case, ...]


@dataclass(frozen=True)
class Budget:
    """How long to measure: ``samples`` per case, of at least ``sample_seconds`` each, in about ``seconds`` in total.

    ``clock``: for one thread, ``time.process_time`` excludes the time of other programs.
    """

    samples: int = 15
    sample_seconds: float = 0.004
    seconds: float = 2.5
    clock: Callable[[], float] = time.perf_counter


def usable(make: Callable[[], Case | None]) -> Iterator[Case]:
    """The case, if its package is installed and supports the work; runs it once to test that."""
    try:
        case = make()
        if case is not None:
            case.run()
            yield case
    except (ImportError, AttributeError, RuntimeError, TypeError, ValueError, NotImplementedError):
        return


def rotating(cases: Sequence[Case]) -> Case:
    """One case that runs ``cases`` in turn, each with its own operands, so that none finds its operands in a cache."""
    if len(cases) == 1:
        return cases[0]
    turns = cycle([case.run for case in cases])
    return Case(cases[0].who, lambda: next(turns)(), cases[0].enter)


def once(case: Case, repeats: int = 1, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds per run, averaged over ``repeats`` in a row."""
    case.enter()
    start = clock()
    for _ in range(repeats):
        case.run()
    return (clock() - start) / repeats


def measure(group: Group, budget: Budget) -> dict[str, float]:
    """Median seconds of all cases and limits, by ``who``. A slow case takes part in fewer rounds."""
    cases = (*group.cases, *group.limits)
    for case in cases:
        once(case)  # warm-up
    quick = {case.who: once(case, clock=budget.clock) for case in cases}
    repeats = {who: max(1, round(budget.sample_seconds / max(seconds, 1e-7))) for who, seconds in quick.items()}
    share = budget.seconds / len(cases)
    rounds = {
        who: max(1, min(budget.samples, int(share / (seconds * repeats[who] + 1e-9)))) for who, seconds in quick.items()
    }
    taken: dict[str, list[float]] = {case.who: [] for case in cases}
    for turn in range(max(rounds.values())):
        for case in cases:
            if turn < rounds[case.who]:
                taken[case.who].append(once(case, repeats[case.who], budget.clock))
    return {who: statistics.median(values) for who, values in taken.items()}
