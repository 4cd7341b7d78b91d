"""The blocks that a run of ``calibrate`` has finished, in files, so that one that was stopped goes on where it was."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lowbit._version import __version__
from lowbit.calibrate.calibration import CONFIG, Calibration
from lowbit.calibrate.choice import Choice
from lowbit.calibrate.identity import digest
from lowbit.calibrate.methods import METHODS
from lowbit.files import left_behind, read_json, resumable, shown, write_json
from lowbit.models.losses import Loss
from lowbit.models.names import written
from lowbit.recipes import LayerRecipes, Pattern
from lowbit.tensor.quantized import Quantized

__all__ = ["Finished", "run_of"]

#: The methods of this version of lowbit, whose names say their code.
_METHODS = dict(METHODS)

#: What says which run a directory is of, and where its blocks are.
_RUN, _BLOCKS, _CLOSED = "run.json", "blocks", "closed.json"


def run_of(
    model: str, chosen: LayerRecipes, choice: Choice, skip: Iterable[Pattern], data: Any, loss: Loss | None
) -> dict[str, str | None]:
    """What decides every bit of a run's result. ``model``: its digest.

    Raises ValueError for batches, a loss, a method or patterns that cannot be told from others.
    """
    method = choice.weights
    named = method is None or _METHODS.get(method.name) == method
    return {
        "model": model,
        "recipe": str(chosen.to_dict()),
        "method": str(choice) if named else f"{choice} {digest(method, 'the method')[:16]}",
        "skip": " ".join(sorted(written(skip, "skip"))),
        "data": digest(data),
        "loss": None if loss is None else digest(loss, "the loss"),
        "lowbit": __version__,
    }


class Finished:
    """``directory/blocks/INDEX`` holds the Calibration of one block, complete once its ``calibration.json`` is there.

    ``run``: what ``run_of`` says of it. Raises ValueError for a directory of another run, naming the first difference;
    OSError where it cannot be written, which says what remains.
    """

    def __init__(self, directory: str | Path, run: Mapping[str, str | None]) -> None:
        self.directory = Path(directory)
        path = self.directory / _RUN
        if path.exists():
            before = read_json(path)
            for name, value in run.items():
                if before.get(name) != value:
                    raise ValueError(
                        f"{self.directory} holds a calibration of another run: its {name} is "
                        f"{shown(before.get(name))}, here it is {shown(value)}; give another directory, or remove it"
                    )
        else:
            self.directory.mkdir(parents=True, exist_ok=True)
            if set(self.directory.iterdir()) - set(left_behind(self.directory, _RUN)):
                raise ValueError(f"{self.directory} is not empty and holds no run of calibrate; give another directory")
            with resumable(self.directory):
                write_json(path, dict(run))
        for path in left_behind(self.directory):
            path.unlink()

    def _block(self, index: int) -> Path:
        return self.directory / _BLOCKS / f"{index:04}"

    def load(self, index: int) -> Calibration | None:
        """What was found for block ``index``; None where it is not finished."""
        if not (self._block(index) / CONFIG).exists():
            return None
        return Calibration.load(self._block(index))

    def save(self, index: int, part: Calibration) -> None:
        """Keep what was found for block ``index``."""
        with resumable(self.directory):
            part.save(self._block(index))

    def close(self, parts: int) -> None:
        """Say that all blocks are there, ``parts`` of them with what is outside of blocks."""
        with resumable(self.directory):
            write_json(self.directory / _CLOSED, {"parts": parts})

    def opened(self) -> Calibration | None:
        """What was found for all blocks, its weights left on disk until they are asked for; None before ``close``."""
        if not (self.directory / _CLOSED).exists():
            return None
        found = Calibration()
        where: dict[str, Path] = {}
        parts = read_json(self.directory / _CLOSED).get("parts")
        if type(parts) is not int:
            raise ValueError(f"{self.directory / _CLOSED} is damaged: its parts are {shown(parts)}; remove it")
        for index in range(parts):
            part = Calibration.load(self._block(index))
            where.update((name, self._block(index)) for name in part.weights)
            found.add(part)
        found.weights = _OnDisk(where)  # type: ignore[assignment]  # only read
        return found

    def whole(self) -> Calibration | None:
        """The result of a run that came to its end; its blocks are removed."""
        if not (self.directory / CONFIG).exists():
            return None
        found = Calibration.load(self.directory)
        shutil.rmtree(self.directory / _BLOCKS, ignore_errors=True)
        return found

    def finish(self, found: Calibration) -> None:
        """Save the result, and remove the blocks."""
        with resumable(self.directory):
            found.save(self.directory)
        shutil.rmtree(self.directory / _BLOCKS, ignore_errors=True)


class _OnDisk(Mapping[str, Quantized]):
    """Weights in directories that Calibrations were saved to; those of the last directory stay in memory."""

    def __init__(self, where: dict[str, Path]) -> None:
        self.where = where
        self.last: tuple[Path | None, Mapping[str, Quantized]] = None, {}

    def __getitem__(self, name: str) -> Quantized:
        directory = self.where[name]
        if self.last[0] != directory:
            self.last = directory, Calibration.load(directory).weights
        return self.last[1][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.where)

    def __len__(self) -> int:
        return len(self.where)
