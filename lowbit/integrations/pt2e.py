"""A quantizer for torchao's PT2E: ``prepare_pt2e(program, Quantizer("int8-static"))``.

torchao's observers and its ops compute the numbers. Scales are lowbit's; weights and inputs are multiplied by the
reciprocal of a scale, so a value halfway between two integers may round to the other one.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx
from torchao.quantization.pt2e import MinMaxObserver, PerChannelMinMaxObserver
from torchao.quantization.pt2e import quantizer as pt2e

from lowbit.convert.protect import protections
from lowbit.convert.select import DEFAULT_SKIP, Skip, plain_layers, select
from lowbit.interop.graphs.modules import layer_names, with_layers
from lowbit.interop.graphs.rows import has_integer_rows
from lowbit.recipes import Recipe, layer_recipes
from lowbit.scaling import Scheme

__all__ = ["Quantizer"]


class Quantizer(pt2e.Quantizer):  # type: ignore[misc]
    """Annotates the layers of a program that ``quantize_`` would convert.

    Args:
        recipe: As for ``quantize_``: integer weights with a scale per row, and float inputs or static ones per tensor
            (``int8-weight-only``, ``int8-static``, ``int8-static-affine``).
        skip: As for ``quantize_``. The default leaves output layers in high precision.

    Raises:
        ValueError: PT2E cannot express a recipe.
    """

    def __init__(self, recipe: Any, skip: Skip = DEFAULT_SKIP) -> None:
        super().__init__()
        self.recipes, self.skip = layer_recipes(recipe), skip
        for row in self.recipes.recipes:
            if row.rotation is not None or not _plain_rows(row.weight) or not (row.input is None or _static(row)):
                raise ValueError(
                    f"PT2E: recipe {row.name!r} is not expressible; expected integer weights with an fp32 scale per "
                    f"row, and float or static inputs: use 'int8-static', 'int8-static-affine' or 'int8-weight-only'"
                )

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        skeleton = with_layers(_without_data(model))
        skip, protect = protections(skeleton, self.skip, self.recipes, unties=True)
        chosen = select(skeleton, plain_layers(), self.recipes, skip, protect).chosen
        nodes = layer_names(model)
        for name, layer in chosen.items():
            assert layer.recipe is not None
            if isinstance(layer.module, torch.nn.Embedding):
                raise ValueError(f"PT2E: embedding {name!r} has no annotation; leave it out of the recipes")
            for node in nodes.get(name, ()):
                _annotate(node, layer.recipe)
        return model

    def validate(self, model: fx.GraphModule) -> None:
        """Nothing to check: every layer has the ops of ``quantized_decomposed``."""


def _static(recipe: Recipe) -> bool:
    return recipe.static and recipe.input is not None and recipe.input.name in ("int8:tensor", "uint8:tensor:affine")


def _plain_rows(scheme: Scheme) -> bool:
    """Whether a scheme has signed integers with an fp32 scale per row, the largest magnitude by ``qmax``."""
    return has_integer_rows(scheme) and scheme.block[0] == 1 and scheme.scale_format.name == "fp32" and not scheme.full


def _without_data(program: fx.GraphModule) -> fx.GraphModule:
    """A copy of a program with its tensors on the meta device."""
    memo: dict[int, Any] = {}
    for value in (*program.parameters(), *program.buffers()):
        memo[id(value)] = (
            torch.nn.Parameter(value.to("meta"), requires_grad=False)
            if isinstance(value, torch.nn.Parameter)
            else value.to("meta")
        )
    return copy.deepcopy(program, memo)


def _annotate(node: fx.Node, recipe: Recipe) -> None:
    x, weight = node.args[:2]
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    specs = {weight: _weight(recipe)} if recipe.input is None else {x: _input(recipe), weight: _weight(recipe)}
    node.meta["quantization_annotation"] = pt2e.QuantizationAnnotation(input_qspec_map=specs, _annotated=True)


def _weight(recipe: Recipe) -> Any:
    most = int(recipe.weight.format.qmax)
    return pt2e.QuantizationSpec(
        torch.int8, PerChannelMinMaxObserver, quant_min=-most, quant_max=most, qscheme=torch.per_channel_symmetric,
        ch_axis=0,
    )  # fmt: skip


def _input(recipe: Recipe) -> Any:
    assert recipe.input is not None
    affine, most = recipe.input.affine, int(recipe.input.format.qmax)
    return pt2e.QuantizationSpec(
        torch.uint8 if affine else torch.int8, MinMaxObserver, quant_min=0 if affine else -most,
        quant_max=most, qscheme=torch.per_tensor_affine if affine else torch.per_tensor_symmetric,
    )  # fmt: skip
