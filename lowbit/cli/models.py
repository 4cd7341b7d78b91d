"""Arguments that the commands share: saved models, recipes, methods, dtypes and tokenized text."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.calibrate.choice import choose
from lowbit.convert import dequantize_
from lowbit.convert.engine import quantized_layers
from lowbit.datafree import DATA_FREE, DEFAULT
from lowbit.evaluate.data import read
from lowbit.interop import KINDS, format_of, load_model, tokenizer_of
from lowbit.recipes import RECIPES, Recipe, recipe
from lowbit.serialize.huggingface import from_directory, is_directory
from lowbit.serialize.layout import our_config
from lowbit.user_warnings import warn

__all__ = [
    "DEFAULT_METHOD", "MODEL", "Dtype", "cast_", "load", "load_float", "methods_in", "recipe_in", "tokenizer_in",
    "windows",
]  # fmt: skip

#: The paths that commands take, for help texts and messages.
MODEL = f"a Hugging Face model directory (config.json), a directory from lowbit quantize or lowbit.save_model, {KINDS}"

#: The default methods, for help texts.
DEFAULT_METHOD = f"with --text guided-gptq; without, {DEFAULT}"


class Dtype(str, Enum):
    """Dtype of the weights that are not quantized."""

    auto = "auto"
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


_DTYPES = {Dtype.bf16: torch.bfloat16, Dtype.fp16: torch.float16, Dtype.fp32: torch.float32}


def load(directory: Path) -> nn.Module:
    """Load a model that lowbit, transformers or another program saved.

    Raises:
        FileNotFoundError: There is no model.
        ValueError: The model is damaged or cannot be built.
        ImportError: transformers is needed and not installed.
    """
    if format_of(directory) is not None or _is_ours(directory):
        return load_model(directory).eval()
    return from_directory(directory)


def _is_ours(directory: Path) -> bool:
    """Whether lowbit, not transformers, saved the model. Raises FileNotFoundError if there is no model."""
    if our_config(directory) is not None:
        return True
    if is_directory(directory):
        return False
    why = "is not a saved model" if directory.exists() else "does not exist"
    raise FileNotFoundError(f"{directory} {why}; expected {MODEL}")


def load_float(path: Path, dtype: Dtype) -> tuple[nn.Module, str | None]:
    """A model to quantize, cast to ``dtype``, and a note if its weights were quantized in another program's format.

    Raises:
        ValueError: As for ``load``, or lowbit has already quantized the model.
        FileNotFoundError, ImportError: As for ``load``.
    """
    model, row = load(path), format_of(path)
    note = None
    if row is not None:
        types = row.contents(path).quantized
        if quantized_layers(model):
            dequantize_(model)
        if types is not None:
            note = f"the weights were decoded from {types} first; a model quantized from the original is more accurate"
    elif already := {layer.recipe.name for layer in quantized_layers(model).values()}:
        raise ValueError(
            f"{path} holds a model that is already quantized ({', '.join(sorted(already))}); pass the original model"
        )
    cast_(model, dtype)
    return model, note


def methods_in(method: str | None, text: Path | None) -> list[str] | None:
    """The names in ``--method``; None without the option. Raises ValueError for an unknown name or missing text."""
    if method is None:
        return None
    names = [name.strip() for name in method.split(",")]
    weights, _, transforms, _ = choose(names)
    data_methods = [transform.name for transform in transforms]
    if weights is not None and weights.need != "nothing":
        data_methods.append(weights.name)
    if data_methods and text is None:
        raise ValueError(
            f"--method {data_methods[0]} needs data; pass --text FILE, or use one of {', '.join(DATA_FREE)}"
        )
    return names


def recipe_in(name: str, text: Path | None, calibrated: bool = False) -> Recipe:
    """The recipe called ``name``.

    Args:
        name: Name of a recipe, with options such as ``int4-weight-only:group32``.
        text: The file of ``--text``.
        calibrated: Whether ``--calibration`` provides static scales.

    Raises:
        ValueError: The name is unknown, or the recipe needs data and the command has none.
    """
    chosen = recipe(name)
    if chosen.static and text is None and not calibrated:
        raise ValueError(
            f"recipe {chosen.name!r} needs data for its static input scales; pass --text FILE, or use one of "
            f"{', '.join(row.name for row in RECIPES.values() if row.dynamic)}"
        )
    return chosen


def cast_(model: nn.Module, dtype: Dtype) -> None:
    """Cast the parameters, but no buffers: rotary embeddings compute their tables in fp32."""
    for parameter in model.parameters():
        if not parameter.is_floating_point():
            continue
        if dtype is not Dtype.auto:
            parameter.data = parameter.data.to(_DTYPES[dtype])
        elif parameter.dtype == torch.float32:
            parameter.data = parameter.data.bfloat16()
    config: Any = getattr(model, "config", None)
    if hasattr(config, "dtype"):  # Hugging Face configs store the dtype of the weights
        config.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)


def windows(directory: Path, text: Path, count: int, length: int) -> list[Tensor]:
    """The first ``count`` windows ``[1, length]`` of a text file, tokenized by the model's own tokenizer.

    Raises:
        ValueError: The text cannot be read or is too short, or the directory has no tokenizer.
        FileNotFoundError: The directory has no model.
    """
    tokens = torch.tensor(_tokens(directory, read(text)), dtype=torch.int64)
    available = min(len(tokens) // length, count)
    if available < 1:
        raise ValueError(f"{text}: {len(tokens)} tokens do not fill one window of {length}; use a longer text")
    return list(tokens[: available * length].view(available, 1, length))


def _tokens(directory: Path, text: str) -> list[int]:
    ours = None if format_of(directory) is not None or not _is_ours(directory) else our_config(directory)
    if ours is not None and (ours[1].get("model") or {}).get("class") != "transformers":
        from lowbit.demo import experiment

        return list(experiment.load(directory)[1].encode(text).ids)
    try:
        tokenizer = tokenizer_of(directory)
    except ImportError:
        raise ImportError("the tokenizer of this model needs transformers; pip install transformers") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{directory} has no tokenizer that transformers can load ({error})") from None
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def tokenizer_in(path: Path) -> Any:
    """The tokenizer next to a saved model: its directory, or that of a file of another program.

    None, with a warning for a file, if there is none.
    """
    if path.is_dir():
        return path if (path / "tokenizer.json").exists() else None
    try:
        return tokenizer_of(path)
    except ValueError as error:
        warn(f"the result gets no tokenizer: {error}")
        return None
