"""Offload of activations, which autograd saves for backward, to host memory or files.

A tensor is offloaded when only autograd holds its storage, so no code can write to an offloaded tensor. Parameters,
batches and outputs that the caller holds stay in memory. So do the last activations, which backward needs first. A
storage is offloaded once, however many tensors are views of it.
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

#: Number of storages that are prefetched, how many earlier ones are searched for them, and how many used ones stay in
#: memory for other views.
_AHEAD, _REACH, _RECENT = 2, 16, 8


def offload_activations(
    to: str | os.PathLike[str] = "cpu", *, min_bytes: int = 1 << 16, budget: int | str | None = None
) -> Offloading:
    """A context that offloads activations of the forward pass until the backward pass needs them.

    The backward pass may run after the context. Losses and gradients are bit-identical. The inputs that checkpoints
    save are offloaded as well. Tensors with other references are not offloaded. The context may be reused for every
    step; ``print`` it to see the bytes moved and the time spent waiting for copies.

    Files are in a directory ``lowbit-offload-PID-...`` and are removed with the graph. Files of a killed process are
    removed by the next context for the same directory.

    Args:
        to: ``"cpu"``, pinned host memory, for tensors on CUDA devices; or a directory, for tensors on the CPU too.
        min_bytes: Smallest storage to offload, in bytes.
        budget: Limit for ``to``, in bytes or as ``"100GB"``; None for no limit.

    Returns:
        The context, an ``Offloading``.

    Raises:
        ValueError: An argument is invalid.
        OSError: In forward, the budget or the disk is exhausted. Nothing is lost.
        RuntimeError: In backward, a tensor was modified in place, as in torch.

    Source: torch.autograd.graph.save_on_cpu, which copies every saved tensor at once.

    Example:
        with lowbit.memory.offload_activations("/scratch", budget="100GB"):
            loss = model(batch).sum()
        loss.backward()
    """
    if not is_bytes(min_bytes):
        raise ValueError(
            f"memory.offload_activations: min_bytes is a number of bytes, got {min_bytes!r}; 0 offloads all"
        )
    return Offloading(find_target(to, budget), min_bytes)


class Offloading:
    """The context of ``offload_activations``, with the traffic of all its steps.

    Attributes:
        target: The offload target.
        min_bytes: Smallest storage to offload, in bytes.
    """

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
        """Bytes moved and seconds waited so far, a ``lowbit.storage.traffic.Traffic``."""
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
        if _is_leaf(tensor) or not _is_plain(tensor) or tensor.untyped_storage().nbytes() < self.min_bytes:
            return tensor
        if not self.target.serves(tensor.device):
            if tensor.device.type == "cpu":
                _warn_of_cpu()
            return tensor
        with self._guard:
            key = tensor.untyped_storage()._cdata
            storage = self._waiting.get(key)
            if storage is None:
                self._move_free()
                storage = self._waiting[key] = _Storage(self)
            return _Saved(storage, tensor)

    def _move_free(self) -> None:
        """Offload the storages that only autograd holds by now."""
        with self._guard:
            for key, storage in list(self._waiting.items()):
                if storage.is_free():
                    storage.move()
                    del self._waiting[key]
                    storage.number = next(self._numbers)
                    self._moved[storage.number] = storage

    # -- backward ----------------------------------------------------------------------------------------------------
    def _prefetch(self, number: int) -> None:
        """Start loading the storages that were offloaded just before, which backward needs next."""
        earlier = (self._moved.get(n) for n in range(number - 1, max(number - _REACH, 0) - 1, -1))
        for storage in itertools.islice((s for s in earlier if s is not None and s.raw is None), _AHEAD):
            storage.start()

    def _loaded(self, storage: _Storage) -> None:
        """Free the loaded storages except the most recent ones."""
        self._recent.append(weakref.ref(storage))
        while len(self._recent) > _RECENT:
            old = self._recent.popleft()()
            if old is not None and old is not storage:
                old.raw = None


def _unpack(saved: Tensor | _Saved) -> Tensor:
    return saved.tensor() if isinstance(saved, _Saved) else saved


class _Storage:
    """A storage that autograd saves. First the tensors of ``saved`` hold it; after ``move`` it is parked."""

    def __init__(self, context: Offloading) -> None:
        self.context, self.number = context, -1
        self.saved: weakref.WeakSet[_Saved] = weakref.WeakSet()
        self.parked: Parked | None = None
        self.raw: Tensor | None = None  # after loading

    def is_free(self) -> bool:
        """Whether only autograd holds it. A storage that was written to stays, so that backward raises."""
        pairs = [(saved.detached, saved.version) for saved in self.saved if saved.detached is not None]
        if any(tensor._version != version for tensor, version in pairs):
            return False
        tensors = [tensor for tensor, _ in pairs]
        del pairs
        return bool(tensors) and storage_holders(tensors[0]) == _ALONE - 1 + len(tensors)

    def move(self) -> None:
        """Start to offload it. If that raises, it stays in memory."""
        tensor = next(saved.detached for saved in self.saved if saved.detached is not None)
        target = self.context._imagined if isinstance(tensor, FakeTensor) else self.context.target
        self.parked = target.park(_raw(tensor))
        for saved in self.saved:
            saved.detached = None

    def start(self) -> None:
        if self.parked is not None:
            self.parked.start()

    def bytes(self) -> Tensor:
        """All its bytes, loaded again."""
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
    """One tensor that autograd saves: the tensor until its storage is offloaded, then its layout in the storage."""

    def __init__(self, storage: _Storage, tensor: Tensor) -> None:
        self.storage, self.version = storage, tensor._version
        self.detached: Tensor | None = tensor.detach()
        self.layout = (tensor.size(), tensor.stride(), tensor.storage_offset())
        self.dtype = tensor.dtype
        storage.saved.add(self)

    def tensor(self) -> Tensor:
        detached = self.detached
        if detached is None:
            return self.storage.bytes().view(self.dtype).as_strided(*self.layout)
        return unmodified(detached, self.version)


def unmodified(tensor: Tensor, version: int) -> Tensor:
    """Return a tensor that a hook saved for backward. Raise RuntimeError if it was modified, as torch does."""
    if tensor._version != version:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"{tensor.dtype} tensor of {list(tensor.shape)} is at version {tensor._version}; expected version "
            f"{version}. Write to a copy of it"
        )
    return tensor


# -- supported tensors -------------------------------------------------------------------------------------------------
def _is_leaf(tensor: Tensor) -> bool:
    """Whether it is a parameter, another leaf that requires a gradient, or a view of one."""
    root = tensor if tensor._base is None else tensor._base
    return isinstance(root, nn.Parameter) or (root.is_leaf and root.requires_grad)


def _is_plain(tensor: Tensor) -> bool:
    """Whether its values can be restored from its storage: no subclass, not sparse, no lazy conjugation."""
    return (
        type(tensor) in (Tensor, FakeTensor)
        and tensor.layout is torch.strided
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_quantized
        and tensor.untyped_storage().nbytes() % tensor.itemsize == 0
        and not torch.compiler.is_compiling()
    )


#: The result of ``storage_holders`` if one tensor holds the storage.
_ALONE = storage_holders(torch.empty(1))


def _raw(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage."""
    count = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.as_strided((count,), (1,), 0).view(torch.uint8)


@functools.cache
def _warn_of_cpu() -> None:
    user_warnings.warn(
        'memory.offload_activations("cpu"): the tensors are on the CPU already, so nothing is offloaded; give a '
        "directory to offload them to files"
    )
