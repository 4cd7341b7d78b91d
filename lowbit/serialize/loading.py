"""``load_model``: everything is read and checked before the model is touched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowbit._version import __version__
from lowbit.nn.convert import quantized_layers, replacements, swap, uncompiled
from lowbit.nn.linear import QuantLinear
from lowbit.recipes import Recipe
from lowbit.recipes import recipe as find_recipe
from lowbit.scaling import scheme
from lowbit.serialize.layout import CONFIG, FORMAT, REBUILD, VERSION, identity, safetensors, sha256

__all__ = ["load_model"]


class Layer(NamedTuple):
    """A quantized layer as the file has it; ``dtype`` is that of the weight before quantization."""

    recipe: Recipe
    dtype: torch.dtype


class Saved(NamedTuple):
    """A checked directory: its quantized layers, and every tensor by every name."""

    path: Path
    layers: dict[str, Layer]
    tensors: dict[str, Tensor]
    tied: dict[str, str]
    model: dict[str, Any] | None


def load_model(directory: str | Path, model: nn.Module | None = None) -> nn.Module:
    """Load what ``save_model`` wrote into ``model`` and return it; the layers that were quantized become so.

    ``model``: of the architecture that was saved, with layers in high precision (on any device, meta included) or
    quantized with the same recipes; other tensors are converted to its dtypes. What it has on the meta device is made
    anew, on the CPU, tied where the file is; its non-persistent buffers, which no file holds, must be elsewhere.
    None: the model is built anew, which works for ``lowbit.demo.gpt.GPT``.
    Raises, with the model untouched: FileNotFoundError for a missing file; ValueError for a truncated or altered file,
    another format version, an unknown recipe, a model that does not fit (the message lists the differences), or
    non-persistent buffers on the meta device.
    """
    saved = _read(Path(directory))
    built = model is None
    if model is None:
        model = _build(saved)
    inner = uncompiled(model)
    wrapped = [name for name, _ in inner.named_modules() if name.split(".")[-1] == "_orig_mod"]
    if wrapped:
        raise ValueError(f"modules inside the model are compiled ({wrapped[0]}); load first, then compile them")
    _load_into(inner, saved, built)
    return model


def _load_into(model: nn.Module, saved: Saved, built: bool) -> None:
    made = _check_layers(model, saved)
    expected = _expected(model, saved, made)
    _check_tensors(saved, expected)
    _check_buffers(model, saved, expected, made)
    swap(model, made)
    if any(value.is_meta for value in expected.values()):
        model.load_state_dict(_materialized(saved, expected, cast=not built), assign=True)
    else:
        model.load_state_dict(saved.tensors)
    if built:
        for name, layer in quantized_layers(model).items():
            for inner in layer.modules():
                if isinstance(inner, QuantLinear):
                    inner.weight_dtype = saved.layers[name].dtype


@torch.no_grad()
def _materialized(saved: Saved, expected: dict[str, Tensor], cast: bool) -> dict[str, Tensor]:
    """What replaces the model's tensors: new ones for those on the meta device; the others, filled.

    Names that share a tensor in the file share one, because moving a model to the meta device unties it.
    ``cast``: to the model's dtypes. Else the file's stay, as for a model that the file alone describes.
    """
    made: dict[Any, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, old in expected.items():
        held = saved.tensors[name]
        if not old.is_meta:
            state[name] = old.copy_(held)
            continue
        kind = (id(held), old.dtype, isinstance(old, nn.Parameter))
        if kind not in made:
            new = held.to(old.dtype) if cast else held
            made[kind] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
        state[name] = made[kind]
    return state


def _read(directory: Path) -> Saved:
    path = directory / CONFIG
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: {directory} is not a directory that save_model wrote")
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise ValueError(f"{path} was not written by lowbit.save_model")
    if config.get("version") != VERSION:
        raise ValueError(
            f"{path} has format version {config.get('version')!r} (lowbit {config.get('lowbit')}), and this lowbit "
            f"{__version__} reads version {VERSION}; install a lowbit that matches"
        )
    try:
        layers = {name: _layer(path, name, entry) for name, entry in config["layers"].items()}
        file, digest, size = (config["weights"][key] for key in ("file", "sha256", "bytes"))
        tied, described = dict(config["tied"]), config["model"]
        if not all(isinstance(source, str) for source in tied.values()):
            raise TypeError(f"tied names must be strings, got {tied}")
        if described is not None and not isinstance(described["class"], str):
            raise TypeError(f"the model's class must be a string, got {described['class']!r}")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__} {error}") from None
    tensors = _read_tensors(directory, str(file), digest, size)
    for name, source in tied.items():
        if source not in tensors:
            raise ValueError(f"{path} is damaged: {name!r} is tied to {source!r}, which the weights do not hold")
        tensors[name] = tensors[source]
    return Saved(path, layers, tensors, tied, described)


def _layer(path: Path, name: str, entry: dict[str, Any]) -> Layer:
    recipe = entry["recipe"]
    try:
        if isinstance(recipe, str):
            found = find_recipe(recipe)
        else:
            found = Recipe(
                recipe["name"], scheme(recipe["weight"]), scheme(recipe["input"]) if recipe["input"] else None
            )
    except ValueError as error:
        raise ValueError(f"{path}: layer {name!r}: {error}") from None
    dtype = getattr(torch, entry["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{path}: layer {name!r} has unknown dtype {entry['dtype']!r}")
    return Layer(found, dtype)


def _read_tensors(directory: Path, file: str, digest: str, size: int) -> dict[str, Tensor]:
    path = directory / file
    if Path(file).name != file:
        raise ValueError(f"{directory / CONFIG} is damaged: the weights' file {file!r} is not a plain name")
    if not path.exists():
        raise FileNotFoundError(f"{path}, which {CONFIG} names, does not exist; copy the whole directory")
    actual = path.stat().st_size
    if actual != size:
        raise ValueError(f"{path} is truncated or altered: {actual} bytes instead of {size}; copy or save it again")
    if sha256(path) != digest:
        raise ValueError(f"{path} is altered: its SHA-256 is not the one in {CONFIG}; copy or save it again")
    tensors: dict[str, Tensor] = safetensors().load_file(path)
    return tensors


def _build(saved: Saved) -> nn.Module:
    described = saved.model
    if described is None or described.get("class") not in REBUILD:
        raise ValueError(
            f"{saved.path} does not say how to build its model (lowbit builds {', '.join(REBUILD)}); "
            f"give one of the same architecture: load_model(directory, model)"
        )
    try:
        with torch.device("meta"):
            return REBUILD[described["class"]].build(described["config"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{saved.path}: cannot build {described['class']}: {error}") from None


def _check_layers(model: nn.Module, saved: Saved) -> dict[int, nn.Module]:
    """New layers for those of ``model`` that the file has quantized; raises where the two do not fit."""
    already = {name: layer.recipe for name, layer in quantized_layers(model).items()}
    for name, recipe in already.items():
        wanted = saved.layers[name].recipe if name in saved.layers else None
        if wanted is None or _role(wanted) != _role(recipe):
            raise ValueError(
                f"layer {name!r} of the model is quantized with recipe {recipe}, and in {saved.path} "
                f"{f'with {wanted}' if wanted else 'it is not quantized'}; give a model that is not quantized"
            )
    missing = {name: layer.recipe for name, layer in saved.layers.items() if name not in already}
    if "" in missing:
        raise ValueError(f"{saved.path} is of a single quantized layer; give one quantized with {missing['']}")
    try:
        return replacements(model, missing)
    except ValueError as error:
        raise ValueError(f"{saved.path} does not fit this model: {error}") from None


def _role(recipe: Recipe) -> tuple[Any, ...]:
    """What a quantized layer computes with; the config has no more of a recipe that is not a named one."""
    return recipe.name, recipe.weight, recipe.input


def _expected(model: nn.Module, saved: Saved, made: dict[int, nn.Module]) -> dict[str, Tensor]:
    """The model's state as it will be once the new layers are in."""
    new = {name: made[id(old)] for name, old in model.named_modules(remove_duplicate=False) if id(old) in made}
    kept = {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if not any(name.startswith(f"{layer}.") for layer in new)
    }
    for name, layer in new.items():
        kept |= layer.state_dict(prefix=f"{name}.", keep_vars=True)
    return kept


def _check_tensors(saved: Saved, expected: dict[str, Tensor]) -> None:
    """Raises ValueError where names, shapes, integer dtypes or shared tensors differ, listing all of it."""
    held, problems = saved.tensors, []
    problems += _listed("the file lacks", sorted(expected.keys() - held.keys()))
    problems += _listed("the model lacks", sorted(held.keys() - expected.keys()))
    both = sorted(expected.keys() & held.keys())
    shapes = [
        f"{name} (file {list(held[name].shape)}, model {list(expected[name].shape)})"
        for name in both
        if held[name].shape != expected[name].shape
    ]
    problems += _listed("shapes differ:", shapes)
    dtypes = [
        f"{name} (file {held[name].dtype}, model {expected[name].dtype})"
        for name in both
        if held[name].dtype != expected[name].dtype
        and not (held[name].is_floating_point() and expected[name].is_floating_point())
    ]
    problems += _listed("dtypes differ:", dtypes)
    problems += _listed("the model shares one tensor where the file has two:", _falsely_tied(saved, expected, both))
    if problems:
        raise ValueError(f"{saved.path} does not fit this model:\n  " + "\n  ".join(problems))


def _check_buffers(model: nn.Module, saved: Saved, expected: dict[str, Tensor], made: dict[int, nn.Module]) -> None:
    """Raises ValueError for buffers on the meta device that get no values, because files do not hold them."""
    lost = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        for own, value in made.get(id(module), module).named_buffers(prefix, recurse=False):
            if value.is_meta and own not in expected:
                lost.append(own)
    if lost:
        (names,) = _listed("the file does not hold", lost)
        raise ValueError(
            f"{saved.path} does not fit this model: {names}, non-persistent buffers that it has on the meta device; "
            "build the model on a real device, or give these buffers values before loading"
        )


def _falsely_tied(saved: Saved, expected: dict[str, Tensor], names: list[str]) -> list[str]:
    first: dict[Any, str] = {}
    pairs = ((first.setdefault(identity(expected[name]), name), name) for name in names)
    source = saved.tied
    return [f"{a} and {b}" for a, b in pairs if source.get(a, a) != source.get(b, b)]


def _listed(what: str, names: list[str], most: int = 8) -> list[str]:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return [f"{what} {', '.join(names[:most])}{more}"] if names else []
