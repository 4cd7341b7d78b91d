"""The ladder: a transformer that does not fit a budget in plain fp32, then each technique of memory-efficient training.

``rungs`` is the table of techniques, ``shape`` the transformer, ``limits`` how memory is limited and counted, ``cell``
one run in a process of its own, ``ascent`` all of them, ``report`` what is written.
"""

from lowbit.plan.ladder.ascent import Climb, Ladder, Row, climb
from lowbit.plan.ladder.rungs import RUNGS, Rung, rungs_of
from lowbit.plan.ladder.shape import Shape
from lowbit.plan.settings import TrainingSettings

__all__ = ["RUNGS", "Climb", "Ladder", "Row", "Rung", "Shape", "TrainingSettings", "climb", "rungs_of"]
