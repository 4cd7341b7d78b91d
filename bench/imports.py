"""Benchmarks quantized checkpoints of compressed-tensors on a CPU: memory and speed in lowbit and in transformers.

``lowbit bench imports`` writes imports.md. The checkpoints are SmolLM2, quantized without data.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

import lowbit as lb
from lowbit.evaluate import models
from lowbit.evaluate.loaders import decoded_gguf
from lowbit.machine import provenance
from lowbit.sizes import amount
from lowbit.tables import markdown

__all__ = ["run"]

#: Preset and recipe of each checkpoint; groups of 128 do not divide the columns.
CASES = {
    "W4A16": "int4-weight-only:group64", "NVFP4A16": "nvfp4-weight-only", "MXFP4A16": "mxfp4-weight-only",
    "FP8_DYNAMIC": "fp8", "W8A8": "int8",
}  # fmt: skip

#: Rounds in which programs take turns, tokens of the prompt, and tokens generated.
ROUNDS, PROMPT, NEW = 3, 64, 16

#: Loads a directory, generates, and prints the bytes of the model's tensors, resident bytes added, tokens per second.
_PROGRAM = """
import gc, json, sys, time, warnings
warnings.filterwarnings("ignore")
import torch, transformers
import lowbit as lb
from lowbit.memory import heap
from lowbit.memory.rss import resident_bytes
torch.set_num_threads(1)
path, program, prompt, new = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
gc.collect(); heap.trim()
before = resident_bytes()
with torch.no_grad():
    if program == "lowbit":
        model = lb.load_model(path, prepack=True)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
    ids = torch.arange(100, 100 + prompt)[None]
    def seconds(count):
        begin = time.perf_counter()
        model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        return time.perf_counter() - begin
    seconds(2)
    speed = new / (seconds(new + 1) - seconds(1))
gc.collect(); heap.trim()
storages = [t.untyped_storage() for t in (*model.parameters(), *model.buffers())]
tensors = {storage.data_ptr(): storage.nbytes() for storage in storages}
print("ANSWER" + json.dumps([sum(tensors.values()), resident_bytes() - before, speed]))
"""


class Row(NamedTuple):
    """Bytes of the model's tensors, resident bytes that loading and generating added, and tokens per second."""

    tensors: int
    resident: int
    speed: float


def measured(path: Path, program: str) -> Row:
    command = [sys.executable, "-c", _PROGRAM, str(path), program, str(PROMPT), str(NEW)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("ANSWER"))
    return Row(*json.loads(line.removeprefix("ANSWER")))


def median(rows: list[Row]) -> Row:
    """The median of each field."""
    return Row(*(statistics.median(values) for values in zip(*rows, strict=True)))


def table(directory: Path) -> str:
    """All checkpoints, in both programs."""
    source = models.find("smollm2").location()
    rows: dict[tuple[str, str], list[Row]] = {}
    for name, recipe in CASES.items():
        model = decoded_gguf(source)[0].to(torch.bfloat16)
        lb.quantize_(model, recipe)
        lb.export(model, "compressed-tensors", directory / name)
    for _ in range(ROUNDS):
        for name in CASES:
            for program in ("transformers", "lowbit"):
                rows.setdefault((name, program), []).append(measured(directory / name, program))
    cells = []
    for name in CASES:
        theirs, ours = (median(rows[name, program]) for program in ("transformers", "lowbit"))
        cells.append(
            (name, amount(theirs.tensors), amount(ours.tensors), f"{ours.tensors / theirs.tensors:.2f}",
             f"{ours.resident / theirs.resident:.2f}", f"{theirs.speed:.1f}", f"{ours.speed:.1f}",
             f"{ours.speed / theirs.speed:.2f}")
        )  # fmt: skip
    head = ("checkpoint", "transformers, tensors", "lowbit, tensors", "ratio", "resident, ratio",
            "transformers, tokens/s", "lowbit, tokens/s", "ratio")  # fmt: skip
    return markdown(head, cells, numbers=range(1, len(head)))


def run(directory: Path) -> Path:
    """Measure, and write ``imports.md``."""
    about = provenance("lowbit bench imports", packages=("transformers", "compressed-tensors"))
    with TemporaryDirectory() as scratch:
        measurements = table(Path(scratch))
    lines = [
        "# Quantized checkpoints on a CPU\n",
        *(f"- {name}: {value}" for name, value in about.items()),
        "\nSmolLM2-135M in the layout of compressed-tensors, in bf16, on one thread. Bytes are those of parameters and "
        f"buffers after {NEW} generated tokens; resident bytes are those that loading and generating added to the "
        f"process. lowbit: `lb.load_model(path, prepack=True)`. transformers decodes the weights. Medians of {ROUNDS} "
        "rounds in which the programs take turns.\n",
        measurements,
    ]  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "imports.md"
    path.write_text("\n".join(lines) + "\n")
    return path
