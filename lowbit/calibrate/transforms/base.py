"""What a transform is, the table of them, and how one is applied to a block.

Each column of a layer's inputs is divided by a factor where it is made, and the layer's weights of that column are
multiplied with it. The model computes what it computed.
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

#: Factors beyond these would only move the extremes to the other side.
_LEAST, _MOST = 1e-4, 1e4


class Transform(NamedTuple):
    """How columns are scaled: ``factors(layers, statistics)`` gives one for each column of the inputs of ``layers``,
    which are given the same tensor, fp32 ``[in]``. ``need``: what it asks of the statistics.
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
    """Apply ``transform`` to the blocks in ``root`` whose class a map knows, and answer what it changed besides weights
    of Observed layers. ``names``: of modules, by their ``id``.

    Raises ValueError where no map knows a block.
    """
    known = [module for module in root.modules() if plain_class(module).__name__ in MAPS]
    if not known:
        raise ValueError(
            f"{transform.name} needs to know which norm feeds which layers, and no map does for any module of a "
            f"{type(root).__name__}; add its class to lowbit.calibrate.transforms.MAPS (known: {', '.join(MAPS)})"
        )
    edits: list[Edit] = []
    for block in known:
        for one, before, after in _groups(block):
            statistics = after[0].statistics
            if statistics is not None and statistics.rows:
                factors = transform.factors(after, statistics).clamp(_LEAST, _MOST)
                edits.extend(_scale_(one, before, after, factors, names))
    return edits


def _groups(block: nn.Module) -> Iterator[tuple[Map, nn.Module, list[Observed]]]:
    """The maps of a block that apply to it: its modules are there, and all of ``after`` are to be quantized."""
    modules = dict(block.named_modules())
    for one in MAPS[plain_class(block).__name__]:
        before = modules.get(one.before)
        after = [layer for name in one.after if isinstance(layer := modules.get(name), Observed)]
        if before is None or len(after) < len(one.after) or _width(before, one) != after[0].weight.shape[1]:
            continue
        yield one, before, after


def _width(before: nn.Module, one: Map) -> int | None:
    """How many columns ``before`` makes for the layers after it; None for what has no weight to change."""
    weight = before.weight if isinstance(before, Observed) else before._parameters.get("weight")
    whole = isinstance(before, Observed) or (weight is not None and weight.dim() == 1)
    return weight.shape[0] // one.part[1] if weight is not None and whole else None


def _scale_(one: Map, before: nn.Module, after: list[Observed], factors: Tensor, names: dict[int, str]) -> list[Edit]:
    weights = tuple(layer.weight_name for layer in after)
    if isinstance(before, Observed):
        size = len(factors)
        rows = slice(one.part[0] * size, (one.part[0] + 1) * size)
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
    return [_divide_(before, part, rows, factors, name, weights) for part, rows in parts if part in _own(before)]


def _own(module: nn.Module) -> list[str]:
    return [name for name, value in module._parameters.items() if value is not None]


def _representable(weight: Any, factors: Tensor) -> Tensor:
    """The factors by which a norm's weight is divided exactly, in its own dtype."""
    plain = weight.detach().float()
    exact = plain / (plain / factors).to(weight.dtype).float()
    return torch.where(exact.isfinite() & (exact != 0), exact, factors)


def _divide_(module: nn.Module, part: str, rows: slice, factors: Tensor, name: str, weights: tuple[str, ...]) -> Edit:
    """Give the module a new parameter, since the old one is the model's own."""
    old: Any = module._parameters[part]
    value = old.detach().float().clone()
    value[rows] /= factors
    made = value.to(old.dtype)
    module._parameters[part] = nn.Parameter(made, requires_grad=False)
    return Edit(f"{name}.{part}", made, digest(old), weights)
