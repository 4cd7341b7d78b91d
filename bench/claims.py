"""Compares common statements about memory and quantization with measurements on a hand-written transformer.

``lowbit bench claims`` writes claims.md. docs/numbers.md explains the results.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import lowbit as lb
from lowbit.bench.fit_steps import by, training
from lowbit.bench.handwritten import LARGE, SMALL, SUBJECT, Shape, meta_subject, new_model, peak
from lowbit.machine import provenance
from lowbit.plan.settings import TrainingSettings
from lowbit.sizes import amount
from lowbit.tables import markdown

__all__ = ["Claim", "run"]

#: Steps of the median time; cases take turns.
TIMES = 5

PLAIN = TrainingSettings()
BLOCK = TrainingSettings(checkpoint="block")
ATTENTION = TrainingSettings(checkpoint="attention")
SQRT = TrainingSettings(checkpoint="sqrt")
BF16 = TrainingSettings(precision="bf16")

#: All offloads: states, activations and weights on disk, or in host memory for a GPU.
OFFLOADED = TrainingSettings(offload_states=True, offload_activations=True, offload_weights=True, checkpoint="block")

#: The settings of a sequence of techniques, each added to the ones before.
LADDER = (
    ("plain fp32", PLAIN),
    ('checkpoint_("block")', BLOCK),
    ("+ mixed_(bf16)", replace(BLOCK, precision="bf16")),
    ("+ fuse_loss_, attention_", replace(BLOCK, precision="bf16", fused_loss=True, attention=True)),
    ("+ 8-bit AdamW", replace(BLOCK, precision="bf16", fused_loss=True, attention=True, bits=8)),
    ("+ 4 micro-batches", replace(BLOCK, precision="bf16", fused_loss=True, attention=True, bits=8, micro_batches=4)),
    ("+ states and weights offloaded",
     replace(OFFLOADED, precision="bf16", fused_loss=True, attention=True, bits=8, micro_batches=4)),
)  # fmt: skip


class Claim(NamedTuple):
    """A statement, the command that tests it, and its result."""

    statement: str
    command: str
    result: str


def activations(settings: TrainingSettings, shape: Shape = LARGE) -> int:
    """Estimated peak bytes minus weights and optimizer states."""
    weights = sum(p.nbytes for p in meta_subject(shape).model.parameters())
    return peak(settings, shape) - 3 * weights


def times(*cases: TrainingSettings) -> list[float]:
    """Median processor time of a step of the small model per case; cases take turns."""
    spent: list[list[float]] = [[] for _ in cases]
    for _ in range(TIMES):
        for settings, seconds in zip(cases, spent, strict=True):
            with training(by(settings, SUBJECT), SUBJECT) as (run, batch):
                begin = time.process_time()
                run.step(batch)
                seconds.append(time.process_time() - begin)
    return [statistics.median(seconds) for seconds in spent]


def _saved(settings: TrainingSettings) -> str:
    return f"{1 - activations(settings) / activations(PLAIN):.0%}"


def _checkpointing() -> Iterator[Claim]:
    plain, block, attention, sqrt = times(PLAIN, BLOCK, ATTENTION, SQRT)
    yield Claim(
        "Checkpointing saves 30 to 70% of the activations for 20 to 33% more time",
        '`lb.memory.checkpoint_(model, "block")`',
        f"saves {_saved(BLOCK)} of the activations; the step takes {block / plain:.2f} times as long",
    )
    yield Claim(
        "Recomputing attention alone saves 60 to 80% for 10 to 15% more time",
        '`lb.memory.checkpoint_(model, "attention")`',
        f"saves {_saved(ATTENTION)}; {attention / plain:.2f} times as long",
    )
    yield Claim(
        "With checkpoints every sqrt(N) of N layers, memory grows as sqrt(N)",
        '`lb.memory.checkpoint_(model, "sqrt")`',
        f"{LARGE.layers} layers: saves {_saved(SQRT)}; {sqrt / plain:.2f} times as long. `block` saves more, because "
        f"one block recomputes at a time",
    )


def _precision() -> Iterator[Claim]:
    fused = TrainingSettings(fused_loss=True)
    yield Claim(
        "Mixed precision halves memory",
        '`lb.train.mixed_(model, "bf16")`',
        f"peak {amount(peak(PLAIN))} to {amount(peak(BF16))}; without logits (`fuse_loss_`) {amount(peak(fused))} to "
        f"{amount(peak(replace(fused, precision='bf16')))}",
    )
    sizes = []
    for name in ("int8", "int4-weight-only"):
        rows = lb.quantize_(new_model(SMALL), name).layers
        sizes.append(sum(row.bytes_before for row in rows) / sum(row.bytes_after for row in rows))
    yield Claim(
        "INT8 weights take a quarter of fp32, INT4 weights an eighth",
        '`lb.quantize_(model, "int8")`, `"int4-weight-only"`',
        f"{sizes[0]:.2f} and {sizes[1]:.2f} times smaller, scales included",
    )


def _sums() -> Iterator[Claim]:
    static = lb.estimate(parameters=7e9, optimizer="adamw")
    yield Claim(
        "7B parameters in fp32 with AdamW: 28 GB weights, 28 GB gradients, 56 GB states",
        '`lb.estimate(parameters=7e9, optimizer="adamw")`',
        ", ".join(f"{kind} {size / 1e9:.0f} GB" for kind, size in static.by_kind.items() if size)
        + f"; {static.total_bytes / 1e9:.0f} GB",
    )
    weights, gradients, states = 28 * 10**9, 28 * 10**9, 56 * 10**9
    per_process = {
        name: strategy.bytes(weights, gradients, states, 8) / 1e9
        for name, strategy in lb.distributed.STRATEGIES.items()
        if not strategy.one_process and not strategy.grouped
    }
    yield Claim(
        "ZeRO stages 1, 2 and 3 shard states, gradients and parameters",
        '`lb.distributed.STRATEGIES["zero1"].bytes(P, G, S, 8)`, for the 7B model',
        ", ".join(f"`{name}` {size:.1f} GB" for name, size in per_process.items()),
    )
    count = sum(p.numel() for p in new_model(LARGE, "meta").parameters())
    yield Claim(
        f"A transformer of {LARGE.layers} layers of width {LARGE.width} has 350M parameters",
        "`sum(p.numel() for p in model.parameters())`",
        f"{count / 1e6:,.0f}M: 12 width^2 parameters per layer are {12 * LARGE.width**2 * LARGE.layers / 1e6:,.0f}M",
    )


def _ladder() -> Iterator[Claim]:
    peaks = [(name, peak(settings)) for name, settings in LADDER]
    yield Claim(
        "Techniques together reduce 24 GB to 3 GB",
        "`lowbit fit --ladder`, or `lb.fit` with a budget",
        "; ".join(f"{name} {amount(size)}" for name, size in peaks),
    )


def _largest(settings: TrainingSettings, budget: int) -> int:
    """The most layers of the large model's width whose peak is at most ``budget``."""
    one, two = (peak(settings, LARGE._replace(layers=layers)) for layers in (2, 4))
    per_layer = (two - one) / 2
    return int(2 + (budget - one) // per_layer) if per_layer > 0 else 0


def _offload() -> Iterator[Claim]:
    budget, deep = peak(PLAIN), LARGE._replace(layers=2 * LARGE.layers)
    layers = _largest(TrainingSettings(offload_states=True), budget)
    yield Claim(
        "Offload trains models that are 2 to 4 times larger",
        "`lb.optim.offload_`, `lb.memory.offload_activations`, `lb.memory.stream_blocks_`",
        f"states: {layers / LARGE.layers:.1f} times as many layers in {amount(budget)}; states, activations and "
        f"weights: {amount(peak(OFFLOADED))} for {LARGE.layers} layers, {amount(peak(OFFLOADED, deep))} for "
        f"{deep.layers}",
    )


def _parts() -> Iterator[Claim]:
    one_row_each = TrainingSettings(micro_batches=LARGE.rows)
    yield Claim(
        f"{LARGE.rows} micro-batches need 1/{LARGE.rows} of the activations",
        f"`lb.memory.micro_batches(batch, {LARGE.rows})`",
        f"saves {_saved(one_row_each)}",
    )
    long, short = LARGE._replace(length=2 * LARGE.length), LARGE
    own, tiled = TrainingSettings(fused_loss=True), TrainingSettings(attention=True, fused_loss=True)
    growth = [activations(s, long) / activations(s, short) for s in (own, tiled)]
    yield Claim(
        "Attention without scores needs memory linear in the length, plain attention quadratic",
        "`lb.memory.attention_(model)`",
        f"twice the length: activations times {growth[0]:.1f} with scores, {growth[1]:.1f} without",
    )


SECTIONS: tuple[Callable[[], Iterator[Claim]], ...] = (
    _checkpointing, _precision, _sums, _ladder, _offload, _parts,
)  # fmt: skip


def run(directory: Path) -> Path:
    """Measure, and write ``claims.md``."""
    directory.mkdir(parents=True, exist_ok=True)
    about: dict[str, Any] = provenance()
    claims = [claim for section in SECTIONS for claim in section()]
    text = [
        "# Common statements, measured\n",
        *(f"- {name}: {value}" for name, value in about.items()),
        f"\nThe model is that of [handwritten.md](handwritten.md). Memory: {LARGE.layers} layers of width "
        f"{LARGE.width}, {LARGE.rows} x {LARGE.length} tokens, estimated on the meta device. Times: {SMALL.layers} "
        f"layers of width {SMALL.width}, processor time, medians of {TIMES} steps that take turns.\n",
        markdown(Claim._fields, claims),
    ]
    path = directory / "claims.md"
    path.write_text("\n".join(text) + "\n")
    return path
