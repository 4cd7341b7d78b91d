"""``save_model``: weights first, in a file of their own; then, in one step, the config that names it."""

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

#: Seconds for which a save waits for others to name their weights, which takes them moments.
_PATIENCE = 10.0


def save_model(model: nn.Module, directory: str | Path) -> None:
    """Write ``model``, quantized or not, to ``directory``; what was saved there before stays whole until this is done.

    Writes ``lowbit.json`` and one safetensors file, and leaves other files alone, such as a tokenizer and the config of
    transformers. Tensors that several names share are written once. A compiled model is saved as the one that was
    compiled, and loaded before it is compiled again. Models of transformers (of its own classes) and the demo's GPT can
    be loaded without giving one; others are loaded into a model of the same architecture, quantized or not. Layers that
    ``train.prepare_`` made are saved as plain ones, with a warning: call ``train.prepare_`` again after loading.
    Of several processes that save to one directory at once, the last one wins, and nothing of the others stays.
    Raises ValueError for a model that ``qat.prepare_`` made, and for a directory that holds another program's
    ``lowbit.json``, or a damaged one; TypeError for state that is no plain dense tensor (sharded tensors: gather them
    first; extra state); OSError where the directory cannot be written, BlockingIOError among them where a run of
    lowbit keeps it.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"save_model: the model comes first, then the directory; the model is a {type(model).__name__}")
    prepared = [name for name, layer in model.named_modules() if kind(layer) == "qat"]
    if prepared:
        raise ValueError(
            f"save_model: {prepared[0] or 'the model'} is trained to be quantized; call lowbit.qat.convert_(model) and "
            f"save what is deployed, or torch.save(model.state_dict(), ...) to go on training"
        )
    training = [name for name, layer in model.named_modules() if kind(layer) == "training"]
    if training:
        warnings.warn(
            f"save_model: {training[0]} and {len(training) - 1} more layers train in low precision, and are saved as "
            f"plain ones; after loading, call train.prepare_ to go on, or quantize_ to deploy",
            stacklevel=2,
        )
    with _writing(Path(directory)):
        _save(uncompiled(model), Path(directory))


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    """Errors of the system say what could not be written, and what became of it."""
    try:
        yield
    except OSError as error:
        raise type(error)(
            f"the model cannot be saved to {directory} ({error.strerror or error}); mend that, or save to another "
            "directory. A model that was saved there before is whole"
        ) from error


def _save(model: nn.Module, directory: Path) -> None:
    our_config(directory)  # refuses a directory of something else before anything is done
    tensors, tied = distinct({plain_name(name): value for name, value in _state(model).items()})
    without = [name for name, value in tensors.items() if value.is_meta]
    if without:
        raise TypeError(f"save_model: {without[0]!r} is on the meta device and holds no numbers; load the model first")
    safetensors.check_writable(tensors)
    config = described(model, tied)
    directory.mkdir(parents=True, exist_ok=True)
    # A name that no save had before: another one, beside us or later, removes it only after a config that named it.
    weights = directory / f"weights-{secrets.token_hex(8)}.safetensors"
    weights.open("xb").close()  # never an existing file, never through a link
    try:
        digest, size = safetensors.write(weights, tensors)
        sync_directory(directory)
    except BaseException:
        weights.unlink(missing_ok=True)
        raise
    try:
        lock = _locked(directory)
    except BaseException:
        weights.unlink(missing_ok=True)
        raise
    try:
        _commit(directory, {**config, "weights": {"file": weights.name, "sha256": digest, "bytes": size}})
    finally:
        lock.release()


def _locked(directory: Path) -> DirectoryLock:
    """The directory's lock. Another save has it for moments; raises BlockingIOError where a run keeps it."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            return DirectoryLock(directory, "save_model")
        except BlockingIOError:
            if time.monotonic() >= end:
                raise
        time.sleep(0.01)


def _commit(directory: Path, config: dict[str, Any]) -> None:
    """Replace the config by one that names new weights, and remove those of before. One process does so at a time:
    another would not know which weights this one has named meanwhile.
    """
    before = our_config(directory)
    try:
        write_json(directory / CONFIG, config)
    except BaseException:
        name = config["weights"]["file"]
        if name not in _named_weights(our_config(directory)):
            (directory / name).unlink(missing_ok=True)
        raise
    with suppress(OSError):  # the new model is there; what stays behind takes room and no more
        _remove(directory, before)


def described(model: nn.Module, tied: dict[str, str]) -> dict[str, Any]:
    """The config of a model, but for its weights."""
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
    """The model's state, in which layers that share a packed weight share its parts; unpacked ones are new tensors.

    The state of its training (a module with ``lowbit_left_out``) is no part of it.
    """
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


def _remove(directory: Path, before: tuple[Path, dict[str, Any]] | None) -> None:
    """Remove the weights that ``before``, a config that has been replaced, named."""
    for stale in _named_weights(before):
        (directory / stale).unlink(missing_ok=True)


def _named_weights(found: tuple[Path, dict[str, Any]] | None) -> list[str]:
    """The weights' files that a config names, if they are names that a save makes."""
    weights = None if found is None else found[1].get("weights")
    rows = weights if isinstance(weights, list) else [weights]
    files = [row.get("file") for row in rows if isinstance(row, dict)]
    return [file for file in files if isinstance(file, str) and WEIGHTS.fullmatch(file)]


def distinct(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors to write, and for each name that shares one of them, the name it is written under."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    seen: dict[Any, str] = {}
    for name, value in state.items():
        if type(value) not in (Tensor, nn.Parameter):
            kind = type(value).__name__
            raise TypeError(
                f"save_model: {name!r} is a {kind}, not a plain tensor; gather sharded tensors, drop extra state"
            )
        if value.layout != torch.strided or value.is_quantized:
            kind = value.dtype if value.is_quantized else value.layout
            raise TypeError(
                f"save_model: {name!r} is {kind}, and files hold dense tensors; make it dense (to_dense(), "
                "dequantize()), or register the buffer with persistent=False"
            )
        first = seen.setdefault(storage_key(value), name)
        if first == name:
            tensors[name] = value.detach()
        else:
            tied[name] = first
    return tensors, tied


def _describe_model(rebuild: str, model: nn.Module) -> dict[str, Any]:
    """What builds the model again, and the dtypes of buffers that it computes then, which a cast may have changed."""
    saved = model.state_dict(keep_vars=True)
    computed = {name: value for name, value in model.named_buffers() if name not in saved}
    dtypes = {name: str(value.dtype).removeprefix("torch.") for name, value in computed.items()}
    return {"class": rebuild, "config": REBUILD[rebuild].describe(model), "buffers": dtypes}


def _describe(layer: Any) -> dict[str, Any]:
    dtypes = {str(m.weight_dtype).removeprefix("torch.") for m in layer.modules() if hasattr(m, "weight_dtype")}
    return {"recipe": layer.recipe.to_dict(), "dtype": sorted(dtypes)[0], "in_features": in_features(layer)}
