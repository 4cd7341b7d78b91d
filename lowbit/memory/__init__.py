"""Making a model fit: gradient checkpointing of blocks, and what a call or the process has held at most."""

from lowbit.memory.checkpoint import checkpoint_blocks_
from lowbit.memory.measure import allocated_peak, saved_bytes
from lowbit.memory.offload import offload_activations
from lowbit.memory.rss import peak_bytes, reset_peak
from lowbit.memory.stream import stream_blocks_, unstream_
from lowbit.models import find_blocks

__all__ = [
    "allocated_peak",
    "checkpoint_blocks_",
    "find_blocks",
    "offload_activations",
    "peak_bytes",
    "reset_peak",
    "saved_bytes",
    "stream_blocks_",
    "unstream_",
]
