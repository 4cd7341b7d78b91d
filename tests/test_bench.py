"""The benchmark runs from end to end, and its results say what they must."""

import csv

import pytest

from bench import run, timing


def test_quick_run_writes_every_result(tmp_path):
    path = run.main(["--quick", "--out", str(tmp_path)])
    rows = list(csv.DictReader((tmp_path / "cpu.csv").open()))
    assert {row["section"] for row in rows} == {"encode", "decode", "quantize", "scaled_mm"}
    assert all(float(row["seconds"]) > 0 and float(row["limit_seconds"]) > 0 for row in rows)
    text = path.read_text()
    for word in ("processor", "commit", "torch ", "tiny inputs"):
        assert word in text
    pytest.importorskip("matplotlib")
    assert (tmp_path / "cpu.png").stat().st_size > 10_000


def test_nothing_selected_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match="no group matches"):
        run.main(["--quick", "--only", "^$", "--out", str(tmp_path)])


def test_cases_take_turns():
    seen = []
    cases = [timing.Case(name, lambda name=name: seen.append(name)) for name in "abc"]
    group = timing.Group("section", "op", "subject", 1, 0, tuple(cases[:2]), cases[2])
    seconds = timing.measure(group, timing.Budget(samples=4, sample_seconds=0.0, seconds=1.0))
    assert set(seconds) == {"a", "b", "c"}
    assert "".join(seen).endswith("abc" * 4)
