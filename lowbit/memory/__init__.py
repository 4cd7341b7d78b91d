"""Making a model fit: gradient checkpointing of blocks, and what a call or the process has held at most."""

from lowbit.memory.accumulate import accumulation_weights, micro_batches
from lowbit.memory.attention import attention, attention_backends
from lowbit.memory.checkpoint import checkpoint_blocks_
from lowbit.memory.inplace import inplace_, safe_inplace
from lowbit.memory.loss import linear_cross_entropy
from lowbit.memory.measure import allocated_peak, saved_bytes
from lowbit.memory.rss import peak_bytes, reset_peak
from lowbit.memory.tokens import tokens
from lowbit.models import find_blocks

__all__ = [
    "accumulation_weights",
    "allocated_peak",
    "attention",
    "attention_backends",
    "checkpoint_blocks_",
    "find_blocks",
    "inplace_",
    "linear_cross_entropy",
    "micro_batches",
    "peak_bytes",
    "reset_peak",
    "safe_inplace",
    "saved_bytes",
    "tokens",
]
