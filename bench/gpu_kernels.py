"""Lists the GPU kernels of each op, recipe and architecture, and inspects their machine code, without a GPU.

``lowbit bench kernels`` writes gpu_kernels.json and gpu_kernels.md. Each cell of the table is a file in a cache folder,
so a stopped run can resume. Kernels are compiled and not run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

import lowbit
from lowbit.bench import gpu_page, gpu_rows, gpu_trace
from lowbit.bench.gpu_rows import Row, rows
from lowbit.kernels import aot, machine_code
from lowbit.kernels.spec import INTERPRETED, Launch
from lowbit.machine import version
from lowbit.ops import OPS

__all__ = ["make", "run"]

#: The cells of ``quick``: rows by section and subject, and architectures.
_QUICK = (
    (
        ("linear, 1 row", "int4-weight-only"), ("linear, 8192 rows", "int8-weight-only"), ("quantize", "mxfp4"),
        ("square_sums", "rows of float32"),
    ),
    (80, 90),
)  # fmt: skip
#: Matmul ops of torch, and their operand types.
_TORCH = {"mm": "bf16", "_int_mm": "int8", "_scaled_mm": "fp8", "_scaled_mm_v2": "fp8"}


# -- one cell ----------------------------------------------------------------------------------------------------------
def make(row: Row, architecture: int) -> dict[str, Any]:
    """A cell: the implementation that runs the row's call on an architecture, with its kernels and torch ops."""
    cell: dict[str, Any] = {"section": row.section, "of": row.of, "architecture": architecture}
    with gpu_trace.pretended(row.precision):
        call = row.call(architecture)
        traced = gpu_trace.trace(row.op, call)
        cost = OPS[row.op].cost(call)
    work = [_launched(one, architecture) if isinstance(one, Launch) else _torch(one) for one in traced.started]
    return cell | {
        "op": row.op, "backend": traced.impl, "refused": traced.refused if traced.impl == "reference" else [],
        "work": _counted(work), "ideal": cost.bytes, "bf16": row.bf16._asdict(),
    }  # fmt: skip


def _counted(work: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each kernel and op once, with its count and the total bytes and operations."""
    found: dict[str, dict[str, Any]] = {}
    for one in work:
        sums = {name: one.pop(name) for name in ("bytes", "flops")}
        kept = found.setdefault(json.dumps(one), one | {"count": 0, "bytes": 0, "flops": 0})
        kept["count"] += 1
        for name, value in sums.items():
            kept[name] += value
    return list(found.values())


def _torch(op: gpu_trace.TorchOp) -> dict[str, Any]:
    """A torch op as a record. Ops that copy tensors share one name."""
    if op.name not in _TORCH:
        return {"torch": "others", "bytes": op.bytes, "flops": 0, "multiplies": ""}
    flops = 2 * op.shapes[0][0] * op.shapes[0][1] * op.shapes[1][1]
    return {"torch": op.name, "bytes": op.bytes, "flops": flops, "multiplies": _TORCH[op.name]}


def _launched(one: Launch, architecture: int) -> dict[str, Any]:
    tensors = [value for value in one.arguments.values() if isinstance(value, torch.Tensor)]
    name, given = one.kernel.__name__, one.arguments
    found = _compiled(one, architecture)
    flops = 0
    if name in aot.PRODUCTS:
        terms = given.get("A_TERMS", 1) * given.get("B_TERMS", 1)
        flops = 2 * given["rows"] * given["cols"] * given["depth"] * terms
    multiplied = re.search(r"int8|fp8|fp4", " ".join(found.get("matrix", ())))
    return {
        "kernel": name, **found, "bytes": sum(t.nbytes for t in tensors), "flops": flops,
        "multiplies": "" if name not in aot.PRODUCTS else multiplied[0] if multiplied else "bf16",
    }  # fmt: skip


_known: dict[Any, dict[str, Any]] = {}


def _compiled(one: Launch, architecture: int) -> dict[str, Any]:
    """Facts about the machine code, or the error of a kernel that does not compile."""
    key = (architecture, one.kernel.__name__, one.warps, one.stages, str(aot.specialized(one, architecture)))
    if key not in _known:
        try:
            made = aot.compile_launch(one, architecture)
        except Exception as error:  # any compiler error is a fault of this kernel
            _known[key] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        else:
            used = machine_code.usage(made)
            _known[key] = {
                "registers": used.registers, "spilled": used.spilled, "shared": made.shared,
                "matrix": machine_code.matrix_instructions(made.ptx),
                "faults": aot.faults(one.kernel.__name__, made.ptx, architecture),
            }  # fmt: skip
    return _known[key]


# -- all cells -------------------------------------------------------------------------------------------------------
@cache
def _sources() -> list[str]:
    """The inputs of a cell: a fingerprint of the sources, and the compiler."""
    root = Path(lowbit.__file__).parent
    folders = (Path(aot.__file__).parent, root / "backends", root / "ops", root / "recipes")
    files = [path for folder in folders for path in sorted(folder.glob("*.py"))]
    files += [Path(str(module.__file__)) for module in (gpu_rows, gpu_trace, sys.modules[__name__])]
    text = b"".join(path.read_bytes() for path in files)
    return [hashlib.sha256(text).hexdigest()[:16], version("triton")]


def _path(cache_directory: Path, row: Row, architecture: int) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", f"sm {architecture} {row.section} {row.of}".lower())
    return cache_directory / "cells" / f"{name}.json"


def _read(path: Path) -> dict[str, Any] | None:
    """The cell of a file, if it was made from the present sources."""
    if not path.exists():
        return None
    kept: dict[str, Any] = json.loads(path.read_text())
    return kept["cell"] if kept.get("sources") == _sources() else None


class _Job(NamedTuple):
    """The cell of a row, by index, on an architecture, and its file."""

    path: Path
    number: int
    architecture: int
    sources: list[str]


def _fill(job: _Job) -> None:
    text = json.dumps({"sources": job.sources, "cell": make(rows()[job.number], job.architecture)})
    part = job.path.with_suffix(f".{os.getpid()}")
    part.write_text(text)
    part.replace(job.path)


def run(directory: Path, cache_directory: Path, workers: int = 2, quick: bool = False) -> Path:
    """Make the cells that are not cached, and write ``gpu_kernels.json`` and ``gpu_kernels.md`` of all cached cells.

    Args:
        workers: Processes; with 0 no cell is made.
        quick: Make a few cells only, as a test.

    Raises:
        ValueError: Kernels are interpreted.
    """
    if INTERPRETED:
        raise ValueError("TRITON_INTERPRET is set, and interpreted kernels cannot be compiled; unset it")
    os.environ.setdefault("TRITON_CACHE_DIR", str((cache_directory / "triton").absolute()))
    (cache_directory / "cells").mkdir(parents=True, exist_ok=True)
    directory.mkdir(parents=True, exist_ok=True)
    listed = [
        (index, row, architecture)
        for index, row in enumerate(rows())
        for architecture in aot.ARCHITECTURES
        if not quick or ((row.section, row.of) in _QUICK[0] and architecture in _QUICK[1])
    ]
    paths = [_path(cache_directory, row, architecture) for _, row, architecture in listed]
    jobs = [
        _Job(path, index, architecture, _sources())
        for (index, _, architecture), path in zip(listed, paths, strict=True)
        if workers and _read(path) is None
    ]
    if workers > 1 and len(jobs) > 1:
        with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
            list(pool.map(_fill, jobs))
    else:
        list(map(_fill, jobs))
    cells = [cell for path in paths if (cell := _read(path)) is not None]
    about = {"triton": version("triton"), "torch": torch.__version__, "lowbit": lowbit.__version__}
    held = directory / "gpu_kernels.json"
    lines = ",\n".join(json.dumps(cell, separators=(",", ":")) for cell in cells)
    held.write_text(f'{{"about": {json.dumps(about)}, "asked": {len(listed)}, "cells": [\n{lines}\n]}}\n')
    return gpu_page.write(held)
