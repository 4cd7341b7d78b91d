"""``load_model``: everything is read and checked before the model is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowbit._version import __version__
from lowbit.convert.engine import quantized_layers, swap
from lowbit.convert.prepack import prepack_
from lowbit.convert.quantize import replacements
from lowbit.files import read_json, shown
from lowbit.models.check import uncompiled
from lowbit.models.ties import storage_key
from lowbit.nn.experts import stack_experts_
from lowbit.nn.linear import QuantLinear
from lowbit.recipes import RECIPES, Recipe
from lowbit.serialize import huggingface, safetensors
from lowbit.serialize.empty import empty_weights, to_meta_
from lowbit.serialize.layout import CONFIG, DTYPES, REBUILD, VERSION, WEIGHTS, in_features, our_config

__all__ = ["load_model"]


class Layer(NamedTuple):
    """A quantized layer as the file has it; ``dtype`` is that of the weight before quantization, ``widths`` are the
    columns of its matrices, where the file has them.
    """

    recipe: Recipe
    dtype: torch.dtype
    widths: list[int] | None


class Saved(NamedTuple):
    """A checked directory: its quantized layers, and every tensor by every name."""

    path: Path
    layers: dict[str, Layer]
    tensors: dict[str, Tensor]
    tied: dict[str, str]
    model: dict[str, Any] | None


def load_model(directory: str | Path, model: nn.Module | None = None, prepack: bool = False) -> nn.Module:
    """Load what ``save_model`` wrote into ``model`` and return it; the layers that were quantized become so.

    ``model``: of the architecture that was saved, with layers in high precision (on any device, meta included) or
    quantized with the same recipes; other tensors are converted to its dtypes. What it has on the meta device is made
    anew, on the CPU, tied where the file is. Non-persistent buffers are in no file: models of transformers compute
    theirs again, and others must have them elsewhere, as models built within ``serialize.empty_weights()`` do.
    None: the model is built from the file, without drawing weights, and gets the file's dtypes. This works for models
    of transformers (of its own classes) and for the demo's GPT.
    ``prepack``: call ``prepack_`` on the model, for inference on a CPU.
    No parameter shares memory with the file, which may be replaced afterwards. The whole file is read before the model
    is touched: a model that has weights needs its memory twice meanwhile, none or one on the meta device once.
    Raises, with the model untouched: FileNotFoundError for a missing file; ValueError for a truncated, altered or
    malformed file, another format version, an unknown recipe, a model that does not fit (the message lists the
    differences), or non-persistent buffers on the meta device; ImportError where transformers is missing; another
    OSError where a file cannot be read.
    """
    if isinstance(directory, nn.Module):
        raise TypeError("load_model: the directory comes first, then the model: load_model(directory, model)")
    saved = _read(Path(directory))
    built = model is None
    if model is None:
        model = _build(saved)
    inner = uncompiled(model)
    wrapped = [name for name, _ in inner.named_modules() if name.split(".")[-1] == "_orig_mod"]
    if wrapped:
        raise ValueError(f"modules inside the model are compiled ({wrapped[0]}); load first, then compile them")
    _load_into(inner, saved, built)
    if prepack:
        prepack_(model)
    return model


def _load_into(model: nn.Module, saved: Saved, built: bool) -> None:
    new_layers = _check_layers(model, saved)
    expected = _expected(model, saved, new_layers)
    _check_tensors(saved, expected)
    _check_widths(model, saved, new_layers)
    buffers = _lost_buffers(model, saved, expected, new_layers)
    swap(model, new_layers)
    for name, value in buffers.items():
        prefix, _, own = name.rpartition(".")
        model.get_submodule(prefix)._buffers[own] = value
    if any(value.is_meta for value in expected.values()):
        model.load_state_dict(_materialized(saved, expected, cast=not built), assign=True)
    else:
        model.load_state_dict(saved.tensors)
    stack_experts_(model)
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
        tensor = saved.tensors[name]
        if not old.is_meta:
            state[name] = old.copy_(tensor)
            continue
        kind = (id(tensor), old.dtype, isinstance(old, nn.Parameter))
        if kind not in made:
            new = tensor.to(old.dtype) if cast else tensor
            made[kind] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
        state[name] = made[kind]
    return state


def _read(directory: Path) -> Saved:
    """The checked directory. Where a save beside us has removed the files meanwhile, those that it wrote."""
    config = _config(directory)
    while True:
        try:
            return _checked(*config)
        except FileNotFoundError:
            before, config = config, _config(directory)
            if config == before:
                raise


def _config(directory: Path) -> tuple[Path, dict[str, Any]]:
    config = our_config(directory)
    if config is not None:
        return config
    missing = f"{directory / CONFIG} does not exist"
    if huggingface.is_directory(directory):
        if huggingface.is_quantized(read_json(directory / "config.json")):
            raise ValueError(
                f"{missing}: save_pretrained of transformers wrote {directory}; import "
                f"lowbit.integrations.transformers and call from_pretrained"
            )
        raise ValueError(
            f"{missing}: {directory} holds a model of transformers that is not quantized; load it with "
            f"from_pretrained and call lowbit.quantize_, or run: lowbit quantize {directory} int8"
        )
    raise FileNotFoundError(f"{missing}: {directory} is not a directory that save_model wrote")


def _checked(path: Path, config: dict[str, Any]) -> Saved:
    if config.get("version") != VERSION:
        raise ValueError(
            f"{path} has format version {shown(config.get('version'))} (lowbit {shown(config.get('lowbit'))}), and "
            f"this lowbit {__version__} reads version {VERSION}; install a lowbit that matches"
        )
    try:
        layers = {name: _layer(path, name, entry) for name, entry in config["layers"].items()}
        rows = config["weights"] if isinstance(config["weights"], list) else [config["weights"]]
        files = [tuple(row[key] for key in ("file", "sha256", "bytes")) for row in rows]
        tied, described = config["tied"], config["model"]
        if not isinstance(tied, dict) or not all(isinstance(source, str) for source in tied.values()):
            raise TypeError(f"tied names must be strings, got {shown(tied)}")
        if described is not None and not isinstance(described["class"], str):
            raise TypeError(f"the model's class must be a string, got {shown(described['class'])}")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__} {error}") from None
    tensors: dict[str, Tensor] = {}
    for file, digest, size in files:
        tensors.update(_weights(path, file, digest, size))
    for name, source in tied.items():
        if source not in tensors:
            raise ValueError(
                f"{path} is damaged: {shown(name)} is tied to {shown(source)}, which the weights do not hold"
            )
        tensors[name] = tensors[source]
    return Saved(path, layers, tensors, tied, described)


def _weights(path: Path, file: Any, digest: str, size: int) -> dict[str, Tensor]:
    if not isinstance(file, str) or not WEIGHTS.fullmatch(file):
        raise ValueError(f"{path} is damaged: {shown(file)} is not a name that save_model gives to weights")
    try:
        return safetensors.read(path.with_name(file), digest, size)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path.with_name(file)}, which {path.name} names, does not exist; copy the whole directory"
        ) from None


def _layer(path: Path, name: str, entry: dict[str, Any]) -> Layer:
    recipe = entry["recipe"]
    try:
        parsed = _recipe(recipe)
    except ValueError as error:
        raise ValueError(f"{path}: layer {name!r}: {error}") from None
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise ValueError(
            f"{path}: layer {shown(name)} has a weight of dtype {shown(entry['dtype'])}; expected one of "
            f"{', '.join(DTYPES)}"
        )
    return Layer(parsed, dtype, entry.get("in_features"))


def _recipe(described: Any) -> Recipe:
    """A layer's recipe: the named one, which says what it is about, where that is the same."""
    parsed = Recipe.from_dict(described)
    named = RECIPES.get(parsed.name)
    return named if named == parsed else parsed


def _build(saved: Saved) -> nn.Module:
    """The model that the config describes, without weights."""
    described = saved.model
    if described is None or described["class"] not in REBUILD:
        raise ValueError(
            f"{saved.path} does not say how to build its model (lowbit builds its demo's GPT and models of "
            f"transformers); give one of the same architecture: load_model(directory, model)"
        )
    try:
        # A weight is one tensor of the file or several; a few more than that are made and thrown away.
        with empty_weights(most=4 * len(saved.tensors) + 1000):
            model = to_meta_(REBUILD[described["class"]].build(described["config"]))
        for name, dtype in described.get("buffers", {}).items():
            if dtype in DTYPES:
                prefix, _, own = name.rpartition(".")
                buffers = model.get_submodule(prefix)._buffers
                buffers[own] = buffers[own].to(DTYPES[dtype])  # type: ignore[union-attr]
        return model
    except ImportError:
        raise
    except Exception as error:  # what a class raises for a stranger's description has no end
        raise ValueError(
            f"{saved.path}: cannot build {shown(described['class'])}: {type(error).__name__} {str(error)[:300]}; "
            "save the model again, or give one: load_model(directory, model)"
        ) from error


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


def _check_widths(model: nn.Module, saved: Saved, made: dict[int, nn.Module]) -> None:
    """Raises ValueError for matrices of other columns, which bytes of codes may hide."""
    for name, module in model.named_modules(remove_duplicate=False):
        widths = saved.layers[name].widths if name in saved.layers else None
        own = in_features(made.get(id(module), module)) if widths is not None else None
        if own != widths:
            raise ValueError(f"{saved.path} does not fit this model: {name} has in_features {own}, the file {widths}")


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
    tensors, problems = saved.tensors, []
    problems += _listed("the file lacks", sorted(expected.keys() - tensors.keys()))
    problems += _listed("the model lacks", sorted(tensors.keys() - expected.keys()))
    both = sorted(expected.keys() & tensors.keys())
    shapes = [
        f"{name} (file {list(tensors[name].shape)}, model {list(expected[name].shape)})"
        for name in both
        if tensors[name].shape != expected[name].shape and not name.endswith("_extra_state")
    ]
    problems += _listed("shapes differ:", shapes)
    dtypes = [
        f"{name} (file {tensors[name].dtype}, model {expected[name].dtype})"
        for name in both
        if tensors[name].dtype != expected[name].dtype
        and not (tensors[name].is_floating_point() and expected[name].is_floating_point())
    ]
    problems += _listed("dtypes differ:", dtypes)
    problems += _listed("the model shares one tensor where the file has two:", _falsely_tied(saved, expected, both))
    if problems:
        raise ValueError(f"{saved.path} does not fit this model:\n  " + "\n  ".join(problems))


def _lost_buffers(
    model: nn.Module, saved: Saved, expected: dict[str, Tensor], made: dict[int, nn.Module]
) -> dict[str, Tensor]:
    """New values of the buffers on the meta device that files do not hold. Raises ValueError where there are none."""
    lost: dict[str, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for own, value in made.get(id(module), module).named_buffers(prefix, recurse=False):
            if value.is_meta and own not in expected:
                lost[own] = value
    if lost and huggingface.is_pretrained(model):
        with empty_weights():
            anew = dict(type(model)(model.config).named_buffers(remove_duplicate=False))
        found = {
            name: anew[name].to(old.dtype) for name, old in lost.items() if name in anew and not anew[name].is_meta
        }
        if len(found) == len(lost):
            return found
    if lost:
        (names,) = _listed("the file does not hold", list(lost))
        raise ValueError(
            f"{saved.path} does not fit this model: {names}, non-persistent buffers that it has on the meta device; "
            "build the model within `with lowbit.serialize.empty_weights():` in place of torch.device('meta'), or give "
            "these buffers values before loading"
        )
    return {}


def _falsely_tied(saved: Saved, expected: dict[str, Tensor], names: list[str]) -> list[str]:
    first: dict[Any, str] = {}
    pairs = ((first.setdefault(storage_key(expected[name]), name), name) for name in names)
    source = saved.tied
    return [f"{a} and {b}" for a, b in pairs if source.get(a, a) != source.get(b, b)]


def _listed(what: str, names: list[str], most: int = 8) -> list[str]:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return [f"{what} {', '.join(names[:most])}{more}"] if names else []
