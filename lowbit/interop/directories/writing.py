"""Writes a quantized Hugging Face model as a directory, in the layout of another program."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowbit.convert.engine import quantized_layers
from lowbit.files import sync_directory, write_json
from lowbit.interop.directories.layers import Store, StoredLayer, stored_layers
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

__all__ = ["Layout", "write"]

#: The largest file of weights in bytes, unless one layer is larger. transformers has the same limit.
SHARD_BYTES = 5 * 10**9

#: Patterns of the files that a tokenizer or a processor consists of.
_TOKENIZER_FILES = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "*.tiktoken", "*.model", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip


class Layout(NamedTuple):
    """How one program stores quantized models.

    Attributes:
        name: Its name in ``export``.
        store: How it stores a Linear.
        config: ``config(model, layers, names)`` is the ``quantization_config``.
        dtype: ``dtype(model, layers)`` is the dtype in the config, or None for the model's.
        notes: ``notes(model, layers)`` are lines for the report.
        cache: Whether it stores static scales of keys and values.
    """

    name: str
    store: Store
    config: Callable[[Any, dict[str, StoredLayer], Names], dict[str, Any]]
    dtype: Callable[[Any, dict[str, StoredLayer]], str | None] = lambda model, layers: None
    notes: Callable[[Any, dict[str, StoredLayer]], Iterable[str]] = lambda model, layers: ()
    cache: bool = False


@torch.no_grad()
def write(model: nn.Module, path: str | Path, tokenizer: Any = None, *, layout: Layout) -> Report:
    """Write a quantized Hugging Face model as a directory.

    Codes and scales are unchanged. The directory gets its name when it is complete.

    Args:
        model: A model of transformers whose Linears ``quantize_`` has quantized.
        path: The directory; it must not exist, or be empty.
        tokenizer: An object with ``save_pretrained``, or a directory whose tokenizer files are copied.
        layout: The layout of the program that will read it.

    Returns:
        The report, with a row for each quantized layer.

    Raises:
        ValueError: The model is not of transformers, or has a layer that the layout cannot express. The message names
            the nearest recipe that works.
        FileExistsError: ``path`` has other content.
        FileNotFoundError: The directory of the tokenizer has no tokenizer.
        OSError: The directory cannot be written, or the disk has too little space.
    """
    model, path = uncompiled(model), Path(path)
    refuse_adapters(model, "model.save_pretrained(path), which vLLM and transformers load next to the base model")
    if not huggingface.is_pretrained(model):
        raise ValueError(
            f"{layout.name} is a layout for models of transformers, and this is a {type(model).__name__}; "
            f"use lowbit.save_model"
        )
    names = Names(model)
    layers = stored_layers(model, names, layout.store)
    if cache_scales.scales_of(model) and not layout.cache:
        raise ValueError(f"{layout.name} has no static scales of a KV cache; compressed-tensors has them")
    plain = _plain_tensors(model, names)
    config = _config(model, layers, names, layout)
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
    return replace(report, notes=tuple(layout.notes(model, layers)))


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
            for part, kind in layer.stored.kinds.items()
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
            kind = Kind(plain[name].dtype, plain[name].shape) if name in plain else layers[layer].stored.kinds[part]
            layout[name] = torch.empty(kind.shape, dtype=kind.dtype, device="meta")

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for names, _ in groups:
            layer = names[0].rpartition(".")[0]
            if names[0] in plain:
                yield names[0], plain[names[0]].cpu()
            else:
                yield from ((f"{layer}.{part}", value.cpu()) for part, value in layers[layer].stored.tensors().items())

    path.touch()
    safetensors.write_streamed(path, layout, tensors())
    return list(layout)


# -- config ------------------------------------------------------------------------------------------------------------
def _config(model: Any, layers: dict[str, StoredLayer], names: Names, layout: Layout) -> dict[str, Any]:
    described = huggingface.describe(model)
    config = dict(described["config"])
    config["architectures"] = [described["architecture"]]
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = layout.dtype(model, layers) or _dtype(model, layers)
    if kind(model.get_output_embeddings() or model) in ("quantized", "packed"):  # it has a weight of its own
        for inner in (config, config.get("text_config")):
            if isinstance(inner, dict):
                inner["tie_word_embeddings"] = False
    config.pop(cache_scales.ATTRIBUTE, None)
    config["quantization_config"] = layout.config(model, layers, names)
    return config


def _dtype(model: nn.Module, layers: dict[str, StoredLayer]) -> str:
    dtype = next(iter(layers.values())).layer.weight_dtype
    return str(getattr(model, "dtype", dtype) or dtype).removeprefix("torch.")


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
