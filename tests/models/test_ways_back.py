"""The page that says how changes are undone names every public function that changes something in place."""

from __future__ import annotations

import re
from pathlib import Path

import lowbit as lb
import lowbit.distributed

PAGE = (Path(__file__).parents[2] / "docs" / "answers.md").read_text()
PLACES = {"lb": lb, "lb.train": lb.train, "lb.memory": lb.memory, "lb.optim": lb.optim, "lb.qat": lb.qat}
#: Functions that change tensors, not models or optimizers, and those that load.
OTHERS = {"lb.adamw_", "lb.optim.clip_grad_norm_", "lb.qat.load_"}


def test_every_function_in_place_is_on_the_page_and_there():
    section = PAGE[PAGE.index("## How do I undo a change?") :].split("\n## ")[1 - 1]
    named = set(re.findall(r"lb\.[a-z_.]*_(?=[`(])", section))
    there = {f"{place}.{name}" for place, module in PLACES.items() for name in dir(module)
             if name.endswith("_") and not name.startswith("_")} - OTHERS  # fmt: skip
    assert named == there
    assert "lb.distributed" in section and lowbit.distributed.shard_
