"""Watching low-precision training: what each cast of each layer loses, every so many steps.

A watched layer's casts are the ones that training does; they are looked at, not done again. So watching changes no bit
of training, and follows stochastic rounding, delayed scales and scales that are folded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowbit.autograd import in_backward
from lowbit.files import write_atomically, write_json
from lowbit.formats import Format
from lowbit.functional import decode, unpack
from lowbit.functional.rotation import signed_hadamard
from lowbit.recipes import Cast
from lowbit.tables import aligned
from lowbit.tensor.quantized import Quantized
from lowbit.torch_private import functorch_level
from lowbit.train.linear import TrainLinear, state
from lowbit.train.rules import quantized
from lowbit.train.view import View
from lowbit.train.watch_plot import drawn
from lowbit.train.watch_rows import HEAD, NUMBERS, Row, written
from lowbit.user_warnings import warn

__all__ = ["Watch", "observed", "watch"]

#: Looks at one cast: role, what was quantized, how, and the result.
Look = Callable[[str, Tensor, Cast, Quantized], None]

#: The figures by which rows can be sorted; of all but the first the largest is the worst.
_FIGURES = ("sqnr", "underflow", "saturated", "overflow", "nonfinite", "amax")


class Watch:
    """The rows of a model that is watched. ``close()``, or the end of a ``with`` block, stops watching; rows stay.
    ``convert_`` ends it for the layers that it makes plain again. Copies of a model, and of this, are not watched.

    ``rows`` are in the order of steps, and of calls within a step. Printed, it is the table of the last step watched.
    """

    def __init__(self, model: nn.Module, every: int = 100) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"train.watch: every counts steps, an integer of at least 1, got {every!r}")
        model = getattr(model, "_orig_mod", model)  # of what torch.compile returns, the model that may run uncompiled
        self.every, self._state = every, state(model)
        self._layers = {name: one for name, one in model.named_modules() if isinstance(one, TrainLinear)}
        self._before: list[Row] = []
        self._sums: dict[tuple[int, str, str, str], Tensor] = {}
        self._first = self._state.counted
        self._evaluates = self._ran = False
        self._graphs: dict[str, bool] = {}
        self._hooks = [
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching. Warns where steps went by and no forward of the model was seen, as in compiled code."""
        for hook in self._hooks:
            hook.remove()
        self._set({})
        if self._hooks and not self._ran and self._state.step > self._first:
            warn(
                f"train.watch: {self._state.step - self._first} steps went by, but no forward of the watched model "
                f"ran in Python, so there are no figures: compiled code is not watched; run some steps within "
                f"torch.compiler.set_stance('force_eager'), and call the model that was given to watch"
            )
        self._hooks = []

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the model has copies of the hooks, which then find no layers."""
        return {**vars(self), "_layers": {}, "_hooks": []}

    # -- looking ---------------------------------------------------------------------------------------------------
    def _begin(self, *_: Any) -> None:
        """Before a forward of the model: whether its layers are looked at, until the next forward that trains."""
        if torch.compiler.is_compiling() or in_backward():
            return
        self._evaluates = not torch.is_grad_enabled()
        if not self._evaluates:
            self._ran, step = True, self._state.counted
            due = step % self.every == 0
            self._set({name: partial(self._view, name, step) for name in self._layers} if due else {})

    def _end(self, *_: Any) -> None:
        if not torch.compiler.is_compiling() and not in_backward():
            self._evaluates = False

    def _set(self, watchers: dict[str, Callable[[View | None], View | None]]) -> None:
        for name, layer in self._layers.items():
            if isinstance(layer, TrainLinear):  # no longer where convert_ has made it plain
                vars(layer)["watcher"] = watchers.get(name)

    def _view(self, name: str, step: int, view: View | None) -> View | None:
        """What a call of a layer quantizes with."""
        recomputes = in_backward()
        if self._evaluates and not recomputes:
            return view
        if not recomputes:
            self._graphs[name] = torch.is_grad_enabled()
        elif self._graphs[name]:  # backward goes on with the view of the first forward
            return view
        return observed(view, partial(self._look, name, step))

    def _look(self, name: str, step: int, role: str, x: Tensor, how: Cast, q: Quantized) -> None:
        if role.startswith("output") and in_backward():  # made once more, of what forward was given
            return
        key = (step, name, role, str(how))
        held, sums = self._sums.get(key), _sums(x, q)
        self._sums[key] = sums if held is None else torch.cat([held[:-1] + sums[:-1], torch.maximum(held, sums)[-1:]])

    # -- what was seen ---------------------------------------------------------------------------------------------
    @property
    def rows(self) -> list[Row]:
        """Every row so far."""
        return [*self._before, *(_row(key, sums.tolist()) for key, sums in self._sums.items())]

    def worst(self, count: int = 10, by: str = "sqnr", step: int | None = None) -> list[Row]:
        """The rows of ``step`` (None: of the last one watched) that lose the most ``by`` one of the figures, the worst
        first: the least ``sqnr``, the largest of ``underflow``, ``saturated``, ``overflow``, ``nonfinite``, ``amax``.

        Raises ValueError for another figure, and for a step that was not watched.
        """
        if by not in _FIGURES:
            raise ValueError(f"train.watch: rows are sorted by one of {', '.join(_FIGURES)}, got {by!r}")
        rows = self.rows
        steps = sorted({row.step for row in rows})
        if step is not None and step not in steps:
            raise ValueError(
                f"train.watch: step {step} was not watched; expected one of {', '.join(map(str, steps)) or 'none'}, "
                f"every {self.every} steps"
            )
        wanted = (steps[-1] if steps else None) if step is None else step
        return sorted((row for row in rows if row.step == wanted), key=partial(_badness, by))[:count]

    def table(self, step: int | None = None, count: int | None = None) -> str:
        """The rows of ``step`` (None: of the last one watched) as text, by rising SQNR; at most ``count``."""
        rows = self.worst(len(self._sums) + len(self._before) if count is None else count, step=step)
        if not rows:
            return "no step was watched"
        return f"step {rows[0].step}\n" + aligned([HEAD, *map(written, rows)], NUMBERS)

    def __str__(self) -> str:
        return self.table()

    def to_json(self, path: str | Path) -> None:
        """Write ``every`` and the rows; figures that are Inf or NaN are null. Raises OSError."""
        rows = [
            {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in pairs}
            for pairs in (asdict(row).items() for row in self.rows)
        ]
        write_json(Path(path), {"every": self.every, "rows": rows})

    def state_dict(self) -> dict[str, Any]:
        """The rows and the step, for a run that goes on later."""
        return {"step": self._state.step, "rows": [asdict(row) for row in self.rows]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin with these rows, and at that step, which a model whose recipes need no State does not save."""
        self._state.step = state["step"]
        self._before, self._sums = [Row(**row) for row in state["rows"]], {}

    def plot(self, path: str | Path) -> None:
        """Draw the SQNR of layers over steps and a heat map of underflow, a row of panels for each role, to an image.

        Of many layers the heat maps show the worst. Names of layers are without the beginning that all have in common.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: No step was watched.
        """
        figure = drawn(self.rows)
        write_atomically(Path(path), lambda file: figure.savefig(file, format="png", dpi=150))


def watch(model: nn.Module, every: int = 100) -> Watch:
    """Watch the casts of each TrainLinear of ``model`` in the steps whose number ``every`` divides.

    ``with lb.train.watch(model, every=100) as w:`` around the training loop, then ``print(w)``, ``w.rows``,
    ``w.worst()``, ``w.to_json(path)``, ``w.plot(path)``. Steps are those of the training state, which follows the
    optimizer: the micro-batches of a step are one row. Only forwards of ``model`` under grad mode count, and what a
    checkpoint recomputes counts once. No bit of training changes. Steps that are not due cost one question a forward.
    Compiled code is not watched: it computes as before, and ``close`` says so.
    Raises ValueError for a model without TrainLinear layers, or ``every`` below 1.
    """
    return Watch(model, every)


# -- one cast --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Observed:
    """Quantizes as ``view`` does, or as a call without a view, and shows it to ``look``."""

    view: View | None
    look: Look

    def quantize(self, x: Tensor, how: Cast, role: str, factors: Tensor | None = None) -> Quantized:
        if self.view is None:
            q = quantized(x, how, factors)
        else:
            q = self.view.quantize(x, how, role, factors)
        if functorch_level() is None:  # tensors of torch.func stand for many
            self.look(role, (x if factors is None else x * factors).detach(), how, q)
        return q

    def quantize_dual(
        self, x: Tensor, casts: tuple[Cast, Cast], roles: tuple[str, str], block: int | None
    ) -> tuple[Quantized, Quantized]:
        turned = x if block is None else signed_hadamard(x, block, 0)
        return self.quantize(x, casts[0], roles[0]), self.quantize(turned, casts[1], roles[1])

    def signs(self, role: str, device: torch.device) -> Tensor:
        """Those of the view, which recipes with random signs have."""
        assert self.view is not None
        return self.view.signs(role, device)


def observed(view: View | None, look: Look) -> View:
    """A view that quantizes as ``view``, after which ``look`` sees what was quantized."""
    return cast(View, _Observed(view, look))


@cache
def _ends(format: Format) -> tuple[tuple[float, float], ...]:
    """The least and the largest value, each with the multiple of it that lies half a step farther out.

    The end that is 0 of unsigned formats is none.
    """
    values = sorted({value for value in format.table if math.isfinite(value)})
    ends = ((values[0], values[1]), (values[-1], values[-2]))
    return tuple((end, 1 + abs(end - inner) / (2 * abs(end))) for end, inner in ends if end)


def _sums(x: Tensor, q: Quantized) -> Tensor:
    """fp64 ``[8]``: counts of elements, not finite, overflowed, zeroed, saturated; squares, squared errors; amax."""
    given, made, format = x.double(), q.dequantize(torch.float32).double(), q.scheme.format
    finite = given.isfinite()
    both = finite & made.isfinite()
    codes = decode(unpack(q.codes, format.bits, tuple(q.shape)), format)
    beyond = torch.zeros_like(both)
    for end, clip in () if q.scheme.affine else _ends(format):
        beyond |= (codes == end) & (given.abs() > made.abs() * clip) & both
    zeroed = (given != 0) & (made == 0) & both
    error = torch.where(both, given - made, 0.0).square().sum()
    signal = torch.where(both, given, 0.0).square().sum()
    amax = torch.where(finite, given.abs(), 0.0).amax() if x.numel() else given.new_zeros(())
    counts = torch.stack([~finite, ~both, zeroed, beyond])
    elements = given.new_full((), x.numel())
    return torch.stack([elements, *counts.flatten(1).sum(1).double(), signal, error, amax])


def _row(key: tuple[int, str, str, str], sums: list[float]) -> Row:
    (step, layer, role, how), (elements, nonfinite, overflow, underflow, saturated, signal, error, amax) = key, sums
    share = 1 / elements if elements else 0.0
    ratio = math.nan if signal == 0 else math.inf if error == 0 else 10 * math.log10(signal / error)
    return Row(
        step=step, layer=layer, role=role, cast=how, elements=int(elements), nonfinite=int(nonfinite), amax=amax,
        overflow=overflow * share, underflow=underflow * share, saturated=saturated * share, sqnr=ratio,
    )  # fmt: skip


def _badness(by: str, row: Row) -> tuple[bool, float]:
    """Rows without a figure come last."""
    value = getattr(row, by)
    return math.isnan(value), value if by == "sqnr" else -value
