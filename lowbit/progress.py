"""What takes minutes says how far it is: to a callable, as a bar on a terminal, or else in the log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lowbit.memory.rss import peak_bytes
from lowbit.sizes import amount

__all__ = ["Progress", "bar", "reporting"]

#: Called with what is being done, how much of it is done, and how much there is.
Progress = Callable[[str, int, int], None]

_LOGGER = logging.getLogger(__name__)

#: Seconds from one line of the log to the next.
_LOG_SECONDS = 5.0


@contextmanager
def reporting(progress: Progress | bool | None, description: str) -> Iterator[Progress]:
    """What to call inside: ``progress`` itself, a bar for True, nothing for False; for None a bar if standard error is
    a terminal, and else lines of the log.
    """
    if progress is None and not (sys.stderr is not None and sys.stderr.isatty()):
        yield _paced(description, _LOGGER.info)
        return
    progress = True if progress is None else progress
    if not isinstance(progress, bool):
        yield progress
    elif progress:
        with bar(description) as shown:
            yield shown
    else:
        yield lambda what, done, total: None


def _paced(description: str, say: Callable[[str], object]) -> Progress:
    """Say what is being done in a line, at most once in ``_LOG_SECONDS``, the first time at once."""
    last = -float("inf")

    def log(what: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _LOG_SECONDS:
            last = time.monotonic()
            say(f"{description}: {what} ({done} of {total})")

    return log


@contextmanager
def bar(description: str) -> Iterator[Progress]:
    """Inside, a bar on standard error of what is done, with the time that is left and the most memory so far. Blocks of
    a model are alike, so that the first tells of all. If standard error is no terminal, some lines instead.
    """
    from rich import progress as rich  # imported when it is needed: the library imports without it
    from rich.console import Console

    console = Console(stderr=True, markup=False)
    if not console.is_terminal:
        yield _paced(description, console.print)
        return
    shown = rich.Progress(
        rich.TextColumn("{task.description}", markup=False), rich.BarColumn(None), rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(), rich.TextColumn("left:"), rich.TimeRemainingColumn(),
        rich.TextColumn("peak memory {task.fields[peak]}"), console=console,
    )  # fmt: skip
    with shown:
        task = shown.add_task(description, total=None, peak=amount(peak_bytes()))
        yield lambda what, done, total: shown.update(
            task, description=f"{description}: {what}", completed=done, total=total, peak=amount(peak_bytes())
        )
