"""Checks of untrusted Hugging Face configs: plausible sizes, and nothing that fetches code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from lowbit.files import shown

__all__ = ["check_config"]

#: Larger than any size in a real config; models would allocate tables of such a size.
MOST_SIZE = 1 << 31

#: Keys for numbers of layers, and a number larger than in real models.
_LAYERS = re.compile(r"(num|n)_(\w+_)?(layers?|blocks?)")
MOST_LAYERS = 2048

#: Keys that choose kernels, and the values that need no other package.
_KERNELS = re.compile(r"(?!_?cache).*implementation(?!_autoset).*")
_BUILT_IN = ("eager", "sdpa", "lowbit", "flex_attention", "paged|eager", "batched_mm", "grouped_mm")

#: timm's prefixes for models of the Hub and of other directories.
_ELSEWHERE = re.compile(r"\s*(hf[-_]hub|local[-_]dir)\s*:", re.IGNORECASE)


def check_config(config: Any) -> None:
    """Check a config from an untrusted source.

    Raises:
        ValueError: A number is too large, or transformers or timm would fetch code or weights or read another file.
    """
    for path, value in _values(config, ()):
        for check in _CHECKS:
            reason = check(path, value)
            if reason is not None:
                raise ValueError(f"{shown('.'.join(path))} is {shown(value)}, {reason}")


def _values(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All nested values of a config, with their keys."""
    yield path, value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _values(inner, (*path, str(key)))
    elif isinstance(value, list):
        for inner in value:
            yield from _values(inner, path)


def _size(path: tuple[str, ...], value: Any) -> str | None:
    if not isinstance(value, int):
        return None
    most = MOST_LAYERS if path and _LAYERS.fullmatch(path[-1]) else MOST_SIZE
    return None if abs(value) <= most else f"and may be {most} at most"


def _kernel(path: tuple[str, ...], value: Any) -> str | None:
    if not isinstance(value, str) or value in _BUILT_IN or not any(_KERNELS.fullmatch(key) for key in path):
        return None
    return (
        f"and may be one of {', '.join(_BUILT_IN)}: other kernels download code or need a package. Remove the entry, "
        f"and choose kernels after loading: model.set_attn_implementation(...)"
    )


def _elsewhere(path: tuple[str, ...], value: Any) -> str | None:
    if isinstance(value, str) and _ELSEWHERE.match(value):
        return "which names a model in another place; lowbit reads only files in the directory"
    if path[-1:] == ("checkpoint_path",) and value:
        return "which names a file of weights; lowbit reads only files in the directory"
    if path == ("configuration_files",):
        return "which names other configs; put their contents into config.json"
    return None


def _code(path: tuple[str, ...], value: Any) -> str | None:
    """A top-level ``auto_map`` is harmless, because the model is built from a class in transformers."""
    inside = path[-1:] == ("auto_map",) and len(path) > 1
    return "which names code in other files; lowbit runs none" if inside and value else None


#: Functions of keys and value that return the reason to reject the value, or None.
_CHECKS: tuple[Callable[[tuple[str, ...], Any], str | None], ...] = (_size, _kernel, _elsewhere, _code)
