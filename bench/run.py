"""Measure every codec, scheme and product on this CPU: ``python -m bench.run [--quick] [--only REGEX] [--out DIR]``.

Writes ``cpu.md``, ``cpu.csv`` and ``cpu.png`` into ``--out`` (default ``bench/results``).
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import torch

from bench import report, work
from bench.timing import Budget, measure


def main(arguments: list[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that everything runs, measures nothing")
    parser.add_argument("--only", default="", metavar="REGEX", help="groups whose 'section op subject' matches")
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="directory of the results")
    asked = parser.parse_args(arguments)
    size, budget = ((4096, 4096), Budget()) if not asked.quick else ((32, 256), Budget(3, 0.0, 0.1))
    shapes = ((1, 4096, 4096), (256, 4096, 4096)) if not asked.quick else ((2, 32, 256),)
    makers = [*work.codecs(*size), *work.schemes(*size), *work.products(shapes)]
    rows: list[report.Row] = []
    about = report.machine()
    shown = sys.stderr.isatty()
    for index, make in enumerate(makers, 1):
        group = make()
        name = f"{group.section} {group.op} {group.subject}"
        if not re.search(asked.only, name):
            continue
        line = f"{index}/{len(makers)}  {name}"
        print(f"\r\033[K{line}" if shown else line, end="" if shown else "\n", file=sys.stderr, flush=True)
        rows += report.rows_of(group, measure(group, budget))
    if shown:
        print("\r\033[K", end="", file=sys.stderr)
    if work.isas() != [""]:
        torch.ops.lowbit_native.force_isa("")
    if not rows:
        raise SystemExit(f"no group matches --only {asked.only!r}")
    path = report.write(asked.out, rows, size, about, quick=asked.quick)
    print(f"results: {path}")
    return path


if __name__ == "__main__":
    main()
