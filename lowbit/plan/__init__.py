"""What to do for a budget: which recipe each layer gets for so many bits, how to train within so many bytes, and how to
generate.
"""

from lowbit.plan.bits import Score, Sensitivity
from lowbit.plan.fitting import Plan, fit
from lowbit.plan.sensitivity import sensitivity
from lowbit.plan.serving import GenerationPlan

__all__ = ["GenerationPlan", "Plan", "Score", "Sensitivity", "fit", "sensitivity"]
