"""What a saved directory is made of, for the side that writes it and the side that reads it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

__all__ = ["CONFIG", "FORMAT", "REBUILD", "VERSION", "identity", "safetensors", "sha256"]

FORMAT, VERSION = "lowbit-model", 1
CONFIG = "config.json"


class Rebuild(NamedTuple):
    """How a model of ours is described in ``config.json``, and built again from that."""

    describe: Callable[[Any], dict[str, Any]]
    build: Callable[[dict[str, Any]], nn.Module]


def _build_gpt(described: dict[str, Any]) -> nn.Module:
    gpt = import_module("lowbit.demo.gpt")
    model: nn.Module = gpt.GPT(gpt.GPTConfig(**described))
    return model


_GPT = Rebuild(lambda model: asdict(model.config), _build_gpt)

#: Models that ``load_model`` can build by itself, by full class name; the last row is the name in older files.
REBUILD: dict[str, Rebuild] = {
    "lowbit.demo.gpt.GPT": _GPT,
    "lowbit.nn.transformer.GPT": _GPT,
}


def identity(value: Tensor) -> Any:
    return (value.untyped_storage()._cdata, value.storage_offset(), value.shape, value.stride(), value.dtype)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def safetensors() -> Any:
    """Imported when it is needed, so that lowbit imports on machines that load no models."""
    try:
        return import_module("safetensors.torch")
    except ImportError:
        raise ImportError("saving and loading models needs safetensors: pip install safetensors") from None
