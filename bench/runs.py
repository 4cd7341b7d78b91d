"""Training runs of the demo's GPT, one file a run: what is there is not trained again, what was stopped goes on."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lowbit.demo.data import Corpus
from lowbit.demo.loop import Trainer
from lowbit.tables import markdown

__all__ = ["file_name", "losses_table", "there", "trained"]


def file_name(run: str, seed: int) -> str:
    """Of the run called ``run``, with this seed."""
    letters = "".join(c if c.isalnum() else "-" for c in run.lower())
    return f"{letters}-{seed}.json".replace("--", "-")


def there(path: Path, about: dict[str, Any]) -> bool:
    """Whether ``path`` is about this run."""
    return path.exists() and json.loads(path.read_text())["about"] == json.loads(json.dumps(about))


def trained(path: Path, about: dict[str, Any], vocab: int, make: Callable[[Corpus, Path], Trainer]) -> dict[str, Any]:
    """What ``path`` says of a run: ``about``, the curve on held-out text, seconds. Trained now where it says nothing.

    ``about``: all that decides the bits of the run, as JSON has it; a file about another run is replaced.
    ``make(corpus, directory)``: the Trainer, which keeps its state in ``directory`` until the run is done.
    """
    if not there(path, about):
        scratch = path.with_suffix(".run")
        told = scratch / "about.json"
        if scratch.exists() and (not told.exists() or told.read_text() != json.dumps(about)):
            shutil.rmtree(scratch)
        scratch.mkdir(parents=True, exist_ok=True)
        told.write_text(json.dumps(about))
        trainer = make(Corpus.load(None, vocab), scratch)
        with suppress(FileNotFoundError, ValueError):  # a state of another version of the loop: from the beginning
            trainer.load()
        try:
            history = trainer.run()
            made = {"held_out": history.held_out, "seconds": history.seconds}
        except FloatingPointError as error:
            made = {"held_out": [*trainer.history.held_out, (trainer.step, None)], "failed": str(error)}
        path.write_text(json.dumps({"about": about, **made}) + "\n")
        shutil.rmtree(scratch)
    row: dict[str, Any] = json.loads(path.read_text())
    return row


def losses_table(rows: Sequence[tuple[str, Sequence[float | None]]], seeds: Sequence[int]) -> str:
    """Last losses by run and seed, beside the first run's mean and its standard deviation over seeds.

    None is a run that is not there, or whose loss became NaN. Runs are compared over the seeds that both have.
    """
    base = rows[0][1]
    known = [loss for loss in base if loss is not None]
    spread = statistics.stdev(known) if len(known) > 1 else None
    head = ("run", *(f"seed {seed}" for seed in seeds), "mean", "change", "standard deviations")
    cells = []
    for name, losses in rows:
        both = [(mine, other) for mine, other in zip(losses, base, strict=True) if None not in (mine, other)]
        shown = ["-" if loss is None else f"{loss:.4f}" for loss in losses]
        if not both:
            cells.append((name, *shown, "-", "-", "-"))
            continue
        mean, middle = (statistics.mean(side) for side in zip(*both, strict=True))
        away = "-" if spread is None else f"{(mean - middle) / spread:+.1f}"
        cells.append((name, *shown, f"{mean:.4f}", f"{mean / middle - 1:+.2%}", away))
    return markdown(head, cells, numbers=range(1, len(head)))
