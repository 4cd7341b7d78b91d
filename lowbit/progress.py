"""What takes minutes says how far it is: to a callable, or as a bar on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lowbit.memory.rss import peak_bytes
from lowbit.sizes import amount

__all__ = ["Progress", "bar", "reporting"]

#: Called with what is being done, how much of it is done, and how much there is.
Progress = Callable[[str, int, int], None]


@contextmanager
def reporting(progress: Progress | bool | None, description: str) -> Iterator[Progress]:
    """What to call inside: ``progress`` itself, a bar for True, nothing for False; for None a bar where standard error
    is a terminal.
    """
    if progress is None:
        progress = sys.stderr is not None and sys.stderr.isatty()
    if not isinstance(progress, bool):
        yield progress
    elif progress:
        with bar(description) as shown:
            yield shown
    else:
        yield lambda what, done, total: None


@contextmanager
def bar(description: str) -> Iterator[Progress]:
    """Inside, a bar on standard error of what is done, with the time that is left and the most memory so far. Blocks of
    a model are alike, so that the first tells of all.
    """
    from rich import progress as rich  # imported when it is needed: the library imports without it
    from rich.console import Console

    shown = rich.Progress(
        rich.TextColumn("{task.description}", markup=False), rich.BarColumn(None), rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(), rich.TextColumn("left:"), rich.TimeRemainingColumn(),
        rich.TextColumn("peak memory {task.fields[peak]}"), console=Console(stderr=True, markup=False),
    )  # fmt: skip
    with shown:
        task = shown.add_task(description, total=None, peak=amount(peak_bytes()))
        yield lambda what, done, total: shown.update(
            task, description=f"{description}: {what}", completed=done, total=total, peak=amount(peak_bytes())
        )
