"""load_: a model in quantization-aware training as a checkpoint has it, learned scales included."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path

from torch import Tensor, nn

from lowbit.files import shown
from lowbit.qat.linear import FakeQuantLinear
from lowbit.report import Report, report_on
from lowbit.serialize.shards import Checkpoint

__all__ = ["load_"]


def load_(model: nn.Module, checkpoint: str | PathLike[str] | Mapping[str, Tensor]) -> Report:
    """Load into ``model``, in place, what a model of ``prepare_`` had when ``checkpoint`` was saved, and report its
    prepared layers.

    ``model``: prepared by ``prepare_`` with the same recipe, ``skip`` and ``learn_scale``. ``checkpoint``: a state, or
    a directory with ``model.safetensors`` or several files and their index, such as transformers' Trainer writes;
    names that share a parameter of the model need be there once. The model is then trained on, or ``convert_`` makes
    quantized layers of it.

    Raises, with the model untouched: ValueError for a model that is not prepared, and for tensors that the model does
    not have, lacks, or has in other shapes; FileNotFoundError for missing files.
    """
    prepared = {name: module for name, module in model.named_modules() if isinstance(module, FakeQuantLinear)}
    if not prepared:
        raise ValueError(
            "qat.load_: the model is not prepared; call lowbit.qat.prepare_ with the recipe, skip and learn_scale of "
            "the training that wrote the checkpoint"
        )
    if isinstance(checkpoint, Mapping):
        state = dict(checkpoint)
    else:
        files = Checkpoint(Path(checkpoint))
        state = {name: files.read(name) for name in files.entries}
    own = model.state_dict(keep_vars=True)
    given = {id(own[name]) for name in state if name in own}
    unknown = [name for name in state if name not in own]
    lacking = [name for name, tensor in own.items() if name not in state and id(tensor) not in given]
    wrong = [name for name, value in state.items() if name in own and own[name].shape != value.shape]
    reasons = {"does not have": unknown, "needs besides": lacking, "has in other shapes": wrong}
    faults = [f"{len(names)} that the model {what}, {shown(names[:3])}" for what, names in reasons.items() if names]
    if faults:
        raise ValueError(
            f"qat.load_: the checkpoint does not fit the prepared model: of its tensors {'; '.join(faults)}. Prepare "
            f"the model as for training: with the same recipe, skip and learn_scale (weight_scale is there where "
            f"scales are learned)"
        )
    model.load_state_dict(state, strict=False)
    return report_on("qat.load_", model, prepared, "loaded")
