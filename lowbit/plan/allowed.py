"""What ``require`` and ``exclude`` leave of a table of choices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from lowbit.name_tables import did_you_mean

__all__ = ["left", "names_in"]

_Choice = TypeVar("_Choice")


def names_in(given: Iterable[str]) -> tuple[str, ...]:
    """The names that a caller gave, of which a single one may be a string."""
    return (given,) if isinstance(given, str) else tuple(given)


def left(
    choices: Mapping[str, Mapping[str, _Choice]],
    require: Iterable[str],
    exclude: Iterable[str],
    offered: Callable[[_Choice], bool] = lambda choice: True,
    who: str = "fit",
) -> dict[str, dict[str, _Choice]]:
    """By dimension and name the choices that are left: of a dimension with a required name these alone, of others
    those that are ``offered``, and none that is excluded.

    Raises ValueError for an unknown name, and where a dimension has no choice left.
    """
    required, excluded = set(names_in(require)), set(names_in(exclude))
    known = [name for row in choices.values() for name in row]
    for name in (*required, *excluded):
        if name not in known:
            raise ValueError(f"{who}: no choice is called {name!r}{did_you_mean(name, known)}; there are {known}")
    found = {}
    for dimension, row in choices.items():
        chosen = [name for name in row if name in required] or [name for name in row if offered(row[name])]
        found[dimension] = {name: row[name] for name in chosen if name not in excluded}
        if not found[dimension]:
            raise ValueError(
                f"{who}: require and exclude leave nothing for the {dimension}, which is one of {list(row)}; leave one "
                f"of them in"
            )
    return found
