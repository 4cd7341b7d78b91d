"""Processes of ``lowbit train`` that torchrun starts, and the directory that they write to."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import typer

from lowbit.cli.console import errors, out, print_error
from lowbit.distributed import torchrun
from lowbit.files import exclusive

__all__ = ["lock", "make_writable", "needs_torchrun", "process_group"]

#: Seconds between a SIGTERM outside of training and the end of the process.
_GRACE = 2.0


def needs_torchrun(subject: str) -> str:
    """The error for a subject that one process cannot do."""
    return (
        f"{subject} needs several processes; start them with torchrun --nproc-per-node 2 -m lowbit train and the same "
        "options"
    )


@contextmanager
def process_group(timeout: float, device: torch.device) -> Iterator[None]:
    """Join the processes that torchrun started; only the first prints. An error ends the process.

    An error that all processes raise is printed once. ``device`` is that of this process.
    """
    before = signal.signal(signal.SIGTERM, _end_soon)
    is_news: Callable[[Exception], bool] = lambda _: True  # until the group exists
    try:
        with torchrun.joined(timeout, device) as is_news:
            for console in (out, errors):
                console.quiet = torchrun.rank() > 0
            yield
    except typer.Exit:
        raise
    except Exception as error:
        errors.quiet = False
        if is_news(error):
            print_error(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # sys.exit could hang or abort: threads of the group may wait for a lost process
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_soon(*_: object) -> None:
    """End this process after a delay: torchrun sends SIGTERM when a process fails, and this one may know the cause."""
    timer = threading.Timer(_GRACE, os._exit, (128 + signal.SIGTERM,))
    timer.daemon = True
    timer.start()


def lock(directory: Path, locks: ExitStack) -> None:
    """Keep other runs out of ``directory``. Raises BlockingIOError if another run writes to it, or OSError."""
    make_writable(directory)
    locks.enter_context(exclusive(directory, "lowbit train --out"))


def make_writable(directory: Path) -> None:
    """Create ``directory`` and write to it. Raises OSError if that fails."""
    if directory.is_file():
        raise NotADirectoryError(f"{directory} is a file; pass a directory with --out")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise type(error)(
            f"cannot write to {directory} ({error.strerror}); pass another directory with --out"
        ) from None
