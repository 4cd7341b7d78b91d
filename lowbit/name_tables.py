"""Tables of named rows: how a name is spelled, what an unknown one may stand for, how a row is added."""

from __future__ import annotations

import re
from collections.abc import Iterable, MutableMapping
from difflib import get_close_matches
from typing import Protocol, TypeVar

__all__ = ["did_you_mean", "register", "spelled"]


class Named(Protocol):
    """A row of a table."""

    @property
    def name(self) -> str: ...


Row = TypeVar("Row", bound=Named)


def spelled(name: str) -> str:
    """``name`` as tables have it: in lower case, with dashes, which underscores stand for too."""
    return name.lower().replace("_", "-")


def did_you_mean(name: str, known: Iterable[str], suffix: str = "") -> str:
    """The known name that is closest to ``name``, with ``suffix``, in brackets after a space; empty where none is."""
    names = {spelled(row): row for row in known}
    close = get_close_matches(spelled(name), names, n=1)
    return f" (did you mean {names[close[0]]}{suffix}?)" if close else ""


def register(table: MutableMapping[str, Row], row: Row, taken: Iterable[str], what: str) -> None:
    """Add ``row`` to ``table``, a ``what`` in messages.

    Raises ValueError for a name that is taken, in the table or in ``taken``, and for one that is not spelled with lower
    case letters, digits and single dashes, as lookups spell it.
    """
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", row.name):
        raise ValueError(
            f"the name of a {what} has lower case letters and digits, with dashes between, such as "
            f"'mine-2'; got {row.name!r}"
        )
    if row.name in table or row.name in map(spelled, taken):
        raise ValueError(f"the name {row.name!r} is taken; choose another for the {what}")
    table[row.name] = row
