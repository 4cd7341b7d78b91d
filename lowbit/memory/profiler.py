"""A profile of a model's training: what the allocator held at each moment, by layer and by kind."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.profiler import record_function

from lowbit.combinations import refusal
from lowbit.memory import rss
from lowbit.memory.ledger import OUTSIDE, Ledger, Piece
from lowbit.memory.measure import counting
from lowbit.memory.usage import Holding, Usage, kinds_of
from lowbit.models.check import check_model
from lowbit.sizes import amount
from lowbit.tables import aligned
from lowbit.torch_private import profiling

__all__ = ["Leak", "Profile", "Snapshot", "profile"]

#: How an op is marked among the profiler's events.
_MARK = "lowbit.memory#"

#: Kinds that are meant to stay from step to step.
_LASTING = ("parameters", "buffers", "gradients", "optimizer state", "master copies", "inputs")


class Snapshot(NamedTuple):
    """``allocated``: bytes held when it was taken; ``peak``: the most since the profile or the last reset began, known
    once the profile has ended; ``resident``: what the process had of the system, on CUDA what the allocator reserved.
    """

    name: str
    allocated: int
    peak: int
    resident: int


class Leak(NamedTuple):
    """``tensors`` of ``bytes`` that a line of the caller has made in ``steps`` steps and that are still alive."""

    line: str
    layer: str
    tensors: int
    bytes: int
    steps: int


class _Allocation(NamedTuple):
    bytes: int
    born: int
    died: float


class Profile(Usage):
    """See ``profile``. What is read of it is known once its ``with`` block has ended."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device, self._model = device, model
        self._begun = self._ended = False
        self._marks: list[tuple[str, int, int, int]] = []
        self._resets: list[int] = []
        self._steps: list[int] = []

    # -- while it runs -------------------------------------------------------------------------------------------
    def __enter__(self) -> Profile:
        if self._begun:
            raise RuntimeError("memory.profile: this profile has run already; make another with memory.profile(model)")
        if profiling():
            raise RuntimeError(refusal("profile profiler", "memory.profile"))
        self._begun = True
        self._ledger = Ledger(
            self._model, self.device, wrap=lambda number: record_function(f"{_MARK}{number}"), lines=True
        )
        self._profiler = counting()
        with ExitStack() as entered:
            entered.enter_context(self._profiler)
            entered.enter_context(self._ledger)
            self._ledger.baseline()
            entered.pop_all()  # __exit__ ends them
        return self

    def __exit__(self, *error: object) -> None:
        self._ledger.__exit__(*error)
        self._profiler.__exit__(*error)
        self._read()
        self._ended = True
        self._pieces, self._step_ends = self._ledger.pieces, self._steps or self._ledger.steps
        del self._model, self._profiler, self._ledger  # a profile that has ended keeps no tensor alive

    def snapshot(self, name: str) -> Snapshot:
        """Note what is held now under a name."""
        self._require_open("snapshot")
        resident = torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else rss.resident_bytes()
        self._marks.append((name, len(self._ledger.ops), self._ledger.live, resident))
        return Snapshot(name, self._ledger.live, self._ledger.live, resident)

    def reset_peak(self) -> None:
        """Forget what was held at most until now: ``peak_bytes`` and what follows from it count from here."""
        self._require_open("reset_peak")
        self._resets.append(len(self._ledger.ops))

    def step(self) -> None:
        """A step of training ends here, for ``leaks``; without it, those of the optimizer that steps most count."""
        self._require_open("step")
        self._steps.append(len(self._ledger.ops))

    def __getattr__(self, name: str) -> Any:
        if name in ("_ops", "_times", "_holdings", "_since", "_pieces", "_step_ends"):
            raise RuntimeError(
                "memory.Profile: it is read once its with block has ended; within, take p.snapshot(name)"
            )
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def _require_open(self, what: str) -> None:
        if not self._begun or self._ended:
            raise RuntimeError(f"memory.Profile.{what}: the profile is not running; call it within its with block")

    # -- afterwards ----------------------------------------------------------------------------------------------
    @property
    def snapshots(self) -> list[Snapshot]:
        """The snapshots that were taken, in order."""
        found = []
        for name, number, allocated, resident in self._marks:
            first = max((reset for reset in self._resets if reset <= number), default=0)
            peak = int(self._peaks[first:number].max(initial=allocated))
            found.append(Snapshot(name, allocated, peak, resident))
        return found

    def leaks(self) -> list[Leak]:
        """Storages that at least two steps have each added to and that are still alive, largest first, by the line
        of the caller that made them. Parameters, gradients and states of optimizers are no leaks.

        Raises ValueError for a profile of fewer than three steps.
        """
        ends = self._step_ends
        if len(ends) < 3:
            raise ValueError(
                f"memory.Profile.leaks: growth is seen over 3 steps or more, got {len(ends)}; train longer within the "
                f"profile, and call p.step() after each step where no optimizer steps"
            )
        groups: dict[tuple[str, str], list[Piece]] = defaultdict(list)
        for piece in self._pieces:
            # The last step may keep what the next one replaces, such as the loss.
            if piece.died is None and 0 <= piece.born < ends[-2] and piece.kind not in _LASTING:
                groups[piece.line, piece.layer].append(piece)
        found = []
        for (line, layer), pieces in groups.items():
            steps = len({bisect_right(ends, piece.born) for piece in pieces})
            if steps > 1:
                found.append(Leak(line, layer, len(pieces), sum(p.bytes for p in pieces), steps))
        return sorted(found, key=lambda leak: -leak.bytes)

    def __str__(self) -> str:
        parts = [self.table()]
        if self._marks:
            rows = [(s.name, amount(s.allocated), amount(s.peak), amount(s.resident)) for s in self.snapshots]
            held = "reserved" if self.device.type == "cuda" else "resident"
            parts.append(aligned([("snapshot", "allocated", "peak until then", held), *rows], (1, 2, 3)))
        return "\n\n".join(parts)

    # -- the allocator's events --------------------------------------------------------------------------------------
    def _read(self) -> None:
        assert self._profiler.profiler is not None
        results = self._profiler.profiler.kineto_results
        assert results is not None
        begins: dict[int, int] = {}
        ends: dict[int, int] = {}
        changes: list[tuple[int, int, int]] = []
        kind = self.device.type
        for node in _nodes(results.experimental_event_tree()):
            if node.tag.name == "Allocation":
                fields = node.extra_fields
                if str(fields.device).startswith(kind):
                    changes.append((node.start_time_ns, fields.ptr, fields.alloc_size))
            elif node.name.startswith(_MARK):
                number = int(node.name[len(_MARK) :])
                begins[number], ends[number] = node.start_time_ns, node.end_time_ns
        ops = self._ledger.ops
        changes.sort(key=lambda change: change[0])
        origin = min([*(change[0] for change in changes[:1]), *begins.values()], default=0)
        times = [begins[n] - origin + 1 for n in range(len(ops))]
        after = [ends[n] - origin + 1 for n in range(len(ops))]
        allocations = _allocations(changes, origin - 1)
        self._build(times, after, allocations)

    def _build(self, times: list[int], after: list[int], allocations: dict[int, list[_Allocation]]) -> None:
        """Join what the ledger knows of storages with what the allocator knows of memory."""
        ops, known = self._ledger.ops, {}
        rows: list[tuple[int, int, float, int, str | None, str]] = []  # bytes, born, died, op, kind, layer
        for piece in self._ledger.pieces:
            if piece.born < 0:
                died = math.inf if piece.died is None else after[piece.died] if piece.died >= 0 else 0
                rows.append((piece.bytes, 0, died, -1, piece.kind, piece.layer))
                continue
            spans = allocations.get(piece.address, [])
            index = bisect_right(spans, after[piece.born], key=lambda span: span.born) - 1
            if index >= 0 and spans[index].died > times[piece.born]:
                known[piece.address, index] = piece
        for address, spans in allocations.items():
            for index, span in enumerate(spans):
                op = max(bisect_right(times, span.born) - 1, 0)
                found = known.get((address, index))
                gone = math.inf if found is None or found.died is None else after[found.died]
                layer = found.layer if found else ops[op].layer if ops else OUTSIDE
                rows.append((span.bytes, span.born, min(span.died, gone), op, found.kind if found else None, layer))
        kinds = kinds_of(ops, [r[3] for r in rows], [r[2] for r in rows], [r[4] for r in rows], times) if ops else []
        holdings = [Holding(r[0], kind, r[5], r[1], r[2]) for r, kind in zip(rows, kinds, strict=False)]
        Usage.__init__(self, ops, times, holdings, since=max(self._resets, default=0))


def _nodes(tree: list[Any]) -> Iterator[Any]:
    todo = list(tree)
    while todo:
        node = todo.pop()
        yield node
        todo.extend(node.children)


def _allocations(changes: list[tuple[int, int, int]], origin: int) -> dict[int, list[_Allocation]]:
    """By address, the allocations that begin within the profile. What another thread frees is not among the events: it
    has gone when its address is given out again.
    """
    found: dict[int, list[_Allocation]] = defaultdict(list)
    for time, address, size in changes:
        spans = found[address]
        if size > 0:
            if spans and spans[-1].died == math.inf:
                spans[-1] = spans[-1]._replace(died=time - origin)
            found[address].append(_Allocation(size, time - origin, math.inf))
        elif found[address]:
            found[address][-1] = found[address][-1]._replace(died=time - origin)
    return found


def profile(
    model: nn.Module,
    batch: Any = None,
    step: Callable[[Any], object] | None = None,
    device: torch.device | str | None = None,
) -> Profile:
    """Profile the memory of what runs within ``with memory.profile(model) as p:``, or of ``step(batch)``.

    Afterwards ``p.peak_bytes``, ``p.by_kind``, ``p.by_layer``, ``p.by_phase``, ``p.peak_event`` and ``p.timeline`` say
    what was held, ``print(p)`` shows it, ``p.plot(path)`` draws it, ``p.save(path)`` writes JSON; ``p.leaks()`` names
    lines whose tensors pile up. Within, ``p.snapshot(name)`` notes what is held and ``p.reset_peak()`` starts the peak
    again.

    Sizes are those of torch's allocator on ``device`` (where the parameters are, unless given), scratch memory of
    kernels included that is allocated through it. The process itself holds more: malloc rounds up, libraries have their
    own memory, and pages are given back late (2 to 3 MB for a model of 200 MB on glibc).
    Every live tensor of the process on that device counts, also in ``p.peak_bytes``. The kind ``other`` has those that
    existed before and belong neither to the model nor to its optimizer, such as a second model.
    ``step``: called twice with ``batch``, the second time under the profile, when states of optimizers exist.
    Every op costs some microseconds more within.

    Raises TypeError for what is no module, ValueError for a device that is neither a CPU nor CUDA, or for a batch
    without a step.
    """
    check_model(model)
    place = (
        torch.device(device)
        if device is not None
        else next((p.device for p in model.parameters()), torch.device("cpu"))
    )
    if place.type not in ("cpu", "cuda"):
        raise ValueError(
            f"memory.profile: allocations are counted on 'cpu' and 'cuda', got {str(place)!r}; for a model on 'meta' "
            f"use lb.estimate"
        )
    made = Profile(model, place)
    if step is None:
        if batch is not None:
            raise ValueError("memory.profile: a batch needs step=, a function of it; or profile a with block")
        return made
    step(batch)
    with made:
        step(batch)
    return made
