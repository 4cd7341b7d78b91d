"""Training runs of the demo's GPT, one line per run in a JSON Lines table; stopped runs resume."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lowbit.demo.data import Corpus
from lowbit.demo.loop import Trainer
from lowbit.files import read_records, write_record

__all__ = ["is_recorded", "record_name", "trained"]


def record_name(run: str, seed: int) -> str:
    """The name of a run's record."""
    letters = "".join(c if c.isalnum() else "-" for c in run.lower())
    return f"{letters}-{seed}".replace("--", "-")


def is_recorded(table: Path, name: str, about: dict[str, Any]) -> bool:
    """Whether ``table`` has the record of this run."""
    record = read_records(table).get(name)
    return record is not None and record["about"] == json.loads(json.dumps(about))


def trained(
    table: Path, name: str, about: dict[str, Any], vocab: int, make: Callable[[Corpus, Path], Trainer]
) -> dict[str, Any]:
    """The record of a run: ``about``, the curve of held-out losses, seconds. Trains the run if there is none.

    Args:
        table: JSON Lines file of ``read_records``.
        name: ``record_name`` of the run.
        about: All settings that determine the bits of the run. A record with other settings is replaced.
        vocab: Size of the vocabulary.
        make: ``make(corpus, directory)`` returns the Trainer, which keeps its state in ``directory``.
    """
    if not is_recorded(table, name, about):
        scratch = table.parent / f"{table.stem}.{name}.run"
        told = scratch / "about.json"
        if scratch.exists() and (not told.exists() or told.read_text() != json.dumps(about)):
            shutil.rmtree(scratch)
        scratch.mkdir(parents=True, exist_ok=True)
        told.write_text(json.dumps(about))
        trainer = make(Corpus.load(None, vocab), scratch)
        with suppress(FileNotFoundError, ValueError):  # a state of another version of the loop: start again
            trainer.load()
        try:
            history = trainer.run()
            made = {"held_out": history.held_out, "seconds": history.seconds}
        except FloatingPointError as error:
            made = {"held_out": [*trainer.history.held_out, (trainer.step, None)], "failed": str(error)}
        write_record(table, name, {"about": about, **made})
        shutil.rmtree(scratch)
    return read_records(table)[name]
