"""lowbit inside of other libraries: ``lowbit.integrations.transformers``, ``trainer``, ``peft`` and ``torchtitan``.

None of the libraries need be there, and lowbit imports none. Once one is imported, before lowbit or after it, this file
changes it in six places, and learns how its models generate:

- ``AUTO_QUANTIZATION_CONFIG_MAPPING`` of transformers has a row for the method ``"lowbit"``, for ``from_pretrained``;
  ``lowbit.integrations.transformers`` puts the class and its quantizer there once a file asks for them.
- ``PreTrainedModel.half`` and ``float`` cast models that lowbit quantized, which transformers refuses for others.
- ``AttentionInterface`` and ``AttentionMaskInterface`` of transformers have ``"lowbit"``, which is
  ``lb.memory.attention``.
- ``BaseTuner`` of peft puts adapters on quantized layers.
- ``Trainer`` of transformers that is asked for FSDP refuses where Accelerate would leave it out or fail.
- torchtitan's table of model converters has the rows ``"lowbit"`` and ``"lowbit_plan"``.

What holds no quantized layer goes the way that it went before. A conversion also marks the models of transformers that
it quantized, so that their ``save_pretrained`` writes it down.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import wraps
from importlib import import_module
from typing import Any

from torch import nn

from lowbit.convert.engine import AFTER_SWAP, quantized_layers
from lowbit.integrations.imports import when_imported
from lowbit.memory import model_attention

#: The first version of transformers whose quantizers lowbit serves.
TRANSFORMERS = 5

#: What a config of transformers calls the models that lowbit quantized.
METHOD = "lowbit"


def _tell_transformers(model: nn.Module) -> None:
    """Mark the models of transformers inside ``model`` as quantized, or no longer so."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not any(isinstance(module, modeling.PreTrainedModel) for module in model.modules()):
        return
    if int(sys.modules["transformers"].__version__.split(".")[0]) >= TRANSFORMERS:
        import_module("lowbit.integrations.transformers").mark(model)


class _LowbitConfig:
    """Stands for ``LowbitConfig`` in transformers' table until a file asks for it."""

    @staticmethod
    def from_dict(*args: Any, **kwargs: Any) -> Any:
        return import_module("lowbit.integrations.transformers").LowbitConfig.from_dict(*args, **kwargs)


def _register(auto: Any) -> None:
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(METHOD, _LowbitConfig)


def _around_peft(tuner: Any, model: nn.Module, config: Any) -> Any:
    """What a call of a tuner runs inside: nothing where no layer of ``model`` is quantized."""
    if not quantized_layers(model):
        return nullcontext()
    return import_module("lowbit.integrations.peft").on_quantized_layers(tuner, model, config)


def _teach_peft(tuners: Any) -> None:
    """Let every way into peft's tuners know quantized layers: each makes a tuner or adds an adapter to it."""
    make, inject = tuners.BaseTuner.__init__, tuners.BaseTuner.inject_adapter

    @wraps(make)
    def __init__(self: Any, model: nn.Module, peft_config: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        with _around_peft(self, model, peft_config[adapter_name] if isinstance(peft_config, dict) else peft_config):
            make(self, model, peft_config, adapter_name, *args, **kwargs)

    @wraps(inject)
    def inject_adapter(self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        with _around_peft(self, model, self.peft_config[adapter_name]):
            inject(self, model, adapter_name, *args, **kwargs)

    tuners.BaseTuner.__init__, tuners.BaseTuner.inject_adapter = __init__, inject_adapter


def _allow_casts(modeling: Any) -> None:
    """Let ``half`` and ``float`` of quantized models cast what is floating point, which codes and scales are not:
    transformers refuses them for every quantizer.
    """

    def allowed(cast: Any, plain: Any) -> Any:
        @wraps(cast)
        def call(self: nn.Module, *args: Any) -> Any:
            config = getattr(getattr(self, "hf_quantizer", None), "quantization_config", None)
            return plain(self) if getattr(config, "quant_method", None) == METHOD else cast(self, *args)

        return call

    for name in ("half", "float"):
        cast = getattr(modeling.PreTrainedModel, name)
        setattr(modeling.PreTrainedModel, name, allowed(cast, getattr(nn.Module, name)))


def _check_trainer(trainers: Any) -> None:
    """Let ``Trainer`` look at what Accelerate makes of ``fsdp``, which it leaves out on CPUs without a word."""
    make = trainers.Trainer.__init__

    @wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if self.args.fsdp:
            import_module("lowbit.integrations.trainer").require_sharding(self)

    trainers.Trainer.__init__ = __init__


def _know_generation(generation: Any) -> None:
    import_module("lowbit.integrations.generation")


def _register_converter(protocols: Any) -> None:
    import_module("lowbit.integrations.torchtitan").register(protocols)


AFTER_SWAP.append(_tell_transformers)
when_imported("transformers.quantizers.auto", _register)
when_imported("transformers.modeling_utils", _allow_casts)
when_imported("transformers.modeling_utils", model_attention.register)
when_imported("transformers.masking_utils", model_attention.register_mask)
when_imported("transformers.generation.utils", _know_generation)
when_imported("transformers.trainer", _check_trainer)
when_imported("peft.tuners.tuners_utils", _teach_peft)
when_imported("torchtitan.protocols.model_converter", _register_converter)
