"""Processes that are killed or interrupted at any time while they offload and save: ``python tests/faults.py [COUNT]``.

Each child trains with activations and states in files, and saves every step. A kill must lose no checkpoint, and the
next child removes what it left. Ctrl-C must come out as KeyboardInterrupt within 2 seconds, and leave nothing.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import lowbit as lb

#: Seconds that an interrupted process may take to its end, and steps that it makes unless it is stopped.
LIMIT, STEPS = 2.0, 10_000


def train(where: Path, say: Callable[[bytes], object]) -> None:
    """Steps with everything in ``where``, which hold what training holds."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.Tanh())))
    optimizer = lb.optim.offload_(lb.optim.AdamW(model.parameters(), bits=32), where, gradients=True)
    context = lb.memory.offload_activations(where, min_bytes=0)
    for step in range(STEPS):
        with context:
            loss = model(torch.randn(256, 256)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
        if step % 10 == 0:
            lb.distributed.save(where / "checkpoint", model, optimizer, step=step)
            say(b"!")


def child(where: Path) -> tuple[int, int]:
    """A process that trains in ``where``: its number, and a pipe that tells of its checkpoints."""
    reader, writer = os.pipe()
    number = os.fork()
    if number:
        os.close(writer)
        return number, reader
    os.close(reader)
    sys.stderr = open(where.with_suffix(".log"), "a")
    try:
        train(where, lambda word: os.write(writer, word))
    except KeyboardInterrupt:
        os.write(writer, b"^")
        sys.exit(130)
    sys.exit(1)


def stop(where: Path, how: signal.Signals, after: float) -> tuple[int, float]:
    """Stop a child some time after its first checkpoint: its exit code, and the seconds until it has heard or ended.

    The rest of its end is Python's and torch's.
    """
    number, reader = child(where)
    os.read(reader, 1)
    time.sleep(after)
    start = time.perf_counter()
    os.kill(number, how)
    word = b"!"
    while word and not word.endswith(b"^"):
        word = os.read(reader, 1 << 10)
    seconds = time.perf_counter() - start
    code = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
    os.close(reader)
    return code, seconds


def loads(where: Path) -> bool:
    """Whether the checkpoint is whole."""
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.Tanh())))
    found = lb.distributed.load(where / "checkpoint", model, lb.optim.AdamW(model.parameters(), bits=32))
    return found["step"] % 10 == 0


def main() -> None:
    """Kills, then interrupts; ends with an error where one of them lost or left something."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    times, failed = random.Random(0), []
    directory = tempfile.mkdtemp()  # no context: a child that ends leaves the same frames
    where = Path(directory) / "run"
    where.mkdir()
    left = 0
    for _ in range(count):
        stop(where, signal.SIGKILL, times.uniform(0, 0.3))
        left += sum(path.name.startswith("lowbit-offload-") for path in where.iterdir())
        if not loads(where):
            failed.append("kill: no checkpoint")
    print(f"{count} kills: {left} directories were left, each checkpoint is whole", flush=True)
    slowest = 0.0
    for _ in range(count):
        code, seconds = stop(where, signal.SIGINT, times.uniform(0, 0.3))
        slowest = max(slowest, seconds)
        names = sorted(path.name for path in where.iterdir())
        if code != 130 or seconds > LIMIT or names != ["checkpoint"] or not loads(where):
            failed.append(f"interrupt: code {code}, {seconds:.2f} s, {names}")
    print(f"{count} interrupts: the slowest took {slowest:.2f} s", flush=True)
    log = Path(directory) / "run.log"
    print("said:", sorted(set(log.read_text().splitlines()))[:5], *failed, sep="\n")
    shutil.rmtree(directory)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
