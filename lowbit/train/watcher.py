"""Watch low-precision training: record the quantization error of each cast of each layer, every few steps.

It observes the casts that training does and does not repeat them. So training stays bit-identical, and the figures
include stochastic rounding, delayed scales and folded scales.
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
from lowbit.tables import aligned, markdown
from lowbit.tensor.quantized import Quantized
from lowbit.torch_private import functorch_level
from lowbit.train.linear import TrainLayer
from lowbit.train.prepare import state
from lowbit.train.rules import quantized
from lowbit.train.view import View
from lowbit.train.watch_plot import drawn
from lowbit.train.watch_rows import HEAD, NUMBERS, Row, written
from lowbit.user_warnings import warn

__all__ = ["Watch", "observed", "watch"]

#: Callback for one cast: role, input tensor, cast, and quantized result.
Look = Callable[[str, Tensor, Cast, Quantized], None]

#: The figures to sort rows by. The smallest ``sqnr`` is the worst; of the others the largest.
_FIGURES = ("sqnr", "underflow", "saturated", "overflow", "nonfinite", "amax")


class Watch:
    """The recorded rows of a watched model. ``close()``, or the end of a ``with`` block, stops watching; rows stay.

    ``convert_`` also stops it for the layers that it converts. Copies of a model or of a Watch are not watched.
    ``print`` shows the table of the last watched step.

    Attributes:
        rows: in the order of steps, and of calls within a step.
        every: steps whose number it divides are watched.
    """

    def __init__(self, model: nn.Module, every: int = 100) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"train.watch: every counts steps, an integer of at least 1, got {every!r}")
        model = getattr(model, "_orig_mod", model)  # a compiled model may also run uncompiled
        self.every, self._state = every, state(model)
        self._layers = {name: module for name, module in model.named_modules() if isinstance(module, TrainLayer)}
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
        """Stop watching. Warns if steps passed without an uncompiled forward of the model."""
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
        """A copy of the model has copies of the hooks, which then have no layers."""
        return {**vars(self), "_layers": {}, "_hooks": []}

    # -- recording -------------------------------------------------------------------------------------------------
    def _begin(self, *_: Any) -> None:
        """Before a forward of the model: decide whether its layers are watched until the next training forward."""
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
            if isinstance(layer, TrainLayer):  # not if convert_ has converted it
                vars(layer)["watcher"] = watchers.get(name)

    def _view(self, name: str, step: int, view: View | None) -> View | None:
        """The view with which a call of a layer quantizes."""
        recomputes = in_backward()
        if self._evaluates and not recomputes:
            return view
        if not recomputes:
            self._graphs[name] = torch.is_grad_enabled()
        elif self._graphs[name]:  # backward uses the view of the first forward
            return view
        return observed(view, partial(self._look, name, step))

    def _look(self, name: str, step: int, role: str, x: Tensor, how: Cast, q: Quantized) -> None:
        if role.startswith("output") and in_backward():  # a recomputation of a cast that was recorded in forward
            return
        key = (step, name, role, str(how))
        previous, sums = self._sums.get(key), _sums(x, q)
        self._sums[key] = (
            sums if previous is None else torch.cat([previous[:-1] + sums[:-1], torch.maximum(previous, sums)[-1:]])
        )

    # -- results ---------------------------------------------------------------------------------------------------
    @property
    def rows(self) -> list[Row]:
        """All rows recorded so far."""
        return [*self._before, *(_row(key, sums.tolist()) for key, sums in self._sums.items())]

    def worst(self, count: int = 10, by: str = "sqnr", step: int | None = None) -> list[Row]:
        """Return the rows of a step with the largest errors, the worst first.

        Args:
            count: maximum number of rows.
            by: the figure to sort by: the smallest ``sqnr``, or the largest ``underflow``, ``saturated``, ``overflow``,
                ``nonfinite`` or ``amax``.
            step: a watched step; None: the last one.

        Raises:
            ValueError: an unknown figure, or a step that was not watched.
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
        chosen = (steps[-1] if steps else None) if step is None else step
        return sorted((row for row in rows if row.step == chosen), key=partial(_badness, by))[:count]

    def table(self, step: int | None = None, count: int | None = None) -> str:
        """Format the rows of a step as text, by rising SQNR.

        Args:
            step: a watched step; None: the last one.
            count: maximum number of rows; None: all.
        """
        rows = self.worst(len(self._sums) + len(self._before) if count is None else count, step=step)
        if not rows:
            return "no step was watched"
        return f"step {rows[0].step}\n" + aligned([HEAD, *map(written, rows)], NUMBERS)

    def __str__(self) -> str:
        return self.table()

    def to_json(self, path: str | Path) -> None:
        """Write ``every`` and the rows to a JSON file; figures that are Inf or NaN are null. Raises OSError."""
        rows = [
            {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in pairs}
            for pairs in (asdict(row).items() for row in self.rows)
        ]
        write_json(Path(path), {"every": self.every, "rows": rows})

    def section(self, title: str, data: str, plot: str | None) -> list[str]:
        """Return the lines of a Markdown section: a plot, and the ten casts with the lowest SQNR in the last step.

        Args:
            title: title of the section.
            data: link to the file of ``to_json``.
            plot: link to the file of ``plot``, or None.
        """
        worst = self.worst(10)
        return [
            f"## {title}",
            "",
            *([] if plot is None else [f"![SQNR and underflow of each layer and operand]({plot})", ""]),
            markdown(HEAD, map(written, worst), numbers=NUMBERS),
            "",
            f"The lowest SQNR in step {worst[0].step}. All layers and operands, every {self.every} steps, are in "
            f"[{data}]({data}).",
            "",
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the rows and the step, to resume later."""
        return {"step": self._state.step, "rows": [asdict(row) for row in self.rows]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the rows and the step, which a model whose recipes need no State does not save."""
        self._state.step = state["step"]
        self._before, self._sums = [Row(**row) for row in state["rows"]], {}

    def plot(self, path: str | Path) -> None:
        """Draw SQNR over steps and a heat map of underflow to a PNG file, one row of panels per role.

        With many layers the heat maps show the worst. The common prefix of the layers' names is left out.

        Args:
            path: the file to write.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: no step was watched.
        """
        figure = drawn(self.rows)
        write_atomically(Path(path), lambda file: figure.savefig(file, format="png", dpi=150))


def watch(model: nn.Module, every: int = 100) -> Watch:
    """Watch the casts of each TrainLinear of ``model``, in the steps whose number ``every`` divides.

    Use it around the training loop::

        with lb.train.watch(model, every=100) as w:
            train(model)
        print(w)  # also w.rows, w.worst(), w.to_json(path), w.plot(path)

    Steps are counted by the training state, which follows the optimizer. The micro-batches of a step are added up in
    one row. Only forwards of ``model`` under grad mode are recorded, and a checkpoint's recomputation is not recorded
    again. Training stays bit-identical. Steps that are not watched cost one check per forward. Compiled code is not
    watched: it computes as before, and ``close`` warns.

    Args:
        model: a model with TrainLinear layers.
        every: watch one step in this many, at least 1.

    Returns:
        The rows, as a context manager that stops watching.

    Raises:
        ValueError: the model has no TrainLinear layers, or ``every`` is below 1.
    """
    return Watch(model, every)


# -- one cast --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Observed:
    """Quantizes as ``view`` does, or as a call without a view, and passes each cast to ``look``."""

    view: View | None
    look: Look

    def quantize(self, x: Tensor, how: Cast, role: str, factors: Tensor | None = None) -> Quantized:
        if self.view is None:
            q = quantized(x, how, factors)
        else:
            q = self.view.quantize(x, how, role, factors)
        if functorch_level() is None:  # a tensor inside a torch.func transform stands for a batch
            self.look(role, (x if factors is None else x * factors).detach(), how, q)
        return q

    def quantize_dual(
        self, x: Tensor, casts: tuple[Cast, Cast], roles: tuple[str, str], block: int | None
    ) -> tuple[Quantized, Quantized]:
        turned = x if block is None else signed_hadamard(x, block, 0)
        return self.quantize(x, casts[0], roles[0]), self.quantize(turned, casts[1], roles[1])

    def signs(self, role: str, device: torch.device) -> Tensor:
        """The random signs of the view; recipes with random signs always have one."""
        assert self.view is not None
        return self.view.signs(role, device)


def observed(view: View | None, look: Look) -> View:
    """A view that quantizes as ``view`` and then calls ``look``."""
    return cast(View, _Observed(view, look))


@cache
def _ends(format: Format) -> tuple[tuple[float, float], ...]:
    """The smallest and the largest value of a format, each with a factor that leads half a step beyond it.

    An end that is 0 (unsigned formats) is left out.
    """
    values = sorted({value for value in format.table if math.isfinite(value)})
    ends = ((values[0], values[1]), (values[-1], values[-2]))
    return tuple((end, 1 + abs(end - inner) / (2 * abs(end))) for end, inner in ends if end)


def _sums(x: Tensor, q: Quantized) -> Tensor:
    """fp64 ``[8]``: elements, non-finite, overflowed, zeroed, saturated, squares, squared errors (sums), amax."""
    exact, decoded, format = x.double(), q.dequantize(torch.float32).double(), q.scheme.format
    finite = exact.isfinite()
    both = finite & decoded.isfinite()
    codes = decode(unpack(q.codes, format.bits, tuple(q.shape)), format)
    beyond = torch.zeros_like(both)
    for end, clip in () if q.scheme.affine else _ends(format):
        beyond |= (codes == end) & (exact.abs() > decoded.abs() * clip) & both
    zeroed = (exact != 0) & (decoded == 0) & both
    error = torch.where(both, exact - decoded, 0.0).square().sum()
    signal = torch.where(both, exact, 0.0).square().sum()
    amax = torch.where(finite, exact.abs(), 0.0).amax() if x.numel() else exact.new_zeros(())
    counts = torch.stack([~finite, ~both, zeroed, beyond])
    elements = exact.new_full((), x.numel())
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
    """Sort key; rows without the figure come last."""
    value = getattr(row, by)
    return math.isnan(value), value if by == "sqnr" else -value
