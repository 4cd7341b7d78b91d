"""Tables of modules, made of their docstrings: folders for ARCHITECTURE.md, each file for modules.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

from lowbit.tables import markdown

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "lowbit"

_HEAD = ("where", "what")


def _about(path: Path, whole: bool = False) -> str:
    """The first sentence of a module's docstring, or with ``whole`` its first paragraph."""
    paragraph = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    text = paragraph if whole else re.split(r"(?<=\.)\s", paragraph)[0]
    return text.rstrip(".:").replace("``", "`")


def places() -> str:
    """The files of the package itself, and its folders."""
    files = [path for path in sorted(PACKAGE.glob("*.py")) if not path.name.startswith("_")]
    folders = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))
    rows = [(f"`lowbit/{path.name}`", _about(path)) for path in files]
    rows += [(f"`lowbit/{folder.name}/`", _about(folder / "__init__.py", whole=True)) for folder in folders]
    return markdown(_HEAD, rows)


def modules() -> str:
    """Every file of the package, the kernels in Triton and the benchmarks, by folder."""
    paths = [*PACKAGE.rglob("*.py"), *(ROOT / "kernels").glob("*.py"), *(ROOT / "bench").glob("*.py")]
    rows = [(f"`{path.relative_to(ROOT)}`", _about(path)) for path in sorted(paths) if not path.name.startswith("_")]
    return markdown(_HEAD, rows)


TABLES: dict[str, Callable[[], str]] = {"places": places, "modules": modules}
