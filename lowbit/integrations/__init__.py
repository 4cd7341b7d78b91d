"""lowbit inside other libraries: ``lowbit.integrations.transformers``, ``trainer`` and ``peft``.

None of the libraries need be there, and lowbit imports none. It acts once one is imported, before lowbit or after it.

``import lowbit`` adds rows to tables that these libraries keep for others, and replaces none of their functions:

- ``AUTO_QUANTIZATION_CONFIG_MAPPING`` of transformers has a row for the method ``"lowbit"``, for ``from_pretrained``;
  ``lowbit.integrations.transformers`` puts the class and its quantizer there once a file asks for them.
- ``AttentionInterface`` and ``AttentionMaskInterface`` of transformers have ``"lowbit"``, which is
  ``lb.memory.attention``.
- The table of ``torch.onnx`` has rows for ops of lowbit, which say what to export in their place.

Two more changes wait for the first layer of lowbit in the process, because they serve models with such layers alone:

- ``BaseTuner`` of peft puts adapters on quantized layers (``lowbit.integrations.peft``).
- ``DEFAULT_CALLBACKS`` of transformers' Trainer has ``RequireSharding``, which refuses FSDP that Accelerate would leave
  out or fail at.

``LOWBIT_INTEGRATIONS=0`` in the environment leaves all of these out. A conversion marks the Hugging Face models that it
quantized in either case, so that their ``save_pretrained`` writes it down, and their ``half`` and ``float`` work.
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


def _teach_peft(peft: Any) -> None:
    import_module("lowbit.integrations.peft")


def _check_sharding(trainers: Any) -> None:
    trainers.DEFAULT_CALLBACKS.append(import_module("lowbit.integrations.trainer").RequireSharding)


def _refuse_onnx(onnx: Any) -> None:
    import_module("lowbit.integrations.onnx").refuse_ops(onnx)


def _know_generation(generation: Any) -> None:
    import_module("lowbit.integrations.generation")


def _serve_layers() -> None:
    """What only a process with layers of lowbit needs."""
    when_imported("peft", _teach_peft)
    when_imported("transformers.trainer", _check_sharding)


AFTER_SWAP.append(_tell_transformers)
when_imported("transformers.generation.utils", _know_generation)
if os.environ.get("LOWBIT_INTEGRATIONS", "1") != "0":
    when_imported("transformers.quantizers.auto", _register)
    when_imported("transformers.modeling_utils", model_attention.register)
    when_imported("transformers.masking_utils", model_attention.register_mask)
    when_imported("torch.onnx", _refuse_onnx)
    ON_FIRST_LAYER.append(_serve_layers)
