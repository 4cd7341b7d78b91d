"""How much each row of a layer's inputs counts: by what an error of its output does to the model's loss.

Source: Kim et al., GuidedQuant, arXiv 2505.07004 (with one group of channels a layer).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lowbit.calibrate.blocks import feed
from lowbit.calibrate.observed import Observed
from lowbit.calibrate.observers import processes

__all__ = ["Loss", "weigh"]

#: The loss of what the model answers to a batch, a scalar.
Loss = Callable[[Any, Any], Tensor]

#: The seed of the directions in which outputs without a loss are looked at.
_SEED = 0


def weigh(model: nn.Module, layers: Sequence[Observed], batches: Sequence[Any], loss: Loss | None) -> None:
    """Give each of ``layers`` the importance of the rows of its inputs: ``|dL/dy|^2`` of the output's row, with a mean
    of 1. Runs ``model`` forward and backward, whole, with one batch at a time.

    ``loss``: by default the cross-entropy of the next token, where the model answers with logits of the token ids that
    it is given; else a random projection of its outputs, whose gradient tells how far a row moves them.
    Raises ValueError for gradients with NaN or Inf.
    """
    generator = torch.Generator().manual_seed(_SEED)
    for layer in layers:
        layer.importance = []
    for number, batch in enumerate(batches):
        calls: dict[Observed, list[_Call]] = {layer: [] for layer in layers}
        for layer in layers:
            layer.watch = _watcher(calls[layer])
        try:
            with torch.enable_grad():
                output = feed(model, batch)
                value = _loss(output, batch, generator) if loss is None else loss(output, batch)
                zeros = [call.zero for of in calls.values() for call in of]
                if zeros:
                    torch.autograd.grad(value, zeros, allow_unused=True)
        finally:
            for layer in layers:
                layer.watch = None
        for layer, of in calls.items():
            assert layer.importance is not None
            if not all(bool(call.rows.isfinite().all()) for call in of):
                raise ValueError(
                    f"the gradient of the loss at layer {layer.name!r} holds NaN or Inf in batch {number}; look for "
                    f"them in the calibration data, or in the model"
                )
            layer.importance.append([call.rows for call in of])
    for layer in layers:
        _normalize(layer)


class _Call:
    """One call of a layer: ``rows`` is the squared gradient of each row of its output; 0 where none comes back."""

    def __init__(self, y: Tensor) -> None:
        self.zero = torch.zeros((), dtype=y.dtype, device=y.device, requires_grad=True)
        self.rows = torch.zeros(y.shape[:-1], device=y.device)

    def look(self, grad: Tensor) -> None:
        self.rows = grad.detach().float().square().sum(-1)


def _watcher(calls: list[_Call]) -> Callable[[Tensor], Tensor]:
    """What a layer's output goes through: unchanged, but its gradient is looked at."""

    def watch(y: Tensor) -> Tensor:
        call = _Call(y)
        calls.append(call)
        y = y + call.zero  # has a gradient even where no parameter asks for one
        y.register_hook(call.look)
        return y

    return watch


def _normalize(layer: Observed) -> None:
    """Divide the importance by its mean; where the loss does not depend on the layer, all rows count the same."""
    assert layer.importance is not None
    rows = [row for batch in layer.importance for row in batch]
    total = torch.zeros(2, dtype=torch.float64)
    for row in rows:
        total += torch.tensor([float(row.sum(dtype=torch.float64)), row.numel()], dtype=torch.float64)
    if processes() > 1:
        dist.all_reduce(total)
    mean = float(total[0] / total[1]) if total[1] else 0.0
    if mean <= 0:
        layer.importance = None
        return
    layer.importance = [[row / mean for row in batch] for batch in layer.importance]


def _loss(output: Any, batch: Any, generator: torch.Generator) -> Tensor:
    given = output.get("loss") if isinstance(output, Mapping) else None
    if isinstance(given, Tensor):
        return given
    ids = _ids(batch)
    logits: Any = output.get("logits") if isinstance(output, Mapping) else output
    if _are_logits(logits, ids):
        targets = ids[:, 1:]
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if isinstance(mask, Tensor) and mask.shape == ids.shape:
            targets = targets.masked_fill(mask[:, 1:] == 0, -100)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets.flatten(), reduction="sum")
    projected = [
        (one.float() * torch.randn(one.shape, generator=generator).to(one.device)).sum() for one in _tensors(output)
    ]
    if not projected:
        raise ValueError(
            f"the model answers {type(output).__name__} without a tensor that has a gradient; give calibrate "
            f"loss=lambda output, batch: ..."
        )
    return torch.stack(projected).sum()


def _ids(batch: Any) -> Any:
    """The token ids in a batch, where it is one of tokens."""
    if isinstance(batch, Mapping):
        return batch.get("input_ids")
    return batch[0] if isinstance(batch, tuple | list) and batch else batch


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
        for one in output.values():
            yield from _tensors(one)
    elif isinstance(output, tuple | list):
        for one in output:
            yield from _tensors(one)
