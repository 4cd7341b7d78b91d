"""Quantization-aware training: ``prepare_`` a model, train it as usual, ``convert_`` it; and knowledge distillation."""

from lowbit.qat.convert import convert_, prepare_
from lowbit.qat.distillation import distillation_loss
from lowbit.qat.freeze import freeze_batchnorm_, freeze_observers_
from lowbit.qat.linear import FakeQuantLinear
from lowbit.qat.loading import load_

__all__ = [
    "FakeQuantLinear", "convert_", "distillation_loss", "freeze_batchnorm_", "freeze_observers_", "load_",
    "prepare_",
]  # fmt: skip
