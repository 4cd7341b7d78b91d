"""Making a model fit: gradient checkpointing of blocks, and what a call or the process has held at most."""

from lowbit.memory.checkpoint import checkpoint_blocks_
from lowbit.memory.measure import allocated_peak, saved_bytes
from lowbit.memory.profile import Leak, Profile, Snapshot, profile
from lowbit.memory.rss import peak_bytes, reset_peak
from lowbit.memory.usage import Moment, Usage
from lowbit.models import find_blocks

__all__ = [
    "Leak",
    "Moment",
    "Profile",
    "Snapshot",
    "Usage",
    "allocated_peak",
    "checkpoint_blocks_",
    "find_blocks",
    "peak_bytes",
    "profile",
    "reset_peak",
    "saved_bytes",
]
