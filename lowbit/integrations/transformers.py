"""Hugging Face models: ``from_pretrained`` that quantizes while loading, and ``save_pretrained`` of quantized models.

The ``config.json`` of a saved model has the quantization method ``"lowbit"``, and its quantized layers with their
recipes. The safetensors files have codes and scales. transformers loads such a directory if lowbit is imported, and
raises an error otherwise.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from functools import wraps
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from lowbit._version import __version__
from lowbit.convert.dequantize import dequantize_
from lowbit.convert.engine import make_all, quantized_layers, swap
from lowbit.convert.maker import QuantMaker, Ruled
from lowbit.convert.protect import protections
from lowbit.convert.quantize import replacements
from lowbit.convert.select import DEFAULT_SKIP, Skip, plain_layers, select
from lowbit.files import shown
from lowbit.integrations import METHOD, TRANSFORMERS
from lowbit.models import cache_scales
from lowbit.models.names import patterns_in, written
from lowbit.models.ties import paths, storage
from lowbit.nn.experts import stack_experts_
from lowbit.nn.linear import INPUT_PARTS, PARTS
from lowbit.recipes import LayerRecipes, Recipe, layer_recipes, refuse_beyond
from lowbit.serialize.huggingface import placeholders
from lowbit.tensor.quantized import Quantized

if int(transformers.__version__.split(".")[0]) < TRANSFORMERS:
    raise ImportError(
        f"lowbit.integrations.transformers needs transformers >= {TRANSFORMERS}, but {transformers.__version__} is "
        f"installed; use lowbit.quantize_, lowbit.save_model and lowbit.load_model, which support any version"
    )

from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

__all__ = ["LowbitConfig", "LowbitHfQuantizer", "mark"]

#: Without this mark, transformers would initialize quantized weights.
Quantized._is_hf_initialized = True  # type: ignore[attr-defined]


class LowbitConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Quantization config: ``from_pretrained(NAME, quantization_config=LowbitConfig("W4A16"))``.

    The result is bit-identical to ``lowbit.quantize_`` after loading.

    Args:
        recipe: As for ``lowbit.quantize_``.
        skip: As for ``lowbit.quantize_``.
        modules_to_not_convert: The name of ``skip`` in other configs.
        layers: Instead of ``recipe``: recipes by full layer names, for a model that is already quantized. They are
            read from ``config.json``.

    Raises:
        ValueError: Neither or both of ``recipe`` and ``layers`` are set, or both of ``skip`` and
            ``modules_to_not_convert``, or the recipe is invalid.
        TypeError: As for ``lowbit.quantize_``.
    """

    def __init__(
        self,
        recipe: str | Recipe | LayerRecipes | Mapping[Any, str | Recipe | None] | None = None,
        skip: Skip = DEFAULT_SKIP,
        *,
        modules_to_not_convert: Skip | None = None,
        layers: Mapping[str, Recipe] | None = None,
    ) -> None:
        if (recipe is None) == (layers is None):
            raise ValueError("LowbitConfig: expected a recipe, such as LowbitConfig('W4A16')")
        if modules_to_not_convert is not None:
            if skip is not DEFAULT_SKIP:
                raise ValueError("LowbitConfig: skip and modules_to_not_convert mean the same; pass only one of them")
            skip = modules_to_not_convert
        self.quant_method = METHOD
        self.recipes = None if recipe is None else layer_recipes(recipe)
        for layer_recipe in () if self.recipes is None else self.recipes.recipes:
            refuse_beyond(layer_recipe, "LowbitConfig", ("output.a", "output.b"))
        self.skip = patterns_in(skip, "skip")
        self.layers = None if layers is None else dict(layers)

    def to_dict(self) -> dict[str, Any]:
        """The config as JSON values. Raises ValueError if ``recipe`` or ``skip`` has a function."""
        head: dict[str, Any] = {"quant_method": METHOD, "lowbit": __version__}
        if self.layers is None:
            assert self.recipes is not None
            return {**head, "recipe": self.recipes.to_dict(), "skip": written(self.skip, "LowbitConfig")}
        names: dict[Recipe, list[str]] = {}
        for name, recipe in self.layers.items():
            names.setdefault(recipe, []).append(name)
        return {**head, "layers": [{"recipe": recipe.to_dict(), "names": rows} for recipe, rows in names.items()]}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """The config of a quantized model from the values of ``to_dict``. Raises ValueError for other values."""
        try:
            rows = config_dict["layers"]
            config = cls(layers={str(name): Recipe.from_dict(row["recipe"]) for row in rows for name in row["names"]})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"the quantization_config of this model is damaged ({type(error).__name__}: {error}); expected layers "
                f"with their recipes, as save_pretrained writes them, got {shown(config_dict)}"
            ) from None
        return (config, kwargs) if return_unused_kwargs else config

    def to_diff_dict(self) -> dict[str, Any]:
        """Same as ``to_dict``, which has no default values."""
        return self.to_dict()


AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = LowbitConfig


class _Quantize(ConversionOps):  # type: ignore[misc]
    """Receives from transformers the tensors of layers to be quantized."""

    def __init__(self, loading: _Loading) -> None:
        self.loading = loading

    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Tensor]:
        """Take the tensors of quantized layers, and return the tensors that transformers must set itself."""
        tensors = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        missing = kwargs.get("missing_keys")
        rest = {name: value for name, value in tensors.items() if not self.loading.take(name, value)}
        if missing is not None:
            missing.difference_update(tensors.keys() - rest.keys())
        return rest


class _Loading:
    """Quantizes the layers of a model while it loads, each as soon as all its tensors are loaded."""

    def __init__(self, model: Any, recipes: LayerRecipes, skip: Skip) -> None:
        self.model, self.maker = model, QuantMaker(model, Ruled())
        tied = model.all_tied_weights_keys
        for name, source in tied.items():  # transformers ties weights only after loading
            path, _, parameter = name.rpartition(".")
            model.get_submodule(path)._parameters[parameter] = model.get_parameter(source)
        names, protect = protections(model, skip, recipes, unties=True)
        self.selection = select(model, plain_layers(), recipes, names, protect)
        self.aliases = paths(model)
        shared = {*tied.keys(), *tied.values()}
        #: Missing tensors by layer. Layers with a tied weight are not here: ``finish`` converts them.
        self.awaited: dict[str, set[str]] = {}
        for layer, chosen in self.selection.chosen.items():
            tensors = {f"{layer}.{name}" for name, _ in chosen.module.named_parameters()}
            if not shared & tensors:
                self.awaited[layer] = tensors
        self.layer_of = {name: layer for layer, tensors in self.awaited.items() for name in tensors}

    def take(self, name: str, value: Tensor) -> bool:
        """Put a tensor into its layer, and quantize the layer after the last tensor. False: not such a layer."""
        layer = self.layer_of.get(name)
        if layer is None or layer not in self.awaited:
            return False
        path, _, parameter = name.rpartition(".")
        module = self.model.get_submodule(path)
        old = module._parameters[parameter]
        if old is None or old.shape != value.shape:  # transformers reports the error
            del self.awaited[layer]
            return False
        module._parameters[parameter] = _mark_loaded(nn.Parameter(value, old.requires_grad))
        self.awaited[layer].discard(name)
        if not self.awaited[layer]:
            self._replace(layer)
        return True

    def _replace(self, layer: str) -> None:
        chosen = self.selection.chosen.pop(layer)
        new = make_all({layer: chosen}, self.maker.convert)[id(chosen.module)]
        self.maker.made.clear()  # its keys are storages of weights, which are now free and may be reused
        for module in new.modules():
            module._is_hf_initialized = True  # type: ignore[assignment]
        for tensor in (*new.parameters(), *new.buffers()):
            _mark_loaded(tensor)
        for alias in self.aliases[id(chosen.module)]:
            self.model.set_submodule(alias, new)

    def finish(self) -> None:
        """Quantize the remaining layers: tied ones, and those missing in the checkpoint."""
        swap(self.model, make_all(self.selection.chosen, self.maker.convert))


def _mark_loaded(tensor: Any) -> Any:
    """Mark ``tensor`` so that transformers does not initialize it."""
    tensor._is_hf_initialized = True
    return tensor


@register_quantizer(METHOD)
class LowbitHfQuantizer(HfQuantizer):  # type: ignore[misc]
    """The quantizer that transformers calls to load, save and dequantize a model."""

    requires_calibration = False
    is_trainable = True  # with adapters; quantized weights have no gradient
    is_compileable = True
    _loading: _Loading | None = None

    def is_serializable(self) -> bool:
        return True

    def validate_environment(self, device_map: Any = None, **kwargs: Any) -> None:
        """Raise ValueError for a device map with ``"disk"``."""
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError("quantized layers are not offloaded to a disk; pass a device_map without 'disk'")

    # -- loading ------------------------------------------------------------------------------------------------------
    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        config: LowbitConfig = self.quantization_config
        if config.recipes is not None:
            self._loading = _Loading(model, config.recipes, config.skip)
            return
        recipes = _present(model, config.layers or {})
        cache_scales.expect_(model)
        try:
            swap(model, replacements(model, recipes))
        except ValueError as error:
            raise ValueError(f"the quantization_config does not fit a {type(model).__name__}: {error}") from None
        expected = {rf"(^|\.){re.escape(name)}$" for name in placeholders(model)}
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *expected}

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return self._loading is not None and self._loading.layer_of.get(param_name) in self._loading.awaited

    def get_quantize_ops(self) -> _Quantize:
        assert self._loading is not None
        return _Quantize(self._loading)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        if self._loading is not None:
            loading, self._loading = self._loading, None
            loading.finish()
        lost = [
            f"{name}.{part}"
            for name, layer in quantized_layers(model).items()
            for part, value in layer.named_parameters()
            if part.rpartition(".")[2] in (*PARTS, *INPUT_PARTS) and not getattr(value, "_is_hf_initialized", False)
        ]
        if self.pre_quantized and lost:
            raise ValueError(
                f"the checkpoint lacks {len(lost)} tensors of quantized layers, such as {', '.join(lost[:3])}; copy "
                f"the checkpoint again, or save the model again"
            )
        stack_experts_(model)
        mark(model)
        self._describe(model)

    # -- saving and dequantizing --------------------------------------------------------------------------------------
    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """The state as plain tensors, also of packed layers; writes the quantized layers to the model's config."""
        self._describe(model)
        state, seen = model.state_dict(), set()
        for name in quantized_layers(model):
            for key in [
                key for key in state if key.startswith(f"{name}.") and key.rpartition(".")[2] in (*PARTS, *INPUT_PARTS)
            ]:
                shared = storage(state[key])
                if shared in seen:  # transformers saves shared tensors only if its model ties them
                    state[key] = state[key].to("cpu", copy=True)
                seen.add(shared)
        return {**state, **placeholders(model)}, {METHOD: __version__}

    def _describe(self, model: Any) -> None:
        config = LowbitConfig(layers={name: layer.recipe for name, layer in quantized_layers(model).items()})
        self.quantization_config = config
        if not isinstance(getattr(model.config, "quantization_config", None), LowbitConfig):
            _unshare_config(model)
        model.config.quantization_config = config
        untied = model.get_output_embeddings()
        if untied is not None and "weight" not in untied._parameters:
            model.config.get_text_config(decoder=True).tie_word_embeddings = False

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        dequantize_(model)
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype  # saving leaves a name in the config
        return model if dtype is None else model.to(dtype)


def _present(model: Any, layers: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """The layers that ``model`` has, by its names: a base model has no head, and names without the prefix.

    Raises ValueError if the model has none of the layers.
    """
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    prefix = f"{model.base_model_prefix}."
    recipes = {}
    for layer, recipe in layers.items():
        name = next((alias for alias in (layer, layer.removeprefix(prefix), prefix + layer) if alias in names), None)
        if name is not None:
            recipes[name] = recipe
    if not recipes:
        raise ValueError(
            f"the quantization_config does not fit a {type(model).__name__}: it has none of the layers "
            f"{shown(list(layers)[:4])}"
        )
    return recipes


def _unshare_config(model: Any) -> None:
    """Copy the config of ``model``, which unquantized models may share."""
    old = model.config
    new = copy.deepcopy(old)
    for module in model.modules():
        if vars(module).get("config") is old:
            module.config = new


def _allow_cast(name: str) -> None:
    """Let quantized models use ``half`` and ``float``, which ``PreTrainedModel`` rejects for every quantizer.

    The cast is safe, because quantized values are stored as integers, which it does not change.
    """
    checked, plain = getattr(transformers.PreTrainedModel, name), getattr(nn.Module, name)

    @wraps(checked)
    def cast(self: Any, *args: Any) -> Any:
        is_lowbit = isinstance(getattr(self, "hf_quantizer", None), LowbitHfQuantizer)
        return (plain if is_lowbit else checked)(self, *args)

    setattr(transformers.PreTrainedModel, name, cast)


for _name in ("half", "float"):
    _allow_cast(_name)


def mark(model: nn.Module) -> None:
    """Give the Hugging Face models inside ``model`` the quantizer that saves them, or remove it if they are plain.

    Every conversion of lowbit calls this. Quantizers of other libraries stay, except a GGUF quantizer that has decoded
    all weights.
    """
    for module in model.modules():
        if not isinstance(module, transformers.PreTrainedModel):
            continue
        quantizer: Any = getattr(module, "hf_quantizer", None)
        layers = {name: layer.recipe for name, layer in quantized_layers(module).items()}
        if layers and _is_decoded_gguf(quantizer):
            quantizer.remove_quantization_config(module)
            quantizer = None
        if layers and quantizer is None:
            module.hf_quantizer = LowbitHfQuantizer(LowbitConfig(layers=layers))
            module.is_quantized, module.quantization_method = True, METHOD  # makes Trainer require adapters
        elif not layers and isinstance(quantizer, LowbitHfQuantizer):
            quantizer.remove_quantization_config(module)
        tied = getattr(module, "all_tied_weights_keys", None)
        if tied and layers:
            names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
            module.all_tied_weights_keys = {a: b for a, b in tied.items() if a in names and b in names}


def _is_decoded_gguf(quantizer: Any) -> bool:
    """Whether a GGUF quantizer has decoded all weights, so that the model is plain."""
    method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", None)
    return method == "gguf" and not getattr(quantizer, "packed_modules", None)
