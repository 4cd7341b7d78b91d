"""The ladder: trains a transformer that exceeds a memory budget in fp32, adding one technique per rung.

``rungs`` is the table of techniques, ``shape`` the transformer, and ``limits`` limits and measures memory. ``cell`` is
one run in a separate process, ``ascent`` runs all of them, and ``report`` writes the results. ``own`` estimates the
rungs on a model of the user.
"""

from lowbit.plan.ladder.ascent import Climb, Ladder, Row, climb
from lowbit.plan.ladder.own import OwnLadder, OwnRow, climb_own
from lowbit.plan.ladder.rungs import RUNGS, Rung, rungs_of
from lowbit.plan.ladder.shape import Shape
from lowbit.plan.settings import TrainingSettings

__all__ = [
    "RUNGS", "Climb", "Ladder", "OwnLadder", "OwnRow", "Row", "Rung", "Shape", "TrainingSettings", "climb", "climb_own",
    "rungs_of",
]  # fmt: skip
