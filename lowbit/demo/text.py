"""English text that every machine has: the documentation inside Python's own standard library.

A *document* is a list of prose paragraphs; code, tables and grammar are left out, so that a model of a few million
parameters spends its minute on English. Training and held-out text are split by document, and a paragraph is kept
only where it is first met, so nothing held out was trained on.
"""

from __future__ import annotations

import ast
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Document", "docstrings", "documents", "file_documents", "split", "standard_library"]

#: One document in this many is held out.
HOLD_OUT = 12

#: Documents shorter than this many characters (one-line codec descriptions and the like) say nothing.
SHORTEST = 200

#: Folders of the standard library that hold tests, vendored packages or nothing but code.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip", "__pycache__"}

#: Typographic characters that documentation uses, in ASCII, so that one spelling is one sequence of bytes.
_ASCII = str.maketrans(
    {"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-", "…": "...", "\xa0": " ", "→": "->", "−": "-"}
)

_CODE = re.compile(
    r">>>|::=|\{\{|\\|[\[\](){}=<>/_#|+*^]{3}|==|^\W*$|^(?:def|class|import|from|return|for|if|try|@)\b.*:?$"
)


@dataclass(frozen=True)
class Document:
    """A named text; ``paragraphs`` are single lines of prose."""

    name: str
    paragraphs: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join(self.paragraphs) + "\n"


def prose(text: str) -> Iterator[str]:
    """The paragraphs of ``text`` that read as English, each joined into one line."""
    for block in re.split(r"\n\s*\n", text.expandtabs().translate(_ASCII)):
        for item in re.split(r"\n(?=\s*[*-] )", block):
            line = re.sub(r"^[*-] ", "", " ".join(item.split()))
            letters = sum(c.isalpha() or c in " ,.'" for c in line)
            if len(line) >= 40 and letters >= 0.88 * len(line) and line[0].isupper() and not _CODE.search(line):
                if line[-1] not in ":,;":  # what those introduce was code, and is gone
                    yield line if line[-1] in ".!?)" else line + "."


def docstrings(path: Path) -> str:
    """Every docstring of a module, in the order of the source."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in _statements(tree) if isinstance(node, kinds)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return "\n\n".join(doc for node in nodes if (doc := ast.get_docstring(node)))


def _statements(tree: ast.AST) -> list[ast.AST]:
    """A module and the statements in it at any depth. ``ast.walk`` visits every expression too."""
    nodes = [tree]
    for node in nodes:
        for name in ("body", "handlers", "orelse", "finalbody", "cases"):
            inner = getattr(node, name, None)
            nodes += inner if isinstance(inner, list) else ()
    return nodes


def _library_sources() -> Iterator[tuple[str, str]]:
    from pydoc_data.topics import topics

    yield from sorted(topics.items())
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not _SKIPPED.intersection(parts) and "topics.py" not in parts:
            yield "/".join(parts), docstrings(path)


def documents(sources: Iterable[tuple[str, str]]) -> list[Document]:
    """Documents without the paragraphs that an earlier one has already said."""
    seen: set[str] = set()
    found = []
    for name, text in sources:
        fresh = [line for line in dict.fromkeys(prose(text)) if line not in seen]
        seen.update(fresh)
        if sum(map(len, fresh)) >= SHORTEST:
            found.append(Document(name, tuple(fresh)))
    return found


def standard_library() -> list[Document]:
    """The reference topics and docstrings of this Python; the order is the same on every machine with this version."""
    return documents(_library_sources())


def file_documents(path: Path, section: int = 4096) -> list[Document]:
    """A text file of one's own, cut at empty lines into documents of at least ``section`` characters.

    Raises: ValueError when the file cannot be read or is not UTF-8 text.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); give a file of UTF-8 text") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); convert it, e.g. iconv -t utf-8") from None
    documents: list[Document] = []
    lines: list[str] = []
    size = 0
    for line in text.splitlines():
        lines.append(line)
        size += len(line) + 1
        if size >= section and not line.strip():
            documents.append(Document(f"{path.name}:{len(documents)}", tuple(lines)))
            lines, size = [], 0
    if lines:
        documents.append(Document(f"{path.name}:{len(documents)}", tuple(lines)))
    return documents


def split(documents: list[Document], hold_out: int = HOLD_OUT) -> tuple[list[Document], list[Document]]:
    """``(training, held out)``: a document's name decides, so one more document moves no other.

    The last document is held out where the names choose none.
    """
    held = [d for d in documents if zlib.crc32(d.name.encode()) % hold_out == 0] or documents[1:][-1:]
    return [d for d in documents if d not in held], held
