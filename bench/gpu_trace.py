"""Records the kernel launches and torch ops of a GPU call, without a GPU.

The host side of the selected kernel runs on tensors without data. A fake device is ``cuda:N`` with the architecture N,
such as 90, so that caches by device are correct for each architecture.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from lowbit.backends import delegated, registry, triton
from lowbit.kernels.spec import Launch
from lowbit.ops import OPS

__all__ = ["TorchOp", "Trace", "check", "device", "empty", "pretended", "trace"]


class TorchOp(NamedTuple):
    """A torch op: its name, the bytes of its tensors, and the shapes of its operands."""

    name: str
    bytes: int
    shapes: list[tuple[int, ...]]


class Trace(NamedTuple):
    """The implementation selected for a call, the reasons against others, and its launches and ops in order."""

    impl: str
    refused: list[str]
    started: list[Launch | TorchOp]


def device(architecture: int) -> torch.device:
    """The fake device of an architecture."""
    return torch.device("cuda", architecture)


def _capability(of: torch.device) -> tuple[int, int]:
    return divmod(of.index or 0, 10)


class _Mode(FakeTensorMode):
    """A fake mode that never initializes CUDA, also with fake devices."""

    @property
    def avoid_device_init(self) -> bool:
        return True


@cache
def _mode() -> FakeTensorMode:
    """One mode per process: backends cache tensors by device, and fake tensors of two modes do not mix."""
    return _Mode(allow_non_fake_inputs=True)


class _Device(TorchDispatchMode):
    """Records ops on the device, and computes ops on the host, such as format tables."""

    def __init__(self, started: list[Launch | TorchOp]) -> None:
        super().__init__()
        self.started = started

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        place = kwargs.get("device")
        if not any(isinstance(leaf, FakeTensor) for leaf in given) and (place is None or place.type == "cpu"):
            with _disable_current_modes():
                return func(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, self._fake, (args, kwargs))
        out = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if made and not _moves_nothing(func):
            name = func._schema.name.removeprefix("aten::")
            reads = not name.startswith("new_") and not name.endswith("_like")
            read = sum(t.nbytes for t in given if isinstance(t, FakeTensor)) if reads else 0
            written = sum(t.nbytes for t in made if not any(t is one for one in given))
            self.started.append(TorchOp(name, read + written, [tuple(t.shape) for t in given]))
        return out

    def _fake(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else _mode().from_tensor(tensor)


class _Methods(TorchFunctionMode):
    """Replaces methods that need a device guard, which torch without CUDA lacks, by ops that do not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not args or not isinstance(args[0], FakeTensor) or func not in _GUARDED:
            return func(*args, **(kwargs or {}))
        return _GUARDED[func](*args)


def _indexed(x: Tensor, index: Any) -> Tensor:
    axis = 0
    for one in index if isinstance(index, tuple) else (index,):
        if isinstance(one, Tensor):
            x = torch.ops.aten.index(x, [None] * axis + [one])
        elif isinstance(one, int):
            x = x.select(axis, one)
            continue
        elif one is None:
            x = x.unsqueeze(axis)
        elif one != slice(None):
            x = torch.ops.aten.slice(x, axis, one.start, one.stop, one.step or 1)
        axis += 1
    return x


def _copy(x: Tensor, value: Tensor) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.aten.copy_(x, value)


_GUARDED: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _indexed,
    Tensor.__setitem__: lambda x, index, value: _copy(_indexed(x, index), value),
    Tensor.contiguous: lambda x: x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format),
}


def _moves_nothing(func: Any) -> bool:
    """Whether an op is a view or only allocates."""
    name = func._schema.name
    return func.is_view or "::empty" in name or "::new_empty" in name or name in ("aten::detach", "aten::_unsafe_view")


@contextmanager
def pretended(precision: str = "highest") -> Iterator[None]:
    """A context with registered GPU kernels and fake devices. ``precision``: torch's float32 matmul precision."""
    table = {key: list(rows) for key, rows in registry._table.items()}
    for row in delegated.IMPLS:
        rows = table[row.op, "cuda"]
        if row not in rows:
            rows.append(row)
            rows.sort(key=lambda impl: registry.place(impl, "cuda"))
    before = torch.get_float32_matmul_precision()
    with ExitStack() as stack:
        for where, name, value in (
            (registry, "_table", table), (triton, "capability", _capability),
            (torch.cuda, "get_device_capability", _capability), (torch.cuda, "is_available", lambda: True),
            (torch.version, "cuda", torch.version.cuda or "13.0"),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(where, name, value))
        stack.enter_context(mock.patch.dict("os.environ", LOWBIT_STRICT="0"))
        torch.set_float32_matmul_precision(precision)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


def empty(shape: tuple[int, ...], dtype: torch.dtype, architecture: int) -> Tensor:
    """A tensor without data on the fake device of an architecture."""
    with _mode():
        return torch.empty(shape, dtype=dtype, device=device(architecture))


def check(op: str, call: Any) -> None:
    """Check a call with tensors of ``empty``. Raises ValueError and TypeError if no kernel could compute it."""
    with _mode(), _Methods():
        OPS[op].check(call)


def trace(op: str, call: Any) -> Trace:
    """Trace a call with tensors of ``empty``, inside ``pretended``. The reference has no launches.

    Raises ValueError and TypeError for a call that no kernel could compute.
    """
    spec = OPS[op]
    check(op, call)
    with warnings.catch_warnings(), _mode(), _Methods():
        warnings.simplefilter("ignore")  # the reference warns that it is slow
        impl = registry.select(op, "cuda", call, empty=False)
        rows = registry._in_order(registry.candidates(op, "cuda"), call)
        refused = [f"{row.name}: {row.supports(call)}" for row in rows[: rows.index(impl)]]
    started: list[Launch | TorchOp] = []
    for _ in range(0 if impl.backend == "reference" else 2):  # the first call fills caches, such as tables
        started.clear()
        with (
            _mode(),
            _Device(started),
            _Methods(),
            mock.patch.object(triton, "start", lambda some, at: started.extend(some)),
        ):
            outs = tuple(torch.empty(shape, dtype=dtype, device=call[0].device) for shape, dtype in spec.outputs(call))
            impl.run(outs, call)
    return Trace(impl.name, refused, started)
