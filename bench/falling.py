"""Trains by plans with decreasing memory budgets, each in a separate process with an enforced limit.

Models: three networks with ops that transformers lack, and three transformers.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowbit as lb
from lowbit.bench import memory
from lowbit.bench.fit_steps import Cells, answer, by, measured, started, trained
from lowbit.bench.memory import Subject
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.memory.shortage import ran_out
from lowbit.plan import TrainingPlan
from lowbit.plan.fitting.choices import words
from lowbit.plan.fitting.search import fits
from lowbit.plan.ladder.cell import MALLOC
from lowbit.plan.ladder.limits import LIMITS
from lowbit.plan.settings import TrainingSettings
from lowbit.tables import markdown

__all__ = ["BUDGETS", "SUBJECTS", "tables", "tokens"]


class _Sides(nn.Module):
    """Frequencies, volumes and resized images."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside = nn.Conv2d(3, width, 3, padding=1)
        self.filters = nn.ParameterList(nn.Parameter(torch.randn(width, 1, 1) / 8) for _ in range(3))
        self.mixes = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, groups=4) for _ in range(3))
        self.volume = nn.Conv3d(1, 4, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(3))
        self.up = nn.ConvTranspose2d(width, 8, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inside(x.contiguous(memory_format=torch.channels_last))
        for filters, mix, norm in zip(self.filters, self.mixes, self.norms, strict=True):
            waves = torch.fft.rfft2(y.float(), norm="ortho") * filters
            y = y + F.gelu(norm(mix(torch.fft.irfft2(waves, s=y.shape[-2:], norm="ortho"))))
        y = y + self.volume(y[:, None]).amax(1)
        y = F.interpolate(self.up(y), scale_factor=0.5, mode="bilinear")
        return F.unfold(y, 2, stride=2).float().square().mean()


class _Recurrent(nn.Module):
    """Both directions with projections, and a loss on sliced logits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(4000, width)
        self.lstm = nn.LSTM(width, 2 * width, 2, batch_first=True, bidirectional=True, proj_size=width // 2)
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 4000)

    def forward(self, tokens: Tensor) -> Tensor:
        y, _ = self.gru(self.lstm(self.embed(tokens))[0])
        return F.cross_entropy(self.head(y)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class _Sorted(nn.Module):
    """Masks, sorting, sums along an axis and fp64 matmuls between blocks of torch's attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside = nn.Linear(64, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.1, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.scores = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks(self.inside(x))
        places = self.scores(y).squeeze(-1).topk(x.shape[1] // 2, dim=1).indices
        chosen_rows = y.gather(1, places[..., None].expand(-1, -1, y.shape[-1]))
        sums = chosen_rows.cumsum(1).transpose(1, 2) / chosen_rows.shape[1]
        return (sums.double() @ sums.double().mT).logsumexp(-1).float().mean() + chosen_rows.sort(1).values.diff(
            dim=1
        ).mean()


def _rows(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape, generator=torch.Generator().manual_seed(0))


#: Models for decreasing budgets.
SUBJECTS = (
    Subject("FFT, grouped and 3-D convolutions", lambda: _Sides(64), _rows(16, 3, 48, 48), ()),
    Subject("LSTM and GRU of both directions", lambda: _Recurrent(256), lambda: tokens(4000, 32, 24), ()),
    Subject("nn.TransformerEncoder, topk, sort, fp64", lambda: _Sorted(256), _rows(16, 128, 64), ()),
    *(subject for subject in memory.SUBJECTS if subject.name in ("Llama, 4 layers of 576", "MiniLM, 6 layers of 384")),
    Subject("GPT, 6 layers of 512", lambda: GPT(GPTConfig(vocab=1024, layers=6, heads=8, dim=512, hidden=1536)),
            lambda: tokens(1024, 8, 256), ()),
)  # fmt: skip
BUDGETS = 20


def tokens(vocabulary: int, rows: int, length: int) -> Tensor:
    return torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(0))


def _budgets(most: int, least: int) -> list[int]:
    """Budgets from plain training downwards, in a geometric sequence."""
    return [int(most * (least / most) ** (number / (BUDGETS - 1))) for number in range(BUDGETS)]


def tables(cells: Cells) -> Iterator[str]:
    """The section of the page, then each model's part when it is measured."""
    yield "## Falling budgets under a real limit\n\n" + (
        f"{BUDGETS} budgets for each model, from plain training down to what hardly fits. Each plan trains in a "
        f"process of its own whose memory is limited (RLIMIT_DATA) to 1.03 times the budget and what libraries keep "
        f"for themselves when training is over, as measured without a limit for the same precision or recipe and "
        f"nothing else. Plain training is tried under the same limit. What is held is measured when the limit is gone, "
        f"since torch's profiler takes memory itself."
    )
    for subject in SUBJECTS:
        for number, plan in enumerate(_plans(cells, subject)):

            def make(subject: Subject = subject, plan: TrainingPlan = plan) -> dict[str, Any]:
                limit = int(1.03 * plan.budget) + _beside(cells, subject, plan.settings)
                return {
                    "budget": plan.budget, "peak": plan.peak_bytes, "settings": words(plan.settings),
                    **_limited(subject, plan, limit), "plain": _limited(subject, None, limit)["held"],
                }  # fmt: skip

            cells(f"{subject.name} budget {number}", make)
        rows = [cells(f"{subject.name} budget {number}", dict) for number in range(number + 1)]
        held = [row["held"] for row in rows]
        over = max(row["held"] / row["budget"] - 1 for row in rows if row["held"])
        there = [size for size in held if size]
        adapted = sum(row.get("adapted", False) for row in rows)
        risen = [later / earlier - 1 for earlier, later in itertools.pairwise(there) if later > earlier]
        head = ("budget, MiB", "plan", "predicted", "held", "step, ms", "plain training")
        table = [
            (f"{row['budget'] / 2**20:.1f}", row["settings"], f"{row['peak'] / 2**20:.1f}",
             f"{row['held'] / 2**20:.1f}" if row["held"] else "ran out", f"{1e3 * row['took']:.0f}",
             "fits" if row["plain"] else "runs out")
            for row in rows
        ]  # fmt: skip
        yield "\n".join([
            f"### {subject.name}\n",
            f"- runs by plans that ran out of memory: {held.count(0)} of {len(rows)}, and {adapted} took less than "
            f"planned to go on; plain training ran out under {sum(not row['plain'] for row in rows)} of these limits",
            f"- held is at most {over:+.1%} of the budget; where the budget fell, it rose "
            + (f"{len(risen)} times, by at most {max(risen):.1%}\n" if risen else "never\n"),
            markdown(head, table, numbers=(0, 2, 3, 4)),
        ])  # fmt: skip


def _plans(cells: Cells, subject: Subject) -> Iterator[TrainingPlan]:
    """Plans with decreasing budgets, cached in files by commit."""
    name = f"plan-{cells.commit}-{SUBJECTS.index(subject)}"
    paths = [cells.directory / f"{name}-{number}.json" for number in range(BUDGETS)]
    if not all(path.exists() for path in paths):
        model, batch = subject.make(), subject.batch()
        most = lb.fit(
            model, batch, "100%", require=("fp32", "adamw", "everything kept"), exclude=("disk",)
        ).plain.peak_bytes
        least = _least(model, batch)
        for path, plan in zip(paths, fits(model, batch, _budgets(most, int(1.02 * least))), strict=True):
            plan.save(path)
    for path in paths:
        yield TrainingPlan.load(path)


def _beside(cells: Cells, subject: Subject, settings: TrainingSettings) -> int:
    """Memory of libraries that no allocator counts and no technique changes, such as kernels generated for the shapes
    and the precision.
    """
    only = TrainingSettings(
        precision=settings.precision, recipe=settings.recipe, activation_codes=settings.activation_codes
    )
    unlimited = cells(f"{subject.name} {words(only)}, no limit", lambda: _limited(subject, by(only, subject), None))
    return int(unlimited["kept"])


def _least(model: nn.Module, batch: Any) -> int:
    """The smallest peak of a plan. Frontier points are sums, which estimates of entire steps may exceed."""
    smallest = min(one.peak_bytes for one in lb.fit(model, batch, "100%").frontier)
    for percent in itertools.count(102, 10):
        try:
            return lb.fit(model, batch, smallest * percent // 100).peak_bytes
        except ValueError:
            continue
    raise AssertionError("some budget is large enough")


def _limited(subject: Subject, plan: TrainingPlan | None, limit: int | None) -> dict[str, Any]:
    """Train in a separate process.

    ``held``: 0 if it ran out of memory. ``kept``: bytes that count towards the limit after training, minus before.
    """
    settings = None if plan is None else plan.as_dict()
    process = started("falling", [subject.name, settings, limit], MALLOC)
    if limit is not None and process.returncode < 0:  # a library that does not check its allocations
        return {"held": 0, "took": 0.0, "kept": 0}
    return answer(process)


def main() -> None:
    """The process: reads the question as JSON and prints the measured bytes."""
    name, plan, limit = json.loads(sys.stdin.read())
    subject = next(one for one in SUBJECTS if one.name == name)
    with tempfile.TemporaryDirectory(prefix="lowbit-fit-") as directory:
        path = Path(directory) / "plan.json"
        if plan is None:
            chosen = by(TrainingSettings(), subject)
        else:
            path.write_text(json.dumps(plan))
            chosen = TrainingPlan.load(path)
        small = subject._replace(batch=lambda: _first_rows(subject.batch()))
        for settings in (TrainingSettings(), TrainingSettings(offload_activations=True)):
            trained(by(settings, subject), small, 1)  # one-time allocations of libraries and threads are done now
        gc.collect()
        limits = LIMITS["cpu"]
        before = limits.counted()
        try:
            with nullcontext() if limit is None else limits.within(limit):
                took, adapted = trained(chosen, subject, 3)
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error) and not ran_out(error.__cause__ or error.__context__ or error):
                raise
            print(json.dumps({"held": 0, "took": 0.0, "kept": 0}))
            return
        gc.collect()
        kept = max(limits.counted() - before, 0)
        held = measured(chosen, subject, 1).peak
        print(json.dumps({"held": held, "took": took, "kept": kept, "adapted": adapted}))


def _first_rows(batch: Any) -> Any:
    return {key: value[:1] for key, value in batch.items()} if isinstance(batch, dict) else batch[:1]


if __name__ == "__main__":
    main()
