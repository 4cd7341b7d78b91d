"""``load_model``: read and check a saved directory completely, then fill a model from it."""

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
from lowbit.models.wrap import plain_class
from lowbit.nn.experts import stack_experts_
from lowbit.nn.linear import QuantLinear
from lowbit.recipes import RECIPES, Recipe
from lowbit.serialize import huggingface, safetensors
from lowbit.serialize.empty import empty_weights, to_meta_
from lowbit.serialize.layout import CONFIG, DTYPES, REBUILD, VERSION, WEIGHTS, in_features, our_config

__all__ = ["Layer", "Saved", "load_into", "load_model"]


class Layer(NamedTuple):
    """A quantized layer in the config."""

    recipe: Recipe
    dtype: torch.dtype
    """Dtype of the weight before quantization."""
    widths: list[int] | None
    """Columns of each matrix, if the file has them."""


class Saved(NamedTuple):
    """The checked contents of a directory."""

    path: Path
    """The config file, for error messages."""
    layers: dict[str, Layer]
    tensors: dict[str, Tensor]
    """Tensors by name; a tied tensor has several names."""
    tied: dict[str, str]
    """For each other name of a tied tensor, its name in the file."""
    model: dict[str, Any] | None
    """Class and config, if lowbit can build the model."""


def load_model(directory: str | Path, model: nn.Module | None = None, prepack: bool = False) -> nn.Module:
    """Load a model that ``save_model`` wrote, with its layers quantized as they were saved.

    The file is read and checked before ``model`` is changed. Peak memory is therefore twice the size of the weights if
    ``model`` has weights, and once their size without ``model`` or with it on meta. Parameters do not share memory with
    the file.

    Args:
        directory: The directory that ``save_model`` wrote.
        model: A model of the saved architecture, on any device or on meta. Its layers are unquantized, or quantized
            with the same recipes. Other tensors are cast to the model's dtypes. Meta tensors are replaced by new CPU
            tensors, tied as in the file. Non-persistent buffers are not in the file: Hugging Face models recompute
            them, other models must not have them on meta (build the model in ``serialize.empty_weights()``).
            None: build the model from the file, in the file's dtypes, without initializing weights. This works for
            Hugging Face models (of classes in transformers) and for the demo GPT.
        prepack: Call ``prepack_`` on the model, for inference on a CPU.

    Returns:
        ``model``, or the new model.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is truncated, altered or malformed, or its format version or a recipe is unknown. The model
            does not fit; the message lists the differences. A non-persistent buffer is on the meta device.
        ImportError: The file needs transformers, which is not installed.
        OSError: A file cannot be read.

        The model is unchanged if any of them is raised.
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
    load_into(inner, saved, built)
    if prepack:
        prepack_(model)
    return model


def load_into(model: nn.Module, saved: Saved, built: bool) -> None:
    """Quantize the layers of ``model`` that are quantized in the file, and fill the model.

    Args:
        model: A plain or quantized model.
        saved: The tensors, with names and dtypes of lowbit's layers.
        built: Whether the model was built for the file, so that its tensors get the file's dtypes.

    Raises:
        ValueError: Model and file do not fit each other; the model is unchanged.
    """
    new_layers = _check_layers(model, saved)
    expected = _expected(model, saved, new_layers)
    _check_tensors(saved, expected)
    _check_widths(model, saved, new_layers)
    buffers = _lost_buffers(model, saved, expected, new_layers)
    swap(model, new_layers)
    for name, value in buffers.items():
        prefix, _, buffer = name.rpartition(".")
        model.get_submodule(prefix)._buffers[buffer] = value
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
    """The model's tensors with the file's values; meta tensors are replaced by new ones, tied as in the file.

    ``cast``: new tensors get the model's dtypes, not the file's.
    """
    new: dict[Any, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, old in expected.items():
        tensor = saved.tensors[name]
        if not old.is_meta:
            state[name] = old.copy_(tensor)
            continue
        key = (id(tensor), old.dtype, isinstance(old, nn.Parameter))
        if key not in new:
            value = tensor.to(old.dtype) if cast else tensor
            new[key] = nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
        state[name] = new[key]
    return state


def _read(directory: Path) -> Saved:
    """The checked directory; read again if a concurrent save has replaced the files meanwhile."""
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
        config_json = read_json(directory / "config.json")
        quantization = config_json.get("quantization_config")
        if huggingface.is_quantized(config_json):
            raise ValueError(
                f"{missing}: save_pretrained of transformers wrote {directory}; import "
                f"lowbit.integrations.transformers and call from_pretrained"
            )
        if isinstance(quantization, dict):
            raise ValueError(
                f"{missing}: {directory} has a Hugging Face model that is quantized by "
                f"{shown(quantization.get('quant_method'))}; lowbit.load_model loads the formats of "
                f"lowbit.interop.FORMATS, and lowbit.quantize_ and lowbit quantize take the unquantized model"
            )
        raise ValueError(
            f"{missing}: {directory} has a Hugging Face model that is not quantized; load it with from_pretrained and "
            f"call lowbit.quantize_, or run: lowbit quantize {directory} int8"
        )
    raise FileNotFoundError(f"{missing}: {directory} is not a directory that save_model wrote")


def _checked(path: Path, config: dict[str, Any]) -> Saved:
    if config.get("version") != VERSION:
        raise ValueError(
            f"{path} has format version {shown(config.get('version'))} (lowbit {shown(config.get('lowbit'))}), but "
            f"lowbit {__version__} reads version {VERSION}; install a matching lowbit"
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
    """The layer's recipe; the named recipe if it is equal, because only that has a description."""
    parsed = Recipe.from_dict(described)
    named = RECIPES.get(parsed.name)
    return named if named == parsed else parsed


def _build(saved: Saved) -> nn.Module:
    """The model that the config describes, without weights."""
    described = saved.model
    if described is None or described["class"] not in REBUILD:
        raise ValueError(
            f"{saved.path} does not say how to build its model (lowbit builds Hugging Face models and its demo GPT); "
            f"pass a model of the same architecture: load_model(directory, model)"
        )
    try:
        # Limits the allocations of a hostile config. A weight is one or more tensors; building makes a few temporaries.
        with empty_weights(most=4 * len(saved.tensors) + 1000):
            model = to_meta_(REBUILD[described["class"]].build(described["config"]))
        for name, dtype in described.get("buffers", {}).items():
            if dtype in DTYPES:
                prefix, _, buffer = name.rpartition(".")
                buffers = model.get_submodule(prefix)._buffers
                buffers[buffer] = buffers[buffer].to(DTYPES[dtype])  # type: ignore[union-attr]
        return model
    except ImportError:
        raise
    except Exception as error:  # a class may raise anything for an untrusted config
        raise ValueError(
            f"{saved.path}: cannot build {shown(described['class'])}: {type(error).__name__} {str(error)[:300]}; "
            "save the model again, or pass a model: load_model(directory, model)"
        ) from error


def _check_layers(model: nn.Module, saved: Saved) -> dict[int, nn.Module]:
    """New layers for the layers that are quantized in the file only, by id. Raises ValueError if the two do not fit."""
    quantized = {name: layer.recipe for name, layer in quantized_layers(model).items()}
    for name, recipe in quantized.items():
        expected = saved.layers[name].recipe if name in saved.layers else None
        if expected is None or _role(expected) != _role(recipe):
            raise ValueError(
                f"layer {name!r} of the model is quantized with recipe {recipe}, but in {saved.path} "
                f"{f'with {expected}' if expected else 'it is not quantized'}; pass an unquantized model"
            )
    missing = {name: layer.recipe for name, layer in saved.layers.items() if name not in quantized}
    if "" in missing:
        raise ValueError(f"{saved.path} has a single quantized layer; pass a layer quantized with {missing['']}")
    try:
        return replacements(model, missing)
    except ValueError as error:
        raise ValueError(f"{saved.path} does not fit this model: {error}") from None


def _check_widths(model: nn.Module, saved: Saved, new_layers: dict[int, nn.Module]) -> None:
    """Raise ValueError if in_features differ, which equal numbers of packed bytes may hide."""
    for name, module in model.named_modules(remove_duplicate=False):
        expected = saved.layers[name].widths if name in saved.layers else None
        actual = in_features(new_layers.get(id(module), module)) if expected is not None else None
        if actual != expected:
            raise ValueError(
                f"{saved.path} does not fit this model: {name} has in_features {actual}, the file {expected}"
            )


def _role(recipe: Recipe) -> tuple[Any, ...]:
    """The part of a recipe that a quantized layer uses, and that the config has for unnamed recipes."""
    return recipe.name, recipe.weight, recipe.input


def _expected(model: nn.Module, saved: Saved, new_layers: dict[int, nn.Module]) -> dict[str, Tensor]:
    """The model's state with the new layers in place."""
    modules = model.named_modules(remove_duplicate=False)
    replaced = {name: new_layers[id(old)] for name, old in modules if id(old) in new_layers}
    state = {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if not any(name.startswith(f"{layer}.") for layer in replaced)
    }
    for name, layer in replaced.items():
        state |= layer.state_dict(prefix=f"{name}.", keep_vars=True)
    return state


def _check_tensors(saved: Saved, expected: dict[str, Tensor]) -> None:
    """Raise ValueError with all differences of names, shapes, integer dtypes and ties."""
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
    model: nn.Module, saved: Saved, expected: dict[str, Tensor], new_layers: dict[int, nn.Module]
) -> dict[str, Tensor]:
    """Values of the non-persistent buffers on the meta device. Raises ValueError if they cannot be recomputed."""
    lost: dict[str, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, value in new_layers.get(id(module), module).named_buffers(prefix, recurse=False):
            if value.is_meta and name not in expected:
                lost[name] = value
    if lost and huggingface.is_pretrained(model):
        with empty_weights():
            built = dict(plain_class(model)(model.config).named_buffers(remove_duplicate=False))
        values = {
            name: built[name].to(old.dtype) for name, old in lost.items() if name in built and not built[name].is_meta
        }
        if len(values) == len(lost):
            return values
    if lost:
        (names,) = _listed("the file does not hold", list(lost))
        raise ValueError(
            f"{saved.path} does not fit this model: {names}, non-persistent buffers that the model has on the meta "
            "device; build it in `with lowbit.serialize.empty_weights():` instead of torch.device('meta'), or set "
            "these buffers before loading"
        )
    return {}


def _falsely_tied(saved: Saved, expected: dict[str, Tensor], names: list[str]) -> list[str]:
    """Pairs of names that share a tensor in the model, but not in the file."""
    first: dict[Any, str] = {}
    pairs = ((first.setdefault(storage_key(expected[name]), name), name) for name in names)
    source = saved.tied
    return [f"{a} and {b}" for a, b in pairs if source.get(a, a) != source.get(b, b)]


def _listed(what: str, names: list[str], most: int = 8) -> list[str]:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return [f"{what} {', '.join(names[:most])}{more}"] if names else []
