"""Training runs of the demo's GPT, one file a run: what is there is not trained again, what was stopped goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lowbit.demo.data import Corpus
from lowbit.demo.loop import Trainer

__all__ = ["file_name", "there", "trained"]


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
