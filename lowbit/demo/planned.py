"""Training plans for demo runs within a memory budget.

The plan is for a model that already has the run's precision. It chooses checkpointing, micro-batches, bits of AdamW's
states and offload.
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
from lowbit.plan import TECHNIQUES, TrainingPlan, fit
from lowbit.plan.fitting.choices import words
from lowbit.progress import Progress
from lowbit.sizes import amount

__all__ = ["HEAD", "SAYS", "path_of", "plans", "save", "written"]

#: Head and explanation of a table of plans; its cells are ``written``.
HEAD = ("run", "chosen", "predicted", "measured", "budget", "without a plan")
SAYS = (
    "Peak memory of a step, by torch's allocator. For each run and its precision, the plan is the fastest one that "
    "fits the budget. measured: one step, without memory of other objects. without a plan: predicted."
)

#: The settings of a plan that the training loop supports.
_SUPPORTED = {"checkpoint", "optimizer", "bits", "offload_states", "offload_activations"}


def plans(
    settings: RunSettings, corpus: Corpus, directory: Path | None, progress: Progress = lambda what, done, total: None
) -> dict[str, TrainingPlan]:
    """A plan for each precision, within ``settings.memory``; plans saved in ``directory`` are loaded.

    Raises:
        ValueError: Nothing fits, no plan supports the optimizer, or a file is not a plan.
    """
    result = {}
    for precision in settings.precisions:
        path = None if directory is None else path_of(directory, precision)
        if path is not None and path.exists():
            result[precision] = TrainingPlan.load(path)
        else:
            result[precision] = _plan(settings, corpus, precision, partial(_report, progress, precision))
    return result


def save(plans: Mapping[str, TrainingPlan], directory: Path) -> None:
    """Write each plan into its run's directory."""
    for precision, plan in plans.items():
        path = path_of(directory, precision)
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.save(path)


def path_of(directory: Path, precision: str) -> Path:
    """The file of a run's plan."""
    return run_path(directory, precision) / "plan.json"


def written(runs: Sequence[Trainer]) -> list[tuple[str, ...]]:
    """The cells below ``HEAD``, for runs with a plan."""
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
    options = list(_options(settings.optimizer))
    try:
        return fit(model, batch, settings.memory, _loss, require=options, progress=progress)
    except ValueError as error:
        raise ValueError(f"the {precision} run: {error}") from None


def _options(optimizer: str | None) -> Iterator[str]:
    """The options that a plan may choose: all that the training loop supports, with one optimizer if it is given."""
    for dimension, row in TECHNIQUES.items():
        names = [choice.name for choice in row if _SUPPORTED.issuperset(choice.changes)]
        if dimension == "optimizer":
            supported, offered = names, [choice.name for choice in row if not choice.opt_in]
            names = offered if optimizer is None else [name for name in supported if name == optimizer]
            if not names:
                raise ValueError(f"memory plans runs with {' or '.join(supported)}, got the optimizer {optimizer!r}")
        yield from names


def _loss(logits_BTV: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The loss of ``step.loss_of``, from logits and a batch."""
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), batch["targets_BT"].flatten())


def _report(progress: Progress, precision: str, stage: str, done: int, total: int) -> None:
    progress(f"{stage} {precision}", done, total)
