"""English text from the documentation in Python's standard library, or from a file.

A *document* is a list of prose paragraphs, without code, tables and grammar. Training and held-out text are split by
document. Only the first occurrence of a paragraph is kept, so that no held-out text is in the training text.
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

#: One of this many documents is held out.
HOLD_OUT = 12

#: Shorter documents, in characters, are left out; many are one-line descriptions of codecs.
SHORTEST = 200

#: Folders of the standard library with tests, vendored packages or code without documentation.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip", "__pycache__"}

#: Typographic characters and their ASCII spelling.
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
    """The English paragraphs of ``text``, each as one line."""
    for block in re.split(r"\n\s*\n", text.expandtabs().translate(_ASCII)):
        for item in re.split(r"\n(?=\s*[*-] )", block):
            line = re.sub(r"^[*-] ", "", " ".join(item.split()))
            letters = sum(c.isalpha() or c in " ,.'" for c in line)
            if len(line) >= 40 and letters >= 0.88 * len(line) and line[0].isupper() and not _CODE.search(line):
                if line[-1] not in ":,;":  # they introduce code, which is left out
                    yield line if line[-1] in ".!?)" else line + "."


def docstrings(path: Path) -> str:
    """All docstrings of a module, in source order."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in _statements(tree) if isinstance(node, kinds)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return "\n\n".join(doc for node in nodes if (doc := ast.get_docstring(node)))


def _statements(tree: ast.AST) -> list[ast.AST]:
    """A module and its nested statements; ``ast.walk`` is slower, because it visits expressions too."""
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
    """The documents of named texts, without paragraphs of earlier documents."""
    seen: set[str] = set()
    documents = []
    for name, text in sources:
        fresh = [line for line in dict.fromkeys(prose(text)) if line not in seen]
        seen.update(fresh)
        if sum(map(len, fresh)) >= SHORTEST:
            documents.append(Document(name, tuple(fresh)))
    return documents


def standard_library() -> list[Document]:
    """The reference topics and docstrings of this Python version, in the same order on every machine."""
    return documents(_library_sources())


def file_documents(path: Path, section: int = 4096) -> list[Document]:
    """Cut a text file at empty lines into documents of at least ``section`` characters.

    Raises:
        ValueError: The file cannot be read or is not UTF-8 text.
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
    """Split documents into training and held-out documents, by a hash of the name.

    If no name is selected, the last document is held out.
    """
    held = [d for d in documents if zlib.crc32(d.name.encode()) % hold_out == 0] or documents[1:][-1:]
    return [d for d in documents if d not in held], held
