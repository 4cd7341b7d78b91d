"""Benchmarks shapes that are not multiples of a vector against padded shapes: at most 1.3 times as slow.

``lowbit bench ragged`` writes ragged.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from lowbit.backends.cpu import processor
from lowbit.bench.timing import Budget, Case, Group, measure
from lowbit.machine import provenance
from lowbit.recipes import RECIPES
from lowbit.tables import markdown
from lowbit.testing.linear import example

Shape = tuple[int, int, int]

#: (M, N, K), and the next shape that is a multiple of vectors.
SHAPES: tuple[tuple[Shape, Shape], ...] = (
    ((64, 512, 1), (64, 512, 16)),
    ((64, 512, 17), (64, 512, 32)),
    ((64, 512, 4097), (64, 512, 4160)),
    ((1, 512, 4097), (1, 512, 4160)),
    ((64, 1, 4096), (64, 16, 4096)),
    ((64, 3, 4096), (64, 16, 4096)),
    ((64, 4099, 512), (64, 4112, 512)),
    ((1, 4099, 512), (1, 4112, 512)),
    ((1, 512, 512), (2, 512, 512)),
    ((0, 4096, 512), (1, 4096, 512)),
    ((5, 4096, 512), (6, 4096, 512)),
    ((33, 4096, 512), (48, 4096, 512)),
)


def run(directory: Path) -> Path:
    """Measure the layers of all recipes on all shapes, and write ``ragged.md``."""
    about = provenance(packages=(), kernels=processor())
    lines = ["# Ragged shapes\n", "Time over that of the padded neighbour, which took turns with it; medians.\n"]
    lines += [f"- {key}: {value}" for key, value in about.items()]
    names = [f"{_text(ragged)} / {_text(padded)}" for ragged, padded in SHAPES]
    rows = []
    for name, row in RECIPES.items():
        if not row.dynamic or row.weight.reference_only:
            continue
        input, weight = None if row.input is None else row.input.name, row.weight.name
        rows.append([f"`{name}`", *(f"{_ratio(ragged, padded, input, weight):.2f}" for ragged, padded in SHAPES)])
    lines += ["", markdown(["MxNxK", *names], rows, numbers=range(1, len(names) + 1))]
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "ragged.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def _text(shape: Shape) -> str:
    return "x".join(map(str, shape))


def _ratio(ragged: Shape, padded: Shape, input: str | None, weight: str) -> float:
    cases = tuple(_cases((ragged, padded), input, weight))
    seconds = measure(Group("ragged", "linear", "", 0, 0, cases, ()), Budget(25, 0.001, 1.0))
    return seconds["0"] / seconds["1"]


def _cases(shapes: tuple[Shape, ...], input: str | None, text: str) -> Iterator[Case]:
    for index, (m, n, k) in enumerate(shapes):
        call, out = example(m, n, k, input, text, torch.float32), torch.empty(m, n)
        yield Case(str(index), lambda call=call, out=out: torch.ops.lowbit.linear_out(*call, out=out))  # type: ignore[misc]
