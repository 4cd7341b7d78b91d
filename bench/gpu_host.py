"""Benchmarks the host time of a layer's GPU call without a GPU: all work except kernel launches.

``lowbit bench host`` writes gpu_host.md. Tensors are small and on the CPU. The registry selects kernels as for a GPU,
and stubs replace the compiled kernels.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import lowbit as lb
from lowbit.backends import dispatch, registry
from lowbit.bench import gpu_trace
from lowbit.kernels import start
from lowbit.machine import provenance
from lowbit.ops import OPS
from lowbit.recipes.table import RECIPES
from lowbit.tables import markdown

__all__ = ["run", "stubbed"]

#: Inputs and outputs of the layer, and rows of its input.
SIZE, ROWS = 512, 1
#: Rounds of the median, and calls per round.
ROUNDS, CALLS = 21, 200


class _Kernel:
    """A compiled kernel that does nothing, for any grid."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments: None


class _Compiled(dict[Any, Any]):
    """A cache that has a stub kernel for every key."""

    def get(self, key: Any, default: Any = None) -> Any:
        return _Kernel()

    def __missing__(self, key: Any) -> Any:
        return _Kernel()


@contextmanager
def stubbed() -> Iterator[None]:
    """A context in which CPU tensors use the kernels of compute capability 9.0, and kernels are not launched."""
    if start.INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET is set, and interpreted kernels are not compiled; unset it")
    library = torch.library.Library("lowbit", "IMPL")
    with ExitStack() as stack:
        stack.enter_context(gpu_trace.pretended())
        table = registry._table | {(op, "cpu"): registry._table[op, "cuda"] for op in OPS}
        for where, name, value in (
            (registry, "_table", table), (registry, "call_key", registry.call_signature), (registry, "prepared", {}),
            (gpu_trace.triton, "capability", lambda device: (9, 0)),
            (torch.cuda, "get_device_capability", lambda device: (9, 0)), (torch.cuda, "current_device", lambda: 0),
            (start, "_compiled", _Compiled()),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(where, name, value))
        for op in ("linear", "quantize", "scaled_mm"):
            library.impl(op, dispatch._new_kernel(OPS[op]), "CPU", allow_override=True)
        stack.callback(library._destroy)
        yield


def _took(layer: nn.Module, x: torch.Tensor) -> float:
    """Microseconds per call."""
    for _ in range(CALLS):
        layer(x)
    rounds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            layer(x)
        rounds.append((time.perf_counter() - begin) / CALLS)
    return 1e6 * statistics.median(rounds)


@torch.no_grad()
def run(directory: Path) -> Path:
    """Measure, and write ``gpu_host.md``."""
    about = provenance(packages=("triton",))
    names = [
        name
        for name, recipe in RECIPES.items()
        if getattr(recipe.output.a, "scale", "current") == "current" and not recipe.weight.reference_only
    ]
    layers, x = {}, torch.randn(ROWS, SIZE, dtype=torch.bfloat16)
    for name in names:
        model = nn.Sequential(nn.Linear(SIZE, SIZE)).bfloat16()
        lb.quantize_(model, name)
        layers[name] = model[0]
    rows = []
    for name, layer in layers.items():
        with stubbed():
            again = _took(layer, x)
            with mock.patch.object(dispatch, "_WATCHED", 0):
                registry.prepared.clear()
                anew = _took(layer, x)
        rows.append((f"`{name}`", f"{anew:.1f}", f"{again:.1f}"))
    lines = ["# Host time of a layer on a GPU\n"]
    lines += [
        "Microseconds that an eager call of a layer takes the host, without a GPU: a stub takes the place of the start "
        f"of each kernel. The layer has {SIZE} inputs and outputs and a bias in bf16, and its input {ROWS} row. "
        "**Worked out**: tiles, arguments and memory are chosen again, as in the first two calls of a kind. "
        "**Replayed**: as in all later ones.\n",
    ]  # fmt: skip
    lines += [f"- {key}: {value}" for key, value in about.items()]
    lines += ["", markdown(["recipe", "worked out", "replayed"], rows, numbers=(1, 2))]
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "gpu_host.md"
    path.write_text("\n".join(lines) + "\n")
    return path
