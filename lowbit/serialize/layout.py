"""What a saved directory is made of, for the side that writes it and the side that reads it."""

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

__all__ = [
    "CONFIG",
    "DTYPES",
    "FORMAT",
    "REBUILD",
    "VERSION",
    "WEIGHTS",
    "in_features",
    "our_config",
    "rebuild_of",
]

FORMAT, VERSION = "lowbit-model", 1

#: The config's name.
CONFIG = "lowbit.json"

#: What the name of a weights' file looks like: of ``save_model``, and of ``quantize_files`` as transformers names them.
WEIGHTS = re.compile(r"(weights-[0-9a-f]{16}|model-\d{5}-of-\d{5})\.safetensors")


#: What a weight may have been before it was quantized.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Rebuild(NamedTuple):
    """How a model is described in the config, as JSON, and built again from that, with or without weights."""

    describe: Callable[[Any], dict[str, Any]]
    build: Callable[[dict[str, Any]], nn.Module]


def _build_gpt(described: dict[str, Any]) -> nn.Module:
    gpt = import_module("lowbit.demo.gpt")
    model: nn.Module = gpt.GPT(gpt.GPTConfig(**described))
    return model


#: Models that ``load_model`` can build by itself, by full class name.
REBUILD: dict[str, Rebuild] = {
    "lowbit.demo.gpt.GPT": Rebuild(lambda model: asdict(model.config), _build_gpt),
    "transformers": Rebuild(huggingface.describe, huggingface.build),
}


def rebuild_of(model: nn.Module) -> str | None:
    """The row of ``REBUILD`` that describes ``model``, if there is one."""
    if huggingface.is_pretrained(model):
        return "transformers"
    name = f"{type(model).__module__}.{type(model).__qualname__}"
    return name if name in REBUILD else None


def our_config(directory: Path) -> tuple[Path, dict[str, Any]] | None:
    """The config that ``save_model`` wrote to ``directory``, and its path; None where there is none.

    Raises ValueError for one that is damaged or of something else.
    """
    path = directory / CONFIG
    try:
        config = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if config.get("format") != FORMAT:
        raise ValueError(f"{path} was not written by lowbit.save_model; give, or save to, another directory")
    return path, config


def in_features(layer: nn.Module) -> list[int]:
    """The columns of each matrix of a quantized layer, which bytes of narrow codes do not tell."""
    return [int(inner.in_features) for inner in layer.modules() if isinstance(inner, QuantLinear | PackedLinear)]
