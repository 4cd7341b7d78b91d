"""The rules by which NVIDIA's ModelOpt stores quantized matrices: FP8 and NVFP4.

NVFP4 has two codes per byte in ``weight``, the even column in the low bits, and one scale per 16 in ``weight_scale``.
The global scale ``weight_scale_2`` multiplies, as lowbit's does.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.files import shown
from lowbit.interop.directories.recipes import recipe_of
from lowbit.interop.directories.rules import CONFIG, Kind, Matrix, Rules
from lowbit.recipes import Cast
from lowbit.scaling import Scheme, packed_cols
from lowbit.scaling import scheme as find_scheme
from lowbit.serialize.shards import Checkpoint
from lowbit.tensor.quantized import Quantized, Scales

__all__ = ["ModelOpt"]

#: The scheme of weights, and of inputs if they are quantized, of each ``quant_algo``.
_ALGORITHMS: dict[str, tuple[str, Cast | None]] = {
    "FP8": ("fp8_e4m3:tensor", Cast(find_scheme("fp8_e4m3:tensor"), scale="static")),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8_e4m3:row", Cast(find_scheme("fp8_e4m3:row"))),
    "NVFP4": ("nvfp4", Cast(find_scheme("nvfp4:global_row"))),
    "NVFP4_AWQ": ("nvfp4", Cast(find_scheme("nvfp4:global_row"))),
    "W4A16_NVFP4": ("nvfp4", None),
}


class ModelOpt(Rules):
    """FP8 and NVFP4. Inputs of NVFP4 get a global scale per row at run time instead of the stored one."""

    method = "modelopt"
    marker = "weight_scale"

    def __init__(self, path: Path, config: dict[str, Any], checkpoint: Checkpoint) -> None:
        super().__init__(path, config, checkpoint)
        algorithm = config.get("quant_algo")
        if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
            raise ValueError(
                f"{path / CONFIG}: quant_algo is {shown(algorithm)}, expected one of {', '.join(_ALGORITHMS)}"
            )
        self.weight, self.input = _ALGORITHMS[algorithm]

    def matrix(self, name: str, shape: tuple[int, int], dtype: torch.dtype) -> Matrix:
        rows, cols = shape
        if f"{name}.pre_quant_scale" in self.checkpoint.entries:
            raise ValueError("its inputs are scaled per column (pre_quant_scale), which lowbit does not read")
        recipe = recipe_of(find_scheme(self.weight), self.input)
        scheme = recipe.weight
        if scheme.global_scale:
            kinds = {
                "weight": Kind(torch.uint8, (rows, packed_cols(cols, 4))),
                "weight_scale": Kind(torch.float8_e4m3fn, scheme.scale_shape(rows, cols)),
                "weight_scale_2": Kind(torch.float32, ()),
            }
        else:
            scales = () if scheme.block[0] is None else (rows,)
            kinds = {
                "weight": Kind(torch.float8_e4m3fn, shape),
                "weight_scale": Kind(torch.float32, scales),
            }
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
