"""Attention with its weights, of which backward keeps none.

A caller that asks for weights gets them, and most models drop them at once. Scores are computed for some queries at a
time, and again in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.tiled.attention_tiles import AttentionCall, refuse_second_order
from lowbit.tiled.products import product, sum_dtype
from lowbit.torch_private import is_fake

__all__ = ["attend_with_weights"]


def attend_with_weights(call: AttentionCall, average: bool) -> tuple[Tensor, Tensor]:
    """Attention and its weights, as ``nn.MultiheadAttention`` computes them.

    Args:
        call: As for ``attend``, with masks ``[queries, keys]`` or ``[batch, heads, queries, keys]`` whose True hides,
            no window and no cap.
        average: Weights are averaged over heads.

    Returns:
        The output ``[batch, heads, queries, value dim]``, and the weights after dropout ``[batch, queries, keys]``, or
        ``[batch, heads, queries, keys]`` without ``average``. A query that sees no key gives NaN, as in torch.
    """
    seed = int(torch.randint(1 << 62, ())) if call.dropout and not is_fake(call.q) else 0
    with torch.autocast(call.q.device.type, enabled=False):
        return _Weighed.apply(*call[:5], call.scale, call.dropout, average, seed, call.tile)  # type: ignore[no-any-return,no-untyped-call]


class _Rows(NamedTuple):
    """The weights of a call, some queries at a time. ``tile``: the most scores that are computed together."""

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
        return (slice(at, min(at + step, queries)) for at in range(0, queries, step))

    def weights(self, rows: slice) -> Tensor:
        """The softmax of the scores, in ``sum_dtype``."""
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
        """``weights`` after dropout, the same in every call for these rows."""
        if not self.dropout:
            return weights
        device = weights.device
        generator = None if is_fake(weights) else torch.Generator(device).manual_seed(self.seed + rows.start)
        kept = torch.rand(weights.shape, device=device, generator=generator) >= self.dropout
        return weights * kept / (1 - self.dropout)

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        return product(a, b, self.q.dtype)


def _of_rows(mask: Tensor, rows: slice) -> Tensor:
    """The part of a mask that is of some queries, a view."""
    return mask if mask.shape[-2] == 1 else mask[..., rows, :]


class _Weighed(torch.autograd.Function):
    """``apply(*_Rows)``."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        call = _Rows(*arguments)
        (batch, heads, queries, _), keys = call.q.shape, call.k.shape[2]
        out = call.q.new_empty(batch, heads, queries, call.v.shape[-1])
        shown = call.q.new_empty(*((batch, queries, keys) if call.average else (batch, heads, queries, keys)))
        for rows in call.slices():
            weights = call.dropped(call.weights(rows), rows)
            out[:, :, rows] = call.times(weights, call.v)
            shown[..., rows, :] = weights.mean(1) if call.average else weights
        ctx.save_for_backward(*arguments[:5])
        ctx.rest = arguments[5:]
        ctx.set_materialize_grads(False)
        return out, shown

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, of_shown: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_order()
        call = _Rows(*ctx.saved_tensors, *ctx.rest)
        sums = sum_dtype(call.q.dtype)
        wanted = [t is not None and need for t, need in zip(call[:4], ctx.needs_input_grad[:4], strict=True)]
        grads = [torch.zeros_like(t, dtype=sums) if use else None for t, use in zip(call[:4], wanted, strict=True)]  # type: ignore[arg-type]
        for rows in call.slices() if grad is not None or of_shown is not None else ():
            _backward_of_rows(call, rows, grads, grad, of_shown)
        cast = (None if g is None else g.to(t.dtype) for g, t in zip(grads, call[:4], strict=True))  # type: ignore[union-attr]
        return (*cast, None, *(None for _ in ctx.rest))


def _backward_of_rows(
    call: _Rows, rows: slice, grads: list[Tensor | None], grad: Tensor | None, of_shown: Tensor | None
) -> None:
    """Adds to ``grads`` of q, k, v and the mask, those that are wanted, what some queries give."""
    of_q, of_k, of_v, of_mask = grads
    weights = call.weights(rows)
    back = torch.zeros_like(weights)
    if grad is not None:
        back = call.times(grad[:, :, rows], call.v.transpose(-2, -1))
        if of_v is not None:
            of_v += call.times(call.dropped(weights, rows).transpose(-2, -1), grad[:, :, rows])
    if of_shown is not None:
        shown = of_shown[..., rows, :]
        back += shown.unsqueeze(1) / call.q.shape[1] if call.average else shown
    back = call.dropped(back, rows)
    back = (back - (back * weights).sum(-1, keepdim=True)) * weights
    if of_mask is not None:
        target = _of_rows(of_mask, rows)
        target += back.sum_to_size(target.shape)
    back *= call.scale
    if of_q is not None:
        of_q[:, :, rows] = call.times(back, call.k)
    if of_k is not None:
        of_k += call.times(back.transpose(-2, -1), call.q[:, :, rows])
