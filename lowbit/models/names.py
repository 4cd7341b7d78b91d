"""The one language in which callers say which modules of a model they mean.

A pattern is a name, a shell pattern, a regular expression or a function:

- A name, or a shell pattern with ``*``, ``?`` and ``[...]`` as in ``fnmatch``, matches a module's path from any dot:
  ``"lm_head"`` is ``"model.lm_head"`` too, and ``"blocks.*.up"`` matches ``"model.blocks.3.up"``. It means the module
  that it names and all modules inside.
- ``"re:"`` starts a regular expression of the whole path, as llm-compressor's: it matches from the beginning (and here
  to the end as well, where theirs may stop before). It means that module alone.
- A function ``(module, path) -> bool``, as torchao's ``filter_fn``, is asked of each module, and means that module
  alone.

Where patterns lead to different things, the last that matches wins. Paths are those of ``named_modules`` without what
torch.compile adds (``plain_name``), which names and shell patterns may have too.
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
    """Whether ``pattern`` means ``module``, whose path is ``path``.

    Raises ValueError for no regular expression, and for a function that raises.
    """
    if not isinstance(pattern, str):
        return _answer(pattern, path, module)
    return _means(plain_name(pattern), path)


def named(pattern: Pattern, path: str, module: nn.Module) -> bool:
    """Whether ``pattern`` means the module itself, not just one that it is inside of."""
    if not isinstance(pattern, str) or pattern.startswith(_REGULAR):
        return matches(pattern, path, module)
    return _names(plain_name(pattern), path.split("."))


def last_match(rows: Iterable[tuple[Pattern, Meaning]], path: str, module: nn.Module) -> Meaning | None:
    """What the last of ``rows`` whose pattern means the module leads to; None where none does."""
    return next((meaning for pattern, meaning in reversed(list(rows)) if matches(pattern, path, module)), None)


def spells(pattern: Pattern, path: str, word: str) -> bool:
    """Whether ``pattern`` means the module at ``path`` by its part ``word``, and not just by wildcards: it would not
    match if that part were another word of the same shape. A function spells nothing.
    """
    if not isinstance(pattern, str) or not _means(pattern, path):
        return False
    other = re.sub(r"[^\W_]", lambda letter: _other(letter[0]), word)
    return not _means(pattern, ".".join(other if part == word else part for part in path.split(".")))


def unmatched(patterns: Iterable[Pattern], modules: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """The patterns, other than functions, that mean none of these modules."""
    known = list(modules)
    return [
        pattern
        for pattern in patterns
        if isinstance(pattern, str) and not any(matches(pattern, path, module) for path, module in known)
    ]


def patterns_in(given: Any, what: str) -> tuple[Pattern, ...]:
    """The patterns that a caller gave as ``what``: one, or several. A tuple comes back as it is.

    Raises TypeError for what is no pattern.
    """
    if given is None:
        raise TypeError(f"{what}: expected a pattern or several, got None; {what}=() leaves nothing out")
    one = isinstance(given, str | type | nn.Module) or callable(given) or not isinstance(given, Iterable)
    patterns = (given,) if one else given if isinstance(given, tuple) else tuple(given)
    for pattern in patterns:
        require_pattern(pattern, what)
    return patterns


def written(patterns: Iterable[Pattern], what: str) -> list[str]:
    """The patterns as a file has them. Raises ValueError for functions, which no file can hold."""
    functions = [shown(pattern) for pattern in patterns if not isinstance(pattern, str)]
    if functions:
        raise ValueError(f"{what}: the function {functions[0]} cannot be written to a file; give names or patterns")
    return [pattern for pattern in patterns if isinstance(pattern, str)]


def exact(path: str) -> str:
    """The pattern that means the module at ``path``, and no other."""
    return _REGULAR + re.escape(path)


def shown(pattern: Pattern) -> str:
    """A pattern in words of people."""
    return pattern if isinstance(pattern, str) else getattr(pattern, "__name__", type(pattern).__name__)


def is_inside(path: str, above: str) -> bool:
    """Whether the module at ``path`` is the one at ``above``, or inside of it."""
    return not above or path == above or path.startswith(f"{above}.")


def plain_name(path: str) -> str:
    """A module's path without what torch.compile adds for each compiled module on the way."""
    return ".".join(part for part in path.split(".") if part != "_orig_mod")


def _answer(function: Callable[[Any, str], bool], path: str, module: nn.Module) -> bool:
    """What a function answers. Raises ValueError where it raises."""
    try:
        return bool(function(module, path))
    except Exception as error:
        raise ValueError(
            f"the function {shown(function)} raised {type(error).__name__} for the {type(module).__name__} {path!r}: "
            f"{error}. It is called with a module and its path, and is asked of layers of every class"
        ) from error


def _means(pattern: str, path: str) -> bool:
    if pattern.startswith(_REGULAR):
        return _compiled(pattern).fullmatch(path) is not None
    parts = path.split(".")
    return any(_names(pattern, parts[:length]) for length in range(len(parts), -1, -1))


def _names(pattern: str, parts: Sequence[str]) -> bool:
    """Whether a shell pattern matches these parts of a path, in full or from any of its dots."""
    return any(fnmatchcase(".".join(parts[start:]), pattern) for start in range(max(len(parts), 1)))


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern.removeprefix(_REGULAR))
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None


def _other(letter: str) -> str:
    """Another character of the same kind."""
    kind = "01" if letter.isdigit() else "XY" if letter.isupper() else "xy"
    return kind[letter == kind[0]]
