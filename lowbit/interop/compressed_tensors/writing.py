"""Writes a quantized model as a directory in the layout of compressed-tensors."""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.convert.engine import quantized_layers
from lowbit.files import sync_directory, write_json
from lowbit.interop.compressed_tensors.layers import StoredLayer, stored_layers
from lowbit.interop.compressed_tensors.schemes import cache_config
from lowbit.interop.compressed_tensors.vllm import differences
from lowbit.interop.directories.names import Names
from lowbit.interop.directories.rules import Kind
from lowbit.interop.files import refuse_adapters, require_space
from lowbit.models import cache_scales
from lowbit.models.check import uncompiled
from lowbit.models.names import plain_name
from lowbit.nn.base import kind
from lowbit.report import Report, report_on
from lowbit.serialize import huggingface, safetensors
from lowbit.serialize.saving import distinct
from lowbit.serialize.shards import SINGLE, Group, pack, write_index

__all__ = ["write"]

#: The largest file of weights in bytes, unless one layer is larger. transformers has the same limit.
SHARD_BYTES = 5 * 10**9

#: Patterns of the files that a tokenizer or a processor consists of.
_TOKENIZER_FILES = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "*.tiktoken", "*.model", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip

#: Formats that readers decode to bf16 whatever the dtype of the model, so that other dtypes fail at the first matmul.
_BF16_ONLY = ("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized")


@torch.no_grad()
def write(model: nn.Module, path: str | Path, tokenizer: Any = None) -> Report:
    """Write a quantized Hugging Face model for transformers, vLLM and other readers of compressed-tensors.

    Codes and scales are unchanged. The directory gets its name when it is complete.

    Args:
        model: A model of transformers whose Linears ``quantize_`` has quantized.
        path: The directory; it must not exist, or be empty.
        tokenizer: An object with ``save_pretrained``, or a directory whose tokenizer files are copied.

    Returns:
        The report, with a row for each quantized layer.

    Raises:
        ValueError: The model is not of transformers, or has a layer that compressed-tensors cannot express. The
            message names the nearest recipe that works.
        FileExistsError: ``path`` has other content.
        FileNotFoundError: The directory of the tokenizer has no tokenizer.
        OSError: The directory cannot be written, or the disk has too little space.
    """
    model, path = uncompiled(model), Path(path)
    refuse_adapters(model, "model.save_pretrained(path), which vLLM and transformers load next to the base model")
    if not huggingface.is_pretrained(model):
        raise ValueError(
            f"compressed-tensors is a layout for models of transformers, and this is a {type(model).__name__}; "
            f"use lowbit.save_model"
        )
    names = Names(model)
    layers = stored_layers(model, names)
    plain = _plain_tensors(model, names)
    config = _config(model, layers, names)
    files = pack(_groups(layers, plain), SHARD_BYTES)
    tokenizer_files = _tokenizer_files(tokenizer)
    size = sum(group[1] for groups in files for group in groups)
    with _new_directory(path, size) as directory:
        rows = []
        for index, groups in enumerate(files):
            file = SINGLE if len(files) == 1 else f"model-{index + 1:05}-of-{len(files):05}.safetensors"
            rows.append({"file": file, "names": _write_file(directory / file, groups, layers, plain)})
        if len(files) > 1:
            write_index(directory, rows)
        write_json(directory / "config.json", config)
        generation = huggingface.describe(model)["generation"]
        if generation is not None:
            write_json(directory / "generation_config.json", generation)
        for source in tokenizer_files:
            shutil.copy2(source, directory / source.name)
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(str(directory))
    report = report_on("export", model, quantized_layers(model), f"written to {path}")
    return replace(report, notes=_notes(layers, model))


# -- tensors -----------------------------------------------------------------------------------------------------------
def _plain_tensors(model: nn.Module, names: Names) -> dict[str, Tensor]:
    """All tensors but those of quantized weights, each once, by their names in the checkpoint."""
    quantized = tuple(f"{plain_name(path)}." for path in quantized_layers(model))
    state = {plain_name(name): value for name, value in model.state_dict().items()}
    for name, value in state.items():
        if value.is_meta:
            raise ValueError(f"{name!r} is on the meta device and has no values; load the model first")
    plain = {name: value for name, value in state.items() if not name.startswith(quantized) or name.endswith(".bias")}
    tensors, _ = distinct(plain)
    safetensors.check_writable(tensors)
    return names.tensors(model, tensors)


def _groups(layers: dict[str, StoredLayer], plain: dict[str, Tensor]) -> list[Group]:
    """Names and bytes of tensors that are written together: those of a layer, and each other tensor."""
    groups: list[Group] = [((name,), value.nbytes) for name, value in plain.items()]
    for name, layer in layers.items():
        kinds = {
            f"{name}.{part}": torch.empty(kind.shape, dtype=kind.dtype, device="meta")
            for part, kind in layer.kinds().items()
        }
        groups.append((tuple(kinds), sum(tensor.nbytes for tensor in kinds.values())))
    return groups


def _write_file(
    path: Path, groups: Iterable[Group], layers: dict[str, StoredLayer], plain: dict[str, Tensor]
) -> list[str]:
    """Write one file, layer by layer, and return the names of its tensors."""
    layout: dict[str, Tensor] = {}
    for names, _ in groups:
        for name in names:
            layer, _, part = name.rpartition(".")
            kind = Kind(plain[name].dtype, plain[name].shape) if name in plain else layers[layer].kinds()[part]
            layout[name] = torch.empty(kind.shape, dtype=kind.dtype, device="meta")

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for names, _ in groups:
            layer = names[0].rpartition(".")[0]
            if names[0] in plain:
                yield names[0], plain[names[0]].cpu()
            else:
                yield from ((f"{layer}.{part}", value.cpu()) for part, value in layers[layer].tensors().items())

    path.touch()
    safetensors.write_streamed(path, layout, tensors())
    return list(layout)


# -- config ------------------------------------------------------------------------------------------------------------
def _config(model: Any, layers: dict[str, StoredLayer], names: Names) -> dict[str, Any]:
    described = huggingface.describe(model)
    config = dict(described["config"])
    config["architectures"] = [described["architecture"]]
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = _dtype(model, layers)
    if kind(model.get_output_embeddings() or model) in ("quantized", "packed"):  # it has a weight of its own
        for inner in (config, config.get("text_config")):
            if isinstance(inner, dict):
                inner["tie_word_embeddings"] = False
    scales = config.pop(cache_scales.ATTRIBUTE, None)
    config["quantization_config"] = _quantization_config(model, layers, names)
    if scales is not None:
        config["quantization_config"]["kv_cache_scheme"] = cache_config(scales)
    return config


def _dtype(model: nn.Module, layers: dict[str, StoredLayer]) -> str:
    """The dtype of the model, or bf16 if readers run it in bf16 only."""
    if any(layer.format.name in _BF16_ONLY for layer in layers.values()):
        return "bfloat16"
    dtype = next(iter(layers.values())).layer.weight_dtype
    return str(getattr(model, "dtype", dtype) or dtype).removeprefix("torch.")


def _quantization_config(model: Any, layers: dict[str, StoredLayer], names: Names) -> dict[str, Any]:
    """The config of all layers. One group names the class Linear, several their layers.

    Layers are named as in checkpoints, for vLLM, and also as in memory, for transformers.
    """
    groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for name, layer in layers.items():
        targets = groups.setdefault(json.dumps(layer.group, sort_keys=True), (layer.group, []))[1]
        targets += dict.fromkeys((name, layer.path))
    formats = {layer.format.name for layer in layers.values()}
    output: Any = model.get_output_embeddings()  # for vLLM, whose output layer is not a Linear
    outputs = [name for name, layer in layers.items() if layer.layer is output]
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": {
            f"group_{index}": {"targets": ["Linear", *outputs] if len(groups) == 1 else targets, **group}
            for index, (group, targets) in enumerate(groups.values())
        },
        "ignore": _ignored(model, names),
        "kv_cache_scheme": None,
    }


def _ignored(model: nn.Module, names: Names) -> list[str]:
    """The modules with a float matrix, which readers may take for Linears: Linears, routers, and stacked experts."""
    ignored = []
    for path, module in model.named_modules(remove_duplicate=False):
        dims = {0 if value is None else value.dim() for value in module._parameters.values()}
        if kind(module) is not None or isinstance(module, nn.Embedding) or not dims & {2, 3}:
            continue
        for name in dict.fromkeys((names.layer(plain_name(path)), plain_name(path))):
            ignored.append(name if 2 in dims else f"re:{re.escape(name)}\\..*")
    return ignored


def _notes(layers: dict[str, StoredLayer], model: nn.Module) -> tuple[str, ...]:
    notes = []
    if _dtype(model, layers) == "bfloat16" and getattr(model, "dtype", None) not in (None, torch.bfloat16):
        notes.append("config.json has dtype bfloat16, because readers run this format in bf16 only")
    return (*notes, *differences(layers))


# -- files -------------------------------------------------------------------------------------------------------------
def _tokenizer_files(tokenizer: Any) -> list[Path]:
    """The tokenizer's files in a directory. Raises FileNotFoundError if it has none."""
    if tokenizer is None or hasattr(tokenizer, "save_pretrained"):
        return []
    directory = Path(tokenizer)
    files = sorted({file for pattern in _TOKENIZER_FILES for file in directory.glob(pattern) if file.is_file()})
    if not files:
        raise FileNotFoundError(f"{directory} has no tokenizer files; give the tokenizer, or its directory")
    return files


@contextmanager
def _new_directory(path: Path, size: int) -> Iterator[Path]:
    """Yield a temporary directory, which becomes ``path`` at the end; a failure removes it.

    Raises:
        FileExistsError: ``path`` has content.
        OSError: The disk has less free space than ``size`` bytes.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} is not an empty directory; remove it, or write to another one")
    path.parent.mkdir(parents=True, exist_ok=True)
    require_space(path, size)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        if path.exists():
            path.rmdir()
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_directory(path.parent)
