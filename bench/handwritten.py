"""Benchmarks everything on a hand-written transformer: techniques, recipes, optimizers, sharding strategies and plans.

``lowbit bench handwritten`` writes handwritten.md. The model has the structure of textbooks: embeddings of tokens and
of positions, blocks of ``nn.MultiheadAttention`` and a feed-forward Sequential, and a last Linear named ``head``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

import lowbit as lb
from lowbit.bench.fit_steps import by, measured, training
from lowbit.bench.memory import Subject
from lowbit.machine import provenance
from lowbit.optim.names import FAMILIES
from lowbit.plan.fitting.choices import words
from lowbit.plan.fitting.predict import Predictor
from lowbit.plan.settings import TrainingSettings
from lowbit.plan.subject import Subject as Planned
from lowbit.plan.techniques import STRATEGY, TECHNIQUES, Technique
from lowbit.recipes import RECIPES
from lowbit.sizes import amount
from lowbit.tables import markdown

__all__ = [
    "LARGE",
    "SMALL",
    "SUBJECT",
    "Shape",
    "Transformer",
    "meta_subject",
    "new_model",
    "next_token_loss",
    "peak",
    "run",
    "tokens",
]  # fmt: skip


class Shape(NamedTuple):
    """Sizes of a model and its batch."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    rows: int


#: The model that trains, and the model that is estimated on the meta device.
SMALL = Shape(8, 256, 8, 8192, 128, 4)
LARGE = Shape(24, 2048, 16, 50257, 1024, 4)

#: Steps whose losses and final weights are compared, steps of optimizers, and processes of sharding strategies.
STEPS, OPTIMIZER_STEPS, PROCESSES = 3, 30, 2

#: Budgets of plans, as shares of the peak of plain training.
SHARES = (0.5, 0.3, 0.15)


class Block(nn.Module):
    """Pre-norm attention and feed-forward part, each with a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attn = nn.MultiheadAttention(shape.width, shape.heads, batch_first=True)
        self.ff = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width), nn.GELU(), nn.Linear(4 * shape.width, shape.width)
        )

    def forward(self, x_BTC: Tensor, mask_TT: Tensor) -> Tensor:
        y_BTC = self.norm1(x_BTC)
        x_BTC = x_BTC + self.attn(y_BTC, y_BTC, y_BTC, attn_mask=mask_TT)[0]
        return x_BTC + self.ff(self.norm2(x_BTC))


class Transformer(nn.Module):
    """A causal language model: token ids ``[B, T]`` to logits ``[B, T, V]``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary)

    def forward(self, ids_BT: Tensor) -> Tensor:
        length = ids_BT.shape[1]
        x_BTC = self.tokens(ids_BT) + self.positions(torch.arange(length, device=ids_BT.device))
        mask_TT = torch.ones(length, length, dtype=torch.bool, device=ids_BT.device).triu(1)
        for block in self.blocks:
            x_BTC = block(x_BTC, mask_TT)
        logits_BTV: Tensor = self.head(self.norm(x_BTC))
        return logits_BTV


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """The loss of the training loop."""
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


def tokens(shape: Shape, device: str = "cpu") -> Tensor:
    """A batch of token ids in which each token often predicts the next."""
    ids = torch.randint(shape.vocabulary // 8, (shape.rows, shape.length), generator=torch.Generator().manual_seed(0))
    ids[:, 1::2] = (3 * ids[:, ::2] + 1) % shape.vocabulary
    return ids.to(device)


def new_model(shape: Shape, device: str = "cpu") -> nn.Module:
    """The model with the weights of seed 0."""
    torch.manual_seed(0)
    with torch.device(device):
        return Transformer(shape)


SUBJECT = Subject("hand-written transformer", lambda: new_model(SMALL), lambda: tokens(SMALL), ())


@cache
def meta_subject(shape: Shape) -> Planned:
    """A model of this shape on the meta device, and its batch."""
    return Planned(new_model(shape, "meta"), tokens(shape, "meta"))


@cache
def _predictor(shape: Shape) -> Predictor:
    return Predictor(meta_subject(shape))


@cache
def peak(settings: TrainingSettings, shape: Shape = LARGE) -> int:
    """Peak bytes of a step, as plans predict it."""
    return _predictor(shape).whole_peak(settings)


# -- techniques -------------------------------------------------------------------------------------------------------
class Trained(NamedTuple):
    """Losses of some steps, the weights after them, and bytes of optimizer states."""

    losses: list[float]
    weights: list[Tensor]
    states: int

    def agreement(self, plain: Trained) -> str:
        """How losses and weights agree with those of plain training."""
        if self.losses == plain.losses and all(map(torch.equal, self.weights, plain.weights)):
            return "bit-identical"
        return f"{max(abs(a / b - 1) for a, b in zip(self.losses, plain.losses, strict=True)):.1e}"


def trained(settings: TrainingSettings, steps: int = STEPS) -> Trained:
    """Train for some steps with ``settings``, after the step that ``training`` runs."""
    with training(by(settings, SUBJECT), SUBJECT) as (run, batch):
        losses = [float(run.step(batch)) for _ in range(steps)]
        tensors = [t for state in run.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        weights = [p.detach().float().clone() for p in run.model.parameters()]
        return Trained(losses, weights, sum(t.nbytes for t in tensors if t.dim() > 0))


def _single() -> Iterator[tuple[str, Technique, TrainingSettings]]:
    """The techniques of one process, each alone, with the techniques that it needs."""
    for dimension, row in TECHNIQUES.items():
        if dimension in (STRATEGY, "optimizer", "masters"):
            continue
        for technique in row[1:]:
            if technique.changes:
                yield dimension, technique, TrainingSettings(**{**technique.needs, **technique.changes})


def techniques_table() -> str:
    """Peaks, estimates and losses of every technique of one process."""
    plain, subject = trained(TrainingSettings()), Planned(new_model(SMALL), tokens(SMALL))
    base = measured(by(TrainingSettings(), SUBJECT), SUBJECT, steps=1).peak
    large = peak(TrainingSettings())
    rows = [("", "plain training", amount(base), "", amount(large), "", "bit-identical", "bit-identical")]
    for dimension, technique, settings in _single():
        reason = technique.why_not(subject)
        if reason is not None:
            rows.append((dimension, technique.name, "", "", "", "", "", reason))
            continue
        held = measured(by(settings, SUBJECT), SUBJECT, steps=1).peak
        estimated = peak(settings)
        rows.append(
            (dimension, technique.name, amount(held), f"{1 - held / base:.0%}", amount(estimated),
             f"{1 - estimated / large:.0%}", _PROMISES[technique.results], trained(settings).agreement(plain))
        )  # fmt: skip
    head = ("dimension", "technique", "peak", "saved", "peak of the large model", "saved", "promise", "losses, weights")
    return markdown(head, rows, numbers=(2, 3, 4, 5))


_PROMISES = {"equal": "bit-identical", "close": "another order of sums", "own": "own arithmetic"}


# -- recipes ----------------------------------------------------------------------------------------------------------
def recipes_table() -> str:
    """Layers that each recipe converts, and its effect on the loss of a step or on logits."""
    ids, plain = tokens(SMALL), new_model(SMALL).eval()
    with torch.no_grad():
        exact = plain(ids)
    loss = next_token_loss(exact, ids)
    rows = []
    for name, recipe in RECIPES.items():
        cells = [name]
        for use in (_served, _fine_tuned, _trained_in) if recipe.grad_input is not None else (_served, _fine_tuned):
            try:
                cells.append(use(name, ids, exact, loss))
            except (ValueError, TypeError, RuntimeError) as error:
                cells.append(str(error).splitlines()[0])
        rows.append((*cells, *[""] * (4 - len(cells))))
    return markdown(("recipe", "quantize_", "qat.prepare_", "train.prepare_"), rows)


def _layers(report: lb.Report) -> str:
    return f"{len(report.converted)} of {len(report.converted) + len(report.left)} layers"


def _served(name: str, ids: Tensor, exact: Tensor, loss: Tensor) -> str:
    model = new_model(SMALL).eval()
    calibration = lb.calibrate(model, name, [ids]) if "static" in name else None
    report = lb.quantize_(model, name, calibration)
    with torch.no_grad():
        error = (model(ids) - exact).norm() / exact.norm()
    return f"{_layers(report)}, error of logits {error:.1e}"


def _fine_tuned(name: str, ids: Tensor, exact: Tensor, loss: Tensor) -> str:
    model = new_model(SMALL)
    report = lb.qat.prepare_(model, name)
    model(ids)  # static scales observe a batch
    value = next_token_loss(model(ids), ids)
    value.backward()
    return f"{_layers(report)}, loss {value.item() / loss.item() - 1:+.2%}"


def _trained_in(name: str, ids: Tensor, exact: Tensor, loss: Tensor) -> str:
    model = new_model(SMALL)
    report = lb.train.prepare_(model, name)
    value = next_token_loss(model(ids), ids)
    value.backward()
    return f"{_layers(report)}, loss {value.item() / loss.item() - 1:+.2%}"


# -- optimizers -------------------------------------------------------------------------------------------------------
def optimizers_table() -> str:
    """Losses after some steps and bytes of states per parameter of every optimizer."""
    count = sum(p.numel() for p in new_model(SMALL).parameters())
    rows = []
    for family in dict.fromkeys(row.family for row in FAMILIES):
        plain: Trained | None = None
        for bits in (32, 8, 4):
            result = trained(TrainingSettings(optimizer=family, bits=bits), OPTIMIZER_STEPS)
            plain = plain or result
            change = result.losses[-1] / plain.losses[-1] - 1
            rows.append(
                (family, str(bits), f"{result.losses[-1]:.4f}", f"{change:+.2%}", f"{result.states / count:.2f}")
            )
    head = ("optimizer", "bits", f"loss of step {OPTIMIZER_STEPS + 1}", "relative to 32 bits", "bytes per parameter")
    return markdown(head, rows, numbers=range(1, 5))


# -- sharding strategies ----------------------------------------------------------------------------------------------
def _one_step(strategy: str) -> tuple[list[Tensor], int]:
    """Whole weights after a step, and bytes sent, in one process of several."""
    model, ids = new_model(SMALL), tokens(SMALL)
    optimizer: Any = lb.optim.AdamW(model.parameters(), lr=1e-3, bits=32)
    group_size = PROCESSES if lb.distributed.STRATEGIES[strategy].grouped else None
    model, optimizer = lb.distributed.shard_(model, optimizer, strategy, group_size=group_size)
    part = ids.chunk(PROCESSES)[dist.get_rank()]
    with lb.distributed.traffic() as sent:
        loss = next_token_loss(model(part), part)
        loss.backward()
        optimizer.step()
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [w.detach().clone() for w in weights], sent.total


def _process(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=PROCESSES)
    results = {name: _one_step(name) for name in _strategies()}
    if rank == 0:
        torch.save(results, f"{directory}/results.pt")
    dist.destroy_process_group()


def _strategies() -> list[str]:
    return [name for name, strategy in lb.distributed.STRATEGIES.items() if not strategy.one_process]


def strategies_table() -> str:
    """Loss, weights and traffic of each sharding strategy on two processes, next to one process."""
    with TemporaryDirectory() as meeting:
        mp.start_processes(_process, (meeting,), PROCESSES, start_method="spawn")
        results = torch.load(f"{meeting}/results.pt")
    model, ids = new_model(SMALL), tokens(SMALL)
    optimizer = lb.optim.AdamW(model.parameters(), lr=1e-3, bits=32)
    for part in ids.chunk(PROCESSES):
        (next_token_loss(model(part), part) / PROCESSES).backward()
    optimizer.step()
    exact = [p.detach() for p in model.parameters()]
    size = sum(w.nbytes for w in exact)
    rows = [
        (name, "bit-identical" if all(map(torch.equal, weights, exact)) else f"{_difference(weights, exact):.1e}",
         f"{sent / size:.2f} P")
        for name, (weights, sent) in results.items()
    ]  # fmt: skip
    return markdown(("strategy", "weights after a step", "sent by a process"), rows, numbers=(2,))


def _difference(weights: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest relative difference of a tensor."""
    return max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in zip(weights, exact, strict=True))


# -- plans ------------------------------------------------------------------------------------------------------------
def plans_table() -> str:
    """Plans within shares of the memory of plain training."""
    model, ids = new_model(SMALL), tokens(SMALL)
    plain = Predictor(Planned(model, ids)).whole(TrainingSettings()).peak_bytes
    exact = trained(TrainingSettings())
    rows = []
    for share in SHARES:
        budget = int(share * plain)
        try:
            plan = lb.fit(copy.deepcopy(model), ids, budget)
        except ValueError as error:  # its message names the least peak
            rows.append((f"{share:.0%}", amount(budget), "", "", "", str(error).split(". ")[0], ""))
            continue
        held = measured(plan, SUBJECT, steps=1).peak
        rows.append(
            (f"{share:.0%}", amount(budget), amount(plan.peak_bytes), amount(held), f"{held / budget:.2f}",
             words(plan.settings), trained(plan.settings).agreement(exact))
        )  # fmt: skip
    head = ("share", "budget", "predicted", "measured", "of the budget", "plan", "losses")
    return markdown(head, rows, numbers=(1, 2, 3, 4))


def run(directory: Path) -> Path:
    """Measure, and write ``handwritten.md``."""
    directory.mkdir(parents=True, exist_ok=True)
    about, count = provenance(), sum(p.numel() for p in new_model(SMALL).parameters())
    large = sum(p.numel() for p in meta_subject(LARGE).model.parameters())
    path = directory / "handwritten.md"
    text = [
        "# A hand-written transformer\n",
        *(f"- {name}: {value}" for name, value in about.items()),
        "\nThe model of `bench/handwritten.py` has embeddings, `nn.MultiheadAttention`, a feed-forward Sequential and "
        f"a last Linear named `head`. {_words(SMALL, count)} train on the CPU. {_words(LARGE, large)} are estimated on "
        "the meta device.",
    ]
    for title, words_, table in SECTIONS:
        text.append(f"\n## {title}\n\n{words_}\n\n{table()}")
        path.write_text("\n".join(text) + "\n")  # a run that is stopped leaves the sections that are complete
    return path


#: The sections of the page: title, text, and the function that measures the table.
SECTIONS: tuple[tuple[str, str, Callable[[], str]], ...] = (
    (
        "Plans",
        "Budgets are shares of the predicted peak of plain training.",
        plans_table,
    ),
    (
        "Techniques",
        f"Peaks are bytes of torch's allocator. Losses and weights are those of {STEPS} steps, compared with plain "
        "training: bit-identical, or the largest relative difference of a loss.",
        techniques_table,
    ),
    (
        "Recipes",
        "Converted layers, and the error of the logits or of the loss relative to fp32. The rest of the layers are "
        "embeddings, or `head`, which stays in high precision.",
        recipes_table,
    ),
    (
        "Sharding strategies",
        f"One step on {PROCESSES} gloo processes, relative to one process that accumulates the same micro-batches. `P` "
        "is the size of the parameters.",
        strategies_table,
    ),
    ("Optimizers", f"Losses after {OPTIMIZER_STEPS} steps, compared with fp32 states.", optimizers_table),
)


def _words(shape: Shape, count: int) -> str:
    return (
        f"{shape.layers} layers of width {shape.width} ({count / 1e6:.1f} million parameters, vocabulary "
        f"{shape.vocabulary}, {shape.rows} x {shape.length} tokens)"
    )
