"""CONTRIBUTING's additions, made in a copy of the repository as it says, do what it says."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: A block of code, and where the sentence in its first line puts it, if that has one.
BLOCK = re.compile(r"^```py(?:thon)?\n(.*?)^```", re.DOTALL | re.MULTILINE)
PLACE = re.compile(r"# (?P<file>\S+\.py): (?P<how>row of|before|field of|new file)(?: (?P<name>\w+))?\n")


def insert(file: Path, how: str, name: str | None, code: str) -> None:
    """A new file; or in a file, code before a statement, a field at the end of a class, or a row at the end of a table.

    Args:
        file: The file.
        how: ``"new file"``, ``"before"``, ``"field of"`` or ``"row of"``.
        name: The variable that the statement assigns, or the class.
        code: The code.
    """
    if how == "new file":
        file.write_text(code)
        return
    text = file.read_text()
    node = next(node for node in ast.parse(text).body if re.match(rf"{name}\b.* = ", ast.unparse(node)) or
                getattr(node, "name", None) == name)  # fmt: skip
    lines = text.splitlines(keepends=True)
    if how == "before":
        lines.insert(node.lineno - 1, f"{code}\n\n")
    elif how == "field of":
        last = max(line.lineno for line in node.body if isinstance(line, ast.AnnAssign))
        lines.insert(last, textwrap.indent(code, "    "))
    else:
        table = next(n for n in ast.walk(node.value) if isinstance(n, ast.Dict | ast.Tuple | ast.List))
        last = (table.values if isinstance(table, ast.Dict) else table.elts)[-1]
        line = lines[last.end_lineno - 1].encode()
        lines[last.end_lineno - 1] = (
            line[: last.end_col_offset] + f", {code.strip().rstrip(',')}\n".encode() + line[last.end_col_offset :]
        ).decode()
    file.write_text("".join(lines))


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The repository with all additions, without compiled libraries: the tables have outgrown them."""
    root = tmp_path_factory.mktemp("stranger")
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.pyd", "*.dylib")
    for folder in ("lowbit", "kernels", "tests", "csrc"):
        shutil.copytree(ROOT / folder, root / folder, ignore=ignored)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, root)
    for block in BLOCK.finditer((ROOT / "CONTRIBUTING.md").read_text()):
        if place := PLACE.match(block[1]):
            insert(root / place["file"], place["how"], place["name"], block[1][place.end() :])
    return root


def python(root: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(root), "LOWBIT_NATIVE": "0"}
    done = subprocess.run([sys.executable, *arguments], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_every_addition_finds_its_place(copy):
    places = [
        place for block in BLOCK.finditer((ROOT / "CONTRIBUTING.md").read_text()) if (place := PLACE.match(block[1]))
    ]
    assert len(places) >= 10
    for file in {place["file"] for place in places}:
        ast.parse((copy / file).read_text(), file)


@pytest.mark.slow
def test_every_block_says_where_it_goes_or_runs(copy):
    """Blocks that are not put into a file run one after the other, in one program, and print what they show."""
    blocks = [block[1] for block in BLOCK.finditer((ROOT / "CONTRIBUTING.md").read_text())]
    program = "\n".join(block for block in blocks if not PLACE.match(block))
    shown = re.findall(r"^# -> (.*)$", program, re.MULTILINE)
    assert len(shown) >= 5 and len(blocks) >= 10
    assert python(copy, "-W", "ignore", "-c", program).splitlines() == shown


@pytest.mark.slow
def test_what_follows_from_a_row_follows(copy):
    """The tests of the tables take the new rows for their parameters, and pass."""
    names = "fp7_e3m3 or rows4 or negate or fp6-weight-only"
    files = ["tests/test_formats.py", "tests/test_scaling.py", "tests/ops/test_ops.py", "tests/recipes/test_recipes.py"]
    told = python(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", names, *files)
    assert re.search(r"\d+ passed", told)
    collected = python(copy, "-m", "pytest", "-q", "-p", "no:xdist", "--collect-only", "-k", names, *files)
    assert all(name in collected for name in ("fp7_e3m3", "negate", "fp6-weight-only"))
