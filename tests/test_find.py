"""docs/find.md leads from usual names to calls that exist, and every public function is on a page."""

from __future__ import annotations

import inspect
import re
from functools import reduce
from pathlib import Path

import pytest

import lowbit as lb

ROOT = Path(__file__).resolve().parent.parent
ROW = re.compile(r"^\| (?P<names>[^|]+) \| (?P<calls>[^|]+) \|", re.MULTILINE)
#: docs/modules.md lists files, and mentions functions only by accident.
PAGES = [path for path in (*ROOT.glob("README.md"), *(ROOT / "docs").glob("*.md")) if path.name != "modules.md"]


def test_the_calls_of_the_index_exist() -> None:
    text = (ROOT / "docs" / "find.md").read_text()
    calls = set(re.findall(r"`(lb\.[A-Za-z_.]+)", text))
    assert len(calls) > 40
    for call in calls:
        reduce(getattr, call.split(".")[1:], lb)  # raises AttributeError for a name that does not exist


@pytest.mark.parametrize("word", [
    "gradient checkpointing", "gradient accumulation", "flash attention", "ZeRO stage 2", "calibration cache", "LSQ",
    "straight-through estimator", "activation offload", "paged optimizer", "NVMe", "OOM",
])  # fmt: skip
def test_the_usual_names_are_in_the_index(word: str) -> None:
    assert any(word in row["names"] for row in ROW.finditer((ROOT / "docs" / "find.md").read_text()))


def test_every_public_function_is_on_a_page() -> None:
    words = {word for page in PAGES for word in re.findall(r"\w+", page.read_text())}
    modules = (lb, lb.train, lb.qat, lb.memory, lb.optim, lb.distributed)
    functions = {
        f"{module.__name__}.{name}"
        for module in modules
        for name in module.__all__
        if inspect.isfunction(getattr(module, name))
    }
    assert [name for name in sorted(functions) if name.rpartition(".")[2] not in words] == []
