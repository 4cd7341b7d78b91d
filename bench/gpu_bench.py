"""Benchmarks GPU kernels against torch and the device's limits: ``python bench/gpu_bench.py OUT [--dry-run]``.

Writes ``gpu.json`` and ``gpu.md`` into OUT and prints the table. The cases of a group take turns. Each case cycles
through several sets of buffers, together larger than the L2 cache. Times are medians between CUDA events. Bandwidth is
the minimum bytes (OpSpec.cost) divided by the time, relative to a device-to-device copy counted in the same way.
Matmuls are compared with torch's bf16 matmul, and with corresponding matmuls of torch, torchao, bitsandbytes and Marlin
if installed. Calls are replayed from a CUDA graph, without host time.
``--dry-run`` runs tiny cases on the CPU, to test the program without a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import lowbit as lb
from lowbit.backends.cpu import processor
from lowbit.bench import gpu_peers
from lowbit.machine import provenance
from lowbit.ops import OPS, matmul
from lowbit.tables import markdown
from lowbit.testing.inputs import random_matrix

SCHEMES = (
    "fp8_e4m3:tensor", "fp8_e4m3:row", "fp8_e4m3:group128", "fp8_e4m3:block128x128", "mxfp8", "mxfp4", "nvfp4",
    "int8:row", "int4:group128", "nf4",
)  # fmt: skip
PRODUCTS: tuple[tuple[str | None, str], ...] = (
    ("fp8_e4m3:tensor", "fp8_e4m3:tensor"), ("fp8_e4m3:row", "fp8_e4m3:row"), ("int8:row", "int8:row"),
    ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), (None, "int4:group128"), (None, "int8:row"), (None, "nf4"), (None, "mxfp4"),
)  # fmt: skip
#: (rows, outputs, inputs): a square matmul, and a layer of Llama 8B in generation, prompt processing and training.
SHAPES = ((8192, 8192, 8192), (1, 14336, 4096), (16, 14336, 4096), (512, 14336, 4096), (8192, 14336, 4096))
#: The reference computes in fp64: it is timed only without another kernel, with at most this many rows.
FEW_ROWS = 16

#: Sets of buffers per case.
SETS = 3


@dataclass
class Row:
    """A measured case: ``rate`` in GB/s or TFLOP/s, ``ratio`` to the group's limit."""

    group: str
    who: str
    microseconds: float
    rate: float
    unit: str
    ratio: float


Case = Callable[[int], object]
Shapes = tuple[tuple[int, int, int], ...]


def elapsed(case: Case, device: str, repeats: int) -> float:
    """Seconds per call, over ``repeats`` calls that cycle through the sets."""
    if device == "cpu":
        start = time.perf_counter()
        for index in range(repeats):
            case(index % SETS)
        return (time.perf_counter() - start) / repeats
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for index in range(repeats):
        case(index % SETS)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / repeats


def measure(cases: dict[str, Case], device: str, rounds: int) -> dict[str, float]:
    """Median seconds of each case; cases take turns. A failing case is skipped with a message."""
    alive: dict[str, int] = {}
    for who, case in cases.items():
        try:
            elapsed(case, device, SETS)  # warm-up: compiles, loads modules
            if device == "cuda":
                cases[who] = case = replayed(case)
            alive[who] = max(SETS, min(60, round(0.004 / max(elapsed(case, device, SETS), 1e-7))))
        except Exception as error:
            print(f"  {who}: left out: {str(error).splitlines()[0][:200]}", flush=True)
    taken: dict[str, list[float]] = {who: [] for who in alive}
    for _ in range(rounds):
        for who, repeats in alive.items():
            taken[who].append(elapsed(cases[who], device, repeats))
    return {who: statistics.median(times) for who, times in taken.items()}


def replayed(case: Case) -> Case:
    """The case, with one captured graph per set."""
    graphs = [torch.cuda.CUDAGraph() for _ in range(SETS)]
    for index, graph in enumerate(graphs):
        with torch.cuda.graph(graph):
            case(index)

    def replay(index: int, case: Case = case) -> None:  # the default keeps the tensors alive that graphs address
        graphs[index].replay()

    return replay


def runner(impl: Any, calls: list[Any], op: str, device: str) -> Case:
    outs = [tuple(torch.empty(s, dtype=d, device=device) for s, d in OPS[op].outputs(call)) for call in calls]
    return lambda index: impl.run(outs[index], calls[index])


def kernels(op: str, calls: list[Any], device: str) -> dict[str, Case]:
    """All kernels that support the calls, except the reference."""
    rows = [i for i in lb.impls(op, device) if i.backend != "reference" and i.supports(calls[0]) is None]
    if device == "cpu":
        rows = [i for i in rows if i.backend == "cpu"][:1]
    return {impl.name: runner(impl, calls, op, device) for impl in rows}


def reference(op: str, calls: list[Any], device: str) -> dict[str, Case]:
    """The reference, if no other kernel supports the calls."""
    return {i.name: runner(i, calls, op, device) for i in lb.impls(op, device) if i.backend == "reference"}


def codec_groups(device: str, shape: tuple[int, int]) -> Iterator[tuple[str, int, dict[str, Case]]]:
    """(name, bytes, cases) of each codec group. The case ``copy`` is the limit and moves as many bytes."""
    xs = [random_matrix(*shape, device, seed=s).bfloat16() for s in range(SETS)]
    e4m3 = [x.to(torch.float8_e4m3fn) for x in xs]

    def make(op: str, calls: list[Any], peers: dict[str, Case]) -> tuple[str, int, dict[str, Case]]:
        moved = OPS[op].cost(calls[0]).bytes
        sources = [torch.empty(moved // 2, dtype=torch.uint8, device=device).random_(0, 256) for _ in range(SETS)]
        targets = [torch.empty_like(s) for s in sources]
        copy: Case = lambda i: targets[i].copy_(sources[i])
        label = getattr(calls[0], "scheme", None) or getattr(calls[0], "format", "")
        return f"{op} {label}", moved, {**kernels(op, calls, device), **peers, "copy": copy}

    casts: dict[str, Case] = {"torch": lambda i: e4m3[i].copy_(xs[i])}
    yield make("encode", [OPS["encode"].args(x, "fp8_e4m3") for x in xs], casts)
    rng = torch.tensor([1, 0], device=device)
    calls = [OPS["encode"].args(x, "fp8_e4m3", "stochastic", rng=rng) for x in xs]
    name, moved, cases = make("encode", calls, {})
    yield f"{name} stochastic", moved, cases
    back = [torch.empty_like(x) for x in xs]
    codes = [e.view(torch.uint8) for e in e4m3]
    uncasts: dict[str, Case] = {"torch": lambda i: back[i].copy_(e4m3[i])}
    yield make("decode", [OPS["decode"].args(c, "fp8_e4m3", torch.bfloat16) for c in codes], uncasts)
    for scheme in SCHEMES:
        global_scale = [torch.ops.lowbit.global_scale(x, scheme) if scheme == "nvfp4" else None for x in xs]
        yield make("quantize", [OPS["quantize"].args(x, scheme, o) for x, o in zip(xs, global_scale, strict=True)], {})
    for scheme in ("fp8_e4m3:row", "mxfp4", "int4:group128"):
        stored = [torch.ops.lowbit.quantize(x, scheme) for x in xs]
        dtype = torch.bfloat16
        yield make(
            "dequantize", [OPS["dequantize"].args(c, scheme, shape[1], s, dtype=dtype) for c, s, _ in stored], {}
        )
        yield make("fake_quantize", [OPS["fake_quantize"].args(x, scheme) for x in xs], {})


def _product(a: torch.Tensor, weights: list[torch.Tensor], index: int) -> torch.Tensor:
    return a @ weights[index].t()


def product_groups(device: str, shapes: Shapes) -> Iterator[tuple[str, int, dict[str, Case]]]:
    for m, n, k in shapes:
        a, b = random_matrix(m, k, device, seed=1).bfloat16(), random_matrix(n, k, device, seed=2).bfloat16()
        weights = [b.clone() for _ in range(SETS)]
        limit: Case = partial(_product, a, weights)
        for names in PRODUCTS:
            parts: dict[str, Any] = {"cols": k, "out_dtype": torch.bfloat16}
            for side, x, scheme in (("a", a, names[0]), ("b", b, names[1])):
                parts |= {side: x, f"{side}_scheme": scheme}
                if scheme is not None:
                    global_scale = torch.ops.lowbit.global_scale(x, scheme) if scheme == "nvfp4" else None
                    codes, scale, _ = torch.ops.lowbit.quantize(x, scheme, global_scale)
                    parts |= {side: codes, f"{side}_scale": scale, f"{side}_global_scale": global_scale}
            calls = [matmul.ScaledMM(**{**parts, "b": parts["b"].clone()}) for _ in range(SETS)]
            served = kernels("scaled_mm", calls, device)
            if not served and m <= FEW_ROWS:
                served = reference("scaled_mm", calls, device)
            cases = {**served, **gpu_peers.of(a, weights, names), "bf16": limit}
            yield f"scaled_mm {names[0] or 'bf16'} x {names[1]} [{m}, {n}, {k}]", 2 * m * n * k, cases


def rows_of(group: str, work: int, unit: str, times: dict[str, float], limit: str) -> list[Row]:
    scale = 1e9 if unit == "GB/s" else 1e12
    best = times.get(limit, float("nan"))
    return [Row(group, who, 1e6 * t, work / t / scale, unit, best / t) for who, t in times.items()]


def about(device: str) -> dict[str, str]:
    """The device, its driver, and ``provenance``."""
    if device != "cuda":
        return {"device": "CPU (dry run)", **provenance(kernels=processor())}
    asked = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    )
    driver = asked.stdout.strip().partition("\n")[0] or "unknown"
    name = f"{torch.cuda.get_device_name()}, driver {driver}, CUDA {torch.version.cuda}"
    return {"device": name, **provenance(packages=("triton",))}


def table(rows: list[Row]) -> str:
    cells = ((r.group, r.who, f"{r.microseconds:.1f}", f"{r.rate:.1f} {r.unit}", f"{r.ratio:.2f}") for r in rows)
    return markdown(("group", "kernel", "us", "rate", "to limit"), cells, numbers=(2, 3, 4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="tiny cases on the CPU")
    parser.add_argument(
        "--seconds", type=float, default=50, help="of products, and of codecs: start no new group later"
    )
    options = parser.parse_args()
    device = "cpu" if options.dry_run else "cuda"
    dry: tuple[Any, ...] = ((64, 256), ((64, 64, 64), (1, 64, 64)), 2)
    shape, shapes, rounds = dry if options.dry_run else ((8192, 16384), SHAPES, 7)
    rows: list[Row] = []
    options.out.mkdir(parents=True, exist_ok=True)
    where = about(device)
    for unit, limit, groups in (
        ("TFLOP/s", "bf16", product_groups(device, shapes)),
        ("GB/s", "copy", codec_groups(device, shape)),
    ):
        start = time.monotonic()
        for group, work, cases in groups:
            found = rows_of(group, work, unit, measure(cases, device, rounds), limit)
            rows += found
            text = ["# GPU benchmark", "", ", ".join(f"{k} {v}" for k, v in where.items()), "", table(rows)]
            (options.out / "gpu.md").write_text("\n".join(text) + "\n")
            (options.out / "gpu.json").write_text(json.dumps({**where, "rows": [asdict(r) for r in rows]}, indent=1))
            if time.monotonic() - start > options.seconds:
                print(f"stopped after {options.seconds:.0f} s; the groups after {group!r} were not measured")
                break
    print(table(rows))


if __name__ == "__main__":
    main()
