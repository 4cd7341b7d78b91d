"""Tables of named rows: spelling of names, suggestions for unknown names, and registration of rows."""

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
    """``name`` in the spelling of tables: lower case, with dashes in place of underscores."""
    return name.lower().replace("_", "-")


def did_you_mean(name: str, known: Iterable[str], suffix: str = "") -> str:
    """The text " (did you mean NAME?)" with the closest known name and ``suffix``; empty if none is close."""
    names = {spelled(row): row for row in known}
    close = get_close_matches(spelled(name), names, n=1)
    return f" (did you mean {names[close[0]]}{suffix}?)" if close else ""


def register(table: MutableMapping[str, Row], row: Row, taken: Iterable[str], what: str) -> None:
    """Adds ``row`` to ``table``.

    Args:
        table: Rows by name.
        row: The new row. Its name must consist of lower case letters, digits and single dashes.
        taken: Further names that are not available.
        what: A noun for the row in messages.

    Raises:
        ValueError: The name is misspelled or taken.
    """
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", row.name):
        raise ValueError(
            f"the name of a {what} has lower case letters and digits, with dashes between, such as "
            f"'mine-2'; got {row.name!r}"
        )
    if row.name in table or row.name in map(spelled, taken):
        raise ValueError(f"the name {row.name!r} is taken; choose another for the {what}")
    table[row.name] = row
