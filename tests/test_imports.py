"""Imports run one way (ARCHITECTURE.md), optional parts have one importer, and the package lives without them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

#: From the bottom up; a module may import its own layer and those below.
LAYERS = (
    ("_version", "formats", "files"),
    ("scaling",),
    ("recipes", "packing", "quantized"),
    ("reference",),
    ("ops",),
    ("kernels",),
    ("backends",),
    ("autograd", "functional"),
    ("nn",),
    ("serialize", "memory"),
    ("train",),
    ("cli",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

#: Who alone may import what may be missing.
IMPORTERS = {"kernels": {"backends", "kernels"}, "_native": {"backends", "cli"}}


def sources() -> list[tuple[str, Path]]:
    """Every module with the name of its part: ``nn`` for lowbit/nn/linear.py."""
    parts = [
        (path.relative_to(ROOT / "lowbit").parts[0].removesuffix(".py"), path) for path in ROOT.glob("lowbit/**/*.py")
    ]
    return [(part, path) for part, path in parts if part != "__init__"] + [
        ("kernels", path) for path in ROOT.glob("kernels/**/*.py")
    ]


def imported(path: Path) -> set[str]:
    """Parts of lowbit that a module imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "lowbit":
            found |= {f"lowbit.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found.add(node.module or "")
    return {name.split(".")[1] for name in found if name.startswith("lowbit.")}


@pytest.mark.parametrize(
    ("part", "path"), sources(), ids=lambda v: "" if isinstance(v, str) else str(v.relative_to(ROOT))
)
def test_imports_run_one_way(part, path):
    assert part in LEVEL, f"{part} has no place in LAYERS"
    for other in imported(path):
        if other in LEVEL:
            assert LEVEL[other] <= LEVEL[part], f"{path} imports lowbit.{other}, which is above it"
        if other in IMPORTERS:
            assert part in IMPORTERS[other], f"{path} imports lowbit.{other}; only {IMPORTERS[other]} may"


def run(code: str, *options: str) -> str:
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_formats_and_scalings_need_nothing_but_python():
    run(
        "import sys, types; sys.modules['lowbit'] = p = types.ModuleType('lowbit'); p.__path__ = ['lowbit']\n"
        "from lowbit import formats, scaling, recipes\n"
        "assert scaling.scheme('mxfp4').format.max == 6 and recipes.recipe('int8')\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )


def test_lives_without_native_code_and_without_triton():
    said = run(
        "import sys\n"
        "sys.modules['triton'] = sys.modules['lowbit._native'] = None\n"
        "import torch\n"
        "torch.ops.load_library = lambda path: (_ for _ in ()).throw(OSError('no library'))\n"
        "import lowbit as lb\n"
        "x = torch.randn(3, 40)\n"
        "q = lb.quantize(x, 'mxfp4')\n"
        "assert torch.equal(lb.fake_quantize(x, 'mxfp4'), q.dequantize())\n"
        "assert [impl.name for impl in lb.impls('quantize')] == ['reference']\n"
        "from lowbit.backends import registry\n"
        "print(registry.absent())"
    )
    for name in ("cpu", "triton"):
        assert f"'{name}'" in said
