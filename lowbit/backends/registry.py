"""Which kernel runs: a table of implementations, and a pure function of the call that picks one.

Selection takes the first implementation in ``ORDER`` for the device whose ``supports`` returns no reason against.
``use_backend`` narrows the table to one backend; where that one cannot serve, the call raises and says why.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowbit.op_calls import original
from lowbit.ops import OPS, Numerics
from lowbit.ops.spec import matrix_shape

__all__ = ["ORDER", "BackendError", "Explanation", "Impl", "Refusal", "add", "impls", "place", "select", "use_backend"]

#: Names of kernels, best first; bench/results/gpu.md has the times that decided. On a CPU Triton's are interpreted and
#: come last (``place``).
ORDER = (
    "triton_implicit",  # reads patches from images; all others lay patches out
    "delegated_fp8_wide",
    "delegated_fp8",
    "delegated_fp8_blocks",
    "triton_codes",
    "triton_codes_medium",
    "delegated_int8",
    "delegated_bf16",
    "delegated_rounded",
    "triton",
    "triton_apart",
    "cuda",
    "cpu_bf16",  # says no unless rounding of operands is allowed
    "cpu",
    "cpu_patches",
    "reference",
)

#: Fills contiguous outputs that it is given.
Run = Callable[[tuple[Tensor, ...], Any], None]


@dataclass(frozen=True)
class Impl:
    """One kernel for one op, as ``run(outs, call)``; ``backend`` is its family.

    ``fewest_rows``: of the first argument as a matrix; with fewer rows, the kernels behind it come first.
    """

    op: str
    name: str
    devices: tuple[str, ...]
    run: Run
    supports: Callable[[Any], str | None] = field(default=lambda call: None)
    numerics: Numerics = Numerics()
    fewest_rows: int = 1

    @property
    def backend(self) -> str:
        return self.name.split("_")[0]


@dataclass(frozen=True)
class Refusal:
    """Why an implementation would not serve a call."""

    impl: Impl
    reason: str


@dataclass(frozen=True)
class Explanation:
    """What would run for a call, what refused it, what stands behind, and which backends are absent."""

    op: str
    device: str
    chosen: Impl | None
    refused: tuple[Refusal, ...]
    behind: tuple[Impl, ...]
    absent: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.op} on {self.device}: {self.chosen.name if self.chosen else 'nothing'} would run"]
        lines += [f"  not {r.impl.name}: {r.reason}" for r in self.refused]
        lines += [f"  behind it: {impl.name}" for impl in self.behind]
        lines += [f"  absent: {name}: {reason}" for name, reason in self.absent.items()]
        return "\n".join(lines)


_table: dict[tuple[str, str], list[Impl]] = {}
_absent: dict[str, str] = {}
_known: set[str] = set()  # names of implementations, and of their backends
_forced: ContextVar[str | None] = ContextVar("lowbit_backend", default=None)

#: What ``dispatch`` has worked out for kinds of calls (``kind_of``); forgotten when kernels are added.
prepared: dict[Any, Any] = {}

#: Told +1 and -1 while a choice is open that kernels which choose for themselves must leave to this table.
announce: Callable[[int], object] = lambda change: None

#: The ops that ``explaining`` asks about.
_asked: ContextVar[tuple[str, ...]] = ContextVar("lowbit_asked", default=())


class BackendError(RuntimeError):
    """No implementation can serve the call."""


class _Answer(Exception):
    """Carries the answer of ``explaining`` out of the op that was asked about."""

    def __init__(self, explanation: Explanation):
        super().__init__(str(explanation))
        self.explanation = explanation


def place(impl: Impl, device: str) -> tuple[bool, int]:
    """Where an implementation stands among those for a device; the least is the best."""
    interpreted = device == "cpu" and impl.backend == "triton"
    return interpreted, ORDER.index(impl.name)


def add(rows: tuple[Impl, ...]) -> None:
    """Add implementations to the table.

    Raises:
        ValueError: For an unknown op, and for a name that ``ORDER`` does not have.
    """
    for row in rows:
        if row.op not in OPS:
            raise ValueError(f"implementation {row.name!r} is for unknown op {row.op!r}; known: {', '.join(OPS)}")
        if row.name not in ORDER:
            raise ValueError(
                f"implementation {row.name!r} of {row.op!r} has no place among the others; add it to ORDER of "
                f"lowbit/backends/registry.py"
            )
        prepared.clear()
        _known.update((row.name, row.backend))
        for device in row.devices:
            listed = _table.setdefault((row.op, device), [])
            listed.append(row)
            listed.sort(key=partial(place, device=device))
            if device == "cpu" and listed[0] is row and row.backend not in ("cpu", "reference"):
                announce(1)  # for good: C++ chooses among the kernels of the backend "cpu" alone


def set_absent(backend: str, reason: str) -> None:
    _absent[backend] = reason


def absent() -> dict[str, str]:
    """Backends that are not there, and how to get them."""
    return dict(_absent)


def impls(op: str, device: str = "cpu") -> tuple[Impl, ...]:
    """The implementations of ``op`` on a device type, best first. Raises ValueError for an unknown op."""
    if op not in OPS:
        raise ValueError(f"unknown op {op!r}; expected one of {', '.join(OPS)}")
    return tuple(_table.get((op, device), ()))


#: The backend that ``use_backend`` asked for, if any.
forced: Callable[[], str | None] = _forced.get


def matmul_precision() -> str:
    """torch's float32 matmul precision; ``highest`` where its newer settings differ from it, and it will not tell."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "highest"


def asking() -> bool:
    """Whether ``explaining`` waits for an op to pick its kernel."""
    return bool(_asked.get())


@contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Serve every lowbit op inside from one backend (``reference``, ``cpu``, ``cuda``, ``triton``,
    ``delegated``), or raise.

    ``None`` gives the choice back. It holds for this thread (and asyncio task) alone: others choose for themselves, but
    backward passes, whatever thread they run on, use the backend of their forward.
    """
    if name is not None and name not in _known:
        why = _absent.get(name, f"known backends: {', '.join(sorted(_known | set(_absent)))}")
        raise BackendError(f"backend {name!r} is not available: {why}")
    token = _forced.set(name)
    announce(1)
    try:
        yield
    finally:
        announce(-1)
        _forced.reset(token)


def candidates(op: str, device: str) -> list[Impl]:
    backend = _forced.get()
    rows = _table.get((op, device), [])
    return rows if backend is None else [impl for impl in rows if backend in (impl.backend, impl.name)]


def select(op: str, device: str, call: Any, empty: bool) -> Impl:
    """The implementation that serves ``call``. Raises BackendError, with every reason, if there is none.

    ``empty``: nothing is computed on, so that backends cannot differ; the reference serves, whichever is asked for.
    """
    rows = [i for i in _table.get((op, device), []) if i.name == "reference"] if empty else candidates(op, device)
    rows = _in_order(rows, call)
    if op in _asked.get():
        raise _Answer(_explain(op, device, call, rows))
    for impl in rows:
        if impl.supports(call) is None:
            if impl.name == "reference" and device != "cpu" and not empty and _forced.get() is None:
                _say_slow(op, device, call, rows)
            return impl
    raise BackendError(_why_none(op, device, call, rows))


def _say_slow(op: str, device: str, call: Any, rows: list[Impl]) -> None:
    """Warns that no kernel serves a call on a device, or raises where ``LOWBIT_STRICT=1`` asks for that."""
    reasons = [f"{impl.name}: {impl.supports(call)}" for impl in rows if impl.name != "reference"]
    reasons += [f"{name}: {reason}" for name, reason in absent().items() if name != "cpu"]
    text = f"lowbit.{op} runs on its reference on {device}, which is hundreds of times slower than a kernel: "
    text += "; ".join(reasons) or "there is none for it"
    if os.environ.get("LOWBIT_STRICT", "0") == "1":
        raise BackendError(f"{text}. LOWBIT_STRICT=1 forbids that; unset it, or use another format, shape or dtype")
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def kind_of(op: str, call: Any) -> Any:
    """All that checks, outputs and choice of a call depend on: what its tensors look like, what is no tensor, and the
    settings around it. None where nobody is to remember: on a CPU, where most calls are C++'s, and within ``explain``.
    """
    if call[0].device.type == "cpu" or op.startswith("optimizer_step") or _asked.get():
        return None  # an optimizer's factors are others in each step
    return look_of(op, call)


def look_of(op: str, call: Any) -> tuple[Any, ...]:
    """What a call looks like: all but the numbers in its tensors, and their addresses but for their alignment."""
    values: list[Any] = [op, _forced.get(), matmul_precision()]
    for value in call:
        if isinstance(value, Tensor):
            values += value.shape, value.stride(), value.dtype, value.device, value.data_ptr() % 16 == 0
        else:
            values.append(tuple(value) if isinstance(value, list) else value)
    return tuple(values)


def _in_order(rows: list[Impl], call: Any) -> list[Impl]:
    """Best first for this call: those that pay off from more rows on come last."""
    if all(row.fewest_rows == 1 for row in rows):
        return rows
    count = matrix_shape(call[0])[0]
    return sorted(rows, key=lambda row: row.fewest_rows > count)


def explaining(ops: tuple[str, ...], run: Callable[[], Any]) -> Explanation:
    """Call ``run`` up to the moment where one of ``ops`` would pick its kernel, and answer how it would pick."""
    token = _asked.set(ops)
    announce(1)
    try:
        run()
    except (_Answer, RuntimeError) as error:
        answer = original(error)
        if not isinstance(answer, _Answer):
            raise
        return answer.explanation
    finally:
        announce(-1)
        _asked.reset(token)
    raise RuntimeError(f"this call never reached lowbit.{' or lowbit.'.join(ops)}")


def _explain(op: str, device: str, call: Any, rows: list[Impl]) -> Explanation:
    refused: list[Refusal] = []
    for index, impl in enumerate(rows):
        reason = impl.supports(call)
        if reason is None:
            return Explanation(op, device, impl, tuple(refused), tuple(rows[index + 1 :]), absent())
        refused.append(Refusal(impl, reason))
    return Explanation(op, device, None, tuple(refused), (), absent())


def _why_none(op: str, device: str, call: Any, rows: list[Impl]) -> str:
    backend = _forced.get()
    asked = f"backend {backend!r}" if backend else f"device {device!r}"
    lines = [f"{asked} cannot run lowbit.{op} on {device}:"]
    lines += [f"  {impl.name}: {impl.supports(call)}" for impl in rows]
    if not rows:
        others = ", ".join(impl.name for impl in _table.get((op, device), [])) or "none"
        lines.append(f"  it has no kernel for this op on this device; implementations there are: {others}")
    lines.append(
        "leave out use_backend() to let lowbit choose" if backend else "move the tensors to a supported device"
    )
    return "\n".join(lines)
