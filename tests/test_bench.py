"""The benchmarks run from end to end, and their results say what they must."""

import csv
import json

import pytest
from typer.testing import CliRunner

from lowbit.checkout import adopt
from lowbit.cli import app
from lowbit.ops import OPS

adopt("bench")
from lowbit.bench import timing  # noqa: E402


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_quick_run_writes_every_result(tmp_path):
    ran = bench("--quick", "--out", tmp_path, "--json")
    assert ran.exit_code == 0, ran.output
    rows = list(csv.DictReader((tmp_path / "cpu.csv").open()))
    assert {row["section"] for row in rows} == set(OPS), "every op of the table is measured"
    assert all(float(row["seconds"]) > 0 and float(row["limit_seconds"]) > 0 for row in rows)
    assert len(json.loads(ran.stdout)) == len(rows)
    text = (tmp_path / "cpu.md").read_text()
    for word in ("machine", "commit", "torch ", "tiny inputs"):
        assert word in text
    pytest.importorskip("matplotlib")
    assert (tmp_path / "cpu.png").stat().st_size > 10_000


def test_a_part_is_chosen_by_a_pattern(tmp_path):
    listed = bench("--list", "--only", "^encode stochastic fp8")
    assert listed.stdout.splitlines() == ["encode stochastic fp8_e4m3", "encode stochastic fp8_e5m2"]
    ran = bench("--quick", "--only", "^encode stochastic fp8", "--out", tmp_path)
    assert "encode stochastic" in ran.stdout and "fp8_e5m2" in ran.stdout and "of limit" in ran.stdout


@pytest.mark.parametrize("pattern, message", [("^$", "nothing to measure matches"), ("(", "no regular expression")])
def test_a_pattern_that_selects_nothing_is_an_error(pattern, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        CliRunner().invoke(app, ["bench", "--only", pattern, "--out", str(tmp_path)], catch_exceptions=False)


def test_cases_take_turns():
    seen = []
    cases = [timing.Case(name, lambda name=name: seen.append(name)) for name in "abc"]
    group = timing.Group("section", "op", "subject", 1, 0, tuple(cases[:2]), (cases[2],))
    seconds = timing.measure(group, timing.Budget(samples=4, sample_seconds=0.0, seconds=1.0))
    assert set(seconds) == {"a", "b", "c"}
    assert "".join(seen).endswith("abc" * 4)
