"""Benchmarks codecs on data in cache, and the overhead per call.

``lowbit bench small`` writes small.md.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import lowbit as lb
from lowbit.backends.cpu import processor
from lowbit.bench.timing import Budget, Case, Group, measure
from lowbit.machine import provenance
from lowbit.tables import markdown
from lowbit.testing.inputs import large_matrix

FORMATS = ("fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp4_e2m1", "int8", "int4", "nf4")

#: Elements of two calls, both in the L2 cache. The difference of their times is the time of the extra elements, without
#: call overhead.
COUNTS = (1 << 14, 1 << 16)

_BUDGET = Budget(51, 0.002, 2.0)


def codecs(format: str, count: int) -> Iterator[Case]:
    """All variants of encoding and decoding ``count`` numbers between preallocated tensors."""
    x = large_matrix(1, count)
    codes = lb.encode(x, format)
    yield Case("encode", lambda: lb.encode(x, format, out=codes))
    if format != "nf4":  # codebooks round to nearest only
        yield Case("encode, stochastic", lambda: lb.encode(x, format, rounding=lb.Rounding(seed=1), out=codes))
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty_like(x, dtype=dtype)
        name = f"decode to {str(dtype).removeprefix('torch.')}"
        yield Case(name, lambda out=out, dtype=dtype: lb.decode(codes, format, dtype, out=out))  # type: ignore[misc]
    same = torch.empty_like(x)
    yield Case("fp32 `copy_`", lambda: same.copy_(x))


def calls() -> Iterator[Case]:
    """One row of 64 numbers: the op, its module, and torch's module."""
    x = torch.randn(1, 64)
    codes, layer = lb.encode(x, "fp8_e4m3"), nn.Linear(64, 64)
    weight = lb.quantize(layer.weight, "int8:row")
    halves = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    yield Case("torch's encode (`copy_`)", lambda: halves.copy_(x))
    yield Case("encode(out=)", lambda: lb.encode(x, "fp8_e4m3", out=codes))
    yield Case("torch Linear", lambda: layer(x))
    yield Case("linear, int8", lambda: lb.functional.linear(x, weight, input_scheme="int8:row"))
    for recipe in ("int8", "int4-weight-only"):
        model = nn.Sequential(nn.Linear(64, 64))
        lb.quantize_(model, recipe)
        yield Case(f"QuantLinear, {recipe}", lambda module=model[0]: module(x))  # type: ignore[misc]
        if lb.prepack_(twin := copy.deepcopy(model)).layers:
            yield Case(f"PackedLinear, {recipe}", lambda module=twin[0]: module(x))  # type: ignore[misc]


@torch.no_grad()
def run(directory: Path) -> Path:
    """Measure, and write ``small.md``."""
    about = provenance(packages=(), kernels=processor())
    lines = ["# Small work\n", "Cases of a row took turns; medians.\n"]
    lines += [f"- {key}: {value}" for key, value in about.items()]
    names = ("encode", "encode, stochastic", "decode to float32", "decode to bfloat16", "fp32 `copy_`")
    lines += ["\n## Codecs in the caches, 1e9 elements a second, of one thread\n"]
    rows = []
    for format in FORMATS:
        rates = _rates(format)
        rows.append([f"`{format}`", *(f"{rates[name]:.1f}" if name in rates else "-" for name in names)])
    lines.append(markdown(["", *names], rows, numbers=range(1, len(names) + 1)))
    seconds = measure(Group("calls", "", "", 0, 0, tuple(calls()), ()), _BUDGET)
    lines.append("\n## Calls on a row of 64 numbers, microseconds\n")
    lines.append(markdown(["", ""], ((who, f"{1e6 * took:.1f}") for who, took in seconds.items()), numbers=(1,)))
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "small.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def _rates(format: str) -> dict[str, float]:
    few, many = ([*codecs(format, count)] for count in COUNTS)
    cases = [Case(f"{size} {case.who}", case.run) for size, all in (("few", few), ("many", many)) for case in all]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so few numbers are not split among threads
    try:
        seconds = measure(Group("codecs", "", format, 0, 0, tuple(cases), ()), _BUDGET)
    finally:
        torch.set_num_threads(threads)
    more = {case.who: seconds[f"many {case.who}"] - seconds[f"few {case.who}"] for case in few}
    return {who: 1e-9 * (COUNTS[1] - COUNTS[0]) / took for who, took in more.items() if took > 0}
