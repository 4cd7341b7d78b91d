"""What a method is, and the table of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from lowbit.calibrate.methods import gptq, hqq, rounding, signround
from lowbit.calibrate.observed import Observed
from lowbit.calibrate.statistics import Statistics
from lowbit.scaling import Scheme
from lowbit.tensor.quantized import Quantized

__all__ = ["METHODS", "Method", "default_method"]


class Method(NamedTuple):
    """How the weight of a layer is quantized.

    ``solve(weight, scheme, statistics)``: ``weight`` fp32 [out, in]; ``statistics`` of the layer's inputs, or None
    without data. ``need``: what of them it cannot do without, one of ``statistics.NEEDS``; ``uses``: what it takes
    where there is data. ``refuses(scheme)``: why it has nothing to offer for weights of this scheme, or None.
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


#: Every method. Names are API.
METHODS: dict[str, Method] = {
    row.name: row
    for row in (
        Method("nearest", "each weight to the nearest code, scales from the largest magnitude", rounding.nearest),
        Method(
            "signed", "integers: the element of largest magnitude takes the least code, scales of either sign",
            rounding.signed, refuses=rounding.unsigned,
        ),
        Method("mse", "the scale of each block with the least squared error of the weights", rounding.mse),
        Method(
            "search", "the same, weighted with E[x^2] of the inputs where there is data", rounding.search,
            uses="squares",
        ),
        Method(
            "hqq", "zero points by half-quadratic splitting (Badri and Shaji 2023)", hqq.solve, refuses=hqq.unfit
        ),
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
            rounding.search, "squares", "squares", tune=signround.tune,
        ),
    )
}  # fmt: skip


def default_method(scheme: Scheme, data: bool, gradient: bool = True) -> Method:
    """The best known method for weights of this scheme, with data or without; ``gradient``: whether the model's loss
    can be differentiated.
    """
    if data:
        return METHODS["guided-gptq" if gradient else "gptq"]
    if rounding.unsigned(scheme) is None:
        return METHODS["signed"]
    coded = scheme.format.kind == "float" and scheme.format.bits == 4 and scheme.scale_format.dtype == "uint8"
    return METHODS["mse" if coded else "nearest"]
