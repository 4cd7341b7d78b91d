"""Benchmarks quantization-aware training of the demo's GPT: the share of the accuracy loss that training recovers.

``lowbit bench qat`` writes qat.md. It needs the model of ``lowbit train`` (``make demo``) in out/demo/model.

For each weight scheme: rounding to nearest, scales searched by ``lb.calibrate``, and models trained with ``lb.qat`` on
the same tokens and steps, with cross-entropy and with distillation from the full-precision model. torchao's QAT is
included if it is installed and has the scheme. Losses are of the deployed models, after ``convert_``.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowbit as lb
from lowbit.demo.data import Corpus
from lowbit.demo.experiment import load
from lowbit.demo.gpt import GPT
from lowbit.demo.loop import TrainConfig
from lowbit.demo.step import evaluate
from lowbit.machine import provenance
from lowbit.tables import markdown

#: Weight-only schemes with one scale per 32: int4, fp4 (MX), int2.
SCHEMES = ("int4:group32", "mxfp4", "int2:group32")

#: The scheme for the comparison with torchao.
TORCHAO = "int4:group32"

#: The model; below, the training settings of all rows.
MODEL = Path("out/demo/model")
STEPS, BATCH, CLIP, WARMUP = 100, 4, 1.0, 10

#: Learning rates, one row each: a large accuracy loss needs a large rate, whose noise exceeds a small loss.
RATES = (1e-3, 1e-4)

#: Held-out windows of a loss.
WINDOWS = 48


@dataclass(frozen=True)
class Row:
    """A model: the method, its held-out loss in nats per token, the learning rate and seconds of training."""

    scheme: str
    what: str
    loss: float
    rate: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Run:
    """Settings that all training shares."""

    corpus: Corpus
    windows: Tensor
    teacher: GPT

    def train(self, model: nn.Module, distil: bool, rate: float) -> float:
        """Train ``model`` in place and return the seconds. Scales use a tenth of the learning rate ``rate``."""
        start = time.perf_counter()
        weights = [p for name, p in model.named_parameters() if not _is_scale(name)]
        scales = [p for name, p in model.named_parameters() if _is_scale(name)]
        groups = [{"params": weights, "factor": 1.0}, {"params": scales, "factor": 0.1}]
        optimizer = torch.optim.AdamW([g for g in groups if g["params"]], betas=(0.9, 0.95), weight_decay=0.0)
        schedule = TrainConfig(steps=STEPS, lr=rate, warmup=WARMUP, final_lr=0.0)
        model.train()
        for step in range(STEPS):
            inputs, targets = self.corpus.batch(step, BATCH, self.teacher.config.context, seed=1)
            logits = model(inputs)
            if distil:
                with torch.no_grad():
                    taught = self.teacher(inputs)
                loss = lb.qat.distillation_loss(logits, taught)
            else:
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            for group in optimizer.param_groups:
                group["lr"] = schedule.lr_at(step) * group["factor"]
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        return time.perf_counter() - start

    def student(self) -> GPT:
        """A copy of the teacher for training."""
        return copy.deepcopy(self.teacher).requires_grad_(True)

    def loss(self, model: nn.Module) -> float:
        return evaluate(model, self.windows)


def _is_scale(name: str) -> bool:
    return name.endswith(("_scale", "_zero_point"))


def untrained(run: Run, recipe: lb.Recipe) -> Iterator[Row]:
    """Without training: nearest codes, and searched scales."""
    for method in ("nearest", "search"):
        model = run.student()
        lb.quantize_(model, recipe, lb.calibrate(model, recipe, None, method))
        yield Row(recipe.weight.name, method, run.loss(model))


def trained(run: Run, recipe: lb.Recipe, learn_scale: bool, distil: bool, rate: float) -> Row:
    """A model trained with ``lb.qat``."""
    model = run.student()
    lb.qat.prepare_(model, recipe, learn_scale=learn_scale)
    seconds = run.train(model, distil, rate)
    prepared = run.loss(model)
    lb.qat.convert_(model)
    loss = run.loss(model)
    assert loss == prepared, f"deployed {loss}, prepared {prepared}"
    what = "QAT" + (", learned scales" if learn_scale else "") + (", distillation" if distil else "")
    return Row(recipe.weight.name, what, loss, rate, seconds)


def torchao(run: Run, distil: bool, rate: float) -> Iterator[Row]:
    """A model trained with torchao's QAT, if installed: symmetric int4 weights in groups of 32."""
    try:
        from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_
        from torchao.quantization.qat import QATConfig
    except ImportError:
        return

    def blocks(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and "lm_head" not in name

    model = run.student()
    dtypes: Any = torch  # whose stubs lack int4
    base = IntxWeightOnlyConfig(weight_dtype=dtypes.int4, granularity=PerGroup(32))
    quantize_(model, QATConfig(base, step="prepare"), filter_fn=blocks)
    seconds = run.train(model, distil, rate)
    quantize_(model, QATConfig(base, step="convert"), filter_fn=blocks)
    yield Row(TORCHAO, "torchao QAT" + (", distillation" if distil else ""), run.loss(model), rate, seconds)


def teacher() -> tuple[GPT, Corpus]:
    """The model of ``lowbit train`` and its text. Raises ValueError if it is missing."""
    if not (MODEL / "lowbit.json").exists():
        raise ValueError(f"there is no model to train on in {MODEL}; run `lowbit train` (`make demo`) first")
    model, tokenizer = load(MODEL)
    corpus = Corpus.load(None, tokenizer.get_vocab_size())
    if corpus.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"{MODEL} was trained on another text than Python's documentation; run `lowbit train --overwrite`"
        )
    return model.float().requires_grad_(False), corpus


def measure(run: Run) -> Iterator[Row]:
    """All rows, in order."""
    yield Row("fp32", "the teacher", run.loss(run.teacher))
    for rate in RATES:
        more = run.student()
        seconds = run.train(more, False, rate)
        yield Row("fp32", "trained on, without quantization", run.loss(more), rate, seconds)
    for scheme in SCHEMES:
        recipe = lb.Recipe(lb.Gemm(None, scheme))
        yield from untrained(run, recipe)
        for distil, rate in product((False, True), RATES):
            for learn_scale in (False, True):
                yield trained(run, recipe, learn_scale, distil, rate)
            if scheme == TORCHAO:
                yield from torchao(run, distil, rate)


def table(rows: list[Row]) -> str:
    """The rows as Markdown. ``recovered``: share of the gap between the teacher's loss and nearest's, or search's."""
    full = rows[0].loss
    head = ("weights", "", "learning rate", "held-out loss", "recovered of nearest", "recovered of search", "s")
    cells = []
    for row in rows:
        parts = []
        for method in ("nearest", "search"):
            base = next((r.loss for r in rows if (r.scheme, r.what) == (row.scheme, method)), None)
            if base is None or row.what in ("nearest", "search"):
                parts.append("")
            else:
                parts.append(f"{(base - row.loss) / (base - full):.0%}")
        took = f"{row.seconds:.0f}" if row.seconds else ""
        scheme = f"`{row.scheme}`" if row.scheme != "fp32" else row.scheme
        rate = "" if row.rate is None else f"{row.rate:g}"
        cells.append((scheme, row.what, rate, f"{row.loss:.4f}", *parts, took))
    return markdown(head, cells, numbers=range(3, len(head)))


def run(directory: Path) -> Path:
    """Train, measure, and write ``qat.md`` after every row. Raises ValueError if the model is missing."""
    plain, corpus = teacher()
    context = plain.config.context
    about = provenance(packages=("torchao",))
    parameters = sum(p.numel() for p in plain.parameters())
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "qat.md"
    rows: list[Row] = []
    for row in measure(Run(corpus, corpus.held_out_windows(WINDOWS, context), plain)):
        rows.append(row)
        text = [
            "# Quantization-aware training\n",
            f"The demo's GPT ({parameters:,} parameters), {STEPS} steps of {BATCH} x {context} tokens "
            f"({STEPS * BATCH * context:,}), the same for every row. Losses are of deployed models, in nats a token, "
            f"on {WINDOWS} held-out windows; lowbit's are those of the prepared models, to the last bit.\n",
            *(f"- {name}: {value}" for name, value in about.items()),
            "",
            table(rows),
            "",
            "Recovered: the share of what nearest rounding (or search) adds to the teacher's loss that the row takes "
            "back. Cross-entropy goes on training the teacher, so that it can take back more than was lost; the row in "
            "fp32 shows what the same steps do without quantization. Distillation learns from the teacher alone.",
        ]
        path.write_text("\n".join(text) + "\n")
    return path
