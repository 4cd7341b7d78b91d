"""What documents quote of recorded training runs: means over all seeds, their errors, and whether they are noise."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from lowbit.bench import loss_tables, recorded
from lowbit.bench.recorded import change, losses, losses_table
from lowbit.files import read_records, write_record


def record(directory, run, seed, loss, key="run"):
    about = {key: run, "seed": seed}
    write_record(directory / "runs.jsonl", f"{run}-{seed}", {"about": about, "held_out": [[1, 9.0], [2, loss]]})


def test_a_change_is_the_mean_over_all_seeds_of_both(tmp_path):
    for seed, loss in enumerate((2.0, 4.0, 5.0)):
        record(tmp_path, "base", seed, loss)
    for seed, loss in ((0, 2.02), (1, 4.12), (7, 1.0)):
        record(tmp_path, "other", seed, loss)
    found = losses(tmp_path / "runs.jsonl")
    assert found["base"] == {0: 2.0, 1: 4.0, 2: 5.0}
    percent = np.array([1.0, 3.0])
    difference = change(found["other"], found["base"])
    assert difference.count == 2 and difference.mean == pytest.approx(percent.mean())
    assert difference.error == pytest.approx(percent.std(ddof=1) / math.sqrt(2))
    assert str(difference) == "+2.00% ± 1.00%" and difference.verdict == "yes"


def test_one_seed_says_nothing_of_noise_and_a_failed_run_counts_as_none(tmp_path):
    for seed, loss in ((0, 2.0), (1, 2.0)):
        record(tmp_path, "base", seed, loss, "name")
    record(tmp_path, "one", 0, 1.99998, "name")
    record(tmp_path, "one", 1, None, "name")
    found = losses(tmp_path / "runs.jsonl")
    difference = change(found["one"], found["base"])
    assert (str(difference), difference.verdict) == ("+0.00%", "unknown: one seed")
    assert change({3: 1.0}, found["base"]) is None
    assert losses_table(found, "base").splitlines()[2:] == [
        "| base | 2.0000 | 2.0000 | | | |".replace("| | | |", "|  |  | |"),
        "| one | 2.0000 | - | +0.00% | - | unknown: one seed |",
    ]


def test_a_directory_without_records_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no record of a training run; expected lines"):
        losses(tmp_path / "runs.jsonl")


def test_a_change_far_from_zero_is_no_noise():
    difference = change({0: 2.02, 1: 2.0202, 2: 2.0198}, {0: 2.0, 1: 2.0, 2: 2.0})
    low, high = difference.interval
    assert difference.verdict == "no" and 0 < low < 1 < high
    assert loss_tables.in_words(difference) == "+1.00% ± 0.01% (3 seeds)"


def test_the_record_has_every_run_that_documents_show():
    recipes, optimizers = loss_tables.recipe_changes(), loss_tables.optimizer_changes()
    assert {run for run, _ in loss_tables.SHOWN.values()} <= recipes.keys()
    assert set(loss_tables.SHOWN_OPTIMIZERS.values()) <= optimizers.keys()
    runs = loss_tables.recipe_runs().splitlines()[2:] + loss_tables.changed_runs().splitlines()[3:]
    assert len(runs) == len(recipes) + 1  # bf16 is the first row of both tables


def test_the_page_of_results_lists_the_folder():
    """Each file and folder of bench/results is in a row of its README, and each row's files exist."""
    results = Path(recorded.__file__).parent / "results"
    rows = [line.split("|")[1] for line in (results / "README.md").read_text().splitlines() if line.startswith("| `")]
    listed = {name.rstrip("/") for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert listed | {"README.md"} == {path.name for path in results.iterdir()}


def test_a_record_is_replaced_by_name_and_a_damaged_line_is_told(tmp_path):
    table = tmp_path / "made" / "runs.jsonl"
    assert read_records(table) == {}
    for name, value in (("a", 1), ("b", 2), ("a", 3)):
        write_record(table, name, {"value": value})
    assert read_records(table) == {"a": {"value": 3}, "b": {"value": 2}} and len(table.read_text().splitlines()) == 2
    table.write_text('{"name": "a", "value": 3}\n{"name": "b", "va\n')
    with pytest.raises(ValueError, match=r"runs.jsonl, line 2 is damaged: expected a JSON object with a name"):
        read_records(table)
    write_record(table, "c", {})
    assert len(table.read_text().splitlines()) == 3, "a damaged line is no loss of the others"
