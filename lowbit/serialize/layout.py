"""The layout of a saved directory: names of files, the config's format, and models that can be rebuilt."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from lowbit.files import read_json
from lowbit.nn.linear import QuantLinear
from lowbit.nn.packed import PackedLinear
from lowbit.serialize import huggingface

__all__ = ["CONFIG", "DTYPES", "FORMAT", "REBUILD", "VERSION", "WEIGHTS", "in_features", "our_config", "rebuild_of"]

FORMAT, VERSION = "lowbit-model", 1

#: The file name of the config.
CONFIG = "lowbit.json"

#: File names of weights: from ``save_model``, or from ``quantize_files``, which names them as transformers does.
WEIGHTS = re.compile(r"(weights-[0-9a-f]{16}|model-\d{5}-of-\d{5})\.safetensors")

#: Dtypes that a weight may have before quantization.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Rebuild(NamedTuple):
    """Functions that describe a model in the config, and build it again."""

    describe: Callable[[Any], dict[str, Any]]
    """The description of a model, as JSON values."""
    build: Callable[[dict[str, Any]], nn.Module]
    """A new model from its description."""


def _build_gpt(described: dict[str, Any]) -> nn.Module:
    gpt = import_module("lowbit.demo.gpt")
    model: nn.Module = gpt.GPT(gpt.GPTConfig(**described))
    return model


#: Models that ``load_model`` can build, by full class name.
REBUILD: dict[str, Rebuild] = {
    "lowbit.demo.gpt.GPT": Rebuild(lambda model: asdict(model.config), _build_gpt),
    "transformers": Rebuild(huggingface.describe, huggingface.build),
}


def rebuild_of(model: nn.Module) -> str | None:
    """The key of ``REBUILD`` for ``model``, or None."""
    if huggingface.is_pretrained(model):
        return "transformers"
    name = f"{type(model).__module__}.{type(model).__qualname__}"
    return name if name in REBUILD else None


def our_config(directory: Path) -> tuple[Path, dict[str, Any]] | None:
    """The path and contents of ``lowbit.json``, or None. Raises ValueError if it is damaged or another program's."""
    path = directory / CONFIG
    try:
        config = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if config.get("format") != FORMAT:
        raise ValueError(f"{path} was not written by lowbit.save_model; load from, or save to, another directory")
    return path, config


def in_features(layer: nn.Module) -> list[int]:
    """The columns of each matrix of a quantized layer; the shape of packed codes does not determine them."""
    return [int(inner.in_features) for inner in layer.modules() if isinstance(inner, QuantLinear | PackedLinear)]
