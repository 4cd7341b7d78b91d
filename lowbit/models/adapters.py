"""Facts about adapters that peft added to a model."""

from __future__ import annotations

import sys

from torch import nn

__all__ = ["KEEPING_INITS", "has_adapters"]

#: Values of ``LoraConfig.init_lora_weights`` that do not change the layer's weight.
KEEPING_INITS = (True, False, "gaussian", "orthogonal", "eva")


def has_adapters(model: nn.Module) -> bool:
    """Whether a model is a PeftModel, or has adapter layers of peft, merged in place or not."""
    peft, layers = sys.modules.get("peft"), sys.modules.get("peft.tuners.tuners_utils")
    if peft is None or layers is None:
        return False
    return isinstance(model, peft.PeftModel) or any(
        isinstance(module, layers.BaseTunerLayer) for module in model.modules()
    )
