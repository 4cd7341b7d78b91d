"""The scratch memory of a GPU call, measured by running the host side of its kernel on the meta device."""

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


class _Layout(NamedTuple):
    """Shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


def allocated(op: str, call: Any, device: torch.device) -> int:
    """Peak bytes that the kernel selected for a call on ``device`` allocates, without arguments and results.

    Fake tensors of any device are supported. The result is 0 if this machine has no kernels for the device.
    """
    try:
        impl = select(op, device.type, call, empty=False)
    except BackendError:
        return 0
    if impl.backend not in _BACKENDS:
        return 0
    values = tuple(
        _Layout(tuple(value.shape), value.stride(), value.dtype)
        if isinstance(value, Tensor)
        else tuple(value)
        if isinstance(value, list)
        else value
        for value in call
    )
    return _allocated(impl, device, values)


@lru_cache(maxsize=4096)
def _allocated(impl: Impl, device: torch.device, values: tuple[Any, ...]) -> int:
    with without_modes(), torch.no_grad(), triton.arguments().standing_for(device):
        call = OPS[impl.op].args(*(value.empty() if isinstance(value, _Layout) else value for value in values))
        outs = tuple(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in OPS[impl.op].outputs(call))
        impl.run(outs, call)  # the first call also allocates what is cached, such as tables
        with _Watch([*outs, *(value for value in call if isinstance(value, Tensor))]) as watch:
            impl.run(outs, call)
    return int(watch.peak if watch.computes else watch.total)


class _Watch(TorchDispatchMode):
    """Bytes of the storages that are allocated inside: ``peak`` at a time, and ``total``.

    A replay allocates the total at once. ``known``: tensors that do not count.
    """

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = self.total = 0
        self.computes: bool = False
        self._open: dict[int, Any] = {t.untyped_storage()._cdata: None for t in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        self.computes |= does(func) == "computes"
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type == "meta":
                self._allocate(tensor.untyped_storage(), inputs)
        return out

    def _allocate(self, storage: Any, inputs: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._open or key in inputs:
            return
        self.live, self.total = self.live + size, self.total + size
        self.peak = max(self.peak, self.live)
        self._open[key] = weakref.ref(storage, lambda _: self._free(key, size))

    def _free(self, key: int, size: int) -> None:
        self.live -= size
        del self._open[key]
