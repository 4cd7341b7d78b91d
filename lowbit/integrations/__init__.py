"""lowbit inside of other libraries: ``lowbit.integrations.transformers`` and ``lowbit.integrations.peft``.

Each is imported by who uses it, since neither library need be there. One thing works without: a conversion tells the
models of transformers in it that they are quantized, so that their ``save_pretrained`` writes it down.
"""

from __future__ import annotations

import sys
from importlib import import_module

from torch import nn

from lowbit.convert.engine import AFTER_SWAP

#: The first version of transformers whose quantizers lowbit serves.
TRANSFORMERS = 5


def _tell_transformers(model: nn.Module) -> None:
    """Mark the models of transformers inside ``model`` as quantized, or no longer so."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not any(isinstance(module, modeling.PreTrainedModel) for module in model.modules()):
        return
    if int(sys.modules["transformers"].__version__.split(".")[0]) >= TRANSFORMERS:
        import_module("lowbit.integrations.transformers").mark(model)


AFTER_SWAP.append(_tell_transformers)
