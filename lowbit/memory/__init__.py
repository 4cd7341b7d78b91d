"""Training within a memory: what a step holds (``estimate``, ``profile``), and what makes it less (``checkpoint_``,
``plan_checkpoints``, ``offload_activations``, ``stream_blocks_``, ``micro_batches``, ``linear_cross_entropy``,
``fuse_loss_``, ``attention``, ``attention_``, ``inplace_``, ``tokens``). Each works alone; docs/memory.md says what
each saves and costs.
"""

from lowbit.memory.accumulate import accumulation_weights, micro_batches
from lowbit.memory.attention import attention, attention_backends
from lowbit.memory.checkpoint import checkpoint_, uncheckpoint_
from lowbit.memory.estimate import Estimate, estimate, usual_loss
from lowbit.memory.fused_loss import fuse_loss_, unfuse_loss_
from lowbit.memory.inplace import inplace_, safe_inplace
from lowbit.memory.loss import linear_cross_entropy
from lowbit.memory.measure import allocated_peak, saved_bytes
from lowbit.memory.model_attention import attention_, unattention_
from lowbit.memory.offload import offload_activations
from lowbit.memory.planned import CheckpointPlan, plan_checkpoints
from lowbit.memory.profile import Leak, Profile, Snapshot, profile
from lowbit.memory.rss import peak_bytes, reset_peak
from lowbit.memory.stream import stream_blocks_, unstream_
from lowbit.memory.tokens import tokens
from lowbit.memory.usage import Moment, Usage
from lowbit.models import find_blocks

__all__ = [
    "CheckpointPlan",
    "Estimate",
    "Leak",
    "Moment",
    "Profile",
    "Snapshot",
    "Usage",
    "accumulation_weights",
    "allocated_peak",
    "attention",
    "attention_",
    "attention_backends",
    "checkpoint_",
    "estimate",
    "find_blocks",
    "fuse_loss_",
    "inplace_",
    "linear_cross_entropy",
    "micro_batches",
    "offload_activations",
    "peak_bytes",
    "plan_checkpoints",
    "profile",
    "reset_peak",
    "safe_inplace",
    "saved_bytes",
    "stream_blocks_",
    "tokens",
    "unattention_",
    "uncheckpoint_",
    "unfuse_loss_",
    "unstream_",
    "usual_loss",
]
