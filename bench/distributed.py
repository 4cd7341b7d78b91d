"""Gradients in few bits on two processes: where 500 steps end, and what a process sends.

``lowbit bench distributed`` writes distributed.md: the demo's GPT on its text, every case with the same batches.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

import lowbit as lb
from lowbit.demo.data import Corpus
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.machine import provenance
from lowbit.sizes import amount
from lowbit.tables import markdown

PROCESSES, STEPS, BATCH, SEED = 2, 500, 8, 3
CONFIG = GPTConfig(vocab=512, context=64, layers=3, heads=2, dim=128, hidden=256)
#: Held-out windows that a loss is of, and the last steps over whose training losses the mean is taken.
HELD_OUT, LAST = 64, 50


@dataclass(frozen=True)
class Case:
    """How gradients are summed: by the backend, in order, or in a format."""

    name: str
    bits: str | None = None
    error_feedback: bool = False
    ordered: bool = False


CASES = (
    Case("fp32, summed by gloo"),
    Case("fp32, in order (`order_gradients_`)", ordered=True),
    *(Case(f"{bits}{', error feedback' if feedback else ''}", bits, feedback)
      for bits in ("int8", "fp8", "int4:group64", "int2:group64") for feedback in (False, True)),
)  # fmt: skip


def _train(case: Case, corpus: Corpus, rank: int) -> tuple[float, float, int]:
    """The mean of the last training losses, the held-out loss, and bytes that a process sends in a step."""
    torch.manual_seed(0)
    gpt = GPT(CONFIG)
    model, optimizer = lb.distributed.shard_(gpt, torch.optim.AdamW(gpt.parameters(), lr=2e-3), "ddp")
    if case.ordered:
        lb.distributed.order_gradients_(model)
    if case.bits is not None:
        lb.distributed.compress_gradients_(model, case.bits, case.error_feedback)
    losses, sent = [], 0
    for step in range(STEPS):
        inputs, targets = corpus.batch(step, BATCH, CONFIG.context, SEED)
        share = slice(rank * BATCH // PROCESSES, (rank + 1) * BATCH // PROCESSES)
        with lb.distributed.traffic() as traffic:
            loss = F.cross_entropy(model(inputs[share]).flatten(0, 1), targets[share].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / PROCESSES)
        sent = traffic.total
    held = corpus.held_out_windows(HELD_OUT, CONFIG.context)
    with torch.no_grad():
        held_loss = float(F.cross_entropy(gpt(held[:, :-1]).flatten(0, 1), held[:, 1:].flatten()))
    return statistics.mean(losses[-LAST:]), held_loss, sent


def _process(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=PROCESSES)
    corpus = Corpus.load(None, CONFIG.vocab)
    found = [_train(case, corpus, rank) for case in CASES]
    if rank == 0:
        torch.save(found, f"{directory}/found.pt")
    dist.destroy_process_group()


def run(directory: Path) -> Path:
    """Measure, and write ``distributed.md``."""
    directory.mkdir(parents=True, exist_ok=True)
    about = provenance()
    with TemporaryDirectory() as meeting:
        mp.start_processes(_process, (meeting,), PROCESSES, start_method="spawn")
        found = torch.load(f"{meeting}/found.pt")
    exact, plain = found[0][1], found[0][2]
    cells = [
        (case.name, f"{last:.4f}", f"{held:.4f}", f"{held / exact - 1:+.2%}", amount(sent), f"{plain / sent:.2f}",
         f"{plain / 2 / sent:.2f}")
        for case, (last, held, sent) in zip(CASES, found, strict=True)
    ]  # fmt: skip
    head = ("gradients", "training loss", "held-out loss", "beside fp32", "sent in a step", "times less than fp32",
            "than bf16")  # fmt: skip
    text = [
        "# Gradients in few bits\n",
        *(f"- {name}: {value}" for name, value in about.items()),
        f"\n{PROCESSES} gloo processes train a GPT of {sum(p.numel() for p in GPT(CONFIG).parameters()):,} parameters "
        f"with DistributedDataParallel and torch's AdamW for {STEPS} steps of {BATCH} windows of {CONFIG.context} "
        f"tokens. The training loss is the mean of the last {LAST} steps; the held-out loss is of {HELD_OUT} windows. "
        "Sent is what one process sends to others for gradients.\n",
        markdown(head, cells, numbers=range(1, len(head))),
    ]
    path = directory / "distributed.md"
    path.write_text("\n".join(text) + "\n")
    return path
