"""Files of the blocks that a run of ``calibrate`` has finished, so that a stopped run can resume."""

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

#: The methods of this version of lowbit, whose code is identified by their names.
_METHODS = dict(METHODS)

#: Names in the directory: the description of the run, its blocks, and the mark that all blocks are finished.
_RUN, _BLOCKS, _CLOSED = "run.json", "blocks", "closed.json"


def run_of(
    model: str, recipes: LayerRecipes, choice: Choice, skip: Iterable[Pattern], data: Any, loss: Loss | None
) -> dict[str, str | None]:
    """The description of a run: everything that its result depends on. ``model`` is a digest.

    Raises ValueError if the batches, loss, method or patterns have no digest.
    """
    method = choice.weights
    known = method is None or _METHODS.get(method.name) == method
    return {
        "model": model,
        "recipe": str(recipes.to_dict()),
        "method": str(choice) if known else f"{choice} {digest(method, 'the method')[:16]}",
        "skip": " ".join(sorted(written(skip, "skip"))),
        "data": digest(data),
        "loss": None if loss is None else digest(loss, "the loss"),
        "lowbit": __version__,
    }


class Finished:
    """Directories ``blocks/INDEX`` with the Calibration of one block each, complete if ``calibration.json`` is there.

    ``run`` is the result of ``run_of``. Raises ValueError if the directory belongs to another run, and OSError if it
    cannot be written.
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
                raise ValueError(f"{self.directory} is not empty and has no run of calibrate; give another directory")
            with resumable(self.directory):
                write_json(path, dict(run))
        for path in left_behind(self.directory):
            path.unlink()

    def _block(self, index: int) -> Path:
        return self.directory / _BLOCKS / f"{index:04}"

    def load(self, index: int) -> Calibration | None:
        """The Calibration of block ``index``; None if it is not finished."""
        if not (self._block(index) / CONFIG).exists():
            return None
        return Calibration.load(self._block(index))

    def save(self, index: int, part: Calibration) -> None:
        with resumable(self.directory):
            part.save(self._block(index))

    def close(self, parts: int) -> None:
        """Mark the run as finished, with this number of saved Calibrations."""
        with resumable(self.directory):
            write_json(self.directory / _CLOSED, {"parts": parts})

    def opened(self) -> Calibration | None:
        """The Calibration of all blocks, which reads weights from disk when they are used; None before ``close``."""
        if not (self.directory / _CLOSED).exists():
            return None
        calibration = Calibration()
        directories: dict[str, Path] = {}
        parts = read_json(self.directory / _CLOSED).get("parts")
        if type(parts) is not int:
            raise ValueError(f"{self.directory / _CLOSED} is damaged: its parts are {shown(parts)}; remove it")
        for index in range(parts):
            part = Calibration.load(self._block(index))
            directories.update((name, self._block(index)) for name in part.weights)
            calibration.add(part)
        calibration.weights = _OnDisk(directories)  # type: ignore[assignment]  # only read
        return calibration

    def result(self) -> Calibration | None:
        """The saved result of a completed run; None before ``finish``."""
        if not (self.directory / CONFIG).exists():
            return None
        calibration = Calibration.load(self.directory)
        shutil.rmtree(self.directory / _BLOCKS, ignore_errors=True)
        return calibration

    def finish(self, calibration: Calibration) -> None:
        """Save the result, and remove the blocks."""
        with resumable(self.directory):
            calibration.save(self.directory)
        shutil.rmtree(self.directory / _BLOCKS, ignore_errors=True)


class _OnDisk(Mapping[str, Quantized]):
    """Weights of saved Calibrations. The weights of the last directory stay in memory."""

    def __init__(self, directories: dict[str, Path]) -> None:
        self.directories = directories
        self.last: tuple[Path | None, Mapping[str, Quantized]] = None, {}

    def __getitem__(self, name: str) -> Quantized:
        directory = self.directories[name]
        if self.last[0] != directory:
            self.last = directory, Calibration.load(directory).weights
        return self.last[1][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.directories)

    def __len__(self) -> int:
        return len(self.directories)
