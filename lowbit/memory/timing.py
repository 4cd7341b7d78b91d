"""What an op takes of time on this machine: the op itself is run on made-up tensors of its shapes, once, and the time
is kept in a file.

A step of training is many calls of few ops, since its blocks repeat. So the sum over a step costs far less than the
step, and holds no more than the tensors of one op at a time. Between runs a large buffer is read, as in a step other
ops come between two calls: tensors are not in the caches. Instructions are, since a step calls few ops: a short op is
run on other tensors just before.

Source: the operator benchmarks of torch.distributed._tools.runtime_estimator, which time each call of a step anew.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lowbit._version import __version__
from lowbit.files import read_json, write_json
from lowbit.machine import cpu_name

__all__ = ["Call", "Timings", "call_of", "timings"]

#: Ops of these namespaces are run; those of others may do more than compute.
_RUN = frozenset({"aten", "lowbit", "prims"})
#: The most bytes of the tensors of a call that is run, results included: a model may be far larger than the machine.
_MOST = 1 << 29
#: What is read between runs.
_FLUSH = 48 << 20
#: What of the environment decides how long lowbit's ops take.
_SETTINGS = frozenset({"LOWBIT_BACKEND", "LOWBIT_ISA", "LOWBIT_WITHOUT"})
#: A call is run this often; one that takes less than ``_SHORT`` seconds more often, and after a call on other tensors.
#: The least counts: what disturbs a run only adds to it, and a median of few took a disturbed calibration for what the
#: op takes.
_RUNS, _MORE, _SHORT = 3, 7, 1e-3


@dataclass(frozen=True)
class _Like:
    """What a tensor of a call is like. ``kind``: of its device, as steps on CUDA have tensors on the host too."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    kind: str

    def numbers(self) -> int:
        """How many the storage has."""
        if not all(self.shape):
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    def made(self, device: torch.device) -> Tensor:
        """A tensor that is like it: zeros where these may be codes or indices, else numbers from 0.25 to 0.75, which
        are in the domain of most functions. A root takes 20 times as long where it is NaN.
        """
        size = max(self.numbers(), 1)
        device = torch.device("cpu") if self.kind == "cpu" else device
        if self.dtype.is_floating_point and self.dtype.itemsize > 1:
            flat = (
                torch.rand(size, device=device, generator=torch.Generator(device)).mul_(0.5).add_(0.25).to(self.dtype)
            )
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
        given = (leaf.numbers() * leaf.dtype.itemsize for leaf in self.leaves if isinstance(leaf, _Like))
        return sum(given) + self.results


def call_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any = ()) -> Call | None:
    """The call of an op of the dispatcher, of tensors that may be fake, whose result is ``out``; None for one that is
    not run: a view, an op of somebody else, or one that reads what only its forward can have written.
    """
    if getattr(op, "is_view", False) or op.namespace not in _RUN:
        return None
    leaves, tree = tree_flatten((args, kwargs))
    if op.namespace == "aten" and "backward" in op._opname and any(map(_is_bytes, leaves)):
        return None  # a workspace that forward filled as a library likes, such as an RNN's: made up, it may crash
    given = {id(leaf) for leaf in leaves}
    made = (leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor) and id(leaf) not in given)
    results = sum(leaf.numel() * leaf.element_size() for leaf in made)
    return Call(op, tuple(_like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves), tree, results)


def _is_bytes(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype == torch.uint8


def _like(tensor: Tensor) -> _Like:
    return _Like(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device.type)


class Timings:
    """Seconds of calls on ``device``, kept in ``path``."""

    def __init__(self, device: torch.device, path: Path) -> None:
        self.device, self.path = device, path
        self._known: dict[Call, float | None] = {}
        self._kept = _read(path)
        self._new: dict[str, float] = {}
        self._flush: Tensor | None = None

    def seconds(self, call: Call) -> float | None:
        """What the call takes; None where it cannot be run on tensors that are made up."""
        if call not in self._known:
            key = _key(call)
            if key not in self._kept:
                found = self._measured(call)
                if found is None:
                    self._known[call] = None
                    return None
                self._kept[key] = self._new[key] = found
            self._known[call] = self._kept[key]
        return self._known[call]

    def save(self) -> None:
        """Add what is new to the file, and let go what was read between runs. A directory that cannot be written to
        keeps nothing.
        """
        self._flush = None
        if not self._new:
            return
        try:
            write_json(self.path, _read(self.path) | self._new)
        except OSError:
            return
        self._new.clear()

    def _measured(self, call: Call) -> float | None:
        part, share = _within(call, _MOST)
        if part.bytes > _MOST:
            return None
        try:
            with torch.no_grad(), torch.random.fork_rng(self._devices()):
                run = self._made(part)
                seconds = self._least(run, 1)
                if seconds < _SHORT:
                    seconds = self._least(run, _MORE, before=self._made(part))
                else:
                    seconds = min(seconds, self._least(run, _RUNS - 1))
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
            return None  # a rule for fake tensors may promise what the op itself refuses
        return seconds * share

    def _made(self, call: Call) -> Callable[[], object]:
        """The call, on tensors that are made up."""
        leaves = [leaf.made(self.device) if isinstance(leaf, _Like) else leaf for leaf in call.leaves]
        args, kwargs = tree_unflatten(leaves, call.tree)
        if call.op in _VALUES:
            _VALUES[call.op](args, kwargs)
        return lambda: call.op(*args, **kwargs)

    def _least(self, run: Callable[[], object], runs: int, before: Callable[[], object] = lambda: None) -> float:
        """Seconds of the fastest run. ``before`` runs just before each, when the caches were emptied."""
        found = []
        for _ in range(runs):
            self._empty_caches()
            before()
            self._wait()
            begin = time.perf_counter()
            run()
            self._wait()
            found.append(time.perf_counter() - begin)
        return min(found)

    def _empty_caches(self) -> None:
        if self._flush is None:
            self._flush = torch.zeros(_FLUSH // 4, device=self.device)
        self._flush.sum()

    def _devices(self) -> list[torch.device]:
        return [self.device] if self.device.type == "cuda" else []

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _spread_groups(args: Any, kwargs: Any) -> None:
    """Write to the ends of groups of a grouped product, so that all groups are as long."""
    a, b, ends = args[0], args[1], kwargs.get("offs", args[2] if len(args) > 2 else None)
    if ends is not None:
        total = b.shape[-1] if a.dim() == 3 else a.shape[-1] if b.dim() == 2 else a.shape[0]
        ends.copy_(torch.arange(1, len(ends) + 1, device=ends.device) * total // len(ends))


#: By op, what writes to its arguments the whole numbers that say how much is computed: with zeros it would be nothing.
_VALUES: dict[Any, Callable[[Any, Any], None]] = {torch.ops.aten._grouped_mm.default: _spread_groups}


def _within(call: Call, most: int) -> tuple[Call, float]:
    """A call of the first tensors of its lists, such as those of an optimizer's step, with at most so many bytes, and
    how many times as long the whole one takes.
    """
    if call.bytes <= most:
        return call, 1.0
    args, kwargs = tree_unflatten(list(call.leaves), call.tree)
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, list | tuple) and a and isinstance(a[0], _Like)]
    count = whole = min((len(a) for a in lists), default=1)
    while count > 1:
        count //= 2
        leaves, tree = tree_flatten(_cut((args, kwargs), whole, count))
        part = Call(call.op, tuple(leaves), tree, call.results * count // whole)
        if part.bytes <= most:
            return part, call.bytes / max(part.bytes, 1)
    return call, 1.0


def _cut(value: Any, whole: int, count: int) -> Any:
    """The first ``count`` of each list of ``whole``, of tensors and of the numbers that go with them."""
    if isinstance(value, _Like):
        return value
    if isinstance(value, dict):
        return {name: _cut(item, whole, count) for name, item in value.items()}
    if isinstance(value, list) and value and (len(value) == whole or isinstance(value[0], _Like)):
        return value[:count]
    if isinstance(value, list | tuple):
        return type(value)(_cut(item, whole, count) for item in value)
    return value


# -- the file ---------------------------------------------------------------------------------------------------------
def timings(device: torch.device) -> Timings:
    """The timings of a device by what decides them as it is now: threads, precision, torch, lowbit and its settings,
    and how this file measures.
    """
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    settings = sorted(f"{name}={value}" for name, value in os.environ.items() if name in _SETTINGS)
    decides = (
        kind, os.cpu_count(), torch.get_num_threads(), torch.backends.cpu.get_cpu_capability(), torch.__version__,
        torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(), __version__, *settings,
    )  # fmt: skip
    return _timings(device, " ".join(map(str, decides)))


@cache
def _timings(device: torch.device, decides: str) -> Timings:
    name = hashlib.blake2b(decides.encode() + Path(__file__).read_bytes(), digest_size=8).hexdigest()
    return Timings(device, _directory() / f"timings-{name}.json")


def _directory() -> Path:
    return Path(os.environ.get("LOWBIT_CACHE") or Path("~/.cache/lowbit").expanduser())


def _key(call: Call) -> str:
    text = f"{call.op} {call.leaves} {call.tree}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _read(path: Path) -> dict[str, float]:
    try:
        return {name: float(seconds) for name, seconds in read_json(path).items()}
    except (OSError, ValueError, TypeError):
        return {}
