"""The blocks that a run of ``calibrate`` has finished, in files, so that one that was stopped goes on where it was."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from lowbit.calibrate.calibration import CONFIG, Calibration
from lowbit.files import read_json, shown, write_json

__all__ = ["Finished"]

#: What says which run a directory is of, and where its blocks are.
_RUN, _BLOCKS = "run.json", "blocks"


class Finished:
    """``directory/blocks/INDEX`` holds the Calibration of one block, complete once its ``calibration.json`` is there.

    ``run``: what decides every bit of the result: model, recipe, method, data. Raises ValueError for a directory of
    another run, naming the first difference; OSError where it cannot be written.
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
        elif self.directory.exists() and any(self.directory.iterdir()):
            raise ValueError(f"{self.directory} is not empty and holds no run of calibrate; give another directory")
        else:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_json(path, dict(run))

    def _block(self, index: int) -> Path:
        return self.directory / _BLOCKS / f"{index:04}"

    def load(self, index: int) -> Calibration | None:
        """What was found for block ``index``; None where it is not finished."""
        if not (self._block(index) / CONFIG).exists():
            return None
        return Calibration.load(self._block(index))

    def save(self, index: int, part: Calibration) -> None:
        """Keep what was found for block ``index``."""
        part.save(self._block(index))

    def whole(self) -> Calibration | None:
        """The result of a run that came to its end."""
        return Calibration.load(self.directory) if (self.directory / CONFIG).exists() else None

    def finish(self, found: Calibration) -> None:
        """Save the result, and remove the blocks."""
        found.save(self.directory)
        shutil.rmtree(self.directory / _BLOCKS, ignore_errors=True)
