"""Progress of long functions: to a callable, as a progress bar on a terminal, or in the log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lowbit.memory.rss import peak_bytes
from lowbit.sizes import amount

__all__ = ["Progress", "bar", "reporting"]

#: Called with the current item, the number of finished items, and their total.
Progress = Callable[[str, int, int], None]

_LOGGER = logging.getLogger(__name__)

#: Minimum seconds between lines of the log.
_LOG_SECONDS = 5.0


@contextmanager
def reporting(progress: Progress | bool | None, description: str) -> Iterator[Progress]:
    """Context that yields the function to call for progress.

    Args:
        progress: A function; True for a progress bar; False for nothing. None shows a bar if standard error is a
            terminal, else lines of the log.
        description: The task, for bar and log.
    """
    if progress is None and not (sys.stderr is not None and sys.stderr.isatty()):
        yield _paced(description, _LOGGER.info)
        return
    progress = True if progress is None else progress
    if not isinstance(progress, bool):
        yield progress
    elif progress:
        with bar(description) as update:
            yield update
    else:
        yield lambda what, done, total: None


def _paced(description: str, say: Callable[[str], object]) -> Progress:
    """A Progress that calls ``say`` with a line at most every ``_LOG_SECONDS``."""
    last = -float("inf")

    def log(what: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _LOG_SECONDS:
            last = time.monotonic()
            say(f"{description}: {what} ({done} of {total})")

    return log


@contextmanager
def bar(description: str) -> Iterator[Progress]:
    """Context with a progress bar on standard error that shows the remaining time and peak memory.

    If standard error is not a terminal, it prints lines instead.
    """
    from rich import progress as rich  # here, so that lowbit imports without rich
    from rich.console import Console

    console = Console(stderr=True, markup=False)
    if not console.is_terminal:
        yield _paced(description, console.print)
        return
    display = rich.Progress(
        rich.TextColumn("{task.description}", markup=False), rich.BarColumn(None), rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(), rich.TextColumn("left:"), rich.TimeRemainingColumn(),
        rich.TextColumn("peak memory {task.fields[peak]}"), console=console,
    )  # fmt: skip
    with display:
        task = display.add_task(description, total=None, peak=amount(peak_bytes()))
        yield lambda what, done, total: display.update(
            task, description=f"{description}: {what}", completed=done, total=total, peak=amount(peak_bytes())
        )
