"""What autograd keeps for backward, moved to host memory or to files until backward needs it.

A tensor is moved as soon as autograd alone holds its storage. So what lives anyway (parameters, batches, outputs that
the caller keeps, the last activations, which backward needs first) stays where it is, and nobody can write to what is
moved. A storage is moved once, however many tensors are views of it.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import weakref
from collections import deque
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import user_warnings
from lowbit.sizes import is_bytes
from lowbit.storage.interrupts import uninterrupted
from lowbit.storage.targets import Imagined, Parked, Target, find_target
from lowbit.torch_private import FakeTensor, pop_saved_tensors_hooks, push_saved_tensors_hooks, storage_holders

__all__ = ["Offloading", "offload_activations", "unmodified"]

#: How many storages come back before backward asks for them, how far back they are looked for, and how many that it
#: has asked for stay in memory for other views.
_AHEAD, _REACH, _RECENT = 2, 16, 8


def offload_activations(
    to: str | os.PathLike[str] = "cpu", *, min_bytes: int = 1 << 16, budget: int | str | None = None
) -> Offloading:
    """A context in which the activations of forward are kept in ``to`` until backward, which may come after it.

    ``to``: ``"cpu"``, pinned memory of the host, for tensors on CUDA devices; or a directory, for tensors on the CPU
    too. ``min_bytes``: the least size of a storage that is moved. ``budget``: the most that may be in ``to`` at a
    time, in bytes or as ``"100GB"``. Losses and gradients keep their bits. Inputs that checkpoints keep are moved as
    well. Tensors that something else holds are not moved. The context may be entered for every step; ``print`` of it
    says what was moved, and how long the caller waited for copies. Files lie in a directory ``lowbit-offload-PID-...``,
    and are gone with the graph; those of a killed process go when the next context is made for the same directory.

    Raises ValueError for arguments that do not fit; in forward OSError, before anything is lost, where the budget
    or the disk is exhausted; in backward RuntimeError for a tensor that was modified in place, as torch does.
    Source: torch.autograd.graph.save_on_cpu, which copies every saved tensor at once.

        with lowbit.memory.offload_activations("/scratch", budget="100GB"):
            loss = model(batch).sum()
        loss.backward()
    """
    if not is_bytes(min_bytes):
        raise ValueError(f"memory.offload_activations: min_bytes is a number of bytes, got {min_bytes!r}; 0 moves all")
    return Offloading(find_target(to, budget), min_bytes)


class Offloading:
    """What ``offload_activations`` returns: a context, and the traffic of all its steps."""

    def __init__(self, target: Target, min_bytes: int) -> None:
        self.target, self.min_bytes = target, max(min_bytes, 1)
        self._imagined = Imagined(target)
        self._guard = threading.RLock()
        self._waiting: weakref.WeakValueDictionary[int, _Storage] = weakref.WeakValueDictionary()
        self._moved: weakref.WeakValueDictionary[int, _Storage] = weakref.WeakValueDictionary()
        self._recent: deque[weakref.ref[_Storage]] = deque()
        self._numbers = itertools.count()

    @property
    def traffic(self) -> Any:
        """Bytes moved and seconds waited so far, a ``Traffic``."""
        return self.target.traffic

    def __str__(self) -> str:
        return str(self.target.traffic)

    def __enter__(self) -> Offloading:
        self.target.traffic.begin()
        push_saved_tensors_hooks(self._pack, _unpack)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        pop_saved_tensors_hooks()
        if kind is None:
            self.target.check()

    # -- forward -----------------------------------------------------------------------------------------------------
    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        if _lives_anyway(tensor) or not _is_plain(tensor) or tensor.untyped_storage().nbytes() < self.min_bytes:
            return tensor
        if not self.target.serves(tensor.device):
            if tensor.device.type == "cpu":
                _say_nothing_moves()
            return tensor
        with self._guard:
            key = tensor.untyped_storage()._cdata
            storage = self._waiting.get(key)
            if storage is None:
                self._move_free()
                storage = self._waiting[key] = _Storage(self)
            return _Saved(storage, tensor)

    def _move_free(self) -> None:
        """Move what nothing but autograd holds by now."""
        with self._guard:
            for key, storage in list(self._waiting.items()):
                if storage.is_free():
                    storage.move()
                    del self._waiting[key]
                    storage.number = next(self._numbers)
                    self._moved[storage.number] = storage

    # -- backward ----------------------------------------------------------------------------------------------------
    def _prefetch(self, number: int) -> None:
        """Begin to bring back what was moved before, which backward needs next."""
        found = (self._moved.get(n) for n in range(number - 1, max(number - _REACH, 0) - 1, -1))
        for storage in itertools.islice((s for s in found if s is not None and s.raw is None), _AHEAD):
            storage.start()

    def _loaded(self, storage: _Storage) -> None:
        """Of what has come back, only the latest stays."""
        self._recent.append(weakref.ref(storage))
        while len(self._recent) > _RECENT:
            old = self._recent.popleft()()
            if old is not None and old is not storage:
                old.raw = None


def _unpack(saved: Tensor | _Saved) -> Tensor:
    return saved.tensor() if isinstance(saved, _Saved) else saved


class _Storage:
    """A storage that autograd keeps. First the tensors of ``saved`` hold it, after ``move`` it is parked."""

    def __init__(self, context: Offloading) -> None:
        self.context, self.number = context, -1
        self.saved: weakref.WeakSet[_Saved] = weakref.WeakSet()
        self.parked: Parked | None = None
        self.raw: Tensor | None = None  # once it has come back

    def is_free(self) -> bool:
        """Whether nothing but autograd holds it, and nothing has been written to it: that is found in backward."""
        kept = [(saved.kept, saved.version) for saved in self.saved if saved.kept is not None]
        if any(tensor._version != version for tensor, version in kept):
            return False
        tensors = [tensor for tensor, _ in kept]
        del kept
        return bool(tensors) and storage_holders(tensors[0]) == _ALONE - 1 + len(tensors)

    def move(self) -> None:
        """Begin to move it away; where that raises, it stays."""
        kept = next(saved.kept for saved in self.saved if saved.kept is not None)
        target = self.context._imagined if isinstance(kept, FakeTensor) else self.context.target
        self.parked = target.park(_raw(kept))
        for saved in self.saved:
            saved.kept = None

    def start(self) -> None:
        if self.parked is not None:
            self.parked.start()

    def bytes(self) -> Tensor:
        """All its bytes, in memory again."""
        with self.context._guard:
            assert self.parked is not None
            if self.raw is None:
                self.raw = self.parked.take()
                self.context._loaded(self)
                self.context._prefetch(self.number)
                self.context.target.traffic.judge()
            return self.raw

    def __del__(self) -> None:
        self.raw = None
        if self.parked is not None:
            uninterrupted(self.parked.discard)


class _Saved:
    """One tensor that autograd keeps: the tensor, until its storage is moved, then where it lies in the storage."""

    def __init__(self, storage: _Storage, tensor: Tensor) -> None:
        self.storage, self.version = storage, tensor._version
        self.kept: Tensor | None = tensor.detach()
        self.layout = (tensor.size(), tensor.stride(), tensor.storage_offset())
        self.dtype = tensor.dtype
        storage.saved.add(self)

    def tensor(self) -> Tensor:
        kept = self.kept
        if kept is None:
            raw = self.storage.bytes()
            return raw.view(self.dtype).as_strided(*self.layout)
        return unmodified(kept, self.version)


def unmodified(tensor: Tensor, version: int) -> Tensor:
    """A tensor that a hook keeps for backward. Raises RuntimeError where it has changed, as torch does by itself."""
    if tensor._version != version:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"{tensor.dtype} tensor of {list(tensor.shape)} is at version {tensor._version}; expected version "
            f"{version}. Write to a copy of it"
        )
    return tensor


# -- what is moved -----------------------------------------------------------------------------------------------------
def _lives_anyway(tensor: Tensor) -> bool:
    """Whether it is a parameter, another leaf that gradients are for, or a view of one."""
    root = tensor if tensor._base is None else tensor._base
    return isinstance(root, nn.Parameter) or (root.is_leaf and root.requires_grad)


def _is_plain(tensor: Tensor) -> bool:
    """Whether its numbers are those of its storage: no subclass, no sparse one, nothing that is conjugated later."""
    return (
        type(tensor) in (Tensor, FakeTensor)
        and tensor.layout is torch.strided
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_quantized
        and tensor.untyped_storage().nbytes() % tensor.itemsize == 0
        and not torch.compiler.is_compiling()
    )


#: What ``_holders`` says of a storage that one tensor holds.
_ALONE = storage_holders(torch.empty(1))


def _raw(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage."""
    count = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.as_strided((count,), (1,), 0).view(torch.uint8)


@functools.cache
def _say_nothing_moves() -> None:
    user_warnings.warn(
        'memory.offload_activations("cpu"): the tensors are on the CPU already, so nothing is moved; give a directory '
        "to keep them in files"
    )
