"""What to do for a budget: which recipe each layer gets for so many bits, and how to train within so many bytes."""

from lowbit.plan.bits import Score, Sensitivity
from lowbit.plan.fitting import Plan, fit
from lowbit.plan.sensitivity import sensitivity

__all__ = ["Plan", "Score", "Sensitivity", "fit", "sensitivity"]
