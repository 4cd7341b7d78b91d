"""The rules by which DeepSeek-V3 and transformers' FineGrainedFP8 store quantized matrices.

``weight`` is E4M3, and ``weight_scale_inv`` has the scale of each block, which multiplies despite its name.
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
from lowbit.scaling import Scheme
from lowbit.scaling import scheme as find_scheme
from lowbit.serialize.shards import Checkpoint
from lowbit.tensor.quantized import Quantized

__all__ = ["FP8"]


class FP8(Rules):
    """FP8 in blocks, with inputs in groups as wide as a block, or with one scale per matrix and per input."""

    method = "fp8"
    marker = "weight_scale_inv"

    def __init__(self, path: Path, config: dict[str, Any], checkpoint: Checkpoint) -> None:
        super().__init__(path, config, checkpoint)
        block = config.get("weight_block_size")
        sizes = (
            isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and 0 < n < 1 << 31 for n in block)
        )
        if block is not None and not sizes:
            raise ValueError(f"{path / CONFIG}: weight_block_size is {shown(block)}, expected two positive integers")
        if config.get("activation_scheme", "dynamic") != "dynamic" or config.get("fmt", "e4m3") not in ("e4m3", None):
            raise ValueError(f"{path / CONFIG}: expected dynamic activations and fmt e4m3, got {shown(config)}")
        self.block: list[int] | None = block

    def matrix(self, name: str, shape: tuple[int, int], dtype: torch.dtype) -> Matrix:
        option = self.scale_option(f"{name}.{self.marker}")
        if self.block is None:
            weight, input = find_scheme(f"fp8_e4m3:tensor{option}"), Cast(find_scheme("fp8_e4m3:tensor"))
        else:
            rows, cols = self.block
            weight = find_scheme(f"fp8_e4m3:block{rows}x{cols}{option}")
            input = Cast(find_scheme(f"fp8_e4m3:group{cols}"))
        recipe = recipe_of(weight, input)
        kinds = {
            "weight": Kind(torch.float8_e4m3fn, shape),
            self.marker: Kind(self.checkpoint.entries[f"{name}.{self.marker}"].dtype, weight.scale_shape(*shape)),
        }
        return Matrix(
            recipe,
            {part: (f"{name}.{part}", kind) for part, kind in kinds.items()},
            partial(self._weight, scheme=recipe.weight, shape=shape, dtype=dtype),
        )

    def _weight(
        self, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype
    ) -> Quantized:
        codes, scale = tensors["weight"].view(torch.uint8), tensors[self.marker]
        return Quantized(codes, scale.reshape(scheme.scale_shape(*shape)), None, None, scheme, torch.Size(shape), dtype)
