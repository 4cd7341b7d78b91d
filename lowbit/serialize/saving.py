"""``save_model``: write the weights to a new file, then replace the config atomically."""

from __future__ import annotations

import secrets
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit._version import __version__
from lowbit.convert.engine import quantized_layers
from lowbit.files import DirectoryLock, sync_directory, write_json
from lowbit.models.check import uncompiled
from lowbit.models.names import plain_name
from lowbit.models.ties import storage_key
from lowbit.nn.base import kind
from lowbit.nn.linear import PARTS
from lowbit.nn.packed import PackedLinear
from lowbit.serialize import safetensors
from lowbit.serialize.layout import (
    CONFIG,
    FORMAT,
    REBUILD,
    VERSION,
    WEIGHTS,
    in_features,
    our_config,
    rebuild_of,
)

__all__ = ["described", "distinct", "save_model"]

#: Seconds to wait for another save, which holds the lock only while it replaces the config.
_LOCK_TIMEOUT = 10.0


def save_model(model: nn.Module, directory: str | Path) -> None:
    """Save a quantized or plain model to a directory, as ``lowbit.json`` and one safetensors file.

    A model saved there before stays intact until the new one is complete. Other files, such as a tokenizer, are not
    changed. Tied tensors are written once. If several processes save to one directory at once, the last save wins, and
    the files of the other saves are removed.

    Hugging Face models (of classes in transformers) and the demo GPT can be loaded without passing a model. Other
    models are loaded into a model of the same architecture, quantized or not.

    Args:
        model: The model. A compiled model is saved uncompiled; compile it again after loading. Layers of
            ``train.prepare_`` are saved as plain layers, with a warning; call ``train.prepare_`` again after loading.
        directory: The directory; created if it does not exist.

    Raises:
        ValueError: The model is prepared by ``qat.prepare_`` (call ``qat.convert_`` first), or the directory has a
            ``lowbit.json`` that is damaged or was written by another program.
        TypeError: The state has extra state or a tensor that is not plain and dense, such as a sharded tensor.
        OSError: The directory cannot be written; BlockingIOError if a run of lowbit uses it.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"save_model: the model comes first, then the directory; the model is a {type(model).__name__}")
    prepared = [name for name, layer in model.named_modules() if kind(layer) == "qat"]
    if prepared:
        raise ValueError(
            f"save_model: {prepared[0] or 'the model'} is prepared for QAT; call lowbit.qat.convert_(model) before "
            f"saving, or use torch.save(model.state_dict(), ...) to continue training later"
        )
    training = [name for name, layer in model.named_modules() if kind(layer) == "training"]
    if training:
        warnings.warn(
            f"save_model: {training[0]} and {len(training) - 1} more layers train in low precision, and are saved as "
            f"plain ones; after loading, call train.prepare_ to continue training, or quantize_ to deploy",
            stacklevel=2,
        )
    with _writing(Path(directory)):
        _save(uncompiled(model), Path(directory))


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    """Add the directory and the state of the previous model to OSErrors."""
    try:
        yield
    except OSError as error:
        raise type(error)(
            f"the model cannot be saved to {directory} ({error.strerror or error}); fix the cause, or save to another "
            "directory. A model that was saved there before is whole"
        ) from error


def _save(model: nn.Module, directory: Path) -> None:
    our_config(directory)  # raises for another program's directory before anything is written
    tensors, tied = distinct({plain_name(name): value for name, value in _state(model).items()})
    meta = [name for name, value in tensors.items() if value.is_meta]
    if meta:
        raise TypeError(f"save_model: {meta[0]!r} is on the meta device and has no values; load the model first")
    safetensors.check_writable(tensors)
    config = described(model, tied)
    directory.mkdir(parents=True, exist_ok=True)
    # A new name: a concurrent or later save removes this file only after a config has named it.
    weights = directory / f"weights-{secrets.token_hex(8)}.safetensors"
    weights.open("xb").close()  # never overwrite a file or follow a link
    try:
        digest, size = safetensors.write(weights, tensors)
        sync_directory(directory)
        lock = _locked(directory)
    except BaseException:
        weights.unlink(missing_ok=True)
        raise
    try:
        _commit(directory, {**config, "weights": {"file": weights.name, "sha256": digest, "bytes": size}})
    finally:
        lock.release()


def _locked(directory: Path) -> DirectoryLock:
    """The directory's lock. Raises BlockingIOError after a timeout, because a run of lowbit uses the directory."""
    end = time.monotonic() + _LOCK_TIMEOUT
    while True:
        try:
            return DirectoryLock(directory, "save_model")
        except BlockingIOError:
            if time.monotonic() >= end:
                raise
        time.sleep(0.01)


def _commit(directory: Path, config: dict[str, Any]) -> None:
    """Replace the config, and remove the weights that the previous config named. The caller holds the lock."""
    before = our_config(directory)
    try:
        write_json(directory / CONFIG, config)
    except BaseException:
        name = config["weights"]["file"]
        if name not in _named_weights(our_config(directory)):
            (directory / name).unlink(missing_ok=True)
        raise
    with suppress(OSError):  # the new model is complete; old files only take space
        for file in _named_weights(before):
            (directory / file).unlink(missing_ok=True)


def described(model: nn.Module, tied: dict[str, str]) -> dict[str, Any]:
    """The config of a model, without the entry for its weights."""
    rebuild = rebuild_of(model)
    return {
        "format": FORMAT,
        "version": VERSION,
        "lowbit": __version__,
        "tied": tied,
        "layers": {plain_name(name): _describe(layer) for name, layer in quantized_layers(model).items()},
        "model": None if rebuild is None else _describe_model(rebuild, model),
    }


def _state(model: nn.Module) -> dict[str, Any]:
    """The model's state without training state (modules with ``lowbit_left_out``); tied packed weights stay tied."""
    modules = model.named_modules(remove_duplicate=False)
    left_out = tuple(f"{name}." for name, module in modules if getattr(module, "lowbit_left_out", False))
    state = {name: value for name, value in model.state_dict().items() if not name.startswith(left_out)}
    first: dict[Any, str] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, PackedLinear):
            source = first.setdefault(storage_key(layer.packed), name)
            for part in PARTS:
                if f"{name}.{part}" in state:
                    state[f"{name}.{part}"] = state[f"{source}.{part}"]
    return state


def _named_weights(config: tuple[Path, dict[str, Any]] | None) -> list[str]:
    """The weight files that a config names, except names that ``save_model`` never uses."""
    weights = None if config is None else config[1].get("weights")
    rows = weights if isinstance(weights, list) else [weights]
    files = [row.get("file") for row in rows if isinstance(row, dict)]
    return [file for file in files if isinstance(file, str) and WEIGHTS.fullmatch(file)]


def distinct(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors to write, and for each other name of a tied tensor the name under which it is written."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    seen: dict[Any, str] = {}
    for name, value in state.items():
        if type(value) not in (Tensor, nn.Parameter):
            raise TypeError(
                f"save_model: {name!r} is a {type(value).__name__}, not a plain tensor; gather sharded tensors, remove "
                "extra state"
            )
        if value.layout != torch.strided or value.is_quantized:
            raise TypeError(
                f"save_model: {name!r} is {value.dtype if value.is_quantized else value.layout}, expected a dense "
                "tensor; convert it (to_dense(), dequantize()), or register the buffer with persistent=False"
            )
        first = seen.setdefault(storage_key(value), name)
        if first == name:
            tensors[name] = value.detach()
        else:
            tied[name] = first
    return tensors, tied


def _describe_model(rebuild: str, model: nn.Module) -> dict[str, Any]:
    """The class and config to build the model, and the dtypes of its computed buffers, which a cast may change."""
    state = model.state_dict(keep_vars=True)
    computed = {name: value for name, value in model.named_buffers() if name not in state}
    dtypes = {name: str(value.dtype).removeprefix("torch.") for name, value in computed.items()}
    return {"class": rebuild, "config": REBUILD[rebuild].describe(model), "buffers": dtypes}


def _describe(layer: Any) -> dict[str, Any]:
    dtypes = {str(m.weight_dtype).removeprefix("torch.") for m in layer.modules() if hasattr(m, "weight_dtype")}
    return {"recipe": layer.recipe.to_dict(), "dtype": sorted(dtypes)[0], "in_features": in_features(layer)}
