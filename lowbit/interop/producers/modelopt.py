"""The rules by which NVIDIA's ModelOpt stores quantized matrices: FP8, MXFP8 and NVFP4.

NVFP4 has two codes per byte in ``weight``, the even column in the low bits, and one scale per 16 in ``weight_scale``.
The global scale ``weight_scale_2`` multiplies, as lowbit's does.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.convert.engine import quantized_layers
from lowbit.files import shown
from lowbit.interop.directories.layers import Stored, StoredLayer
from lowbit.interop.directories.names import Names
from lowbit.interop.directories.recipes import alike, recipe_of
from lowbit.interop.directories.rules import CONFIG, Kind, Matrix, Rules
from lowbit.interop.directories.writing import Layout
from lowbit.interop.files import Refusal
from lowbit.interop.joining import rows as rows_of
from lowbit.models.names import plain_name
from lowbit.recipes import Cast, Recipe
from lowbit.scaling import Scheme, packed_cols
from lowbit.scaling import scheme as find_scheme
from lowbit.serialize.shards import Checkpoint
from lowbit.tensor.quantized import Quantized, Scales

__all__ = ["LAYOUT", "ModelOpt", "refuses"]

#: The ``quant_algo`` of a model whose layers have several.
_MIXED = "MIXED_PRECISION"

#: The scheme of weights, and of inputs if they are quantized, of each ``quant_algo``; the first one writes a recipe.
_ALGORITHMS: dict[str, tuple[str, Cast | None]] = {
    "FP8": ("fp8_e4m3:tensor", Cast(find_scheme("fp8_e4m3:tensor"), scale="static")),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8_e4m3:row", Cast(find_scheme("fp8_e4m3:row"))),
    "NVFP4": ("nvfp4", Cast(find_scheme("nvfp4:global_row"))),
    "NVFP4_AWQ": ("nvfp4", Cast(find_scheme("nvfp4:global_row"))),
    "W4A16_NVFP4": ("nvfp4", None),
    "MXFP8": ("mxfp8:ceil", Cast(find_scheme("mxfp8:ceil"))),
}


class ModelOpt(Rules):
    """FP8 and NVFP4. Inputs of NVFP4 get a global scale per row at run time instead of the stored one."""

    method = "modelopt"
    marker = "weight_scale"

    def __init__(self, path: Path, config: dict[str, Any], checkpoint: Checkpoint) -> None:
        super().__init__(path, config, checkpoint)
        self.algorithm, self.by_layer = config.get("quant_algo"), config.get("quantized_layers")
        if not isinstance(self.by_layer if self.algorithm == _MIXED else {}, dict):
            raise ValueError(f"{path / CONFIG}: quantized_layers is {shown(self.by_layer)}, expected an object")
        if self.algorithm != _MIXED:
            try:
                _schemes(self.algorithm)
            except ValueError as error:
                raise ValueError(f"{path / CONFIG}: {error}") from None

    def matrix(self, name: str, shape: tuple[int, int], dtype: torch.dtype) -> Matrix:
        if f"{name}.pre_quant_scale" in self.checkpoint.entries:
            raise ValueError("its inputs are scaled per column (pre_quant_scale), which lowbit does not read")
        algorithm = self.algorithm
        if algorithm == _MIXED:
            assert isinstance(self.by_layer, dict)
            row = self.by_layer.get(name)
            algorithm = row.get("quant_algo") if isinstance(row, dict) else None
        recipe = recipe_of(*_schemes(algorithm))
        scheme = recipe.weight
        kinds = _kinds(scheme, shape)
        if recipe.static:
            kinds["input_scale"] = Kind(torch.float32, ())
        return Matrix(
            recipe,
            {part: (f"{name}.{part}", kind) for part, kind in kinds.items()},
            partial(_weight, scheme=scheme, shape=shape, dtype=dtype),
            _input if recipe.static else None,
            unused=() if recipe.static else (f"{name}.input_scale",),
        )

    def cache_names(self, attention: str) -> tuple[str, str] | None:
        if self.config.get("kv_cache_quant_algo") != "FP8":
            return None
        return f"{attention}.k_proj.k_scale", f"{attention}.v_proj.v_scale"

    def unknown_cache(self) -> bool:
        return self.config.get("kv_cache_quant_algo") not in (None, "FP8")


def _kinds(scheme: Scheme, shape: tuple[int, int]) -> dict[str, Kind]:
    """The tensors of a weight by name."""
    rows, cols = shape
    if scheme.global_scale:
        return {
            "weight": Kind(torch.uint8, (rows, packed_cols(cols, 4))),
            "weight_scale": Kind(torch.float8_e4m3fn, scheme.scale_shape(rows, cols)),
            "weight_scale_2": Kind(torch.float32, ()),
        }
    if scheme.scale_format.name == "e8m0":
        scale = Kind(torch.uint8, scheme.scale_shape(rows, cols))
    else:
        scale = Kind(torch.float32, () if scheme.block[0] is None else (rows,))
    return {"weight": Kind(torch.float8_e4m3fn, shape), "weight_scale": scale}


def _schemes(algorithm: Any) -> tuple[Scheme, Cast | None]:
    """The schemes of weights and inputs of an algorithm in an untrusted config. Raises ValueError."""
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        raise ValueError(f"quant_algo is {shown(algorithm)}, expected one of {', '.join(_ALGORITHMS)}")
    weight, input = _ALGORITHMS[algorithm]
    return find_scheme(weight), input


def _weight(tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype) -> Quantized:
    codes = tensors["weight"].view(torch.uint8)
    scale = tensors["weight_scale"]
    if scheme.global_scale:
        scale, second = scale.view(torch.uint8), tensors["weight_scale_2"].reshape(1, 1)
        return Quantized(codes, scale, None, second, scheme, torch.Size(shape), dtype)
    scale = scale.reshape(scheme.scale_shape(*shape))
    return Quantized(codes, scale, None, None, scheme, torch.Size(shape), dtype)


def _input(tensors: Mapping[str, Tensor]) -> Scales:
    return Scales(tensors["input_scale"].float().reshape(1, 1))


# -- writing -----------------------------------------------------------------------------------------------------------
#: The algorithms that are written, with what they store. NVFP4 with quantized inputs needs their global scales, which
#: lowbit computes at run time.
_WRITTEN = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "W4A16_NVFP4", "MXFP8")


def _algorithm_of(recipe: Recipe) -> str | None:
    for name in _WRITTEN:
        weight, input = _schemes(name)
        if recipe_of(weight, input).name == recipe.name or (
            alike(recipe.weight, weight)
            and (recipe.input is None) == (input is None)
            and (input is None or (recipe.input == input.scheme and recipe.static == (input.scale == "static")))
        ):
            return None if recipe.rotation is not None or recipe.reordered else name
    return None


def refuses(recipe: Recipe) -> Refusal | None:
    """Why ModelOpt's readers cannot express a recipe, with the nearest recipe; None if they can."""
    if _algorithm_of(recipe) is not None:
        return None
    nearest = "nvfp4-weight-only" if recipe.weight.format.bits <= 4 else "fp8"
    recipes = ", ".join(recipe_of(*_schemes(name)).name for name in _WRITTEN)
    return Refusal(f"ModelOpt's layouts that are written are those of {recipes}", nearest)


def _store(layer: Any, begin: int, end: int) -> Stored:
    recipe, scheme = layer.recipe, layer.scheme
    algorithm = _algorithm_of(recipe)
    if algorithm is None:
        refusal = refuses(recipe)
        assert refusal is not None
        raise ValueError(f"recipe {recipe.name!r}: {refusal.why}; the nearest recipe that works is {refusal.nearest!r}")
    shape = (end - begin, layer.in_features)
    if scheme.block[1] is not None and shape[1] % scheme.block[1]:
        raise ValueError(f"it has {shape[1]} columns, no multiple of its blocks of {scheme.block[1]}")
    kinds = _kinds(scheme, shape)
    if recipe.static:
        kinds["input_scale"] = Kind(torch.float32, ())
    return Stored(kinds, partial(_tensors, layer, begin, end), algorithm)


def _tensors(layer: Any, begin: int, end: int) -> dict[str, Tensor]:
    weight = rows_of(layer.weight, begin, end)
    kinds = _kinds(layer.scheme, (end - begin, layer.in_features))
    parts = {"weight": weight.codes, "weight_scale": weight.scale}
    tensors = {name: part.view(kinds[name].dtype).reshape(kinds[name].shape) for name, part in parts.items()}
    if weight.global_scale is not None:
        tensors["weight_scale_2"] = weight.global_scale.reshape(())
    if layer.recipe.static:
        tensors["input_scale"] = layer.input_scales.scale.reshape(())
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _config(model: Any, layers: dict[str, StoredLayer], names: Names) -> dict[str, Any]:
    algorithms = {name: layer.stored.about for name, layer in layers.items()}
    config: dict[str, Any] = {"quant_method": ModelOpt.method, "producer": {"name": "modelopt", "version": "lowbit"}}
    inside = tuple(f"{plain_name(path)}." for path in quantized_layers(model))
    config["ignore"] = [
        names.layer(plain_name(path))
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and not plain_name(path).startswith(inside)
    ]
    if len(set(algorithms.values())) == 1:
        return {**config, "quant_algo": next(iter(algorithms.values()))}
    return {**config, "quant_algo": _MIXED, "quantized_layers": {k: {"quant_algo": v} for k, v in algorithms.items()}}


#: The layout, for ``directories.write``.
LAYOUT = Layout(ModelOpt.method, _store, _config)
