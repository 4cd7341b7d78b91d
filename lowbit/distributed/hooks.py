"""Gradients in few bits on the wire, and sums that do not depend on how many processes share a batch.

Each process sends every other one its part of the gradient, which adds up what it gets in fp32, in the order of the
processes, and sends the mean to all. So all have the same bits, whatever algorithm the backend would have used.

Source: Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", arXiv 1511.04561; error feedback: Seide et
al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al., arXiv 1901.09847.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowbit.dist_utils import gather_flat
from lowbit.functional import quantize
from lowbit.ops.spec import as_rows
from lowbit.scaling import Scheme, scheme_8bit
from lowbit.storage.targets import side_stream
from lowbit.tensor.quantized import Quantized

__all__ = ["compress_gradients_", "order_gradients_"]

#: Numbers of a row.
_WIDTH = 256


def compress_gradients_(model: nn.Module, bits: str | Scheme = "int8", error_feedback: bool = False) -> nn.Module:
    """Have ``model``, made by ``shard_``, DistributedDataParallel or ``fully_shard``, send gradients in few bits.

    ``bits``: ``"int8"``, ``"fp8"`` (E4M3), or a scheme whose scales lie within a row. Gradients are quantized in rows
    of 256 numbers, once before they are summed and, where all processes need the mean (DistributedDataParallel), once
    more; sums are in fp32. A block with Inf or NaN arrives as NaN, so that loss scaling sees it.

    ``error_feedback``: what a quantization loses is added to the next gradient. It takes as much memory in each process
    as the gradients that it sends, and starts at zero after a resume. With ``fully_shard`` that is those of all blocks.

    Of ``hsdp`` the sums within groups are compressed, those over groups are not. Accumulate in ``no_sync`` (or
    ``set_requires_gradient_sync(False)``), so that a step sends once.

    Returns ``model``. Raises ValueError for a model that is not sharded, and a scheme with scales over several rows.
    """
    kind = scheme_8bit(bits)
    if kind.block[0] != 1 or kind.global_scale is not None:
        raise ValueError(
            f"distributed.compress_gradients_: expected a scheme whose scales lie within a row, got {kind}; use "
            f"'int8', 'fp8', or a scheme such as 'int8:group64' or 'mxfp8'"
        )
    return _attach(model, _Rows(kind), error_feedback, "compress_gradients_")


def order_gradients_(model: nn.Module) -> nn.Module:
    """Have ``model`` sum gradients in fp32 in the order of the processes, without compression.

    A step on 1, 2 or 4 processes then has the same bits as one process that takes as many micro-batches in turn, each
    with its share of the loss: what floating-point sums otherwise do not give beyond two processes. That does not hold
    for ``hsdp``, which sums within groups first. Sends as much as the sums of a backend, in fp32. ``model``, what is
    returned and what is raised: as ``compress_gradients_``.
    """
    return _attach(model, _Rows(None), False, "order_gradients_")


def _attach(model: nn.Module, rows: _Rows, error_feedback: bool, caller: str) -> nn.Module:
    if isinstance(model, nn.parallel.DistributedDataParallel):
        state = _Buckets(rows, model.process_group, error_feedback)
        model.register_comm_hook(state, lambda state, bucket: state.mean(bucket))  # type: ignore[no-untyped-call]
        return model
    from torch.distributed.fsdp import FSDPModule  # takes seconds

    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        raise ValueError(
            f"distributed.{caller}: expected a model of DistributedDataParallel or fully_shard, got "
            f"{type(model).__name__}; call lowbit.distributed.shard_ first"
        )
    for module in sharded:
        module.set_custom_reduce_scatter(_Scatter(rows, error_feedback))  # type: ignore[arg-type]  # no subclass
    return model


# -- on the wire ------------------------------------------------------------------------------------------------------
class _Rows:
    """Rows of ``_WIDTH`` numbers as bytes: codes and scales of a scheme, or fp32."""

    def __init__(self, kind: Scheme | None) -> None:
        self.kind = kind

    def encode(self, rows: Tensor) -> Tensor:
        """uint8 [rows, bytes] of numbers [rows, _WIDTH]."""
        if self.kind is None:
            return rows.float().contiguous().view(torch.uint8)
        parts = quantize(rows, self.kind).parts.values()
        return torch.cat([part.contiguous().view(torch.uint8).reshape(len(rows), -1) for part in parts], 1)

    def decode(self, raw: Tensor) -> Tensor:
        """The numbers in fp32."""
        if self.kind is None:
            return raw.contiguous().view(torch.float32)
        like = quantize(raw.new_zeros(1, _WIDTH, dtype=torch.float32), self.kind)
        sizes = [part.nbytes for part in like.parts.values()]
        cut = zip(like.parts.items(), raw.split(sizes, 1), strict=True)
        parts = {name: bytes_.contiguous().view(part.dtype) for (name, part), bytes_ in cut}
        found = Quantized(
            parts["codes"], parts["scale"], parts.get("zero_point"), None, self.kind,
            torch.Size((len(raw), _WIDTH)), torch.float32,
        )  # fmt: skip
        return found.dequantize()


class _Sum:
    """The sum over processes of flat tensors that come again in each step, with what quantization has lost of them."""

    def __init__(self, rows: _Rows, error_feedback: bool) -> None:
        self.rows, self._feeds_back = rows, error_feedback
        self._lost: dict[str, Tensor] = {}

    def scattered(self, x: Tensor, group: Any, average: bool) -> Tensor:
        """fp32: this process' part of the sum, of as many equal parts of ``x`` as there are processes."""
        count = dist.get_world_size(group)
        parts = _in_rows(x.view(count, -1))
        sent = self._sent("gradients", parts).view(count, -1)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=group)
        pieces = (self.rows.decode(piece.view(parts.shape[1], -1)) for piece in got)
        total = next(pieces)
        for piece in pieces:
            total += piece
        total = total / count if average else total
        return total.view(-1)[: x.numel() // count]

    def everywhere(self, mean: Tensor, group: Any) -> Tensor:
        """fp32 [processes, elements]: the parts of all processes."""
        rows = _in_rows(mean.view(1, -1))
        count = dist.get_world_size(group)
        got = gather_flat(self._sent("means", rows).view(-1), group).view(count * rows.shape[1], -1)
        return self.rows.decode(got).view(count, -1)[:, : len(mean)]

    def _sent(self, what: str, rows: Tensor) -> Tensor:
        """The bytes of rows [parts, rows, _WIDTH] with what was lost of the last ones."""
        lost = self._lost.get(what)
        if lost is not None and lost.shape == rows.shape:
            rows = rows.float() + lost
        flat = as_rows(rows)
        raw = self.rows.encode(flat)
        if self._feeds_back:
            error = flat.float() - self.rows.decode(raw)
            self._lost[what] = error.nan_to_num_(0.0, 0.0, 0.0).view(rows.shape)  # after Inf and NaN, from zero
        return raw


def _in_rows(parts: Tensor) -> Tensor:
    """[parts, rows, _WIDTH] of [parts, elements], with zeros at the end of each."""
    missing = -parts.shape[1] % _WIDTH
    return nn.functional.pad(parts, (0, missing)).view(len(parts), -1, _WIDTH)


# -- DistributedDataParallel -------------------------------------------------------------------------------------------
class _Buckets:
    """The state of the hook."""

    def __init__(self, rows: _Rows, group: Any, error_feedback: bool) -> None:
        self.rows, self.group, self.error_feedback = rows, group, error_feedback
        self._sums: dict[int, tuple[list[int], _Sum]] = {}

    def mean(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """The mean over processes of a bucket of gradients."""
        x = bucket.buffer()
        order, known = [id(parameter) for parameter in bucket.parameters()], self._sums.get(bucket.index())
        if known is None or known[0] != order:  # after the first backward buckets are made anew, in another order
            known = self._sums[bucket.index()] = order, _Sum(self.rows, self.error_feedback)
        summed = known[1]
        found: torch.futures.Future[Tensor] = torch.futures.Future(devices=[x.device] if x.is_cuda else None)
        with _beside(x), torch.no_grad():
            count = dist.get_world_size(self.group)
            padded = nn.functional.pad(x, (0, -len(x) % count))
            mean = summed.scattered(padded, self.group, average=True)
            found.set_result(x.copy_(summed.everywhere(mean, self.group).reshape(-1)[: len(x)]))
        return found


@contextmanager
def _beside(x: Tensor) -> Iterator[None]:
    """On a GPU, work on a stream of its own, while backward goes on."""
    if not x.is_cuda:
        yield
        return
    stream = side_stream(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        yield
    x.record_stream(stream)


# -- fully_shard ------------------------------------------------------------------------------------------------------
class _Scatter:
    """What ``set_custom_reduce_scatter`` takes, see torch.distributed.fsdp: one of each module."""

    def __init__(self, rows: _Rows, error_feedback: bool) -> None:
        self.sum = _Sum(rows, error_feedback)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer of the gradients."""
        return torch.empty(*size, dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Fill ``output_tensor`` with this process' part of the sum or the mean."""
        average = op == dist.ReduceOp.AVG
        if not average and op != dist.ReduceOp.SUM:
            raise ValueError(
                f"the reduction of gradients: expected a sum or a mean, and fully_shard asks for {op}; leave "
                f"set_gradient_divide_factor out"
            )
        output_tensor.copy_(self.sum.scattered(input_tensor, group, average))
