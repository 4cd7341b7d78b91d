"""A budget in bytes goes in, the fastest training that fits comes out.

``choices`` says which techniques may be chosen, ``predict`` what each combination takes by estimates, ``search``
takes the fastest that fits, ``plan`` is the result, and ``run`` trains by it.
"""

from lowbit.plan.fitting.plan import TrainingPlan
from lowbit.plan.fitting.run import Run
from lowbit.plan.fitting.search import fit

__all__ = ["Run", "TrainingPlan", "fit"]
