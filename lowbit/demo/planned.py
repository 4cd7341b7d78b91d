"""Plans of the demo's runs: each trains within a budget, in its own precision.

A plan is made of the model that computes in the run's precision already, so that it chooses all but that: checkpoints,
parts of a batch, bits of AdamW's states and their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from lowbit.demo.data import Corpus
from lowbit.demo.experiment import RunSettings, model_of, run_path
from lowbit.demo.loop import Trainer
from lowbit.demo.step import arrange_
from lowbit.optim.names import OPTIMIZERS
from lowbit.plan import TECHNIQUES, TrainingPlan, fit
from lowbit.plan.fitting.choices import words
from lowbit.progress import Progress
from lowbit.sizes import amount

__all__ = ["HEAD", "SAYS", "path_of", "plans", "save", "written"]

#: The head of a table of plans, whose cells are ``written``; ``SAYS`` is what it means.
HEAD = ("run", "chosen", "predicted", "measured", "budget", "without a plan")
SAYS = (
    "What a step holds, by torch's allocator. Each run computes in its own precision, and a plan chooses the rest, so "
    "that a step takes the least time of what fits the budget. Measured is one step, of what belongs to the run; "
    "without a plan is a prediction."
)

#: What the training loop does of a plan's settings, beside what a run's precision says.
_FOLLOWED = {"checkpoint", "bits", "offload_states", "offload_activations"}


def plans(
    settings: RunSettings, corpus: Corpus, directory: Path | None, progress: Progress = lambda what, done, total: None
) -> dict[str, TrainingPlan]:
    """By precision a plan within ``settings.memory``; those that ``directory`` has are taken from there.

    Raises: ValueError where nothing fits, for an optimizer that no plan chooses, and for a file that holds no plan.
    """
    found = {}
    for precision in settings.precisions:
        path = None if directory is None else path_of(directory, precision)
        if path is not None and path.exists():
            found[precision] = TrainingPlan.load(path)
        else:
            found[precision] = _plan(settings, corpus, precision, partial(_named, progress, precision))
    return found


def save(made: Mapping[str, TrainingPlan], directory: Path) -> None:
    """Write each plan into its run's directory."""
    for precision, plan in made.items():
        path = path_of(directory, precision)
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.save(path)


def path_of(directory: Path, precision: str) -> Path:
    """Where the plan of the run in ``precision`` is."""
    return run_path(directory, precision) / "plan.json"


def written(runs: Sequence[Trainer]) -> list[tuple[str, ...]]:
    """The cells below ``HEAD`` of the runs that have a plan."""
    return [
        (
            run.config.precision, words(run.plan.settings), amount(run.plan.peak_bytes),
            amount(run.history.peak_bytes) if run.history.peak_bytes else "", amount(run.plan.budget),
            amount(run.plan.plain.peak_bytes),
        )
        for run in runs
        if run.plan is not None
    ]  # fmt: skip


def _plan(settings: RunSettings, corpus: Corpus, precision: str, progress: Progress) -> TrainingPlan:
    assert settings.memory is not None
    config, model = settings.of(precision), model_of(settings, corpus)
    arrange_(model, config)
    tokens_BT, targets_BT = corpus.batch(0, config.batch, config.context, config.seed)
    batch = {"tokens_BT": tokens_BT, "targets_BT": targets_BT}
    keep = list(_choices(settings.optimizer))
    try:
        return fit(model, batch, settings.memory, _loss, require=keep, progress=progress)
    except ValueError as error:
        raise ValueError(f"the {precision} run: {error}") from None


def _choices(optimizer: str | None) -> Iterator[str]:
    """The names that a plan may choose: what the training loop does, with that optimizer where one is named."""
    for dimension, row in TECHNIQUES.items():
        names = [choice.name for choice in row if _FOLLOWED.issuperset(choice.changes)]
        if dimension == "optimizer":
            known = [name for name in names if name in OPTIMIZERS]
            names = [name for name in known if optimizer in (None, name)]
            if not names:
                raise ValueError(f"memory plans runs with {' or '.join(known)}, got the optimizer {optimizer!r}")
        yield from names


def _loss(logits_BTV: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """``loop.loss_of``, of a batch of tokens and targets."""
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), batch["targets_BT"].flatten())


def _named(progress: Progress, precision: str, what: str, done: int, total: int) -> None:
    progress(f"{what} {precision}", done, total)
