"""Makes ``kernels/`` and ``bench/`` of a source checkout importable as ``lowbit.kernels`` and ``lowbit.bench``.

They have no ``__init__.py``. With the checkout on ``sys.path``, a folder with one would hide an installed package of
the same name, such as Hugging Face's ``kernels``.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

__all__: list[str] = []


def _adopt() -> None:
    root = Path(__file__).parents[1]
    for name in ("bench", "kernels"):
        full = f"lowbit.{name}"
        if full in sys.modules or not (root / "setup.py").is_file() or not (root / name).is_dir():
            continue
        spec = ModuleSpec(full, None, is_package=True)
        spec.submodule_search_locations = [str(root / name)]
        sys.modules[full] = module = module_from_spec(spec)
        setattr(sys.modules["lowbit"], name, module)


_adopt()
