"""What to do for a budget: which recipe each layer gets for so many bits, how to train within so many bytes, and how to
generate.
"""

from lowbit.plan.bits import Score, Sensitivity
from lowbit.plan.fitting import Plan, fit
from lowbit.plan.sensitivities import sensitivity
from lowbit.plan.serving import GenerationPlan
from lowbit.plan.step_estimate import estimate

__all__ = ["GenerationPlan", "Plan", "Score", "Sensitivity", "estimate", "fit", "sensitivity"]
