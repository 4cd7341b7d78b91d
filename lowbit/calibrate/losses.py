"""What a model's outputs are judged by, where the caller gives no loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowbit.calibrate.identity import digest
from lowbit.models.batches import mask_of, tokens_of

__all__ = ["Loss", "default_loss", "predicted", "token_loss"]

#: The loss of what the model answers to a batch, a scalar.
Loss = Callable[[Any, Any], Tensor]


def default_loss(output: Any, batch: Any) -> Tensor:
    """The model's own loss where it answers with one; else the ``token_loss``, where it has one; else a random
    projection of its outputs.

    Raises ValueError for outputs without a gradient.
    """
    given = output.get("loss") if isinstance(output, Mapping) else None
    if isinstance(given, Tensor):
        return given
    value = token_loss(output, batch)
    if value is not None:
        return value
    tokens, mask = tokens_of(batch), mask_of(batch)
    if mask is None and tokens is not None and isinstance(batch, Mapping):
        mask = torch.ones_like(tokens, dtype=torch.bool)
    seed = digest(batch if mask is None else _without_padding(batch, mask))
    generator = torch.Generator().manual_seed(int(seed[:15], 16))  # whatever the order of the batches
    projected = []
    for answer in _tensors(output):
        if mask is not None and answer.shape[:2] == mask.shape:
            answer = answer[mask]
        direction = torch.randn(answer.shape, generator=generator).to(answer.device)
        projected.append((answer.float() * direction).sum())
    if not projected:
        raise ValueError(
            f"the model answers {type(output).__name__} without a tensor that has a gradient; give calibrate "
            f"loss=lambda output, batch: ..."
        )
    return torch.stack(projected).sum()


def token_loss(output: Any, batch: Any) -> Tensor | None:
    """The sum over tokens, without padding, of the cross-entropy of the next one, where the model answers with logits
    [B, T, V] of the token ids [B, T] that it is given; None where it answers with something else.
    """
    ids, mask = predicted(batch)
    logits: Any = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not _are_logits(logits, ids):
        return None
    targets = ids[:, 1:].long()
    if mask is not None and mask.shape == ids.shape:
        targets = targets.masked_fill(~mask[:, 1:], -100)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets.flatten(), reduction="sum")


def _without_padding(batch: Mapping[str, Any], mask: Tensor) -> dict[str, Any]:
    """What of a batch counts."""
    given = {name: value for name, value in batch.items() if name != "attention_mask"}
    return {
        name: value[mask] if isinstance(value, Tensor) and value.shape[:2] == mask.shape else value
        for name, value in given.items()
    }


def predicted(batch: Any) -> tuple[Any, Tensor | None]:
    """The token ids that logits are of, which a decoder is given where there is one; and where these are no padding."""
    if isinstance(batch, Mapping) and "decoder_input_ids" in batch:
        return batch["decoder_input_ids"], mask_of(batch, "decoder_attention_mask")
    return tokens_of(batch), mask_of(batch)


def _are_logits(logits: Any, ids: Any) -> bool:
    """Whether these are scores [B, T, vocabulary] for the tokens [B, T]."""
    return (
        isinstance(logits, Tensor)
        and isinstance(ids, Tensor)
        and not ids.is_floating_point()
        and ids.dim() == 2
        and logits.dim() == 3
        and logits.shape[:2] == ids.shape
        and ids.numel() > 0
        and logits.shape[2] > int(ids.max())
    )


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.requires_grad:
            yield output
    elif isinstance(output, Mapping):
        for inner in output.values():
            yield from _tensors(inner)
    elif isinstance(output, tuple | list):
        for inner in output:
            yield from _tensors(inner)
