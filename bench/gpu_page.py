"""Writes gpu_kernels.md from gpu_kernels.json: ``python -m bench.gpu_page FILE``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lowbit.bench.gpu_roofline import PEAKS, peaks_table, seconds
from lowbit.bench.gpu_rows import CHANNELS, EXPERTS, IMAGES, NO_KERNEL, PIXELS, ROWS_OF_EXPERTS, SIZE
from lowbit.tables import markdown

__all__ = ["faults", "spills", "write"]

_HEAD = ("of", "sm", "backend", "starts", "multiplies with", "registers", "spilled", "shared", "bytes", "time")


def _kernels(cell: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in cell["work"] if "kernel" in one]


def _where(cell: dict[str, Any]) -> str:
    return f"sm_{cell['architecture']} {cell['section']}, {cell['of']}"


def faults(cells: list[dict[str, Any]]) -> list[str]:
    """Kernels that do not compile, lack a matrix instruction or have a forbidden one, and rows on the reference that
    docs/gpu.md does not name.
    """
    found = []
    for cell in cells:
        for one in _kernels(cell):
            said = [f"does not compile: {one['error']}"] if "error" in one else one["faults"]
            found += [f"{_where(cell)}: {one['kernel']} {fault}" for fault in said]
        if cell["backend"] == "reference" and cell["op"] not in NO_KERNEL:
            found.append(f"{_where(cell)}: runs on the reference: {'; '.join(cell['refused'])}")
    return list(dict.fromkeys(found))


def spills(cells: list[dict[str, Any]]) -> dict[tuple[str, str, str], dict[int, tuple[int, int]]]:
    """Spilled bytes and registers per thread by architecture, for each section, subject and kernel."""
    found: dict[tuple[str, str, str], dict[int, tuple[int, int]]] = {}
    for cell in cells:
        for one in _kernels(cell):
            if one.get("spilled"):
                by = found.setdefault((cell["section"], cell["of"], one["kernel"]), {})
                name = cell["architecture"]
                by[name] = max((one["spilled"], one["registers"]), by.get(name, (0, 0)))
    return found


def _spills_table(cells: list[dict[str, Any]]) -> list[str]:
    head = ("section", "of", "kernel", *(f"sm_{name}" for name in PEAKS))
    found = [
        (*where, *("{} at {}".format(*by[name]) if name in by else "-" for name in PEAKS))
        for where, by in spills(cells).items()
    ]
    text = (
        "Bytes that a thread spills, and its registers. 255 registers, or 128 in programs of 16 warps, are the "
        "maximum. With fewer registers, the assembler spills a few bytes so that another program fits on the "
        "multiprocessor.\n"
    )
    return [text, markdown(head, found, numbers=range(3, 8))] if found else []


def _times(name: str, count: int) -> str:
    return name if count == 1 else f"{count} x {name}"


def _started(cell: dict[str, Any]) -> str:
    names = []
    for one in sorted(cell["work"], key=lambda one: ("torch" in one, one.get("torch") == "others")):
        if one.get("torch") == "others":
            names.append(f"{one['count']} of torch")
        else:
            names.append(_times(one.get("kernel") or f"torch: {one['torch']}", one["count"]))
    return ", ".join(names)


def _cells(cell: dict[str, Any]) -> tuple[str, ...]:
    kernels, work, name = _kernels(cell), cell["work"], cell["architecture"]
    if cell["backend"] == "reference":
        reason = NO_KERNEL.get(cell["op"], "; ".join(cell["refused"]))
        return (cell["of"], str(name), f"reference: {reason}", *["-"] * 7)
    matrix = [text for one in kernels for text in one.get("matrix", ())]
    matrix += [f"torch ({one['multiplies']})" for one in work if "torch" in one and one["multiplies"]]
    by_kernel = [", ".join(str(one.get(key, "?")) for one in kernels) for key in ("registers", "spilled", "shared")]
    bytes_moved = sum(one["bytes"] for one in work)
    same = seconds([{**cell["bf16"], "multiplies": "bf16"}], name)
    return (
        cell["of"], str(name), cell["backend"], _started(cell), ", ".join(dict.fromkeys(matrix)) or "-",
        *by_kernel, f"{bytes_moved / cell['ideal']:.2f}", f"{seconds(work, name) / same:.2f}",
    )  # fmt: skip


def _intro(held: dict[str, Any]) -> list[str]:
    cells, versions = held["cells"], ", ".join(f"{name} {value}" for name, value in held["about"].items())
    missing = held["asked"] - len(cells)
    part = "" if not missing else f" {missing} of {held['asked']} rows are missing."
    return [
        "# Kernels for GPUs\n",
        "The kernels of each op on each architecture, and facts about their machine code. No GPU is needed: the "
        "registry selects kernels as in a call, and they are compiled, not run. **Times are estimates, not "
        f"measurements.** Compiled with {versions}.{part}\n",
        f"- Matmuls have an input `[rows, {SIZE}]` in bf16 and a weight `[{SIZE}, {SIZE}]` in a recipe. Matmuls of "
        f"{EXPERTS} experts have {ROWS_OF_EXPERTS} rows that are already quantized. Quantized matrices are "
        f"`[{SIZE}, {SIZE}]` in bf16; parameters have the same shape in their dtype. The convolution is 3 x 3 with "
        f"{IMAGES} images of {PIXELS} x {PIXELS} pixels, {CHANNELS} channels to {CHANNELS}.",
        "- **starts**: kernels, each with its number of launches, then matmuls of torch (`torch: mm` is in bf16), then "
        "the number of other torch ops, which copy tensors.",
        "- **multiplies with**: the matrix instruction in PTX, its operand types, and its name in machine code.",
        "- **registers** per thread, **spilled** stack bytes per thread, and **shared** memory bytes per program, for "
        "each kernel in the order of **starts**.",
        "- **bytes**: the bytes of all tensors of the launches, each tensor once per launch, relative to the bytes of "
        "the op's operands and result. Repeated reads from caches or memory are not counted.",
        "- **time**: the estimated time relative to bf16: for matmuls the same matmul, for codecs a copy of the "
        "matrix, for optimizers the step with bf16 moments. The time of a launch is the maximum of its bytes at the "
        "memory bandwidth and its operations at the tensor-core peak below, for any instruction. Launch overhead, "
        "decoding, and other work besides the matmul are not included.\n",
        peaks_table(),
        "\n## Findings\n",
        "A kernel should compile, not spill, use the matrix instruction of its architecture, and have no instruction "
        "that the [numerics](../../docs/numerics.md) forbid. Only rows that [gpu.md](../../docs/gpu.md) names should "
        "be on the reference.\n",
        *[f"- {text}" for text in faults(cells)],
        *_spills_table(cells),
        *([] if faults(cells) or spills(cells) else ["There is none."]),
    ]


def write(path: Path) -> Path:
    """Write the page of the cells in a file, next to it."""
    held = json.loads(path.read_text())
    text = _intro(held)
    for section in dict.fromkeys(cell["section"] for cell in held["cells"]):
        some = [_cells(cell) for cell in held["cells"] if cell["section"] == section]
        text += [f"\n## {section}\n", markdown(_HEAD, some, numbers=(1, 8, 9))]
    page = path.with_suffix(".md")
    page.write_text("\n".join(text) + "\n")
    return page


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
