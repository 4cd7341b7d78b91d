"""Timing: the cases of a group take turns, so that all of them meet the machine in the same state; medians.

A processor's memory bandwidth and clock drift within seconds. A ratio is therefore taken between medians of samples
that were drawn alternately, never between two runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle

#: More bytes than caches hold: operands that are used in turn are this much together, and come from memory.
CACHES = 128 << 20


@dataclass(frozen=True)
class Case:
    """One way to do a group's work. ``run`` writes into memory it is given; ``enter`` is called before it, untimed."""

    who: str
    run: Callable[[], object]
    enter: Callable[[], None] = field(default=lambda: None)


@dataclass(frozen=True)
class Group:
    """Cases that do the same work, and the ``limits``: what this machine could do at best, measured beside them.

    The slowest of the limits counts: work that is bound by memory cannot be faster than memory, nor other work faster
    than arithmetic. ``bytes``: what must move at least. ``flops``: multiplications and additions, 0 where only bytes
    matter.
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
    """How long to measure: ``samples`` of each case, of ``sample_seconds`` at least, in about ``seconds`` in all.

    ``clock``: of one thread, ``time.process_time`` leaves out what the machine does meanwhile for other programs.
    """

    samples: int = 15
    sample_seconds: float = 0.004
    seconds: float = 2.5
    clock: Callable[[], float] = time.perf_counter


def usable(make: Callable[[], Case | None]) -> Iterator[Case]:
    """The case, if its package is there and takes the work; runs it once to know."""
    try:
        case = make()
        if case is not None:
            case.run()
            yield case
    except (ImportError, AttributeError, RuntimeError, TypeError, ValueError, NotImplementedError):
        return


def rotating(cases: Sequence[Case]) -> Case:
    """Cases that do the same work on operands of their own, one after the other: none finds its operands in a cache."""
    if len(cases) == 1:
        return cases[0]
    turns = cycle([case.run for case in cases])
    return Case(cases[0].who, lambda: next(turns)(), cases[0].enter)


def once(case: Case, repeats: int = 1, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds that one run takes, averaged over ``repeats`` in a row."""
    case.enter()
    start = clock()
    for _ in range(repeats):
        case.run()
    return (clock() - start) / repeats


def measure(group: Group, budget: Budget) -> dict[str, float]:
    """Median seconds of every case by ``who``, the limits among them. A slow case takes part in fewer rounds."""
    cases = (*group.cases, *group.limits)
    for case in cases:
        once(case)  # warms up
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
