"""Attention whose memory grows with the length of its sequences, not with the square of it.

Sources: Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory", arXiv 2112.05682; Dao et al.,
"FlashAttention", arXiv 2205.14135.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isqrt
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda

from lowbit.tables import aligned
from lowbit.tiled.products import TILE, product, sum_dtype
from lowbit.torch_private import is_fake

__all__ = [
    "AttentionBackends",
    "AttentionCall",
    "attend",
    "attention",
    "attention_backends",
    "cast_by_autocast",
    "refuse_second_order",
]

#: Queries and keys of a tile, where there are as many: products of fewer cost more than their arithmetic.
_SIDE = 512

#: Without ``chunk`` a tile has at most this many times the numbers of the largest input, so that memory grows with the
#: length of short sequences too; and it may have so many numbers in any case.
_SHARE, _LEAST = 4, 1 << 16


class AttentionCall(NamedTuple):
    """The arguments of ``attention``, and two that its callers in the package have.

    ``key_mask``: a second mask, ``[batch, keys]``, of bool or q's dtype, without gradients. ``hides``: what is true in
    bool masks takes no part.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    key_mask: Tensor | None
    causal: bool
    window: int | None
    scale: float
    softcap: float | None
    dropout: float
    hides: bool = False

    @property
    def grouped(self) -> bool:
        return self.q.shape[1] != self.k.shape[1]

    @property
    def tile(self) -> int:
        """Scores in a tile where nobody says how many."""
        return min(TILE, max(_LEAST, _SHARE * int(max(t.numel() for t in self[:3]))))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    chunk: int | None = None,
) -> Tensor:
    """``softmax(scale * q k^T + mask) v`` without ever making the scores.

    ``q`` ``[batch, heads, queries, dim]``, ``k`` ``[batch, kv heads, keys, dim]``, ``v`` ``[batch, kv heads, keys,
    value dim]``, of one dtype; heads are a multiple of kv heads, and neighbouring heads share one. Returns
    ``[batch, heads, queries, value dim]`` in that dtype.

    ``mask``: bool (true takes part) or of q's dtype (added to scores, may have gradients), broadcast to
    ``[batch, heads, queries, keys]``. ``causal``: query i sees keys 0 to i, aligned at the beginning as in torch's SDPA
    also where there are more keys than queries. ``window``: it sees keys nearer than ``window``, on both sides or with
    ``causal`` the last ``window`` up to i. ``scale``: default ``dim ** -0.5``. ``softcap``: scores become
    ``softcap * tanh(score / softcap)`` before the mask. ``dropout``: the chance that a probability becomes 0, also in
    evaluation. A query that sees no key gives zeros.

    torch's SDPA serves what one of its kernels takes in linear memory (``attention_backends`` says which, and why not
    others). The rest is computed in tiles, with sums in fp32 or better: forward keeps the output and each row's
    log-sum-exp, backward computes scores again. Tiles that causal or window hide are skipped. ``chunk``: scores in a
    tile, and tiles in any case. By default a tile has at most 2^22, and four times the numbers of the largest input.

    Raises ValueError for shapes and options that do not fit, TypeError for dtypes, RuntimeError for gradients of
    gradients and for dropout in tiles inside torch.compile.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return attend(AttentionCall(q, k, v, mask, None, causal, window, scale, softcap, dropout), chunk)


def attend(call: AttentionCall, chunk: int | None = None) -> Tensor:
    """What ``attention`` does, for all that a call may have."""
    _check(call, chunk)
    call, device = cast_by_autocast(call), call.q.device.type
    if chunk is None and _backends(call).chosen != _TILES:
        mask = call.mask if call.key_mask is None else call.key_mask[:, None, None, :]
        return F.scaled_dot_product_attention(
            call.q, call.k, call.v, mask, call.dropout, call.causal, scale=call.scale, enable_gqa=call.grouped
        )
    if call.dropout and torch.compiler.is_compiling():
        raise RuntimeError(
            "memory.attention: dropout in tiles does not compile; leave dropout out, or wrap the call in "
            "torch.compiler.disable"
        )
    # What has no data needs no random bits either, and may not read a number.
    seed = int(torch.randint(1 << 62, ())) if call.dropout and not is_fake(call.q) else 0
    with torch.autocast(device, enabled=False):
        return _Attention.apply(*call, seed, call.tile if chunk is None else chunk)  # type: ignore[no-any-return,no-untyped-call]


# -- who serves --------------------------------------------------------------------------------------------------------
_TILES = "tiles"


@dataclass(frozen=True)
class AttentionBackends:
    """``reasons``: of each backend, in order of preference, why it does not serve, or None. ``chosen``: the first that
    serves. Prints as a table.
    """

    reasons: dict[str, str | None]

    @property
    def chosen(self) -> str:
        return next(name for name, reason in self.reasons.items() if reason is None)

    def __str__(self) -> str:
        return aligned([(name, "serves" if reason is None else reason) for name, reason in self.reasons.items()])


def attention_backends(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> AttentionBackends:
    """What serves ``attention`` of these arguments in linear memory, and why other backends do not.

    Backends are kernels of torch's SDPA on the device (``flash`` on a CPU; ``cudnn``, ``flash`` and ``efficient`` on
    CUDA), and ``tiles``, which serves everything.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    call = AttentionCall(q, k, v, mask, None, causal, window, scale, softcap, dropout)
    _check(call, None)
    return _backends(call)


def _backends(call: AttentionCall) -> AttentionBackends:
    kernels = _KERNELS.get(call.q.device.type, {})
    common = next((why for why, holds in _NOT_OF_SDPA if holds(call)), None)
    found = {name: common or refuses(call) for name, refuses in kernels.items()}
    return AttentionBackends({**found, _TILES: None})


def _masked(call: AttentionCall) -> bool:
    return call.mask is not None or call.key_mask is not None


#: What no kernel of SDPA takes.
_NOT_OF_SDPA: tuple[tuple[str, Callable[[AttentionCall], bool]], ...] = (
    ("has no window", lambda call: call.window is not None),
    ("has no softcap", lambda call: call.softcap is not None),
    ("takes a mask or causal, not both", lambda call: call.causal and _masked(call)),
    ("takes one mask", lambda call: call.mask is not None and call.key_mask is not None),
    ("takes masks of what takes part", lambda call: call.hides),
)
#: What the flash kernel for CPUs does not take. Source: ATen/native/transformers/sdp_utils_cpp.cpp.
_NOT_OF_CPU_FLASH: tuple[tuple[str, Callable[[AttentionCall], bool]], ...] = (
    ("has no dropout", lambda call: call.dropout > 0),
    ("takes values of the keys' dim", lambda call: call.v.shape[-1] != call.k.shape[-1]),
    ("takes no empty sequences", lambda call: not call.q.shape[2] or not call.k.shape[2]),
    ("takes elements of a head side by side", lambda call: any(t.stride(-1) != 1 for t in (call.q, call.k, call.v))),
    ("has no gradient of the mask", lambda call: call.mask is not None and call.mask.requires_grad),
    ("takes a mask of 2 or 4 dimensions", lambda call: call.mask is not None and call.mask.dim() not in (2, 4)),
    ("is switched off by sdpa_kernel", lambda call: not (torch.compiler.is_compiling() or cuda.flash_sdp_enabled())),
)


def _cpu_flash_refuses(call: AttentionCall) -> str | None:
    return next((why for why, holds in _NOT_OF_CPU_FLASH if holds(call)), None)


def _cuda_refuses(can_use: Callable[[Any, bool], bool]) -> Callable[[AttentionCall], str | None]:
    def refuses(call: AttentionCall) -> str | None:
        if torch.compiler.is_compiling():
            return None  # what is compiled cannot ask; SDPA itself chooses
        params = cuda.SDPAParams(call.q, call.k, call.v, call.mask, call.dropout, call.causal, call.grouped)
        if can_use(params, False):
            return None
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            can_use(params, True)
        return str(told[-1].message).split(" (Triggered")[0] if told else "torch does not say why not"

    return refuses


_KERNELS: dict[str, dict[str, Callable[[AttentionCall], str | None]]] = {
    "cpu": {"flash": _cpu_flash_refuses},
    "cuda": {
        "cudnn": _cuda_refuses(cuda.can_use_cudnn_attention),
        "flash": _cuda_refuses(cuda.can_use_flash_attention),
        "efficient": _cuda_refuses(cuda.can_use_efficient_attention),
    },
}


# -- in tiles ----------------------------------------------------------------------------------------------------------
class _Attention(torch.autograd.Function):
    """``apply(*call, seed, chunk)``."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        tiles = _Tiles(AttentionCall(*arguments[:-2]), *arguments[-2:])
        q, v = tiles.call.q, tiles.call.v
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        log_sum = q.new_empty(*q.shape[:3], 2, dtype=tiles.sums)
        for box, rows in tiles.outer():
            tiles.rows_of(out, box, rows)[:], tiles.rows_of(log_sum, box, rows)[:] = _attend(tiles, box, rows)
        ctx.save_for_backward(*arguments[:5], out, log_sum)
        ctx.rest, ctx.compiled = arguments[5:], torch.compiler.is_compiling()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_order()
        *inputs, out, log_sum = ctx.saved_tensors
        tiles = _Tiles(AttentionCall(*inputs, *ctx.rest[:-2]), *ctx.rest[-2:])
        # Compiled code does not know of gradients that tensors have since something was written into them.
        needs = [*(need or ctx.compiled for need in ctx.needs_input_grad[:3]), ctx.needs_input_grad[3]]
        inputs = inputs[:4]  # a key_mask has no gradient
        wanted = [t is not None and need for t, need in zip(inputs, needs, strict=True)]
        grads = [torch.zeros_like(t, dtype=tiles.sums) if use else None for t, use in zip(inputs, wanted, strict=True)]
        # The softmax's gradient subtracts the sum of probabilities times their gradients, which is out * grad.
        inner = (out * grad.to(tiles.sums)).sum(-1, keepdim=True)
        for box, rows in tiles.outer():
            given = (tiles.rows_of(t, box, rows) for t in (grad, log_sum, inner))
            _backward_of_rows(tiles, box, rows, grads, *given)
        cast = (None if g is None else g.to(t.dtype) for g, t in zip(grads, inputs, strict=True))
        return (*cast, None, *(None for _ in ctx.rest))


def refuse_second_order() -> None:
    """Raises RuntimeError in a backward pass of which a graph is made."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "memory.attention in tiles has no gradients of gradients, and backward was called with "
            "create_graph=True; use softmax(q @ k.transpose(-2, -1)) @ v for them"
        )


#: Which batches and which kv heads.
_Box = tuple[slice, slice]


class _Tiles:
    """The scores of a call, of which a tile is some batches and kv heads (a box), some queries, and some keys.

    Tensors of queries ``[batch, heads, queries, n]`` are seen as ``[batch, kv heads, heads of one, queries, n]``.
    """

    def __init__(self, call: AttentionCall, seed: int, chunk: int) -> None:
        self.call, self.seed, self.chunk = call, seed, chunk
        self.dtype, self.sums = call.q.dtype, sum_dtype(call.q.dtype)
        self.batches, heads, self.queries = call.q.shape[:3]
        self.kv_heads, self.keys = call.k.shape[1:3]
        self.group = heads // self.kv_heads
        self.side = max(1, min(_SIDE, isqrt(chunk // self.group)))

    def outer(self) -> Iterator[tuple[_Box, slice]]:
        """Boxes and rows of queries: as many heads together as fit, and batches where all heads fit."""
        per_head = self.group * min(self.queries, self.side) * min(self.keys, self.side)
        heads = max(1, min(self.kv_heads, self.chunk // max(1, per_head)))
        batches = max(1, self.chunk // max(1, per_head * heads)) if heads == self.kv_heads else 1
        for some in _slices(0, self.batches, batches):
            for of_heads in _slices(0, self.kv_heads, heads):
                for rows in _slices(0, self.queries, self.side):
                    yield (some, of_heads), rows

    def columns(self, rows: slice) -> Iterator[slice]:
        """Keys that some query of ``rows`` sees."""
        start, stop = 0, self.keys
        if self.call.window is not None:
            start, stop = max(0, rows.start - self.call.window + 1), min(stop, rows.stop - 1 + self.call.window)
        return _slices(start, min(stop, rows.stop) if self.call.causal else stop, self.side)

    def rows_of(self, t: Tensor, box: _Box, rows: slice) -> Tensor:
        """``[batches, kv heads, heads of one, queries, n]``, a view."""
        place = (*box, slice(None), rows)
        return t.unflatten(1, (self.kv_heads, self.group))[place]  # type: ignore[no-any-return]

    def mask_of(self, mask: Tensor, box: _Box, rows: slice, columns: slice) -> Tensor:
        """The part of what is broadcast to all scores, a view that broadcasts to a tile."""
        full = mask[(None,) * (4 - mask.dim())]
        heads = (self.kv_heads, self.group) if full.shape[1] > 1 else (1, 1)
        parts = (*box, slice(None), rows, columns)
        seen = full.unflatten(1, heads)
        return seen[tuple(part if size > 1 else slice(None) for part, size in zip(parts, seen.shape, strict=True))]  # type: ignore[no-any-return]

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        """``a`` ``[batches, kv heads, heads of one, queries, n]`` by ``b`` ``[batches, kv heads, n, m]``."""
        return product(a.flatten(2, 3), b, self.dtype).unflatten(2, (self.group, -1))  # type: ignore[no-any-return]

    def over_rows(self, a: Tensor, b: Tensor) -> Tensor:
        """Products of columns of ``a`` and of ``b``, both of queries, summed over queries and heads of one."""
        return product(a.flatten(2, 3).transpose(-2, -1), b.flatten(2, 3), self.dtype)

    def scores(self, box: _Box, rows: slice, columns: slice) -> tuple[Tensor, Tensor | None]:
        """The scores of a tile, -inf where a query does not see a key, and the slope of the cap."""
        call, part = self.call, (*box, columns)
        scores = self.times(self.rows_of(call.q, box, rows), call.k[part].transpose(-2, -1))
        scores *= call.scale
        slope = None
        if call.softcap is not None:
            scores = scores.div_(call.softcap).tanh_()
            slope = 1 - scores.square()
            scores *= call.softcap
        if call.mask is not None:
            scores = self.masked(scores, self.mask_of(call.mask, box, rows, columns))
        if call.key_mask is not None:
            scores = self.masked(scores, call.key_mask[box[0], columns][:, None, None, None, :])
        hidden = self.hidden(rows, columns)
        return (scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)), slope

    def masked(self, scores: Tensor, mask: Tensor) -> Tensor:
        if mask.dtype != torch.bool:
            return scores.add_(mask)
        return scores.masked_fill_(mask if self.call.hides else ~mask, -torch.inf)

    def hidden(self, rows: slice, columns: slice) -> Tensor | None:
        """Where causal and window hide a key, None where nowhere in the tile."""
        causal, window = self.call.causal, self.call.window
        past = window is not None and rows.stop - 1 - columns.start >= window
        future = columns.stop - 1 > rows.start if causal else window is not None and (
            columns.stop - 1 - rows.start >= window
        )  # fmt: skip
        if not past and not future:
            return None
        device = self.call.q.device
        ahead = torch.arange(columns.start, columns.stop, device=device) - torch.arange(
            rows.start, rows.stop, device=device
        ).unsqueeze(1)
        hides = ahead > 0 if causal else ahead >= (window or 0)
        return hides if window is None else hides | (ahead <= -window)

    def dropped(self, weights: Tensor, box: _Box, rows: slice, columns: slice) -> Tensor:
        """``weights`` after dropout, the same in every call for a tile."""
        rate = self.call.dropout
        if not rate:
            return weights
        first = ((box[0].start * self.kv_heads + box[1].start) * self.queries + rows.start) * self.keys + columns.start
        generator = None if is_fake(weights) else torch.Generator(weights.device).manual_seed(self.seed + first)
        return weights * (torch.rand(weights.shape, device=weights.device, generator=generator) >= rate) / (1 - rate)


def _attend(tiles: _Tiles, box: _Box, rows: slice) -> tuple[Tensor, Tensor]:
    """Output of some queries, and [..., 2] their highest score and the logarithm of the sum of exponentials beyond it,
    which are apart because a score may be the least number that there is. What sees no key has 0, and inf for the
    logarithm, so that its probabilities are 0 again.
    """
    q = tiles.rows_of(tiles.call.q, box, rows)
    total = q.new_zeros(*q.shape[:-1], 1, dtype=tiles.sums)
    mixed = q.new_zeros(*q.shape[:-1], tiles.call.v.shape[-1], dtype=tiles.sums)
    highest = total - torch.inf
    for columns in tiles.columns(rows):
        part = (*box, columns)
        scores, _ = tiles.scores(box, rows, columns)
        now = torch.maximum(highest, scores.amax(-1, keepdim=True))
        shift = torch.where(now == -torch.inf, 0, now)
        kept, highest = (highest - shift).exp_(), now
        weights = scores.sub_(shift).exp_()
        total.mul_(kept).add_(weights.sum(-1, keepdim=True))
        weights = tiles.dropped(weights, box, rows, columns)
        mixed.mul_(kept).add_(tiles.times(weights, tiles.call.v[part]))
    none = total == 0
    sums = torch.cat([torch.where(none, 0, highest), torch.where(none, torch.inf, total.log())], -1)
    return mixed / torch.where(none, 1, total), sums


def _backward_of_rows(
    tiles: _Tiles, box: _Box, rows: slice, grads: list[Tensor | None], grad: Tensor, log_sum: Tensor, inner: Tensor
) -> None:
    """Adds to ``grads`` of q, k, v and the mask, those that are wanted, what some queries give."""
    of_q, of_k, of_v, of_mask = grads
    q = tiles.rows_of(tiles.call.q, box, rows)
    for columns in tiles.columns(rows):
        part = (*box, columns)
        scores, slope = tiles.scores(box, rows, columns)
        weights = scores.sub_(log_sum[..., :1]).sub_(log_sum[..., 1:]).exp_()
        if of_v is not None:
            of_v[part] += tiles.over_rows(tiles.dropped(weights, box, rows, columns), grad)
        back = tiles.times(grad, tiles.call.v[part].transpose(-2, -1))
        back = tiles.dropped(back, box, rows, columns).sub_(inner).mul_(weights)
        if of_mask is not None:
            target = tiles.mask_of(of_mask, box, rows, columns)
            target += back.sum_to_size(target.shape)
        if slope is not None:
            back *= slope
        back *= tiles.call.scale
        if of_q is not None:
            tiles.rows_of(of_q, box, rows).add_(tiles.times(back, tiles.call.k[part]))
        if of_k is not None:
            of_k[part] += tiles.over_rows(back, q)


def _slices(start: int, stop: int, step: int) -> Iterator[slice]:
    return (slice(at, min(at + step, stop)) for at in range(start, stop, step))


# -- checks ------------------------------------------------------------------------------------------------------------
def _check(call: AttentionCall, chunk: int | None) -> None:
    name, (q, k, v, mask) = "memory.attention", call[:4]
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"{name}: expected q, k and v [batch, heads, length, dim], got {shapes}; add the dimensions")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"{name}: expected one batch size, q and k of one dim, k and v of as many heads and keys, got {shapes}"
        )
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"{name}: expected heads that are a multiple of kv heads, got {q.shape[1]} and {k.shape[1]}")
    autocast = torch.is_autocast_enabled(q.device.type)
    if not q.is_floating_point() or (not q.dtype == k.dtype == v.dtype and not autocast):
        raise TypeError(f"{name}: expected one floating-point dtype, got {q.dtype}, {k.dtype}, {v.dtype}; cast them")
    if mask is not None:
        if mask.dtype not in (torch.bool, q.dtype) and not autocast:
            raise TypeError(f"{name}: expected a mask of bool or {q.dtype} as q is, got {mask.dtype}; cast it")
        whole = (*q.shape[:3], k.shape[2])
        if mask.dim() > 4 or any(
            size not in (1, of) for size, of in zip(mask.shape[::-1], whole[::-1], strict=False)
        ):  # fmt: skip
            raise ValueError(f"{name}: expected a mask that broadcasts to {list(whole)}, got {list(mask.shape)}")
    for option, value in (("window", call.window), ("softcap", call.softcap), ("chunk", chunk)):
        if value is not None and value <= 0:
            raise ValueError(f"{name}: {option} is positive, got {value}; leave it out for none")
    if not 0 <= call.dropout < 1:
        raise ValueError(f"{name}: dropout is from 0 to below 1, got {call.dropout}")


def cast_by_autocast(call: AttentionCall) -> AttentionCall:
    """The call in the dtype of autocast, where that is on."""
    if not torch.is_autocast_enabled(call.q.device.type):
        return call
    dtype = torch.get_autocast_dtype(call.q.device.type)
    mask, key_mask = (one if one is None or one.dtype == torch.bool else one.to(dtype) for one in call[3:5])
    q, k, v = (t.to(dtype) for t in call[:3])
    return call._replace(q=q, k=k, v=v, mask=mask, key_mask=key_mask)
