"""Compressed gradient reduction, and reduction in an order that does not depend on the number of processes.

Each process receives its part of the gradient from every other process, and adds in fp32 in the order of the processes.
Then it sends the mean to all. So the means are bit-identical on all processes, whatever algorithm the backend uses.

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
from lowbit.distributed.replicated import ShardedGradients
from lowbit.functional import quantize
from lowbit.ops.spec import as_rows
from lowbit.scaling import Scheme, scheme_8bit
from lowbit.storage.targets import side_stream
from lowbit.tensor.quantized import Quantized

__all__ = ["compress_gradients_", "order_gradients_"]

#: Elements per row.
_WIDTH = 256


def compress_gradients_(model: nn.Module, bits: str | Scheme = "int8", error_feedback: bool = False) -> nn.Module:
    """Make ``model`` send quantized gradients.

    Gradients are quantized in rows of 256 elements before they are summed. With DistributedDataParallel, all processes
    need the mean, which is quantized once more. Sums are in fp32. A block with Inf or NaN arrives as NaN, so that loss
    scaling sees it. With ``hsdp``, the reduction within groups is compressed, the reduction over groups is not.

    Accumulate gradients in ``no_sync`` (or with ``set_requires_gradient_sync(False)``), so that a step sends once.

    Args:
        model: A model of ``shard_``, DistributedDataParallel or ``fully_shard``.
        bits: ``"int8"``, ``"fp8"`` (E4M3), or a scheme with scales within a row.
        error_feedback: Add each quantization error to the next gradient. In each process this uses as much memory as
            the gradients that it sends; with ``fully_shard``, the gradients of all blocks. The errors start at zero
            after a resume.

    Returns:
        ``model``.

    Raises:
        ValueError: The model is not sharded, or a scale of the scheme spans several rows.
    """
    scheme = scheme_8bit(bits)
    if scheme.block[0] != 1 or scheme.global_scale is not None:
        raise ValueError(
            f"distributed.compress_gradients_: expected a scheme whose scales lie within a row, got {scheme}; use "
            f"'int8', 'fp8', or a scheme such as 'int8:group64' or 'mxfp8'"
        )
    return _attach(model, _Rows(scheme), error_feedback, "compress_gradients_")


def order_gradients_(model: nn.Module) -> nn.Module:
    """Make ``model`` sum gradients in fp32 in the order of the processes, without compression.

    A step on 1, 2 or 4 processes is then bit-identical to one process with as many micro-batches, each with its share
    of the loss. With more than two processes, a backend's own reduction does not give that. It does not hold for
    ``hsdp``, which sums within groups first. It sends as many bytes as the backend's reduction in fp32.

    Args:
        model: A model of ``shard_``, DistributedDataParallel or ``fully_shard``.

    Returns:
        ``model``.

    Raises:
        ValueError: The model is not sharded.
    """
    return _attach(model, _Rows(None), False, "order_gradients_")


def _attach(model: nn.Module, rows: _Rows, error_feedback: bool, caller: str) -> nn.Module:
    if isinstance(model, nn.parallel.DistributedDataParallel):
        state = _Buckets(rows, model.process_group, error_feedback)
        model.register_comm_hook(state, lambda state, bucket: state.mean(bucket))  # type: ignore[no-untyped-call]
        return model
    if isinstance(model, ShardedGradients):
        model.scatter_with(lambda: _Scatter(rows, error_feedback).of_rows)
        return model
    from torch.distributed.fsdp import FSDPModule  # takes seconds

    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        raise ValueError(
            f"distributed.{caller}: expected a model of shard_, DistributedDataParallel or fully_shard, got "
            f"{type(model).__name__}; call lowbit.distributed.shard_ first"
        )
    for module in sharded:
        module.set_custom_reduce_scatter(_Scatter(rows, error_feedback))  # type: ignore[arg-type]  # no subclass
    return model


# -- on the wire ------------------------------------------------------------------------------------------------------
class _Rows:
    """Conversion of rows with ``_WIDTH`` elements to bytes: codes and scales of a scheme, or fp32 for None."""

    def __init__(self, scheme: Scheme | None) -> None:
        self.scheme = scheme

    def encode(self, rows: Tensor) -> Tensor:
        """uint8 ``[rows, bytes]`` from numbers ``[rows, _WIDTH]``."""
        if self.scheme is None:
            return rows.float().contiguous().view(torch.uint8)
        parts = quantize(rows, self.scheme).parts.values()
        return torch.cat([part.contiguous().view(torch.uint8).reshape(len(rows), -1) for part in parts], 1)

    def decode(self, raw: Tensor) -> Tensor:
        """The numbers in fp32."""
        if self.scheme is None:
            return raw.contiguous().view(torch.float32)
        like = quantize(raw.new_zeros(1, _WIDTH, dtype=torch.float32), self.scheme)
        sizes = [part.nbytes for part in like.parts.values()]
        cut = zip(like.parts.items(), raw.split(sizes, 1), strict=True)
        parts = {name: bytes_.contiguous().view(part.dtype) for (name, part), bytes_ in cut}
        return Quantized(
            parts["codes"], parts["scale"], parts.get("zero_point"), None, self.scheme,
            torch.Size((len(raw), _WIDTH)), torch.float32,
        ).dequantize()  # fmt: skip


class _Sum:
    """The sum over processes of flat tensors that recur in each step, with their quantization errors."""

    def __init__(self, rows: _Rows, error_feedback: bool) -> None:
        self.rows, self._feeds_back = rows, error_feedback
        self._errors: dict[str, Tensor] = {}

    def scattered(self, x: Tensor, group: Any, average: bool) -> Tensor:
        """This process' part of the sum or mean, fp32. ``x`` has one part of equal size per process."""
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

    def _sent(self, name: str, rows: Tensor) -> Tensor:
        """The bytes of rows ``[parts, rows, _WIDTH]`` plus the last quantization errors."""
        error = self._errors.get(name)
        if error is not None and error.shape == rows.shape:
            rows = rows.float() + error
        flat = as_rows(rows)
        raw = self.rows.encode(flat)
        if self._feeds_back:
            error = flat.float() - self.rows.decode(raw)
            self._errors[name] = error.nan_to_num_(0.0, 0.0, 0.0).view(rows.shape)  # after Inf and NaN, from zero
        return raw


def _in_rows(parts: Tensor) -> Tensor:
    """``[parts, rows, _WIDTH]`` from ``[parts, elements]``, each part padded with zeros."""
    missing = -parts.shape[1] % _WIDTH
    return nn.functional.pad(parts, (0, missing)).view(len(parts), -1, _WIDTH)


# -- DistributedDataParallel -------------------------------------------------------------------------------------------
class _Buckets:
    """State of the communication hook: one sum per bucket."""

    def __init__(self, rows: _Rows, group: Any, error_feedback: bool) -> None:
        self.rows, self.group, self.error_feedback = rows, group, error_feedback
        self._sums: dict[int, tuple[list[int], _Sum]] = {}

    def mean(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """The mean over processes of a bucket of gradients."""
        x = bucket.buffer()
        order, known = [id(parameter) for parameter in bucket.parameters()], self._sums.get(bucket.index())
        if known is None or known[0] != order:  # torch rebuilds the buckets after the first backward pass
            known = self._sums[bucket.index()] = order, _Sum(self.rows, self.error_feedback)
        summed = known[1]
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[x.device] if x.is_cuda else None)
        with _on_side_stream(x), torch.no_grad():
            count = dist.get_world_size(self.group)
            padded = nn.functional.pad(x, (0, -len(x) % count))
            mean = summed.scattered(padded, self.group, average=True)
            future.set_result(x.copy_(summed.everywhere(mean, self.group).reshape(-1)[: len(x)]))
        return future


@contextmanager
def _on_side_stream(x: Tensor) -> Iterator[None]:
    """On a GPU, run on another stream than backward."""
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
    """The argument of ``set_custom_reduce_scatter`` of torch.distributed.fsdp, one per module or bucket."""

    def __init__(self, rows: _Rows, error_feedback: bool) -> None:
        self.sum = _Sum(rows, error_feedback)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer for the gradients."""
        return torch.empty(*size, dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Fill ``output_tensor`` with this process' part of the sum or mean."""
        average = op == dist.ReduceOp.AVG
        if not average and op != dist.ReduceOp.SUM:
            raise ValueError(
                f"gradient reduction: expected a sum or a mean, but fully_shard needs {op}; do not call "
                f"set_gradient_divide_factor"
            )
        output_tensor.copy_(self.sum.scattered(input_tensor, group, average))

    def of_rows(self, output: Tensor, rows: Tensor, group: dist.ProcessGroup) -> None:
        """Fill ``output`` with this process' part of the mean of ``rows``, one per process."""
        self(output, rows.view(-1), group, dist.ReduceOp.AVG)
