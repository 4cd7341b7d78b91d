"""What a method is, and the table of them."""

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

    ``solve(weight, scheme, statistics)``: ``weight`` fp32 [out, in]; ``statistics`` of the layer's inputs, or None
    without data. ``need``: the statistics that it requires, one of ``statistics.NEEDS``; ``uses``: those that it takes
    where there is data. ``refuses(scheme)``: the reason why it does not support weights of this scheme, or None.
    ``guided``: whether rows of the inputs count by what they do to the model's loss (``importance``).
    ``tune(layers, run, targets)``: of methods that learn the layers of a block together; ``solve`` is for the layers
    outside of blocks.
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
        """The method without data. Raises ValueError where it needs some."""
        if self.need != "nothing":
            raise ValueError(f"{caller} takes methods without data, one of {', '.join(DATA_FREE)}; got {self.name!r}")
        return DataFreeMethod(
            self.name, self.about, lambda weight, scheme: self.solve(weight, scheme, None), self.refuses
        )


def _search(weight: Tensor, scheme: Scheme, statistics: Statistics | None = None) -> Quantized:
    """The least squared error of the weights, weighted with E[x^2]."""
    importance = statistics.squares if statistics is not None and statistics.rows else None
    return quantize(weight, scheme, *scales.search(weight, scheme, importance))


def _without_data(rule: DataFreeMethod) -> Method:
    """A rule as a method, which looks at no statistics."""
    return Method(rule.name, rule.about, lambda weight, scheme, _: rule.solve(weight, scheme), refuses=rule.refuses)


#: Every method: the rules that need no data, and those that look at it. Names are API; ``register_method`` adds one.
METHODS: dict[str, Method] = {
    row.name: row
    for row in (
        *(_without_data(rule) for rule in DATA_FREE.values() if rule.name != "search"),
        Method("search", DATA_FREE["search"].about, _search, uses="squares"),
        Method(
            "gptq", "columns one after the other, each making up for the errors before it (arXiv 2210.17323)",
            gptq.solve, "gram", "gram",
        ),
        Method(
            "guided-gptq", "GPTQ, with tokens weighted by the gradient of the model's loss (arXiv 2505.07004)",
            gptq.solve, "gram", "gram", guided=True,
        ),
        Method(
            "ls-gptq", "GPTQ of the weights that fit best what the unquantized model computes", gptq.solve_corrected,
            "cross", "cross",
        ),
        Method(
            "signround", f"rounding learned by {signround.ITERATIONS} steps of signed descent (arXiv 2309.05516)",
            _search, "squares", "squares", tune=signround.tune,
        ),
    )
}  # fmt: skip


def default_method(scheme: Scheme, data: bool, gradient: bool = True) -> Method:
    """The best known method for weights of this scheme, with data or without; ``gradient``: whether the model's loss
    can be differentiated.
    """
    return METHODS["guided-gptq" if gradient else "gptq"] if data else METHODS[default_data_free(scheme).name]
