"""The state of a model's training: seed and step, and the largest magnitudes that delayed scaling remembers.

A model has one State, which all its TrainLinear layers share. Forward and backward read it; a step of the optimizer
moves it on, and each forward of the model takes the next micro-batch of the step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lowbit.autograd import in_backward, transformed
from lowbit.dist_utils import processes
from lowbit.recipes import Cast
from lowbit.torch_private import current_node, sequence_number
from lowbit.train.moves import DATA, WEIGHT, advance_, derive_, next_micro_batch_
from lowbit.train.steps import Layers, follow_steps
from lowbit.train.view import OperandSlot, View
from lowbit.user_warnings import warn

__all__ = ["State"]

#: The operands that are the weight; the others are activations and gradients.
_WEIGHT_ROLES = ("output.b", "grad_input.b")
#: How many micro-batches of a step can wait for a backward pass that recomputes them.
_WAITING = 1024


class State(nn.Module):
    """What the training of one model remembers between steps, as tensors.

    ``rng`` int64 ``[2]``, seed and step, chooses the bits of stochastic rounding, with the micro-batch, the replica,
    the operand's stream (``<path of the layer>/<role>``, such as ``"blocks.0.up/grad_weight.a"``) and an element's
    place (docs/numerics.md section 7). ``amax`` fp32 ``[operands, steps]`` has the magnitudes of delayed scaling, and
    ``streams`` int64 ``[operands]`` the CRC-32 of their streams, so that no operand loads the history of another.

    These are buffers, with the same numbers on every rank, so DDP may broadcast them, and distributed checkpoints
    may save those of any rank. The rest is of one process and one step, and no buffer: DDP would overwrite it before
    each forward. It is ``keys`` (of the micro-batch under way), ``micro_batch`` (-1 before the first), ``pending``
    (the magnitudes of the step under way) and ``replica``. Save between steps; loading begins the step again.

    The State is the child ``lowbit_state`` of the first layer that needs it, so one copy is saved, under keys such as
    ``blocks.0.up.lowbit_state.rng``. It is no child of the model, because containers call theirs. A model whose recipes
    need no State has none in its ``state_dict``. A checkpoint without a State loads, and leaves the State as it is.
    Casting the model casts no magnitudes. Copies of a model have a State of their own.

    It follows the optimizer of the first layer's weight that trains: each step of that advances it. ``attach`` names
    another optimizer or process group instead, and who calls ``advance()`` after each step moves it alone.
    """

    #: ``lowbit.save_model`` writes what a model computes with, and leaves modules like this one out.
    lowbit_left_out = True

    rng: Tensor
    amax: Tensor
    streams: Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        # On the CPU until there is a layer with numbers, whatever the default device is.
        self.register_buffer("rng", torch.tensor([_signed(seed), 0], device="cpu"))
        self.register_buffer("amax", torch.zeros(0, 0, device="cpu"), persistent=False)
        self.register_buffer("streams", torch.zeros(0, dtype=torch.int64, device="cpu"), persistent=False)
        self.keys = torch.zeros(2, 2, dtype=torch.int64, device="cpu")
        self.micro_batch = torch.tensor(-1, device="cpu")
        #: fp32 ``[1]`` for each operand, in memory of its own: of what a compiled block records in, no other writes.
        self._pending: list[Tensor] = []
        self._replica: int | None = None
        self._steps: dict[str, int] = {}
        self._begun: list[tuple[int, Tensor]] = []
        self._attached: RemovableHandle | None = None
        self._warned = self._draws = False
        #: What ``counted`` says, the tensor that it was read of, and which version of that.
        self._counted: tuple[int, Tensor, int] | None = None
        #: Whether it follows an optimizer by itself, and which one has moved it since the last micro-batch began.
        self._follows = True
        self._mover: ref[torch.optim.Optimizer] | None = None
        self.layers = Layers()
        self._restart()
        follow_steps(self)

    # -- what moves it ---------------------------------------------------------------------------------------------
    def stepped(self, optimizer: ref[torch.optim.Optimizer]) -> None:
        """A step of an optimizer that the State may follow by itself is done.

        Where another one has moved it since the last forward, both are of one step: torchtitan's optimizer is made of
        others, which step inside of it.
        """
        if self._follows and self._mover in (None, optimizer):
            self.reduce_amax()
            self._advance()
            self._mover = optimizer

    def advance(self) -> None:
        """A step of the optimizer is done: the next one draws other random bits and has this one in its histories.

        From the first call on, these calls alone move the State. A first call after a step that it has followed
        is about that step, and does nothing more.
        """
        done = self._follows and self._mover is not None
        self._follows = False
        if not done:
            self._advance()

    def _advance(self) -> None:
        self._gather()
        count = None if torch.compiler.is_compiling() else self._count()
        advance_(self.keys, self.rng, self.micro_batch, self.amax, self.pending, self.replica)
        for held in self._pending:
            held.zero_()
        if not torch.compiler.is_compiling():
            self._counted = None if count is None else (count + 1, self.rng, self.rng._version)
            self._begun.clear()
            self.layers.step_done()

    def next_micro_batch(self) -> None:
        """Another micro-batch begins, whose activations and gradients draw other random bits.

        Each forward of the prepared model under grad mode does this. Call it where parts of the model are run instead,
        or where the whole model is inside a reentrant checkpoint, whose forward runs without grad mode.
        """
        self._gather()
        next_micro_batch_(self.keys, self.rng, self.micro_batch, self.replica)
        self._remember()

    def set_micro_batch(self, number: int) -> None:
        """The micro-batch under way has this number in its step, from 0; the next forward begins the one after."""
        self.micro_batch.fill_(number)
        self._restart()
        self._remember()

    def set_replica(self, number: int | None) -> None:
        """Which data-parallel replica this process is part of; None: its rank in the default process group.

        Ranks that hold shards of one replica (tensor parallelism) share the number.
        """
        self._replica = number
        self._restart()

    def attach(
        self, optimizer: torch.optim.Optimizer, *, reduce_amax: bool = True, group: dist.ProcessGroup | None = None
    ) -> RemovableHandle:
        """Advance after each ``optimizer.step()``, and no longer after that of an optimizer attached before, or of the
        one that the State follows by itself.

        Of several optimizers of a model, attach one. One that accelerate wraps may be given as it is.
        ``reduce_amax``: ``reduce_amax(group)`` first, where there is a process group. Returns a handle whose
        ``remove()`` ends both.
        """
        if self._attached is not None:
            self._attached.remove()
        self._follows = False

        def stepped(*_: Any) -> None:
            if reduce_amax:
                self.reduce_amax(group)
            self._advance()

        # accelerate's optimizer takes no hooks, and skips steps of the one inside while gradients accumulate.
        self._attached = getattr(optimizer, "optimizer", optimizer).register_step_post_hook(stepped)
        return self._attached

    def reduce_amax(self, group: dist.ProcessGroup | None = None) -> None:
        """Before ``advance``: take each operand's largest magnitude of the step in the ranks of ``group``.

        None: the default group. Every rank calls it, and it is one all-reduce. Without a process group, and without
        delayed scaling, it does nothing.
        """
        if self._pending and processes() > 1:
            pending = self.pending
            dist.all_reduce(pending, dist.ReduceOp.MAX, group)
            self.pending = pending

    # -- what it says ----------------------------------------------------------------------------------------------
    @property
    def seed(self) -> int:
        """An integer of 64 bits."""
        return int(self.rng[0])

    @seed.setter
    def seed(self, seed: int) -> None:
        self.rng[0] = _signed(seed)
        self._restart(weights_too=True)

    @property
    def step(self) -> int:
        """How many steps are done."""
        return int(self.rng[1])

    @step.setter
    def step(self, step: int) -> None:
        self.rng[1] = step
        self._restart(weights_too=True)

    @property
    def counted(self) -> int:
        """``step`` as the calls of this process count it, which waits for no GPU; not where a CUDA graph advances."""
        count = self._count()
        if count is None:
            count = self.step
            self._counted = count, self.rng, self.rng._version
        return count

    @property
    def replica(self) -> int:
        """The data-parallel replica of this process."""
        if self._replica is not None:
            return self._replica
        return dist.get_rank() if processes() > 1 else 0

    @property
    def pending(self) -> Tensor:
        """fp32 ``[operands]``: the largest magnitude of each in the step under way."""
        return torch.cat(self._pending) if self._pending else self.amax.new_zeros(0)

    @pending.setter
    def pending(self, magnitudes: Tensor) -> None:
        for held, magnitude in zip(self._pending, magnitudes, strict=True):
            held.fill_(magnitude)

    @property
    def histories(self) -> dict[str, Tensor]:
        """By stream, the magnitudes of one operand: fp32 ``[steps]``, the newest first; 0 for a step not there yet."""
        return {stream: self.amax[row, :steps] for row, (stream, steps) in enumerate(self._steps.items())}

    def extra_repr(self) -> str:
        return f"{len(self._steps)} histories"

    # -- layers ----------------------------------------------------------------------------------------------------
    def slots(self, path: str, casts: Mapping[str, Cast]) -> dict[str, OperandSlot]:
        """Of a layer at ``path``, by role, what its operands have here; makes the histories that they need."""
        streams = {role: f"{path}/{role}" for role in casts}
        self._steps |= {streams[role]: cast.history for role, cast in casts.items() if cast.scale == "delayed"}
        self._draws |= any(cast.rounding != "nearest" for cast in casts.values())
        rows = {stream: row for row, stream in enumerate(self._steps)}
        amax = self.amax.new_zeros(len(rows), max(self._steps.values(), default=0))
        amax[: len(self.amax), : self.amax.shape[-1]] = self.amax
        self.register_buffer("amax", amax, persistent=bool(rows))
        self.register_buffer("streams", self._crcs().to(amax.device), persistent=bool(rows))
        self._pending += [amax.new_zeros(1) for _ in range(len(rows) - len(self._pending))]
        return {
            role: OperandSlot(crc32(stream.encode()), WEIGHT if role in _WEIGHT_ROLES else DATA, rows.get(stream))
            for role, stream in streams.items()
        }

    def before_forward(self, model: nn.Module, *_: Any) -> None:
        """The hook on the model's forward."""
        self.layers.belong_to(model)
        if torch.is_grad_enabled() and not _recomputes():
            self.next_micro_batch()

    def view(self, slots: Mapping[str, OperandSlot], device: torch.device) -> View:
        """What a call of a layer on ``device`` sees."""
        keys, amax = self.keys, self.amax
        if not torch.compiler.is_compiling() and self._draws and not self._begun and not self._warned:
            self._warn_uncounted()
        if _recomputes() and self._begun:  # a checkpoint recomputes: of which micro-batch, the node's number tells
            begun = [number for number, _ in self._begun]
            keys = self._begun[max(bisect_right(begun, _node_number()) - 1, 0)][1]
        if keys.device != device:
            keys, amax = keys.to(device), amax.to(device)
        # A clone made in a transform of torch.func is wrapped, and of no use in an autograd.Function that holds it.
        return View(keys if transformed() else keys.clone(), amax, self._pending, slots, torch.is_grad_enabled())

    # -- as a module -----------------------------------------------------------------------------------------------
    def forward(self) -> None:
        """Computes nothing."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> State:
        """Tensors move and keep their dtypes and numbers, also where the model's are made empty (``to_empty``)."""
        device = fn(torch.empty(0, device=self.rng.device)).device
        if device.type != "meta":
            self.rng, self.amax, self.streams = (t.to(device) for t in (self.rng, self.amax, self.streams))
            self._gather()
        return self

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        if any(name.startswith(prefix) for name in state_dict):
            super()._load_from_state_dict(state_dict, prefix, *args)
            own, given = self._crcs(), self.streams.tolist()
            if given != own.tolist():
                lacks = [name for name in self._steps if crc32(name.encode()) not in given] or list(self._steps)
                args[-1].append(
                    f"{prefix}amax: expected the histories of this model's operands in their order, but the checkpoint "
                    f"has others, not of {', '.join(lacks[:3])}{', ...' if lacks[3:] else ''}; prepare the model as "
                    f"the one that was saved, or take the keys {prefix}* out of the checkpoint, to begin without any"
                )
                self.streams = own.to(self.streams.device)
            self.micro_batch.fill_(-1)
            for held in self._pending:
                held.zero_()
            self._restart(weights_too=True)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no backward pass to come, and follows an optimizer of its own; another process numbers its nodes
        itself."""
        return {**vars(self), "_begun": [], "_attached": None, "_counted": None, "_follows": True, "_mover": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        follow_steps(self)

    # -- inside ----------------------------------------------------------------------------------------------------
    def _crcs(self) -> Tensor:
        """What ``streams`` holds."""
        return torch.tensor([crc32(stream.encode()) for stream in self._steps], dtype=torch.int64, device="cpu")

    def _count(self) -> int | None:
        """``counted``, where nothing else has written to ``rng`` since."""
        if self._counted is None:
            return None
        count, of, version = self._counted
        return count if of is self.rng and version == of._version else None

    def _gather(self) -> None:
        """Bring what is no buffer to where the buffers are; FSDP2 moves those alone."""
        device = self.rng.device
        if self.keys.device != device:
            self.keys, self.micro_batch = self.keys.to(device), self.micro_batch.to(device)
            self._pending = [held.to(device) for held in self._pending]

    def _restart(self, weights_too: bool = False) -> None:
        """Make the keys of what has been set; ``weights_too``: those of weights change, so that their codes are old."""
        self._gather()
        self._begun.clear()
        if weights_too:
            self.layers.step_done()
        derive_(self.keys, self.rng, self.micro_batch, self.replica)

    def _remember(self) -> None:
        """Note the keys of the micro-batch that begins, for a recomputation after the next one has begun."""
        self._mover = None
        if not torch.compiler.is_compiling():
            self._begun.append((sequence_number(), self.keys.clone()))
            if len(self._begun) > _WAITING:
                del self._begun[0]
                self._warn(
                    f"more than {_WAITING} micro-batches began in step {self.step} of the training, whose random bits "
                    f"and scales move on with the optimizer's steps; call lowbit.train.state(model).attach(optimizer)"
                )

    def _warn_uncounted(self) -> None:
        """Where a layer is at work, but neither a forward of the model nor the caller has begun a micro-batch."""
        if torch.is_grad_enabled() and self.micro_batch < 0:
            self._warn(
                "a layer ran in training, but not by a forward of the model that train.prepare_ was given (a part of "
                "it ran, or all of it in a reentrant checkpoint), so all micro-batches of a step draw the same random "
                "bits; call lowbit.train.state(model).next_micro_batch() before each forward"
            )

    def _warn(self, message: str) -> None:
        """Once."""
        if not self._warned:
            self._warned = True
            warn(f"lowbit.train: {message}")


def _signed(seed: int) -> int:
    """A seed of 64 bits, signed or not, as int64 holds it."""
    if not -(1 << 63) <= seed < 1 << 64:
        raise ValueError(f"train.State: the seed is an integer of 64 bits, got {seed}; take it modulo 2**64")
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def _recomputes() -> bool:
    """Whether a backward pass calls this; compiled code leaves the question to the op."""
    return not torch.compiler.is_compiling() and in_backward()


def _node_number() -> int:
    """The number of the node that a backward pass is at; nodes are numbered as forward makes them."""
    return int(current_node()._sequence_nr())
