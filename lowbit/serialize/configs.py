"""What a config of transformers may say, when a stranger wrote it: sizes of a model, and nothing that fetches code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from lowbit.files import shown

__all__ = ["check_config"]

#: No size in a config comes near this; larger ones would be allocated where a model computes its tables.
MOST_SIZE = 1 << 31

#: What a number of layers is called, and more of them than models have.
_LAYERS = re.compile(r"(num|n)_(\w+_)?(layers?|blocks?)")
MOST_LAYERS = 2048

#: The keys by which a config chooses kernels, and the choices that need no other package.
_KERNELS = re.compile(r"(?!_?cache).*implementation(?!_autoset).*")
_THERE = ("eager", "sdpa", "lowbit", "flex_attention", "paged|eager", "batched_mm", "grouped_mm")

#: How timm spells models of the Hub and of other directories.
_ELSEWHERE = re.compile(r"\s*(hf[-_]hub|local[-_]dir)\s*:", re.IGNORECASE)


def check_config(config: Any) -> None:
    """Raises ValueError for a config with a number that can be no size, or no number of layers, of a model; and for one
    by which transformers, or timm, would fetch code or weights, or read another file.
    """
    for path, value in _values(config, ()):
        for refuse in _RULES:
            reason = refuse(path, value)
            if reason is not None:
                raise ValueError(f"{shown('.'.join(path))} is {shown(value)}, {reason}")


def _values(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All that is in a config, with the keys that lead there."""
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
    if not isinstance(value, str) or value in _THERE or not any(_KERNELS.fullmatch(key) for key in path):
        return None
    return (
        f"and may be one of {', '.join(_THERE)}: other kernels are fetched as code, or need a package. Remove it, "
        f"and choose kernels after loading: model.set_attn_implementation(...)"
    )


def _elsewhere(path: tuple[str, ...], value: Any) -> str | None:
    if isinstance(value, str) and _ELSEWHERE.match(value):
        return "which names a model of another place; only what is in the directory is read"
    if path[-1:] == ("checkpoint_path",) and value:
        return "which names a file of weights; only what is in the directory is read"
    if path == ("configuration_files",):
        return "which names other configs; put what they say in config.json"
    return None


def _code(path: tuple[str, ...], value: Any) -> str | None:
    """At the top it is of no use, because the model is of transformers' own class."""
    inside = path[-1:] == ("auto_map",) and len(path) > 1
    return "which names code in other files; lowbit runs none" if inside and value else None


#: Why a value is refused, or None, by the keys that lead to it.
_RULES: tuple[Callable[[tuple[str, ...], Any], str | None], ...] = (_size, _kernel, _elsewhere, _code)
