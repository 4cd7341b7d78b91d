"""Benchmarks mixed precision against fp32: bytes of a model, peak and time of a step.

``lowbit bench mixed`` writes mixed.md: the demo's GPT, all cases with the same optimizer and batch.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

import lowbit as lb
from lowbit.bench.timing import Budget, Case, Group, measure
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.demo.optimizers import state_bytes
from lowbit.machine import provenance
from lowbit.models.ties import model_bytes, tensor_bytes
from lowbit.tables import markdown

#: Sequences per step, each as long as the model's context.
BATCH = 4
#: Warm-up steps: the first allocates the optimizer's states.
WARM_UP = 2
_BUDGET = Budget(seconds=120)


@dataclass(frozen=True)
class Contender:
    """Arguments of ``mixed_``; plain fp32 if ``precision`` is None."""

    name: str
    precision: str | None = None
    working_copies: bool = False
    fp32_gradients: bool | None = None


CONTENDERS = (
    Contender("fp32"),
    Contender("bf16", "bf16"),
    Contender("bf16, working copies", "bf16", True),
    Contender("bf16, working copies, gradients in fp32", "bf16", True, True),
    Contender("fp16, scaled loss", "fp16"),
    Contender("fp16, scaled loss, working copies", "fp16", True),
)


class Training:
    """A model that trains as the contender says. ``step()`` does forward, backward and the optimizer step."""

    def __init__(self, contender: Contender, config: GPTConfig) -> None:
        self.model = GPT(config)
        if contender.precision is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings about slow precisions, which the table shows
                lb.train.mixed_(
                    self.model,
                    contender.precision,
                    working_copies=contender.working_copies,
                    fp32_gradients=contender.fp32_gradients,
                )
        self.optimizer = lb.optim.AdamW(self.model.parameters(), bits=32, master="fp32")
        self.scaler = lb.train.LossScaler(enabled=contender.precision == "fp16")
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(config.vocab, (BATCH, config.context + 1), generator=generator)
        self.inputs, self.targets = tokens[:, :-1], tokens[:, 1:].flatten()
        for _ in range(WARM_UP):
            self.step()

    def backward(self) -> None:
        loss = F.cross_entropy(self.model(self.inputs).flatten(0, 1), self.targets)
        self.scaler.scale(loss).backward()

    def step(self) -> None:
        self.backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def held(self) -> tuple[float, float, float]:
        """Bytes per parameter of weights, gradients, and optimizer states with masters."""
        self.backward()
        grads = tensor_bytes(p.grad for p in self.model.parameters() if p.grad is not None)
        self.optimizer.zero_grad()
        count = sum(p.numel() for p in self.model.parameters())
        return model_bytes(self.model) / count, grads / count, state_bytes(self.optimizer) / count


def table(config: GPTConfig) -> str:
    """One row per contender; steps take turns."""
    trainings = {contender.name: Training(contender, config) for contender in CONTENDERS}
    cases = tuple(Case(name, training.step) for name, training in trainings.items())
    seconds = measure(Group("mixed", "step", "GPT", 0, 0, cases, ()), _BUDGET)
    base = next(iter(trainings))
    peaks = {name: lb.memory.allocated_peak(training.step) for name, training in trainings.items()}
    rows = []
    for name, training in trainings.items():
        held = training.held()
        rows.append(
            (name, *(f"{value:.2f}" for value in (*held, sum(held))), f"{peaks[name] / 2**20:.1f}",
             f"{peaks[name] / peaks[base]:.2f}", f"{1e3 * seconds[name]:.0f}", f"{seconds[name] / seconds[base]:.2f}")
        )  # fmt: skip
    head = ("case", "weights", "gradients", "states and masters", "in all", "peak of a step, MiB", "of fp32's",
            "a step, ms", "of fp32's")  # fmt: skip
    return markdown(head, rows, numbers=range(1, len(head)))


def run(directory: Path) -> Path:
    """Measure, and write ``mixed.md``."""
    directory.mkdir(parents=True, exist_ok=True)
    about, config = provenance(), GPTConfig()
    text = [
        "# Mixed precision\n",
        *(f"- {name}: {value}" for name, value in about.items()),
        "\n## Bytes and time of a step\n",
        f"The demo's GPT ({config.layers} layers, width {config.dim}), {BATCH} x {config.context} tokens, AdamW with "
        "states in fp32. Bytes are a parameter. The peak is what a step allocates beyond what there is before it: "
        "activations, casts and gradients. Steps take turns, and times are medians.\n",
        table(config),
    ]
    path = directory / "mixed.md"
    path.write_text("\n".join(text) + "\n")
    return path
