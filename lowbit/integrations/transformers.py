"""transformers: ``from_pretrained`` that quantizes while it loads, and ``save_pretrained`` of quantized models.

A saved model's ``config.json`` has the quantization method ``"lowbit"`` and lists its quantized layers with their
recipes; its safetensors files hold their codes and scales. transformers reads such a directory where lowbit has been
imported, and refuses it elsewhere.
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
from lowbit.models.names import patterns_in, written
from lowbit.models.ties import paths, storage
from lowbit.nn.experts import stack_experts_
from lowbit.nn.linear import INPUT_PARTS, PARTS
from lowbit.recipes import LayerRecipes, Recipe, layer_recipes, refuse_beyond
from lowbit.serialize.huggingface import placeholders
from lowbit.tensor.quantized import Quantized

if int(transformers.__version__.split(".")[0]) < TRANSFORMERS:
    raise ImportError(
        f"lowbit.integrations.transformers needs transformers >= {TRANSFORMERS}, and {transformers.__version__} is "
        f"installed; use lowbit.quantize_, lowbit.save_model and lowbit.load_model, which take any version"
    )

from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

__all__ = ["LowbitConfig", "LowbitHfQuantizer", "mark"]

#: Models initialize what has no such mark, also weights of the layers inside of a module.
Quantized._is_hf_initialized = True  # type: ignore[attr-defined]


class LowbitConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """How ``from_pretrained`` quantizes: ``from_pretrained(NAME, quantization_config=LowbitConfig("W4A16"))``.

    ``recipe``, ``skip``: as for ``lowbit.quantize_``, with the same result in every bit; ``modules_to_not_convert`` is
    what other configs call ``skip``. ``layers``: of a model that is quantized already, its recipes by the full names of
    its layers; ``config.json`` has them.
    Raises TypeError and ValueError as ``lowbit.quantize_`` does for recipes, and for neither or both of ``recipe`` and
    ``layers``, or both of ``skip`` and ``modules_to_not_convert``.
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
            raise ValueError("LowbitConfig: give a recipe, for instance LowbitConfig('W4A16')")
        if modules_to_not_convert is not None:
            if skip is not DEFAULT_SKIP:
                raise ValueError("LowbitConfig: skip and modules_to_not_convert are one and the same; give one of them")
            skip = modules_to_not_convert
        self.quant_method = METHOD
        self.plan = None if recipe is None else layer_recipes(recipe)
        for one in () if self.plan is None else self.plan.recipes:
            refuse_beyond(one, "LowbitConfig", ("output.a", "output.b"))
        self.skip = patterns_in(skip, "skip")
        self.layers = None if layers is None else dict(layers)

    def to_dict(self) -> dict[str, Any]:
        """JSON data: the layers of a quantized model, or the recipe and the names to skip. Raises ValueError for
        functions among these.
        """
        head: dict[str, Any] = {"quant_method": METHOD, "lowbit": __version__}
        if self.layers is None:
            assert self.plan is not None
            return {**head, "recipe": self.plan.to_dict(), "skip": written(self.skip, "LowbitConfig")}
        names: dict[Recipe, list[str]] = {}
        for name, recipe in self.layers.items():
            names.setdefault(recipe, []).append(name)
        return {**head, "layers": [{"recipe": recipe.to_dict(), "names": of} for recipe, of in names.items()]}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """The config that ``to_dict`` described. Raises ValueError for other data."""
        try:
            rows = config_dict["layers"]
            found = cls(layers={str(name): Recipe.from_dict(row["recipe"]) for row in rows for name in row["names"]})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"the quantization_config of this model is damaged ({type(error).__name__}: {error}); expected layers "
                f"with their recipes, as save_pretrained writes them, got {shown(config_dict)}"
            ) from None
        return (found, kwargs) if return_unused_kwargs else found

    def to_diff_dict(self) -> dict[str, Any]:
        """All of ``to_dict``: nothing in it is a default."""
        return self.to_dict()


AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = LowbitConfig


class _Quantize(ConversionOps):  # type: ignore[misc]
    """What transformers calls with the tensors of a checkpoint that belong to layers to be quantized."""

    def __init__(self, loading: _Loading) -> None:
        self.loading = loading

    def convert(self, input_dict: dict[str, Any], **told: Any) -> dict[str, Tensor]:
        """The tensors that transformers is to set itself."""
        given = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        missing = told.get("missing_keys")
        rest = {name: value for name, value in given.items() if not self.loading.take(name, value)}
        if missing is not None:
            missing.difference_update(given.keys() - rest.keys())
        return rest


class _Loading:
    """The layers of one model that are to be quantized while it loads, each as soon as its tensors are there."""

    def __init__(self, model: Any, plan: LayerRecipes, skip: Skip) -> None:
        self.model, self.maker = model, QuantMaker(model, Ruled())
        tied = model.all_tied_weights_keys
        for name, source in tied.items():  # as transformers does once they are loaded
            path, _, own = name.rpartition(".")
            model.get_submodule(path)._parameters[own] = model.get_parameter(source)
        names, protect = protections(model, skip, plan, unties=True)
        self.found = select(model, plain_layers(), plan, names, protect)
        self.aliases = paths(model)
        shared = {*tied.keys(), *tied.values()}
        #: The tensors that each layer awaits, and the layer of each tensor. Layers with a tied weight wait for the end,
        #: when transformers has tied it.
        self.awaited: dict[str, set[str]] = {}
        for layer, chosen in self.found.chosen.items():
            own = {f"{layer}.{name}" for name, _ in chosen.module.named_parameters()}
            if not shared & own:
                self.awaited[layer] = own
        self.layer_of = {name: layer for layer, own in self.awaited.items() for name in own}

    def take(self, name: str, value: Tensor) -> bool:
        """Put a tensor of the checkpoint into its layer, and quantize the layer if that was the last."""
        layer = self.layer_of.get(name)
        if layer is None or layer not in self.awaited:
            return False
        path, _, own = name.rpartition(".")
        holder = self.model.get_submodule(path)
        old = holder._parameters[own]
        if old is None or old.shape != value.shape:  # transformers reports it
            del self.awaited[layer]
            return False
        holder._parameters[own] = _loaded(nn.Parameter(value, old.requires_grad))
        self.awaited[layer].discard(name)
        if not self.awaited[layer]:
            self._replace(layer)
        return True

    def _replace(self, layer: str) -> None:
        chosen = self.found.chosen.pop(layer)
        new = make_all({layer: chosen}, self.maker.convert)[id(chosen.module)]
        self.maker.made.clear()  # by the storage of the weight, which is free now and may become the next one's
        for module in new.modules():
            module._is_hf_initialized = True  # type: ignore[assignment]
        for tensor in (*new.parameters(), *new.buffers()):
            _loaded(tensor)
        for alias in self.aliases[id(chosen.module)]:
            self.model.set_submodule(alias, new)

    def finish(self) -> None:
        """Quantize the layers that were tied, or that the checkpoint did not have."""
        swap(self.model, make_all(self.found.chosen, self.maker.convert))


def _loaded(tensor: Any) -> Any:
    """``tensor``, of which transformers now knows that it holds what a file held."""
    tensor._is_hf_initialized = True
    return tensor


@register_quantizer(METHOD)
class LowbitHfQuantizer(HfQuantizer):  # type: ignore[misc]
    """What transformers asks while it loads, saves and dequantizes a model of lowbit."""

    requires_calibration = False
    is_trainable = True  # with adapters; codes have no gradient
    is_compileable = True
    _loading: _Loading | None = None

    def is_serializable(self) -> bool:
        return True

    def validate_environment(self, device_map: Any = None, **kwargs: Any) -> None:
        """Raises ValueError for a device map with a disk in it."""
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError("lowbit's layers are not offloaded to a disk; give a device_map without 'disk'")

    # -- loading ------------------------------------------------------------------------------------------------------
    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        config: LowbitConfig = self.quantization_config
        if config.plan is not None:
            self._loading = _Loading(model, config.plan, config.skip)
            return
        recipes = _present(model, config.layers or {})
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
                f"the checkpoint lacks {len(lost)} tensors of quantized layers, such as {', '.join(lost[:3])}; copy it "
                f"again, or save the model again"
            )
        stack_experts_(model)
        mark(model)
        self._describe(model)

    # -- saving and going back ----------------------------------------------------------------------------------------
    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """The state of a model, packed or not, in plain tensors; its config then names its quantized layers."""
        self._describe(model)
        state, seen = model.state_dict(), set()
        for name in quantized_layers(model):
            for key in [
                key for key in state if key.startswith(f"{name}.") and key.rpartition(".")[2] in (*PARTS, *INPUT_PARTS)
            ]:
                shared = storage(state[key])
                if shared in seen:  # files of transformers share nothing but what its models tie
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
    """The layers that ``model`` has, by its own names: a base model lacks the head's, and the prefix of the others.

    Raises ValueError where there are none.
    """
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    prefix = f"{model.base_model_prefix}."
    found = {}
    for name, recipe in layers.items():
        own = next((one for one in (name, name.removeprefix(prefix), prefix + name) if one in known), None)
        if own is not None:
            found[own] = recipe
    if not found:
        raise ValueError(
            f"the quantization_config does not fit a {type(model).__name__}: it has none of the layers "
            f"{shown(list(layers)[:4])}"
        )
    return found


def _unshare_config(model: Any) -> None:
    """Give ``model`` a config of its own: the same object may be that of other models, which are not quantized."""
    old = model.config
    new = copy.deepcopy(old)
    for module in model.modules():
        if vars(module).get("config") is old:
            module.config = new


def _casting(name: str) -> None:
    """Let ``PreTrainedModel`` cast models of lowbit. It refuses every quantizer, but codes are not floating point."""
    refuses, casts = getattr(transformers.PreTrainedModel, name), getattr(nn.Module, name)

    @wraps(refuses)
    def cast(self: Any, *args: Any) -> Any:
        mine = isinstance(getattr(self, "hf_quantizer", None), LowbitHfQuantizer)
        return (casts if mine else refuses)(self, *args)

    setattr(transformers.PreTrainedModel, name, cast)


for _name in ("half", "float"):
    _casting(_name)


def mark(model: nn.Module) -> None:
    """Give the models of transformers inside ``model`` the quantizer that saves them, or take it away.

    Every conversion of lowbit does this. A quantizer of another library stays, unless it has no layers in the model:
    that of a GGUF file whose weights transformers read as plain ones.
    """
    for module in model.modules():
        if not isinstance(module, transformers.PreTrainedModel):
            continue
        given: Any = getattr(module, "hf_quantizer", None)
        layers = {name: layer.recipe for name, layer in quantized_layers(module).items()}
        if layers and _read_gguf(given):
            given.remove_quantization_config(module)
            given = None
        if layers and given is None:
            module.hf_quantizer = LowbitHfQuantizer(LowbitConfig(layers=layers))
            module.is_quantized, module.quantization_method = True, METHOD  # Trainer asks for adapters
        elif not layers and isinstance(given, LowbitHfQuantizer):
            given.remove_quantization_config(module)
        tied = getattr(module, "all_tied_weights_keys", None)
        if tied and layers:
            known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
            module.all_tied_weights_keys = {a: b for a, b in tied.items() if a in known and b in known}


def _read_gguf(quantizer: Any) -> bool:
    """Whether a quantizer has done its work: it read a GGUF file, and kept no weight in the file's blocks."""
    method = getattr(getattr(quantizer, "quantization_config", None), "quant_method", None)
    return method == "gguf" and not getattr(quantizer, "packed_modules", None)
