"""Make ``.venv`` and install what a target of the Makefile needs; nothing is done where that has been done before.

``python3 tools/setup_env.py --torch torch==2.13.0 test bench`` gives ``.venv`` torch, the build tools, and lowbit
(editable, native code not yet built) with its extras ``test`` and ``bench``. What is installed is remembered in the
environment as a digest of all that it depends on, so a changed requirement is installed at the next call. Standard
library only.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: The environment; another folder than .venv for other versions (make test-oldest).
ENV = ROOT / os.environ.get("LOWBIT_ENV", ".venv")
PYTHON = ENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
NO_NETWORK = (
    "if this machine has no network, use an interpreter that has the packages (make ... PYTHON=/path/to/python), "
    "or point pip at a folder of wheels (PIP_FIND_LINKS, PIP_NO_INDEX)"
)


def fail(message: str) -> None:
    raise SystemExit(f"setup: {message}")


def say(message: str) -> None:
    print(f"setup: {message}", file=sys.stderr, flush=True)


def run(*command: str | Path) -> bool:
    return subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL).returncode == 0


def works(python: Path, *modules: str) -> bool:
    """Whether that interpreter starts and imports the modules."""
    code = "; ".join(f"import {name}" for name in modules) or "pass"
    try:
        return subprocess.run([str(python), "-c", code], capture_output=True).returncode == 0
    except OSError:
        return False


def make_env() -> None:
    """An environment with pip, also where Python comes without ensurepip (Debian's python3 without python3-venv)."""
    if works(PYTHON, "pip"):
        return
    say(f"making {ENV.name} with Python {sys.version.split()[0]}")
    shutil.rmtree(ENV, ignore_errors=True)
    attempts: tuple[tuple[str | Path, ...], ...] = (
        (sys.executable, "-m", "venv", ENV),
        (sys.executable, "-m", "virtualenv", "-q", ENV),
        (sys.executable, "-m", "venv", "--without-pip", ENV),
    )
    for attempt in attempts:
        done = subprocess.run([str(word) for word in attempt], capture_output=True)
        if done.returncode == 0:
            break
        shutil.rmtree(ENV, ignore_errors=True)
    if not works(PYTHON):
        fail("cannot make a virtual environment; install Python's venv module (apt install python3-venv) and try again")
    if not works(PYTHON, "pip") and not run(sys.executable, "-m", "pip", "-q", "--python", PYTHON, "install", "pip"):
        fail("this Python has neither ensurepip nor pip; apt install python3-venv (or python3-pip), then try again")


def pip(*arguments: str) -> bool:
    return run(PYTHON, "-m", "pip", "install", "-q", *arguments)


def build_requirements(pyproject: str) -> list[str]:
    """``build-system.requires`` (tomllib is not in Python 3.10; the list is also a Python literal)."""
    found = re.search(r"^requires = (\[.*?\])", pyproject, re.MULTILINE | re.DOTALL)
    if found is None:
        fail("pyproject.toml has no build-system.requires")
        return []
    return [str(name) for name in ast.literal_eval(found.group(1))]


def install(torch: str, extras: list[str], optional: list[str], pyproject: str) -> None:
    say(f"installing {torch.split()[0]} and what {', '.join(extras)} needs (minutes, the first time)")
    if not pip(*shlex.split(torch), "numpy"):
        fail(f"pip could not install {torch}; {NO_NETWORK}")
    if not pip(*build_requirements(pyproject)):
        fail(f"pip could not install the build tools; {NO_NETWORK}")
    # Native code is the next step's (make build), which shows its progress and fails where the compiler does.
    os.environ["LOWBIT_NATIVE"] = "0"
    if not pip("--no-build-isolation", "-e", f"{ROOT}[{','.join(extras)}]"):
        fail(f"pip could not install lowbit[{','.join(extras)}]; {NO_NETWORK}")
    for file in optional:
        for line in (ROOT / file).read_text().splitlines():
            words = shlex.split(line, comments=True)
            if words and not pip(*words):
                say(f"optional: {words[0]} could not be installed; it will be shown as absent")


def main() -> None:
    if sys.version_info < (3, 10):  # noqa: UP036 (whoever has an older one learns it here)
        fail(f"lowbit needs Python >= 3.10, not {sys.version.split()[0]}; give another with BASE_PYTHON=python3.12")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip is asked for, options included")
    parser.add_argument("--optional", action="append", default=[], help="requirements file whose lines may fail")
    parser.add_argument("extras", nargs="+", help="extras of pyproject.toml")
    asked = parser.parse_args()
    make_env()
    pyproject = (ROOT / "pyproject.toml").read_text()
    parts = [asked.torch, pyproject, (ROOT / "setup.py").read_text(), str(ROOT)]
    digest = hashlib.sha256("\0".join([*parts, *((ROOT / f).read_text() for f in asked.optional)]).encode()).hexdigest()
    stamps = [ENV / f"lowbit-{extra}.stamp" for extra in asked.extras]
    if all(stamp.exists() and stamp.read_text() == digest for stamp in stamps):
        return
    install(asked.torch, asked.extras, asked.optional, pyproject)
    for stamp in stamps:
        stamp.write_text(digest)


if __name__ == "__main__":
    main()
