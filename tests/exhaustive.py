"""Everything that is too much for a test run: every fp32 pattern through every format, every pair of schemes.

1. encode: all 2**32 fp32 patterns, each element format, saturating and not, on every instruction set, against the table
   of exact rounding boundaries (tests/support/boundaries.py, itself held against rationals and ml_dtypes in the tests).
2. scales: all 2**31 magnitudes as the amax of a block, each rule of E8M0 and E4M3 scales, on every instruction set,
   against where they change, found by bisection in rationals.
3. scaled_mm: the full product of schemes (and float matrices) and shapes, on every instruction set, against fp64 within
   the bound of section 9 (tests/support/mm_oracle.py); integers in every bit.

``python tests/exhaustive.py [--quick]``, or ``make exhaustive``; writes exhaustive.md and .json to bench/results, or
to out/exhaustive where only a part is run. Exit status 1 if anything differed. About half an hour on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn  # noqa: E402
from support import boundaries, mm_oracle  # noqa: E402
from support.variants import Kernel, forced_isa, isas, kernels  # noqa: E402

import lowbit as lb  # noqa: E402
from lowbit.machine import provenance  # noqa: E402
from lowbit.ops.matmul import ScaledMM  # noqa: E402
from lowbit.testing.inputs import element_formats, random_matrix, schemes  # noqa: E402
from lowbit.testing.matmul import make_call  # noqa: E402

CHUNK = 1 << 24
SHAPES = ((3, 17, 130), (16, 33, 64), (1, 9, 257))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Tally:
    """How much was compared, and what differed: the count, and the first few."""

    compared: int = 0
    wrong: int = 0
    examples: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def note(self, wrong: int, example: str) -> None:
        self.wrong += wrong
        if len(self.examples) < 5:
            self.examples.append(example)


Results = dict[str, dict[str, Tally]]


def progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )


# -- encode ------------------------------------------------------------------------------------------------------------
def encode_all(chunks: list[int]) -> Results:
    """Every pattern of the chunks (of 2**24 magnitudes each), both signs."""
    formats = element_formats()
    results: Results = {
        f"{f} {mode}": {isa: Tally() for isa in isas()} for f in formats for mode in ("saturate", "overflow")
    }
    columns = 1 << 12
    bits = torch.empty(CHUNK, dtype=torch.int32)
    x = bits.view(torch.float32).view(-1, columns)
    out = torch.empty(x.shape, dtype=torch.uint8)
    expected = np.empty(CHUNK, np.uint8)
    with progress() as bar:
        task = bar.add_task("encode 2^24 patterns", total=2 * len(chunks))
        for chunk in chunks:
            for negative in (False, True):
                start = chunk * CHUNK
                torch.arange(
                    start - (1 << 31) * negative, start - (1 << 31) * negative + CHUNK, dtype=torch.int32, out=bits
                )
                for f in formats:
                    for saturate in (True, False):
                        boundaries.segments(f, saturate, negative).fill(expected, start)
                        _encode_chunk(x, out, torch.from_numpy(expected), f, saturate, results)
                bar.advance(task)
    return results


def _encode_chunk(x: Any, out: Any, expected: Any, f: lb.Format, saturate: bool, results: Results) -> None:
    tallies = results[f"{f} {'saturate' if saturate else 'overflow'}"]
    for isa, tally in tallies.items():
        begun = time.perf_counter()
        with forced_isa(isa):
            torch.ops.lowbit_native.encode(x, f.name, "nearest", saturate, None, 0, 0, None, out)
        tally.seconds += time.perf_counter() - begun
        tally.compared += CHUNK
        flat = out.view(-1)
        if not torch.equal(flat, expected):
            wrong = (flat != expected).nonzero()[:, 0]
            at = int(wrong[0])
            pattern = int(x.view(torch.int32).view(-1)[at]) & 0xFFFFFFFF
            tally.note(len(wrong), f"{pattern:#010x}: {int(flat[at]):#04x}, expected {int(expected[at]):#04x}")


# -- scales ------------------------------------------------------------------------------------------------------------
#: Blocks of one element, with the global scale that is given.
SCALE_RULES = {
    **{f"{f}:group1:e8m0:{rule}": None for f in ("fp4_e2m1", "fp8_e4m3") for rule in ("floor", "ceil")},
    "fp4_e2m1:group1:e8m0:nearest": None,
    "fp4_e2m1:group1:e4m3": Fraction(3, 1024),
    "fp4_e2m1:group1:e4m3:ceil": Fraction(3, 1024),
}


def scale_all(chunks: list[int]) -> Results:
    """Every magnitude of the chunks, of either sign in turn."""
    results: Results = {name: {isa: Tally() for isa in isas()} for name in SCALE_RULES}
    columns, expected = 1 << 12, np.empty(CHUNK, np.uint8)
    with progress() as bar:
        task = bar.add_task("scales of 2^24 amax", total=len(chunks))
        for chunk in chunks:
            start, sign = chunk * CHUNK, (chunk % 2) << 31
            x = (
                torch.arange(start - sign, start - sign + CHUNK, dtype=torch.int32)
                .view(torch.float32)
                .view(-1, columns)
            )
            for name, global_scale in SCALE_RULES.items():
                boundaries.scale_segments(lb.scheme(name), global_scale).fill(expected, start)
                given = None if global_scale is None else float(global_scale)
                for isa, tally in results[name].items():
                    begun = time.perf_counter()
                    with forced_isa(isa):
                        scale = lb.quantize(x, name, global_scale=given).scale.view(-1)
                    tally.seconds += time.perf_counter() - begun
                    tally.compared += CHUNK
                    wrong = (scale != torch.from_numpy(expected)).nonzero()[:, 0]
                    if len(wrong):
                        tally.note(len(wrong), f"{start + int(wrong[0]):#010x}: {int(scale[wrong[0]]):#04x}")
            bar.advance(task)
    return results


# -- scaled_mm ---------------------------------------------------------------------------------------------------------
class Side(NamedTuple):
    """One side's arguments, without the name of the side, and what the oracle makes of them."""

    parts: dict[str, Any]
    known: mm_oracle.Operand


@cache
def side(text: str | None, rows: int, cols: int, seed: int) -> Side:
    call = make_call(random_matrix(rows, cols, seed=seed), torch.zeros(1, cols), text, None)
    names = ("", "_scheme", "_scale", "_zero_point", "_global_scale")
    return Side({name: getattr(call, f"a{name}") for name in names}, mm_oracle.operand(call, 0))


def multiply_all(texts: list[str | None]) -> Results:
    """Every pair of schemes at every shape, one output dtype and bias after another."""
    rows = [k for k in kernels("scaled_mm") if not k.variant.missing and not k.variant.interpreted]
    results: Results = {str(k.variant): {f"{m}x{n}x{c}": Tally() for m, n, c in SHAPES} for k in rows}
    with progress() as bar:
        task = bar.add_task("scaled_mm", total=len(texts) ** 2 * len(SHAPES))
        for m, n, k in SHAPES:
            bias = random_matrix(1, n, seed=3)[0]
            for i, left in enumerate(texts):
                for j, right in enumerate(texts):
                    a, b = side(left, m, k, i), side(right, n, k, 1000 + j)
                    parts = {f"a{name}": v for name, v in a.parts.items()} | {
                        f"b{name}": v for name, v in b.parts.items()
                    }
                    call = ScaledMM(
                        **parts, cols=k, bias=bias if (i + j) % 2 else None, out_dtype=DTYPES[(i + 2 * j) % 3]
                    )
                    _check_product(mm_oracle.Wanted(call, a.known, b.known), rows, results, f"{m}x{n}x{k}")
                    bar.advance(task)
    return results


def _check_product(wanted: mm_oracle.Wanted, rows: list[Kernel], results: Results, shape: str) -> None:
    call = wanted.call
    for kernel in rows:
        begun = time.perf_counter()
        outs = kernel.run(call)
        if outs is None:
            continue
        tally = results[str(kernel.variant)][shape]
        tally.seconds += time.perf_counter() - begun
        tally.compared += 1
        assert kernel.impl is not None
        wrong, _ = wanted.wrong(outs[0], kernel.impl.numerics)
        if wrong.any():
            tally.note(1, f"{call.a_scheme} x {call.b_scheme} to {call.out_dtype}: {wrong.sum()} elements")


# -- report ------------------------------------------------------------------------------------------------------------
def table(title: str, results: Results, unit: str) -> list[str]:
    columns = list(next(iter(results.values())))
    lines = [
        f"## {title}",
        "",
        f"Each cell: {unit} compared / different.",
        "",
        f"| | {' | '.join(columns)} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name, tallies in results.items():
        cells = [f"{tallies[c].compared:,} / {tallies[c].wrong:,}" for c in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    examples = [f"- {n}, {c}: {e}" for n, row in results.items() for c, t in row.items() for e in t.examples]
    return [*lines, "", *(["Different:", "", *examples, ""] if examples else [])]


def write(directory: Path, parts: dict[str, tuple[Results, str]], about: dict[str, str], quick: bool) -> None:
    wrong = sum(t.wrong for results, _ in parts.values() for row in results.values() for t in row.values())
    compared = sum(t.compared for results, _ in parts.values() for row in results.values() for t in row.values())
    lines = [
        "# Exhaustive comparison",
        "",
        "Written by `make exhaustive`" + (" (`--quick`: a part only)." if quick else "."),
        "",
    ]
    lines += [
        f"**{wrong:,} differences in {compared:,} comparisons.**",
        "",
        *(f"- {k}: {v}" for k, v in about.items()),
        "",
    ]
    for title, (results, unit) in parts.items():
        lines += table(title, results, unit)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "exhaustive.md").write_text("\n".join(lines).rstrip() + "\n")
    record = {
        "about": about, "quick": quick, "compared": compared, "different": wrong,
        "results": {
            title: {name: {c: vars(t) for c, t in row.items()} for name, row in results.items()}
            for title, (results, _) in parts.items()
        },
    }  # fmt: skip
    (directory / "exhaustive.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"{wrong:,} differences in {compared:,} comparisons; wrote {directory / 'exhaustive.md'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="a sixty-fourth of the patterns and a few schemes: half a minute"
    )
    parser.add_argument("--out", type=Path, help="where the results go: bench/results, or out/exhaustive if --quick")
    arguments = parser.parse_args()
    directory = arguments.out or ROOT / ("out/exhaustive" if arguments.quick else "bench/results")
    if not isas():
        print("the compiled extension is not built; run `make build` first", file=sys.stderr)
        return 2
    about, begun = provenance(), time.perf_counter()
    texts = [None, *(s.name for s in schemes())]
    chunks = [59, 67] if arguments.quick else list(range((1 << 31) // CHUNK))
    parts = {
        "encode: every fp32 pattern": (encode_all(chunks), "patterns"),
        "scales: every magnitude as an amax": (scale_all(chunks), "magnitudes"),
        "scaled_mm: every pair of schemes": (multiply_all(texts[::13] if arguments.quick else texts), "products"),
    }
    about = {**about, "minutes": f"{(time.perf_counter() - begun) / 60:.1f}"}
    write(directory, parts, about, arguments.quick)
    return int(any(t.wrong for results, _ in parts.values() for row in results.values() for t in row.values()))


if __name__ == "__main__":
    raise SystemExit(main())
