"""Reads a directory in the layout of compressed-tensors, and keeps its codes.

The files are untrusted. Names, dtypes and shapes are checked against the model before any tensor is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowbit.convert.adapters import find
from lowbit.files import read_json, shown
from lowbit.interop.compressed_tensors import layouts
from lowbit.interop.compressed_tensors.schemes import Format, input_of, recipe_of, scheme_of
from lowbit.nn.linear import QuantLinear
from lowbit.recipes import Recipe
from lowbit.scaling import Scheme
from lowbit.serialize import huggingface
from lowbit.serialize.loading import Layer, Saved, load_into
from lowbit.serialize.shards import Checkpoint
from lowbit.tensor.quantized import Scales
from lowbit.user_warnings import warn

__all__ = ["detect", "read"]

CONFIG = "config.json"

#: Parts of a layer's state that other programs write and lowbit does not use.
_UNUSED = ("input_global_scale",)

#: Parts that belong to a quantized KV cache.
_CACHE = re.compile(r".*\.(k_scale|v_scale|q_scale|k_zero_point|v_zero_point)")


class _Layer(NamedTuple):
    """A quantized Linear in the checkpoint."""

    format: Format
    scheme: Scheme
    recipe: Recipe
    shape: tuple[int, int]
    dtype: torch.dtype

    def kinds(self) -> dict[str, layouts.Kind]:
        kinds = layouts.weight_kinds(self.format, self.scheme, self.shape)
        input = self.recipe.input
        return kinds | layouts.input_kinds(input) if self.recipe.static and input is not None else kinds


def detect(path: str | Path) -> bool:
    """Whether ``path`` is a directory in the layout of compressed-tensors."""
    try:
        config = read_json(Path(path) / CONFIG)
    except (OSError, ValueError):
        return False
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == "compressed-tensors"


@torch.no_grad()
def read(path: str | Path) -> nn.Module:
    """Load a Hugging Face model in the layout of compressed-tensors, in eval mode; its Linears keep their codes.

    Quantized Linears become QuantLinears. Their global scale, if any, is the reciprocal of the stored one, in fp32.
    Inputs of NVFP4 get a global scale per row at run time instead of the stored one.

    Args:
        path: The directory. Code in it does not run.

    Raises:
        ImportError: transformers is not installed.
        FileNotFoundError: A file is missing.
        ValueError: A file is damaged, the config has a scheme that lowbit does not have, or config and files do not
            fit each other. The message names the tensor.
    """
    path = Path(path)
    config = _quantization_config(path)
    checkpoint = Checkpoint(path)
    model: Any = huggingface.without_weights(path)
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    layers = _layers(path, config, checkpoint, model)
    tensors: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, layer in layers.items():
        tensors |= _state(checkpoint, name, layer, used)
    rest, tied = _plain(checkpoint, model, layers, used)
    _refuse_unused(checkpoint, model, used, config)
    saved = Saved(
        path / CONFIG,
        {name: Layer(layer.recipe, layer.dtype, [layer.shape[1]]) for name, layer in layers.items()},
        {**tensors, **rest},
        tied,
        None,
    )
    load_into(model, saved, built=False)
    return model.eval()  # type: ignore[no-any-return]


def _quantization_config(path: Path) -> dict[str, Any]:
    """The checked ``quantization_config``."""
    config = read_json(path / CONFIG).get("quantization_config")
    if not isinstance(config, dict) or config.get("quant_method") != "compressed-tensors":
        raise ValueError(f"{path / CONFIG} has no quantization_config of compressed-tensors")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ValueError(f"{path / CONFIG} is damaged: config_groups is {shown(groups)}; copy it again")
    for rows in (config.get("ignore") or [], *(group.get("targets") for group in groups.values())):
        if not isinstance(rows, list) or not all(isinstance(row, str) for row in rows):
            raise ValueError(f"{path / CONFIG} is damaged: expected a list of names, got {shown(rows)}; copy it again")
    if config.get("transform_config"):
        raise ValueError(
            f"{path / CONFIG} has a transform_config, and lowbit reads no rotated weights; use the original model "
            f"with lowbit.quantize_(model, 'NAME:hadamard')"
        )
    if config.get("sparsity_config"):
        raise ValueError(f"{path / CONFIG} has a sparsity_config, and lowbit reads dense codes only")
    return config


# -- layers ------------------------------------------------------------------------------------------------------------
def _layers(path: Path, config: dict[str, Any], checkpoint: Checkpoint, model: nn.Module) -> dict[str, _Layer]:
    """The quantized Linears of the model, by name."""
    groups = config["config_groups"]
    layers = {}
    for name, module in model.named_modules(remove_duplicate=False):
        scale = checkpoint.entries.get(f"{name}.weight_scale")
        if scale is None:
            continue
        _, listed, _ = find(module)
        if listed is None or not isinstance(module, nn.Linear):
            raise ValueError(f"{scale.path} has {name}.weight_scale, and {name} is a {type(module).__name__}")
        group = _group_of(name, module, groups, config.get("ignore") or [])
        if group is None:
            raise ValueError(f"{path / CONFIG} has no config group for {name}, whose weight_scale {scale.path} holds")
        try:
            weights = group.get("weights")
            if not isinstance(weights, dict) or group.get("output_activations"):
                raise ValueError("a group needs weights, and no output_activations")
            name_of = group.get("format") or config.get("format")
            dtype = str(scale.dtype).removeprefix("torch.")
            format, scheme = scheme_of(weights, str(name_of), dtype)
            recipe = recipe_of(scheme, input_of(group.get("input_activations")))
        except ValueError as error:
            raise ValueError(f"{path / CONFIG}: layer {name!r}: {error}") from None
        shape = (module.out_features, module.in_features)
        layers[name] = _Layer(format, recipe.weight, recipe, shape, module.weight.dtype)
    return layers


def _group_of(name: str, module: nn.Module, groups: dict[str, Any], ignore: list[str]) -> dict[str, Any] | None:
    """The group for a layer: one that names it, else one whose pattern matches, else one that names its class."""
    classes = {cls.__name__ for cls in type(module).__mro__}
    ways: tuple[Callable[[str], bool], ...] = (
        lambda target: target == name,
        lambda target: target.startswith("re:") and _matches(target[3:], name),
        lambda target: target in classes,
    )
    if any(way(target) for target in ignore for way in ways):
        return None
    for way in ways:
        for group in groups.values():
            if any(way(target) for target in group["targets"]):
                return dict(group)
    return None


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise ValueError(f"the target {shown(pattern)} is no regular expression: {error}") from None


# -- tensors -----------------------------------------------------------------------------------------------------------
def _state(checkpoint: Checkpoint, name: str, layer: _Layer, used: set[str]) -> dict[str, Tensor]:
    """The state of the layer as a QuantLinear, without the bias. Adds the names that it has read to ``used``."""
    tensors = {}
    for part, kind in layer.kinds().items():
        tensors[part] = _read(checkpoint, f"{name}.{part}", kind)
        used.add(f"{name}.{part}")
    used |= {f"{name}.{part}" for part in _UNUSED}
    try:
        weight = layouts.from_tensors(tensors, layer.format, layer.scheme, layer.shape, layer.dtype)
        scales: Scales | None = None
        if layer.recipe.static and layer.recipe.input is not None:
            scales = layouts.input_scales(tensors, layer.recipe.input)
    except ValueError as error:
        raise ValueError(f"{checkpoint.entries[f'{name}.weight_scale'].path}: layer {name!r}: {error}") from None
    return QuantLinear(weight, None, layer.recipe, scales).state_dict(prefix=f"{name}.")


def _read(checkpoint: Checkpoint, name: str, kind: layouts.Kind) -> Tensor:
    """A tensor of that kind. Scales may have another floating-point dtype, and axes of length 1."""
    entry = checkpoint.entries.get(name)
    if entry is None:
        raise ValueError(f"{checkpoint.directory} lacks {name}, which its config needs; copy the directory again")
    same_dtype = entry.dtype == kind.dtype or (entry.dtype.is_floating_point and name.endswith("input_scale"))
    if not same_dtype or [n for n in entry.shape if n != 1] != [n for n in kind.shape if n != 1]:
        raise ValueError(
            f"{entry.path} has {name} as {entry.dtype} {list(entry.shape)}, expected {kind.dtype} {list(kind.shape)}; "
            f"its config is of another checkpoint, or the file is damaged"
        )
    return checkpoint.read(name).reshape(kind.shape)


def _plain(
    checkpoint: Checkpoint, model: nn.Module, layers: dict[str, _Layer], used: set[str]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All other tensors of the model, and for each other name of a tied tensor the name with its value."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    state = {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if name.rpartition(".")[0] not in layers or name.endswith(".bias")
    }
    for name in sorted(state, key=lambda name: name not in checkpoint.entries):
        source = first.setdefault(id(state[name]), name)
        entry = checkpoint.entries.get(name)
        if source != name:
            tied[name], tensors[name] = source, tensors[source]
        elif entry is not None:
            if entry.shape != state[name].shape:
                raise ValueError(
                    f"{entry.path} has {name} with shape {list(entry.shape)}, expected {list(state[name].shape)}"
                )
            tensors[name] = checkpoint.read(name)
        else:
            raise ValueError(f"{checkpoint.directory} lacks {name}, which the model needs; copy the directory again")
        used.add(name)
    return tensors, tied


def _refuse_unused(checkpoint: Checkpoint, model: Any, used: set[str], config: dict[str, Any]) -> None:
    """Raise ValueError for tensors that the model does not have; warn if they are of a quantized KV cache."""
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    unused = [
        name
        for name in checkpoint.entries
        if name not in used and not any(re.search(pattern, name) for pattern in ignored)
    ]
    cache = [name for name in unused if _CACHE.fullmatch(name)]
    if cache or config.get("kv_cache_scheme"):
        warn(f"{checkpoint.directory} has a quantized KV cache, which lowbit does not read; the cache stays float")
    other = sorted(set(unused) - set(cache))
    if not other:
        return
    name = other[0]
    remedy = "it is of another model, or of a layout that lowbit does not read"
    if name.endswith("weight_g_idx"):
        remedy = "columns in the order of activations are not read; make the checkpoint again with actorder 'weight'"
    raise ValueError(f"{checkpoint.entries[name].path} has {shown(name)}, which the model does not use: {remedy}")
