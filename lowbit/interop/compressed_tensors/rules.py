"""The rules by which compressed-tensors stores quantized matrices."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.files import shown
from lowbit.interop.columns import order_of, taken
from lowbit.interop.compressed_tensors import layouts
from lowbit.interop.compressed_tensors.layouts import GROUPS
from lowbit.interop.compressed_tensors.schemes import REORDERED, input_of, is_static_cache, scheme_of
from lowbit.interop.directories.recipes import recipe_of
from lowbit.interop.directories.rules import CONFIG, Kind, Matrix, Rules
from lowbit.models import cache_scales
from lowbit.scaling import Scheme
from lowbit.serialize.shards import Checkpoint
from lowbit.tensor.quantized import Quantized

__all__ = ["CompressedTensors"]

#: Parts of a layer's state that other programs write and lowbit does not use.
_UNUSED = ("input_global_scale",)

#: Names of classes in targets that mean every Linear.
_CLASSES = ("Linear", "Module")


class CompressedTensors(Rules):
    """llm-compressor, vLLM and transformers. Global scales are the reciprocals of lowbit's, in fp32.

    Inputs of NVFP4 get a global scale per row at run time instead of the stored one.
    """

    method = "compressed-tensors"
    marker = "weight_scale"

    def __init__(self, path: Path, config: dict[str, Any], checkpoint: Checkpoint) -> None:
        super().__init__(path, config, checkpoint)
        groups = config.get("config_groups")
        if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
            raise ValueError(f"{path / CONFIG} is damaged: config_groups is {shown(groups)}; copy it again")
        for rows in (config.get("ignore") or [], *(group.get("targets") for group in groups.values())):
            if not isinstance(rows, list) or not all(isinstance(row, str) for row in rows):
                raise ValueError(
                    f"{path / CONFIG} is damaged: expected a list of names, got {shown(rows)}; copy it again"
                )
        if config.get("transform_config"):
            raise ValueError(
                f"{path / CONFIG} has a transform_config, and lowbit reads no rotated weights; use the original model "
                f"with lowbit.quantize_(model, 'NAME:hadamard')"
            )
        if config.get("sparsity_config"):
            raise ValueError(f"{path / CONFIG} has a sparsity_config, and lowbit reads dense codes only")

    def matrix(self, name: str, shape: tuple[int, int], dtype: torch.dtype) -> Matrix:
        group = _group_of(name, self.config["config_groups"], self.config.get("ignore") or [])
        if group is None:
            raise ValueError(f"no config group for {name}, whose {self.marker} the files have")
        weights = group.get("weights")
        if not isinstance(weights, dict) or group.get("output_activations"):
            raise ValueError("a group needs weights, and no output_activations")
        scale_dtype = str(self.checkpoint.entries[f"{name}.{self.marker}"].dtype).removeprefix("torch.")
        format, scheme = scheme_of(weights, str(group.get("format") or self.config.get("format")), scale_dtype)
        recipe = recipe_of(scheme, input_of(group.get("input_activations")))
        kinds = layouts.weight_kinds(format, recipe.weight, shape)
        weight = partial(layouts.from_tensors, format=format, scheme=recipe.weight, shape=shape, dtype=dtype)
        inputs = columns = None
        if weights.get("actorder") in REORDERED:
            recipe, kinds[GROUPS] = recipe.with_reordered(), Kind(torch.int32, (shape[1],))
            columns = partial(_columns, scheme=recipe.weight)
            weight = partial(_reordered, weight=weight, scheme=recipe.weight)
        if recipe.static and recipe.input is not None:
            kinds |= layouts.input_kinds(recipe.input)
            inputs = partial(layouts.input_scales, scheme=recipe.input)
        return Matrix(
            recipe,
            {part: (f"{name}.{part}", kind) for part, kind in kinds.items()},
            weight,
            inputs,
            columns,
            unused=tuple(f"{name}.{part}" for part in _UNUSED),
        )

    def cache_names(self, attention: str) -> tuple[str, str] | None:
        keys, values = cache_scales.NAMES
        known = is_static_cache(self.config.get("kv_cache_scheme"))
        return (f"{attention}.{keys}", f"{attention}.{values}") if known else None

    def unknown_cache(self) -> bool:
        scheme = self.config.get("kv_cache_scheme")
        return bool(scheme) and not is_static_cache(scheme)

    def remedy(self, name: str) -> str:
        if name.endswith("weight_g_idx"):
            return "the config says that columns are not in the order of activations (actorder)"
        return super().remedy(name)


def _columns(tensors: Mapping[str, Tensor], scheme: Scheme) -> Tensor:
    return order_of(tensors[GROUPS], scheme)


def _reordered(
    tensors: Mapping[str, Tensor], weight: Callable[[Mapping[str, Tensor]], Quantized], scheme: Scheme
) -> Quantized:
    return taken(weight(tensors), order_of(tensors[GROUPS], scheme))


def _group_of(name: str, groups: dict[str, Any], ignore: list[str]) -> dict[str, Any] | None:
    """The group for a Linear: one that names it, else one whose pattern matches, else one that names its class."""
    ways: tuple[Callable[[str], bool], ...] = (
        lambda target: target == name,
        lambda target: target.startswith("re:") and _matches(target[3:], name),
        lambda target: target in _CLASSES,
    )
    if any(way(target) for target in ignore for way in ways):
        return None
    for way in ways:
        for group in groups.values():
            if any(way(target) for target in group["targets"]):
                return dict(group)
    return None


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise ValueError(f"the target {shown(pattern)} is no regular expression: {error}") from None
