"""``when_imported``: call a function when another library is imported, without importing it."""

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


def when_imported(name: str, action: Callable[[Any], object]) -> None:
    """Call ``action(module)`` now if the module ``name`` is imported, else right after its import.

    If the action fails, for instance because the library has changed, it warns.
    """
    if sys.modules.get(name) is not None:
        _call(action, import_module(name))  # import_module waits if another thread is still importing it
        return
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _FINDER.awaited.setdefault(name, []).append(action)


def _call(action: Callable[[Any], object], module: ModuleType) -> None:
    try:
        action(module)
    except Exception as error:  # importing the library must not fail because of lowbit
        warnings.warn(
            f"lowbit does not know this version of {module.__name__} ({type(error).__name__}: {error}), and its "
            f"quantized models may not work with it; install a version that lowbit's pyproject.toml names",
            stacklevel=2,
        )


class _Finder(MetaPathFinder):
    """Finds the awaited modules with the other finders, and calls their actions after the import."""

    def __init__(self) -> None:
        self.awaited: dict[str, list[Callable[[Any], object]]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.awaited:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self)
        spec = next((spec for finder in finders if (spec := finder.find_spec(fullname, path, target))), None)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_act(module: ModuleType) -> None:
            run(module)
            for action in self.awaited.pop(module.__name__, ()):  # a loader may run several modules, or one twice
                _call(action, module)

        spec.loader.exec_module = run_and_act  # type: ignore[method-assign]
        return spec


_FINDER = _Finder()
