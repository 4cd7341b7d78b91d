"""The loss of a model that the caller gives none for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lowbit.models.batches import tokens_of

__all__ = ["usual_loss"]


def usual_loss(output: Any, batch: Any) -> Tensor:
    """The model's own loss where it answers with one; the mean cross-entropy of the next token for logits [B, T, V] of
    token ids [B, T], of the first class for logits [B, C]; else the mean square of what it answers.
    """
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    ids = tokens_of(batch)
    if isinstance(logits, Tensor) and ids is not None and logits.dim() == 3 and logits.shape[:2] == ids.shape:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten().long())
    if isinstance(logits, Tensor) and logits.dim() == 2:
        return F.cross_entropy(logits.float(), torch.zeros(len(logits), dtype=torch.long, device=logits.device))
    answers = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    if not answers:
        raise ValueError(
            f"the model answers {type(output).__name__} without a tensor that has a gradient; give "
            f"loss=lambda output, batch: ..."
        )
    return torch.stack([answer.float().square().mean() for answer in answers]).sum()
