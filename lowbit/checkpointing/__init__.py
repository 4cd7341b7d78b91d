"""Gradient checkpointing by policy: keep what a part of a model is given, and compute its inside again in backward.

``policies`` says what is checkpointed, ``parts`` finds it in a model, ``apply`` does it, ``frame`` keeps and
recomputes, ``calls`` is what one call has to be given again, ``selective`` keeps some results besides.
"""

from lowbit.checkpointing.apply import checkpoint_, recomputing, uncheckpoint_
from lowbit.checkpointing.frame import NotReplayed
from lowbit.checkpointing.host_time import overhead
from lowbit.checkpointing.selective import looked_at
from lowbit.memory.estimator import RECOMPUTATIONS, Recomputation

__all__ = ["NotReplayed", "checkpoint_", "recomputing", "uncheckpoint_"]

RECOMPUTATIONS.append(Recomputation(looked_at, overhead))
