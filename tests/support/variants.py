"""What the tests run on: every backend that is here, every instruction set, and every kernel of an op, from the tables.

A backend that cannot be here (a GPU's) stands in the list with its reason, and its tests skip visibly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit as lb
from lowbit.backends import cpu_mm, registry
from lowbit.ops import OPS

#: The implementation that rounds fp32 operands, which it must be allowed to.
ROUNDING = "cpu_bf16"

HAS_GPU = torch.cuda.is_available()


def not_2_10(reason: str) -> pytest.MarkDecorator:
    """Marks what a fault of torch 2.10 prevents; docs/limits.md tells users."""
    return pytest.mark.skipif(torch.__version__.startswith("2.10."), reason=f"torch 2.10: {reason}")


def isas() -> tuple[str, ...]:
    """Instruction sets of the compiled extension that this processor runs; none without the extension."""
    if not any(impl.backend == "cpu" for op in OPS for impl in lb.impls(op, "cpu")):
        return ()
    from lowbit import _native

    return tuple(_native.isas())


@contextmanager
def forced_isa(name: str) -> Iterator[None]:
    """Kernels of the compiled extension use that instruction set inside; an empty name changes nothing."""
    if not name:
        yield
        return
    torch.ops.lowbit_native.force_isa(name)
    try:
        assert torch.ops.lowbit_native.isa() == name
        yield
    finally:
        torch.ops.lowbit_native.force_isa("")


@contextmanager
def serving() -> Iterator[dict[str, str]]:
    """The kernel that each op inside is given, all of them by Python's choice."""
    served: dict[str, str] = {}
    select = registry.select

    def noted(op: str, *args: Any, **kwargs: Any) -> registry.Impl:
        impl = select(op, *args, **kwargs)
        served[op] = impl.name
        return impl

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "select", noted)
        registry.announce(1)
        try:
            yield served
        finally:
            registry.announce(-1)


def best(ops: Iterable[str]) -> dict[str, str]:
    """The kernel of each op that serves CPU tensors where no backend is asked for, and no rounding allowed."""
    return {op: next(i.name for i in lb.impls(op, "cpu") if i.name != ROUNDING) for op in ops}


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def flush_denormal() -> Iterator[None]:
    """torch.set_flush_denormal(True) inside; skips where the processor cannot."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@dataclass(frozen=True)
class Variant:
    """A backend (or one kernel), the instruction set it is forced to, and the device that its tensors live on."""

    backend: str
    isa: str = ""
    device: str = "cpu"
    missing: str = ""

    def __str__(self) -> str:
        if self.isa:
            return f"{self.backend}[{self.isa}]"
        if self.backend.startswith("triton"):
            return f"{self.backend}[{'interpreter' if self.device == 'cpu' else 'gpu'}]"
        return self.backend + ("[gpu]" if self.backend == "reference" and self.device == "cuda" else "")

    @property
    def native(self) -> bool:
        return self.backend.startswith("cpu")

    @property
    def interpreted(self) -> bool:
        """Thousands of times slower than the others."""
        return self.backend.startswith("triton") and self.device == "cpu"

    @contextmanager
    def use(self) -> Iterator[None]:
        """Every lowbit op inside runs on this variant, or raises."""
        with lb.use_backend(self.backend), forced_isa(self.isa):
            yield

    def refuses(self, op: str, *args: Any, **kwargs: Any) -> str | None:
        """Why this variant does not serve a call, or None: a test skips only what ``explain`` gives a reason for."""
        with self.use():
            answer = lb.explain(op, *args, **kwargs)
        return None if answer.chosen else str(answer)


def _absent() -> list[Variant]:
    if HAS_GPU:
        return []
    return [Variant(name, device="cuda", missing="no GPU here") for name in ("triton", "cuda")]


def _expand(names: list[str], device: str) -> list[Variant]:
    found = []
    for name in names:
        sets = isas() if name.split("_")[0] == "cpu" else ("",)
        found += [Variant(name, isa, device) for isa in sets]
    return found


def backends() -> list[Variant]:
    """Every backend on every device."""
    found = []
    for device in ("cpu", *(["cuda"] if HAS_GPU else [])):
        names = dict.fromkeys(impl.backend for op in OPS for impl in lb.impls(op, device))
        found += _expand(sorted(names, key=lambda n: (n != "reference", n)), device)
    return [*found, *_absent()]


@dataclass(frozen=True)
class Kernel:
    """One row of the table of implementations, run directly, past the dispatcher."""

    op: str
    impl: registry.Impl | None
    variant: Variant

    def __str__(self) -> str:
        return f"{self.op}-{self.variant}"

    def run(self, call: Any) -> tuple[Tensor, ...] | None:
        """The outputs, or None where the kernel gives a reason to refuse."""
        spec = OPS[self.op]
        assert self.impl is not None
        spec.check(call)
        with forced_isa(self.variant.isa), _allowing(self.impl):
            if self.impl.supports(call) is not None:
                return None
            outs = tuple(_poisoned(shape, dtype, self.variant.device) for shape, dtype in spec.outputs(call))
            self.impl.run(outs, call)
        return outs


@contextmanager
def _allowing(impl: registry.Impl) -> Iterator[None]:
    """What an implementation asks for besides its call: leave to round to bf16, and a processor that gains by it."""
    if impl.name != ROUNDING:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_mm, "bf16_products", lambda rows: True)
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


def _poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """An output full of garbage, so that an element that a kernel forgets does not happen to be right."""
    bytes_ = torch.Size(shape).numel() * dtype.itemsize
    return torch.full((bytes_,), 0xA5, dtype=torch.uint8, device=device).view(dtype).reshape(shape)


def kernels(op: str) -> list[Kernel]:
    """Every kernel of ``op`` on every instruction set and device, but the reference's own and those of ``rounding``."""
    found = []
    for device in ("cpu", *(["cuda"] if HAS_GPU else [])):
        for impl in lb.impls(op, device):
            if impl.name != ROUNDING and (impl.name != "reference" or device != "cpu"):
                found += [Kernel(op, impl, v) for v in _expand([impl.name], device)]
    return [*found, *(Kernel(op, None, v) for v in _absent())]


def rounding(op: str) -> list[Kernel]:
    """The kernels of a product that round fp32 operands, and so serve nothing else."""
    return [Kernel(op, i, v) for i in lb.impls(op, "cpu") if i.name == ROUNDING for v in _expand([i.name], "cpu")]


def params(rows: list[Any]) -> list[Any]:
    """pytest parameters of variants or kernels, those that are missing marked to skip with their reason."""
    made = []
    for row in rows:
        variant = row.variant if isinstance(row, Kernel) else row
        marks = [pytest.mark.skip(reason=variant.missing)] if variant.missing else []
        made.append(pytest.param(row, id=str(row), marks=marks))
    return made


ALL = [p for p in params(backends()) if not p.marks]
NATIVE = params([v for v in backends() if v.native]) or [
    pytest.param(None, marks=pytest.mark.skip(reason="the compiled extension is not built"), id="cpu")
]
