"""Tables in plain text, as wide as what they hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["aligned"]


def aligned(rows: Iterable[Sequence[str]], numbers: Iterable[int]) -> str:
    """Rows of as many words as lines of columns, two spaces apart; the columns ``numbers`` end together, the others
    begin together.
    """
    table, right = list(rows), set(numbers)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(
            word.rjust(width) if index in right else word.ljust(width)
            for index, (word, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    )
