"""Transform: how columns are scaled, the table of transforms, and their application to a block.

The module before a layer divides each column of its output by a factor, and the layer's weight columns are multiplied
by it. The model's output stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowbit.calibrate.calibration import Edit
from lowbit.calibrate.identity import digest
from lowbit.calibrate.recording import Observed
from lowbit.calibrate.statistics import Statistics
from lowbit.calibrate.transforms import awq, smoothquant
from lowbit.calibrate.transforms.maps import MAPS, Map
from lowbit.models.wrap import plain_class

__all__ = ["TRANSFORMS", "Transform", "transform_"]

#: The range of factors. Larger ones would only move the extremes to the other side.
_LEAST, _MOST = 1e-4, 1e4


class Transform(NamedTuple):
    """How columns are scaled.

    Attributes:
        name: The name for ``calibrate``.
        about: One line of prose.
        factors: ``factors(layers, statistics)`` returns the factors fp32 [in] of the columns of the layers' common
            input.
        need: The statistics that it requires, one of ``statistics.NEEDS``.
    """

    name: str
    about: str
    factors: Callable[[list[Observed], Statistics], Tensor]
    need: str


#: Every transform. Names are API.
TRANSFORMS: dict[str, Transform] = {
    row.name: row
    for row in (
        Transform(
            "smoothquant", "the extremes of activations are shared with the weights (arXiv 2211.10438)",
            smoothquant.factors, "squares",
        ),
        Transform(
            "awq", "columns with large activations are scaled up before rounding (arXiv 2306.00978)", awq.factors,
            "gram",
        ),
    )
}  # fmt: skip


def transform_(root: nn.Module, transform: Transform, names: dict[int, str]) -> list[Edit]:
    """Apply ``transform`` to the blocks in ``root`` with a row in MAPS.

    Args:
        root: A block or model with Observed layers.
        transform: The transform.
        names: The names of modules, by ``id``.

    Returns:
        The changed parameters other than weights of Observed layers.

    Raises:
        ValueError: No block has a row in MAPS.
    """
    known = [module for module in root.modules() if plain_class(module).__name__ in MAPS]
    if not known:
        raise ValueError(
            f"{transform.name} needs to know which norm feeds which layers, but no module of {type(root).__name__} has "
            f"a row in lowbit.calibrate.transforms.MAPS; add its class (known: {', '.join(MAPS)})"
        )
    edits: list[Edit] = []
    for block in known:
        for row, before, after in _groups(block):
            statistics = after[0].statistics
            if statistics is not None and statistics.rows:
                factors = transform.factors(after, statistics).clamp(_LEAST, _MOST)
                edits.extend(_scale_(row, before, after, factors, names))
    return edits


def _groups(block: nn.Module) -> Iterator[tuple[Map, nn.Module, list[Observed]]]:
    """The maps of a block that apply: all modules are there, and all layers in ``after`` are to be quantized."""
    modules = dict(block.named_modules())
    for row in MAPS[plain_class(block).__name__]:
        before = modules.get(row.before)
        after = [layer for name in row.after if isinstance(layer := modules.get(name), Observed)]
        if before is None or len(after) < len(row.after) or _width(before, row) != after[0].weight.shape[1]:
            continue
        yield row, before, after


def _width(before: nn.Module, row: Map) -> int | None:
    """The number of columns from ``before``; None if it has no weight that can be changed."""
    weight = before.weight if isinstance(before, Observed) else before._parameters.get("weight")
    scalable = isinstance(before, Observed) or (weight is not None and weight.dim() == 1)
    return weight.shape[0] // row.part[1] if weight is not None and scalable else None


def _scale_(row: Map, before: nn.Module, after: list[Observed], factors: Tensor, names: dict[int, str]) -> list[Edit]:
    weights = tuple(layer.weight_name for layer in after)
    if isinstance(before, Observed):
        size = len(factors)
        rows = slice(row.part[0] * size, (row.part[0] + 1) * size)
        before.weight = before.weight.float().clone()
        before.weight[rows] /= factors[:, None]
        parts, weights = [("bias", rows)], (*weights, before.weight_name)
    else:
        factors = _representable(before._parameters["weight"], factors)
        parts = [("weight", slice(None)), ("bias", slice(None))]
    for layer in after:
        layer.weight = layer.weight.float() * factors
        layer.factors = factors if layer.factors is None else layer.factors * factors
    name = before.name if isinstance(before, Observed) else names[id(before)]
    return [
        _divide_(before, part, rows, factors, name, weights)
        for part, rows in parts
        if before._parameters.get(part) is not None
    ]


def _representable(weight: Any, factors: Tensor) -> Tensor:
    """The factors that the division of a norm's weight applies after rounding to its dtype."""
    plain = weight.detach().float()
    exact = plain / (plain / factors).to(weight.dtype).float()
    return torch.where(exact.isfinite() & (exact != 0), exact, factors)


def _divide_(module: nn.Module, part: str, rows: slice, factors: Tensor, name: str, weights: tuple[str, ...]) -> Edit:
    """Replace a parameter by a scaled copy, because the model shares the old one."""
    old: Any = module._parameters[part]
    value = old.detach().float().clone()
    value[rows] /= factors
    value = value.to(old.dtype)
    module._parameters[part] = nn.Parameter(value, requires_grad=False)
    return Edit(f"{name}.{part}", value, digest(old), weights)
