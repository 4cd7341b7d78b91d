"""Functions and types that all formats share."""

from __future__ import annotations

import errno
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from lowbit.models.adapters import has_adapters
from lowbit.recipes import Recipe
from lowbit.sizes import amount

__all__ = ["Contents", "Refusal", "refuse_adapters", "require_library", "require_space"]

#: Bytes to leave free on the disk.
_SPARE = 64 << 20


class Contents(NamedTuple):
    """A model of another program whose weights have not been read.

    Attributes:
        model: The float model, with parameters on the meta device.
        recipes: The recipe of each layer that stays quantized when the model is read.
        decoded: Other quantized types in the file. Reading decodes them.
    """

    model: nn.Module
    recipes: dict[str, Recipe]
    decoded: tuple[str, ...]

    @property
    def quantized(self) -> str | None:
        """The names of recipes and decoded types, separated by commas; None if all weights are floats."""
        return ", ".join([*dict.fromkeys(row.name for row in self.recipes.values()), *self.decoded]) or None


class Refusal(NamedTuple):
    """Why a format cannot express a recipe, and the name of the nearest recipe that it can."""

    why: str
    nearest: str


def refuse_adapters(model: nn.Module, alone: str) -> None:
    """Raise ValueError if a model has adapters of peft that are not merged.

    Args:
        model: The model.
        alone: The call that writes the adapters alone.
    """
    if has_adapters(model):
        raise ValueError(
            f"export: this {type(model).__name__} has adapters of peft. Merge them: model = model.merge_and_unload(). "
            f"Or write the adapters alone: {alone}"
        )


def require_library(name: str) -> Any:
    """The module ``name``. Raises ImportError, with the command that installs it."""
    try:
        return import_module(name)
    except ImportError:
        raise ImportError(f"this format needs {name}: {sys.executable} -m pip install {name}") from None


def require_space(path: Path, size: int) -> None:
    """Raise OSError if the disk of ``path``, which may not exist yet, has less than ``size`` bytes free."""
    directory = next(parent for parent in path.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(directory).free
    if free < size + _SPARE:
        message = f"{directory} has {amount(free)} free, and the model needs {amount(size + _SPARE)}"
        raise OSError(errno.ENOSPC, message, str(path))
