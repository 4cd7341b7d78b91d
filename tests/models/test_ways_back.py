"""The page that says how changes are undone names every public function that changes something in place."""

from __future__ import annotations

import re
from pathlib import Path

import lowbit as lb
import lowbit.distributed

PAGE = (Path(__file__).parents[2] / "docs" / "answers.md").read_text()
PLACES = {"lb": lb, "lb.train": lb.train, "lb.memory": lb.memory, "lb.optim": lb.optim, "lb.qat": lb.qat,
          "lb.distributed": lowbit.distributed, "lb.interop": lb.interop}  # fmt: skip


def test_every_function_in_place_is_on_the_page_and_there():
    section = PAGE[PAGE.index("## How do I undo a change?") :].split("\n## ")[1 - 1]
    named = set(re.findall(r"lb\.[a-z_.]*_(?=[`(])", section))
    there = {f"{place}.{name}" for place, module in PLACES.items() for name in dir(module)
             if name.endswith("_") and not name.startswith("_")}  # fmt: skip
    assert named == there
