"""Method: how a weight is quantized, and the table of methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from lowbit.calibrate.methods import gptq, signround
from lowbit.calibrate.recording import Observed
from lowbit.calibrate.statistics import Statistics
from lowbit.datafree import DATA_FREE, DataFreeMethod, default_data_free, scales
from lowbit.functional import quantize
from lowbit.scaling import Scheme
from lowbit.tensor.quantized import Quantized

__all__ = ["METHODS", "Method", "default_method"]


class Method(NamedTuple):
    """How the weight of a layer is quantized.

    Attributes:
        name: The name for ``calibrate``.
        about: One line of prose.
        solve: ``solve(weight, scheme, statistics)`` returns the Quantized of ``weight`` fp32 [out, in]. ``statistics``
            of the layer's inputs is None without data.
        need: The statistics that the method requires, one of ``statistics.NEEDS``.
        uses: The statistics that it uses if there is data.
        refuses: ``refuses(scheme)`` returns the reason why the method does not support a scheme, or None.
        guided: Whether input rows are weighted by the gradient of the model's loss.
        tune: ``tune(layers, run, targets)`` learns the layers of a block together. ``solve`` is then for layers outside
            of blocks.
    """

    name: str
    about: str
    solve: Callable[[Tensor, Scheme, Statistics | None], Quantized]
    need: str = "nothing"
    uses: str = "nothing"
    refuses: Callable[[Scheme], str | None] = lambda scheme: None
    guided: bool = False
    tune: Callable[[Sequence[Observed], Callable[[int], Tensor], Sequence[Tensor]], None] | None = None

    def rule(self, caller: str) -> DataFreeMethod:
        """Return the method as a data-free method. Raises ValueError if it needs data."""
        if self.need != "nothing":
            raise ValueError(f"{caller} needs a data-free method, one of {', '.join(DATA_FREE)}; got {self.name!r}")
        return DataFreeMethod(
            self.name, self.about, lambda weight, scheme: self.solve(weight, scheme, None), self.refuses
        )


def _search(weight: Tensor, scheme: Scheme, statistics: Statistics | None = None) -> Quantized:
    """Least squared error of the weights, weighted with E[x^2]."""
    importance = statistics.squares if statistics is not None and statistics.rows else None
    return quantize(weight, scheme, *scales.search(weight, scheme, importance))


def _without_data(method: DataFreeMethod) -> Method:
    """A data-free method as a Method."""
    return Method(
        method.name, method.about, lambda weight, scheme, _: method.solve(weight, scheme), refuses=method.refuses
    )


#: All methods, data-free ones included. Names are API; ``register_method`` adds one.
METHODS: dict[str, Method] = {
    row.name: row
    for row in (
        *(_without_data(method) for method in DATA_FREE.values() if method.name != "search"),
        Method("search", DATA_FREE["search"].about, _search, uses="squares"),
        Method(
            "gptq", "rounds column by column; later columns compensate for the error (arXiv 2210.17323)",
            gptq.solve, "gram", "gram",
        ),
        Method(
            "guided-gptq", "GPTQ, with tokens weighted by the gradient of the model's loss (arXiv 2505.07004)",
            gptq.solve, "gram", "gram", guided=True,
        ),
        Method(
            "ls-gptq", "GPTQ of the weights whose output is closest to the unquantized model's", gptq.solve_corrected,
            "cross", "cross",
        ),
        Method(
            "signround",
            f"rounding learned by {signround.ITERATIONS} steps of signed gradient descent (arXiv 2309.05516)",
            _search, "squares", "squares", tune=signround.tune,
        ),
    )
}  # fmt: skip


def default_method(scheme: Scheme, data: bool, gradient: bool = True) -> Method:
    """The best known method for a scheme, with or without data. ``gradient``: whether the loss has a gradient."""
    return METHODS["guided-gptq" if gradient else "gptq"] if data else METHODS[default_data_free(scheme).name]
