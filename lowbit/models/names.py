"""Patterns: how callers select modules of a model, the same in all functions.

A pattern is a name, a shell pattern, a regular expression or a function:

- A name, or a shell pattern with ``*``, ``?`` and ``[...]`` as in ``fnmatch``, matches a module's path from any dot:
  ``"lm_head"`` also matches ``"model.lm_head"``, and ``"blocks.*.up"`` matches ``"model.blocks.3.up"``. It selects the
  module and all modules inside it.
- ``"re:"`` starts a regular expression for the full path. As in llm-compressor it matches from the beginning, but here
  it must match to the end too. It selects only the modules whose path matches.
- A function ``(module, path) -> bool``, as torchao's ``filter_fn``, is called for each module. It selects only the
  modules for which it returns True.

If several patterns match, the last one wins. Paths are those of ``named_modules`` without torch.compile's additions
(``plain_name``), which names and shell patterns may include.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, TypeVar

from torch import nn

from lowbit.recipes import Pattern, require_pattern

__all__ = [
    "exact", "is_inside", "last_match", "matches", "named", "patterns_in", "plain_name", "shown", "spells", "unmatched",
    "written",
]  # fmt: skip

_REGULAR = "re:"

Meaning = TypeVar("Meaning")


def matches(pattern: Pattern, path: str, module: nn.Module) -> bool:
    """Whether ``pattern`` selects ``module``, whose path is ``path``.

    Raises:
        ValueError: an invalid regular expression, or a function that raises.
    """
    if not isinstance(pattern, str):
        return _answer(pattern, path, module)
    return _means(plain_name(pattern), path)


def named(pattern: Pattern, path: str, module: nn.Module) -> bool:
    """Whether ``pattern`` names the module itself, not only a module around it."""
    if not isinstance(pattern, str) or pattern.startswith(_REGULAR):
        return matches(pattern, path, module)
    return _names(plain_name(pattern), path.split("."))


def last_match(rows: Iterable[tuple[Pattern, Meaning]], path: str, module: nn.Module) -> Meaning | None:
    """The value of the last row whose pattern selects the module, or None."""
    return next((meaning for pattern, meaning in reversed(list(rows)) if matches(pattern, path, module)), None)


def spells(pattern: Pattern, path: str, word: str) -> bool:
    """Whether ``pattern`` selects the module by the literal part ``word`` of its path, not only by wildcards.

    This means that it would not match if that part were another word of the same shape. False for functions.
    """
    if not isinstance(pattern, str) or not _means(pattern, path):
        return False
    other = re.sub(r"[^\W_]", lambda letter: _other(letter[0]), word)
    return not _means(pattern, ".".join(other if part == word else part for part in path.split(".")))


def unmatched(patterns: Iterable[Pattern], modules: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """The patterns, except functions, that select none of these modules."""
    rows = list(modules)
    return [
        pattern
        for pattern in patterns
        if isinstance(pattern, str) and not any(matches(pattern, path, module) for path, module in rows)
    ]


def patterns_in(value: Any, what: str) -> tuple[Pattern, ...]:
    """Return the patterns of the argument ``what``, which may be one or several. A tuple is returned as it is.

    Raises:
        TypeError: an entry is no pattern.
    """
    if value is None:
        raise TypeError(f"{what}: expected a pattern or several, got None; {what}=() leaves nothing out")
    single = isinstance(value, str | type | nn.Module) or callable(value) or not isinstance(value, Iterable)
    patterns = (value,) if single else value if isinstance(value, tuple) else tuple(value)
    for pattern in patterns:
        require_pattern(pattern, what)
    return patterns


def written(patterns: Iterable[Pattern], what: str) -> list[str]:
    """The patterns for a file. Raises ValueError for functions, which cannot be written."""
    functions = [shown(pattern) for pattern in patterns if not isinstance(pattern, str)]
    if functions:
        raise ValueError(f"{what}: the function {functions[0]} cannot be written to a file; give names or patterns")
    return [pattern for pattern in patterns if isinstance(pattern, str)]


def exact(path: str) -> str:
    """The pattern that selects only the module at ``path``."""
    return _REGULAR + re.escape(path)


def shown(pattern: Pattern) -> str:
    """A pattern as text for messages."""
    return pattern if isinstance(pattern, str) else getattr(pattern, "__name__", type(pattern).__name__)


def is_inside(path: str, above: str) -> bool:
    """Whether the module at ``path`` is the one at ``above``, or inside it."""
    return not above or path == above or path.startswith(f"{above}.")


def plain_name(path: str) -> str:
    """A module's path without the ``_orig_mod`` that torch.compile adds for each compiled module."""
    return ".".join(part for part in path.split(".") if part != "_orig_mod")


def _answer(function: Callable[[Any, str], bool], path: str, module: nn.Module) -> bool:
    """The result of a pattern function. Raises ValueError if it raises."""
    try:
        return bool(function(module, path))
    except Exception as error:
        raise ValueError(
            f"the function {shown(function)} raised {type(error).__name__} for the {type(module).__name__} {path!r}: "
            f"{error}. It is called with a module and its path, for layers of every class"
        ) from error


def _means(pattern: str, path: str) -> bool:
    if pattern.startswith(_REGULAR):
        return _compiled(pattern).fullmatch(path) is not None
    parts = path.split(".")
    return any(_names(pattern, parts[:length]) for length in range(len(parts), -1, -1))


def _names(pattern: str, parts: Sequence[str]) -> bool:
    """Whether a shell pattern matches these parts of a path, from any dot."""
    return any(fnmatchcase(".".join(parts[start:]), pattern) for start in range(max(len(parts), 1)))


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern.removeprefix(_REGULAR))
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None


def _other(letter: str) -> str:
    """Another character of the same class."""
    pair = "01" if letter.isdigit() else "XY" if letter.isupper() else "xy"
    return pair[letter == pair[0]]
