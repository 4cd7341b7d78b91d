"""ZeRO stage 2 with replicated parameters: every process has all parameters, but gradients only for its shares.

Backward copies each gradient to a bucket and frees it. A full bucket is reduce-scattered while backward continues, so
at most two buckets exist at a time. Afterwards a parameter's ``grad`` is a DTensor with this process' rows.

Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 5.2.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves

from lowbit.dist_utils import scatter_flat
from lowbit.distributed.zero import as_shard, in_buckets, rows_of, rows_per_process
from lowbit.models.replicas import Replicas
from lowbit.optim.shards import local
from lowbit.tiled.lazy_logits import LazyLogits
from lowbit.torch_private import after_backward, before_backward, graph_task

__all__ = ["BUCKET_BYTES", "LEAST_BUCKETS", "ShardedGradients", "bucket_bytes"]

#: Gradients are reduced in buckets of up to this many bytes, at least one parameter each.
BUCKET_BYTES = 25 << 20
#: Smaller models have smaller buckets, so that there are about this many.
LEAST_BUCKETS = 8

#: Fills the first tensor with this process' part of the mean over processes of the second, and returns what to wait
#: for, or None.
Scatter = Callable[[Tensor, Tensor, dist.ProcessGroup], Any]


def bucket_bytes(gradients: int) -> int:
    """The default bucket size for a model with so many bytes of gradients."""
    return max(min(BUCKET_BYTES, gradients // LEAST_BUCKETS), 1)


class ShardedGradients(Replicas):
    """The model of strategy ``zero2-replicated``: calls ``module``, and shards its gradients during backward.

    A backward pass of its output reduces gradients, and adds them to the shards of earlier micro-batches. Within
    ``no_sync``, and in backward passes of ``module`` itself, gradients accumulate unsharded.

    Attributes:
        module: The model.
        process_group: The processes.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        bucket: int | None = None,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
    ) -> None:
        super().__init__()
        self.module = module
        self.process_group = mesh.get_group()
        self._reducer = _Reducer(module, mesh, bucket, find_unused_parameters)
        self._broadcasts, self._syncs = broadcast_buffers, True
        for tensor in (*module.parameters(), *module.buffers()):
            _broadcast([tensor], self.process_group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._broadcasts:
            _broadcast(self.module.buffers(), self.process_group)
        output = self.module(*args, **kwargs)
        if torch.is_grad_enabled() and self._syncs:
            self._reducer.expect(output)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context whose forwards accumulate unsharded gradients; the next backward outside reduces their sum."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def scatter_with(self, make: Callable[[], Scatter]) -> None:
        """Reduce each bucket with a function of its own that ``make`` returns."""
        self._reducer.scatter_with(make)


# -- buckets ----------------------------------------------------------------------------------------------------------
class _Slot(NamedTuple):
    """The place of a parameter's gradient in each process' row of a bucket."""

    parameter: Tensor
    begin: int
    size: int


class _Bucket:
    """Gradients that are reduced together: a matrix with one row per process."""

    def __init__(self, parameters: Sequence[Tensor], count: int) -> None:
        self.slots: dict[Tensor, _Slot] = {}
        self.length, self.count = 0, count
        for parameter in parameters:
            size = rows_per_process(parameter, count) * parameter.shape[1:].numel()
            self.slots[parameter] = _Slot(parameter, self.length, size)
            self.length += size
        self.first = parameters[0]
        self.clear()

    def clear(self) -> None:
        self.matrix: Tensor | None = None
        self.placed: set[Tensor] = set()

    @property
    def full(self) -> bool:
        return len(self.placed) == len(self.slots)

    def place(self, parameter: Tensor, gradient: Tensor) -> None:
        """Copy a gradient. A number is copied to all rows, so that every process has its mean."""
        slot = self.slots[parameter]
        target = self.rows()[:, slot.begin : slot.begin + slot.size]
        self.placed.add(parameter)
        if not parameter.dim():
            target.copy_(gradient.expand_as(target))
        elif slot.size:
            whole, rest = divmod(gradient.numel(), slot.size)
            flat = gradient.reshape(-1)
            target[:whole].copy_(flat[: whole * slot.size].view(whole, slot.size))
            if rest:
                target[whole, :rest].copy_(flat[whole * slot.size :])

    def rows(self) -> Tensor:
        """The matrix; zero for parameters without a gradient, and for the missing rows of the last process."""
        if self.matrix is None:
            self.matrix = self.first.new_zeros(self.count, self.length, requires_grad=False)
        return self.matrix


class _Flight(NamedTuple):
    """A bucket that is being reduced."""

    bucket: _Bucket
    output: Tensor
    work: Any


# -- a backward pass --------------------------------------------------------------------------------------------------
class _Reducer:
    """Reduces the gradients of a module. Its hooks refer to it weakly, so that no parameter keeps it alive.

    All processes reduce the same buckets in the same order, also if gradients arrive in another one. The first pass
    uses the reverse order of registration. Later passes use the order in which gradients arrived in the first pass of
    the first process.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, bucket: int | None, finds_unused: bool) -> None:
        self._names: dict[Tensor, str] = {p: name for name, p in module.named_parameters() if p.requires_grad}
        self._mesh, self._group, self._finds_unused = mesh, mesh.get_group(), finds_unused
        self.parameters = list(self._names)
        self._size = bucket or bucket_bytes(sum(p.nbytes for p in self._names))
        self._make: Callable[[], Scatter] | None = None
        self._ordered, self._passing = False, False
        self._arrange(list(reversed(self._names)))
        weak = weakref.ref(self)
        self._nodes = [get_gradient_edge(p).node for p in self._names]  # a node ends with its last reference
        for index, (parameter, node) in enumerate(zip(self._names, self._nodes, strict=True)):
            node.register_prehook(partial(_before, weak, index))
            parameter.register_post_accumulate_grad_hook(partial(_after, weak))

    def _arrange(self, parameters: list[Tensor]) -> None:
        self._buckets = [_Bucket(bucket, self._mesh.size()) for bucket in in_buckets(parameters, self._size)]
        self._of = {p: bucket for bucket in self._buckets for p in bucket.slots}
        self._scatters: list[Scatter] = [self._make() if self._make else _mean for _ in self._buckets]
        self._reset()

    def _reset(self) -> None:
        self._passing, self._expects, self._next = False, False, 0
        self._order: list[Tensor] = []
        self._held: dict[Tensor, DTensor] = {}
        self._flight: _Flight | None = None
        for bucket in self._buckets:
            bucket.clear()

    def scatter_with(self, make: Callable[[], Scatter]) -> None:
        """Reduce each bucket with a function of its own."""
        self._make = make
        self._arrange([p for bucket in self._buckets for p in bucket.slots])

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def expect(self, output: Any) -> None:
        """Reduce gradients in the backward pass of ``output``."""
        if self._passing and graph_task() == -1:  # the last backward pass raised
            if self._flight is not None and self._flight.work is not None:
                self._flight.work.wait()
            self._reset()
        tensors = [tensor for tensor in _tensors(output) if tensor.grad_fn is not None]
        begin = partial(_begin, weakref.ref(self))
        for tensor in tensors:
            if isinstance(tensor, LazyLogits):  # a hook would compute them
                tensor.before_backward(begin)
            else:
                before_backward(tensor, begin)
        self._expects = not tensors  # the output has tensors where they are not found

    def begin(self) -> None:
        """A backward pass of an output begins."""
        if not self._passing:
            self._passing = True
            after_backward(partial(_finish, weakref.ref(self)))

    def before(self, parameter: Tensor) -> None:
        """A gradient is about to be added to ``parameter.grad``."""
        if self._expects:
            self.begin()
        if not isinstance(parameter.grad, DTensor):
            return
        if not self._passing:
            raise RuntimeError(
                f"zero2-replicated: the gradient of {self._names[parameter]} is sharded already, and this backward "
                f"pass does not reduce gradients; use no_sync for all micro-batches but the last, or for none, and "
                f"call optimizer.zero_grad() before a backward pass of the inner module"
            )
        self._held[parameter], parameter.grad = parameter.grad, None

    @torch.no_grad()
    def after(self, parameter: Tensor) -> None:
        """The gradient of a parameter has been added."""
        if not self._passing:
            return
        bucket = self._of[parameter]
        if parameter in bucket.placed:
            raise RuntimeError(
                f"zero2-replicated: {self._names[parameter]} got a second gradient in one backward pass; use "
                f"use_reentrant=False for checkpoints of layers that share a weight"
            )
        self._order.append(parameter)
        self._place(parameter)
        while self._next < len(self._buckets) and self._buckets[self._next].full:
            self._launch()

    def _place(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse or gradient.dtype != parameter.dtype:
            self._reset()
            raise ValueError(
                f"zero2-replicated: expected a dense gradient of {self._names[parameter]} in {parameter.dtype}, got "
                f"{'a sparse one' if gradient.is_sparse else gradient.dtype}; use nn.Embedding(sparse=False), and "
                f"lowbit.train.mixed_ without fp32_gradients, or strategy='zero3'"
            )
        self._of[parameter].place(parameter, gradient)
        parameter.grad = None

    @torch.no_grad()
    def finish(self) -> None:
        """The backward pass ends: reduce the rest."""
        if not self._order:  # of torch.autograd.grad
            self._passing = False
            return
        missing: list[Tensor] = []
        for parameter in (p for p in self._names if p not in self._of[p].placed):
            if parameter.grad is not None and not isinstance(parameter.grad, DTensor):
                self._place(parameter)  # of earlier micro-batches in no_sync
            elif parameter.requires_grad:
                missing.append(parameter)
        new = {p for p in missing if p.grad is None}
        while self._next < len(self._buckets):
            self._launch()
        self._land()
        if self._finds_unused:
            self._drop_unused(new)
        order = [*self._order, *(p for p in self._names if p not in set(self._order))]
        self._reset()
        if missing and not self._finds_unused:
            names = ", ".join([self._names[p] for p in missing][:3])
            raise ValueError(
                f"zero2-replicated: {len(missing)} parameters got no gradient in this process ({names}); call "
                f"requires_grad_(False) on unused parameters before shard_, or pass find_unused_parameters=True"
            )
        if not self._ordered:
            self._rearrange(order)

    def _launch(self) -> None:
        """Begin to reduce the next bucket, after the last one."""
        self._land()
        bucket, scatter = self._buckets[self._next], self._scatters[self._next]
        rows = bucket.rows()
        output = rows.new_empty(bucket.length)
        self._flight = _Flight(bucket, output, scatter(output, rows, self._group) if bucket.length else None)
        self._next += 1

    def _land(self) -> None:
        """Wait for the bucket that is being reduced, and add it to the shards."""
        if self._flight is None:
            return
        bucket, output, work = self._flight
        if work is not None:
            work.wait()
        self._flight, bucket.matrix = None, None
        for parameter, begin, size in bucket.slots.values():
            if parameter.requires_grad:
                self._add(parameter, output[begin : begin + size])

    def _add(self, parameter: Tensor, flat: Tensor) -> None:
        held = self._held.pop(parameter, parameter.grad)
        mean: Any
        if parameter.dim():
            rows = rows_of(parameter, self._mesh)
            mean = as_shard(flat[: rows.numel()].view(rows.shape), parameter.shape, self._mesh)
        else:
            mean = DTensor.from_local(flat.view(()), self._mesh, [Replicate()], run_check=False)
        if held is not None:
            local(held).add_(local(mean))
        parameter.grad = mean if held is None else held

    def _drop_unused(self, new: set[Tensor]) -> None:
        """Drop zero gradients of parameters that are ``new``, without a gradient before or now, in all processes."""
        unused = torch.tensor([p in new for p in self._names], dtype=torch.int32, device=self._device)
        dist.all_reduce(unused, dist.ReduceOp.MIN, group=self._group)
        for parameter, everywhere in zip(self._names, unused.tolist(), strict=True):
            if everywhere:
                parameter.grad = None

    @property
    def _device(self) -> torch.device:
        return next(iter(self._names)).device

    def _rearrange(self, order: list[Tensor]) -> None:
        index: dict[Tensor, int] = {p: number for number, p in enumerate(self.parameters)}
        numbers = torch.tensor([index[p] for p in order], device=self._device)
        dist.broadcast(numbers, dist.get_global_rank(self._group, 0), group=self._group)
        self._ordered = True
        self._arrange([self.parameters[number] for number in numbers.tolist()])


# -- hooks ------------------------------------------------------------------------------------------------------------
def _begin(weak: weakref.ref[_Reducer], gradients: Any) -> None:
    reducer = weak()
    if reducer is not None:
        reducer.begin()


def _before(weak: weakref.ref[_Reducer], index: int, gradients: Any) -> None:
    reducer = weak()
    if reducer is not None:
        reducer.before(reducer.parameters[index])


def _after(weak: weakref.ref[_Reducer], parameter: Tensor) -> None:
    reducer = weak()
    if reducer is not None:
        reducer.after(parameter)


def _finish(weak: weakref.ref[_Reducer]) -> None:
    reducer = weak()
    if reducer is not None:
        reducer.finish()


# -- communication ----------------------------------------------------------------------------------------------------
def _mean(output: Tensor, rows: Tensor, group: dist.ProcessGroup) -> Any:
    """Begin to reduce-scatter the mean, and return the work to wait for. Products and sums are those of DDP."""
    rows.mul_(1 / dist.get_world_size(group))
    return scatter_flat(output, rows.view(-1), group)


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()
def _broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Copy these tensors from the first process to the others."""
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in alike.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        dist.broadcast(flat, dist.get_global_rank(group, 0), group=group)
        for tensor, part in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors of a model's output: in containers, and in fields of dataclasses."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([getattr(leaf, field.name, None) for field in fields(leaf)])
