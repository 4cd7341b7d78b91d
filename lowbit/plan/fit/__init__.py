"""A budget in bytes goes in, the fastest training that fits comes out.

``choices`` is the table of what may be chosen, ``predict`` says what each combination takes by estimates, ``search``
takes the fastest that fits, ``plan`` is the result, and ``run`` trains by it.
"""

from lowbit.plan.fit.choices import CHOICES, Choice
from lowbit.plan.fit.plan import Plan
from lowbit.plan.fit.run import Run
from lowbit.plan.fit.search import fit

__all__ = ["CHOICES", "Choice", "Plan", "Run", "fit"]
