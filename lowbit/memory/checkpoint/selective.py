"""Checkpointing that keeps the results of products, and recomputes what is cheap between them.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198.
"""

from __future__ import annotations

from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

__all__ = ["MUTATED", "kept_products", "looked_at"]

#: Ops whose results are kept, by namespace and name; those that this torch or this build lacks are passed over.
_PRODUCTS = {
    "aten": (
        "mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "convolution",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    ),
    "lowbit": ("scaled_mm", "scaled_grouped_mm", "linear", "linear_packed", "conv"),
}  # fmt: skip


#: What torch says where a model has written into what a checkpoint keeps.
MUTATED = "Tensor cached during selective activation checkpoint has been mutated"


def kept_products() -> tuple[Any, Any]:
    """The contexts of one call, in forward and in backward: products, convolutions and attention are kept."""
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(_policy)
    return contexts


_looked_at = 0


def looked_at() -> int:
    """How many ops torch has asked about in this process, each after it was called in forward."""
    return _looked_at


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    global _looked_at
    _looked_at += not context.is_recompute
    kept = op.__name__.split(".")[0] in _PRODUCTS.get(op.namespace, ())
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
