"""LoRA and DoRA of peft on quantized layers: adapters train, quantized weights do not change.

peft has no table for layers of other libraries, so this module replaces two methods of its ``BaseTuner``. Afterwards
every call that puts adapters on a model with quantized layers (``peft.get_peft_model``, ``PeftModel.from_pretrained``,
``add_adapter``, trl's trainers) uses ``on_quantized_layers``. The module is imported automatically in a process with
peft and a layer of lowbit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import wraps
from os import PathLike
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraConfig, LoraModel
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.variants import DoraLinearVariant
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, check_adapters_to_merge
from peft.utils.constants import SEQ_CLS_HEAD_NAMES
from torch import Tensor, nn

from lowbit.convert.engine import quantized_layers, take_over
from lowbit.convert.maker import Ruled
from lowbit.models.adapters import KEEPING_INITS
from lowbit.models.wrap import plain_class
from lowbit.nn.attention import QuantMultiheadAttention, split_attention_
from lowbit.nn.base import kind
from lowbit.nn.conv import QuantConv1d, QuantConv2d, QuantConv3d
from lowbit.nn.embedding import QuantEmbedding
from lowbit.nn.experts import QuantExperts
from lowbit.nn.linear import QuantLinear
from lowbit.nn.packed import PackedLinear

__all__ = ["LoraQuantLinear", "MethodRefused", "from_pretrained", "get_peft_model", "on_quantized_layers", "register"]


def get_peft_model(model: nn.Module, config: Any, adapter_name: str = "default", **kwargs: Any) -> Any:
    """``peft.get_peft_model`` for a model with quantized layers; only the LoRA adapters are trained.

    ``merge_and_unload`` of the result quantizes the merged weights again, with the same recipes. For plain merged
    layers, call ``lowbit.dequantize_(model)`` first.

    Args:
        model: The quantized model.
        config: A LoraConfig, also with ``use_dora``. ``target_modules="all-linear"`` includes quantized layers.
        adapter_name: Name of the adapter.
        **kwargs: More arguments of ``peft.get_peft_model``.

    Raises:
        ValueError: A target is packed or not a Linear layer, the initialization changes the weight (PiSSA, OLoRA,
            LoftQ, ...), or the method is not LoRA.

    Source: arXiv 2106.09685, 2305.14314, 2402.09353.
    """
    return peft.get_peft_model(model, config, adapter_name, **kwargs)


def from_pretrained(
    model: nn.Module,
    directory: str | PathLike[str],
    adapter_name: str = "default",
    is_trainable: bool = False,
    config: Any = None,
    **kwargs: Any,
) -> Any:
    """``peft.PeftModel.from_pretrained`` for a model with quantized layers, or with ``nn.MultiheadAttention``.

    An ``nn.MultiheadAttention`` with adapters on its projections, as plans add them, gets a layer for each projection.

    Args:
        model: The base model, or a PeftModel, which gets another adapter. It is changed in place.
        directory: The saved adapter.
        adapter_name: Name of the adapter.
        is_trainable: Whether the adapter is trained further.
        config: Replaces the config in ``directory``.
        **kwargs: More arguments of peft.

    Raises:
        ValueError: As for ``get_peft_model``.
    """
    config = peft.PeftConfig.from_pretrained(directory) if config is None else config
    config.inference_mode = not is_trainable
    targets = config.target_modules if isinstance(config.target_modules, list | set) else ()
    split_attention_(model, lambda path: any(f"{path}.{name}_proj" in targets for name in "qkv"))
    if not isinstance(model, peft.PeftModel):
        return peft.PeftModel.from_pretrained(model, directory, adapter_name, is_trainable, config, **kwargs)
    model.add_adapter(adapter_name, config)
    model.load_adapter(directory, adapter_name, is_trainable=is_trainable, **kwargs)
    if is_trainable:
        model.set_requires_grad(adapter_name)
    return model


def register(config: Any) -> Any:
    """Let a LoraConfig put adapters on quantized layers, and return it. Calls of peft do this automatically."""
    if isinstance(config, LoraConfig):
        config._register_custom_module(dict.fromkeys((QuantLinear, *_REFUSED), LoraQuantLinear))
    return config


class MethodRefused(ValueError):
    """A method of peft that does not work on quantized layers."""


@contextmanager
def on_quantized_layers(tuner: Any, model: nn.Module, config: Any) -> Iterator[None]:
    """Context in which a tuner of peft puts adapters on a model with quantized layers, also for ``"all-linear"``.

    Raises:
        MethodRefused: The tuner is not LoRA, and fails on quantized layers.
    """
    register(config)
    targets = getattr(config, "target_modules", None)
    if isinstance(targets, str) and targets.lower() == "all-linear":
        config.target_modules = _all_linear(model, str(getattr(config, "task_type", None)))
    try:
        yield
    except Exception as error:
        if type(tuner) is LoraModel or isinstance(error, MethodRefused | MemoryError | torch.OutOfMemoryError):
            raise
        method = config.peft_type.value
        raise MethodRefused(
            f"{method} does not support layers that lowbit quantized; LoRA and DoRA work (peft.LoraConfig). For "
            f"{method}, target unquantized layers (see skip= of quantize_), or call lowbit.dequantize_(model) first. "
            f"peft says: {error}"
        ) from error


def _all_linear(model: nn.Module, task: str) -> set[str]:
    """The Linear layers of ``model``, quantized or not, except its head."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    heads = {id(head)} | {id(getattr(model, name, None)) for name in SEQ_CLS_HEAD_NAMES if task.endswith("SEQ_CLS")}
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | QuantLinear) and id(module) not in heads
    }


#: Quantized layers that are not a plain matrix, with the end of an error message.
_REFUSED: dict[type[nn.Module], str] = {
    PackedLinear: "is packed; call lowbit.unprepack_(model) first, and lowbit.prepack_(model) again for inference",
    **{
        layer: f"is {name}; leave it out of target_modules, or of the recipe"
        for layer, name in (
            *((layer, "a convolution") for layer in (QuantConv1d, QuantConv2d, QuantConv3d)),
            (QuantEmbedding, "an embedding"),
            (QuantExperts, "a stack of experts"),
            (QuantMultiheadAttention, "an attention with several projections"),
        )
    },
}


class _Dora(DoraLinearVariant):  # type: ignore[misc]
    """DoRA with the dequantized weight."""

    @staticmethod
    def init(module: Any, adapter_name: str, **kwargs: Any) -> None:
        with module.plain_base():
            DoraLinearVariant.init(module, adapter_name, **kwargs)

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any) -> Tensor:
        dropout = module.lora_dropout[active_adapter]
        drops = module.training and not isinstance(dropout, nn.Identity)
        delta: Tensor = module.lora_magnitude_vector[active_adapter](
            dropout(x) if drops else x,
            lora_A=module.lora_A[active_adapter],
            lora_B=module.lora_B[active_adapter],
            scaling=module.scaling[active_adapter],
            base_layer=_plain(module.base_layer),
            base_result=None if drops else result,
            adapter_name=active_adapter,
        )
        return result + delta


class LoraQuantLinear(LoraLinear):  # type: ignore[misc]
    """peft's LoRA layer around a QuantLinear: ``base(x) + lora_B(lora_A(x)) * scaling``.

    ``merge`` adds the adapters in fp32 to the dequantized weight, and quantizes the sum with the base's recipe.
    ``unmerge`` restores the layer from before the merge. After ``lowbit.dequantize_`` it behaves as peft's own layer.
    """

    base_layer: Any
    merged_adapters: list[str]

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: Any, **kwargs: Any) -> None:
        layer = base_layer.get_base_layer() if isinstance(base_layer, BaseTunerLayer) else base_layer
        name = kwargs.get("target_name") or type(layer).__name__
        reason = _REFUSED.get(plain_class(layer))
        if reason is not None:
            raise ValueError(f"LoRA: {name} {reason}")
        init = config.init_lora_weights
        if init not in KEEPING_INITS:
            raise ValueError(
                f"LoRA: init_lora_weights={init!r} changes the weight of {name}, which is quantized; expected one of "
                f"{', '.join(map(repr, KEEPING_INITS))}; or call peft.get_peft_model on the plain model, then "
                f"lowbit.quantize_"
            )
        self._before: tuple[Any, ...] = ()  # the base before the first merge; a tuple, to not register a submodule
        super().__init__(base_layer, adapter_name, config, **kwargs)

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        return {(): None, ("use_dora",): _Dora}

    @property
    def fan_in_fan_out(self) -> bool:
        """Whether the weight is ``[in, out]``, as in a Conv1D, which the base may be after dequantization."""
        return kind(self.base_layer) is None and not isinstance(self.base_layer, nn.Linear)

    @fan_in_fan_out.setter
    def fan_in_fan_out(self, value: bool) -> None:
        """Ignore the value that peft sets for the layer before quantization."""

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        return module.in_features, module.out_features

    @contextmanager
    def plain_base(self) -> Iterator[nn.Module]:
        """Context in which the base is a Linear layer; changes of its weight are copied back to a plain base."""
        base = self.base_layer
        self.base_layer = plain = _plain(base)
        try:
            yield plain
            if kind(base) is None and plain is not base:
                base.weight.data.copy_(plain.weight.t())
        finally:
            self.base_layer = base

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge the adapters. Raises ValueError for a packed base, and for merged weights with NaN or Inf."""
        base, state = self.base_layer, kind(self.base_layer)
        names = check_adapters_to_merge(self, adapter_names)
        if state is None:
            with self.plain_base():
                super().merge(safe_merge, names)
            return
        if state == "packed":
            raise ValueError(f"merge: the layer {_REFUSED[PackedLinear]}")
        if not names:
            return
        before, merged = self._before or (base,), list(self.merged_adapters)
        self.merged_adapters = []
        try:
            self.base_layer = before[0]  # merge all adapters at once, so that the weight is quantized once
            with self.plain_base() as plain:
                super().merge(safe_merge, [*merged, *names])
            new = _requantized(plain, before[0])
        except BaseException:
            self.base_layer, self.merged_adapters = base, merged
            raise
        self.base_layer, self._before = new, before

    def unmerge(self) -> None:
        """Restore the base from before ``merge``."""
        if not self._before or kind(self.base_layer) is None:
            with self.plain_base():
                super().unmerge()
            return
        self.base_layer = self._before[0].to(self.base_layer.codes.device)
        self._before, self.merged_adapters = (), []


def _plain(base: Any) -> nn.Linear:
    """A Linear layer with the weight ``[out, in]`` of ``base``, in fp32 if it is quantized."""
    if isinstance(base, nn.Linear):
        return base
    weight = base.weight.t() if kind(base) is None else base.plain_weight(torch.float32)
    rows, cols = weight.shape
    plain = nn.Linear(cols, rows, bias=base.bias is not None, device="meta")
    plain.weight = nn.Parameter(weight, requires_grad=False)
    if base.bias is not None:
        plain.bias = nn.Parameter(base.bias.detach().clone(), requires_grad=False)
    return plain


def _requantized(plain: Any, base: QuantLinear) -> QuantLinear:
    """A layer like ``base`` with the weight and bias of ``plain``. Raises ValueError for NaN and Inf."""
    matrix = plain.weight.detach()
    if base.columns is not None:
        matrix = matrix.index_select(1, base.columns)
    weight, _ = Ruled().weight("", matrix, base.recipe)
    bias = plain.bias
    if bias is not None and base.bias is not None:
        bias = nn.Parameter(bias.detach().to(base.bias.dtype), base.bias.requires_grad)
    new = QuantLinear(replace(weight, dtype=base.weight_dtype), bias, base.recipe, base.input_scales, base.columns)
    take_over(new, base)
    return new


def _context(tuner: Any, model: nn.Module, config: Any) -> Any:
    return on_quantized_layers(tuner, model, config) if quantized_layers(model) else nullcontext()


def _patch_tuner() -> None:
    """Patch the two methods that all calls of peft use: one creates a tuner, the other adds an adapter to it."""
    create, inject = BaseTuner.__init__, BaseTuner.inject_adapter

    @wraps(create)
    def __init__(self: Any, model: nn.Module, peft_config: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        with _context(self, model, peft_config[adapter_name] if isinstance(peft_config, dict) else peft_config):
            create(self, model, peft_config, adapter_name, *args, **kwargs)

    @wraps(inject)
    def inject_adapter(self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        with _context(self, model, self.peft_config[adapter_name]):
            inject(self, model, adapter_name, *args, **kwargs)

    BaseTuner.__init__, BaseTuner.inject_adapter = __init__, inject_adapter


_patch_tuner()
