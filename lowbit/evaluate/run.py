"""Running the cells of a table: each in a process of its own, those that are finished already left out."""

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

#: What the result of a model as it was saved is called, which may hold many recipes.
SAVED = "saved"


#: What the float rows are of a model that is quantized already.
DECODED = "the quantized weights, decoded"

#: Lines of a failed process's output that are shown.
TAIL = 12

#: A weight error below 2 ** -(bits + this) is smaller than rounding to so many bits makes of any weights that fill
#: their range: ordinary weights are at about 2 ** -bits for integers and 2 ** -(bits - 2) for FP8.
EXACT = 3


@dataclass(frozen=True)
class Cell:
    """A model with a recipe in a layout, and its result once it is measured."""

    model: Model
    request: Request
    result: dict[str, Any] | None = None
    failed: str | None = None

    @property
    def baseline(self) -> bool:
        """Whether this is the model in the float format that quantized ones have elsewhere."""
        return self.request.recipe == self.request.dtype

    @property
    def note(self) -> str:
        """What a reader of the figures must know, or why there are none."""
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
        """The reason where the stored weights lie on the recipe's grid, so that quantizing loses nothing."""
        assert self.result is not None
        if self.request.recipe in FLOATS or self.request.recipe in PEERS or self.model.held:
            return None
        chosen, error = find_recipe(self.request.recipe), self.result.get("weight_error")
        if error is not None and error < 2.0 ** -(chosen.weight.format.bits + EXACT):
            return f"not meaningful: the stored weights lie on this grid already (weight error {error:.1e})"
        return None


class Methods(NamedTuple):
    """The methods of calibration to compare, each several names joined by ``+`` (``fold`` and ``bias`` fold BatchNorm
    before, and correct biases after); the text that they look at, where the
    model needs one; how many windows or texts of it.
    """

    names: tuple[str, ...] = ()
    text: Path | None = None
    samples: int = 128


def cells_of(
    model: Model,
    recipes: Iterable[str] | None,
    wanted: Wanted,
    directory: Path,
    dtype: str | None = None,
    methods: Methods = Methods(),  # noqa: B008 (a tuple)
    peers: Iterable[str] = (),
) -> list[Cell]:
    """The cells of ``model``: fp32 and bf16, then each recipe, plain and packed, or with ``methods`` plain, without
    data and by each method that says something of the recipe; then each of ``peers``. A model that is quantized
    already is measured as it is, plain and packed, and decoded to fp32 and bf16: nothing is quantized again.

    Raises: ValueError for an unknown recipe, method, peer or dtype, and where the model needs a text to calibrate on;
    ImportError for a peer that is not installed, and as ``Model.location`` where the model is not.
    """
    others = [find_peer(name) for name in dict.fromkeys(peers)]
    methods = Methods() if model.held else methods
    for one in methods.names:
        choose(calibrated(one.split("+")))
    if methods.names:
        wanted = wanted._replace(part="held out")
        if model.needs_text and methods.text is None:
            raise ValueError(
                f"{model.name}: methods of calibration look at a text that is not the one of --text; give it with "
                "--calibrate FILE"
            )
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(f"unknown --dtype {dtype!r}; expected one of {', '.join(FLOATS)}")
    without_data = (name for name, row in RECIPES.items() if row.dynamic)
    names = [name for name in (without_data if recipes is None else recipes) if name not in FLOATS]
    for name in names:
        find_recipe(name)
    if model.recipe is not None:
        names, others = [model.recipe], []
    if wanted.windows < 1 or wanted.limit < 1:
        raise ValueError(f"--windows and --limit must be 1 or more, got {wanted.windows} and {wanted.limit}")
    if model.needs_text:
        require(wanted, model.name)
    of = {"dtype": dtype or model.dtype, **_data_key(model, wanted)}
    seen = _data_key(model, Wanted(methods.text, methods.samples, methods.samples)) if methods.names else {}
    key = {"model": model.name, "weights": fingerprint(model), **of, "lowbit": __version__, "format": FORMAT}
    wide = [(name, PLAIN) for name in FLOATS]
    layouts = (PLAIN,) if methods.names else (PLAIN, PACKED)
    rows: list[tuple[str, str, str | None]] = [(name, layout, None) for name, layout in wide]
    for name in dict.fromkeys(names):
        static = model.recipe is None and find_recipe(name).static
        rows += [(name, layout, None) for layout in layouts if not static]
        rows += [(name, PLAIN, method) for method in methods.names if static or not _repeats(method, name)]
    rows += [(peer.name, PLAIN, None) for peer in others]
    versions = {peer.name: {"peer": peer.name, **{name: _installed(name) for name in peer.packages}} for peer in others}
    cells = []
    for name, layout, method in rows:
        file = SAVED if name == model.recipe else name.replace(":", "-")
        table, cell_name = directory / f"{model.name}.jsonl", f"{file}.{method or layout}"
        told = versions.get(name) or (name if name in FLOATS or model.held else find_recipe(name).to_dict())
        more: dict[str, Any] = {} if method is None else {"method": method, "seen": seen}
        if method is None and isinstance(told, dict) and name not in versions and default_of(name) != "nearest":
            more = {"rule": default_of(name)}  # what is recorded of others was rounded to nearest as well
        request = Request(
            model=model.name if model.module else model.path, recipe=name, layout=layout, dtype=of["dtype"],
            text=str(wanted.text.resolve()) if wanted.text else None, windows=wanted.windows, limit=wanted.limit,
            table=str(table.resolve()), name=cell_name, key={**key, "recipe": told, "layout": layout, **more},
            method=method, calibration=str(methods.text.resolve()) if methods.text else None, samples=methods.samples,
            part=wanted.part,
        )  # fmt: skip
        cells.append(Cell(model, request))
    return cells


def default_of(recipe: str) -> str:
    """The rule by which rows of a recipe without a method are quantized."""
    return default_data_free(find_recipe(recipe).weight).name


def _repeats(method: str, recipe: str) -> bool:
    """Whether a recipe without static scales is measured with this already: observers have nothing to observe there."""
    steps = calibrated(method.split("+"))
    weights = choose(steps).weights
    observers = [step for step in steps if find_observer(step) and (weights is None or step != weights.name)]
    return method == default_of(recipe) or bool(observers)


def _data_key(model: Model, wanted: Wanted) -> dict[str, Any]:
    """What decides what a model is evaluated on: a text by its SHA-256, and what stands in for one by its version."""
    if wanted.text is not None:
        if not wanted.text.is_file():
            raise FileNotFoundError(f"--text {wanted.text} does not exist; give a file of UTF-8 text")
        data = sha256(wanted.text)
    else:
        settings = Path(model.path).parent / "settings.json"
        made = sha256(settings) if model.module is None and settings.is_file() else ""
        shipped = " ".join(f"{name} {_installed(name)}" for name in ("scikit-image", "scikit-learn"))
        data = f"Python {platform.python_version()}, {shipped} {made}".strip()
    key = {"data": data, "windows": wanted.windows, "limit": wanted.limit}
    return key if wanted.part == "all" else {**key, "part": wanted.part}


def _installed(package: str) -> str:
    """The version of a package, which need not be one that can be imported here."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def read(cell: Cell) -> Cell:
    """The cell with its result, where a file holds one for the same key; else as it is."""
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
    """Each cell with its result, in order: read from its file, or measured now. A failure spoils no other cell.

    ``on_cell`` hears of each cell that is about to be measured.
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
    """Measure in a new process; None where that succeeds, else the end of what it said."""
    root = str(Path(lb.__file__).resolve().parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "lowbit.evaluate.cell"]
    asked = json.dumps(asdict(request))
    done = subprocess.run(command, input=asked, capture_output=True, text=True, env=environment, check=False)
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        return f"ended by signal {-done.returncode} (9: the system had no memory left)"
    return "\n".join(done.stderr.strip().splitlines()[-TAIL:]) or f"exit code {done.returncode}"
