"""Tables as Markdown, aligned text, CSV, or rich tables for a terminal.

Rows are iterables of cells. ``numbers`` are the indices of right-aligned columns.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["aligned", "csv_text", "markdown", "rich_table"]


def markdown(head: Sequence[str], rows: Iterable[Iterable[object]], numbers: Collection[int] = ()) -> str:
    """A Markdown table without a final newline; ``|`` in cells is escaped."""
    rule = ("---:" if index in numbers else "---" for index in range(len(head)))
    lines = (" | ".join(str(cell).replace("|", "\\|") for cell in row) for row in (head, rule, *rows))
    return "\n".join(f"| {line.strip()} |" for line in lines)


def aligned(rows: Iterable[Sequence[str]], numbers: Collection[int] = (), gap: int = 2) -> str:
    """Plain text with aligned columns, ``gap`` spaces apart."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        (" " * gap)
        .join(
            cell.rjust(width) if index in numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        .rstrip()
        for row in table
    )


def csv_text(rows: Iterable[Mapping[str, object]], last: str | None = None) -> str:
    """The rows as CSV. Columns are in the order of first appearance, with ``last`` at the end."""
    table = list(rows)
    names = dict.fromkeys(name for row in table for name in row if name != last)
    text = io.StringIO()
    writer = csv.DictWriter(text, [*names, *(() if last is None else (last,))], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def rich_table(
    head: Sequence[str], rows: Iterable[Iterable[object]], numbers: Collection[int] = (), boxed: bool = False
) -> Table:
    """A rich table, without a header if ``head`` is empty.

    Markup in cells is not interpreted; ``Text`` cells keep their style. Long cells are folded, not cut off.
    """
    from rich.box import HEAVY_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=HEAVY_HEAD if boxed else None, show_header=bool(head), pad_edge=boxed)
    for index, title in enumerate(head):
        table.add_column(title, justify="right" if index in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return table
