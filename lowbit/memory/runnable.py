"""Calls of ops that can be run again, on made-up tensors of their shapes and strides, and files of what that tells.

A step of training is many calls of few ops, since its blocks repeat. So what its ops take of time and of memory costs
far less to measure than the step, and holds no more than the tensors of one op at a time.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lowbit._version import __version__
from lowbit.files import read_json, write_json
from lowbit.machine import cpu_name
from lowbit.memory import heap
from lowbit.models.ties import storage

__all__ = [
    "FAILURES", "MOST", "Call", "Kept", "Like", "Made", "call_of", "directory", "fewer_rows", "made", "setting",
    "sources_of", "within",
]  # fmt: skip

#: The most bytes of the tensors of a call that is run, results included: a model may be far larger than the machine.
MOST = 1 << 29
#: What an op raises on tensors that are made up: a rule for fake tensors may promise what the op itself refuses.
FAILURES = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)
#: Ops of these namespaces are run; those of others may do more than compute.
_RUN = frozenset({"aten", "lowbit", "prims"})
#: What of the environment decides how lowbit's ops run.
_SETTINGS = frozenset({"LOWBIT_BACKEND", "LOWBIT_ISA", "LOWBIT_WITHOUT"})


# -- calls -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Like:
    """What a tensor of a call is like.

    Attributes:
        kind: The type of its device, as steps on CUDA have tensors on the host too.
        source: The call that made it and the place among its results, of a workspace that a library filled as it
            likes: made up, it may crash what reads it.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    source: tuple[Call, int] | None = None

    def numbers(self) -> int:
        """How many the storage has."""
        if not all(self.shape):
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    def bytes(self) -> int:
        """Of the storage."""
        return self.numbers() * self.dtype.itemsize

    def made(self, device: torch.device) -> Tensor:
        """A tensor that is like it: zeros where these may be codes or indices, else numbers from 0.25 to 0.75, which
        are in the domain of most functions. A root takes 20 times as long where it is NaN.
        """
        if self.source is not None:
            results = tree_flatten(made(self.source[0], device)())[0]
            result: Tensor = results[self.source[1]]
            return result
        size = max(self.numbers(), 1)
        device = torch.device("cpu") if self.kind == "cpu" else device
        if self.dtype.is_floating_point and self.dtype.itemsize > 1:
            numbers = torch.rand(size, device=device, generator=torch.Generator(device))  # the caller's draw nothing
            flat = numbers.mul_(0.5).add_(0.25).to(self.dtype)
        else:
            flat = torch.zeros(size, dtype=torch.uint8, device=device)
            flat = flat.view(self.dtype) if self.dtype.itemsize == 1 else flat.to(self.dtype)
        return flat.as_strided(self.shape, self.stride)


class Call(NamedTuple):
    """A call of ``op``, with what its tensors are like in their place, and the bytes of its ``results``."""

    op: Any
    leaves: tuple[Any, ...]
    tree: TreeSpec
    results: int = 0

    @property
    def bytes(self) -> int:
        """Of its tensors, results included."""
        return sum(leaf.bytes() for leaf in self.leaves if isinstance(leaf, Like)) + self.results

    @property
    def key(self) -> str:
        """A name for files."""
        text = f"{self.op} {self.leaves} {self.tree}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def call_of(
    op: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any = (),
    sources: Mapping[int, tuple[Call, int]] | None = None,
) -> Call | None:
    """The call of an op of the dispatcher, of tensors that may be fake, whose result is ``out``.

    Args:
        op: The overload that was called.
        args: Its arguments.
        kwargs: Its keyword arguments.
        out: Its results.
        sources: By the address of a storage of bytes, the call that made it and its place among the results.

    Returns:
        The call, or None for one that is not run: a view, an op of somebody else, or a backward that reads bytes that
        only its forward can have written, if that is not among ``sources``.
    """
    if getattr(op, "is_view", False) or op.namespace not in _RUN:
        return None
    leaves, tree = tree_flatten((args, kwargs))
    reads_bytes = op.namespace == "aten" and "backward" in op._opname
    origins = {id(leaf): (sources or {}).get(storage(leaf)) for leaf in leaves if reads_bytes and _is_bytes(leaf)}
    if None in origins.values():
        return None
    given = {id(leaf) for leaf in leaves}
    new = (leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor) and id(leaf) not in given)
    results = sum(leaf.numel() * leaf.element_size() for leaf in new)
    likes = tuple(_like(leaf, origins.get(id(leaf))) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return Call(op, likes, tree, results)


def _is_bytes(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype == torch.uint8


def sources_of(call: Call, out: Any) -> dict[int, tuple[Call, int]]:
    """What ``call_of`` takes as ``sources`` of the call's results."""
    return {storage(leaf): (call, place) for place, leaf in enumerate(tree_flatten(out)[0]) if _is_bytes(leaf)}


def _like(tensor: Tensor, source: tuple[Call, int] | None) -> Like:
    return Like(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device.type, source)


@dataclass(frozen=True)
class Made:
    """An op with arguments that were made up. Calling it runs the op."""

    op: Any
    args: Any
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        return self.op(*self.args, **self.kwargs)


def made(call: Call, device: torch.device) -> Made:
    """What runs the call, on tensors that are made up now. Raises one of ``FAILURES`` if they cannot be."""
    leaves = [leaf.made(device) if isinstance(leaf, Like) else leaf for leaf in call.leaves]
    args, kwargs = tree_unflatten(leaves, call.tree)
    if call.op in _VALUES:
        _VALUES[call.op](args, kwargs)
    return Made(call.op, args, kwargs)


def _spread_groups(args: Any, kwargs: Any) -> None:
    """Write to the ends of groups of a grouped product, so that all groups are as long."""
    a, b, ends = args[0], args[1], kwargs.get("offs", args[2] if len(args) > 2 else None)
    if ends is not None:
        total = b.shape[-1] if a.dim() == 3 else a.shape[-1] if b.dim() == 2 else a.shape[0]
        ends.copy_(torch.arange(1, len(ends) + 1, device=ends.device) * total // len(ends))


#: By op, what writes to its arguments the whole numbers that say how much is computed: with zeros it would be nothing.
_VALUES: dict[Any, Callable[[Any, Any], None]] = {torch.ops.aten._grouped_mm.default: _spread_groups}


def within(call: Call, most: int) -> tuple[Call, float]:
    """A call of the first tensors of its lists, such as those of an optimizer's step, with at most so many bytes, and
    how many times as much the whole one takes.
    """
    if call.bytes <= most:
        return call, 1.0
    args, kwargs = tree_unflatten(list(call.leaves), call.tree)
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, list | tuple) and a and isinstance(a[0], Like)]
    count = whole = min((len(a) for a in lists), default=1)
    while count > 1:
        count //= 2
        leaves, tree = tree_flatten(_cut((args, kwargs), whole, count))
        part = Call(call.op, tuple(leaves), tree, call.results * count // whole)
        if part.bytes <= most:
            return part, call.bytes / max(part.bytes, 1)
    return call, 1.0


def fewer_rows(call: Call, most: int) -> tuple[Call, float]:
    """A call of the first rows of its tensors, with at most so many bytes, and how many times as much the whole has.

    Rows are those of its largest tensor: every tensor with as many is cut, and every list of sizes that begins so. A
    result that does not shrink with them shows that the op does otherwise.
    """
    largest = max((leaf for leaf in call.leaves if isinstance(leaf, Like)), key=Like.bytes, default=None)
    rows = count = largest.shape[0] if largest is not None and largest.shape else 1
    args, kwargs = tree_unflatten(list(call.leaves), call.tree)
    while count > 1:
        count = -(-count // 2)
        leaves, tree = tree_flatten(_first_rows((args, kwargs), rows, count))
        part = Call(call.op, tuple(leaves), tree, call.results * count // rows)
        if part.bytes <= most:
            return part, rows / count
    return call, 1.0


def _first_rows(value: Any, rows: int, count: int) -> Any:
    if isinstance(value, Like):
        return replace(value, shape=(count, *value.shape[1:])) if value.shape[:1] == (rows,) else value
    if isinstance(value, dict):
        return {name: _first_rows(item, rows, count) for name, item in value.items()}
    if isinstance(value, list | tuple):
        cut = [_first_rows(item, rows, count) for item in value]
        sizes = isinstance(value, list) and len(value) > 1 and all(isinstance(item, int) for item in value)
        return type(value)([count, *cut[1:]] if sizes and value[0] == rows else cut)
    return value


def _cut(value: Any, whole: int, count: int) -> Any:
    """The first ``count`` of each list of ``whole``, of tensors and of the numbers that go with them."""
    if isinstance(value, Like):
        return value
    if isinstance(value, dict):
        return {name: _cut(item, whole, count) for name, item in value.items()}
    if isinstance(value, list) and value and (len(value) == whole or isinstance(value[0], Like)):
        return value[:count]
    if isinstance(value, list | tuple):
        return type(value)(_cut(item, whole, count) for item in value)
    return value


# -- files -------------------------------------------------------------------------------------------------------------
_Value = TypeVar("_Value")


class Kept(Generic[_Value]):
    """Values of calls by their keys, kept in the JSON file ``path``. ``read`` makes a value of what JSON has of it."""

    def __init__(self, path: Path, read: Callable[[Any], _Value]) -> None:
        self.path, self._read = path, read
        self._values = self._load()
        self._new: dict[str, _Value] = {}

    def get(self, call: Call) -> _Value | None:
        return self._values.get(call.key)

    def put(self, call: Call, value: _Value) -> None:
        self._values[call.key] = self._new[call.key] = value

    def save(self) -> None:
        """Add what is new to the file. A directory that cannot be written to keeps nothing."""
        if not self._new:
            return
        try:
            write_json(self.path, self._load() | self._new)
        except OSError:
            return
        self._new.clear()

    def _load(self) -> dict[str, _Value]:
        try:
            return {name: self._read(value) for name, value in read_json(self.path).items()}
        except (OSError, ValueError, TypeError):
            return {}


def setting(device: torch.device) -> str:
    """What decides how ops of a device run, as it is now: threads, precision, torch, lowbit and its settings."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    settings = sorted(f"{name}={value}" for name, value in os.environ.items() if name in _SETTINGS)
    decides = (
        kind, os.cpu_count(), torch.get_num_threads(), torch.backends.cpu.get_cpu_capability(), torch.__version__,
        torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(), __version__, *settings,
        *(["freed memory goes back"] if heap.returns_freed() else []),
    )  # fmt: skip
    return " ".join(map(str, decides))


def directory() -> Path:
    """Of the files."""
    return Path(os.environ.get("LOWBIT_CACHE") or Path("~/.cache/lowbit").expanduser())
