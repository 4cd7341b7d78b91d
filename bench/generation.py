"""Benchmarks generation plans: predicted and measured peaks of SmolLM2 within budgets, and its perplexity.

``lowbit bench generation --text FILE`` writes generation.md.
"""

from __future__ import annotations

import copy
import gc
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowbit as lb
from lowbit.evaluate import data, models
from lowbit.evaluate.loaders import decoded_gguf, token_ids
from lowbit.machine import provenance
from lowbit.models.ties import model_bytes
from lowbit.plan import GenerationPlan
from lowbit.plan.serving.decoders import decoder_of
from lowbit.plan.serving.plan import words
from lowbit.tables import markdown

#: Budgets with a batch and without, and the context length.
BUDGETS, WITHOUT, CONTEXT = ("300MB", "150MB", "100MB", "80MB"), ("150MB", "100MB"), 2048

#: Held-out windows, windows of the plans' batches (which follow), and tokens per window.
HELD_OUT, SEEN, WINDOW = 6, 1, 512

#: Tokens decoded after the prompt while the peak is measured.
NEW = 4


class Row(NamedTuple):
    """Peak bytes and nats per token on held-out text, predicted (including the original model's loss) and measured.

    ``seconds``: planning time.
    """

    budget: str
    seen: bool
    plan: GenerationPlan
    measured: int
    loss: float
    seconds: float


@torch.no_grad()
def loss_of(model: nn.Module, windows: list[Tensor], scheme: str | None) -> float:
    """Nats per token of windows [1, T], with the KV cache of generation."""
    decoder = decoder_of(model)
    losses = []
    for window in windows:
        logits = decoder.logits(model, window, decoder.cache(model, 1, scheme))
        losses.append(F.cross_entropy(logits[0, :-1].float(), window[0, 1:]).item())
    return math.fsum(losses) / len(losses)


def row(model: nn.Module, budget: str, batches: list[Tensor] | None, held_out: list[Tensor]) -> Row:
    """Plan, measure the peak of generation, and the loss on text."""
    begin = time.perf_counter()
    plan = lb.fit_generation(model, batches, budget, context=CONTEXT)
    seconds = time.perf_counter() - begin
    run = plan.apply_(copy.deepcopy(model))
    prompt = torch.cat(held_out, 1)[:, : CONTEXT - NEW]
    gc.collect()
    peak = lb.memory.allocated_peak(lambda: run.generate(prompt, NEW, do_sample=False), "cpu")
    measured = peak + model_bytes(run.model) + prompt.nbytes
    return Row(budget, batches is not None, plan, measured, loss_of(run.model, held_out, plan.settings.cache), seconds)


def run(directory: Path, text: Path) -> Path:
    """Measure, and write ``generation.md``. Raises ValueError if the text is too short."""
    directory.mkdir(parents=True, exist_ok=True)
    subject = models.find("smollm2")
    about = provenance(packages=("transformers",))
    made, tokenizer = decoded_gguf(subject.location())
    model = made.to(torch.bfloat16)
    wanted = data.Wanted(windows=HELD_OUT + SEEN)
    windows = [
        batch.inputs for batch in data.windows(token_ids(tokenizer, data.read(text)), wanted, WINDOW + 1, text.name)
    ]
    if len(windows) < HELD_OUT + SEEN:
        raise ValueError(f"{text} has {len(windows)} windows of {WINDOW} tokens; give one of {HELD_OUT + SEEN}")
    held_out, seen = windows[:HELD_OUT], windows[HELD_OUT:]
    plain = loss_of(model, held_out, None)
    planned = [(budget, seen) for budget in BUDGETS] + [(budget, None) for budget in WITHOUT]
    rows = [row(model, budget, batches, held_out) for budget, batches in planned]
    path = directory / "generation.md"
    path.write_text("\n".join(_lines(rows, model, plain, text, about)) + "\n")
    return path


def _lines(rows: list[Row], model: nn.Module, plain: float, text: Path, about: dict[str, Any]) -> list[str]:
    head = ("budget", "losses by", "predicted, MB", "measured", "off by", "perplexity", "nats a token more",
            "as predicted", "planning took, s", "chosen")  # fmt: skip
    cells = [
        (r.budget, "gradients" if r.seen else "the weights", f"{r.plan.peak_bytes / 1e6:.1f}",
         f"{r.measured / 1e6:.1f}", f"{r.plan.peak_bytes / r.measured - 1:+.1%}", f"{math.exp(r.loss):.2f}",
         f"{r.loss - plain:+.4f}", f"{r.plan.loss:+.4f}" if r.seen else "", f"{r.seconds:.0f}", words(r.plan.settings))
        for r in rows
    ]  # fmt: skip
    return [
        "# Generation within a memory: predicted and measured\n",
        *(f"- {name}: {value}" for name, value in about.items()),
        f"\nSmolLM2-135M-Instruct in bf16, {model_bytes(model) / 1e6:.0f} MB, one sequence of {CONTEXT} tokens, of "
        f"which {NEW} are decoded. As it is it holds {rows[0].plan.plain.peak_bytes / 1e6:.1f} MB, and its perplexity "
        f"is {math.exp(plain):.2f}, of the first {HELD_OUT} windows of {WINDOW} tokens of {text.name}. Plans by the "
        f"loss have looked at {SEEN * WINDOW} tokens after those. Measured is the peak of torch's allocator while "
        f"`generate` runs, the model included.\n",
        markdown(head, cells, numbers=range(2, 9)),
    ]
