"""Writes a model of transformers as a GGUF file, which llama.cpp runs. Codes and scales are unchanged."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowbit.convert.engine import quantized_layers
from lowbit.interop.files import Refusal, refuse_adapters, require_library
from lowbit.interop.gguf.architectures import Architecture, architecture_of, head_dim, llama3_factors, rope_of
from lowbit.interop.gguf.blocks import BLOCK_TYPES, block_type, to_blocks
from lowbit.interop.gguf.container import Entry, write_file
from lowbit.interop.gguf.names import IN_FP32, TensorNames, parts_of
from lowbit.interop.gguf.vocabulary import vocabulary
from lowbit.interop.joining import rearranged, rows
from lowbit.models.check import uncompiled
from lowbit.models.names import plain_name
from lowbit.models.ties import storage_key
from lowbit.nn.base import kind
from lowbit.nn.experts import QuantExperts
from lowbit.recipes import Recipe
from lowbit.report import Report, report_on
from lowbit.serialize import huggingface
from lowbit.tensor.quantized import Quantized

__all__ = ["refuses", "write"]

#: Types of float matrices.
_FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}

#: The nearest recipe, by the bits of the weight's format.
_NEAREST = {2: "q4_0", 3: "q4_0", 4: "q4_0", 5: "q5_0", 6: "q6_k", 8: "q8_0"}


def refuses(recipe: Recipe) -> Refusal | None:
    """Why weights of ``recipe`` cannot be written; None if they can. llama.cpp quantizes inputs in its own way."""
    if recipe.rotation is not None:
        return Refusal(
            "its weights are rotated by a Hadamard transform, and llama.cpp would not rotate the inputs", "q4_0"
        )
    if recipe.reordered:
        return Refusal("its columns are in the order of activations; dequantize and quantize the model again", "q4_0")
    if block_type(recipe.weight) is None:
        types = ", ".join(f"{row.name} ({row.scheme})" for row in BLOCK_TYPES.values())
        nearest = (
            "nvfp4-weight-only" if recipe.weight.format.name == "fp4_e2m1" else _NEAREST[recipe.weight.format.bits]
        )
        return Refusal(f"GGUF has no block type for weights in {recipe.weight}; its types are {types}", nearest)
    return None


@torch.no_grad()
def write(model: nn.Module, path: str | Path, tokenizer: Any = None) -> Report:
    """Write a model of transformers for llama.cpp.

    Quantized layers keep codes and scales. Other matrices keep their dtype; vectors are in fp32. Tensors are made and
    written one at a time. The file gets its name when it is complete.

    Args:
        model: A model of a class in ``ARCHITECTURES``, quantized or not.
        path: The file.
        tokenizer: A fast tokenizer of transformers, a ``tokenizers.Tokenizer``, or a directory with
            ``tokenizer.json``. None: the file has no vocabulary, so programs must pass token ids.

    Returns:
        The report, with a row for each quantized layer.

    Raises:
        ImportError: The package gguf is not installed.
        ValueError: llama.cpp has no such model, a layer has weights that GGUF does not have, or llama.cpp does not
            have the tokenizer.
        OSError: The file cannot be written, or the disk has too little space.
    """
    gguf, model, path = require_library("gguf"), uncompiled(model), Path(path)
    refuse_adapters(model, "lowbit.interop.gguf.write_adapters(model, path)")
    config = getattr(model, "config", None)
    if config is None or not huggingface.is_pretrained(model):
        raise ValueError(
            f"GGUF files describe models by their config in transformers, and this is a {type(model).__name__}; "
            f"use lowbit.save_model"
        )
    architecture = architecture_of(model)
    tensors = list(_tensors(gguf, model, architecture))
    words = None if tokenizer is None else vocabulary(tokenizer, _vocabulary_size(config, tensors), _special(config))
    keys = {
        "general.type": "model",
        **({"general.name": str(config._name_or_path)} if getattr(config, "_name_or_path", None) else {}),
        "general.file_type": _file_type(gguf, tensors),
        "general.quantization_version": 2,
        **_metadata(architecture, config),
        **_words(words),
    }
    write_file(gguf, path, architecture.name, keys, tensors)
    report = report_on("export", model, quantized_layers(model), f"written to {path}")
    return replace(report, notes=_notes(model))


# -- metadata ----------------------------------------------------------------------------------------------------------
def _metadata(architecture: Architecture, config: Any) -> dict[str, Any]:
    keys = {key: getattr(config, attribute) for key, attribute in architecture.keys.items()}
    if keys.get("attention.head_count_kv", 0) is None:
        keys["attention.head_count_kv"] = keys["attention.head_count"]
    keys |= architecture.more(config)
    return {key if key.startswith("tokenizer.") else f"{architecture.name}.{key}": keys[key] for key in keys}


def _special(config: Any) -> dict[str, int]:
    """The ids of the config's special tokens, by llama.cpp's names; of several the first."""
    ids = {}
    for role, name in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")):
        number = getattr(config, name, None)
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int) and 0 <= number < config.vocab_size:
            ids[role] = number
    return ids


def _vocabulary_size(config: Any, tensors: list[Entry]) -> int:
    return next((tensor.shape[0] for tensor in tensors if tensor.name == "token_embd.weight"), int(config.vocab_size))


def _file_type(gguf: Any, tensors: list[Entry]) -> int:
    """The type of most elements, as llama.cpp names files."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        sizes[tensor.type] = sizes.get(tensor.type, 0) + torch.Size(tensor.shape).numel()
    most = max(sizes, key=lambda name: sizes[name])
    names = {"F32": "ALL_F32", "Q4_K": "MOSTLY_Q4_K_M", "Q5_K": "MOSTLY_Q5_K_M", "MXFP4": "MOSTLY_MXFP4_MOE"}
    kind = getattr(gguf.LlamaFileType, names.get(most, f"MOSTLY_{most}"), gguf.LlamaFileType.GUESSED)
    return int(kind)


def _words(words: Any) -> dict[str, Any]:
    if words is None:
        return {"tokenizer.ggml.model": "no_vocab"}
    return {f"tokenizer.{key}": value for key, value in words.keys.items()}


# -- tensors -----------------------------------------------------------------------------------------------------------
def _tensors(gguf: Any, model: nn.Module, architecture: Architecture) -> Iterator[Entry]:
    """All tensors of the file, each once."""
    config: Any = model.config
    names = TensorNames(gguf, model, architecture)
    seen: set[Any] = set()
    quantized = quantized_layers(model)
    inside = tuple(f"{name}." for name in quantized)
    for path, layer in quantized.items():
        for name, weight in _matrices(plain_name(path), layer):
            stored = names.of(name)
            if stored is not None and _is_new(weight.codes, seen):
                yield from _quantized(stored, name, weight, layer, architecture, config)
        stored = names.of(f"{path}.bias") if getattr(layer, "bias", None) is not None else None
        if stored is not None:
            yield _float(stored, layer.bias, architecture, config)
    for path, module in model.named_modules(remove_duplicate=False):
        if f"{path}.".startswith(inside):
            continue
        for name, value in (*module.named_parameters(path, False), *_buffers(module, path)):
            parts = [(names.of(part), matrix) for part, matrix in parts_of(name, module, value)]
            if parts[0][0] is not None and _is_new(value, seen):
                yield from (_float(str(stored), matrix, architecture, config) for stored, matrix in parts)
    yield from _rope_factors(config)


def _buffers(module: nn.Module, path: str) -> list[tuple[str, Tensor]]:
    lost = module._non_persistent_buffers_set
    return [(f"{path}.{name}", b) for name, b in module._buffers.items() if b is not None and name not in lost]


def _is_new(value: Tensor, seen: set[Any]) -> bool:
    """Whether no tensor with this storage was written; tied tensors are written once."""
    if value.is_meta:
        raise ValueError("the model has tensors on the meta device, without values; load it first")
    key = storage_key(value)
    new = key not in seen
    seen.add(key)
    return new


def _matrices(path: str, layer: Any) -> Iterator[tuple[str, Any]]:
    """Names and weights of a quantized layer's matrices; a stack for those of experts."""
    if isinstance(layer, QuantExperts):
        yield from _stacked_experts(path, layer)
        return
    inner = getattr(layer, "linear", layer)
    if kind(inner) not in ("quantized", "packed"):
        raise ValueError(
            f"layer {path!r} is a {type(layer).__name__}, which GGUF files cannot have; call lowbit.qat.convert_ or "
            f"lowbit.dequantize_ first"
        )
    yield f"{path}.weight", inner.weight


def _stacked_experts(path: str, layer: QuantExperts) -> Iterator[tuple[str, Any]]:
    experts: tuple[Any, Any] = layer.gate_up, layer.down
    firsts, downs = ([one.weight for one in layers] for layers in experts)
    if any(one.bias is not None for layers in experts for one in layers):
        raise ValueError(f"{path} has experts with biases, which lowbit does not write as GGUF")
    both = firsts[0].shape[0]
    yield f"{path}.gate_proj", _Stack([rows(one, 0, both // 2) for one in firsts])
    yield f"{path}.up_proj", _Stack([rows(one, both // 2, both) for one in firsts])
    yield f"{path}.down_proj", _Stack(downs)


class _Stack(NamedTuple):
    """Matrices of one scheme, one per expert."""

    weights: list[Quantized]

    @property
    def codes(self) -> Tensor:
        return self.weights[0].codes

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.weights), *self.weights[0].shape)

    @property
    def scheme(self) -> Any:
        return self.weights[0].scheme


def _rope_factors(config: Any) -> Iterator[Entry]:
    """llama3's factors of frequencies, which llama.cpp reads from a tensor."""
    rope = rope_of(config)
    if rope.get("rope_type") == "llama3":
        factors = llama3_factors(rope, head_dim(config))
        yield Entry("rope_freqs.weight", "F32", tuple(factors.shape), lambda: factors)


# -- one tensor --------------------------------------------------------------------------------------------------------
def _quantized(
    name: str, path: str, weight: Any, layer: Any, architecture: Architecture, config: Any
) -> Iterator[Entry]:
    """The tensors of a quantized matrix or stack."""
    refusal = refuses(layer.recipe)
    if refusal is not None:
        raise ValueError(
            f"layer {path!r}, recipe {layer.recipe.name!r}: {refusal.why}; the nearest recipe that works is "
            f"{refusal.nearest!r}"
        )
    row = block_type(weight.scheme)
    assert row is not None
    if row.scheme.global_scale == "tensor" and not architecture.scales:
        raise ValueError(
            f"layer {path!r}, recipe {layer.recipe.name!r}: llama.cpp does not multiply the global scale of NVFP4 in "
            f"{architecture.name} models, and computes NaN; the nearest recipe that works is 'mxfp4-weight-only'"
        )
    if weight.shape[-1] % row.size:
        raise ValueError(
            f"layer {path!r} has {weight.shape[-1]} columns, and {row.name} takes multiples of {row.size}; quantize "
            f"it with 'q8_0' or 'q4_0', or leave it out with skip"
        )
    changes = [change for change in architecture.changes if re.fullmatch(change.pattern, name)]

    def changed(matrix: Quantized) -> Tensor:
        for change in changes:
            if change.values is not None:
                raise ValueError(f"layer {path!r} must be exported without quantization")
            if change.rows is not None:
                matrix = rearranged(matrix, change.rows(matrix.shape[0], config))
        return to_blocks(matrix.cpu())

    if isinstance(weight, _Stack):
        yield Entry(name, row.name, weight.shape, lambda: torch.stack([changed(one) for one in weight.weights]))
    else:
        yield Entry(name, row.name, tuple(weight.shape), lambda: changed(weight))
    if row.scheme.global_scale == "tensor":
        scale = torch.cat([one.global_scale.reshape(1) for one in getattr(weight, "weights", [weight])]).float().cpu()
        if not bool(torch.isfinite(scale).all()):
            raise ValueError(f"layer {path!r} has a global scale that is not finite; its weights had NaN or infinity")
        yield Entry(name.removesuffix("weight") + "scale", "F32", tuple(scale.shape), lambda: scale)


def _float(name: str, value: Tensor, architecture: Architecture, config: Any) -> Entry:
    dtype = value.dtype if value.ndim > 1 and not IN_FP32.fullmatch(name) else torch.float32
    if dtype not in _FLOATS:
        raise ValueError(f"{name} has dtype {value.dtype}; expected one of {', '.join(map(str, _FLOATS))}")

    def made() -> Tensor:
        changed = value.detach()
        for change in architecture.changes:
            if re.fullmatch(change.pattern, name):
                if change.rows is not None:
                    changed = changed[change.rows(len(changed), config)]
                if change.values is not None:
                    changed = change.values[0](changed.float())
        changed = changed.to(device="cpu", dtype=dtype).contiguous()
        return changed if dtype == torch.float32 else changed.view(torch.uint8)

    return Entry(name, _FLOATS[dtype], tuple(value.shape), made)


def _notes(model: nn.Module) -> tuple[str, ...]:
    recipes = {layer.recipe.name: layer.recipe for layer in quantized_layers(model).values()}
    inputs = [name for name, recipe in recipes.items() if recipe.input is not None]
    if not inputs:
        return ()
    return (f"{', '.join(inputs)}: llama.cpp quantizes inputs in its own way, to 8 bits in groups of 32 or more",)
