"""save_model and load_model: a directory with ``config.json`` and one safetensors file.

The weights' file is named after its content, and ``config.json``, which names it with its SHA-256, is replaced last and
in one step: a save that is interrupted anywhere leaves the model that was there before. A save removes one file, the
weights that the config before it named; what a killed save leaves (``.weights.PID.tmp``, or weights that no config
names) stays, because it cannot be told from another program's files. Loading checks everything (files, hash, layers,
names, shapes) before it touches the model.

Tensors are those of ``state_dict``: QuantLinear's ``codes`` are packed rows of uint8 (docs/numerics.md section 8), its
scales the integers of their bits.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowbit._version import __version__
from lowbit.files import put_in_place, temporary_for, write_atomically
from lowbit.nn.convert import class_name, quantized_layers, replacements, swap, uncompiled
from lowbit.nn.linear import QuantLinear
from lowbit.recipes import Recipe
from lowbit.recipes import recipe as find_recipe
from lowbit.scaling import scheme

__all__ = ["load_model", "save_model"]

FORMAT, VERSION = "lowbit-model", 1
_CONFIG = "config.json"


class Rebuild(NamedTuple):
    """How a model of ours is described in ``config.json``, and built again from that."""

    describe: Callable[[Any], dict[str, Any]]
    build: Callable[[dict[str, Any]], nn.Module]


def _build_gpt(described: dict[str, Any]) -> nn.Module:
    gpt = import_module("lowbit.nn.transformer")
    model: nn.Module = gpt.GPT(gpt.GPTConfig(**described))
    return model


#: Models that ``load_model`` can build by itself, by full class name.
REBUILD: dict[str, Rebuild] = {
    "lowbit.nn.transformer.GPT": Rebuild(lambda model: asdict(model.config), _build_gpt),
}


# -- saving ----------------------------------------------------------------------------------------------------------
def save_model(model: nn.Module, directory: str | Path) -> None:
    """Write ``model``, quantized or not, to ``directory``; what was saved there before stays whole until this is done.

    Tensors that several names share are written once. A compiled model is saved as the one that was compiled, and
    loaded before it is compiled again. A model of class ``lowbit.nn.transformer.GPT`` can be loaded
    without giving one; others are loaded into a model of the same architecture, quantized or not.
    Raises ValueError for a directory that holds another program's ``config.json``; TypeError for state that is no plain
    tensor (sharded tensors: gather them first; extra state).
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config_path = directory / _CONFIG
    before = _ours(config_path) if config_path.exists() else {}
    if before is None:
        raise ValueError(f"{config_path} was not written by lowbit, and would be lost; save to another directory")
    model = uncompiled(model)
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


def _ours(config_path: Path) -> dict[str, Any] | None:
    """The config, if lowbit wrote it."""
    try:
        config = json.loads(config_path.read_bytes())
    except ValueError:
        return None
    return config if isinstance(config, dict) and config.get("format") == FORMAT else None


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
        first = seen.setdefault(_identity(value), name)
        if first == name:
            # A copy of its own: safetensors refuses tensors that share storage, as views of one parameter do.
            tensors[name] = value.detach().cpu().contiguous().clone() if _is_part(value) else value.detach().cpu()
        else:
            tied[name] = first
    return tensors, tied


def _identity(value: Tensor) -> Any:
    return (value.untyped_storage()._cdata, value.storage_offset(), value.shape, value.stride(), value.dtype)


def _is_part(value: Tensor) -> bool:
    return not value.is_contiguous() or value.untyped_storage().nbytes() != value.numel() * value.element_size()


def _store(directory: Path, tensors: dict[str, Tensor]) -> tuple[str, str, int]:
    """Write the weights' file; its name, SHA-256 and size."""
    temporary = temporary_for(directory / "weights")
    try:
        _safetensors().save_file(tensors, temporary, metadata={"format": "pt"})
        digest, size = _sha256(temporary), temporary.stat().st_size
        file = f"weights-{digest[:16]}.safetensors"
        put_in_place(temporary, directory / file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return file, digest, size


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


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


# -- loading ---------------------------------------------------------------------------------------------------------
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
    anew, on the CPU, tied where the file is. None: the model is built anew, which
    works for ``lowbit.nn.transformer.GPT``.
    Raises, with the model untouched: FileNotFoundError for a missing file; ValueError for a truncated or altered file,
    another format version, an unknown recipe, or a model that does not fit (the message lists the differences).
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
    path = directory / _CONFIG
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
        raise ValueError(f"{directory / _CONFIG} is damaged: the weights' file {file!r} is not a plain name")
    if not path.exists():
        raise FileNotFoundError(f"{path}, which {_CONFIG} names, does not exist; copy the whole directory")
    actual = path.stat().st_size
    if actual != size:
        raise ValueError(f"{path} is truncated or altered: {actual} bytes instead of {size}; copy or save it again")
    if _sha256(path) != digest:
        raise ValueError(f"{path} is altered: its SHA-256 is not the one in {_CONFIG}; copy or save it again")
    tensors: dict[str, Tensor] = _safetensors().load_file(path)
    return tensors


def _safetensors() -> Any:
    """Imported when it is needed, so that lowbit imports on machines that load no models."""
    try:
        return import_module("safetensors.torch")
    except ImportError:
        raise ImportError("saving and loading models needs safetensors: pip install safetensors") from None


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
    except (TypeError, ValueError) as error:
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


def _falsely_tied(saved: Saved, expected: dict[str, Tensor], names: list[str]) -> list[str]:
    first: dict[Any, str] = {}
    pairs = ((first.setdefault(_identity(expected[name]), name), name) for name in names)
    source = saved.tied
    return [f"{a} and {b}" for a, b in pairs if source.get(a, a) != source.get(b, b)]


def _listed(what: str, names: list[str], most: int = 8) -> list[str]:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return [f"{what} {', '.join(names[:most])}{more}"] if names else []
