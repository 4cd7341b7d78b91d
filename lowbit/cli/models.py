"""Saved models as commands read them, and text as these models read it."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.serialize import load_model
from lowbit.serialize.huggingface import from_directory, is_directory
from lowbit.serialize.layout import CONFIG, our_config

__all__ = ["Dtype", "cast_", "load", "windows"]


class Dtype(str, Enum):
    """What the weights that stay in high precision are kept in."""

    auto = "auto"
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


_DTYPES = {Dtype.bf16: torch.bfloat16, Dtype.fp16: torch.float16, Dtype.fp32: torch.float32}


def load(directory: Path) -> nn.Module:
    """The model in ``directory``, whoever saved it. Raises: FileNotFoundError, ValueError, ImportError."""
    if our_config(directory) is not None:
        return load_model(directory).eval()
    if is_directory(directory):
        return from_directory(directory)
    raise FileNotFoundError(
        f"{directory} is no saved model: {directory / CONFIG} does not exist, and no config.json of transformers; give "
        "another directory, such as out/demo/model"
    )


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

    Raises ValueError for a text that fills no window, and for a directory without a tokenizer.
    """
    try:
        words = text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{text} is not UTF-8 text (byte {error.start}); convert it: iconv -t utf-8") from None
    tokens = torch.tensor(_tokens(directory, words), dtype=torch.int64)
    found = min(len(tokens) // length, count)
    if found < 1:
        raise ValueError(f"{text}: {len(tokens)} tokens do not fill one window of {length}; give a longer text")
    return list(tokens[: found * length].view(found, 1, length))


def _tokens(directory: Path, words: str) -> list[int]:
    ours = our_config(directory)
    if ours is not None and (ours[1].get("model") or {}).get("class") != "transformers":
        from lowbit.demo import experiment

        return list(experiment.load(directory)[1].encode(words))
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ImportError("the tokenizer of this model needs transformers; pip install transformers") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{directory} holds no tokenizer that transformers can load ({error})") from None
    return list(tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"])
