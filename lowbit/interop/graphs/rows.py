"""The rows of a format's table of operators, and the formats that have such a table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torch import nn

from lowbit.interop.files import Refusal
from lowbit.interop.graphs.layers import FLOAT8, Layer
from lowbit.interop.graphs.tracing import Inputs
from lowbit.nn.conv import QuantConv
from lowbit.nn.embedding import QuantEmbedding
from lowbit.nn.experts import QuantExperts
from lowbit.nn.linear import QuantLinear
from lowbit.recipes import Recipe
from lowbit.scaling import Scheme

__all__ = ["ExpertsRow", "Row", "Target", "has_float8_rows", "has_integer_rows", "is_float8", "is_integer"]


class Row(NamedTuple):
    """An operator for layers.

    Attributes:
        name: The operator that multiplies or decodes.
        weight: Whether it can express a scheme of weights.
        make: Makes the module that writes a Linear.
        convolution: Makes the module that writes a convolution; None if it cannot.
        inputs: Schemes of inputs; empty: floats.
        static: Whether the scales of inputs are static.
        note: A difference to lowbit's results beyond the order of sums, for the report.
        complete: Whether the module is right before the format's ``save`` has changed its constants.
    """

    name: str
    weight: Callable[[Scheme], bool]
    make: Callable[[QuantLinear], Layer]
    convolution: Callable[[QuantConv], Layer] | None = None
    inputs: tuple[str, ...] = ()
    static: bool = False
    note: str | None = None
    complete: bool = True

    def takes(self, recipe: Recipe) -> bool:
        """Whether the operator can express a recipe."""
        return _takes(self, recipe) and (recipe.input is None or recipe.static == self.static)


class ExpertsRow(NamedTuple):
    """An operator for all experts of a mixture, which computes only the experts that a token chooses.

    Attributes:
        name: The operator.
        weight: Whether it can express a scheme of weights.
        refuses: Why it cannot express experts with such weights, or None.
        make: Makes the module that writes them.
        inputs: Schemes of inputs, with scales that are computed; empty: floats.
        note: A difference to lowbit's results beyond the order of sums, for the report.
    """

    name: str
    weight: Callable[[Scheme], bool]
    refuses: Callable[[QuantExperts], str | None]
    make: Callable[[QuantExperts], Layer]
    inputs: tuple[str, ...] = ()
    note: str | None = None

    def takes(self, recipe: Recipe) -> bool:
        """Whether the operator can express a recipe."""
        return _takes(self, recipe) and recipe.rotation is None and not recipe.static


def _takes(row: Row | ExpertsRow, recipe: Recipe) -> bool:
    """Whether a row has the schemes of a recipe."""
    inputs = not row.inputs if recipe.input is None else recipe.input.name in row.inputs
    return inputs and row.weight(recipe.weight)


class Target(NamedTuple):
    """A format of graphs.

    Attributes:
        name: Its name in ``export``.
        rows: The first row that takes a recipe writes its layers.
        embedding: Makes the module that writes an embedding.
        save: Exports a model with replaced layers to a path.
        packages: The packages that ``save`` needs.
        suffix: The suffix that a path must have; None: any.
        experts: The first row that takes the recipe of a mixture's experts writes them.
    """

    name: str
    rows: tuple[Row, ...]
    embedding: Callable[[QuantEmbedding], Layer]
    save: Callable[[nn.Module, Inputs, Path], None]
    packages: tuple[str, ...] = ()
    suffix: str | None = None
    experts: tuple[ExpertsRow, ...] = ()

    def row_of(self, recipe: Recipe) -> Row | None:
        """The operator for a recipe, or None."""
        return None if recipe.rotation is not None else next((row for row in self.rows if row.takes(recipe)), None)

    def refuses(self, recipe: Recipe) -> Refusal | None:
        """Why no operator can express a recipe, with the nearest recipe; None if one can."""
        if self.row_of(recipe) is not None:
            return None
        if recipe.rotation is not None:
            return Refusal("its weights are rotated by a Hadamard transform", _nearest(recipe))
        inputs = "float inputs" if recipe.input is None else f"inputs in {recipe.input}"
        return Refusal(f"no operator has weights in {recipe.weight} with {inputs}", _nearest(recipe))

    def experts_row_of(self, experts: QuantExperts) -> ExpertsRow | str:
        """The operator for the experts of a mixture, or the reason why there is none."""
        recipe = experts.recipe
        row = next((row for row in self.experts if row.takes(recipe)), None)
        if row is not None:
            return row.refuses(experts) or row
        if not self.experts:
            return f"{self.name!r} has no operator for experts"
        return f"{self.experts[0].name} has no recipe {recipe.name!r}"

    def refuses_convolutions(self, recipe: Recipe) -> Refusal | None:
        """The same for convolutions."""
        row = self.row_of(recipe)
        if row is not None and row.convolution is not None:
            return None
        nearest = "int8-weight-only" if recipe.input is None else "int8-static"
        return Refusal(f"no convolution has the recipe {recipe.name!r}", nearest)


def is_integer(scheme: Scheme) -> bool:
    """Whether a scheme has integers, with scales and zero points per block only."""
    return scheme.format.kind == "integer" and not scheme.reference_only


def is_float8(scheme: Scheme) -> bool:
    """Whether a scheme has FP8 elements."""
    return scheme.format.name in FLOAT8


def has_integer_rows(scheme: Scheme) -> bool:
    """Whether a scheme has signed integers with one scale per row or per matrix, as integer products need."""
    return is_integer(scheme) and _row_scaled(scheme)


def has_float8_rows(scheme: Scheme) -> bool:
    """Whether a scheme has FP8 elements with one scale per row or per matrix."""
    return is_float8(scheme) and _row_scaled(scheme)


def _row_scaled(scheme: Scheme) -> bool:
    return scheme.format.signed and scheme.block[1] is None and not scheme.affine and not scheme.global_scale


#: The nearest recipe with float inputs, by format.
_NEAREST = {
    "fp8_e4m3": "fp8-weight-only", "fp8_e5m2": "fp8-weight-only", "fp4_e2m1": "mxfp4-weight-only",
    "fp6_e2m3": "int8-weight-only", "fp6_e3m2": "int8-weight-only",
}  # fmt: skip


def _nearest(recipe: Recipe) -> str:
    """The nearest recipe that all formats of graphs have."""
    weight = recipe.weight
    return _NEAREST.get(weight.format.name) or (
        "int8" if recipe.input is not None and weight.format.bits == 8
        else "int8-weight-only" if weight.format.bits > 4 else "int4-weight-only:group32"
    )  # fmt: skip
