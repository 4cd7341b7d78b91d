"""State: the seed, step and amax history of a model's training, shared by its TrainLinear layers.

Forward and backward read it. An optimizer step advances it, and each forward of the model starts the next micro-batch.
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

#: The operands that are weights; the others are activations and gradients.
_WEIGHT_ROLES = ("output.b", "grad_input.b")
#: Maximum number of micro-batches of a step that a later backward pass may recompute.
_MAX_PENDING = 1024


class State(nn.Module):
    """Training state of one model, stored as tensors.

    It is registered as the child ``lowbit_state`` of the first layer that needs it, so it is saved once, under keys
    such as ``blocks.0.up.lowbit_state.rng``. It is not a child of the model, because containers call their children. A
    model whose recipes need no State has none in its ``state_dict``. A checkpoint without a State loads and leaves the
    State unchanged. Casting the model does not cast the State. A copy of the model gets its own State.

    Save between steps: loading restarts the step. The buffers are equal on all ranks, so DDP may broadcast them, and a
    distributed checkpoint may save any rank's. All other attributes belong to one process and step, and are not
    buffers, because DDP would overwrite them before each forward.

    By default the State follows the optimizer of the first trainable weight of the layers: each of its steps advances
    the State. ``attach`` selects another optimizer or process group. Code that calls ``advance()`` after each step
    disables the default.

    Attributes:
        rng: buffer, int64 ``[2]``: seed and step. Random bits of stochastic rounding depend on these, the micro-batch,
            the replica, the operand's stream and the element's position (docs/numerics.md section 7). A stream is
            ``<path of the layer>/<role>``, such as ``"blocks.0.up/grad_weight.a"``.
        amax: buffer, fp32 ``[operands, steps]``: the amax history of delayed scaling.
        streams: buffer, int64 ``[operands]``: CRC-32 of each operand's stream, which prevents loading another operand's
            history.
        keys: random keys of the current micro-batch, ``[2, 2]``.
        micro_batch: number of the current micro-batch in its step; -1 before the first.
        layers: the layers that share the State, by weak references.

    Args:
        seed: a 64-bit integer, signed or unsigned.
    """

    #: ``lowbit.save_model`` skips this module: inference does not need it.
    lowbit_left_out = True

    rng: Tensor
    amax: Tensor
    streams: Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        # On the CPU, whatever the default device is, until a layer has a weight with storage.
        self.register_buffer("rng", torch.tensor([_signed(seed), 0], device="cpu"))
        self.register_buffer("amax", torch.zeros(0, 0, device="cpu"), persistent=False)
        self.register_buffer("streams", torch.zeros(0, dtype=torch.int64, device="cpu"), persistent=False)
        self.keys = torch.zeros(2, 2, dtype=torch.int64, device="cpu")
        self.micro_batch = torch.tensor(-1, device="cpu")
        #: fp32 ``[1]`` per operand in separate storage, so a compiled block is the only writer of its tensors.
        self._pending: list[Tensor] = []
        self._replica: int | None = None
        self._steps: dict[str, int] = {}
        self._begun: list[tuple[int, Tensor]] = []
        self._attached: RemovableHandle | None = None
        self._warned = self._draws = False
        #: The value of ``counted``, with the tensor and version that it was read from.
        self._counted: tuple[int, Tensor, int] | None = None
        #: Whether the State follows an optimizer by default, and which one advanced it since the last micro-batch.
        self._follows = True
        self._mover: ref[torch.optim.Optimizer] | None = None
        self.layers = Layers()
        self._restart()
        follow_steps(self)

    # -- advancing -------------------------------------------------------------------------------------------------
    def stepped(self, optimizer: ref[torch.optim.Optimizer]) -> None:
        """Called after a step of an optimizer that the State follows by default.

        If another optimizer has advanced it since the last forward, both belong to one step: torchtitan's optimizer
        consists of several optimizers that step inside it.
        """
        if self._follows and self._mover in (None, optimizer):
            self.reduce_amax()
            self._advance()
            self._mover = optimizer

    def advance(self) -> None:
        """Start the next step: new random bits, and this step's magnitudes enter the amax history.

        From the first call on, only these calls advance the State. If the State has already followed this step's
        optimizer, the first call only disables that.
        """
        advanced = self._follows and self._mover is not None
        self._follows = False
        if not advanced:
            self._advance()

    def _advance(self) -> None:
        self._gather()
        count = None if torch.compiler.is_compiling() else self._count()
        advance_(self.keys, self.rng, self.micro_batch, self.amax, self.pending, self.replica)
        for amax in self._pending:
            amax.zero_()
        if not torch.compiler.is_compiling():
            self._counted = None if count is None else (count + 1, self.rng, self.rng._version)
            self._begun.clear()
            self.layers.step_done()

    def next_micro_batch(self) -> None:
        """Start the next micro-batch, whose activations and gradients get new random bits.

        Each forward of the prepared model under grad mode calls it. Call it yourself if only parts of the model run, or
        if the whole model is inside a reentrant checkpoint, whose forward runs without grad mode.
        """
        self._gather()
        next_micro_batch_(self.keys, self.rng, self.micro_batch, self.replica)
        self._remember()

    def set_micro_batch(self, number: int) -> None:
        """Set the number of the current micro-batch, from 0; the next forward starts the following one."""
        self.micro_batch.fill_(number)
        self._restart()
        self._remember()

    def set_replica(self, number: int | None) -> None:
        """Set the data-parallel replica of this process; None: its rank in the default process group.

        Ranks with shards of one replica (tensor parallelism) share the number.
        """
        self._replica = number
        self._restart()

    def attach(
        self, optimizer: torch.optim.Optimizer, *, reduce_amax: bool = True, group: dist.ProcessGroup | None = None
    ) -> RemovableHandle:
        """Advance after each step of ``optimizer``, instead of the default or an optimizer attached before.

        Args:
            optimizer: the optimizer, which may be wrapped by accelerate. If the model has several, attach one of them.
            reduce_amax: call ``reduce_amax(group)`` first if several processes run.
            group: the process group; None: the default group.

        Returns:
            A handle whose ``remove()`` detaches the optimizer.
        """
        if self._attached is not None:
            self._attached.remove()
        self._follows = False

        def stepped(*_: Any) -> None:
            if reduce_amax:
                self.reduce_amax(group)
            self._advance()

        # accelerate's wrapper takes no hooks, and does not step the inner optimizer while gradients accumulate.
        self._attached = getattr(optimizer, "optimizer", optimizer).register_step_post_hook(stepped)
        return self._attached

    def reduce_amax(self, group: dist.ProcessGroup | None = None) -> None:
        """Take the maximum over the ranks of ``group`` of this step's magnitudes; call it before ``advance``.

        It is one all-reduce, and every rank must call it. Without a process group or without delayed scaling it does
        nothing.

        Args:
            group: the process group; None: the default group.
        """
        if self._pending and processes() > 1:
            pending = self.pending
            dist.all_reduce(pending, dist.ReduceOp.MAX, group)
            self.pending = pending

    # -- reading ---------------------------------------------------------------------------------------------------
    @property
    def seed(self) -> int:
        """The seed, a 64-bit integer. Setting it restarts the step."""
        return int(self.rng[0])

    @seed.setter
    def seed(self, seed: int) -> None:
        self.rng[0] = _signed(seed)
        self._restart(weights_too=True)

    @property
    def step(self) -> int:
        """Number of completed steps. Setting it restarts the step."""
        return int(self.rng[1])

    @step.setter
    def step(self, step: int) -> None:
        self.rng[1] = step
        self._restart(weights_too=True)

    @property
    def counted(self) -> int:
        """``step`` as counted by this process, without waiting for the GPU; wrong if a CUDA graph advances it."""
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
        """fp32 ``[operands]``: the largest magnitude of each operand in the current step."""
        return torch.cat(self._pending) if self._pending else self.amax.new_zeros(0)

    @pending.setter
    def pending(self, magnitudes: Tensor) -> None:
        for amax, magnitude in zip(self._pending, magnitudes, strict=True):
            amax.fill_(magnitude)

    @property
    def histories(self) -> dict[str, Tensor]:
        """Amax history per stream: fp32 ``[steps]``, newest first, 0 for steps that have not happened yet."""
        return {stream: self.amax[row, :steps] for row, (stream, steps) in enumerate(self._steps.items())}

    def extra_repr(self) -> str:
        return f"{len(self._steps)} histories"

    # -- layers ----------------------------------------------------------------------------------------------------
    def slots(self, path: str, casts: Mapping[str, Cast]) -> dict[str, OperandSlot]:
        """Slots of a layer's operands by role; allocates their histories."""
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
        """Pre-hook of the model's forward."""
        self.layers.belong_to(model)
        if torch.is_grad_enabled() and not _recomputes():
            self.next_micro_batch()

    def view(self, slots: Mapping[str, OperandSlot], device: torch.device) -> View:
        """The view of the State for one call of a layer on ``device``."""
        keys, amax = self.keys, self.amax
        if not torch.compiler.is_compiling() and self._draws and not self._begun and not self._warned:
            self._warn_uncounted()
        if _recomputes() and self._begun:  # a checkpoint recomputes: the node's number identifies the micro-batch
            begun = [number for number, _ in self._begun]
            keys = self._begun[max(bisect_right(begun, _node_number()) - 1, 0)][1]
        if keys.device != device:
            keys, amax = keys.to(device), amax.to(device)
        # A clone made inside a torch.func transform is wrapped, and an autograd.Function could not use it later.
        return View(keys if transformed() else keys.clone(), amax, self._pending, slots, torch.is_grad_enabled())

    # -- as a module -----------------------------------------------------------------------------------------------
    def forward(self) -> None:
        """Does nothing; layers read the State by ``view``."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> State:
        """Move the tensors but keep their dtypes and values, even if the model is emptied (``to_empty``)."""
        device = fn(torch.empty(0, device=self.rng.device)).device
        if device.type != "meta":
            self.rng, self.amax, self.streams = (t.to(device) for t in (self.rng, self.amax, self.streams))
            self._gather()
        return self

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        if any(name.startswith(prefix) for name in state_dict):
            super()._load_from_state_dict(state_dict, prefix, *args)
            expected, saved = self._crcs(), self.streams.tolist()
            if saved != expected.tolist():
                missing = [name for name in self._steps if crc32(name.encode()) not in saved] or list(self._steps)
                args[-1].append(
                    f"{prefix}amax: expected the amax history of this model's operands in their order, but the "
                    f"checkpoint does not match at {', '.join(missing[:3])}{', ...' if missing[3:] else ''}; prepare "
                    f"the model as it was when saved, or remove the keys {prefix}* to start without history"
                )
                self.streams = expected.to(self.streams.device)
            self.micro_batch.fill_(-1)
            for amax in self._pending:
                amax.zero_()
            self._restart(weights_too=True)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no pending backward pass and follows its own optimizer."""
        return {**vars(self), "_begun": [], "_attached": None, "_counted": None, "_follows": True, "_mover": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        follow_steps(self)

    # -- inside ----------------------------------------------------------------------------------------------------
    def _crcs(self) -> Tensor:
        return torch.tensor([crc32(stream.encode()) for stream in self._steps], dtype=torch.int64, device="cpu")

    def _count(self) -> int | None:
        """The value of ``counted``, or None if other code has written to ``rng``."""
        if self._counted is None:
            return None
        count, rng, version = self._counted
        return count if rng is self.rng and version == rng._version else None

    def _gather(self) -> None:
        """Move tensors that are not buffers to the device of the buffers; FSDP2 moves only buffers."""
        device = self.rng.device
        if self.keys.device != device:
            self.keys, self.micro_batch = self.keys.to(device), self.micro_batch.to(device)
            self._pending = [amax.to(device) for amax in self._pending]

    def _restart(self, weights_too: bool = False) -> None:
        """Derive the keys from the current values; ``weights_too``: weights have new keys too, so drop their codes."""
        self._gather()
        self._begun.clear()
        if weights_too:
            self.layers.step_done()
        derive_(self.keys, self.rng, self.micro_batch, self.replica)

    def _remember(self) -> None:
        """Record the keys of the micro-batch that starts, in case a later backward pass recomputes it."""
        self._mover = None
        if not torch.compiler.is_compiling():
            self._begun.append((sequence_number(), self.keys.clone()))
            if len(self._begun) > _MAX_PENDING:
                del self._begun[0]
                self._warn(
                    f"more than {_MAX_PENDING} micro-batches began in step {self.step}: the state does not follow "
                    f"the optimizer, so random bits and scales do not advance; call "
                    f"lowbit.train.state(model).attach(optimizer)"
                )

    def _warn_uncounted(self) -> None:
        """Warn if a layer runs but neither a forward of the model nor the caller has started a micro-batch."""
        if torch.is_grad_enabled() and self.micro_batch < 0:
            self._warn(
                "a layer ran in training outside a forward of the prepared model (only a part of the model ran, or all "
                "of it in a reentrant checkpoint), so all micro-batches of a step use the same random bits; call "
                "lowbit.train.state(model).next_micro_batch() before each forward"
            )

    def _warn(self, message: str) -> None:
        """Warn once."""
        if not self._warned:
            self._warned = True
            warn(f"lowbit.train: {message}")


def _signed(seed: int) -> int:
    """Convert a signed or unsigned 64-bit seed to int64."""
    if not -(1 << 63) <= seed < 1 << 64:
        raise ValueError(f"train.State: the seed must be an integer of 64 bits, got {seed}; take it modulo 2**64")
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def _recomputes() -> bool:
    """Whether a backward pass is running; in compiled code the ops check this instead."""
    return not torch.compiler.is_compiling() and in_backward()


def _node_number() -> int:
    """Sequence number of the autograd node that is running backward; nodes are numbered in the order of forward."""
    return int(current_node()._sequence_nr())
