"""Saved models as commands read them, and text as these models read it."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.calibrate.choice import choose
from lowbit.datafree import DATA_FREE, DEFAULT
from lowbit.evaluate.data import read
from lowbit.recipes import RECIPES, Recipe, recipe
from lowbit.serialize import load_model
from lowbit.serialize.huggingface import from_directory, is_directory
from lowbit.serialize.layout import CONFIG, our_config

__all__ = ["DEFAULT_METHOD", "Dtype", "cast_", "load", "methods_in", "recipe_in", "windows"]

#: What methods are where none is named, for people.
DEFAULT_METHOD = f"with --text guided-gptq; without, {DEFAULT}"


class Dtype(str, Enum):
    """What the weights that stay in high precision are kept in."""

    auto = "auto"
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


_DTYPES = {Dtype.bf16: torch.bfloat16, Dtype.fp16: torch.float16, Dtype.fp32: torch.float32}


def load(directory: Path) -> nn.Module:
    """The model in ``directory``, whoever saved it. Raises: FileNotFoundError, ValueError, ImportError."""
    return load_model(directory).eval() if _is_ours(directory) else from_directory(directory)


def _is_ours(directory: Path) -> bool:
    """Whether lowbit saved the model in ``directory``; else transformers did. Raises FileNotFoundError for neither."""
    if our_config(directory) is not None:
        return True
    if is_directory(directory):
        return False
    if directory.suffix == ".gguf":
        raise FileNotFoundError(
            f"{directory} is a GGUF file, and a directory of safetensors is needed; write one with transformers: "
            f"AutoModelForCausalLM.from_pretrained(DIRECTORY, gguf_file=...).save_pretrained(OTHER_DIRECTORY)"
        )
    raise FileNotFoundError(
        f"{directory} is no saved model: {directory / CONFIG} does not exist, and no config.json of transformers; give "
        "another directory, such as out/demo/model"
    )


def methods_in(method: str | None, text: Path | None) -> list[str] | None:
    """The names in ``--method``; None where it is not given.

    Raises ValueError for an unknown one, and for one that looks at data where there is no ``text``.
    """
    if method is None:
        return None
    names = [name.strip() for name in method.split(",")]
    weights, _, transforms, _ = choose(names)
    needing = [transform.name for transform in transforms]
    if weights is not None and weights.need != "nothing":
        needing.append(weights.name)
    if needing and text is None:
        raise ValueError(
            f"--method {needing[0]} looks at data; give a text with --text FILE, or one of {', '.join(DATA_FREE)}"
        )
    return names


def recipe_in(name: str, text: Path | None, calibrated: bool = False) -> Recipe:
    """The recipe of that name.

    Args:
        name: As users write it.
        text: The text of ``--text``.
        calibrated: Whether ``--calibration`` has the scales that come from data.

    Returns:
        The recipe.

    Raises:
        ValueError: The name is unknown, or the recipe needs data and the command has none.
    """
    found = recipe(name)
    if found.static and text is None and not calibrated:
        raise ValueError(
            f"recipe {found.name!r} needs data, from which the scales of its inputs are made; give a text with --text "
            f"FILE, or one of {', '.join(row.name for row in RECIPES.values() if row.dynamic)}"
        )
    return found


def cast_(model: nn.Module, dtype: Dtype) -> None:
    """Cast the parameters alone: tables in buffers, such as those of rotary embeddings, are computed in fp32."""
    for parameter in model.parameters():
        if not parameter.is_floating_point():
            continue
        if dtype is not Dtype.auto:
            parameter.data = parameter.data.to(_DTYPES[dtype])
        elif parameter.dtype == torch.float32:
            parameter.data = parameter.data.bfloat16()
    config: Any = getattr(model, "config", None)
    if hasattr(config, "dtype"):  # transformers' configs say what the weights are in
        config.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)


def windows(directory: Path, text: Path, count: int, length: int) -> list[Tensor]:
    """The first ``count`` windows ``[1, length]`` of the tokens of ``text``, as the model's own tokenizer makes them.

    Raises ValueError for a text that cannot be read or fills no window, and for a directory without a tokenizer;
    FileNotFoundError for one without a model.
    """
    words = read(text)
    tokens = torch.tensor(_tokens(directory, words), dtype=torch.int64)
    available = min(len(tokens) // length, count)
    if available < 1:
        raise ValueError(f"{text}: {len(tokens)} tokens do not fill one window of {length}; give a longer text")
    return list(tokens[: available * length].view(available, 1, length))


def _tokens(directory: Path, words: str) -> list[int]:
    ours = our_config(directory) if _is_ours(directory) else None
    if ours is not None and (ours[1].get("model") or {}).get("class") != "transformers":
        from lowbit.demo import experiment

        return list(experiment.load(directory)[1].encode(words).ids)
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ImportError("the tokenizer of this model needs transformers; pip install transformers") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{directory} holds no tokenizer that transformers can load ({error})") from None
    return list(tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"])
