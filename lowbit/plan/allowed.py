"""Selects from a table of choices with ``require`` and ``exclude``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from lowbit.name_tables import did_you_mean

__all__ = ["left", "names_in"]

_Choice = TypeVar("_Choice")


def names_in(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names; a string is a single name."""
    return (names,) if isinstance(names, str) else tuple(names)


def left(
    choices: Mapping[str, Mapping[str, _Choice]],
    require: Iterable[str],
    exclude: Iterable[str],
    offered: Callable[[_Choice], bool] = lambda choice: True,
    who: str = "fit",
) -> dict[str, dict[str, _Choice]]:
    """Return the remaining choices by dimension and name.

    A dimension with required names keeps only these; other dimensions keep the choices that are ``offered``. Excluded
    names are removed.

    Raises:
        ValueError: For an unknown name, or if a dimension has no choice left.
    """
    required, excluded = set(names_in(require)), set(names_in(exclude))
    known = [name for row in choices.values() for name in row]
    for name in (*required, *excluded):
        if name not in known:
            raise ValueError(f"{who}: no choice is called {name!r}{did_you_mean(name, known)}; there are {known}")
    remaining = {}
    for dimension, row in choices.items():
        chosen = [name for name in row if name in required] or [name for name in row if offered(row[name])]
        remaining[dimension] = {name: row[name] for name in chosen if name not in excluded}
        if not remaining[dimension]:
            raise ValueError(
                f"{who}: require and exclude leave no choice for the {dimension}; allow one of {list(row)}"
            )
    return remaining
