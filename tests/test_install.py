"""What setup.py builds and records, and what an install without native code says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def setup(tmp_path: Path, **env: str) -> Path:
    """Run setup.py as pip does, into a folder; the package there."""
    built = tmp_path / "lib"
    command = [
        sys.executable,
        "setup.py",
        "-q",
        "build_ext",
        f"--build-lib={built}",
        f"--build-temp={tmp_path / 'work'}",
    ]
    environment = {**os.environ, **env}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return built / "lowbit"


@pytest.mark.parametrize(
    ("env", "wanted", "told"),
    [
        ({"LOWBIT_NATIVE": "0"}, False, "switched off by LOWBIT_NATIVE=0"),
        ({"LOWBIT_NATIVE": "auto", "CXX": "/no/compiler", "LOWBIT_CUDA": "OFF"}, True, "failed"),
    ],
    ids=["switched off", "failed"],
)
def test_a_build_without_native_code_leaves_none_of_an_earlier_one(tmp_path, env, wanted, told):
    pytest.importorskip("setuptools")
    package = tmp_path / "lib" / "lowbit"
    package.mkdir(parents=True)
    for name in ("lowbit_ops.so", "_native.cpython-310-x86_64-linux-gnu.so"):
        (package / name).write_bytes(b"old")
    assert setup(tmp_path, **env) == package
    assert [path.name for path in package.iterdir()] == ["_build.json"]
    record = json.loads((package / "_build.json").read_text())
    assert record["wanted"] is wanted and told in record["notice"]
    assert "pip install --force-reinstall --no-deps --no-cache-dir ." in record["notice"]


def test_wheels_and_sdists_have_the_folders_beside_the_package(tmp_path):
    """These are packages without ``__init__.py``, which no search finds."""
    pytest.importorskip("setuptools")
    base = tmp_path / "base"
    base.mkdir()
    commands = ["egg_info", f"--egg-base={base}", "build_py", f"--build-lib={tmp_path / 'lib'}"]
    done = subprocess.run([sys.executable, "setup.py", "-q", *commands], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (sources,) = base.rglob("SOURCES.txt")
    for name in ("kernels", "bench"):
        files = {path.name for path in (ROOT / name).glob("*.py")}
        assert files and {path.name for path in (tmp_path / "lib/lowbit" / name).glob("*.py")} == files
        assert {f"{name}/{file}" for file in files} <= set(sources.read_text().splitlines())


USED = """
import torch
import lowbit as lb
with lb.use_backend("reference"):
    lb.encode(torch.ones(2), "int8")
print("asked for", flush=True)
for _ in range(2):
    lb.encode(torch.ones(2), "int8")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("record", "warns"),
    [
        (None, "was not built"),
        ({"notice": "no torch", "wanted": True}, "no torch"),
        ({"notice": "off", "wanted": False}, ""),
    ],
    ids=["never built", "torch came later", "switched off"],
)
def test_the_first_op_that_falls_to_the_reference_warns(tmp_path, record, warns):
    shutil.copytree(
        ROOT / "lowbit", tmp_path / "lowbit", ignore=shutil.ignore_patterns("__pycache__", "*.so", "_build*")
    )
    if record:
        (tmp_path / "lowbit" / "_build.json").write_text(json.dumps(record))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", USED]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stdout
    before, after = done.stdout.split("asked for")
    assert before == "", "who asks for the reference is not told"
    assert after.count("RuntimeWarning: lowbit runs on its reference") == bool(warns)
    assert warns in after and ("To be silent" in after) == bool(warns)
