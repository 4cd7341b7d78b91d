"""The one writer of tables: what each form looks like, and that nothing else writes one by hand."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from lowbit.tables import aligned, csv_text, markdown, rich_table

ROOT = Path(__file__).parents[1]


def printed(table, width: int = 60) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    console.print(table)
    return console.file.getvalue()


def test_markdown_aligns_numbers_and_escapes_bars():
    text = markdown(("", "ms", "note"), [("a|b", 1.5, ""), ("c", 20, "slow")], numbers=(1,))
    assert text.splitlines() == ["| | ms | note |", "| --- | ---: | --- |", r"| a\|b | 1.5 | |", "| c | 20 | slow |"]


def test_markdown_of_no_rows_is_a_head():
    assert markdown(("a", "b"), ()) == "| a | b |\n| --- | --- |"


def test_aligned_columns_begin_or_end_together():
    rows = [("name", "n", ""), ("a", "12", "x"), ("long one", "3", "")]
    assert aligned(rows, numbers=(1,)).splitlines() == ["name       n", "a         12  x", "long one   3"]
    assert aligned([("a", "b")], gap=1) == "a b" and aligned([]) == ""


def test_rows_of_another_length_are_an_error():
    with pytest.raises(ValueError, match="shorter"):
        aligned([("a", "b"), ("c",)])


def test_csv_has_every_column_that_a_row_names():
    rows = [{"a": 1, "note": "x, y"}, {"a": 2, "b": 3, "note": ""}]
    text = csv_text(rows, last="note")
    assert text.startswith("a,b,note\n") and "\r" not in text
    assert list(csv.DictReader(io.StringIO(text))) == [
        {"a": "1", "b": "", "note": "x, y"}, {"a": "2", "b": "3", "note": ""}
    ]  # fmt: skip


def test_a_terminal_gets_every_letter_and_no_markup():
    text = printed(rich_table(("name", "n"), [("[red]" + "x" * 70, 1), (Text("bold", "bold"), 20)], numbers=(1,)), 40)
    assert text.count("x") == 70 and "[red]" in text and "…" not in text
    assert "│" in printed(rich_table(("a",), [("b",)], boxed=True))
    assert printed(rich_table((), [("key", "value")])).split() == ["key", "value"]


def test_no_other_file_writes_the_rule_of_a_markdown_table():
    rule = re.compile(r"-{3}:? ?\|")
    files = [*(ROOT / "lowbit").rglob("*.py"), *(ROOT / "bench").glob("*.py"), ROOT / "docs" / "generate_tables.py"]
    assert [str(path.relative_to(ROOT)) for path in files if rule.search(path.read_text())] == []
