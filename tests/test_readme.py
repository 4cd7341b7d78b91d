"""What the documents say is so: their code runs and prints what it shows, tables are current, links lead on."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import socket
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "bench").rglob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page, needs", [
    ("README.md", ()), ("docs/formats.md", ()), ("docs/answers.md", ()),
    ("docs/optimizers.md", ("transformers",)), ("docs/training.md", ()), ("docs/ladder.md", ()),
    ("docs/memory.md", ("transformers",)),
    ("docs/with-other-libraries.md", ("transformers", "peft", "accelerate")), ("docs/distributed.md", ()),
])  # fmt: skip
def test_code_prints_what_it_shows(tmp_path, monkeypatch, page, needs):
    for package in needs:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    text = (ROOT / page).read_text()
    names: dict[str, object] = {"__name__": "readme"}
    blocks = list(BLOCK.finditer(text))
    assert blocks
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        code = compile("\n" * line + block[1], str(ROOT / page), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        shown = re.findall(r"^# -> (.*)$", block[1], re.MULTILINE)
        assert printed.getvalue().splitlines() == shown, f"the block at {page}:{line + 1}"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def _tables():
    spec = importlib.util.spec_from_file_location("generate_tables", ROOT / "docs" / "generate_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", _tables().FILES)
def test_tables_are_current(name):
    text = (ROOT / name).read_text()
    assert "<!-- table:" in text
    assert _tables().filled(text) == text, f"{name} has a table that the code has outgrown; run `make tables`"


@pytest.mark.parametrize("name", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_changes_in_percent_are_quoted_by_tables_that_read_the_record(name):
    """A figure that is typed stays as it was when the record grows: whoever quotes one adds a table of it."""
    prose = re.sub(r"<!-- table: \w+ -->.*?<!-- end -->", "", (ROOT / name).read_text(), flags=re.DOTALL)
    assert re.findall(r"(?<![\w.])[+\-−±] ?\d+(?:\.\d+)? ?%", prose) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"
