"""Training within a memory limit: measurement of a step's memory, and the functions that reduce it. See docs/memory.md.

The package itself measures: ``profile``, ``allocated_peak``, ``saved_bytes``, ``system_memory`` and the estimator of
``lb.estimate``. ``clear`` frees unused memory. The package also exports ``checklist`` and the techniques of
``lowbit.checkpointing``, ``lowbit.offload`` and ``lowbit.tiled``. These build on it, so they are imported on first use.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from lowbit.memory.clearing import Cleared, clear
from lowbit.memory.estimator import Estimate
from lowbit.memory.measure import allocated_peak, saved_bytes
from lowbit.memory.profiler import Leak, Profile, Snapshot, profile
from lowbit.memory.rss import SystemMemory, peak_bytes, reset_peak, system_memory
from lowbit.memory.usage import MemoryEvent, Usage
from lowbit.models import find_blocks
from lowbit.models.losses import usual_loss

if TYPE_CHECKING:
    from lowbit.checkpointing import checkpoint_, tile_, uncheckpoint_, untile_
    from lowbit.offload import offload_activations, stream_blocks_, unstream_
    from lowbit.plan.checklist import Advice, Checklist, checklist
    from lowbit.plan.checkpoints import CheckpointPlan, plan_checkpoints
    from lowbit.plan.step_estimate import estimate
    from lowbit.tiled import (
        attention,
        attention_,
        attention_backends,
        fuse_loss_,
        linear_cross_entropy,
        linear_log_probs,
        unattention_,
        unfuse_loss_,
    )
    from lowbit.train.micro_batches import accumulation_weights, micro_batches

__all__ = [
    "Advice",
    "Checklist",
    "CheckpointPlan",
    "Cleared",
    "Estimate",
    "Leak",
    "MemoryEvent",
    "Profile",
    "Snapshot",
    "SystemMemory",
    "Usage",
    "accumulation_weights",
    "allocated_peak",
    "attention",
    "attention_",
    "attention_backends",
    "checklist",
    "checkpoint_",
    "clear",
    "estimate",
    "find_blocks",
    "fuse_loss_",
    "linear_cross_entropy",
    "linear_log_probs",
    "micro_batches",
    "offload_activations",
    "peak_bytes",
    "plan_checkpoints",
    "profile",
    "reset_peak",
    "saved_bytes",
    "stream_blocks_",
    "system_memory",
    "tile_",
    "unattention_",
    "uncheckpoint_",
    "unfuse_loss_",
    "unstream_",
    "untile_",
    "usual_loss",
]

#: Modules of the names that build on this package.
_ABOVE = {
    "Advice": "lowbit.plan.checklist",
    "CheckpointPlan": "lowbit.plan.checkpoints",
    "Checklist": "lowbit.plan.checklist",
    "accumulation_weights": "lowbit.train.micro_batches",
    "attention": "lowbit.tiled",
    "attention_": "lowbit.tiled",
    "attention_backends": "lowbit.tiled",
    "checklist": "lowbit.plan.checklist",
    "checkpoint_": "lowbit.checkpointing",
    "estimate": "lowbit.plan.step_estimate",
    "fuse_loss_": "lowbit.tiled",
    "linear_cross_entropy": "lowbit.tiled",
    "linear_log_probs": "lowbit.tiled",
    "micro_batches": "lowbit.train.micro_batches",
    "offload_activations": "lowbit.offload",
    "plan_checkpoints": "lowbit.plan.checkpoints",
    "stream_blocks_": "lowbit.offload",
    "tile_": "lowbit.checkpointing",
    "unattention_": "lowbit.tiled",
    "uncheckpoint_": "lowbit.checkpointing",
    "unfuse_loss_": "lowbit.tiled",
    "unstream_": "lowbit.offload",
    "untile_": "lowbit.checkpointing",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _ABOVE:
            raise AttributeError(f"module 'lowbit.memory' has no attribute {name!r}")
        return getattr(_import_module(_ABOVE[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_ABOVE})
