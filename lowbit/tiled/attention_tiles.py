"""Attention whose memory grows linearly with sequence length, also of documents that share a row.

Sources: Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory", arXiv 2112.05682; Dao et al., "FlashAttention",
arXiv 2205.14135.
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

from lowbit.autograd import uncompiled
from lowbit.tables import aligned
from lowbit.tiled.documents import Documents, documents_of
from lowbit.tiled.products import TILE, product, slices, sum_dtype
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

#: Queries and keys of a tile, if there are as many. Smaller matmuls cost more than their arithmetic.
_SIDE = 512

#: By default a tile has at most ``_SHARE`` times the elements of the largest input, so that memory is linear for short
#: sequences too. Up to ``_LEAST`` elements are always allowed.
_SHARE, _LEAST = 4, 1 << 16


class AttentionCall(NamedTuple):
    """The arguments of ``attention``, and two that only callers in this package use.

    Attributes:
        key_mask: A second mask, ``[batch, keys]``, bool or in the dtype of ``q``, without gradient.
        hides: Whether True in bool masks hides a key; otherwise True means that it takes part.
        documents: Positions that attend only to each other; None: all do.
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
    documents: Documents | None = None

    @property
    def grouped(self) -> bool:
        return self.q.shape[1] != self.k.shape[1]

    @property
    def tile(self) -> int:
        """Scores per tile by default."""
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
    documents: Tensor | None = None,
) -> Tensor:
    """``softmax(scale * q k^T + mask) v`` without allocating all scores.

    torch's SDPA computes the call if one of its linear-memory kernels supports it (see ``attention_backends``), with
    ``documents`` one document at a time. Otherwise it is computed in tiles, with sums in fp32 or better. Forward then
    saves the output and each row's log-sum-exp, and backward computes the scores again. Tiles that ``causal``,
    ``window`` or ``documents`` hides are skipped.

    Args:
        q: ``[batch, heads, queries, dim]``, floating point. ``heads`` is a multiple of ``kv heads``; adjacent heads
            share a kv head.
        k: ``[batch, kv heads, keys, dim]``, in the dtype of ``q``.
        v: ``[batch, kv heads, keys, value dim]``, in the dtype of ``q``.
        mask: Broadcasts to ``[batch, heads, queries, keys]``. Bool (True takes part), or in the dtype of ``q``, which
            is added to the scores and may require gradients.
        causal: Query i attends to keys 0 to i. As in torch's SDPA, this is aligned at the first key even if there are
            more keys than queries.
        window: Attend only to keys at a distance below ``window``: on both sides, or with ``causal`` the last
            ``window`` keys up to i.
        scale: Factor of the scores; ``dim ** -0.5`` by default.
        softcap: If given, scores become ``softcap * tanh(score / softcap)`` before the mask.
        dropout: Probability of zeroing an attention weight, also in evaluation.
        chunk: Compute in tiles of this many scores. By default a tile has at most 2^22 scores, and at most four times
            the elements of the largest input.
        documents: Integers ``[batch, length]``, or ``[length]`` for every batch, of as many queries as keys. Positions
            of one run of equal integers attend only to each other. Values are read, so ``torch.compile`` breaks its
            graph here.

    Returns:
        ``[batch, heads, queries, value dim]`` in the dtype of the inputs. A query that attends to no key gives zeros.

    Raises:
        ValueError: Shapes do not match or an option is out of range.
        TypeError: A dtype is not supported.
        RuntimeError: Second-order gradients of tiles or of documents are requested, or dropout in tiles inside
            torch.compile.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    call = AttentionCall(q, k, v, mask, None, causal, window, scale, softcap, dropout)
    return attend(call, chunk) if documents is None else _of_ids(call, documents, chunk)  # type: ignore[no-any-return]


@uncompiled
def _of_ids(call: AttentionCall, ids: Tensor, chunk: int | None) -> Tensor:
    return attend(_with_documents(call, ids), chunk)


def attend(call: AttentionCall, chunk: int | None = None) -> Tensor:
    """Like ``attention``, for any ``AttentionCall``."""
    _check(call, chunk)
    call, device = _simplified(cast_by_autocast(call)), call.q.device.type
    if chunk is None and _backends(call).chosen != _TILES:
        if call.documents is not None:
            return _each_document(call, call.documents)
        mask = call.mask if call.key_mask is None else call.key_mask[:, None, None, :]
        return F.scaled_dot_product_attention(
            call.q, call.k, call.v, mask, call.dropout, call.causal, scale=call.scale, enable_gqa=call.grouped
        )
    if call.dropout and torch.compiler.is_compiling():
        raise RuntimeError(
            "memory.attention: dropout in tiles does not compile; leave dropout out, or wrap the call in "
            "torch.compiler.disable"
        )
    # Fake tensors need no random bits, and int() of a fake tensor raises.
    seed = int(torch.randint(1 << 62, ())) if call.dropout and not is_fake(call.q) else 0
    with torch.autocast(device, enabled=False):
        return _Attention.apply(*call, seed, call.tile if chunk is None else chunk)  # type: ignore[no-any-return,no-untyped-call]


# -- backends ----------------------------------------------------------------------------------------------------------
_TILES = "tiles"


@dataclass(frozen=True)
class AttentionBackends:
    """The backends for a call of ``attention``. Prints as a table.

    Attributes:
        reasons: For each backend, in order of preference, why it does not support the call; None if it does.
        chosen: The first backend that supports it.
    """

    reasons: dict[str, str | None]

    @property
    def chosen(self) -> str:
        return next(name for name, reason in self.reasons.items() if reason is None)

    def __str__(self) -> str:
        return aligned([(name, "supported" if reason is None else reason) for name, reason in self.reasons.items()])


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
    documents: Tensor | None = None,
) -> AttentionBackends:
    """Return the linear-memory backends for a call of ``attention``, and why others do not support it.

    Backends are torch's SDPA kernels for the device (``flash`` on a CPU; ``cudnn``, ``flash`` and ``efficient`` on
    CUDA) and ``tiles``, which supports every call. The arguments are those of ``attention`` without ``chunk``.

    Returns:
        The reasons by backend, and the chosen one.

    Raises:
        ValueError: Shapes do not match or an option is out of range.
        TypeError: A dtype is not supported.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    call = AttentionCall(q, k, v, mask, None, causal, window, scale, softcap, dropout)
    _check(call, None)
    if documents is not None:
        call = _with_documents(call, documents)
    return _backends(_simplified(call))


def _backends(call: AttentionCall) -> AttentionBackends:
    kernels = _KERNELS.get(call.q.device.type, {})
    common = next((why for why, holds in _NOT_OF_SDPA if holds(call)), None)
    reasons = {name: common or refuses(call) for name, refuses in kernels.items()}
    return AttentionBackends({**reasons, _TILES: None})


def _masked(call: AttentionCall) -> bool:
    return call.mask is not None or call.key_mask is not None


def _simplified(call: AttentionCall) -> AttentionCall:
    """Return the call without documents that are whole rows, and without a window that none of them exceeds."""
    documents = call.documents
    if documents is None:
        return call
    window = None if call.window is not None and call.window >= documents.longest else call.window
    return call._replace(window=window, documents=None if documents.is_whole else documents)


#: Calls that no SDPA kernel supports.
_NOT_OF_SDPA: tuple[tuple[str, Callable[[AttentionCall], bool]], ...] = (
    ("has no window", lambda call: call.window is not None),
    ("has no softcap", lambda call: call.softcap is not None),
    ("takes a mask or causal, not both", lambda call: call.causal and _masked(call)),
    ("takes one mask", lambda call: call.mask is not None and call.key_mask is not None),
    ("takes masks whose True takes part", lambda call: call.hides),
    ("takes a mask or documents, not both", lambda call: call.documents is not None and _masked(call)),
)
#: Calls that the flash kernel for CPUs does not support. Source: ATen/native/transformers/sdp_utils_cpp.cpp.
_NOT_OF_CPU_FLASH: tuple[tuple[str, Callable[[AttentionCall], bool]], ...] = (
    ("has no dropout", lambda call: call.dropout > 0),
    ("needs values and keys of one dim", lambda call: call.v.shape[-1] != call.k.shape[-1]),
    ("takes no empty sequences", lambda call: not call.q.shape[2] or not call.k.shape[2]),
    ("needs a contiguous last dimension", lambda call: any(t.stride(-1) != 1 for t in (call.q, call.k, call.v))),
    ("has no gradient of the mask", lambda call: call.mask is not None and call.mask.requires_grad),
    ("takes a mask of 2 or 4 dimensions", lambda call: call.mask is not None and call.mask.dim() not in (2, 4)),
    ("is switched off by sdpa_kernel", lambda call: not (torch.compiler.is_compiling() or cuda.flash_sdp_enabled())),
)


def _cpu_flash_refuses(call: AttentionCall) -> str | None:
    return next((why for why, holds in _NOT_OF_CPU_FLASH if holds(call)), None)


def _cuda_refuses(can_use: Callable[[Any, bool], bool]) -> Callable[[AttentionCall], str | None]:
    def refuses(call: AttentionCall) -> str | None:
        if torch.compiler.is_compiling():
            return None  # compiled code cannot ask; SDPA itself chooses
        params = cuda.SDPAParams(call.q, call.k, call.v, call.mask, call.dropout, call.causal, call.grouped)
        if can_use(params, False):
            return None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            can_use(params, True)
        return str(caught[-1].message).split(" (Triggered")[0] if caught else "torch does not say why not"

    return refuses


_KERNELS: dict[str, dict[str, Callable[[AttentionCall], str | None]]] = {
    "cpu": {"flash": _cpu_flash_refuses},
    "cuda": {
        "cudnn": _cuda_refuses(cuda.can_use_cudnn_attention),
        "flash": _cuda_refuses(cuda.can_use_flash_attention),
        "efficient": _cuda_refuses(cuda.can_use_efficient_attention),
    },
}


# -- one document at a time --------------------------------------------------------------------------------------------
def _each_document(call: AttentionCall, documents: Documents) -> Tensor:
    """SDPA of each document."""
    if call.q.device.type == "cpu":
        return _Flash.apply(*call[:3], documents, call.causal, call.scale)  # type: ignore[no-any-return,no-untyped-call]
    return _joined_documents(call, documents)


def _joined_documents(call: AttentionCall, documents: Documents) -> Tensor:
    """SDPA of each document, and their outputs joined, on any device."""
    outs = [
        F.scaled_dot_product_attention(
            q, k, v, None, call.dropout, call.causal, scale=call.scale, enable_gqa=call.grouped
        ).transpose(1, 2)
        for q, k, v in documents.split(*call[:3])
    ]
    if len(documents.bounds) == 1:
        return torch.cat(outs, 1).transpose(1, 2)
    return torch.cat([out[0] for out in outs]).view(len(documents.bounds), -1, *outs[0].shape[2:]).transpose(1, 2)


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _like(t: Tensor) -> Tensor:
    """Return an empty tensor of the same shape, with heads after positions in memory."""
    return torch.empty_like(t.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


class _Flash(torch.autograd.Function):
    """SDPA's kernel for CPUs, for each document. Arguments are q, k, v, documents, causal and scale.

    Outputs and gradients have the strides that SDPA gives them: heads after positions.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Documents, causal: bool, scale: float) -> Tensor:
        out = _like(q)
        batch, heads, length, _ = q.shape
        log_sum = q.new_empty(batch, length, heads, dtype=sum_dtype(q.dtype)).transpose(1, 2)
        for *inputs, part, part_sum in documents.split(q, k, v, out, log_sum):
            found = _flash(*inputs, 0.0, causal, scale=scale)
            part.copy_(found[0])
            part_sum.copy_(found[1])
        ctx.save_for_backward(q, k, v, out, log_sum)
        ctx.documents, ctx.causal, ctx.scale = documents, causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_order()
        saved = ctx.saved_tensors
        grads = [_like(t) for t in saved[:3]]
        for parts in ctx.documents.split(grad, *saved, *grads):
            found = _flash_backward(*parts[:-3], 0.0, ctx.causal, scale=ctx.scale)
            for whole, part in zip(parts[-3:], found, strict=True):
                whole.copy_(part)
        return (*grads, None, None, None)


# -- in tiles ----------------------------------------------------------------------------------------------------------
class _Attention(torch.autograd.Function):
    """Arguments are those of ``AttentionCall``, then seed and chunk."""

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
        # Compiled code does not know that a tensor came to require gradients by an in-place write.
        needs = [*(need or ctx.compiled for need in ctx.needs_input_grad[:3]), ctx.needs_input_grad[3]]
        inputs = inputs[:4]  # a key_mask has no gradient
        wanted = [t is not None and need for t, need in zip(inputs, needs, strict=True)]
        grads = [torch.zeros_like(t, dtype=tiles.sums) if use else None for t, use in zip(inputs, wanted, strict=True)]
        # The softmax's gradient subtracts the sum of probabilities times their gradients, which is out * grad.
        inner = (out * grad.to(tiles.sums)).sum(-1, keepdim=True)
        for box, rows in tiles.outer():
            parts = (tiles.rows_of(t, box, rows) for t in (grad, log_sum, inner))
            _backward_of_rows(tiles, box, rows, grads, *parts)
        cast = (None if g is None else g.to(t.dtype) for g, t in zip(grads, inputs, strict=True))
        return (*cast, None, *(None for _ in ctx.rest))


def refuse_second_order() -> None:
    """Raise RuntimeError in a backward pass with ``create_graph=True``."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "memory.attention in tiles or of documents has no gradients of gradients, and backward was called with "
            "create_graph=True; use softmax(q @ k.transpose(-2, -1)) @ v for them"
        )


#: Slices of batches and of kv heads.
_Box = tuple[slice, slice]


class _Tiles:
    """The tiles of a call's scores. A tile is a box (some batches and kv heads), some queries and some keys.

    Query tensors ``[batch, heads, queries, n]`` are viewed as ``[batch, kv heads, group, queries, n]``.
    """

    def __init__(self, call: AttentionCall, seed: int, chunk: int) -> None:
        self.call, self.seed, self.chunk = call, seed, chunk
        self.dtype, self.sums = call.q.dtype, sum_dtype(call.q.dtype)
        self.batches, heads, self.queries = call.q.shape[:3]
        self.kv_heads, self.keys = call.k.shape[1:3]
        self.group = heads // self.kv_heads
        self.side = max(1, min(_SIDE, isqrt(chunk // self.group)))

    def outer(self) -> Iterator[tuple[_Box, slice]]:
        """Yield boxes and rows of queries: as many heads together as fit, and several batches if all heads fit."""
        per_head = self.group * min(self.queries, self.side) * min(self.keys, self.side)
        heads = max(1, min(self.kv_heads, self.chunk // max(1, per_head)))
        batches = max(1, self.chunk // max(1, per_head * heads)) if heads == self.kv_heads else 1
        for batch_slice in slices(0, self.batches, batches):
            for head_slice in slices(0, self.kv_heads, heads):
                for rows in slices(0, self.queries, self.side):
                    yield (batch_slice, head_slice), rows

    def columns(self, box: _Box, rows: slice) -> Iterator[slice]:
        """Return the keys to which some query of ``rows`` attends."""
        start, stop = 0, self.keys
        if self.call.documents is not None:
            around = self.call.documents.around(box[0], rows)
            start, stop = around.start, around.stop
        if self.call.window is not None:
            start, stop = max(start, rows.start - self.call.window + 1), min(stop, rows.stop - 1 + self.call.window)
        return slices(start, min(stop, rows.stop) if self.call.causal else stop, self.side)

    def rows_of(self, t: Tensor, box: _Box, rows: slice) -> Tensor:
        """Return a view ``[batches, kv heads, group, queries, n]``."""
        place = (*box, slice(None), rows)
        return t.unflatten(1, (self.kv_heads, self.group))[place]  # type: ignore[no-any-return]

    def mask_of(self, mask: Tensor, box: _Box, rows: slice, columns: slice) -> Tensor:
        """Return the part of ``mask`` for a tile, a view that broadcasts to it."""
        full = mask[(None,) * (4 - mask.dim())]
        heads = (self.kv_heads, self.group) if full.shape[1] > 1 else (1, 1)
        parts = (*box, slice(None), rows, columns)
        grouped: Tensor = full.unflatten(1, heads)
        return grouped[tuple(part if n > 1 else slice(None) for part, n in zip(parts, grouped.shape, strict=True))]

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiply ``a`` ``[batches, kv heads, group, queries, n]`` by ``b`` ``[batches, kv heads, n, m]``."""
        return product(a.flatten(2, 3), b, self.dtype).unflatten(2, (self.group, -1))  # type: ignore[no-any-return]

    def over_rows(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiply the transpose of ``a`` by ``b``, summed over queries and groups."""
        return product(a.flatten(2, 3).transpose(-2, -1), b.flatten(2, 3), self.dtype)

    def scores(self, box: _Box, rows: slice, columns: slice) -> tuple[Tensor, Tensor | None]:
        """Return the scores of a tile, -inf for hidden keys, and the derivative of the soft cap."""
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
        apart = None if call.documents is None else call.documents.apart(box[0], rows, columns)
        if apart is not None:
            scores.masked_fill_(apart[:, None, None], -torch.inf)
        hidden = self.hidden(rows, columns)
        return (scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)), slope

    def masked(self, scores: Tensor, mask: Tensor) -> Tensor:
        if mask.dtype != torch.bool:
            return scores.add_(mask)
        return scores.masked_fill_(mask if self.call.hides else ~mask, -torch.inf)

    def hidden(self, rows: slice, columns: slice) -> Tensor | None:
        """Return the keys of a tile that causal and window hide, or None if they hide none."""
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
        """Return ``weights`` after dropout. Every call for the same tile draws the same random numbers."""
        rate = self.call.dropout
        if not rate:
            return weights
        first = ((box[0].start * self.kv_heads + box[1].start) * self.queries + rows.start) * self.keys + columns.start
        generator = None if is_fake(weights) else torch.Generator(weights.device).manual_seed(self.seed + first)
        return weights * (torch.rand(weights.shape, device=weights.device, generator=generator) >= rate) / (1 - rate)


def _attend(tiles: _Tiles, box: _Box, rows: slice) -> tuple[Tensor, Tensor]:
    """Return the output of some queries, and ``[..., 2]``: the highest score, and the log of the sum of ``exp(score -
    highest)``.

    These two are not added, because a score may be the smallest number of its dtype. A query that attends to no key has
    0 and inf, so that its weights are 0 in backward.
    """
    q = tiles.rows_of(tiles.call.q, box, rows)
    total = q.new_zeros(*q.shape[:-1], 1, dtype=tiles.sums)
    mixed = q.new_zeros(*q.shape[:-1], tiles.call.v.shape[-1], dtype=tiles.sums)
    highest = total - torch.inf
    for columns in tiles.columns(box, rows):
        part = (*box, columns)
        scores, _ = tiles.scores(box, rows, columns)
        maximum = torch.maximum(highest, scores.amax(-1, keepdim=True))
        shift = torch.where(maximum == -torch.inf, 0, maximum)
        decay, highest = (highest - shift).exp_(), maximum
        weights = scores.sub_(shift).exp_()
        total.mul_(decay).add_(weights.sum(-1, keepdim=True))
        weights = tiles.dropped(weights, box, rows, columns)
        mixed.mul_(decay).add_(tiles.times(weights, tiles.call.v[part]))
    empty = total == 0
    sums = torch.cat([torch.where(empty, 0, highest), torch.where(empty, torch.inf, total.log())], -1)
    return mixed / torch.where(empty, 1, total), sums


def _backward_of_rows(
    tiles: _Tiles, box: _Box, rows: slice, grads: list[Tensor | None], grad: Tensor, log_sum: Tensor, inner: Tensor
) -> None:
    """Add the contribution of some queries to ``grads``, the wanted gradients of q, k, v and mask."""
    q_grad, k_grad, v_grad, mask_grad = grads
    q = tiles.rows_of(tiles.call.q, box, rows)
    for columns in tiles.columns(box, rows):
        part = (*box, columns)
        scores, slope = tiles.scores(box, rows, columns)
        weights = scores.sub_(log_sum[..., :1]).sub_(log_sum[..., 1:]).exp_()
        if v_grad is not None:
            v_grad[part] += tiles.over_rows(tiles.dropped(weights, box, rows, columns), grad)
        score_grad = tiles.times(grad, tiles.call.v[part].transpose(-2, -1))
        score_grad = tiles.dropped(score_grad, box, rows, columns).sub_(inner).mul_(weights)
        if mask_grad is not None:
            target = tiles.mask_of(mask_grad, box, rows, columns)
            target += score_grad.sum_to_size(target.shape)
        if slope is not None:
            score_grad *= slope
        score_grad *= tiles.call.scale
        if q_grad is not None:
            tiles.rows_of(q_grad, box, rows).add_(tiles.times(score_grad, tiles.call.k[part]))
        if k_grad is not None:
            k_grad[part] += tiles.over_rows(score_grad, q)


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
        full = (*q.shape[:3], k.shape[2])
        if mask.dim() > 4 or any(
            size not in (1, extent) for size, extent in zip(mask.shape[::-1], full[::-1], strict=False)
        ):  # fmt: skip
            raise ValueError(f"{name}: expected a mask that broadcasts to {list(full)}, got {list(mask.shape)}")
    for option, value in (("window", call.window), ("softcap", call.softcap), ("chunk", chunk)):
        if value is not None and value <= 0:
            raise ValueError(f"{name}: {option} is positive, got {value}; leave it out for none")
    if not 0 <= call.dropout < 1:
        raise ValueError(f"{name}: dropout is from 0 to below 1, got {call.dropout}")


def _with_documents(call: AttentionCall, ids: Tensor) -> AttentionCall:
    """Return the call with the documents that ``ids`` numbers. Raise TypeError or ValueError if they do not fit."""
    name, (batch, _, queries, _), keys = "memory.attention", call.q.shape, call.k.shape[2]
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(
            f"{name}: expected documents of an integer dtype, got {ids.dtype}; number the documents of a row"
        )
    if queries != keys:
        raise ValueError(
            f"{name}: expected as many queries as keys with documents, got {queries} and {keys}; with a cache of keys "
            f"give a mask instead"
        )
    if tuple(ids.shape) not in ((queries,), (1, queries), (batch, queries)) or not queries:
        raise ValueError(
            f"{name}: expected documents [{batch}, {queries}] or [{queries}] of at least one position, got "
            f"{list(ids.shape)}; give the document of each position"
        )
    return call._replace(documents=documents_of(ids.to(call.q.device).reshape(-1, queries)))


def cast_by_autocast(call: AttentionCall) -> AttentionCall:
    """Return the call in the dtype of autocast, if that is enabled."""
    if not torch.is_autocast_enabled(call.q.device.type):
        return call
    dtype = torch.get_autocast_dtype(call.q.device.type)
    mask, key_mask = (
        tensor if tensor is None or tensor.dtype == torch.bool else tensor.to(dtype) for tensor in call[3:5]
    )
    q, k, v = (t.to(dtype) for t in call[:3])
    return call._replace(q=q, k=k, v=v, mask=mask, key_mask=key_mask)
