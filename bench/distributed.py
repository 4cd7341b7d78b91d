"""Benchmarks distributed training: losses of low-bit gradients after 500 steps, bytes sent, and memory per process.

``lowbit bench distributed`` writes distributed.md. Two gloo processes train the demo's GPT on its text, each case with
the same batches.
"""

from __future__ import annotations

import ctypes
import gc
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
from lowbit.memory.rss import peak_bytes, reset_peak, resident_bytes
from lowbit.plan.fitting.choices import words
from lowbit.plan.fitting.predict import Predictor
from lowbit.plan.fitting.run import Run
from lowbit.plan.settings import TrainingSettings
from lowbit.plan.subject import Subject
from lowbit.sizes import amount
from lowbit.tables import markdown

PROCESSES, STEPS, BATCH, SEED = 2, 500, 8, 3
CONFIG = GPTConfig(vocab=512, context=64, layers=3, heads=2, dim=128, hidden=256)
#: Windows of the held-out loss, and the number of last steps of the mean training loss.
HELD_OUT, LAST = 64, 50


@dataclass(frozen=True)
class Case:
    """How gradients are summed: by the backend, in a fixed order, or in a format."""

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
    """The mean of the last training losses, the held-out loss, and bytes sent per process and step."""
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


@dataclass(frozen=True)
class Gather:
    """How ``zero3`` gathers weights."""

    name: str
    bits: str | None = None
    precision: torch.dtype | None = None


GATHERS = (
    Gather("fp32"),
    Gather("bf16 (`precision=torch.bfloat16`)", precision=torch.bfloat16),
    *(Gather(f"`all_gather_(model, {bits!r})`", bits) for bits in ("fp8-tensor", "fp8", "int8")),
)


def _gathered(case: Gather, corpus: Corpus, rank: int) -> int:
    """Bytes of weights that a process sends in the third step."""
    torch.manual_seed(0)
    gpt = GPT(CONFIG)
    if case.bits is not None:
        lb.distributed.all_gather_(gpt, case.bits)
    model, optimizer = lb.distributed.shard_(
        gpt, torch.optim.AdamW(gpt.parameters(), lr=2e-3), "zero3", precision=case.precision
    )
    sent = 0
    for step in range(3):
        inputs, targets = corpus.batch(step, BATCH, CONFIG.context, SEED)
        with lb.distributed.traffic() as traffic:
            F.cross_entropy(model(inputs[rank::PROCESSES]).flatten(0, 1), targets[rank::PROCESSES].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        sent = traffic.total - traffic.bytes["reduce-scatter"]
    return sent


#: A larger model for memory, relative to which the pages of libraries are few.
LARGER = GPTConfig(vocab=2048, layers=4, heads=4, dim=256, hidden=704)
PLANNED = (
    *(
        TrainingSettings(gpus=PROCESSES, strategy=strategy)
        for strategy in ("ddp", "zero1", "zero2-replicated", "zero2", "zero3")
    ),
    TrainingSettings(gpus=PROCESSES, strategy="ddp", precision="bf16"),
    TrainingSettings(gpus=PROCESSES, strategy="zero1", precision="bf16"),
    TrainingSettings(gpus=PROCESSES, strategy="zero2-replicated", checkpoint="block", micro_batches=2),
    TrainingSettings(gpus=PROCESSES, strategy="zero2", checkpoint="block"),
    TrainingSettings(gpus=PROCESSES, strategy="zero3", checkpoint="block", micro_batches=2),
)


def _tokens() -> torch.Tensor:
    return torch.randint(LARGER.vocab, (4, 64), generator=torch.Generator().manual_seed(0))


def _held(settings: TrainingSettings) -> int:
    """Peak bytes of this process in the third step, minus the bytes before.

    In the second step, DDP allocates its buckets again and has not written to them yet.
    """
    gc.collect()
    before = resident_bytes()
    run = Run(GPT(LARGER), settings, None, None, {"lr": 1e-3})
    for _ in range(3):
        gc.collect()
        reset_peak()
        run.step(_tokens())
    return peak_bytes() - before


def _peaks() -> list[int]:
    libc = ctypes.CDLL(None)
    for option, value in ((-3, 1 << 16), (-1, 1 << 16), (-8, 1)):  # return freed memory to the system immediately
        libc.mallopt(option, value)
    for settings in (PLANNED[5], PLANNED[-1]):  # one-time allocations of libraries
        _held(settings)
    return [_held(settings) for settings in PLANNED]


def _process(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=PROCESSES)
    peaks = _peaks()  # first: reused freed memory would not be counted
    corpus = Corpus.load(None, CONFIG.vocab)
    sent = [_gathered(case, corpus, rank) for case in GATHERS]
    found = [_train(case, corpus, rank) for case in CASES]
    if rank == 0:
        torch.save((found, sent, peaks), f"{directory}/found.pt")
    dist.destroy_process_group()


def run(directory: Path) -> Path:
    """Measure, and write ``distributed.md``."""
    directory.mkdir(parents=True, exist_ok=True)
    about = provenance()
    with TemporaryDirectory() as meeting:
        mp.start_processes(_process, (meeting,), PROCESSES, start_method="spawn")
        found, sent, peaks = torch.load(f"{meeting}/found.pt")
    exact, plain = found[0][1], found[0][2]
    cells = [
        (case.name, f"{last:.4f}", f"{held:.4f}", f"{held / exact - 1:+.2%}", amount(sent), f"{plain / sent:.2f}",
         f"{plain / 2 / sent:.2f}")
        for case, (last, held, sent) in zip(CASES, found, strict=True)
    ]  # fmt: skip
    head = ("gradients", "training loss", "held-out loss", "relative to fp32", "sent per step", "times less than fp32",
            "than bf16")  # fmt: skip
    gathers = [
        (case.name, amount(size), f"{sent[0] / size:.2f}", f"{sent[1] / size:.2f}")
        for case, size in zip(GATHERS, sent, strict=True)
    ]
    predictor = Predictor(Subject(GPT(LARGER), _tokens()))
    held = [
        (words(settings), f"{predicted / 1e6:.1f}", f"{peak / 1e6:.1f}", f"{predicted / peak - 1:+.1%}")
        for settings, peak in zip(PLANNED, peaks, strict=True)
        for predicted in [predictor.whole(settings).peak_bytes]
    ]
    text = [
        "# Distributed training\n",
        *(f"- {name}: {value}" for name, value in about.items()),
        "\n## Low-bit gradients\n",
        f"{PROCESSES} gloo processes train a GPT of {sum(p.numel() for p in GPT(CONFIG).parameters()):,} parameters "
        f"with DistributedDataParallel and torch's AdamW for {STEPS} steps of {BATCH} windows of {CONFIG.context} "
        f"tokens. The training loss is the mean of the last {LAST} steps; the held-out loss is over {HELD_OUT} "
        "windows. Sent: bytes that one process sends to others for gradients.\n",
        markdown(head, cells, numbers=range(1, len(head))),
        "\n## Low-bit weights\n",
        "Bytes of weights that one process sends per step of `zero3`, for the same model. Its embedding and head are "
        "gathered in fp32, or in the given precision.\n",
        markdown(("gathered", "sent per step", "times less than fp32", "than bf16"), gathers, numbers=(1, 2, 3)),
        "\n## Memory per process\n",
        f"The peak that `lb.fit(gpus={PROCESSES})` predicts for each process, and the peak resident memory in the "
        f"third step, minus the memory before: a GPT of {sum(p.numel() for p in GPT(LARGER).parameters()):,} "
        "parameters, 4 sequences of 64 tokens in each process.\n",
        markdown(("training", "predicted, MB", "measured", "prediction error"), held, numbers=(1, 2, 3)),
    ]
    path = directory / "distributed.md"
    path.write_text("\n".join(text) + "\n")
    return path
