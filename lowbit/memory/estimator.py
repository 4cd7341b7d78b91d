"""An estimate of the memory of a step of training, before anything is allocated.

The step runs on fake tensors, which have shapes and no data: every op that the real step would call is called, and the
storages that it would make are written down, when they come and when they go.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lowbit.combinations import refusal
from lowbit.memory.cost import Work, rates, work
from lowbit.memory.fake import fake_batch, fake_model, fake_tensors, numbers_are_one, values_needed
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
from lowbit.torch_private import FakeTensor, current_node, graph_task, has_foreach_kernels

__all__ = ["Estimate", "Recomputation", "Seen", "can_run", "estimate_step", "scalar"]

#: Forward and backward of a model and a batch by a loss of answer and batch.
Accumulate = Callable[[nn.Module, Any, Callable[[Any, Any], Tensor]], object]

#: What to do about a forward that reads values.
_INSTEAD = "profile a real step with memory.profile(model, batch, step)"

#: Makes an optimizer of parameters.
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


class Estimate(Usage):
    """See ``estimate``.

    Attributes:
        device: Where the step runs.
        unmeasured: Ops that were not run, with how often they are called in the step. What their kernels allocate
            beside results is taken from a table, in which most ops have nothing.
    """

    def __init__(self, ledger: Ledger, seen: Seen, since: int, run: bool) -> None:
        found = seen.footprints(ledger.device, run)
        super().__init__(*_read(ledger, seen, found), since=since)
        self.device = ledger.device
        self.unmeasured = dict(
            Counter(
                ledger.ops[number].name for number in sorted(seen.done) if number >= since and number not in found
                and seen.allocates(number)
            ).most_common()
        )  # fmt: skip
        self._done = [seen.done.get(number) for number in range(since, len(ledger.ops))]
        self._selective = {ledger.ops[number].layer for number in seen.selective}

    def table(self, layers: int = 12) -> str:
        """As of ``Usage``, and the ops that were not measured."""
        text = super().table(layers)
        if not self.unmeasured:
            return text
        named = ", ".join(list(self.unmeasured)[:6]) + (", ..." if len(self.unmeasured) > 6 else "")
        return f"{text}\nnot measured: what {len(self.unmeasured)} ops allocate beside their results ({named})"

    @property
    def seconds(self) -> float:
        """What the step takes on this machine: the sum of ``op_seconds``."""
        return sum(self.op_seconds)

    @property
    def seconds_by_phase(self) -> dict[str, float]:
        """``seconds`` of each phase."""
        sums = dict[str, float]()
        for op, seconds in zip(self.ops, self.op_seconds, strict=True):
            sums[op.phase] = sums.get(op.phase, 0.0) + seconds
        return sums

    @cached_property
    def op_seconds(self) -> list[float]:
        """What each of ``ops`` takes, see ``lowbit.memory.timing``: the first call for a shape runs the op. Where it
        cannot be run, its arithmetic and traffic at the rates of this machine (``lowbit.memory.cost``). On the CPU an
        op that is recomputed takes what its checkpoint takes in Python too; a GPU does not wait for that.
        """
        kept = timings(self.device)

        def seconds(call: Call | None, work: Work) -> float:
            measured = None if call is None else kept.seconds(call)
            return work.seconds(rates(self.device)) if measured is None else measured

        def beside(op: Op) -> float:
            again = op.phase == "recomputation" and self.device.type == "cpu"
            return sum(one.overhead(op.layer in self._selective) for one in RECOMPUTATIONS) if again else 0.0

        try:
            return [
                (0.0 if done is None else seconds(*done)) + beside(op)
                for op, done in zip(self.ops, self._done, strict=True)
            ]
        finally:
            kept.save()


class Recomputation(NamedTuple):
    """How checkpoints compute again.

    Attributes:
        lookups: How many calls they have looked at, of which some results are kept.
        overhead: Seconds that an op takes beside its computation, by whether some results are kept.
    """

    lookups: Callable[[], int]
    overhead: Callable[[bool], float]


#: ``lowbit.checkpointing`` adds itself.
RECOMPUTATIONS: list[Recomputation] = []


class Seen:
    """What is noted of each op besides its storages.

    Attributes:
        done: By number of the op, its call and its work.
        table: By number of the op, the bytes that its kernel allocates beside results, by ``lowbit.memory.scratch``.
        nodes: By number of the op, that of the node of autograd that called it, or -1.
        sums: Ops that on real tensors write into their first operand.
        writes: Ops that on real tensors write into their first operand if their node has made it.
        selective: Ops of which some results are kept by a checkpoint, which computes the others again.
    """

    def __init__(self) -> None:
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
        """Whether an op computes anything."""
        return any(self.done[number][1])

    def footprints(self, device: torch.device, run: bool) -> dict[int, Footprint]:
        """By number of the op, what its kernel was measured to allocate. ``run``: measure those that are not known."""
        calls = {number: call for number, (call, _) in self.done.items() if call is not None}
        apart = {id(call): call for call in calls.values()}  # a call that is repeated is one; its hash takes long
        known = footprints(device).of(apart.values(), run)
        found = {key: known[call] for key, call in apart.items() if call in known}
        return {number: found[id(call)] for number, call in calls.items() if id(call) in found}

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
        found = None if key is None else self._known.get(key)
        if found is None:
            call = call_of(func, args, kwargs, out, self._sources)
            found = scratch_bytes(str(func), args, out), call, work(func, args, kwargs, out)
            if key is not None and not any(tensor.dtype == torch.uint8 for tensor in tensors_of(args, kwargs, out)):
                self._known[key] = found  # bytes may be of a workspace, of which each call has its own
            elif call is not None:
                self._sources |= sources_of(call, out)
        self.table[number], self.done[number] = found[0], found[1:]


def _lookups() -> int:
    return sum(one.lookups() for one in RECOMPUTATIONS)


def estimate_step(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any, Any], Tensor] | None = None,
    *,
    optimizer: MakeOptimizer | None = None,
    prepare: Callable[[nn.Module], object] = lambda model: None,
    micro_batches: int = 1,
    device: torch.device | str | None = None,
    accumulate: Accumulate | None = None,
) -> Estimate:
    """The estimate of a step on a fake copy of ``model``; see ``lb.estimate`` for the model, the batch and the loss.

    Args:
        model: Stays as it is.
        batch: As the model takes it.
        loss: Of output and batch.
        optimizer: Makes one of parameters. With None there is no step of an optimizer.
        prepare: Called on the copy before it runs.
        micro_batches: So many of ``batch`` are accumulated before the optimizer's step.
        device: By default the parameters' device, and ``cpu`` for those on meta.
        accumulate: Does forward and backward in place of ``loss(model(batch), batch).backward()``.

    Raises:
        ValueError: For a model that has no estimate, or whose forward reads values of tensors.
        TypeError: For what is no module or no batch.
    """
    _check_model(model, device)
    with torch.inference_mode(False), torch.enable_grad(), fake_tensors() as fake:
        copied = fake_model(model, fake, device)
        place = next((p.device for p in copied.parameters()), torch.device(device or "cpu"))
        given = fake_batch(batch, fake, place)
        prepare(copied)
        passes = accumulate or partial(_accumulate, rest=loss is not None)
        with _Spared() as spared:
            answered = _without_data(loss or usual_loss, spared)
            return _run(copied, given, answered, optimizer, micro_batches, place, passes, can_run(model, place))


# -- what an estimate can be made of -----------------------------------------------------------------------------------
def _check_model(model: Any, device: torch.device | str | None) -> None:
    """Raises TypeError and ValueError for a model that has no estimate, and for a device that is not there."""
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
            f"estimate: no parameter of {type(model).__name__} asks for a gradient, so there is nothing to "
            f"train; call requires_grad_() on those that should"
        )
    if device is not None and torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError("estimate: device='cuda' needs a torch with CUDA and a GPU; estimate for 'cpu' here")


def can_run(model: nn.Module, device: torch.device) -> bool:
    """Whether ops may be run to learn what they allocate: of a model that is here, on a device that is here."""
    here = device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available())
    return here and not any(parameter.is_meta for parameter in model.parameters())


def _exchanges_gradients(model: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # which takes seconds to import
    wrappers = (nn.parallel.DistributedDataParallel, *(() if fsdp is None else (fsdp.FullyShardedDataParallel,)))
    return any(isinstance(module, wrappers) for module in model.modules())


def _has_placements(model: nn.Module) -> bool:
    return any(hasattr(parameter, "placements") for parameter in model.parameters())


#: Models that have no estimate, by the row of ``lowbit.combinations`` that says why. Techniques add theirs.
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
) -> Estimate:
    """Take two steps, of which the second is told of; one where no optimizer has states to make."""
    trained = [p for p in model.parameters() if p.requires_grad]
    stepper = None if make is None else make(trained)
    if stepper is not None:
        _step_over_lists(stepper, device)
    seen = Seen()
    with Ledger(model, device, seen=seen) as ledger:
        ledger.claim(batch, "inputs")
        for _ in range(1 if stepper is None else 2):
            since = len(ledger.ops)
            with values_needed("estimate", f"the forward of {type(model).__name__}", _INSTEAD):
                for _ in range(micro_batches):
                    accumulate(model, batch, loss)
            if stepper is not None:
                with numbers_are_one():
                    stepper.step()
            for parameter in trained:
                parameter.grad = None
    return Estimate(ledger, seen, since, real)


def _step_over_lists(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Let an optimizer of torch that is free to choose do what it would do with real parameters: on CUDA it
    computes on lists of all parameters, with temporaries as large as they are. A fake tensor would turn it away.
    """
    if has_foreach_kernels(device):
        for group in optimizer.param_groups:
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True


def _accumulate(model: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor], rest: bool) -> None:
    """One micro-batch. The model's output goes before backward, as in ``run.step`` and ``model(**batch).loss``."""
    value = loss(call(model, batch, rest=rest), batch)
    value.backward()  # type: ignore[no-untyped-call]


def scalar(value: Any, who: str) -> Tensor:
    """What a loss answered. Raises ValueError for what is no tensor of one number with a gradient."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{who}: loss(output, batch) is a tensor of one number, got {got}; take its mean")
    if not value.requires_grad:
        raise ValueError(
            f"{who}: loss(output, batch) has no gradient, so there is nothing to train; compute it from the model's "
            f"output by ops of torch, without detach() and torch.no_grad()"
        )
    return value


class _Spared:
    """Real parameters that a loss depends on, such as those of a discriminator: within, they have no gradients, and
    afterwards those of before.
    """

    def __init__(self) -> None:
        self._gradients: dict[Tensor, Tensor | None] = {}

    def __enter__(self) -> _Spared:
        return self

    def note(self, value: Tensor) -> None:
        """Find them in what the loss was computed by."""
        nodes, known = [value.grad_fn], set[Any]()
        while nodes:
            node = nodes.pop()
            if node is None or node in known:
                continue
            known.add(node)
            nodes += [below for below, _ in node.next_functions]
            leaf = getattr(node, "variable", None) if node.name() == "torch::autograd::AccumulateGrad" else None
            if leaf is not None and not isinstance(leaf, FakeTensor):
                self._gradients.setdefault(leaf, leaf.grad)
                leaf.grad = None

    def __exit__(self, *error: object) -> None:
        for leaf, gradient in self._gradients.items():
            leaf.grad = gradient


def _without_data(loss: Callable[[Any, Any], Tensor], spared: _Spared) -> Callable[[Any, Any], Tensor]:
    """The loss of answers without numbers."""

    def checked(output: Any, batch: Any) -> Tensor:
        with values_needed("estimate", "the loss", "return a tensor, without item(), float() or if of numbers"):
            try:
                value = loss(output, batch)
            except TypeError as error:
                raise TypeError(
                    f"the loss failed: {error}. It is called with the model's output and the whole batch; of a "
                    f"criterion of torch make loss=lambda output, batch: criterion(output, batch[1])"
                ) from error
            spared.note(scalar(value, "estimate"))
            return value

    return checked


_aten = torch.ops.aten
#: By what formulas of gradients fill a tensor that they have made. Of tensors that are subclasses, as fake ones are,
#: they take these, which return another. Source: torch/csrc/autograd/FunctionsManual.cpp, areAnyTensorSubclassLike.
_WRITES = frozenset({
    _aten.scatter, _aten.scatter_add, _aten.scatter_reduce, _aten.index_add, _aten.index_put, _aten.index_fill,
    _aten.masked_fill, _aten.masked_scatter, _aten.slice_scatter, _aten.select_scatter,
})  # fmt: skip

#: Files whose frames lie between an op and what called it.
_BETWEEN = (
    "/lowbit/memory/ledger", "/lowbit/memory/estimator", "/torch/_compile", "/torch/_dynamo/eval_frame",
    "/torch/_subclasses/", "/torch/utils/_python_dispatch", "/torch/utils/_stats",
)  # fmt: skip


def _sums_in_place(args: tuple[Any, ...]) -> bool:
    """Whether autograd adds a gradient to the first of ``args``, which it alone holds. Then it does so in place, unless
    the tensors are fake ones.

    Source: torch/csrc/autograd/input_buffer.cpp of torch 2.13, ``can_accumulate_inplace``.
    """
    first, second = args[:2]
    if torch.is_grad_enabled() or not isinstance(second, Tensor) or first.shape != second.shape or first._is_view():
        return False
    frame: Any = sys._getframe(1)
    while frame is not None and any(part in frame.f_code.co_filename for part in _BETWEEN):
        frame = frame.f_back
    # No code in Python calls it: backward has been called, or a thread of autograd runs.
    return frame is None or frame.f_code.co_name == "_engine_run_backward"


def _read(ledger: Ledger, seen: Seen, found: Mapping[int, Footprint]) -> tuple[Any, list[float], list[Holding]]:
    """Ops, their times, and holdings of storages and of scratch memory, which lasts as long as its op."""
    times = [float(number) for number in range(len(ledger.ops))]
    pieces = ledger.pieces
    sizes = _sizes(pieces, found)
    deaths = [math.inf if piece.died is None else piece.died + 0.5 for piece in pieces]
    made = {piece.born: piece.bytes for piece in pieces if piece.born in seen.sums or piece.born in seen.writes}
    for index, piece in enumerate(pieces):
        if piece.died in seen.writes and seen.nodes.get(piece.born) != seen.nodes[piece.died]:
            continue
        if piece.died in made and made[piece.died] == piece.bytes and piece.born != piece.died:
            del made[piece.died]
            deaths[index] = piece.died - 0.25  # its memory is that of the sum
    births = [piece.born for piece in pieces]
    kinds = kinds_of(ledger.ops, births, deaths, [piece.kind for piece in pieces], times)
    rows = zip(pieces, sizes, kinds, births, deaths, strict=True)
    holdings = [Holding(size, kind, piece.layer, born, died) for piece, size, kind, born, died in rows]
    for number, listed in seen.table.items():
        size = found[number].scratch if number in found else listed
        holdings.append(Holding(size, "temporaries", ledger.ops[number].layer, number, number + 0.25))
    return ledger.ops, times, holdings


def _sizes(pieces: Sequence[Piece], found: Mapping[int, Footprint]) -> list[int]:
    """Bytes of storages: those of the op's results as they were measured, if a rule for fake tensors says less."""
    made: dict[int, list[int]] = {}
    for index, piece in enumerate(pieces):
        made.setdefault(piece.born, []).append(index)
    sizes = [piece.bytes for piece in pieces]
    for number, indices in made.items():
        results = found[number].results if number in found else ()
        if len(results) == len(indices):
            for index, size in zip(indices, results, strict=True):
                sizes[index] = max(sizes[index], size)
    return sizes
