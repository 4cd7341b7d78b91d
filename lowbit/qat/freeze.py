"""What training stops moving: the ranges that observers average, and the statistics of BatchNorm."""

from __future__ import annotations

from typing import Any

from torch import nn

from lowbit.qat.linear import FakeQuantLinear
from lowbit.report import Report, report_on
from lowbit.torch_private import BatchNorm

__all__ = ["freeze_batchnorm_", "freeze_observers_"]


def freeze_observers_(model: nn.Module) -> Report:
    """Keep the static input scales of ``model`` where they are from now on, or with ``learn_scale`` begin to learn
    them, and report the layers that have some. It is part of the ``state_dict``.

    Raises ValueError for a model without layers that observe; RuntimeError for one that has seen no batch.
    """
    found = {name: m for name, m in model.named_modules() if isinstance(m, FakeQuantLinear) and m.recipe.static}
    if not found:
        raise ValueError(
            "qat.freeze_observers_: no layer of the model observes its inputs; layers whose recipe has static input "
            "scales do, such as int8-static, after lowbit.qat.prepare_(model, recipe)"
        )
    unseen = [name for name, layer in found.items() if bool(layer.input_range.isnan().any())]
    if unseen:
        raise RuntimeError(
            f"qat.freeze_observers_: {unseen[0] or 'the model'} has seen no finite input to make scales of; run the "
            f"model on batches in training mode first"
        )
    for layer in found.values():
        layer.observations_left.zero_()
    return report_on("qat.freeze_observers_", model, found, "frozen")


def freeze_batchnorm_(model: nn.Module) -> Report:
    """Let the BatchNorm layers of ``model`` normalize by their running statistics from now on, in training too, and
    keep these, and report them. Weights and biases go on learning.

    What the layer computes in training is then what it computes deployed, as for quantized layers.
    Raises ValueError for a model without BatchNorm layers that have running statistics.
    """
    found = {name: m for name, m in model.named_modules() if isinstance(m, BatchNorm) and m.running_mean is not None}
    if not found:
        raise ValueError("qat.freeze_batchnorm_: the model has no BatchNorm layers with running statistics")
    for layer in found.values():
        if _stay_in_eval not in layer._forward_pre_hooks.values():
            layer.register_forward_pre_hook(_stay_in_eval)
    return report_on("qat.freeze_batchnorm_", model, found, "frozen")


def _stay_in_eval(layer: nn.Module, _inputs: Any) -> None:
    """A hook, because ``model.train()`` sets the mode of every layer again."""
    layer.training = False
