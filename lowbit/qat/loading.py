"""qat.load_: load a checkpoint, with learned scales, into a model prepared for quantization-aware training."""

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
    """Load the checkpoint of a prepared model into ``model``, in place.

    The model can then be trained further, or converted with ``convert_``.

    Args:
        model: a model prepared by ``prepare_`` with the same recipe, ``skip`` and ``learn_scale``.
        checkpoint: a ``state_dict``, or a directory with ``model.safetensors`` or sharded files and their index, such
            as transformers' Trainer writes. Of names that share a parameter of the model, one is enough.

    Returns:
        A report of the prepared layers.

    Raises:
        ValueError: the model is not prepared, or the checkpoint has unknown, missing or differently shaped tensors. The
            model is unchanged.
        FileNotFoundError: a file is missing. The model is unchanged.
    """
    prepared = {name: module for name, module in model.named_modules() if isinstance(module, FakeQuantLinear)}
    if not prepared:
        raise ValueError(
            "qat.load_: the model is not prepared; call lowbit.qat.prepare_ with the recipe, skip and learn_scale of "
            "the run that wrote the checkpoint"
        )
    if isinstance(checkpoint, Mapping):
        state = dict(checkpoint)
    else:
        files = Checkpoint(Path(checkpoint))
        state = {name: files.read(name) for name in files.entries}
    expected = model.state_dict(keep_vars=True)
    loaded = {id(expected[name]) for name in state if name in expected}
    unknown = [name for name in state if name not in expected]
    missing = [name for name, tensor in expected.items() if name not in state and id(tensor) not in loaded]
    wrong = [name for name, value in state.items() if name in expected and expected[name].shape != value.shape]
    reasons = {"unknown": unknown, "missing": missing, "of another shape": wrong}
    faults = [f"{len(names)} {reason} ({shown(names[:3])})" for reason, names in reasons.items() if names]
    if faults:
        raise ValueError(
            f"qat.load_: the checkpoint does not fit the prepared model; tensors: {'; '.join(faults)}. Prepare the "
            f"model with the recipe, skip and learn_scale of the training run (weight_scale exists only with "
            f"learn_scale=True)"
        )
    model.load_state_dict(state, strict=False)
    return report_on("qat.load_", model, prepared, "loaded")
