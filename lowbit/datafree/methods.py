"""The table of data-free methods for weights, and the best one for each scheme."""

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
    """How a weight is quantized without data.

    Attributes:
        name: The name for ``method=``.
        about: One line of prose.
        solve: ``solve(weight, scheme)`` returns the Quantized of ``weight`` fp32 [out, in].
        refuses: ``refuses(scheme)`` returns the reason why the method does not support a scheme, or None.
    """

    name: str
    about: str
    solve: Callable[[Tensor, Scheme], Quantized]
    refuses: Callable[[Scheme], str | None] = lambda scheme: None


def _signed(weight: Tensor, scheme: Scheme) -> Quantized:
    """The element of largest magnitude of each block gets the least code, which has no positive counterpart."""
    return quantize(weight, scheme, *scales.signed(weight, scheme))


def _unsigned(scheme: Scheme) -> str | None:
    """Why a scheme does not support scales of either sign; None if it does."""
    if scheme.format.kind != "integer" or scheme.affine or scheme.scale_format.dtype == "uint8":
        return f"{scheme} does not have signed integers with floating-point scales"
    return None


def _by_magnitude(weight: Tensor, scheme: Scheme) -> Quantized:
    """Errors of large weights count more, because clipping them costs the most accuracy."""
    return quantize(weight, scheme, *scales.search(weight, scheme, weight.abs(), coarse=True))


def _least_squares(weight: Tensor, scheme: Scheme) -> Quantized:
    return quantize(weight, scheme, *scales.search(weight, scheme))


#: All data-free methods. Names are API.
DATA_FREE: dict[str, DataFreeMethod] = {
    row.name: row
    for row in (
        DataFreeMethod("nearest", "each weight to the nearest code, scales from the largest magnitude", quantize),
        DataFreeMethod(
            "signed", "integers: the largest magnitude gets the least code, scales of either sign",
            _signed, _unsigned,
        ),
        DataFreeMethod("mse", "scale per block with the least squared error of the weights", _least_squares),
        DataFreeMethod("magnitude", "mse, with errors weighted by the magnitude of the weight", _by_magnitude),
        DataFreeMethod("search", "mse; with data, weighted with E[x^2] of the inputs", _least_squares),
        DataFreeMethod("hqq", "zero points by half-quadratic splitting (Badri and Shaji 2023)", hqq.solve, hqq.unfit),
    )
}  # fmt: skip


#: The choices of ``default_data_free`` in words.
DEFAULT = "magnitude for signed integers below 8 bits, mse for mxfp4 and nvfp4, otherwise nearest"


def default_data_free(scheme: Scheme) -> DataFreeMethod:
    """Return the best known data-free method for a scheme, according to bench/results/calibrate.

    Args:
        scheme: The scheme of a weight.
    """
    if _unsigned(scheme) is None and scheme.format.bits < 8:  # with 256 codes the least code gains nothing
        return DATA_FREE["magnitude"]
    coded_scales = scheme.format.kind == "float" and scheme.format.bits == 4 and scheme.scale_format.dtype == "uint8"
    return DATA_FREE["mse" if coded_scales else "nearest"]


def find_data_free(name: str | None, caller: str) -> DataFreeMethod | None:
    """Return the data-free method with this name.

    Args:
        name: The name. None, for the default of each scheme, returns None.
        caller: The calling function, for the messages.

    Raises:
        ValueError: The name is unknown.
        TypeError: The name is not a string.
    """
    if name is None:
        return None
    if not isinstance(name, str):
        raise TypeError(f"{caller}: method must be a name, one of {', '.join(DATA_FREE)}; got {type(name).__name__}")
    method = DATA_FREE.get(spelled(name))
    if method is None:
        raise ValueError(
            f"{caller} needs a data-free method, one of {', '.join(DATA_FREE)}; got {name!r}"
            f"{did_you_mean(name, DATA_FREE)}. For methods with data call "
            f"lowbit.calibrate(model, recipe, batches, {name!r})"
        )
    return method
