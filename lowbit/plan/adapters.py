"""LoRA adapters of peft as a technique of plans: the model's weights are frozen, and may be quantized.

Source: Hu et al., "LoRA", arXiv 2106.09685; Dettmers et al., "QLoRA", arXiv 2305.14314.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import nn

from lowbit.convert.maker import Allocated, Ruled
from lowbit.convert.quantize import quantize_from
from lowbit.convert.select import DEFAULT_SKIP
from lowbit.distributed import torchrun
from lowbit.files import write_atomically
from lowbit.models.adapters import has_adapters
from lowbit.models.output_layers import find_output_layers
from lowbit.nn.attention import SplitMultiheadAttention, split_attention_
from lowbit.nn.linear import QuantLinear
from lowbit.optim.shards import whole
from lowbit.recipes import layer_recipes
from lowbit.torch_private import is_fake
from lowbit.user_warnings import warn

__all__ = ["RANK", "adapters_in", "add_adapters_", "has_frozen_matrices", "lora_config", "quantize_base_", "rank_of"]

#: The default rank, and the quotient of ``lora_alpha`` and rank.
RANK, _ALPHA = 16, 2

#: Name of the adapters in the model, and the prefix of their tensors in files.
_NAME, _PREFIX = "default", "base_model.model."


def adapters_in(value: Any, who: str) -> int | str | None:
    """Return adapters as a value of ``TrainingSettings``: the rank, or a LoraConfig as JSON.

    Args:
        value: A rank, a ``peft.LoraConfig``, or None.
        who: The caller, for errors.

    Raises:
        ImportError: There are adapters, and peft is not installed.
        TypeError: ``value`` is something else, or a LoraConfig with fields that JSON cannot express.
        ValueError: The rank is not positive.
    """
    if value is None:
        return None
    peft = _peft()
    if isinstance(value, bool) or not isinstance(value, int | peft.LoraConfig):
        raise TypeError(f"{who}: adapters is a rank such as {RANK}, or a peft.LoraConfig, got {value!r}")
    if isinstance(value, int):
        if value < 1:
            raise ValueError(f"{who}: the rank of adapters is at least 1, got {value}")
        return value
    plain = peft.LoraConfig()
    names = [field.name for field in fields(value) if field.init]
    changed = {name: getattr(value, name) for name in names if getattr(value, name) != getattr(plain, name)}
    try:
        return json.dumps(changed, sort_keys=True, default=_listed)
    except TypeError as error:
        raise TypeError(f"{who}: a plan cannot store this LoraConfig: {error}; add the adapters yourself, with "
                        f"peft.get_peft_model(model, config), and plan for the result") from error  # fmt: skip


def _listed(value: Any) -> list[Any]:
    if isinstance(value, set):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def rank_of(adapters: int | str) -> int:
    """Return the rank of adapters of ``TrainingSettings``."""
    if isinstance(adapters, int):
        return adapters
    return int(lora_config(adapters).r)


def lora_config(adapters: int | str) -> Any:
    """Return the LoraConfig of adapters of ``TrainingSettings``, for a rank with an alpha of twice the rank.

    Raises:
        ImportError: peft is not installed.
    """
    config = _peft().LoraConfig
    if isinstance(adapters, int):
        return config(r=adapters, lora_alpha=_ALPHA * adapters)
    return config(**deepcopy(json.loads(adapters)))


def add_adapters_(model: nn.Module, adapters: int | str) -> None:
    """Freeze ``model``, and add LoRA adapters in fp32 to all linear layers but the output layers, in place.

    Args:
        model: The model.
        adapters: Adapters of ``TrainingSettings``.

    Raises:
        ImportError: peft is not installed.
        ValueError: The model has adapters already, or no linear layer.
    """
    peft = _peft()
    if has_adapters(model):
        raise ValueError(f"this {type(model).__name__} already has adapters; plan for it without adapters=")
    config = lora_config(adapters)
    split_attention_(model)
    if config.target_modules in (None, "all-linear"):
        config.target_modules = set(_targets(model))
        if not config.target_modules:
            raise ValueError(f"{type(model).__name__} has no linear layer to adapt")
    with _moving_parameters() if _is_fake(model) else nullcontext():
        peft.inject_adapter_in_model(config, model, _NAME)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.float()


@contextmanager
def _moving_parameters() -> Iterator[None]:
    """Context in which peft moves adapters to the device of their layer by parameter: fake modules cannot be moved."""
    layer_class = sys.modules["peft.tuners.tuners_utils"].BaseTunerLayer
    original = layer_class._move_adapter_to_device_of_base_layer

    def move(layer: Any, adapter_name: str, device: Any = None) -> None:
        device = device or next((parameter.device for parameter in layer.get_base_layer().parameters()), None)
        for name in layer.adapter_layer_names:
            added = getattr(layer, name, {})
            if adapter_name not in added or not isinstance(added[adapter_name], nn.Module):
                continue
            for module in added[adapter_name].modules():
                for parameter_name, value in module._parameters.items():
                    if value is not None:
                        moved = nn.Parameter(value.detach().to(device), value.requires_grad)
                        module._parameters[parameter_name] = moved

    layer_class._move_adapter_to_device_of_base_layer = move
    try:
        yield
    finally:
        layer_class._move_adapter_to_device_of_base_layer = original


def save_adapters(model: nn.Module, directory: Path) -> None:
    """Write the adapters of ``model`` as files of peft, for ``peft.PeftModel.from_pretrained(base, directory)``.

    With several processes, all call it, and the first one writes.

    Raises:
        ValueError: The model has none that ``add_adapters_`` added.
    """
    peft = _peft()
    configs = getattr(model, "peft_config", None)
    if not has_adapters(model) or not isinstance(configs, dict):
        raise ValueError(f"run.save_adapters: this {type(model).__name__} has no adapters of the plan")
    if any(has_adapters(layer) for layer in model.modules() if isinstance(layer, SplitMultiheadAttention)):
        warn(
            "run.save_adapters: peft's own from_pretrained would leave out the adapters of nn.MultiheadAttention, "
            "which has no layers for its projections; load them with lowbit.integrations.peft.from_pretrained"
        )
    named = peft.get_peft_model_state_dict(model)
    tensors = {f"{_PREFIX}{name}": whole(value).contiguous() for name, value in named.items()}
    config = deepcopy(configs[_NAME])
    config.inference_mode = True
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)  # the same file in every run
    config.base_model_name_or_path = getattr(model, "name_or_path", None) or None

    def write() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / "adapter_model.safetensors", lambda file: file.write(save(tensors)))
        config.save_pretrained(directory)

    torchrun.first(write, "whether the adapters are written")


def _targets(model: nn.Module) -> Iterator[str]:
    """Yield the paths of the linear layers that get adapters."""
    outputs = {id(layer) for layer in find_output_layers(model).values()}
    outputs.add(id(getattr(model, "get_output_embeddings", lambda: None)()))
    for path, module in model.named_modules():
        if id(module) not in outputs and _is_linear(module):
            yield path


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | QuantLinear) or type(module).__name__ == "Conv1D"


def quantize_base_(model: nn.Module, recipe: str, adapters: int | str | None) -> None:
    """Quantize the layers of ``model`` in place that are frozen, or will be once ``adapters`` are added.

    Layers that are quantized already keep their codes.
    """
    if adapters is not None:
        split_attention_(model)

    def trains(module: nn.Module, path: str) -> bool:
        return adapters is None and any(parameter.requires_grad for parameter in module.parameters(recurse=False))

    recipes = layer_recipes({"*": recipe, trains: None})
    quantize_from(model, recipes, Allocated() if _is_fake(model) else Ruled(), DEFAULT_SKIP)


def has_frozen_matrices(model: nn.Module) -> bool:
    """Return whether a linear layer of the model is frozen and not quantized, and something else is trained."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return False
    return any(isinstance(layer, nn.Linear) and not layer.weight.requires_grad for layer in model.modules())


def _is_fake(model: nn.Module) -> bool:
    return any(is_fake(parameter) for parameter in model.parameters())


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ImportError("adapters need peft; pip install peft") from None
    return peft
