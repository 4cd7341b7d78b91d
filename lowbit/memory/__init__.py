"""Making a model fit: gradient checkpointing of blocks, and the process's high-water mark of memory."""

from lowbit.memory.checkpoint import checkpoint_blocks_
from lowbit.memory.rss import peak_bytes, reset_peak
from lowbit.models import find_blocks

__all__ = ["checkpoint_blocks_", "find_blocks", "peak_bytes", "reset_peak"]
