"""Calls of ops that can be run again on synthetic tensors of the same shapes and strides, and files for the results.

A training step has many calls of few ops, since its blocks repeat. So measuring time and memory of its ops costs far
less than the step, and needs memory for the tensors of one op at a time.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lowbit._version import __version__
from lowbit.files import read_json, write_json
from lowbit.machine import cpu_name
from lowbit.memory import heap
from lowbit.memory.cost import Work, work
from lowbit.models.ties import storage
from lowbit.torch_private import without_modes

__all__ = [
    "FAILURES", "MOST", "Call", "CallCache", "Like", "Prepared", "call_of", "directory", "fewer_rows", "prepared",
    "setting", "shorter", "sources_of", "within",
]  # fmt: skip

#: Most bytes of the tensors of a call that is run, including results, since a model may be far larger than the machine.
MOST = 1 << 29
#: Random numbers that are drawn; larger tensors repeat them, since drawing takes longer than most ops.
_DRAWN = 1 << 20
#: Least whole number in the arguments of an op that is taken for a size if a tensor has such a size.
_SURELY_A_SIZE = 16
#: Errors of ops on synthetic tensors: a rule for fake tensors may accept arguments that the op itself rejects.
FAILURES = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)
#: Ops in these namespaces are run. Ops in other namespaces may have side effects.
_RUN = frozenset({"aten", "lowbit", "prims"})
#: Environment variables that select how lowbit's ops run.
_SETTINGS = frozenset({"LOWBIT_BACKEND", "LOWBIT_ISA", "LOWBIT_WITHOUT"})


# -- calls -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Like:
    """Description of a tensor of a call.

    Attributes:
        kind: Type of its device, since steps on CUDA have tensors on the host too.
        source: The call that made it and its index among the results. Used for workspaces of a library, because a
            kernel that reads a synthetic one may crash.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    source: tuple[Call, int] | None = None

    def numbers(self) -> int:
        """Return the number of elements of the storage."""
        if not all(self.shape):
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    def bytes(self) -> int:
        """Return the bytes of the storage."""
        return self.numbers() * self.dtype.itemsize

    def tensor(self, device: torch.device) -> Tensor:
        """Return a synthetic tensor: zeros if it may hold indices or quantized values, else numbers from 0.25 to 0.75.

        These are in the domain of most functions. With NaN, a square root takes 20 times as long.
        """
        if self.source is not None:
            results = tree_flatten(prepared(self.source[0], device)())[0]
            result: Tensor = results[self.source[1]]
            return result
        size = max(self.numbers(), 1)
        device = torch.device("cpu") if self.kind == "cpu" else device
        if self.dtype.is_floating_point and self.dtype.itemsize > 1:
            numbers = _numbers(self.dtype, device)
            flat = numbers[:size].clone() if size <= _DRAWN else numbers.repeat(-(-size // _DRAWN))[:size]
        else:
            flat = torch.zeros(size, dtype=torch.uint8, device=device)
            flat = flat.view(self.dtype) if self.dtype.itemsize == 1 else flat.to(self.dtype)
        return flat.as_strided(self.shape, self.stride)


@cache
def _numbers(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return random numbers from 0.25 to 0.75. The caller's generator is not used."""
    return torch.rand(_DRAWN, device=device, generator=torch.Generator(device)).mul_(0.5).add_(0.25).to(dtype)


class Call(NamedTuple):
    """A call of ``op``: its arguments, with a ``Like`` for each tensor, and the bytes of its ``results``."""

    op: Any
    leaves: tuple[Any, ...]
    tree: TreeSpec
    results: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of its tensors, including results."""
        return sum(leaf.bytes() for leaf in self.leaves if isinstance(leaf, Like)) + self.results

    @property
    def key(self) -> str:
        """Key of the call in files."""
        text = f"{self.op} {self.leaves} {self.tree}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def call_of(
    op: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any = (),
    sources: Mapping[int, tuple[Call, int]] | None = None,
) -> Call | None:
    """Return the call of a dispatcher op with result ``out``. Tensors may be fake.

    Args:
        op: The overload that was called.
        args: Its arguments.
        kwargs: Its keyword arguments.
        out: Its results.
        sources: By the address of a uint8 storage, the call that made it and its index among the results.

    Returns:
        The call, or None if it is not run: a view, an op of another library, or a backward that reads a uint8 workspace
            whose forward is not in ``sources``.
    """
    if getattr(op, "is_view", False) or op.namespace not in _RUN:
        return None
    leaves, tree = tree_flatten((args, kwargs))
    reads_bytes = op.namespace == "aten" and "backward" in op._opname
    origins = {id(leaf): (sources or {}).get(storage(leaf)) for leaf in leaves if reads_bytes and _is_bytes(leaf)}
    if None in origins.values():
        return None
    arguments = {id(leaf) for leaf in leaves}
    new = (leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor) and id(leaf) not in arguments)
    results = sum(leaf.numel() * leaf.element_size() for leaf in new)
    likes = tuple(_like(leaf, origins.get(id(leaf))) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return Call(op, likes, tree, results)


def _is_bytes(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype == torch.uint8


def sources_of(call: Call, out: Any) -> dict[int, tuple[Call, int]]:
    """Return the ``sources`` of ``call_of`` for the call's results."""
    return {storage(leaf): (call, place) for place, leaf in enumerate(tree_flatten(out)[0]) if _is_bytes(leaf)}


def _like(tensor: Tensor, source: tuple[Call, int] | None) -> Like:
    return Like(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device.type, source)


@dataclass(frozen=True)
class Prepared:
    """An op with synthetic arguments. Calling it runs the op."""

    op: Any
    args: Any
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        return self.op(*self.args, **self.kwargs)


def prepared(call: Call, device: torch.device) -> Prepared:
    """Create the synthetic tensors of a call. Raise one of ``FAILURES`` if that is not possible."""
    leaves = [leaf.tensor(device) if isinstance(leaf, Like) else leaf for leaf in call.leaves]
    args, kwargs = tree_unflatten(leaves, call.tree)
    if call.op in _VALUES:
        #: By op, a function that writes integer arguments on which the amount of work depends: with zeros it would be
        #: none.
        _VALUES[call.op](args, kwargs)
    return Prepared(call.op, args, kwargs)


def _spread_groups(args: Any, kwargs: Any) -> None:
    """Write the group offsets of a grouped matmul, so that all groups have equal size."""
    a, b, ends = args[0], args[1], kwargs.get("offs", args[2] if len(args) > 2 else None)
    if ends is not None:
        total = b.shape[-1] if a.dim() == 3 else a.shape[-1] if b.dim() == 2 else a.shape[0]
        ends.copy_(torch.arange(1, len(ends) + 1, device=ends.device) * total // len(ends))


#: By op, what writes to its arguments the whole numbers that say how much is computed: with zeros it would be nothing.
_VALUES: dict[Any, Callable[[Any, Any], None]] = {torch.ops.aten._grouped_mm.default: _spread_groups}


def within(call: Call, most: int) -> tuple[Call, float]:
    """Return a call of at most ``most`` bytes with fewer tensors in its lists, such as those of an optimizer step.

    The second result is the ratio of the full call's cost to it.
    """
    if call.bytes <= most:
        return call, 1.0
    args, kwargs = tree_unflatten(list(call.leaves), call.tree)
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, list | tuple) and a and isinstance(a[0], Like)]
    count = full = min((len(a) for a in lists), default=1)
    while count > 1:
        count //= 2
        leaves, tree = tree_flatten(_cut((args, kwargs), full, count))
        part = Call(call.op, tuple(leaves), tree, call.results * count // full)
        if part.bytes <= most:
            return part, call.bytes / max(part.bytes, 1)
    return call, 1.0


def fewer_rows(call: Call, most: int) -> tuple[Call, float]:
    """Return a call of at most ``most`` bytes with fewer rows in its tensors, and the ratio of rows.

    Rows are those of the largest tensor. Every tensor with the same number of rows is cut, and every list of sizes that
    starts with it. If a result does not shrink in proportion, the op does not scale with rows.
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


class Shorter(NamedTuple):
    """A call with smaller tensors, the ratio of the work, and the sizes that were cut."""

    call: Call
    ratio: float
    sizes: tuple[int, ...]


def shorter(
    call: Call, cost: Callable[[Work], float], least: int, rounds: int = 3, only: Container[int] | None = None
) -> Shorter:
    """Return a call with smaller tensors, such as of fewer tokens.

    A size is cut in all tensors that have it, so that their shapes still go together. If no size can be cut to half of
    the work or less, the result is the call itself.

    Args:
        call: The call.
        cost: Predicts the cost of some work, relative to the most that is allowed.
        least: A size is cut to no less, or to 1 if it is the number of samples: the first of three sizes or more.
        rounds: Number of sizes that may be cut, until the cost is at most 1.
        only: Sizes that may be cut. None: all.
    """
    full = _work_of(call)
    if full is None:
        return Shorter(call, 1.0, ())
    shortest, left, cut = call, cost(full), list[int]()
    for _ in range(rounds):
        if left <= 1:
            break
        sizes = [size for size in _sizes_of(shortest) if only is None or size in only]
        parts = [(size, _cut_size(shortest, size, left, least)) for size in sizes]
        costs = [(cost(less), size, part) for size, part in parts if part and (less := _work_of(part)) is not None]
        smallest, size, part = min(costs, key=lambda entry: entry[0], default=(left, 0, call))
        if smallest > left / 2:
            break
        shortest, left = part, smallest
        cut.append(size)
    return Shorter(shortest, cost(full) / left if cut else 1.0, tuple(cut))


def _sizes_of(call: Call) -> list[int]:
    """Return the sizes of the tensors, largest first."""
    return sorted({size for leaf in call.leaves if isinstance(leaf, Like) for size in leaf.shape}, reverse=True)


def _cut_size(call: Call, size: int, ratio: float, least: int) -> Call | None:
    """Return the call with ``size`` divided by ``ratio`` or what is possible. None if that is less than 2."""
    tensors = [leaf for leaf in call.leaves if isinstance(leaf, Like)]
    if any(len(leaf.shape) > 2 and leaf.shape[0] == size for leaf in tensors):
        least = 1
    count = max(int(size / max(ratio, 2.0)), least)
    if size < 2 * count:
        return None
    leaves = tuple(_resized(leaf, size, count) for leaf in call.leaves)
    return call._replace(leaves=leaves, results=call.results * count // size)


def _resized(leaf: Any, size: int, count: int) -> Any:
    """Return a leaf of a call with ``count`` instead of each ``size``. Strides keep their order.

    Small numbers stay, because they may be something else than a size.
    """
    if not isinstance(leaf, Like):
        return count if type(leaf) is int and leaf == size >= _SURELY_A_SIZE else leaf

    def stride(step: int) -> int:
        inner: int = sum(n == size and within < step for n, within in zip(leaf.shape, leaf.stride, strict=True))
        return int(step // size**inner * count**inner)

    shape = tuple(count if n == size else n for n in leaf.shape)
    return replace(leaf, shape=shape, stride=tuple(map(stride, leaf.stride)))


def _work_of(call: Call) -> Work | None:
    """Return the work of a call, or None if its op does not accept such shapes."""
    try:
        with without_modes(), torch.no_grad():
            leaves = [
                torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device="meta")
                if isinstance(leaf, Like) else leaf
                for leaf in call.leaves
            ]  # fmt: skip
            args, kwargs = tree_unflatten(leaves, call.tree)
            return work(call.op, args, kwargs, call.op(*args, **kwargs))
    except FAILURES:
        return None


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


def _cut(value: Any, full: int, count: int) -> Any:
    """Return the first ``count`` entries of each list of ``full`` tensors, and of numbers that belong to them."""
    if isinstance(value, Like):
        return value
    if isinstance(value, dict):
        return {name: _cut(item, full, count) for name, item in value.items()}
    if isinstance(value, list) and value and (len(value) == full or isinstance(value[0], Like)):
        return value[:count]
    if isinstance(value, list | tuple):
        return type(value)(_cut(item, full, count) for item in value)
    return value


# -- files -------------------------------------------------------------------------------------------------------------
_Value = TypeVar("_Value")


class CallCache(Generic[_Value]):
    """Values of calls, cached in the JSON file ``path``. ``read`` converts a JSON value."""

    def __init__(self, path: Path, read: Callable[[Any], _Value]) -> None:
        self.path, self._read = path, read
        self._values = self._load()
        self._new: dict[str, _Value] = {}

    def get(self, call: Call) -> _Value | None:
        return self._values.get(call.key)

    def put(self, call: Call, value: _Value) -> None:
        self._values[call.key] = self._new[call.key] = value

    def save(self) -> None:
        """Write new values to the file. If the directory is not writable, nothing is saved."""
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
    """Return the settings that decide how ops run on a device: threads, precision, versions, environment."""
    processor = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    settings = sorted(f"{name}={value}" for name, value in os.environ.items() if name in _SETTINGS)
    values = (
        processor, os.cpu_count(), torch.get_num_threads(), torch.backends.cpu.get_cpu_capability(), torch.__version__,
        torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(), __version__, *settings,
        *(["freed memory goes back"] if heap.returns_freed() else []),
    )  # fmt: skip
    return " ".join(map(str, values))


def directory() -> Path:
    """Return the directory of the files."""
    return Path(os.environ.get("LOWBIT_CACHE") or Path("~/.cache/lowbit").expanduser())
