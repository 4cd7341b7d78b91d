"""The default loss of a model: its own loss, or the cross-entropy of the next token.

If a model has neither, the fallback depends on the use: ``usual_loss`` has the fallback of training, and
``lowbit.calibrate.importance`` the fallback of calibration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lowbit.models.batches import mask_of, tokens_of

__all__ = ["Loss", "own_loss", "predicted", "token_loss", "token_targets", "usual_loss"]

#: A loss function of the model's output and the batch, which returns a scalar.
Loss = Callable[[Any, Any], Tensor]

#: The target of ignored tokens, as in ``F.cross_entropy``.
_IGNORED = -100


def usual_loss(output: Any, batch: Any) -> Tensor:
    """The loss of a training step: ``own_loss``, else the mean ``token_loss``, else a stand-in.

    The stand-in is the cross-entropy of the first class for logits [B, C], and the mean square of all other outputs. No
    tensor's values are read, so it works on fake tensors.

    Raises:
        ValueError: no output has a gradient.
    """
    loss = own_loss(output)
    if loss is not None:
        return loss
    mean_loss = token_loss(output, batch, "mean", check_ids=False)
    if mean_loss is not None:
        return mean_loss
    logits = _logits(output)
    if isinstance(logits, Tensor) and logits.dim() == 2:
        return F.cross_entropy(logits.float(), torch.zeros(len(logits), dtype=torch.long, device=logits.device))
    outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    if not outputs:
        raise ValueError(
            f"the model returns {type(output).__name__} without a tensor that has a gradient; pass "
            f"loss=lambda output, batch: ..."
        )
    return torch.stack([tensor.float().square().mean() for tensor in outputs]).sum()


def own_loss(output: Any) -> Tensor | None:
    """The loss that a model computed itself: the entry or attribute ``loss`` of its output, or None."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) else None


def token_loss(output: Any, batch: Any, reduction: str = "sum", check_ids: bool = True) -> Tensor | None:
    """The cross-entropy of each next token of a model that returns logits, without padding.

    Args:
        output: logits [B, T, V], or an output with ``logits``.
        batch: token ids [B, T], as ``predicted`` finds them.
        reduction: over tokens, ``"sum"`` or ``"mean"``.
        check_ids: check that all ids are below V, which shows that the output is logits. It reads their values.

    Returns:
        An fp32 scalar; None if the output has another shape.
    """
    ids, _ = predicted(batch)
    logits = _logits(output)
    if not (isinstance(logits, Tensor) and isinstance(ids, Tensor) and not ids.is_floating_point() and ids.dim() == 2):
        return None
    if logits.dim() != 3 or logits.shape[:2] != ids.shape:
        return None
    if check_ids and not (ids.numel() > 0 and logits.shape[2] > int(ids.max())):
        return None
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), token_targets(batch).flatten(), ignore_index=_IGNORED, reduction=reduction
    )


def token_targets(batch: Any) -> Tensor:
    """The targets of ``token_loss``, int64 [B, T - 1]: the next tokens, and -100 for padding."""
    ids, mask = predicted(batch)
    targets: Tensor = ids[:, 1:].long()
    if mask is not None and mask.shape == ids.shape:
        targets = targets.masked_fill(~mask[:, 1:], _IGNORED)
    return targets


def predicted(batch: Any) -> tuple[Any, Tensor | None]:
    """The token ids that the logits predict (a decoder's, if the batch has them), and the mask that is False for
    padding.
    """
    if isinstance(batch, Mapping) and "decoder_input_ids" in batch:
        return batch["decoder_input_ids"], mask_of(batch, "decoder_attention_mask")
    return tokens_of(batch), mask_of(batch)


def _logits(output: Any) -> Any:
    return output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
