"""Fresh interpreters that have imported torch alone: what is slow in a start is done once for all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

#: Answers each line of its input, a question, by the exit code of a process forked for it.
_SERVER = """
import importlib, json, os, signal, sys, traceback
import torch
places = sys.path[1:]
for line in sys.stdin:
    question = json.loads(line)
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    signal.alarm(300)
    for number, name in enumerate((os.devnull, question["stdout"], question["stderr"])):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), number)
    os.chdir(question["folder"])
    sys.path[:] = ["", *question["places"], *places]
    importlib.invalidate_caches()
    code = 0
    try:
        exec(compile(question["code"], "<question>", "exec"), {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
"""


class Answer(NamedTuple):
    """How a question ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


class Fresh:
    """A process that forks another for each question. Close it with ``with``."""

    def __init__(self, scratch: Path) -> None:
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "TRITON_INTERPRET")}
        command = [sys.executable, "-c", _SERVER]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=scratch)
        self._outputs = {name: scratch / name for name in ("stdout", "stderr")}

    def __enter__(self) -> Fresh:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.communicate()

    def ask(self, code: str, places: list[Path], folder: Path) -> Answer:
        """Code as ``python -c`` runs it in a folder with these places in ``PYTHONPATH``, for 300 seconds at most."""
        for path in self._outputs.values():
            path.write_text("")
        outputs = {name: str(path) for name, path in self._outputs.items()}
        question = {"code": code, "places": [str(place) for place in places], "folder": str(folder), **outputs}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        exit_code = self._process.stdout.readline()
        assert exit_code, "the fresh interpreter has ended"
        return Answer(int(exit_code), *(path.read_text() for path in self._outputs.values()))
