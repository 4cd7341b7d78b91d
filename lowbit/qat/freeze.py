"""freeze_observers_ and freeze_batchnorm_: stop updates of static input scales and of BatchNorm statistics."""

from __future__ import annotations

from typing import Any

from torch import nn

from lowbit.qat.linear import FakeQuantLinear
from lowbit.report import Report, report_on
from lowbit.torch_private import BatchNorm

__all__ = ["freeze_batchnorm_", "freeze_observers_"]


def freeze_observers_(model: nn.Module) -> Report:
    """Stop updating the static input scales of ``model`` from observed batches; with ``learn_scale``, start learning
    them.

    The ``state_dict`` records that they are frozen.

    Returns:
        A report of the layers with static input scales.

    Raises:
        ValueError: the model has no layer that observes its inputs.
        RuntimeError: a layer has seen no batch.
    """
    observing = {name: m for name, m in model.named_modules() if isinstance(m, FakeQuantLinear) and m.recipe.static}
    if not observing:
        raise ValueError(
            "qat.freeze_observers_: no layer of the model observes its inputs; use a recipe with static input scales, "
            "such as int8-static, in lowbit.qat.prepare_(model, recipe)"
        )
    unseen = [name for name, layer in observing.items() if bool(layer.input_range.isnan().any())]
    if unseen:
        raise RuntimeError(
            f"qat.freeze_observers_: {unseen[0] or 'the model'} has seen no finite input to make scales of; run the "
            f"model on batches in training mode first"
        )
    for layer in observing.values():
        layer.observations_left.zero_()
    return report_on("qat.freeze_observers_", model, observing, "frozen")


def freeze_batchnorm_(model: nn.Module) -> Report:
    """Make the BatchNorm layers of ``model`` use their running statistics in training too, and stop updating these.

    Training then computes the same as the deployed layer. Weights and biases are still trained.

    Returns:
        A report of the BatchNorm layers.

    Raises:
        ValueError: the model has no BatchNorm layers with running statistics.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, BatchNorm) and m.running_mean is not None}
    if not layers:
        raise ValueError("qat.freeze_batchnorm_: the model has no BatchNorm layers with running statistics")
    for layer in layers.values():
        if _stay_in_eval not in layer._forward_pre_hooks.values():
            layer.register_forward_pre_hook(_stay_in_eval)
    return report_on("qat.freeze_batchnorm_", model, layers, "frozen")


def _stay_in_eval(layer: nn.Module, _inputs: Any) -> None:
    """A hook, because ``model.train()`` resets the mode of every layer."""
    layer.training = False
