"""Benchmarks all memory techniques on one model: peak and time of a step, relative to the plain step.

``lowbit bench techniques`` writes techniques.md. Cases take turns; times are medians of processor time.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowbit as lb
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.machine import provenance
from lowbit.models import find_blocks
from lowbit.tables import markdown

#: Rows and tokens of a batch, and timed steps; below, the model.
ROWS, LENGTH, TIMES = 8, 256, 3
CONFIG = GPTConfig(vocab=1024, context=LENGTH, layers=6, heads=4, dim=256, hidden=768)


@dataclass(frozen=True)
class Technique:
    """A technique under test.

    ``change(model)`` prepares a model; ``around(directory)`` is a context for each step; ``parts``: micro-batches;
    ``optimizer(model, directory)`` makes an optimizer; ``fused``: the loss is computed without logits; ``mapped``:
    states are in files.
    """

    name: str
    change: Callable[[nn.Module], object] = lambda model: None
    around: Callable[[str], AbstractContextManager[Any]] = lambda directory: nullcontext()
    optimizer: Callable[[nn.Module, str], torch.optim.Optimizer] = lambda model, directory: torch.optim.AdamW(
        model.parameters(), lr=1e-4
    )
    parts: int = 1
    fused: bool = False
    mapped: bool = False


def _policy(policy: str, **settings: Any) -> Callable[[nn.Module], object]:
    return lambda model: lb.memory.checkpoint_(model, policy, **settings)


def _planned(budget: str) -> Callable[[nn.Module], object]:
    return lambda model: lb.memory.checkpoint_(model, lb.memory.plan_checkpoints(model, _tokens(), budget))


def _torch_blocks(model: nn.Module) -> None:
    """torch's checkpointing of each block."""
    for block in find_blocks(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _offloaded_states(model: nn.Module, directory: str) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    lb.optim.offload_(optimizer, directory)
    return optimizer


def _fp8_compressed(model: nn.Module) -> None:
    lb.train.prepare_(model, "fp8")
    lb.train.mixed_(model, "bf16")
    lb.train.compress_activations_(model)


def _eight_bits(model: nn.Module, directory: str) -> torch.optim.Optimizer:
    return lb.optim.AdamW(model.parameters(), lr=1e-4, bits=8)


def _in_backward(model: nn.Module, directory: str) -> torch.optim.Optimizer:
    return lb.optim.in_backward_(model, lb.optim.AdamW, lr=1e-4, bits=32)


TECHNIQUES = (
    Technique("plain"),
    Technique("torch.utils.checkpoint of each block", _torch_blocks),
    Technique('checkpoint_(model, "block")', _policy("block")),
    Technique('checkpoint_(model, "attention")', _policy("attention")),
    Technique('checkpoint_(model, "mlp")', _policy("mlp")),
    Technique('checkpoint_(model, "every:2")', _policy("every:2")),
    Technique('checkpoint_(model, "sqrt")', _policy("sqrt")),
    Technique('checkpoint_(model, "save_matmuls")', _policy("save_matmuls")),
    Technique('checkpoint_(model, plan_checkpoints(model, batch, "80%"))', _planned("80%")),
    Technique('checkpoint_(model, plan_checkpoints(model, batch, "60%"))', _planned("60%")),
    Technique('mixed_(model, "bf16")', lambda model: lb.train.mixed_(model, "bf16")),
    Technique("FP8 with compress_activations_", _fp8_compressed),
    Technique("micro_batches(batch, 2)", parts=2),
    Technique("micro_batches(batch, 4)", parts=4),
    Technique("linear_cross_entropy", fused=True),
    Technique("AdamW(bits=8)", optimizer=_eight_bits),
    Technique("in_backward_", optimizer=_in_backward),
    Technique("offload_(optimizer, directory)", optimizer=_offloaded_states, mapped=True),
    Technique("offload_activations(directory)", around=lb.memory.offload_activations),
    Technique('"block" and offload_activations(directory)', _policy("block"), lb.memory.offload_activations),
)


def _tokens() -> Tensor:
    return torch.randint(CONFIG.vocab, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


class Case:
    """A model that trains with a technique."""

    def __init__(self, technique: Technique, model: nn.Module, directory: str) -> None:
        self.technique, self.directory, self.batch = technique, directory, _tokens()
        self.model = copy.deepcopy(model)
        technique.change(self.model)
        self.optimizer = technique.optimizer(self.model, directory)
        self.times: list[float] = []
        self.losses = [self.step() for _ in range(2)]

    def loss(self, part: Tensor) -> Tensor:
        targets = part[:, 1:].flatten()
        if not self.technique.fused:
            logits = self.model(part)
            return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets)
        kept: list[Tensor] = []
        head: Any = self.model.lm_head
        replaced = head.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
        forward, head.forward = head.forward, lambda hidden: hidden.new_zeros(0)
        try:
            self.model(part)
        finally:
            head.forward = forward
            replaced.remove()
        return lb.memory.linear_cross_entropy(kept[0][:, :-1].flatten(0, 1), head.weight, targets)

    def step(self) -> float:
        total = 0.0
        with self.technique.around(self.directory):
            for part, weight in lb.memory.micro_batches(self.batch, self.technique.parts):
                loss = self.loss(part) * weight
                loss.backward()
                total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def timed(self) -> None:
        begin = time.process_time()
        self.step()
        self.times.append(time.process_time() - begin)

    def held(self) -> int:
        """The peak of a step, including weights and states in memory."""
        with lb.memory.profile(self.model) as profile:
            self.step()
        mapped = sum(size for kind, size in profile.by_kind.items() if kind in ("optimizer state", "master copies"))
        other_bytes = profile.by_kind.get("other", 0)  # memory of the other cases
        return profile.peak_bytes - other_bytes - (mapped if self.technique.mapped else 0)


def run(directory: Path) -> Path:
    """Measure, and write ``techniques.md``."""
    directory.mkdir(parents=True, exist_ok=True)
    about = provenance()
    torch.manual_seed(0)
    model = GPT(CONFIG)
    with tempfile.TemporaryDirectory() as scratch:
        cases = []
        for number, technique in enumerate(TECHNIQUES):
            place = Path(scratch) / str(number)
            place.mkdir()
            cases.append(Case(technique, model, str(place)))
        for _ in range(TIMES):
            for case in cases:
                case.timed()
        table = _table(cases)
    count = sum(p.numel() for p in model.parameters())
    text = [
        "# Techniques of saving memory\n",
        *(f"- {name}: {value}" for name, value in about.items()),
        f"\nA GPT of {count / 1e6:.1f} million parameters ({CONFIG.layers} layers, width {CONFIG.dim}), {ROWS} x "
        f"{LENGTH} tokens, fp32 and torch's AdamW but where a row says otherwise. The peak is what torch's allocator "
        "holds in a step, weights and states included; files are not. Saved is beside the plain step: of the whole "
        "peak, and of what is above weights and states. Times are the processor's, medians of steps that take turns. "
        "Losses "
        "are those of the first two steps.\n",
        table,
    ]
    path = directory / "techniques.md"
    path.write_text("\n".join(text) + "\n")
    return path


def _table(cases: list[Case]) -> str:
    plain = cases[0]
    held = [case.held() for case in cases]
    fixed = 3 * sum(p.nbytes for p in plain.model.parameters())  # weights and the two states of AdamW
    rows = []
    for case, size in zip(cases, held, strict=True):
        same = "every bit" if case.losses == plain.losses else f"{abs(case.losses[1] / plain.losses[1] - 1):.1e}"
        rows.append(
            (case.technique.name, f"{size / 2**20:.1f}", f"{1 - size / held[0]:.0%}",
             f"{(held[0] - size) / (held[0] - fixed):.0%}",
             f"{statistics.median(case.times) / statistics.median(plain.times):.2f}", same)
        )  # fmt: skip
    head = ("technique", "peak, MiB", "saved of the peak", "of activations", "time of plain's", "losses equal in")
    return markdown(head, rows, numbers=range(1, 5))
