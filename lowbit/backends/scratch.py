"""What a call allocates beside its results, on a GPU: its kernel runs on the meta device, where nothing is computed."""

from __future__ import annotations

import weakref
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowbit.backends import triton
from lowbit.backends.registry import BackendError, Impl, select
from lowbit.backends.replay import does
from lowbit.ops import OPS
from lowbit.torch_private import without_modes

__all__ = ["allocated"]

#: Backends whose host side runs on the meta device.
_BACKENDS = ("triton", "delegated")


class _Look(NamedTuple):
    """A tensor without its numbers."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


def allocated(op: str, call: Any) -> int:
    """Bytes that the kernel chosen for a call holds at most while it runs, beside arguments and results; 0 where
    kernels for the device are not here. ``call`` may be of fake tensors.
    """
    try:
        impl = select(op, call[0].device.type, call, empty=False)
    except BackendError:
        return 0
    if impl.backend not in _BACKENDS:
        return 0
    looks = tuple(
        _Look(tuple(value.shape), value.stride(), value.dtype)
        if isinstance(value, Tensor)
        else tuple(value)
        if isinstance(value, list)
        else value
        for value in call
    )
    return _allocated(impl, call[0].device, looks)


@lru_cache(maxsize=4096)
def _allocated(impl: Impl, device: torch.device, looks: tuple[Any, ...]) -> int:
    with without_modes(), torch.no_grad(), triton.arguments().standing_for(device):
        call = OPS[impl.op].args(*(one.empty() if isinstance(one, _Look) else one for one in looks))
        outs = tuple(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in OPS[impl.op].outputs(call))
        impl.run(outs, call)  # the first makes what is remembered, such as tables
        with _Watch([*outs, *(value for value in call if isinstance(value, Tensor))]) as watch:
            impl.run(outs, call)
    return int(watch.most if watch.computes else watch.all)


class _Watch(TorchDispatchMode):
    """Bytes of storages that come and go within: the most at a time, and of all, which a call that only starts kernels
    holds when it is replayed. ``known``: tensors that do not count.
    """

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = self.most = self.all = 0
        self.computes: bool = False
        self._open: dict[int, Any] = {t.untyped_storage()._cdata: None for t in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        self.computes |= does(func) == "computes"
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type == "meta":
                self._take(tensor.untyped_storage(), given)
        return out

    def _take(self, storage: Any, given: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._open or key in given:
            return
        self.held, self.all = self.held + size, self.all + size
        self.most = max(self.most, self.held)
        self._open[key] = weakref.ref(storage, lambda _: self._gone(key, size))

    def _gone(self, key: int, size: int) -> None:
        self.held -= size
        del self._open[key]
