"""Run the cells of a table that are not finished, each in a separate process."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import lowbit as lb
from lowbit._version import __version__
from lowbit.calibrate.choice import choose
from lowbit.datafree import default_data_free
from lowbit.evaluate.cell import FLOATS, OUTPUTS, PACKED, PLAIN, REFERENCE, Request, calibrated
from lowbit.evaluate.data import Wanted, require
from lowbit.evaluate.models import Model, fingerprint, sha256
from lowbit.evaluate.peers import PEERS
from lowbit.evaluate.peers import find as find_peer
from lowbit.evaluate.tasks import TASKS
from lowbit.files import read_records
from lowbit.observers import find_observer
from lowbit.recipes import RECIPES
from lowbit.recipes import recipe as find_recipe

__all__ = ["Cell", "Methods", "cells_of", "default_of", "read", "run"]

#: The version of result files.
FORMAT = 1

#: Result name of an already quantized model, which may have many recipes.
SAVED = "saved"

#: Note of the float rows of an already quantized model.
DECODED = "the quantized weights, decoded"

#: Lines of a failed process's output to print.
TAIL = 12

#: A weight error below 2 ** -(bits + EXACT) means that the weights were already on the grid. Rounding ordinary weights
#: gives about 2 ** -bits for integers, and 2 ** -(bits - 2) for FP8.
EXACT = 3


@dataclass(frozen=True)
class Cell:
    """A model with a recipe and layout, and its result if it is measured."""

    model: Model
    request: Request
    result: dict[str, Any] | None = None
    failed: str | None = None

    @property
    def baseline(self) -> bool:
        """Whether this is the unquantized model, in the dtype of the other rows' unquantized parts."""
        return self.request.recipe == self.request.dtype

    @property
    def note(self) -> str:
        """A remark on the result, or the reason why there is none."""
        if self.failed is not None:
            return f"failed: {self.failed.splitlines()[-1]}"
        if self.result is None:
            return "not measured"
        if "refused" in self.result:
            return f"refused: {self.result['refused']}"
        if self.model.held and self.request.recipe in FLOATS:
            return DECODED
        return self._not_meaningful() or ""

    def _not_meaningful(self) -> str | None:
        """A note if the stored weights are on the recipe's grid, so that quantization loses nothing."""
        assert self.result is not None
        if self.request.recipe in FLOATS or self.request.recipe in PEERS or self.model.held:
            return None
        recipe, error = find_recipe(self.request.recipe), self.result.get("weight_error")
        if error is not None and error < 2.0 ** -(recipe.weight.format.bits + EXACT):
            return f"not meaningful: the stored weights are already on this grid (weight error {error:.1e})"
        return None


class Methods(NamedTuple):
    """Calibration methods to compare."""

    names: tuple[str, ...] = ()
    """Methods, each as names joined by ``+``; ``fold`` folds BatchNorm first, ``bias`` corrects biases at the end."""
    text: Path | None = None
    """Calibration text, if the model needs one."""
    samples: int = 128
    """Windows, texts or images for calibration."""


def cells_of(
    model: Model,
    recipes: Iterable[str] | None,
    wanted: Wanted,
    directory: Path,
    dtype: str | None = None,
    methods: Methods = Methods(),  # noqa: B008 (a tuple)
    peers: Iterable[str] = (),
) -> list[Cell]:
    """The cells of a model: fp32 and bf16, each recipe, then each peer.

    Recipes are measured plain and packed. With ``methods`` they are measured plain only: without data, and with each
    method that applies to the recipe. An already quantized model is measured as saved, plain and packed, and decoded
    to fp32 and bf16.

    Args:
        model: The model.
        recipes: Names of recipes; None: all named recipes that need no data.
        wanted: The evaluation data.
        directory: Directory for the results.
        dtype: Dtype of unquantized parts; None: the model's default.
        methods: Calibration methods to compare.
        peers: Names of other packages.

    Raises:
        ValueError: A recipe, method, peer or dtype is unknown, or the model needs a text.
        ImportError: A peer is not installed, or as for ``Model.location``.
    """
    other_packages = [find_peer(name) for name in dict.fromkeys(peers)]
    methods = Methods() if model.held else methods
    for method_names in methods.names:
        choose(calibrated(method_names.split("+")))
    if methods.names:
        wanted = wanted._replace(part="held out")
        if model.needs_text and methods.text is None:
            raise ValueError(
                f"{model.name}: calibration methods need a text other than the one of --text; pass it with "
                "--calibrate FILE"
            )
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(f"unknown --dtype {dtype!r}; expected one of {', '.join(FLOATS)}")
    without_data = (name for name, row in RECIPES.items() if row.dynamic)
    names = [name for name in (without_data if recipes is None else recipes) if name not in FLOATS]
    for name in names:
        find_recipe(name)
    if model.recipe is not None:
        names, other_packages = [model.recipe], []
    if wanted.windows < 1 or wanted.limit < 1:
        raise ValueError(f"--windows and --limit must be at least 1, got {wanted.windows} and {wanted.limit}")
    if model.needs_text:
        require(wanted, model.name)
    data = {"dtype": dtype or model.dtype, **_data_key(model, wanted)}
    seen = _data_key(model, Wanted(methods.text, methods.samples, methods.samples)) if methods.names else {}
    key = {"model": model.name, "weights": fingerprint(model), **data, "lowbit": __version__, "format": FORMAT}
    layouts = (PLAIN,) if methods.names else (PLAIN, PACKED)
    rows: list[tuple[str, str, str | None]] = [(name, PLAIN, None) for name in FLOATS]
    for name in dict.fromkeys(names):
        static = model.recipe is None and find_recipe(name).static
        rows += [(name, layout, None) for layout in layouts if not static]
        rows += [(name, PLAIN, method) for method in methods.names if static or not _repeats(method, name)]
    rows += [(peer.name, PLAIN, None) for peer in other_packages]
    versions = {
        peer.name: {"peer": peer.name, **{name: _installed(name) for name in peer.packages}} for peer in other_packages
    }
    cells = []
    for name, layout, method in rows:
        file = SAVED if name == model.recipe else name.replace(":", "-")
        table, cell_name = directory / f"{model.name}.jsonl", f"{file}.{method or layout}"
        recipe = versions.get(name) or (name if name in FLOATS or model.held else find_recipe(name).to_dict())
        more: dict[str, Any] = {} if method is None else {"method": method, "seen": seen}
        if method is None and isinstance(recipe, dict) and name not in versions and default_of(name) != "nearest":
            more = {"rule": default_of(name)}  # records without this key were rounded to nearest
        request = Request(
            model=model.name if model.module else model.path, recipe=name, layout=layout, dtype=data["dtype"],
            text=str(wanted.text.resolve()) if wanted.text else None, windows=wanted.windows, limit=wanted.limit,
            table=str(table.resolve()), name=cell_name, key={**key, "recipe": recipe, "layout": layout, **more},
            method=method, calibration=str(methods.text.resolve()) if methods.text else None, samples=methods.samples,
            part=wanted.part,
        )  # fmt: skip
        cells.append(Cell(model, request))
    return cells


def default_of(recipe: str) -> str:
    """The data-free method for rows without a calibration method."""
    return default_data_free(find_recipe(recipe).weight).name


def _repeats(method: str, recipe: str) -> bool:
    """Whether a recipe without static scales needs no row for ``method``: the default, or a method with observers."""
    steps = calibrated(method.split("+"))
    weights = choose(steps).weights
    observers = [step for step in steps if find_observer(step) and (weights is None or step != weights.name)]
    return method == default_of(recipe) or bool(observers)


def _data_key(model: Model, wanted: Wanted) -> dict[str, Any]:
    """The evaluation data in a key: the SHA-256 of a text, or the versions of packages that have the data."""
    if wanted.text is not None:
        if not wanted.text.is_file():
            raise FileNotFoundError(f"--text {wanted.text} does not exist; pass a file of UTF-8 text")
        data = sha256(wanted.text)
    else:
        settings = Path(model.path).parent / "settings.json"
        digest = sha256(settings) if model.module is None and settings.is_file() else ""
        packages = " ".join(f"{name} {_installed(name)}" for name in ("scikit-image", "scikit-learn"))
        data = f"Python {platform.python_version()}, {packages} {digest}".strip()
    key = {"data": data, "windows": wanted.windows, "limit": wanted.limit}
    return key if wanted.part == "all" else {**key, "part": wanted.part}


def _installed(package: str) -> str:
    """The version of a package, or ``none``."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def read(cell: Cell) -> Cell:
    """The cell with its saved result, if there is one with the same key."""
    table = Path(cell.request.table)
    try:
        record = read_records(table)[cell.request.name]
        same = record["key"] == json.loads(json.dumps(cell.request.key))
        result = record["result"]
        lost = cell.request.recipe == REFERENCE and TASKS[result["task"]].reference
    except (OSError, ValueError, KeyError, TypeError):
        return cell
    if not same or (lost and not table.with_suffix(OUTPUTS).exists()):
        return cell
    return Cell(cell.model, cell.request, {**result, "made": record.get("made", {})})


def run(
    cells: list[Cell], overwrite: bool = False, on_cell: Callable[[Cell], object] = lambda cell: None
) -> Iterator[Cell]:
    """Yield each cell with its result, read from its file or measured now; a failed cell does not stop the others.

    ``on_cell`` is called before each measurement.
    """
    for cell in cells:
        done = cell if overwrite else read(cell)
        if done.result is None:
            on_cell(cell)
            failed = _measure(cell.request)
            done = read(cell)
            if failed is not None or done.result is None:
                done = Cell(cell.model, cell.request, failed=failed or "the process wrote no result")
        yield done


def _measure(request: Request) -> str | None:
    """Measure in a new process; returns the end of its output if it fails, else None."""
    root = str(Path(lb.__file__).resolve().parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "lowbit.evaluate.cell"]
    data = json.dumps(asdict(request))
    done = subprocess.run(command, input=data, capture_output=True, text=True, env=environment, check=False)
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"ended by signal {-done.returncode} (9: the system had no memory left)"
    return "\n".join(done.stderr.strip().splitlines()[-TAIL:]) or f"exit code {done.returncode}"
