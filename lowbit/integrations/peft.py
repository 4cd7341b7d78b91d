"""peft: LoRA and DoRA on quantized layers; adapters train, codes stay.

Once this module is imported, every call that puts adapters on a model with quantized layers
(``peft.get_peft_model``, ``PeftModel.from_pretrained``, ``add_adapter``, trl's trainers) goes through
``on_quantized_layers``: peft has no table for layers of other libraries, so two methods of its ``BaseTuner`` are
replaced. A process that has peft and a layer of lowbit imports this module by itself.
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
from lowbit.models.wrap import plain_class
from lowbit.nn.attention import QuantMultiheadAttention
from lowbit.nn.base import kind
from lowbit.nn.conv import QuantConv1d, QuantConv2d, QuantConv3d
from lowbit.nn.embedding import QuantEmbedding
from lowbit.nn.experts import QuantExperts
from lowbit.nn.linear import QuantLinear
from lowbit.nn.packed import PackedLinear

__all__ = ["LoraQuantLinear", "MethodRefused", "from_pretrained", "get_peft_model", "on_quantized_layers", "register"]

#: Values of ``LoraConfig.init_lora_weights`` that leave the weight of the layer as it is.
_INITS = (True, False, "gaussian", "orthogonal", "eva")


def get_peft_model(model: nn.Module, config: Any, adapter_name: str = "default", **kwargs: Any) -> Any:
    """``peft.get_peft_model`` for a model with quantized layers: LoRA adapters on them, which alone train.

    ``config``: a LoraConfig, ``use_dora`` included; ``target_modules="all-linear"`` means the quantized layers too.
    ``merge_and_unload`` of the result quantizes the merged weights again, as they were; for plain merged layers call
    ``lowbit.dequantize_(model)`` first.
    Raises ValueError for packed layers and those that are no Linear among the targets, for an initialization that
    changes the weight (PiSSA, OLoRA, LoftQ, ...), and for methods other than LoRA.
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
    """``peft.PeftModel.from_pretrained`` for a model with quantized layers.

    ``model``: quantized; or a PeftModel, which gets one adapter more. ``config``: what to use in place of the one in
    ``directory``. Raises as ``get_peft_model``.
    """
    config = peft.PeftConfig.from_pretrained(directory) if config is None else config
    config.inference_mode = not is_trainable
    if not isinstance(model, peft.PeftModel):
        return peft.PeftModel.from_pretrained(model, directory, adapter_name, is_trainable, config, **kwargs)
    model.add_adapter(adapter_name, config)
    model.load_adapter(directory, adapter_name, is_trainable=is_trainable, **kwargs)
    if is_trainable:
        model.set_requires_grad(adapter_name)
    return model


def register(config: Any) -> Any:
    """Let ``config``, a LoraConfig, put adapters on quantized layers, and return it; others are returned as they are.

    Calls of peft do it themselves.
    """
    if isinstance(config, LoraConfig):
        config._register_custom_module(dict.fromkeys((QuantLinear, *_REFUSED), LoraQuantLinear))
    return config


class MethodRefused(ValueError):
    """A method of peft that does not work on quantized layers."""


@contextmanager
def on_quantized_layers(tuner: Any, model: nn.Module, config: Any) -> Iterator[None]:
    """Within, a tuner of peft puts adapters on ``model``, some of whose layers are quantized.

    ``"all-linear"`` means these too. Raises MethodRefused where the tuner fails on them and is no LoRA.
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
            f"{method} cannot be put on this model, which has layers that lowbit quantized: on these peft's LoRA and "
            f"DoRA work (peft.LoraConfig). For {method}, target layers that are not quantized (quantize_ leaves those "
            f"in skip=), or call lowbit.dequantize_(model) first. peft says: {error}"
        ) from error


def _all_linear(model: nn.Module, task: str) -> set[str]:
    """The Linear layers of ``model``, quantized or not, but for its head."""
    find = getattr(model, "get_output_embeddings", lambda: None)
    head = find()
    heads = {id(head)} | {id(getattr(model, name, None)) for name in SEQ_CLS_HEAD_NAMES if task.endswith("SEQ_CLS")}
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | QuantLinear) and id(module) not in heads
    }


#: What is no plain matrix of codes, and what to do about it.
_REFUSED: dict[type[nn.Module], str] = {
    PackedLinear: "is packed; call lowbit.unprepack_(model) first, and lowbit.prepack_(model) again for inference",
    **{
        layer: f"is {what}; leave it out of target_modules, or of the recipe"
        for layer, what in (
            *((layer, "a convolution") for layer in (QuantConv1d, QuantConv2d, QuantConv3d)),
            (QuantEmbedding, "an embedding"),
            (QuantExperts, "a stack of experts"),
            (QuantMultiheadAttention, "an attention with several projections"),
        )
    },
}


class _Dora(DoraLinearVariant):  # type: ignore[misc]
    """DoRA, with what the codes stand for in place of the weight."""

    @staticmethod
    def init(module: Any, adapter_name: str, **kwargs: Any) -> None:
        with module.plain_base():
            DoraLinearVariant.init(module, adapter_name, **kwargs)

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any) -> Tensor:
        dropout = module.lora_dropout[active_adapter]
        drops = module.training and not isinstance(dropout, nn.Identity)
        added: Tensor = module.lora_magnitude_vector[active_adapter](
            dropout(x) if drops else x,
            lora_A=module.lora_A[active_adapter],
            lora_B=module.lora_B[active_adapter],
            scaling=module.scaling[active_adapter],
            base_layer=_plain(module.base_layer),
            base_result=None if drops else result,
            adapter_name=active_adapter,
        )
        return result + added


class LoraQuantLinear(LoraLinear):  # type: ignore[misc]
    """peft's LoRA layer around a QuantLinear: ``base(x) + lora_B(lora_A(x)) * scaling``.

    ``merge`` adds the adapters, in fp32, to what the codes stand for, and quantizes the sum by the recipe of the base.
    ``unmerge`` puts the very layer back that was there before. Where ``lowbit.dequantize_`` has made the base plain,
    all is as in peft's own layer.
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
        if init not in _INITS:
            raise ValueError(
                f"LoRA: init_lora_weights={init!r} changes the weight of {name}, which holds codes; expected one of "
                f"{', '.join(map(repr, _INITS))}; or call peft.get_peft_model on the plain model, and then "
                f"lowbit.quantize_"
            )
        self._before: tuple[Any, ...] = ()  # the base before the first merge; in a tuple, to be no module inside
        super().__init__(base_layer, adapter_name, config, **kwargs)

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        return {(): None, ("use_dora",): _Dora}

    @property
    def fan_in_fan_out(self) -> bool:
        """Whether the weight is ``[in, out]``: that of a Conv1D, which the base may be once it is plain."""
        return kind(self.base_layer) is None and not isinstance(self.base_layer, nn.Linear)

    @fan_in_fan_out.setter
    def fan_in_fan_out(self, value: bool) -> None:
        """peft sets what the config says of the layer that it was before it was quantized."""

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        return module.in_features, module.out_features

    @contextmanager
    def plain_base(self) -> Iterator[nn.Module]:
        """Within, the base is a Linear layer; what is done to its weight, is done to that of a base that is plain."""
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
        base, found = self.base_layer, kind(self.base_layer)
        names = check_adapters_to_merge(self, adapter_names)
        if found is None:
            with self.plain_base():
                super().merge(safe_merge, names)
            return
        if found == "packed":
            raise ValueError(f"merge: the layer {_REFUSED[PackedLinear]}")
        if not names:
            return
        before, merged = self._before or (base,), list(self.merged_adapters)
        self.merged_adapters = []
        try:
            self.base_layer = before[0]  # all of them at once: codes of a sum, not sums of codes
            with self.plain_base() as plain:
                super().merge(safe_merge, [*merged, *names])
            new = _requantized(plain, before[0])
        except BaseException:
            self.base_layer, self.merged_adapters = base, merged
            raise
        self.base_layer, self._before = new, before

    def unmerge(self) -> None:
        """Put the base back that was there before ``merge``."""
        if not self._before or kind(self.base_layer) is None:
            with self.plain_base():
                super().unmerge()
            return
        self.base_layer = self._before[0].to(self.base_layer.codes.device)
        self._before, self.merged_adapters = (), []


def _plain(base: Any) -> nn.Linear:
    """A Linear layer with the weight ``[out, in]`` of ``base``, of which it is fp32 where codes stand for it."""
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
    """The layer that ``base`` becomes with the weight and bias of ``plain``. Raises ValueError for NaN and Inf."""
    weight, _ = Ruled().weight("", plain.weight.detach(), base.recipe)
    bias = plain.bias
    if bias is not None and base.bias is not None:
        bias = nn.Parameter(bias.detach().to(base.bias.dtype), base.bias.requires_grad)
    new = QuantLinear(replace(weight, dtype=base.weight_dtype), bias, base.recipe, base.input_scales)
    take_over(new, base)
    return new


def _around(tuner: Any, model: nn.Module, config: Any) -> Any:
    """The context of a call of a tuner: none if no layer of ``model`` is quantized."""
    return on_quantized_layers(tuner, model, config) if quantized_layers(model) else nullcontext()


def _teach() -> None:
    """Let every way into peft's tuners know quantized layers: each makes a tuner or adds an adapter to it."""
    make, inject = BaseTuner.__init__, BaseTuner.inject_adapter

    @wraps(make)
    def __init__(self: Any, model: nn.Module, peft_config: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        with _around(self, model, peft_config[adapter_name] if isinstance(peft_config, dict) else peft_config):
            make(self, model, peft_config, adapter_name, *args, **kwargs)

    @wraps(inject)
    def inject_adapter(self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        with _around(self, model, self.peft_config[adapter_name]):
            inject(self, model, adapter_name, *args, **kwargs)

    BaseTuner.__init__, BaseTuner.inject_adapter = __init__, inject_adapter


_teach()
