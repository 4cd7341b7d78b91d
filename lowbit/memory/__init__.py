"""Making a model fit: gradient checkpointing, and what a call or the process has held at most."""

from lowbit.memory.checkpoint import checkpoint_, uncheckpoint_
from lowbit.memory.measure import allocated_peak, saved_bytes
from lowbit.memory.rss import peak_bytes, reset_peak
from lowbit.models import find_blocks

__all__ = [
    "allocated_peak",
    "checkpoint_",
    "find_blocks",
    "peak_bytes",
    "reset_peak",
    "saved_bytes",
    "uncheckpoint_",
]
