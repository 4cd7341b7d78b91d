"""Tiled losses and attention that never allocate all logits or attention scores at once."""

from lowbit.tiled.attention_tiles import attention, attention_backends
from lowbit.tiled.fused_loss import fuse_loss_, unfuse_loss_
from lowbit.tiled.loss import LogProbs, linear_cross_entropy, linear_log_probs
from lowbit.tiled.model_attention import attention_, unattention_

__all__ = [
    "LogProbs", "attention", "attention_", "attention_backends", "fuse_loss_", "linear_cross_entropy",
    "linear_log_probs", "unattention_", "unfuse_loss_",
]  # fmt: skip
