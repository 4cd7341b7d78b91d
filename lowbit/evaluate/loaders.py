"""Loaders for each kind of model: the model, its data, and functions to call it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowbit.convert.dequantize import dequantize_
from lowbit.evaluate import data, efficientnet
from lowbit.evaluate.data import Wanted
from lowbit.evaluate.tasks import Batch
from lowbit.interop import format_of, gguf, load_model, tokenizer_of
from lowbit.recipes import Recipe
from lowbit.serialize.huggingface import is_quantized, require_whole
from lowbit.serialize.layout import our_config

__all__ = [
    "Loaded", "causal", "config_of", "decoded_gguf", "demo_gpt", "efficientnet_lite0", "held", "hugging_face",
    "smollm2", "token_ids",
]  # fmt: skip


class Loaded(NamedTuple):
    """A loaded model with its evaluation data."""

    model: nn.Module
    """The model in eval mode; unquantized parts are in fp32."""
    task: str
    """A key of ``TASKS``."""
    call: Callable[[nn.Module, Any], Tensor]
    """Function of the model and ``Batch.inputs``."""
    batches: list[Batch]
    origin: str
    """Source of the data, for the report."""
    generate: Callable[[nn.Module, Tensor, int], Iterator[Any]] | None = None
    """Function that yields after each generated token, with a KV cache; None if the model generates no text."""


def smollm2(path: Path, wanted: Wanted) -> Loaded:
    """SmolLM2 from its GGUF file."""
    text = data.require(wanted, "smollm2")
    model, tokenizer = decoded_gguf(path)
    return _language_model(model, token_ids(tokenizer, data.read(text)), wanted, text.name)


def decoded_gguf(path: Path) -> tuple[nn.Module, Any]:
    """The model of a GGUF file with decoded weights in fp32, and its tokenizer."""
    model = gguf.read(path, torch.float32)
    dequantize_(model)
    return model, gguf.tokenizer(path)


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text, without special tokens."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def hugging_face(directory: Path, wanted: Wanted) -> Loaded:
    """A model of transformers from ``save_pretrained``, ``save_model`` or another program, quantized or not.

    The task is perplexity for causal language models, and embeddings for other models.

    Raises:
        ValueError: The model's input is not text, or the checkpoint lacks tensors.
    """
    model = _pretrained(directory)
    if model.main_input_name != "input_ids":
        raise ValueError(
            f"{directory} has a {type(model).__name__}, whose input is {model.main_input_name}; lowbit evaluate only "
            "supports text models"
        )
    tokenizer = tokenizer_of(directory)
    if causal(directory):
        text = data.require(wanted, str(directory))
        return _language_model(model, token_ids(tokenizer, data.read(text)), wanted, text.name)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    options = {"padding": True, "truncation": True, "max_length": data.LONGEST, "return_tensors": "pt"}
    batches = data.text_batches(wanted, lambda texts: tokenizer(texts, **options))
    origin = wanted.text.name if wanted.text else "Python's documentation"
    return Loaded(model, "embeddings", _embed, batches, origin)


def efficientnet_lite0(path: Path, wanted: Wanted) -> Loaded:
    """EfficientNet-Lite0 from its checkpoint."""
    model = efficientnet.EfficientNetLite0()
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    batches, origin = data.photograph_batches(wanted, efficientnet.SIDE, efficientnet.MEAN, efficientnet.SCALE)
    return Loaded(model.eval(), "logits", lambda model, inputs: model(inputs), batches, origin)


def demo_gpt(directory: Path, wanted: Wanted) -> Loaded:
    """The GPT of ``lowbit train``, on its held-out text or on the user's text."""
    from lowbit.demo import experiment
    from lowbit.demo.gpt import generate

    model, tokenizer = experiment.load(directory)
    if wanted.text is not None:
        tokens, origin = tokenizer.encode(data.read(wanted.text)).ids, wanted.text.name
    elif (directory.parent / "settings.json").exists():
        corpus = experiment.RunSettings.load(directory.parent).corpus()
        training = wanted.part == "calibration"
        tokens, origin = (corpus.train if training else corpus.held_out).tolist(), f"held out of {corpus.origin}"
    else:
        raise ValueError(f"{directory} has no settings.json of lowbit train next to it; pass a text with --text FILE")
    batches = data.windows(tokens, wanted, min(data.WINDOW, model.config.context), origin)
    write = lambda model, prompt, count: generate(model, prompt, count, temperature=0)  # type: ignore[arg-type]
    return Loaded(model.float(), "perplexity", lambda model, inputs: model(inputs), batches, origin, write)


def config_of(directory: Path) -> dict[str, Any]:
    """The contents of ``config.json``. Raises ValueError if there is none or it is not a JSON object."""
    path = directory / "config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}); pass a Hugging Face model directory") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path} is not a JSON object; pass a Hugging Face model directory")
    return settings


def causal(directory: Path) -> bool:
    """Whether the model is a causal language model, by the name of its class."""
    row = format_of(directory)
    if row is not None:
        return _is_causal(type(row.contents(directory).model).__name__)
    ours = our_config(directory)
    names = config_of(directory).get("architectures") if ours is None else [ours[1]["model"]["config"]["architecture"]]
    return any(_is_causal(str(name)) for name in names or [])


def _is_causal(name: str) -> bool:
    return "CausalLM" in name or "LMHeadModel" in name


def held(directory: Path) -> tuple[Recipe, ...]:
    """The distinct recipes of a saved model; empty if it is not quantized. Raises ValueError for a damaged config."""
    row, ours = format_of(directory), our_config(directory)
    if row is not None:
        return tuple(dict.fromkeys(row.contents(directory).recipes.values()))
    if ours is not None:
        path, rows = ours[0], (ours[1].get("layers") or {}).values()
    else:
        path, config = directory / "config.json", config_of(directory)
        rows = config["quantization_config"].get("layers") if is_quantized(config) else ()
    try:
        return tuple(dict.fromkeys(Recipe.from_dict(row["recipe"]) for row in rows))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}); save the model again") from None


# -- Hugging Face models ---------------------------------------------------------------------------------------------
def _pretrained(directory: Path) -> Any:
    """The model in fp32 and eval mode. Raises ValueError for missing tensors."""
    if format_of(directory) is not None or our_config(directory) is not None:
        saved: Any = load_model(directory)
        saved.float().eval()
        return saved if causal(directory) else saved.base_model  # without head, as from AutoModel
    from transformers import AutoModel, AutoModelForCausalLM

    if is_quantized(config_of(directory)):
        import_module("lowbit.integrations.transformers")  # registers the quantized layers
    model, info = (AutoModelForCausalLM if causal(directory) else AutoModel).from_pretrained(
        str(directory), local_files_only=True, dtype=torch.float32, output_loading_info=True
    )
    require_whole(directory, model, info["missing_keys"])
    return model.eval()


# -- calls -----------------------------------------------------------------------------------------------------------
def _language_model(model: nn.Module, tokens: list[int], wanted: Wanted, origin: str) -> Loaded:
    """A Hugging Face causal language model, with windows no longer than its maximum positions."""
    positions = getattr(model.config, "max_position_embeddings", None) or data.WINDOW
    batches = data.windows(tokens, wanted, min(data.WINDOW, positions), origin)
    return Loaded(model, "perplexity", _logits, batches, origin, _greedy)


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


def _greedy(model: nn.Module, prompt: Tensor, count: int) -> Iterator[None]:
    """Greedy generation; yields after each of ``count`` tokens."""
    cache, tokens = None, prompt
    for _ in range(count):
        output = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, tokens = output.past_key_values, output.logits[:, -1:].argmax(-1)
        yield


def _embed(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The mean of the last hidden states over each text's tokens, [B, D]."""
    hidden: Tensor = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None].to(hidden.dtype)
    return (hidden * mask).sum(1) / mask.sum(1)
