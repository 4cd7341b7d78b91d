"""Attention that returns its weights, without saving them for backward.

Most callers that request weights drop them at once. Scores are computed for some queries at a time, and again in
backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.tiled.attention_tiles import AttentionCall, refuse_second_order
from lowbit.tiled.products import product, slices, sum_dtype
from lowbit.torch_private import is_fake

__all__ = ["attend_with_weights"]


def attend_with_weights(call: AttentionCall, average: bool) -> tuple[Tensor, Tensor]:
    """Compute attention and its weights like ``nn.MultiheadAttention``.

    Args:
        call: As for ``attend``, without window and soft cap. Masks are ``[queries, keys]`` or ``[batch, heads, queries,
            keys]``, and True hides a key.
        average: Whether to average the weights over heads.

    Returns:
        The output ``[batch, heads, queries, value dim]``, and the weights after dropout: ``[batch, queries, keys]``, or
        ``[batch, heads, queries, keys]`` without ``average``. A query that attends to no key gives NaN, as in torch.
    """
    seed = int(torch.randint(1 << 62, ())) if call.dropout and not is_fake(call.q) else 0
    with torch.autocast(call.q.device.type, enabled=False):
        return _Weighed.apply(*call[:5], call.scale, call.dropout, average, seed, call.tile)  # type: ignore[no-any-return,no-untyped-call]


class _Rows(NamedTuple):
    """The weights of a call, for some queries at a time. ``tile`` is the most scores computed together."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    padding: Tensor | None
    scale: float
    dropout: float
    average: bool
    seed: int
    tile: int

    def slices(self) -> Iterator[slice]:
        batch, heads, queries, _ = self.q.shape
        step = max(1, self.tile // max(1, batch * heads * self.k.shape[2]))
        return slices(0, queries, step)

    def weights(self, rows: slice) -> Tensor:
        """Return the softmax of the scores, in ``sum_dtype``."""
        scores = self.times(self.q[:, :, rows], self.k.transpose(-2, -1)).mul_(self.scale)
        for mask in (
            None if self.mask is None else _of_rows(self.mask, rows),
            None if self.padding is None else self.padding[:, None, None, :],
        ):
            if mask is not None:
                bools = mask.dtype == torch.bool
                scores = scores.masked_fill_(mask, -torch.inf) if bools else scores.add_(mask)
        return scores.softmax(-1)

    def dropped(self, weights: Tensor, rows: slice) -> Tensor:
        """Return ``weights`` after dropout. Every call for the same rows draws the same random numbers."""
        if not self.dropout:
            return weights
        device = weights.device
        generator = None if is_fake(weights) else torch.Generator(device).manual_seed(self.seed + rows.start)
        survives = torch.rand(weights.shape, device=device, generator=generator) >= self.dropout
        return weights * survives / (1 - self.dropout)

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        return product(a, b, self.q.dtype)


def _of_rows(mask: Tensor, rows: slice) -> Tensor:
    """Return the part of a mask for some queries, a view."""
    return mask if mask.shape[-2] == 1 else mask[..., rows, :]


class _Weighed(torch.autograd.Function):
    """Arguments are the fields of ``_Rows``."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        call = _Rows(*arguments)
        (batch, heads, queries, _), keys = call.q.shape, call.k.shape[2]
        out = call.q.new_empty(batch, heads, queries, call.v.shape[-1])
        returned = call.q.new_empty(*((batch, queries, keys) if call.average else (batch, heads, queries, keys)))
        for rows in call.slices():
            weights = call.dropped(call.weights(rows), rows)
            out[:, :, rows] = call.times(weights, call.v)
            returned[..., rows, :] = weights.mean(1) if call.average else weights
        ctx.save_for_backward(*arguments[:5])
        ctx.rest = arguments[5:]
        ctx.set_materialize_grads(False)
        return out, returned

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, weights_grad: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_order()
        call = _Rows(*ctx.saved_tensors, *ctx.rest)
        sums = sum_dtype(call.q.dtype)
        wanted = [t is not None and need for t, need in zip(call[:4], ctx.needs_input_grad[:4], strict=True)]
        grads = [torch.zeros_like(t, dtype=sums) if use else None for t, use in zip(call[:4], wanted, strict=True)]  # type: ignore[arg-type]
        for rows in call.slices() if grad is not None or weights_grad is not None else ():
            _backward_of_rows(call, rows, grads, grad, weights_grad)
        cast = (None if g is None else g.to(t.dtype) for g, t in zip(grads, call[:4], strict=True))  # type: ignore[union-attr]
        return (*cast, None, *(None for _ in ctx.rest))


def _backward_of_rows(
    call: _Rows, rows: slice, grads: list[Tensor | None], grad: Tensor | None, weights_grad: Tensor | None
) -> None:
    """Add the contribution of some queries to ``grads``, the wanted gradients of q, k, v and mask."""
    q_grad, k_grad, v_grad, mask_grad = grads
    weights = call.weights(rows)
    score_grad = torch.zeros_like(weights)
    if grad is not None:
        score_grad = call.times(grad[:, :, rows], call.v.transpose(-2, -1))
        if v_grad is not None:
            v_grad += call.times(call.dropped(weights, rows).transpose(-2, -1), grad[:, :, rows])
    if weights_grad is not None:
        row_grad = weights_grad[..., rows, :]
        score_grad += row_grad.unsqueeze(1) / call.q.shape[1] if call.average else row_grad
    score_grad = call.dropped(score_grad, rows)
    score_grad = (score_grad - (score_grad * weights).sum(-1, keepdim=True)) * weights
    if mask_grad is not None:
        target = _of_rows(mask_grad, rows)
        target += score_grad.sum_to_size(target.shape)
    score_grad *= call.scale
    if q_grad is not None:
        q_grad[:, :, rows] = call.times(score_grad, call.k)
    if k_grad is not None:
        k_grad += call.times(score_grad.transpose(-2, -1), call.q[:, :, rows])
