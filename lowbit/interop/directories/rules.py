"""``Rules``: how one program stores quantized matrices in the files of a Hugging Face directory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lowbit.files import read_json, shown
from lowbit.recipes import Recipe
from lowbit.serialize.shards import Checkpoint
from lowbit.tensor.quantized import Quantized, Scales

__all__ = ["CONFIG", "SCALE_OPTIONS", "Kind", "Matrix", "Rules", "positive", "quantization_of"]

CONFIG = "config.json"

#: The file in which older versions of ModelOpt describe the quantization.
MODELOPT_CONFIG = "hf_quant_config.json"

#: The option of a scheme for scales of each dtype.
SCALE_OPTIONS = {torch.float32: "", torch.bfloat16: ":bf16", torch.float16: ":fp16"}


class Kind(NamedTuple):
    """The dtype and shape of a stored tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Matrix(NamedTuple):
    """A quantized matrix ``[N, K]`` in a checkpoint.

    Attributes:
        recipe: The recipe whose layer computes with it.
        tensors: The name in the checkpoint, dtype and shape of each of its tensors.
        weight: ``weight(tensors)`` is the matrix. Raises ValueError for values that contradict the config.
        columns: ``columns(tensors)`` is the order of the columns, for recipes with ``reordered``.
        inputs: ``inputs(tensors)`` are the static input scales; None: the recipe has none.
        unused: Names of tensors that other programs write and lowbit does not use.
    """

    recipe: Recipe
    tensors: dict[str, tuple[str, Kind]]
    weight: Callable[[Mapping[str, Tensor]], Quantized]
    inputs: Callable[[Mapping[str, Tensor]], Scales] | None = None
    columns: Callable[[Mapping[str, Tensor]], Tensor] | None = None
    unused: tuple[str, ...] = ()


class Rules(ABC):
    """The rules of one program for one directory.

    Args:
        path: The directory.
        config: Its quantization config, from an untrusted file.
        checkpoint: The tensors.

    Raises:
        ValueError: The config has something that lowbit does not read.
    """

    #: The ``quant_method`` in configs.
    method: ClassVar[str]

    #: The part of a quantized matrix that no other matrix has.
    marker: ClassVar[str]

    def __init__(self, path: Path, config: dict[str, Any], checkpoint: Checkpoint) -> None:
        if config.get("quant_method") != self.method:
            raise ValueError(f"{path / CONFIG} has no quantization_config of {self.method}")
        self.path, self.config, self.checkpoint = path, config, checkpoint

    @classmethod
    def detect(cls, path: str | Path) -> bool:
        """Whether a path has the directory of a model in this layout."""
        return quantization_of(Path(path)).get("quant_method") == cls.method

    def is_quantized(self, name: str) -> bool:
        """Whether the matrix called ``name`` in the checkpoint is quantized."""
        return f"{name}.{self.marker}" in self.checkpoint.entries

    @abstractmethod
    def matrix(self, name: str, shape: tuple[int, int], dtype: torch.dtype) -> Matrix:
        """The matrix called ``name`` in the checkpoint.

        Args:
            name: The name.
            shape: Its rows and columns in the model.
            dtype: The dtype of the model.

        Raises:
            ValueError: lowbit has no such scheme.
        """

    def experts(self, name: str, shape: tuple[int, int, int], dtype: torch.dtype) -> list[Matrix] | None:
        """The matrices ``[E, N, K]`` of a stack of experts that is one tensor in the checkpoint; None: it is not."""
        return None

    def scale_option(self, name: str) -> str:
        """The option of a scheme for the dtype of the tensor called ``name``. Raises ValueError for other dtypes."""
        entry = self.checkpoint.entries.get(name)
        if entry is None:
            raise ValueError(f"the files lack {name}; copy the directory again")
        if entry.dtype not in SCALE_OPTIONS:
            raise ValueError(f"{name} is {entry.dtype}, expected one of {', '.join(map(str, SCALE_OPTIONS))}")
        return SCALE_OPTIONS[entry.dtype]

    def cache_names(self, attention: str) -> tuple[str, str] | None:
        """Names of the static scales of keys and values of an attention module; None: its cache is not quantized."""
        return None

    def unknown_cache(self) -> bool:
        """Whether the config has a quantized KV cache that lowbit does not read."""
        return False

    def remedy(self, name: str) -> str:
        """Advice for a tensor that the model does not use."""
        return "it is of another model, or of a layout that lowbit does not read"


def quantization_of(path: Path) -> dict[str, Any]:
    """The quantization config of a directory; empty if there is none, or it is damaged."""
    try:
        config = read_json(path / CONFIG).get("quantization_config")
        if config is None and (path / MODELOPT_CONFIG).exists():
            config = read_json(path / MODELOPT_CONFIG).get("quantization")
            config = {"quant_method": "modelopt", **config} if isinstance(config, dict) else None
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def positive(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer of an untrusted config. Raises ValueError."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
        raise ValueError(f"{key} is {shown(value)}, expected a positive integer")
    return value
