"""Gradient checkpointing by policy: save only the inputs of selected modules, and recompute their forward in backward.

``policies`` names what is checkpointed, ``parts`` finds it in a model, ``segment`` wraps the modules, ``frame`` saves
and recomputes. ``calls`` restores the state of a call, and ``selective`` saves some results in addition. ``tiles`` runs
modules on some tokens at a time.
"""

from lowbit.checkpointing.apply import checkpoint_, recomputing, uncheckpoint_
from lowbit.checkpointing.frame import NotReplayed
from lowbit.checkpointing.host_time import overhead
from lowbit.checkpointing.selective import looked_at
from lowbit.checkpointing.tiles import tile_, untile_
from lowbit.memory.estimator import RECOMPUTATIONS, Recomputation

__all__ = ["NotReplayed", "checkpoint_", "recomputing", "tile_", "uncheckpoint_", "untile_"]

RECOMPUTATIONS.append(Recomputation(looked_at, overhead))
