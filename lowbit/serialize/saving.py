"""``save_model``: weights first, under a name of their own; then, in one step, the config that names them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit._version import __version__
from lowbit.files import put_in_place, temporary_for, write_atomically
from lowbit.nn.convert import class_name, quantized_layers, uncompiled
from lowbit.nn.linear import QuantLinear
from lowbit.recipes import Recipe
from lowbit.recipes import recipe as find_recipe
from lowbit.serialize.layout import CONFIG, FORMAT, REBUILD, VERSION, identity, safetensors, sha256

__all__ = ["save_model"]


def save_model(model: nn.Module, directory: str | Path) -> None:
    """Write ``model``, quantized or not, to ``directory``; what was saved there before stays whole until this is done.

    Tensors that several names share are written once. A compiled model is saved as the one that was compiled, and
    loaded before it is compiled again. A model of class ``lowbit.demo.gpt.GPT`` can be loaded
    without giving one; others are loaded into a model of the same architecture, quantized or not.
    Raises ValueError for a directory that holds another program's ``config.json``, or a damaged one; TypeError for
    state that is no plain dense tensor (sharded tensors: gather them first; extra state); OSError where the directory
    cannot be written.
    """
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
    directory.mkdir(parents=True, exist_ok=True)
    config_path = directory / CONFIG
    before = _ours(config_path) if config_path.exists() else {}
    tensors, tied = _distinct({_plain(name): value for name, value in model.state_dict().items()})
    file, digest, size = _store(directory, tensors)
    rebuild = REBUILD.get(class_name(model))
    config = {
        "format": FORMAT,
        "version": VERSION,
        "lowbit": __version__,
        "weights": {"file": file, "sha256": digest, "bytes": size},
        "tied": tied,
        "layers": {_plain(name): _describe(layer) for name, layer in quantized_layers(model).items()},
        "model": None if rebuild is None else {"class": class_name(model), "config": rebuild.describe(model)},
    }
    text = json.dumps(config, indent=2).encode()
    write_atomically(config_path, lambda out: out.write(text + b"\n"))
    stale = _named_weights(before)
    if stale not in (None, file):
        (directory / stale).unlink(missing_ok=True)


def _ours(config_path: Path) -> dict[str, Any]:
    """The config that lowbit wrote. Raises: ValueError for another, or where that cannot be told."""
    try:
        config = json.loads(config_path.read_bytes())
    except ValueError as error:
        raise ValueError(
            f"{config_path} is damaged ({error}), so that whose it is cannot be told; remove it, or save to another "
            "directory"
        ) from None
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise ValueError(f"{config_path} was not written by lowbit, and would be lost; save to another directory")
    return config


def _named_weights(config: dict[str, Any]) -> str | None:
    """The weights' file that a config names, if it is a name that a save makes."""
    weights = config.get("weights")
    file = weights.get("file") if isinstance(weights, dict) else None
    return file if isinstance(file, str) and re.fullmatch(r"weights-[0-9a-f]{16}\.safetensors", file) else None


def _plain(name: str) -> str:
    """A name without what torch.compile adds for each compiled module on the way."""
    return ".".join(word for word in name.split(".") if word != "_orig_mod")


def _distinct(state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
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
        if value.is_meta:
            raise TypeError(f"save_model: {name!r} is on the meta device and holds no numbers; load the model first")
        if value.layout != torch.strided or value.is_quantized:
            kind = value.dtype if value.is_quantized else value.layout
            raise TypeError(
                f"save_model: {name!r} is {kind}, and files hold dense tensors; make it dense (to_dense(), "
                "dequantize()), or register the buffer with persistent=False"
            )
        first = seen.setdefault(identity(value), name)
        if first == name:
            # A copy of its own: safetensors refuses tensors that share storage, as views of one parameter do.
            tensors[name] = value.detach().cpu().contiguous().clone() if _is_part(value) else value.detach().cpu()
        else:
            tied[name] = first
    return tensors, tied


def _is_part(value: Tensor) -> bool:
    return not value.is_contiguous() or value.untyped_storage().nbytes() != value.numel() * value.element_size()


def _store(directory: Path, tensors: dict[str, Tensor]) -> tuple[str, str, int]:
    """Write the weights' file; its name, SHA-256 and size."""
    temporary = temporary_for(directory / "weights")
    try:
        _write(tensors, temporary)
        digest, size = sha256(temporary), temporary.stat().st_size
        file = f"weights-{digest[:16]}.safetensors"
        put_in_place(temporary, directory / file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return file, digest, size


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    """``safetensors``, with its errors made ours. Raises: OSError, TypeError."""
    library = safetensors()
    try:
        library.save_file(tensors, path, metadata={"format": "pt"})
    except import_module("safetensors").SafetensorError as error:
        raise OSError(str(error)) from error
    except KeyError as error:  # of its table of dtypes
        names = ", ".join(name for name, value in tensors.items() if value.dtype == error.args[0])
        raise TypeError(f"save_model: safetensors cannot hold {error.args[0]} ({names}); convert it") from None


def _describe(layer: Any) -> dict[str, Any]:
    dtypes = {str(m.weight_dtype).removeprefix("torch.") for m in layer.modules() if isinstance(m, QuantLinear)}
    return {"recipe": _describe_recipe(layer.recipe), "dtype": sorted(dtypes)[0]}


def _describe_recipe(recipe: Recipe) -> str | dict[str, Any]:
    """The name, where that is enough to find the recipe again."""
    try:
        if find_recipe(recipe.name) == recipe:
            return recipe.name
    except ValueError:
        pass
    return {
        "name": recipe.name, "weight": recipe.weight.name, "input": None if recipe.input is None else recipe.input.name,
    }  # fmt: skip
