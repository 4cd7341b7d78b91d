"""Peers for training Linear layers in low precision: torchao's FP8, and its int8 mixed precision.

All run without torch.compile, as lowbit does here, and skip the layers that lowbit skips.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

#: Changes a model in place.
Prepare = Callable[[nn.Module], object]


def _chosen(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and name != "lm_head"


def _float8(recipe: str, emulate: bool) -> Prepare:
    def prepare(model: nn.Module) -> object:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
        return convert_to_float8_training(model, config=config, module_filter_fn=_chosen)

    return prepare


def _int8(model: nn.Module) -> object:
    from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
    from torchao.quantization import quantize_

    return quantize_(model, Int8MixedPrecisionTrainingConfig(module_swap=True), filter_fn=_chosen)


#: ``emulate`` multiplies numbers rounded to FP8 in high precision; otherwise torch._scaled_mm multiplies the codes.
PEERS: dict[str, Prepare] = {
    "torchao float8, a scale a tensor": _float8("tensorwise", emulate=False),
    "torchao float8, a scale a tensor, emulate=True": _float8("tensorwise", emulate=True),
    "torchao float8, a scale a row": _float8("rowwise", emulate=False),
    "torchao float8, weight gradients high": _float8("rowwise_with_gw_hp", emulate=False),
    "torchao int8 mixed precision": _int8,
}
