"""The importance of the rows of a layer's inputs, from the gradient of the model's loss.

Source: Kim et al., GuidedQuant, arXiv 2505.07004 (with one group of channels per layer).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowbit.calibrate.identity import digest
from lowbit.calibrate.recording import Observed
from lowbit.checkpointing.apply import recomputing
from lowbit.checkpointing.frame import NotReplayed
from lowbit.dist_utils import exchange_device, processes
from lowbit.memory import heap
from lowbit.models.batches import feed, mask_of, tokens_of
from lowbit.models.blocks import find_blocks
from lowbit.models.losses import Loss, own_loss, token_loss
from lowbit.models.writes import Written, despite_writes

__all__ = ["weigh"]


def weigh(
    model: nn.Module, layers: Sequence[Observed], batches: Sequence[Any], loss: Loss | None, checkpointed: bool = True
) -> None:
    """Set ``layer.importance`` of each of ``layers``: ``|dL/dy|^2`` per row of the output, with mean 1.

    Runs the full ``model`` forward and backward, one batch at a time.

    Args:
        model: The model with Observed layers.
        layers: The layers.
        batches: Inputs of the model.
        loss: Default: the model's own loss, or that of its tokens, or a random projection of its outputs, whose
            gradient measures how far a row moves the outputs.
        checkpointed: Whether each block is recomputed in backward to save memory.

    Raises:
        ValueError: A gradient has NaN or Inf.
    """
    for layer in layers:
        layer.importance = []
    for number, batch in enumerate(batches):
        backward = partial(_backward, model, layers, batch, loss)
        watches = despite_writes(partial(backward, checkpointed=checkpointed), partial(backward, checkpointed=False))
        for layer, watch in watches.items():
            assert layer.importance is not None
            if not all(bool(call.rows.isfinite().all()) for call in watch.calls):
                raise ValueError(
                    f"the gradient of the loss at layer {layer.name!r} has NaN or Inf in batch {number}; look for "
                    f"them in the calibration data, or in the model"
                )
            layer.importance.append([call.rows for call in watch.calls])
        heap.trim()  # the rows stay between freed activations, and each batch would need new pages
    for layer in layers:
        _normalize(layer)


def _backward(
    model: nn.Module, layers: Sequence[Observed], batch: Any, loss: Loss | None, checkpointed: bool
) -> dict[Observed, _Watch]:
    """The watches of the layers after backward of one batch. Raises ValueError if the loss has no gradient."""
    watches = {layer: _Watch() for layer in layers}
    for layer, watch in watches.items():
        layer.watch = watch
    try:
        with torch.enable_grad(), _checkpointed(model) if checkpointed else nullcontext():
            output = feed(model, batch)
            value = _default_loss(output, batch) if loss is None else loss(output, batch)
            if not isinstance(value, Tensor) or not value.requires_grad:
                raise ValueError(
                    "the loss has no gradient with respect to the layers (is there a no_grad in the model, or a "
                    "detach?); give calibrate method='gptq'"
                )
            for watch in watches.values():
                watch.forward = False
            zeros = [call.zero for watch in watches.values() for call in watch.calls]
            if zeros:
                torch.autograd.grad(value, zeros, allow_unused=True)
    finally:
        for layer in layers:
            layer.watch = None
    return watches


class _Call:
    """One call of a layer. ``rows``: the squared gradient of each row of its output; 0 without a gradient."""

    def __init__(self, y: Tensor) -> None:
        self.zero = torch.zeros((), dtype=y.dtype, device=y.device, requires_grad=True)
        self.rows = torch.zeros(y.shape[:-1], device=y.device)

    def look(self, grad: Tensor) -> None:
        self.rows = grad.detach().float().square().sum(-1)


class _Watch:
    """Records the gradients of a layer's outputs in the forward pass; recomputed outputs have no gradient."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.forward = True

    def __call__(self, y: Tensor) -> Tensor:
        if not self.forward:
            return y
        call = _Call(y)
        self.calls.append(call)
        y = y + call.zero  # has a gradient even if no parameter requires one
        y.register_hook(call.look)
        return y


@contextmanager
def _checkpointed(model: nn.Module) -> Iterator[None]:
    """Checkpoint the blocks of ``model``, if it has any. Raises Written if a block cannot be recomputed, for example
    because it writes to its input.
    """
    try:
        with recomputing(find_blocks(model)):
            yield
    except NotReplayed as error:
        raise Written from error


def _normalize(layer: Observed) -> None:
    """Divide the importance by its mean. If the loss does not depend on the layer, all rows count the same."""
    assert layer.importance is not None
    rows = [row for batch in layer.importance for row in batch]
    total = torch.zeros(2, dtype=torch.float64)
    for row in rows:
        total += torch.tensor([float(row.sum(dtype=torch.float64)), row.numel()], dtype=torch.float64)
    if processes() > 1:
        total = total.to(exchange_device())
        dist.all_reduce(total)
    mean = float(total[0] / total[1]) if total[1] else 0.0
    if mean <= 0:
        layer.importance = None
        return
    layer.importance = [[row / mean for row in batch] for batch in layer.importance]


# -- the loss ----------------------------------------------------------------------------------------------------------
def _default_loss(output: Any, batch: Any) -> Tensor:
    """The model's own loss, or the sum of the ``token_loss``, or a random projection of the outputs, seeded by the
    digest of the batch. Raises ValueError for outputs without a gradient.
    """
    value = own_loss(output)
    if value is not None:
        return value
    value = token_loss(output, batch)
    if value is not None:
        return value
    tokens, mask = tokens_of(batch), mask_of(batch)
    if mask is None and tokens is not None and isinstance(batch, Mapping):
        mask = torch.ones_like(tokens, dtype=torch.bool)
    seed = digest(batch if mask is None else _without_padding(batch, mask))
    generator = torch.Generator().manual_seed(int(seed[:15], 16))  # independent of the order of the batches
    projected = []
    for tensor in _tensors(output):
        if mask is not None and tensor.shape[:2] == mask.shape:
            tensor = tensor[mask]
        direction = torch.randn(tensor.shape, generator=generator).to(tensor.device)
        projected.append((tensor.float() * direction).sum())
    if not projected:
        raise ValueError(
            f"the model returns {type(output).__name__} without a tensor that has a gradient; give calibrate "
            f"loss=lambda output, batch: ..."
        )
    return torch.stack(projected).sum()


def _without_padding(batch: Mapping[str, Any], mask: Tensor) -> dict[str, Any]:
    return {
        name: value[mask] if isinstance(value, Tensor) and value.shape[:2] == mask.shape else value
        for name, value in batch.items()
        if name != "attention_mask"
    }


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
