"""``profile``: bytes that the allocator held at each moment of training, by layer and kind."""

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

#: Prefix of the profiler events that mark ops.
_MARK = "lowbit.memory#"

#: Kinds that are expected to live from step to step.
_LASTING = ("parameters", "buffers", "gradients", "optimizer state", "master copies", "inputs")


class Snapshot(NamedTuple):
    """Memory at a named moment of a profile.

    Attributes:
        name: As passed to ``Profile.snapshot``.
        allocated: Bytes held when it was taken.
        peak: Most bytes held since the profile began or the peak was reset. Known after the profile has ended.
        reserved: Bytes that torch's CUDA allocator had reserved. None on a CPU, whose allocator reserves nothing.
        resident: Resident bytes of the process, in host memory.
    """

    name: str
    allocated: int
    peak: int
    reserved: int | None
    resident: int


class Leak(NamedTuple):
    """Live tensors that a line of the caller's code has made over several steps.

    Attributes:
        line: ``file:line`` of the caller's code.
        layer: The layer in which they were made.
        tensors: Number of live storages.
        bytes: Their bytes in total.
        steps: Number of steps that added to them.
    """

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
    """A memory profile, as made by ``profile``. Its results can be read after its ``with`` block or ``stop``.

    Attributes:
        reserved_bytes: Most bytes that torch's CUDA allocator had reserved, since the last ``reset_peak``. None on a
            CPU, whose allocator reserves nothing.
    """

    reserved_bytes: int | None

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device, self._model = device, model
        self._begun = self._ended = False
        self._marks: list[tuple[int, Snapshot]] = []
        self._resets: list[int] = []
        self._steps: list[int] = []

    # -- while it runs -------------------------------------------------------------------------------------------
    def start(self) -> Profile:
        """Start the profile without a ``with`` block, until ``stop``. Call both in the same thread.

        Returns:
            The profile.

        Raises:
            RuntimeError: The profile runs or has run already, or another profiler runs.
        """
        return self.__enter__()

    def stop(self) -> Profile:
        """End the profile.

        Returns:
            The profile, whose results can now be read.

        Raises:
            RuntimeError: The profile is not running.
        """
        self._require_open("stop")
        self.__exit__(None, None, None)
        return self

    def __enter__(self) -> Profile:
        if self._begun:
            state = "has run already" if self._ended else "is running already"
            raise RuntimeError(f"memory.profile: this profile {state}; create another: memory.profile(model)")
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
        self._reserved_since = self._reserved_now()
        return self

    def __exit__(self, *error: object) -> None:
        self._ledger.__exit__(*error)
        self._profiler.__exit__(*error)
        self._read()
        self._ended = True
        self._pieces, self._step_ends = self._ledger.pieces, self._steps or self._ledger.steps
        del self._model, self._profiler, self._ledger  # a profile that has ended keeps no tensor alive

    def snapshot(self, name: str) -> Snapshot:
        """Record under ``name`` how much memory is held now.

        Args:
            name: A name for the snapshot.

        Returns:
            The snapshot. Its ``peak`` is final only in ``snapshots``.

        Raises:
            RuntimeError: The profile is not running.
        """
        self._require_open("snapshot")
        live = self._ledger.live
        snapshot = Snapshot(name, live, live, self._reserved_now(), rss.resident_bytes())
        self._marks.append((len(self._ledger.ops), snapshot))
        return snapshot

    def _reserved_now(self) -> int | None:
        return torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else None

    def reset_peak(self) -> None:
        """Start measuring the peak again from now; ``peak_bytes`` and all that depends on it ignore earlier ops.

        Raises:
            RuntimeError: The profile is not running.
        """
        self._require_open("reset_peak")
        self._resets.append(len(self._ledger.ops))
        self._reserved_since = self._reserved_now()

    def step(self) -> None:
        """Mark the end of a training step for ``leaks``.

        By default steps end when the optimizer that steps most often has stepped.

        Raises:
            RuntimeError: The profile is not running.
        """
        self._require_open("step")
        self._steps.append(len(self._ledger.ops))

    def __getattr__(self, name: str) -> Any:
        if name in ("_ops", "_times", "_holdings", "_since", "_pieces", "_step_ends", "reserved_bytes"):
            raise RuntimeError(
                "memory.Profile: results are available after the with block or stop(); before, call p.snapshot(name)"
            )
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def _require_open(self, method: str) -> None:
        if not self._begun or self._ended:
            raise RuntimeError(
                f"memory.Profile.{method}: the profile is not running; call it within its with block, or after start()"
            )

    # -- afterwards ----------------------------------------------------------------------------------------------
    @property
    def snapshots(self) -> list[Snapshot]:
        """The snapshots, in order."""
        snapshots = []
        for number, taken in self._marks:
            first = max((reset for reset in self._resets if reset <= number), default=0)
            snapshots.append(taken._replace(peak=int(self._peaks[first:number].max(initial=taken.allocated))))
        return snapshots

    def leaks(self) -> list[Leak]:
        """Return the storages that at least two steps have added to and that are still alive, largest first.

        They are grouped by the line of the caller's code that made them. Parameters, gradients and optimizer states do
        not count.

        Returns:
            One entry per line and layer.

        Raises:
            ValueError: The profile has fewer than three steps.
        """
        ends = self._step_ends
        if len(ends) < 3:
            raise ValueError(
                f"memory.Profile.leaks: expected 3 steps or more, got {len(ends)}; profile more steps, and call "
                f"p.step() after each one if no optimizer steps"
            )
        groups: dict[tuple[str, str], list[Piece]] = defaultdict(list)
        for piece in self._pieces:
            # Tensors of the last step may be alive until the next one replaces them, such as the loss.
            if piece.died is None and 0 <= piece.born < ends[-2] and piece.kind not in _LASTING:
                groups[piece.line, piece.layer].append(piece)
        leaks = []
        for (line, layer), pieces in groups.items():
            steps = len({bisect_right(ends, piece.born) for piece in pieces})
            if steps > 1:
                leaks.append(Leak(line, layer, len(pieces), sum(p.bytes for p in pieces), steps))
        return sorted(leaks, key=lambda leak: -leak.bytes)

    def __str__(self) -> str:
        parts = [self.table()]
        if self.reserved_bytes is not None:
            parts.append(f"reserved by torch's allocator: {amount(self.reserved_bytes)} at most")
        if self._marks:
            rows = [(s.name, *("" if size is None else amount(size) for size in s[1:])) for s in self.snapshots]
            head = ("snapshot", "allocated", "peak until then", "reserved", "resident")
            parts.append(aligned([head, *rows], (1, 2, 3, 4)))
        return "\n\n".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """Return all results as plain values, for JSON."""
        return {**super().as_dict(), "reserved_bytes": self.reserved_bytes}

    # -- the allocator's events --------------------------------------------------------------------------------------
    def _read(self) -> None:
        assert self._profiler.profiler is not None
        results = self._profiler.profiler.kineto_results
        assert results is not None
        begins: dict[int, int] = {}
        ends: dict[int, int] = {}
        changes: list[tuple[int, int, int]] = []
        reserved: list[tuple[int, int]] = []
        kind = self.device.type
        for node in _nodes(results.experimental_event_tree()):
            if node.tag.name == "Allocation":
                fields = node.extra_fields
                if str(fields.device).startswith(kind):
                    changes.append((node.start_time_ns, fields.ptr, fields.alloc_size))
                    reserved.append((node.start_time_ns, fields.total_reserved))
            elif node.name.startswith(_MARK):
                number = int(node.name[len(_MARK) :])
                begins[number], ends[number] = node.start_time_ns, node.end_time_ns
        ops = self._ledger.ops
        changes.sort(key=lambda change: change[0])
        origin = min([*(change[0] for change in changes[:1]), *begins.values()], default=0)
        self.reserved_bytes = self._most_reserved(reserved, begins)
        times = [begins[n] - origin + 1 for n in range(len(ops))]
        after = [ends[n] - origin + 1 for n in range(len(ops))]
        allocations = _allocations(changes, origin - 1)
        self._build(times, after, allocations)

    def _most_reserved(self, sizes: list[tuple[int, int]], begins: dict[int, int]) -> int | None:
        """Return the largest of the reserved bytes, pairs of time and size, since the last ``reset_peak``."""
        if self._reserved_since is None:
            return None
        first = max(self._resets, default=0)
        begin = begins.get(first, math.inf) if first else -math.inf
        return max([self._reserved_since, *(size for time, size in sizes if time >= begin)])

    def _build(self, times: list[int], after: list[int], allocations: dict[int, list[_Allocation]]) -> None:
        """Match storages of the ledger with allocations of the allocator."""
        ops, pieces_by_span = self._ledger.ops, {}
        rows: list[tuple[int, int, float, int, str | None, str]] = []  # bytes, born, died, op, kind, layer
        for piece in self._ledger.pieces:
            if piece.born < 0:
                died = math.inf if piece.died is None else after[piece.died] if piece.died >= 0 else 0
                rows.append((piece.bytes, 0, died, -1, piece.kind, piece.layer))
                continue
            spans = allocations.get(piece.address, [])
            index = bisect_right(spans, after[piece.born], key=lambda span: span.born) - 1
            if index >= 0 and spans[index].died > times[piece.born]:
                pieces_by_span[piece.address, index] = piece
        for address, spans in allocations.items():
            for index, span in enumerate(spans):
                op = max(bisect_right(times, span.born) - 1, 0)
                owner = pieces_by_span.get((address, index))
                freed = math.inf if owner is None or owner.died is None else after[owner.died]
                layer = owner.layer if owner else ops[op].layer if ops else OUTSIDE
                rows.append((span.bytes, span.born, min(span.died, freed), op, owner.kind if owner else None, layer))
        kinds = kinds_of(ops, [r[3] for r in rows], [r[2] for r in rows], [r[4] for r in rows], times) if ops else []
        holdings = [
            Holding(size, kind, layer, born, died, op if op >= 0 and times[op] <= born <= after[op] else -1)
            for (size, born, died, op, _, layer), kind in zip(rows, kinds, strict=False)
        ]
        Usage.__init__(self, ops, times, holdings, since=max(self._resets, default=0))


def _nodes(tree: list[Any]) -> Iterator[Any]:
    todo = list(tree)
    while todo:
        node = todo.pop()
        yield node
        todo.extend(node.children)


def _allocations(changes: list[tuple[int, int, int]], origin: int) -> dict[int, list[_Allocation]]:
    """Return the allocations that begin within the profile, by address.

    Frees in other threads are not among the events: such an allocation ends when its address is allocated again.
    """
    allocations: dict[int, list[_Allocation]] = defaultdict(list)
    for time, address, size in changes:
        spans = allocations[address]
        if size > 0:
            if spans and spans[-1].died == math.inf:
                spans[-1] = spans[-1]._replace(died=time - origin)
            allocations[address].append(_Allocation(size, time - origin, math.inf))
        elif allocations[address]:
            allocations[address][-1] = allocations[address][-1]._replace(died=time - origin)
    return allocations


def profile(
    model: nn.Module,
    batch: Any = None,
    step: Callable[[Any], object] | None = None,
    device: torch.device | str | None = None,
) -> Profile:
    """Profile the memory of ``with memory.profile(model) as p:``, or of ``step(batch)``.

    Afterwards ``p.peak_bytes``, ``p.by_kind``, ``p.by_layer``, ``p.by_phase``, ``p.peak_event`` and ``p.timeline``
    contain the allocated memory, by purpose and over time. ``p.by_op`` has the bytes that each op allocated.
    ``print(p)`` shows a table, ``p.plot(path)`` draws a plot and ``p.save(path)`` writes JSON. ``p.leaks()`` names
    lines of code whose tensors accumulate. Within the block, ``p.snapshot(name)`` records the live tensors and
    ``p.reset_peak()`` restarts the peak. ``p.start()`` and ``p.stop()`` replace the block.

    Sizes are bytes of torch's allocator on the device, including scratch memory that kernels allocate through it. The
    process uses more: malloc rounds up, libraries allocate their own memory, and freed pages are returned late. With
    glibc this was 2 to 3 MB for a model of 200 MB.

    Every live tensor of the process on the device counts, also in ``p.peak_bytes``. The kind ``other`` covers tensors
    that existed before and belong neither to the model nor to its optimizer, such as a second model. Every op takes
    some microseconds longer.

    Args:
        model: The model to profile.
        batch: The argument of ``step``.
        step: A function that runs a training step. It is called twice, and the second call is profiled, when optimizer
            states exist.
        device: ``"cpu"`` or a CUDA device; by default that of the parameters.

    Returns:
        A profile. Without ``step`` it is a context manager, or begins with ``start``. With ``step`` it has ended.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: The device is neither a CPU nor CUDA, or there is a batch without ``step``.
    """
    check_model(model)
    target = (
        torch.device(device)
        if device is not None
        else next((p.device for p in model.parameters()), torch.device("cpu"))
    )
    if target.type not in ("cpu", "cuda"):
        raise ValueError(
            f"memory.profile: allocations are counted on 'cpu' and 'cuda', got {str(target)!r}; for a model on 'meta' "
            f"use lb.estimate"
        )
    result = Profile(model, target)
    if step is None:
        if batch is not None:
            raise ValueError("memory.profile: a batch needs step=, a function of the batch; or use a with block")
        return result
    step(batch)
    with result:
        step(batch)
    return result
