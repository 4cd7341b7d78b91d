"""``lb.fit``: the fastest training settings that fit a memory budget.

``choices`` selects the allowed techniques, ``predict`` estimates memory and time of each combination, and ``search``
finds the fastest that fits. ``plan`` is the result, and ``run`` trains with it.
"""

from lowbit.plan.fitting.plan import TrainingPlan
from lowbit.plan.fitting.run import Run
from lowbit.plan.fitting.search import fit

__all__ = ["Run", "TrainingPlan", "fit"]
