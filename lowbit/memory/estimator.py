"""Estimate of the memory and time of a training step on fake tensors, before anything is allocated.

Fake tensors have shapes but no data. Every op that the real step would call is called, and the lifetime of every
storage that it would allocate is recorded.
"""

from __future__ import annotations

import logging
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lowbit.combinations import refusal
from lowbit.memory.cost import Work, rates, work
from lowbit.memory.devices import UNIT, Device, as_on_cuda, device_in, placed
from lowbit.memory.fake import Routed, fake_batch, fake_model, fake_tensors, numbers_are_one, values_needed
from lowbit.memory.fewer_blocks import Fewer, Hidden, Unlike
from lowbit.memory.fewer_tiles import FewerTiles
from lowbit.memory.footprint import Footprint, footprints
from lowbit.memory.ledger import Ledger, Op, Piece
from lowbit.memory.repeated import signature, tensors_of
from lowbit.memory.runnable import Call, call_of, sources_of
from lowbit.memory.scratch import scratch_bytes
from lowbit.memory.timing import timings
from lowbit.memory.usage import Holding, Usage, kinds_of
from lowbit.models.batches import call
from lowbit.models.check import check_model
from lowbit.models.losses import usual_loss
from lowbit.models.replicas import Replicas
from lowbit.nn.experts import QuantExperts
from lowbit.torch_private import FakeTensor, current_node, graph_task, has_foreach_kernels

__all__ = ["Estimate", "Recomputation", "Seen", "can_run", "check_trainable", "estimate_step", "scalar"]

logger = logging.getLogger(__name__)

#: Runs forward and backward of a model and a batch; the last argument is the loss of output and batch.
Accumulate = Callable[[nn.Module, Any, Callable[[Any, Any], Tensor]], object]

#: Remedy for a forward that reads tensor values.
_INSTEAD = "profile a real step with memory.profile(model, batch, step)"

#: Creates an optimizer for parameters.
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


class Estimate(Usage):
    """Memory and time of a training step, as returned by ``lb.estimate``.

    Attributes:
        device: Device of the step.
        target: The row of ``lb.plan.DEVICES`` that the estimate is for; None for a device of this machine.
        unmeasured: Ops that could not be run, with their number of calls. Scratch memory of their kernels is taken from
            a table (``lowbit.memory.scratch``), which has 0 for most ops.
    """

    def __init__(self, ledger: Ledger, seen: Seen, since: int, run: bool) -> None:
        self.target = seen.target
        self.device = ledger.device if self.target is None else torch.device("cuda")
        measured = {} if self.target else seen.footprints(ledger.device, run)
        super().__init__(*_read(ledger, seen, measured), since=since)
        self.unmeasured = {} if self.target else dict(
            Counter(
                ledger.ops[number].name for number in sorted(seen.done) if number >= since and number not in measured
                and seen.allocates(number)
            ).most_common()
        )  # fmt: skip
        self._done = [seen.done.get(number) for number in range(since, len(ledger.ops))]
        self._selective = {ledger.ops[number].layer for number in seen.selective}

    def table(self, layers: int = 12) -> str:
        """Return the table of ``Usage``, and the ops that were not measured."""
        text = super().table(layers)
        if not self.unmeasured:
            return text
        named = ", ".join(list(self.unmeasured)[:6]) + (", ..." if len(self.unmeasured) > 6 else "")
        return f"{text}\nnot measured: scratch memory of {len(self.unmeasured)} ops ({named})"

    @property
    def seconds(self) -> float:
        """Duration of the step on this machine: the sum of ``op_seconds``."""
        return sum(self.op_seconds)

    @property
    def seconds_by_phase(self) -> dict[str, float]:
        """``seconds`` by phase."""
        sums = dict[str, float]()
        for op, seconds in zip(self.ops, self.op_seconds, strict=True):
            sums[op.phase] = sums.get(op.phase, 0.0) + seconds
        return sums

    def flops_of(self, layer: str) -> int:
        """Return the most floating-point operations of one op of a layer, given by its path."""
        done = zip(self.ops, self._done, strict=True)
        return max((one[1].flops for op, one in done if one is not None and op.layer == layer), default=0)

    @cached_property
    def op_seconds(self) -> list[float]:
        """Duration of each of ``ops``, measured by running the op once per shape (``lowbit.memory.timing``).

        For a ``target`` it is a roofline. If an op cannot be run, its arithmetic and traffic are divided by the rates
        of this machine (``lowbit.memory.cost``). On the CPU, a recomputed op includes the Python time of its
        checkpoint; a GPU does not wait for that.
        """
        if self.target is not None:
            return [0.0 if done is None else self.target.seconds(done[1]) for done in self._done]
        cache = timings(self.device)

        def seconds(call: Call | None, work: Work) -> float:
            measured = None if call is None else cache.seconds(call)
            return work.seconds(rates(self.device)) if measured is None else measured

        def python_seconds(op: Op) -> float:
            recomputed = op.phase == "recomputation" and self.device.type == "cpu"
            return sum(costs.overhead(op.layer in self._selective) for costs in RECOMPUTATIONS) if recomputed else 0.0

        try:
            return [
                (0.0 if done is None else seconds(*done)) + python_seconds(op)
                for op, done in zip(self.ops, self._done, strict=True)
            ]
        finally:
            cache.save()


class Recomputation(NamedTuple):
    """Costs of checkpoints beyond the recomputed ops.

    Attributes:
        lookups: Returns the number of ops checked so far by checkpoints that save some results.
        overhead: Returns the seconds of Python time per op. The argument says whether some results are saved.
    """

    lookups: Callable[[], int]
    overhead: Callable[[bool], float]


#: Filled by ``lowbit.checkpointing``.
RECOMPUTATIONS: list[Recomputation] = []


class Seen:
    """Records each op of a step, except its storages.

    Attributes:
        target: Device that the estimate is for, if it is another one than the tensors are on.
        done: Call and work, by op number.
        table: Bytes of scratch memory by the table in ``lowbit.memory.scratch``, by op number.
        nodes: Sequence number of the autograd node that called the op, or -1, by op number.
        sums: Ops that write into their first operand when tensors are real.
        writes: Ops that do so if their autograd node has created that operand.
        selective: Ops in a checkpoint that saves some results.
    """

    def __init__(self, target: Device | None = None) -> None:
        self.target = target
        self.done: dict[int, tuple[Call | None, Work]] = {}
        self.table: dict[int, int] = {}
        self.nodes: dict[int, int] = {}
        self.sums: set[int] = set()
        self.writes: set[int] = set()
        self.selective: set[int] = set()
        self._sources: dict[int, tuple[Call, int]] = {}
        self._known: dict[Any, tuple[int, Call | None, Work]] = {}
        self._looked_at = _lookups()

    def allocates(self, number: int) -> bool:
        """Return whether an op computes anything."""
        return self.done[number][1].computes

    def footprints(self, device: torch.device, run: bool) -> dict[int, Footprint]:
        """Return the measured footprints by op number. With ``run``, measure those that are not cached."""
        calls = {number: call for number, (call, _) in self.done.items() if call is not None}
        unique = {id(call): call for call in calls.values()}  # repeated calls share an object; hashing one is slow
        measured = footprints(device).of(unique.values(), run)
        by_id = {key: measured[call] for key, call in unique.items() if call in measured}
        return {number: by_id[id(call)] for number, call in calls.items() if id(call) in by_id}

    def __call__(self, number: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        node = current_node() if graph_task() != -1 else None
        self.nodes[number] = -1 if node is None else node._sequence_nr()
        if func is torch.ops.aten.add.Tensor and _sums_in_place(args):
            self.sums.add(number)
        elif func._overloadpacket in _WRITES and node is not None and not torch.is_grad_enabled():
            self.writes.add(number)
        if _lookups() != self._looked_at:
            self.selective.add(number - 1)
            self._looked_at = _lookups()
        key = signature(func, args, kwargs)
        record = None if key is None else self._known.get(key)
        if record is None:
            call = None if self.target else call_of(func, args, kwargs, out, self._sources)
            scratch = scratch_bytes(str(func), args, out, "cuda" if self.target else None)
            record = scratch, call, work(func, args, kwargs, out)
            if key is not None and not any(tensor.dtype == torch.uint8 for tensor in tensors_of(args, kwargs, out)):
                self._known[key] = record  # uint8 tensors may be workspaces, which differ per call
            elif call is not None:
                self._sources |= sources_of(call, out)
        self.table[number], self.done[number] = record[0], record[1:]

    def reorder(self, order: Sequence[tuple[int, int]]) -> None:
        """Repeat ops: for each new number the old one, and which copy it is, 0 for the op itself."""
        for name in ("done", "table"):
            known = getattr(self, name)
            setattr(self, name, {new: known[old] for new, (old, _) in enumerate(order) if old in known})
        # Nodes are compared with each other; those of a copy differ from all others.
        self.nodes = {
            new: self.nodes[old] + (k << 40 if k and self.nodes[old] >= 0 else 0)
            for new, (old, k) in enumerate(order) if old in self.nodes
        }  # fmt: skip
        for name in ("sums", "writes", "selective"):
            known = getattr(self, name)
            setattr(self, name, {new for new, (old, _) in enumerate(order) if old in known})


def _lookups() -> int:
    return sum(costs.lookups() for costs in RECOMPUTATIONS)


def estimate_step(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any, Any], Tensor] | None = None,
    *,
    optimizer: MakeOptimizer | None = None,
    prepare: Callable[[nn.Module], object] = lambda model: None,
    micro_batches: int = 1,
    device: torch.device | str | Device | None = None,
    accumulate: Accumulate | None = None,
    measured: bool | None = None,
    absent: Hidden | None = None,
    every_block: bool = False,
) -> Estimate:
    """Return the estimate of a step on a fake copy of ``model``, which is not changed. See ``lb.estimate``.

    Args:
        model: The model.
        batch: An example batch, as the model takes it.
        loss: A function of output and batch.
        optimizer: Creates an optimizer for parameters. With None, there is no optimizer step.
        prepare: Called on the copy before it runs.
        micro_batches: Number of forward and backward passes of ``batch`` per optimizer step.
        device: By default the device of the parameters; ``cpu`` for parameters on ``meta``. Or a device of
            ``lb.plan.DEVICES``.
        accumulate: Runs forward and backward instead of ``loss(model(batch), batch).backward()``.
        measured: Whether ops may run to be measured. By default, if ``model`` has data and the device exists.
        absent: Blocks that ``model`` does not have, but the model that is to be estimated. An optimizer does not step
            their parameters.
        every_block: Whether all of alike blocks run. To look for such blocks takes longer than a step without forward.

    Raises:
        Unlike: The blocks turned out to differ, or the model fails without those in ``absent``.
        ValueError: The model has no estimate, or its forward reads tensor values.
        TypeError: ``model`` is not a module, or ``batch`` is not a batch.
    """
    on, target = placed(device)
    check_trainable(model, on)

    def attempt(every_block: bool) -> Estimate:
        ops = as_on_cuda() if target else nullcontext()
        with torch.inference_mode(False), torch.enable_grad(), fake_tensors() as fake, ops:
            fake_copy = fake_model(model, fake, on)
            where = next((p.device for p in fake_copy.parameters()), torch.device(on or "cpu"))
            fake_inputs = fake_batch(batch, fake, where)
            prepare(fake_copy)
            passes = accumulate or partial(_accumulate, rest=loss is not None)
            # Of quantized experts only those run that have tokens.
            mixture = any(isinstance(module, QuantExperts) for module in fake_copy.modules())
            with Routed(all_experts=True) if mixture else nullcontext(), _Spared() as spared:
                checked_loss = _without_data(loss or usual_loss, spared)
                return _run(
                    fake_copy, fake_inputs, checked_loss, optimizer, micro_batches, where, passes,
                    can_run(model, where) if measured is None else measured, every_block, target, absent,
                )  # fmt: skip

    try:
        return attempt(every_block)
    except _NeedsEveryBlock as needs:
        if absent is not None:
            raise Unlike(str(needs.__cause__)) from needs
        logger.debug("estimate: every block of %s runs: %s", type(model).__name__, needs.__cause__)
    return attempt(every_block=True)


# -- supported models --------------------------------------------------------------------------------------------------
def check_trainable(model: Any, device: torch.device | str | None) -> None:
    """Raise TypeError or ValueError for a model that cannot be estimated, or a device that does not exist."""
    check_model(model)
    for combination, has in WITHOUT_ESTIMATE.items():
        if has(model):
            raise ValueError(refusal(combination, "estimate"))
    if any(is_lazy(parameter) for parameter in (*model.parameters(), *model.buffers())):
        raise ValueError(
            f"estimate: {type(model).__name__} has lazy layers without shapes yet; call it once on a batch"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"estimate: no parameter of {type(model).__name__} requires a gradient, so there is nothing to train; "
            f"call requires_grad_() on the parameters to train"
        )
    try:
        kind = None if device is None else torch.device(device).type
    except RuntimeError:  # torch has no device of this name
        device_in(str(device), "estimate")
        raise
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "estimate: device='cuda' needs a torch with CUDA and a GPU; estimate for 'cpu' here, or for a GPU of "
            "lb.plan.DEVICES, such as 'rtx-4090'"
        )


def can_run(model: nn.Module, device: torch.device) -> bool:
    """Return whether ops may be run to measure them: the model's data and the device must exist."""
    exists = device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available())
    return exists and not any(parameter.is_meta for parameter in model.parameters())


def _exchanges_gradients(model: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # which takes seconds to import
    wrappers = (
        nn.parallel.DistributedDataParallel,
        Replicas,
        *(() if fsdp is None else (fsdp.FullyShardedDataParallel,)),
    )
    return any(isinstance(module, wrappers) for module in model.modules())


def _has_placements(model: nn.Module) -> bool:
    return any(hasattr(parameter, "placements") for parameter in model.parameters())


#: Tests for models that have no estimate, by the key of ``lowbit.combinations`` with the reason. Techniques add theirs.
WITHOUT_ESTIMATE: dict[str, Callable[[nn.Module], bool]] = {
    "wrapped estimate": _exchanges_gradients,
    "dtensor estimate": _has_placements,
}


# -- a step -----------------------------------------------------------------------------------------------------------
def _run(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any, Any], Tensor],
    make: MakeOptimizer | None,
    micro_batches: int,
    device: torch.device,
    accumulate: Accumulate,
    real: bool,
    every_block: bool,
    target: Device | None,
    absent: Hidden | None,
) -> Estimate:
    """Run two steps and report the second; one step if there is no optimizer, whose states the first step creates.

    Of alike blocks and tiles only some run, unless ``every_block`` is true.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    stepper = None if make is None else make(trained)
    if stepper is not None:
        _step_over_lists(stepper, torch.device("cuda") if target else device)
    seen = Seen(target)
    steps = 1 if stepper is None else 2
    if absent is not None:
        fewer: Fewer | None = Fewer(absent, 0, absent=True)
    else:
        fewer = None if every_block else Fewer.of(model, steps)

    def note(number: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        seen(number, func, args, kwargs, out)
        if fewer is not None:
            fewer.read(ledger, number, tensors_of(args, kwargs))

    with Ledger(model, device, seen=note) as ledger, ExitStack() as left_out:
        tiles = FewerTiles(ledger)
        if not every_block:
            left_out.enter_context(tiles.left_out())
        ledger.claim(batch, "inputs")
        for _ in range(steps):
            since = len(ledger.ops)
            with values_needed("estimate", f"the forward of {type(model).__name__}", _INSTEAD):
                if fewer is None:
                    for _ in range(micro_batches):
                        accumulate(model, batch, loss)
                else:
                    _accumulate_fewer(fewer, ledger, lambda: accumulate(model, batch, loss), micro_batches)
            if stepper is not None:
                with numbers_are_one():
                    stepper.step()
            for parameter in trained:
                parameter.grad = None
    try:
        since = tiles.extend(seen, since, lambda moved: None if fewer is None else fewer.renumber(moved))
        if fewer is not None:
            since = fewer.extend(ledger, seen, since)
    except Unlike as unlike:
        raise _NeedsEveryBlock from unlike
    return Estimate(ledger, seen, since, real)


class _NeedsEveryBlock(Exception):
    """The model fails with fewer blocks, or its blocks turned out to differ."""


def _accumulate_fewer(fewer: Fewer, ledger: Ledger, accumulate: Callable[[], object], micro_batches: int) -> None:
    """Run micro-batches without some blocks."""
    try:
        with fewer.left_out():
            for _ in range(micro_batches):
                accumulate()
        fewer.add_gradients(ledger)
    except Exception as error:  # the model's code may raise anything if blocks are missing
        raise _NeedsEveryBlock from error


def _step_over_lists(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Use the foreach implementation if torch would for real parameters. It has temporaries as large as the parameters.

    On CUDA it is torch's default, but not for fake tensors.
    """
    if has_foreach_kernels(device):
        for group in optimizer.param_groups:
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True


def _accumulate(model: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor], rest: bool) -> None:
    """Run one micro-batch. The output is freed before backward, as in ``run.step`` and ``model(**batch).loss``."""
    value = loss(call(model, batch, rest=rest), batch)
    value.backward()  # type: ignore[no-untyped-call]


def scalar(value: Any, who: str) -> Tensor:
    """Return ``value``, the result of a loss. Raise ValueError unless it is a tensor of one element with a gradient."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{who}: loss(output, batch) must be a tensor of one element, got {got}; take its mean")
    if not value.requires_grad:
        raise ValueError(
            f"{who}: loss(output, batch) has no gradient, so there is nothing to train; compute it from the model's "
            f"output with torch ops, without detach() or torch.no_grad()"
        )
    return value


class _Spared:
    """Restores the gradients of real parameters that a loss depends on, such as those of a discriminator."""

    def __init__(self) -> None:
        self._gradients: dict[Tensor, Tensor | None] = {}

    def __enter__(self) -> _Spared:
        return self

    def note(self, value: Tensor) -> None:
        """Find the real parameters in the graph of ``value``, and set their gradients to None."""
        nodes, visited = [value.grad_fn], set[Any]()
        while nodes:
            node = nodes.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            nodes += [below for below, _ in node.next_functions]
            leaf = getattr(node, "variable", None) if node.name() == "torch::autograd::AccumulateGrad" else None
            if leaf is not None and not isinstance(leaf, FakeTensor):
                self._gradients.setdefault(leaf, leaf.grad)
                leaf.grad = None

    def __exit__(self, *error: object) -> None:
        for leaf, gradient in self._gradients.items():
            leaf.grad = gradient


def _without_data(loss: Callable[[Any, Any], Tensor], spared: _Spared) -> Callable[[Any, Any], Tensor]:
    """Wrap a loss with checks, for outputs without data."""

    def checked(output: Any, batch: Any) -> Tensor:
        with values_needed("estimate", "the loss", "return a tensor, without item(), float() or if of numbers"):
            try:
                value = loss(output, batch)
            except TypeError as error:
                raise TypeError(
                    f"the loss failed: {error}. It is called with the model's output and the full batch; wrap a torch "
                    f"criterion as loss=lambda output, batch: criterion(output, batch[1])"
                ) from error
            spared.note(scalar(value, "estimate"))
            return value

    return checked


_aten = torch.ops.aten
#: Gradient formulas fill a new tensor in place. For tensor subclasses, as fake tensors are, they use these ops, which
#: return a copy. Source: torch/csrc/autograd/FunctionsManual.cpp, areAnyTensorSubclassLike.
_WRITES = frozenset({
    _aten.scatter, _aten.scatter_add, _aten.scatter_reduce, _aten.index_add, _aten.index_put, _aten.index_fill,
    _aten.masked_fill, _aten.masked_scatter, _aten.slice_scatter, _aten.select_scatter,
})  # fmt: skip

#: Files with frames between an op and its caller.
_BETWEEN = (
    "/lowbit/memory/ledger", "/lowbit/memory/estimator", "/torch/_compile", "/torch/_dynamo/eval_frame",
    "/torch/_subclasses/", "/torch/utils/_python_dispatch", "/torch/utils/_stats",
)  # fmt: skip


def _sums_in_place(args: tuple[Any, ...]) -> bool:
    """Return whether autograd would add a gradient to the first of ``args`` in place if the tensors were real.

    It does so if nothing else references that tensor. Source: torch/csrc/autograd/input_buffer.cpp of torch 2.13,
    ``can_accumulate_inplace``.
    """
    first, second = args[:2]
    if torch.is_grad_enabled() or not isinstance(second, Tensor) or first.shape != second.shape or first._is_view():
        return False
    frame: Any = sys._getframe(1)
    while frame is not None and any(part in frame.f_code.co_filename for part in _BETWEEN):
        frame = frame.f_back
    # Not called by Python code, but by backward or by an autograd thread.
    return frame is None or frame.f_code.co_name == "_engine_run_backward"


def _read(ledger: Ledger, seen: Seen, measured: Mapping[int, Footprint]) -> tuple[Any, list[float], list[Holding]]:
    """Return ops, their times, and the holdings of storages and of scratch memory, which lives as long as its op."""
    times = [float(number) for number in range(len(ledger.ops))]
    pieces = ledger.pieces
    sizes = _sizes(pieces, measured)
    if seen.target is not None:
        sizes = [-(-size // UNIT) * UNIT for size in sizes]
    deaths = [math.inf if piece.died is None else piece.died + 0.5 for piece in pieces]
    updates = {piece.born: piece.bytes for piece in pieces if piece.born in seen.sums or piece.born in seen.writes}
    for index, piece in enumerate(pieces):
        if piece.died in seen.writes and seen.nodes.get(piece.born) != seen.nodes[piece.died]:
            continue
        if piece.died in updates and updates[piece.died] == piece.bytes and piece.born != piece.died:
            del updates[piece.died]
            deaths[index] = piece.died - 0.25  # the sum reuses its memory
    births = [piece.born for piece in pieces]
    kinds = kinds_of(ledger.ops, births, deaths, [piece.kind for piece in pieces], times)
    rows = zip(pieces, sizes, kinds, births, deaths, strict=True)
    holdings = [Holding(size, kind, piece.layer, born, died, born) for piece, size, kind, born, died in rows]
    for number, listed in seen.table.items():
        size = measured[number].scratch if number in measured else listed
        holdings.append(Holding(size, "temporaries", ledger.ops[number].layer, number, number + 0.25, number))
    return ledger.ops, times, holdings


def _sizes(pieces: Sequence[Piece], measured: Mapping[int, Footprint]) -> list[int]:
    """Return the bytes of storages, as measured for the op's results if its fake tensors are smaller."""
    by_birth: dict[int, list[int]] = {}
    for index, piece in enumerate(pieces):
        by_birth.setdefault(piece.born, []).append(index)
    sizes = [piece.bytes for piece in pieces]
    for number, indices in by_birth.items():
        results = measured[number].results if number in measured else ()
        if len(results) == len(indices):
            for index, size in zip(indices, results, strict=True):
                sizes[index] = max(sizes[index], size)
    return sizes
