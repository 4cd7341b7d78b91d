"""Plans for a budget: recipes per layer for a model size, and settings for training or generation within a memory."""

from lowbit.memory.devices import DEVICES, Device
from lowbit.plan.bits import Score, Sensitivity
from lowbit.plan.fitting import TrainingPlan, fit
from lowbit.plan.sensitivities import sensitivity
from lowbit.plan.serving import GenerationPlan, fit_generation
from lowbit.plan.step_estimate import estimate
from lowbit.plan.techniques import TECHNIQUES, Technique

__all__ = [
    "DEVICES",
    "TECHNIQUES",
    "Device",
    "GenerationPlan",
    "Score",
    "Sensitivity",
    "Technique",
    "TrainingPlan",
    "estimate",
    "fit",
    "fit_generation",
    "sensitivity",
]  # fmt: skip
