"""Folders of a source checkout that are subpackages once installed: ``kernels/`` and ``bench/`` stand at its top."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

__all__ = ["adopt"]


def adopt(name: str) -> None:
    """In a checkout, whether installed or not, make ``lowbit.NAME`` the folder ``NAME/`` beside this package."""
    root, full = Path(__file__).parents[1], f"lowbit.{name}"
    if full in sys.modules or not (root / "setup.py").is_file() or not (root / name).is_dir():
        return
    found = spec_from_file_location(full, root / name / "__init__.py", submodule_search_locations=[str(root / name)])
    assert found is not None and found.loader is not None
    sys.modules[full] = module = module_from_spec(found)
    found.loader.exec_module(module)
    setattr(sys.modules["lowbit"], name, module)
