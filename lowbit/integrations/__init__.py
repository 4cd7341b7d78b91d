"""Support for other libraries: ``lowbit.integrations.transformers``, ``trainer``, ``peft``, KV caches and ONNX.

lowbit imports none of these libraries. It acts when one is imported, before or after lowbit.

``import lowbit`` adds rows to extension tables of the libraries, and replaces none of their functions:

- ``AUTO_QUANTIZATION_CONFIG_MAPPING`` of transformers: the method ``"lowbit"``, for ``from_pretrained``. The class and
  its quantizer (``lowbit.integrations.transformers``) are imported when a file needs them.
- ``AttentionInterface`` and ``AttentionMaskInterface`` of transformers: ``"lowbit"``, which is ``lb.memory.attention``.
- The symbolic table of ``torch.onnx``: ops of lowbit raise an error that says how to export the model.

Two more changes happen with the first layer of lowbit in the process, because only models with such layers need them:

- ``BaseTuner`` of peft puts adapters on quantized layers (``lowbit.integrations.peft``).
- ``DEFAULT_CALLBACKS`` of transformers' Trainer: ``RequireSharding`` raises an error for FSDP that Accelerate would
  ignore or fail at.

``LOWBIT_INTEGRATIONS=0`` in the environment disables all of them. In either case a conversion marks the Hugging Face
models that it quantized, so that ``save_pretrained``, ``half`` and ``float`` work.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from torch import nn

from lowbit.convert.engine import AFTER_SWAP
from lowbit.integrations.imports import when_imported
from lowbit.nn.base import ON_FIRST_LAYER
from lowbit.tiled import model_attention

#: The first major version of transformers whose quantizer interface lowbit supports.
TRANSFORMERS = 5

#: The quantization method in Hugging Face configs.
METHOD = "lowbit"


def _mark_models(model: nn.Module) -> None:
    """Mark the Hugging Face models inside ``model`` as quantized or plain."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not any(isinstance(module, modeling.PreTrainedModel) for module in model.modules()):
        return
    if int(sys.modules["transformers"].__version__.split(".")[0]) >= TRANSFORMERS:
        import_module("lowbit.integrations.transformers").mark(model)


class _LowbitConfig:
    """Placeholder for ``LowbitConfig`` in the table of transformers, until a file needs it."""

    @staticmethod
    def from_dict(*args: Any, **kwargs: Any) -> Any:
        return import_module("lowbit.integrations.transformers").LowbitConfig.from_dict(*args, **kwargs)


def _register(auto: Any) -> None:
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(METHOD, _LowbitConfig)


def _check_sharding(trainers: Any) -> None:
    trainers.DEFAULT_CALLBACKS.append(import_module("lowbit.integrations.trainer").RequireSharding)


def _register_onnx(onnx: Any) -> None:
    import_module("lowbit.integrations.onnx").refuse_ops(onnx)


def _on_first_layer() -> None:
    when_imported("peft", lambda _: import_module("lowbit.integrations.peft"))
    when_imported("transformers.trainer", _check_sharding)


AFTER_SWAP.append(_mark_models)
when_imported("transformers.generation.utils", lambda _: import_module("lowbit.integrations.generation"))
if os.environ.get("LOWBIT_INTEGRATIONS", "1") != "0":
    when_imported("transformers.quantizers.auto", _register)
    when_imported("transformers.modeling_utils", model_attention.register)
    when_imported("transformers.masking_utils", model_attention.register_mask)
    when_imported("torch.onnx", _register_onnx)
    ON_FIRST_LAYER.append(_on_first_layer)
