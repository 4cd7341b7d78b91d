"""Kernel selection: the table of implementations, and the rules that pick one for a call.

The first implementation in ``ORDER`` runs that exists for the device and whose ``supports`` returns None.
``use_backend`` restricts the table to one backend; if that does not support a call, the call raises with the reasons.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from lowbit import scaling
from lowbit.op_calls import original
from lowbit.ops import OPS, Numerics
from lowbit.ops.spec import matrix_shape

__all__ = ["ORDER", "BackendError", "Explanation", "Impl", "Refusal", "add", "impls", "place", "select", "use_backend"]

#: Names of kernels, best first, by the times in bench/results/gpu.md. On a CPU Triton kernels are interpreted and come
#: last (``place``).
ORDER = (
    "triton_implicit",  # reads patches from the image; all other kernels materialize patches
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
    "cpu_bf16",  # only if rounding of operands to bf16 is allowed
    "cpu",
    "cpu_patches",
    "reference",
)

#: A kernel: fills the contiguous outputs.
Run = Callable[[tuple[Tensor, ...], Any], None]


@dataclass(frozen=True)
class Impl:
    """A kernel for an op."""

    #: Name of the op.
    op: str
    #: Name of the kernel, an entry of ``ORDER``.
    name: str
    #: Device types.
    devices: tuple[str, ...]
    #: ``run(outs, call)`` fills the outputs.
    run: Run
    #: ``supports(call)`` returns None, or the reason why the kernel cannot run the call.
    supports: Callable[[Any], str | None] = field(default=lambda call: None)
    #: Precision in which a float matmul computes, which determines its error bound.
    numerics: Numerics = Numerics()
    #: With fewer rows of the first argument, later kernels are preferred.
    fewest_rows: int = 1

    @property
    def backend(self) -> str:
        """Name of its backend."""
        return self.name.split("_")[0]


@dataclass(frozen=True)
class Refusal:
    """An implementation that does not support a call, and the reason."""

    impl: Impl
    reason: str


@dataclass(frozen=True)
class Explanation:
    """The result of ``explain``; ``print`` shows it as text."""

    #: Name of the op.
    op: str
    #: Device type.
    device: str
    #: The implementation that would run; None if there is none.
    chosen: Impl | None
    #: Implementations with a higher priority that do not support the call.
    refused: tuple[Refusal, ...]
    #: Implementations with a lower priority.
    behind: tuple[Impl, ...]
    #: Backends that are not available, with the reason.
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

#: Cache of ``dispatch`` by ``call_key``; cleared when kernels are added.
prepared: dict[Any, Any] = {}

#: Called with +1 and -1 around contexts in which C++ must leave the selection of kernels to this table.
announce: Callable[[int], object] = lambda change: None

#: The ops whose selection ``explaining`` intercepts.
_asked: ContextVar[tuple[str, ...]] = ContextVar("lowbit_asked", default=())


class BackendError(RuntimeError):
    """No implementation supports the call, or the backend is not available."""


class _Answer(Exception):
    """Carries the Explanation out of the op."""

    def __init__(self, explanation: Explanation):
        super().__init__(str(explanation))
        self.explanation = explanation


def place(impl: Impl, device: str) -> tuple[bool, int]:
    """Sort key of implementations for a device, best first."""
    interpreted = device == "cpu" and impl.backend == "triton"
    return interpreted, ORDER.index(impl.name)


@cache
def _scheme_fields(op: str) -> tuple[str, ...]:
    """The arguments of an op that name schemes."""
    return tuple(name for name in OPS[op].args._fields if name == "other" or name.endswith("scheme"))


def _supports(op: str, inner: Callable[[Any], str | None], call: Any) -> str | None:
    """``inner(call)``, or the reason if only the reference supports a scheme of the call."""
    for name in _scheme_fields(op):
        text = getattr(call, name)
        if text is not None and scaling.scheme(text).reference_only:
            return f"only the reference supports {text}, which has minima or superblocks"
    return inner(call)


def add(rows: tuple[Impl, ...]) -> None:
    """Adds implementations to the table. Schemes with minima or superblocks are refused, except by the reference.

    Raises:
        ValueError: The op is unknown, or the name is not in ``ORDER``.
    """
    for row in rows:
        if row.op not in OPS:
            raise ValueError(f"implementation {row.name!r} is for unknown op {row.op!r}; known: {', '.join(OPS)}")
        if row.name not in ORDER:
            raise ValueError(
                f"implementation {row.name!r} of {row.op!r} is not in ORDER; add it in lowbit/backends/registry.py"
            )
        if row.name != "reference" and not row.op.startswith("optimizer_step"):  # which checks the schemes of moments
            row = replace(row, supports=partial(_supports, row.op, row.supports))
        prepared.clear()
        _known.update((row.name, row.backend))
        for device in row.devices:
            rows_of_op = _table.setdefault((row.op, device), [])
            rows_of_op.append(row)
            rows_of_op.sort(key=partial(place, device=device))
            if device == "cpu" and rows_of_op[0] is row and row.backend not in ("cpu", "reference"):
                announce(1)  # permanently: C++ only selects among the kernels of the backend "cpu"


def set_absent(backend: str, reason: str) -> None:
    _absent[backend] = reason


def absent() -> dict[str, str]:
    """Backends that are not available, with the reason and remedy."""
    return dict(_absent)


def impls(op: str, device: str = "cpu") -> tuple[Impl, ...]:
    """Lists the implementations of an op.

    Args:
        op: Name of the op, such as ``"quantize"``.
        device: Device type.

    Returns:
        The implementations for this device, best first.

    Raises:
        ValueError: The op is unknown.
    """
    if op not in OPS:
        raise ValueError(f"unknown op {op!r}; expected one of {', '.join(OPS)}")
    return tuple(_table.get((op, device), ()))


#: The backend that ``use_backend`` set, or None.
forced: Callable[[], str | None] = _forced.get


def matmul_precision() -> str:
    """torch's float32 matmul precision; ``highest`` if torch raises because its newer settings disagree."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "highest"


def asking() -> bool:
    """Whether ``explaining`` is running."""
    return bool(_asked.get())


@contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Context in which all lowbit ops run on one backend, or raise BackendError.

    It applies to this thread (and asyncio task). Backward passes run on the backend of their forward, in any thread.

    Args:
        name: ``"reference"``, ``"cpu"``, ``"cuda"``, ``"triton"``, ``"delegated"`` or the name of a kernel. None
            restores the automatic selection.

    Raises:
        BackendError: The backend is not available. Inside, calls raise it if the backend does not support them.

    Example:
        ``with lb.use_backend("reference"): y = lb.quantize(x, "mxfp8")``
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
    """The implementations that ``use_backend`` permits, best first."""
    backend = _forced.get()
    rows = _table.get((op, device), [])
    return rows if backend is None else [impl for impl in rows if backend in (impl.backend, impl.name)]


def select(op: str, device: str, call: Any, empty: bool) -> Impl:
    """The implementation that runs ``call``. ``empty`` tensors always use the reference.

    Raises:
        BackendError: No implementation supports the call; the message has all reasons.
    """
    rows = [i for i in _table.get((op, device), []) if i.name == "reference"] if empty else candidates(op, device)
    rows = _in_order(rows, call)
    if op in _asked.get():
        raise _Answer(_explain(op, device, call, rows))
    for impl in rows:
        if impl.supports(call) is None:
            if impl.name == "reference" and device != "cpu" and not empty and _forced.get() is None:
                _warn_slow(op, device, call, rows)
            return impl
    raise BackendError(_why_none(op, device, call, rows))


def _warn_slow(op: str, device: str, call: Any, rows: list[Impl]) -> None:
    """Warns that only the reference supports a call; raises BackendError with ``LOWBIT_STRICT=1``."""
    reasons = [f"{impl.name}: {impl.supports(call)}" for impl in rows if impl.name != "reference"]
    reasons += [f"{name}: {reason}" for name, reason in absent().items() if name != "cpu"]
    text = f"lowbit.{op} runs on its reference on {device}, which is hundreds of times slower than a kernel: "
    text += "; ".join(reasons) or "it has no kernel"
    if os.environ.get("LOWBIT_STRICT", "0") == "1":
        raise BackendError(f"{text}. LOWBIT_STRICT=1 forbids that; unset it, or use another format, shape or dtype")
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def call_key(op: str, call: Any) -> Any:
    """The key under which checks, outputs and selection of a call are cached, or None.

    Not cached: calls on a CPU (most never reach Python), optimizer steps, whose factors change in each step, and calls
    inside ``explain``.
    """
    if call[0].device.type == "cpu" or op.startswith("optimizer_step") or _asked.get():
        return None
    return call_signature(op, call)


def call_signature(op: str, call: Any) -> tuple[Any, ...]:
    """A call and its settings without the data of tensors: their metadata and the alignment of their addresses."""
    values: list[Any] = [op, _forced.get(), matmul_precision()]
    for value in call:
        if isinstance(value, Tensor):
            values += value.shape, value.stride(), value.dtype, value.device, value.data_ptr() % 16 == 0
        else:
            values.append(tuple(value) if isinstance(value, list) else value)
    return tuple(values)


def _in_order(rows: list[Impl], call: Any) -> list[Impl]:
    """The implementations sorted for this call: those that need more rows to be faster come last."""
    if all(row.fewest_rows == 1 for row in rows):
        return rows
    count = matrix_shape(call[0])[0]
    return sorted(rows, key=lambda row: row.fewest_rows > count)


def explaining(ops: tuple[str, ...], run: Callable[[], Any]) -> Explanation:
    """Calls ``run`` until one of ``ops`` selects its kernel, and returns the Explanation of this selection."""
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
    subject = f"backend {backend!r}" if backend else f"device {device!r}"
    lines = [f"{subject} cannot run lowbit.{op} on {device}:"]
    lines += [f"  {impl.name}: {impl.supports(call)}" for impl in rows]
    if not rows:
        names = ", ".join(impl.name for impl in _table.get((op, device), [])) or "none"
        lines.append(f"  it has no kernel for this op on this device; implementations: {names}")
    lines.append("remove use_backend() to let lowbit choose" if backend else "move the tensors to a supported device")
    return "\n".join(lines)
