"""Memory held over a training step, by kind, layer and phase: the results of estimates and profiles."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from lowbit.files import write_atomically
from lowbit.memory.by_op import BEFORE, BETWEEN, OpTable
from lowbit.memory.ledger import KINDS, OUTSIDE, Op
from lowbit.sizes import amount, budget_in
from lowbit.tables import aligned

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Holding", "MemoryEvent", "Usage", "kinds_of"]

_COLORS = {
    "parameters": "#2f6fde", "buffers": "#9aa5b1", "gradients": "#e08e0b", "optimizer state": "#862e9c",
    "master copies": "#5f3dc4", "weight copies": "#0b7285", "activations": "#2b8a3e", "inputs": "#74b816",
    "temporaries": "#d9480f", "other": "#ced4da",
}  # fmt: skip

#: Colours of the phases in the strip below a plot, in the order of a step.
_PHASES = {"forward": "#9aa5b1", "recomputation": "#f2c14e", "backward": "#52606d", "step": "#1f2933"}

_Usage = TypeVar("_Usage", bound="Usage")

#: Printed below the table of kinds.
_ABOUT_OTHER = (
    "other: tensors of the process that belong neither to the model nor to its optimizer; they count in the peak"
)


class Holding(NamedTuple):
    """Memory of one kind that is held for some time.

    Attributes:
        bytes: Its size.
        kind: One of the kinds of ``Usage``.
        layer: Path of the layer that made it.
        born: When it was allocated, in the unit of the times of ops.
        died: When it was freed; inf if never.
        op: Number of the op that allocated it, or -1 if none did.
    """

    bytes: int
    kind: str
    layer: str
    born: float
    died: float
    op: int = -1


class MemoryEvent(NamedTuple):
    """An op of a training step and the memory held while it ran.

    Attributes:
        bytes: Most bytes held during the op.
        phase: ``forward``, ``recomputation``, ``backward`` or ``step``.
        layer: Path of the layer.
        op: Name of the op.
    """

    bytes: int
    phase: str
    layer: str
    op: str

    def __str__(self) -> str:
        return f"{self.phase} of {self.layer} ({self.op})"


class Usage:
    """Memory held over time, by purpose. Sizes are bytes of the allocator. ``print`` shows a table.

    Kinds:

    - parameters, buffers, gradients, optimizer state.
    - master copies: high-precision weights in optimizers.
    - weight copies: casts and quantized values computed from weights only.
    - activations: made in a forward and alive in backward.
    - inputs: tensors passed to the model.
    - temporaries: all others made during the step.
    - other: tensors that existed before. In a profile, all tensors of the process that belong neither to the model nor
      to its optimizer.
    """

    def __init__(self, ops: Sequence[Op], times: Sequence[float], holdings: Iterable[Holding], since: int = 0) -> None:
        self._ops, self._times, self._since = list(ops), list(times), since
        self._holdings = list(holdings)

    # -- sums ----------------------------------------------------------------------------------------------------
    @cached_property
    def _curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Times at which the number of bytes changes, and the bytes held from each on."""
        changes: Counter[float] = Counter()
        for holding in self._holdings:
            changes[holding.born] += holding.bytes
            changes[holding.died] -= holding.bytes
        times = np.array(sorted(t for t in changes if t < math.inf), dtype=np.float64)
        return times, np.cumsum([changes[t] for t in times.tolist()], dtype=np.int64)

    @cached_property
    def _peaks(self) -> np.ndarray:
        """Most bytes held from the start of each op until the next one starts."""
        times, held = self._curve
        starts = np.searchsorted(times, self._times, side="right") - 1
        ends = np.append(starts[1:], len(times) - 1)[: len(starts)]
        return np.array([held[max(a, 0) : b + 1].max(initial=0) for a, b in zip(starts, ends, strict=True)])

    @cached_property
    def _peak_time(self) -> float:
        times, held = self._curve
        begins = 0.0 if self._since == 0 else max(times, default=0.0)  # without a later op: the bytes held at the end
        if self._since < len(self._times):
            begins = self._times[self._since]
        counted = np.flatnonzero(times >= begins)
        return float(times[counted[np.argmax(held[counted])]]) if len(counted) else begins

    @property
    def ops(self) -> list[Op]:
        """Every op in order, as in ``timeline``."""
        return self._ops[self._since :]

    @property
    def holdings(self) -> list[Holding]:
        """All memory that was held, in the order of ops."""
        return list(self._holdings)

    def holding(self: _Usage, holdings: Iterable[Holding]) -> _Usage:
        """Return a copy with other ``holdings`` and the same ops."""
        copied = copy.copy(self)
        for name in ("_curve", "_peaks", "_peak_time"):
            copied.__dict__.pop(name, None)
        copied._holdings = list(holdings)
        return copied

    def held_at(self, index: int) -> list[Holding]:
        """Return the memory held when op ``index`` of ``ops`` begins."""
        return list(self._at(self._times[self._since + index]))

    def _at(self, time: float) -> Iterable[Holding]:
        return (holding for holding in self._holdings if holding.born <= time < holding.died)

    @property
    def peak_bytes(self) -> int:
        """Most bytes held at a time."""
        return sum(holding.bytes for holding in self._at(self._peak_time))

    def fits(self, budget: str | int) -> bool:
        """Return whether the peak is at most ``budget``.

        Args:
            budget: Bytes, or a size such as ``"24GiB"``.

        Raises:
            ValueError: ``budget`` is no size, or has no unit.
        """
        return self.peak_bytes <= budget_in(budget, "memory.Usage.fits", shares=False).of(0)

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes of each kind at the peak, largest first. They sum to ``peak_bytes``."""
        sums: Counter[str] = Counter()
        for holding in self._at(self._peak_time):
            sums[holding.kind] += holding.bytes
        return dict(sums.most_common())

    @property
    def by_layer(self) -> dict[str, dict[str, int]]:
        """Bytes of each layer at the peak, by kind. The largest layers come first."""
        layers: dict[str, Counter[str]] = {}
        for holding in self._at(self._peak_time):
            layers.setdefault(holding.layer, Counter())[holding.kind] += holding.bytes
        return {
            name: dict(k.most_common()) for name, k in sorted(layers.items(), key=lambda row: -sum(row[1].values()))
        }

    @property
    def by_op(self) -> OpTable:
        """Bytes by op, most allocated bytes first. ``print`` shows a table.

        ``allocated`` is the sum over all calls, with scratch memory of kernels. ``at_peak`` sums to ``peak_bytes`` over
        the rows. ``(before)`` has the memory that existed before the first op, or before the last ``reset_peak``.
        ``(between ops)`` has allocations outside of all ops.
        """
        begin = 0.0 if self._since == 0 else self._times[self._since] if self._since < len(self._times) else math.inf
        named = [(self._allocated_by(holding, begin), holding) for holding in self._holdings]
        peak = self._peak_time
        return OpTable.of(
            (op.name for op in self.ops),
            [(name, holding.bytes) for name, holding in named if name != BEFORE],
            [(name, holding.bytes) for name, holding in named if holding.born <= peak < holding.died],
        )

    def _allocated_by(self, holding: Holding, begin: float) -> str:
        """Return the name of the op that allocated ``holding``; ops before the time ``begin`` count as ``BEFORE``."""
        if holding.op >= self._since:
            return self._ops[holding.op].name
        return BEFORE if holding.op >= 0 or holding.born <= begin else BETWEEN

    @property
    def peak_event(self) -> MemoryEvent:
        """The op during which the peak occurred, with its phase and layer."""
        index = int(np.searchsorted(self._times, self._peak_time, side="right")) - 1
        op = self._ops[index] if 0 <= index < len(self._ops) else Op("none", OUTSIDE, "forward")
        return MemoryEvent(self.peak_bytes, op.phase, op.layer, op.name)

    @property
    def timeline(self) -> list[MemoryEvent]:
        """Every op in order, with the most bytes held while it ran."""
        first = self._since
        return [
            MemoryEvent(int(size), op.phase, op.layer, op.name)
            for size, op in zip(self._peaks[first:], self._ops[first:], strict=True)
        ]

    @property
    def by_phase(self) -> dict[str, int]:
        """Peak of each phase: forward, recomputation, backward, step."""
        peaks: dict[str, int] = {}
        for peak_event in self.timeline:
            peaks[peak_event.phase] = max(peaks.get(peak_event.phase, 0), peak_event.bytes)
        return peaks

    # -- for people ----------------------------------------------------------------------------------------------
    def table(self, layers: int = 12) -> str:
        """Return the peak by kind and by layer as text.

        Args:
            layers: Number of layers to list, largest first.
        """
        peak = self.peak_bytes
        lines = [f"peak {amount(peak)} in {self.peak_event}", ""]
        phases = ", ".join(f"{phase} {amount(size)}" for phase, size in self.by_phase.items())
        kinds = [(kind, amount(size), f"{size / max(peak, 1):.0%}") for kind, size in self.by_kind.items()]
        lines += [aligned([("kind", "at the peak", ""), *kinds], (1, 2))]
        lines += [_ABOUT_OTHER] if "other" in self.by_kind else []
        named = list(self.by_layer.items())
        rows = [(name, amount(sum(of.values())), _described(of)) for name, of in named[:layers]]
        rest = sum(sum(of.values()) for _, of in named[layers:])
        rows += [(f"{len(named) - layers} more", amount(rest), "")] if rest else []
        lines += ["", aligned([("layer", "at the peak", "of which"), *rows], (1,)), "", f"peaks by phase: {phases}"]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def as_dict(self) -> dict[str, Any]:
        """Return all results as plain values, for JSON."""
        return {
            "peak_bytes": self.peak_bytes,
            "peak_event": self.peak_event._asdict(),
            "by_kind": self.by_kind,
            "by_layer": self.by_layer,
            "by_phase": self.by_phase,
            "by_op": {name: row._asdict() for name, row in self.by_op.items()},
            "timeline": [peak_event._asdict() for peak_event in self.timeline],
        }

    def save(self, path: str | Path) -> Path:
        """Write ``as_dict()`` as JSON to ``path``, and return the path."""
        target = Path(path)
        text = json.dumps(self.as_dict(), indent=1).encode()
        write_atomically(target, lambda file: file.write(text))
        return target

    def plot(self, path: str | Path) -> Path:
        """Draw the bytes of each kind over the ops, the peak, and the phases below.

        Args:
            path: Image file; the format follows from its suffix.

        Returns:
            The path.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            from matplotlib import rc_context
            from matplotlib.figure import Figure
        except ImportError:
            raise ImportError("memory.Usage.plot needs matplotlib: pip install matplotlib") from None
        with rc_context(
            {"font.size": 9, "axes.titlesize": 10, "xtick.labelsize": 8, "ytick.labelsize": 8, "legend.fontsize": 8}
        ):
            figure = Figure(figsize=(8.5, 4.5), layout="constrained")
            axes, strip = figure.subplots(2, 1, sharex=True, height_ratios=(24, 1))
            self._draw_kinds(axes)
            self._draw_phases(strip)
            style = {"frameon": False, "alignment": "left", "borderaxespad": 0}
            # In the order of the stacked areas, from top to bottom. Both legends fit next to the first panel only.
            kinds, phases = (part.get_legend_handles_labels() for part in (axes, strip))
            first = axes.legend(
                kinds[0][::-1], kinds[1][::-1], title="kind", bbox_to_anchor=(1.02, 1), loc="upper left", **style
            )
            axes.legend(*phases, title="phase (strip below)", bbox_to_anchor=(1.02, 0), loc="lower left", **style)
            axes.add_artist(first)
            figure.savefig(path, dpi=150)
        return Path(path)

    def _draw_kinds(self, axes: Axes) -> None:
        times = np.array(self._times[self._since :])
        kinds = [kind for kind in KINDS if any(h.kind == kind for h in self._holdings)]
        areas = [self._over_time(kind, times) / 2**20 for kind in kinds]
        axes.stackplot(range(len(times)), areas, labels=kinds, colors=[_COLORS[kind] for kind in kinds], step="post")
        timeline, peak = self.timeline, self.peak_bytes
        at = max(range(len(timeline)), key=lambda index: timeline[index].bytes, default=0)
        axes.plot(at, peak / 2**20, "v", color="#1f2933", ms=6, label=f"peak, {amount(peak)}")
        layer = "code outside of the model" if self.peak_event.layer == OUTSIDE else self.peak_event.layer
        where = f"{self.peak_event.phase} of {layer}, op {self.peak_event.op}"
        axes.set_title(f"Memory held, by kind\npeak in {where}", loc="left")
        axes.set_ylabel("memory held, MiB")
        axes.set_xlim(0, max(len(times), 1))
        axes.set_ylim(0, 1.08 * peak / 2**20 or 1)

    def _draw_phases(self, strip: Axes) -> None:
        """Draw a strip in the colours of the phases."""
        phases = [op.phase for op in self.ops]
        starts = [index for index, phase in enumerate(phases) if not index or phase != phases[index - 1]]
        ends = [*starts[1:], len(phases)]
        for phase, colour in _PHASES.items():
            spans = [(start, end - start) for start, end in zip(starts, ends, strict=False) if phases[start] == phase]
            if spans:
                # Recomputation comes in short runs between backward ops, which would cover them.
                width, order = (0.6, 3) if phase == "recomputation" else (0, 2)
                strip.broken_barh(spans, (0, 1), color=colour, linewidth=width, zorder=order, label=phase)
        strip.set(xlabel="ops, in the order in which they ran", yticks=[], ylim=(0, 1))

    def _over_time(self, kind: str, times: np.ndarray) -> np.ndarray:
        chosen = [h for h in self._holdings if h.kind == kind]
        sizes = np.array([h.bytes for h in chosen], dtype=np.int64)
        total = np.zeros(len(times), dtype=np.int64)
        for sign, when in ((1, [h.born for h in chosen]), (-1, [h.died for h in chosen])):
            order = np.argsort(when)
            sums = np.concatenate(([0], np.cumsum(sizes[order])))
            total += sign * sums[np.searchsorted(np.array(when)[order], times, side="right")]
        return total


def _described(kinds: dict[str, int]) -> str:
    return ", ".join(f"{kind} {amount(size)}" for kind, size in list(kinds.items())[:3])


def kinds_of(
    ops: Sequence[Op],
    births: Sequence[int],
    deaths: Sequence[float],
    kinds: Sequence[str | None],
    times: Sequence[float],
) -> list[str]:
    """Return the kind of each storage: the known one, or one that follows from its lifetime.

    A tensor made in a forward and alive in backward is an activation. Source: Korthikanti et al., arXiv 2205.05198.
    """
    following = [math.inf] * (len(ops) + 1)
    for index in range(len(ops) - 1, -1, -1):
        following[index] = times[index] if ops[index].phase == "backward" else following[index + 1]
    resolved = []
    for born, died, kind in zip(births, deaths, kinds, strict=True):
        if kind is not None:
            resolved.append(kind)
        elif born < 0:
            resolved.append("other")
        else:
            made_forward = ops[born].phase in ("forward", "recomputation")
            resolved.append("activations" if made_forward and died > following[born] else "temporaries")
    return resolved
