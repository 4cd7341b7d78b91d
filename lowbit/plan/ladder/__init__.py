"""The ladder: trains a transformer that exceeds a memory budget in fp32, adding one technique per rung.

``rungs`` is the table of techniques, ``shape`` the transformer, and ``limits`` limits and measures memory. ``cell`` is
one run in a separate process, ``ascent`` runs all of them, and ``report`` writes the results. ``estimated`` is the
ladder of estimated peaks, on a model of the user.
"""

from lowbit.plan.ladder.ascent import Climb, Ladder, Row, climb
from lowbit.plan.ladder.estimated import EstimatedLadder, EstimatedRow, estimate_ladder
from lowbit.plan.ladder.rungs import RUNGS, Rung, rungs_of
from lowbit.plan.ladder.shape import Shape
from lowbit.plan.settings import TrainingSettings

__all__ = [
    "RUNGS", "Climb", "EstimatedLadder", "EstimatedRow", "Ladder", "Row", "Rung", "Shape", "TrainingSettings", "climb",
    "estimate_ladder", "rungs_of",
]  # fmt: skip
