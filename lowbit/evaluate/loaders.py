"""How each kind of model is read from disk, called, and fed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowbit.evaluate import data, efficientnet, llama_gguf
from lowbit.evaluate.data import Wanted
from lowbit.evaluate.tasks import Batch
from lowbit.recipes import Recipe
from lowbit.serialize import load_model
from lowbit.serialize.huggingface import is_quantized, require_whole
from lowbit.serialize.layout import our_config

__all__ = ["Loaded", "causal", "config_of", "demo_gpt", "efficientnet_lite0", "held", "hugging_face", "smollm2"]


class Loaded(NamedTuple):
    """A model in eval mode, in fp32 where it is not quantized; how it is called on ``Batch.inputs``, and what it is
    evaluated on.

    ``generate``: yields after each new token, with a KV cache; None where a model writes no text.
    """

    model: nn.Module
    task: str
    call: Callable[[nn.Module, Any], Tensor]
    batches: list[Batch]
    origin: str
    generate: Callable[[nn.Module, Tensor, int], Iterator[Any]] | None = None


def smollm2(path: Path, wanted: Wanted) -> Loaded:
    """SmolLM2 from its GGUF file."""
    text = data.require(wanted, "smollm2")
    model, encode = llama_gguf.load(path)
    return _language_model(model, encode(data.read(text)), wanted, text.name)


def hugging_face(directory: Path, wanted: Wanted) -> Loaded:
    """A model of transformers, which ``save_pretrained`` or ``save_model`` wrote, quantized or not: perplexity of a
    causal language model, else embeddings of texts.

    Raises: ValueError for a model that reads anything but text, and for a checkpoint that lacks some of its tensors.
    """
    from transformers import AutoTokenizer

    source, model = str(directory), _pretrained(directory)
    if model.main_input_name != "input_ids":
        raise ValueError(
            f"{directory} holds a {type(model).__name__}, which reads {model.main_input_name}; lowbit evaluate "
            "reads models of text from directories"
        )
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    if causal(directory):
        text = data.require(wanted, str(directory))
        tokens = tokenizer(data.read(text), add_special_tokens=False, verbose=False)["input_ids"]
        return _language_model(model, tokens, wanted, text.name)
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
    return Loaded(model.eval(), "logits", lambda of, inputs: of(inputs), batches, origin)


def demo_gpt(directory: Path, wanted: Wanted) -> Loaded:
    """The GPT that ``lowbit train`` wrote, on what its run held out of training, or on the user's text."""
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
        raise ValueError(f"{directory} has no settings.json of lowbit train beside it; give a text with --text FILE")
    batches = data.windows(tokens, wanted, min(data.WINDOW, model.config.context), origin)
    write = lambda of, prompt, count: generate(of, prompt, count, temperature=0)  # type: ignore[arg-type]
    return Loaded(model.float(), "perplexity", lambda of, inputs: of(inputs), batches, origin, write)


def config_of(directory: Path) -> dict[str, Any]:
    """``config.json`` of a model's directory. Raises: ValueError where there is none or it is no JSON object."""
    path = directory / "config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}); give a directory that transformers can load") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path} holds no JSON object; give a directory that transformers can load")
    return settings


def causal(directory: Path) -> bool:
    """Whether a directory's model predicts the next token, as its class says."""
    ours = our_config(directory)
    names = config_of(directory).get("architectures") if ours is None else [ours[1]["model"]["config"]["architecture"]]
    return any("CausalLM" in str(name) or "LMHeadModel" in str(name) for name in names or [])


def held(directory: Path) -> tuple[Recipe, ...]:
    """The recipes of the quantized layers of a saved model, each once; none of a model in high precision.

    Raises: ValueError for a damaged config.
    """
    ours = our_config(directory)
    if ours is not None:
        path, rows = ours[0], (ours[1].get("layers") or {}).values()
    else:
        path, config = directory / "config.json", config_of(directory)
        rows = config["quantization_config"].get("layers") if is_quantized(config) else ()
    try:
        return tuple(dict.fromkeys(Recipe.from_dict(row["recipe"]) for row in rows))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}); save the model again") from None


# -- models of transformers ------------------------------------------------------------------------------------------
def _pretrained(directory: Path) -> Any:
    """The model in ``directory``, in fp32 and eval mode, with every tensor from its files."""
    if our_config(directory) is not None:
        saved: Any = load_model(directory)
        saved.float().eval()
        return saved if causal(directory) else saved.base_model  # as AutoModel, without the head
    from transformers import AutoModel, AutoModelForCausalLM

    if is_quantized(config_of(directory)):
        import_module("lowbit.integrations.transformers")  # so that transformers knows the layers
    model, info = (AutoModelForCausalLM if causal(directory) else AutoModel).from_pretrained(
        str(directory), local_files_only=True, dtype=torch.float32, output_loading_info=True
    )
    require_whole(directory, model, info["missing_keys"])
    return model.eval()


# -- calls -----------------------------------------------------------------------------------------------------------
def _language_model(model: nn.Module, tokens: list[int], wanted: Wanted, origin: str) -> Loaded:
    """A causal language model of transformers. Windows are no longer than its positions."""
    positions = getattr(model.config, "max_position_embeddings", None) or data.WINDOW
    batches = data.windows(tokens, wanted, min(data.WINDOW, positions), origin)
    return Loaded(model, "perplexity", _logits, batches, origin, _greedy)


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


def _greedy(model: nn.Module, prompt: Tensor, count: int) -> Iterator[None]:
    """Yield after each of ``count`` new tokens, each the likeliest."""
    cache, tokens = None, prompt
    for _ in range(count):
        answer = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, tokens = answer.past_key_values, answer.logits[:, -1:].argmax(-1)
        yield


def _embed(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The mean of the last hidden states of each text's tokens [B, D]."""
    hidden: Tensor = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None].to(hidden.dtype)
    return (hidden * mask).sum(1) / mask.sum(1)
