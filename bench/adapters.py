"""Benchmarks plans with LoRA adapters: predicted and measured memory on quantized and plain bases.

``lowbit bench adapters`` writes adapters.md. Its measurements are kept in adapters/; a repeated run resumes.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lowbit as lb
from lowbit.bench import handwritten
from lowbit.bench.fit_steps import Cells, measured
from lowbit.bench.memory import Subject
from lowbit.machine import provenance
from lowbit.plan.fitting.choices import words
from lowbit.sizes import amount
from lowbit.tables import markdown

__all__ = ["run"]

#: Rank of the adapters.
RANK = 16

#: Requests for each model: percent of the memory of plain training, and ``require``.
_ASKED = (
    (100, ("plain base",)), (60, ("int8 base",)), (45, ("nf4 base",)), (40, ("int4 base", "block")),
    (35, ("nvfp4 base", "adamw8bit")),
)  # fmt: skip


def _of_transformers(name: str, **shape: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        torch.manual_seed(0)
        kind = getattr(transformers, name)
        config = kind.config_class(**shape)
        config.use_cache = False
        model: nn.Module = kind(config)
        return model.train()

    return make


def _tokens(rows: int, length: int, labels: bool = True) -> Callable[[], Any]:
    def make() -> Any:
        ids = torch.randint(2048, (rows, length), generator=torch.Generator().manual_seed(0))
        return {"input_ids": ids, "labels": ids if labels else ids[:, 0] % 2}

    return make


#: Decoders with separate and with joint projections, a mixture of experts, an encoder, and a model without a library.
SUBJECTS = (
    Subject("Llama, 12 layers of 576", _of_transformers(
        "LlamaForCausalLM", vocab_size=4096, hidden_size=576, intermediate_size=1536, num_hidden_layers=12,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True), _tokens(4, 256), ()),
    Subject("GPT-2, 8 layers of 512", _of_transformers(
        "GPT2LMHeadModel", vocab_size=4096, n_embd=512, n_layer=8, n_head=8), _tokens(4, 256), ()),
    Subject("BERT, 6 layers of 384", _of_transformers(
        "BertForSequenceClassification", vocab_size=4096, hidden_size=384, num_hidden_layers=6, num_attention_heads=6,
        intermediate_size=1536), _tokens(8, 128, labels=False), ()),
    handwritten.SUBJECT,
)  # fmt: skip


def _measured(subject: Subject, share: int, require: tuple[str, ...]) -> dict[str, Any]:
    loss = handwritten.next_token_loss if subject is handwritten.SUBJECT else None
    try:
        plan = lb.fit(
            subject.make(), subject.batch(), f"{share}%", loss, adapters=RANK, require=require, progress=False
        )
    except ValueError as error:
        return {"error": str(error).split("; the least")[0]}
    held = measured(plan, subject, 1)
    return {"plan": words(plan.settings), "plain": plan.plain.peak_bytes, "budget": plan.budget,
            "predicted": plan.peak_bytes, "measured": held.peak}  # fmt: skip


def table(cells: Cells) -> str:
    """Return the table of plans, and a summary."""
    rows, errors = [], []
    for subject, (share, require) in itertools.product(SUBJECTS, _ASKED):
        name = f"{subject.name} {share} {' '.join(require)}"
        row = cells(name, lambda s=subject, m=share, r=require: _measured(s, m, r))
        if "error" in row:
            rows.append((subject.name, f"{share}%", row["error"], "", "", "", ""))
            continue
        errors.append(row["measured"] / row["predicted"] - 1)
        rows.append((subject.name, f"{share}%", row["plan"], amount(row["plain"]), amount(row["predicted"]),
                     amount(row["measured"]), f"{100 * errors[-1]:+.2f}%"))  # fmt: skip
    size = sorted(map(abs, errors))
    summary = (f"{len(errors)} plans: the measured peak differs from the predicted one by "
               f"{statistics.median(size):.2%} in the median and by {size[-1]:.2%} at most.")  # fmt: skip
    head = ("model", "budget", "plan", "plain training", "predicted", "measured", "difference")
    return f"{summary}\n\n{markdown(head, rows, numbers=range(3, len(head)))}"


def run(directory: Path) -> Path:
    """Measure, and write ``adapters.md``."""
    about = provenance("lowbit bench adapters", packages=("transformers", "peft"))
    cells = Cells(directory / "adapters", str(about["commit"]))
    measurements = table(cells)
    lines = [
        "# Plans with adapters\n",
        *(f"- {name}: {value}" for name, value in about.items()),
        f"- commits of the measurements: {cells.commits()}",
        f"\n`lb.fit(model, batch, budget, adapters={RANK}, require=...)`. A budget is a share of plain training, which "
        "trains all weights in fp32 with AdamW. Peaks are those of torch's allocator in three steps.\n",
        measurements,
    ]  # fmt: skip
    path = directory / "adapters.md"
    path.write_text("\n".join(lines) + "\n")
    return path
