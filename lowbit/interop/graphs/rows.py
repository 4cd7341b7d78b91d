"""The rows of a format's table of operators, and the formats that have such a table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from lowbit.interop.files import Refusal
from lowbit.nn.conv import QuantConv
from lowbit.nn.embedding import QuantEmbedding
from lowbit.nn.linear import QuantLinear
from lowbit.recipes import Recipe

__all__ = ["Inputs", "Row", "Target", "has_input", "has_row_scales", "is_weight_only", "nearest", "traced"]


class Inputs(NamedTuple):
    """An example call.

    Attributes:
        args, kwargs: Its arguments.
        values: All of them by name.
        axes: The axes of each that may have any length.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: dict[str, Any]
    axes: dict[str, Any]


def traced(model: nn.Module, inputs: Inputs) -> torch.export.ExportedProgram:
    """The program of ``torch.export`` for a model."""
    return torch.export.export(model, inputs.args, inputs.kwargs, dynamic_shapes=inputs.axes)


class Row(NamedTuple):
    """An operator for layers.

    Attributes:
        name: The operator that multiplies or decodes.
        takes: Whether it can express a recipe.
        make: Makes the module that writes a Linear.
        convolution: Makes the module that writes a convolution; None if it cannot.
        note: A difference to lowbit's results beyond the order of sums, for the report.
        complete: Whether the module is right before the format's ``save`` has changed its constants.
    """

    name: str
    takes: Callable[[Recipe], bool]
    make: Callable[[QuantLinear], nn.Module]
    convolution: Callable[[QuantConv], nn.Module] | None = None
    note: str | None = None
    complete: bool = True


class Target(NamedTuple):
    """A format of graphs.

    Attributes:
        name: Its name in ``export``.
        rows: The first row that takes a recipe writes its layers.
        embedding: Makes the module that writes an embedding.
        convolutions: The recipes whose convolutions can be written, for messages.
        save: Exports a model with replaced layers to a path.
        packages: The packages that ``save`` needs.
        nearest: A recipe that works, next to one that does not.
    """

    name: str
    rows: tuple[Row, ...]
    embedding: Callable[[QuantEmbedding], nn.Module]
    convolutions: str
    save: Callable[[nn.Module, Inputs, Path], None]
    packages: tuple[str, ...]
    nearest: Callable[[Recipe], str]

    def row_of(self, recipe: Recipe) -> Row | None:
        """The operator for a recipe, or None."""
        return None if recipe.rotation is not None else next((row for row in self.rows if row.takes(recipe)), None)

    def refuses(self, recipe: Recipe) -> Refusal | None:
        """Why no operator can express a recipe, with the nearest recipe; None if one can."""
        if self.row_of(recipe) is not None:
            return None
        if recipe.rotation is not None:
            return Refusal("its weights are rotated by a Hadamard transform", self.nearest(recipe))
        inputs = "float inputs" if recipe.input is None else f"inputs in {recipe.input}"
        return Refusal(f"no operator has weights in {recipe.weight} with {inputs}", self.nearest(recipe))


def is_weight_only(recipe: Recipe) -> bool:
    """Whether inputs stay floats."""
    return recipe.input is None


def has_input(recipe: Recipe, *names: str) -> bool:
    """Whether inputs are quantized in one of the schemes."""
    return recipe.input is not None and recipe.input.name in names


def has_row_scales(recipe: Recipe, kind: str) -> bool:
    """Whether the weight has signed integers, or FP8, with one scale per row or per matrix and no zero points."""
    scheme = recipe.weight
    fits = scheme.format.kind == kind and scheme.format.signed and (kind == "integer" or scheme.format.bits == 8)
    return fits and scheme.block[1] is None and not scheme.affine and not scheme.global_scale


#: The nearest recipe with float inputs, by format.
_NEAREST = {
    "fp8_e4m3": "fp8-weight-only", "fp8_e5m2": "fp8-weight-only", "fp4_e2m1": "mxfp4-weight-only",
    "fp6_e2m3": "int8-weight-only", "fp6_e3m2": "int8-weight-only",
}  # fmt: skip


def nearest(recipe: Recipe) -> str:
    """The nearest recipe that all formats of graphs have."""
    weight = recipe.weight
    return _NEAREST.get(weight.format.name) or (
        "int8" if recipe.input is not None and weight.format.bits == 8
        else "int8-weight-only" if weight.format.bits > 4 else "int4-weight-only:group32"
    )  # fmt: skip
