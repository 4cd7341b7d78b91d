"""Which recipe each layer gets for a budget: what layers lose by each is measured, and the least loss is chosen."""

from lowbit.plan.bits import Score, Sensitivity
from lowbit.plan.sensitivity import sensitivity

__all__ = ["Score", "Sensitivity", "sensitivity"]
