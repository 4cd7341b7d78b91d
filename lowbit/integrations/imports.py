"""``when_imported``: something to do as soon as another library is there, without importing it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["when_imported"]


def when_imported(name: str, do: Callable[[Any], None]) -> None:
    """Call ``do(module)`` once the module ``name`` is imported: at once if it is, else right after it has run. Where
    that fails, as with a version of the library that has changed, it warns.
    """
    if sys.modules.get(name) is not None:
        _do(do, import_module(name))  # which waits where another thread has not finished it
        return
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _FINDER.awaited.setdefault(name, []).append(do)


def _do(do: Callable[[Any], None], module: ModuleType) -> None:
    try:
        do(module)
    except Exception as error:  # of whatever the library has become: importing it must not fail by lowbit
        warnings.warn(
            f"lowbit does not know this version of {module.__name__} ({type(error).__name__}: {error}), and its "
            f"quantized models may not work with it; install a version that lowbit's pyproject.toml names",
            stacklevel=2,
        )


class _Finder(MetaPathFinder):
    """Finds the awaited modules where all others find them, and has something done after they have run."""

    def __init__(self) -> None:
        self.awaited: dict[str, list[Callable[[Any], None]]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.awaited:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((spec for finder in others if (spec := finder.find_spec(fullname, path, target))), None)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_do(module: ModuleType) -> None:
            run(module)
            for do in self.awaited.pop(module.__name__, ()):  # one loader may run several modules, or one of them twice
                _do(do, module)

        spec.loader.exec_module = run_and_do  # type: ignore[method-assign]
        return spec


_FINDER = _Finder()
