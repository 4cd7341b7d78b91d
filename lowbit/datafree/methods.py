"""Rules by which a weight becomes codes and scales without data, and which of them is the best for a scheme."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from lowbit.datafree import hqq, scales
from lowbit.functional import quantize
from lowbit.name_tables import did_you_mean, spelled
from lowbit.scaling import Scheme
from lowbit.tensor.quantized import Quantized

__all__ = ["DATA_FREE", "DEFAULT", "DataFreeMethod", "default_data_free", "find_data_free"]


class DataFreeMethod(NamedTuple):
    """``solve(weight, scheme)``: the codes and scales of ``weight`` fp32 [out, in]. ``refuses(scheme)``: why the rule
    has nothing to offer for weights of this scheme, or None.
    """

    name: str
    about: str
    solve: Callable[[Tensor, Scheme], Quantized]
    refuses: Callable[[Scheme], str | None] = lambda scheme: None


def _signed(weight: Tensor, scheme: Scheme) -> Quantized:
    """The element of largest magnitude of each block takes the least code, which has no positive counterpart."""
    return quantize(weight, scheme, *scales.signed(weight, scheme))


def _unsigned(scheme: Scheme) -> str | None:
    """Why weights of a scheme have no use for scales of either sign."""
    if scheme.format.kind != "integer" or scheme.affine or scheme.scale_format.dtype == "uint8":
        return f"{scheme} is not of signed integers with floating-point scales"
    return None


def _by_magnitude(weight: Tensor, scheme: Scheme) -> Quantized:
    """The error of a large weight counts more: what models lose most by is the clipping of those."""
    return quantize(weight, scheme, *scales.search(weight, scheme, weight.abs(), coarse=True))


def _least_squares(weight: Tensor, scheme: Scheme) -> Quantized:
    return quantize(weight, scheme, *scales.search(weight, scheme))


#: Every rule. Names are API.
DATA_FREE: dict[str, DataFreeMethod] = {
    row.name: row
    for row in (
        DataFreeMethod("nearest", "each weight to the nearest code, scales from the largest magnitude", quantize),
        DataFreeMethod(
            "signed", "integers: the element of largest magnitude takes the least code, scales of either sign",
            _signed, _unsigned,
        ),
        DataFreeMethod("mse", "the scale of each block with the least squared error of the weights", _least_squares),
        DataFreeMethod("magnitude", "mse, where the error of a weight counts by its magnitude", _by_magnitude),
        DataFreeMethod("search", "mse; with data, weighted with E[x^2] of the inputs", _least_squares),
        DataFreeMethod("hqq", "zero points by half-quadratic splitting (Badri and Shaji 2023)", hqq.solve, hqq.unfit),
    )
}  # fmt: skip


#: What ``default_data_free`` chooses, in words.
DEFAULT = "magnitude for signed integers below 8 bits, mse for mxfp4 and nvfp4, else nearest"


def default_data_free(scheme: Scheme) -> DataFreeMethod:
    """The best known rule for weights of this scheme, by bench/results/calibrate; ``DEFAULT`` says it in words."""
    if _unsigned(scheme) is None and scheme.format.bits < 8:  # with 256 codes one more is worth nothing
        return DATA_FREE["magnitude"]
    coded = scheme.format.kind == "float" and scheme.format.bits == 4 and scheme.scale_format.dtype == "uint8"
    return DATA_FREE["mse" if coded else "nearest"]


def find_data_free(name: str | None, caller: str) -> DataFreeMethod | None:
    """The rule of that name; None for None, which stands for the default of each scheme.

    Raises ValueError for an unknown name, TypeError for what is no name.
    """
    if name is None:
        return None
    if not isinstance(name, str):
        raise TypeError(f"{caller}: method must be a name, one of {', '.join(DATA_FREE)}; got {type(name).__name__}")
    method = DATA_FREE.get(spelled(name))
    if method is None:
        raise ValueError(
            f"{caller} takes methods without data, one of {', '.join(DATA_FREE)}; got {name!r}"
            f"{did_you_mean(name, DATA_FREE)}. For those that need data call "
            f"lowbit.calibrate(model, recipe, batches, {name!r})"
        )
    return method
