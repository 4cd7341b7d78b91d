"""``lowbit fit --ladder``: what it prints and writes, and what it refuses."""

import json

import pytest

from lowbit.plan.ladder import RUNGS, ascent
from lowbit.plan.ladder.cell import Result
from lowbit.plan.ladder.shape import textbook


def test_without_a_ladder_it_says_what_there_is(run):
    assert "lowbit fit --ladder --memory 2GiB" in run("fit", code=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--memory", "much"), "'much' is no size"),
        (("--memory", "1MiB"), "needs a budget that its smallest transformer does not exceed"),
        (("--search", "-1"), "--search is a number of models, got -1"),
        (("--device", "tpu"), "--device is one of cpu, cuda, got 'tpu'"),
    ],
)
def test_mistakes_are_told(run, options, message):
    assert message in run("fit", "--ladder", *options, code=1)


@pytest.fixture
def ruled(monkeypatch):
    """A process of a cell is replaced by a rule: each rung halves what is held."""

    def fake(cell):
        changed = sum(bool(v) for v in (cell.settings.checkpoint, cell.settings.mixed, cell.settings.bits == 8))
        peak = sum(textbook(cell.shape).values()) >> (changed + bool(cell.settings.recipe) + (cell.settings.micro > 1))
        if cell.budget is not None and peak > cell.budget:
            return Result(0, cell.budget, None, (), "backward")
        return Result(0, peak, 0.25, (6.0,) * cell.steps)

    monkeypatch.setattr(ascent, "measure", fake)


def test_quick_prints_a_row_a_rung_and_no_largest_model(run, ruled):
    text = run("fit", "--ladder", "--memory", "100MiB", "--quick")
    assert "times the budget of 100.00 MiB" in text
    for rung in RUNGS:
        assert sum(line.startswith(rung.name) for line in text.splitlines()) == 2, "a row and a sentence"
    assert "largest" not in text and "Under the limit it runs out in backward." in text
    data = json.loads(run("fit", "--ladder", "--memory", "100MiB", "--quick", "--json"))
    assert [row["name"] for row in data["rungs"]] == [rung.name for rung in RUNGS]
    assert data["budget"] == 100 << 20 and all(row["largest"] is None for row in data["rungs"])


def test_out_has_report_numbers_and_cells(run, ruled, tmp_path):
    run("fit", "--ladder", "--memory", "100MiB", "--out", str(tmp_path))
    data = json.loads((tmp_path / "ladder.json").read_text())
    sizes = [row["largest"]["parameters"] for row in data["rungs"] if row["kept"]]
    assert sizes == sorted(set(sizes)), "each rung that halves what is held trains a larger model"
    assert "| fp32 |" in (tmp_path / "ladder.md").read_text() and list((tmp_path / "cells").glob("fp32-size*.json"))
