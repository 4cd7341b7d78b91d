"""Pairwise covering arrays: rows such that every two values of every two factors meet in one of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import combinations, product
from typing import Any

Row = tuple[Any, ...]


def pairwise(
    factors: dict[str, list[Any]], valid: Callable[[dict[str, Any]], bool], seed: int = 0
) -> list[dict[str, Any]]:
    """Rows that cover every pair of values that occurs in any valid row; greedy, the same for the same seed.

    ``valid`` may look at a row with some factors missing, and must accept what can still be completed.
    """
    names, rng = list(factors), random.Random(seed)
    open_pairs = {
        ((m, x), (n, y))
        for m, n in combinations(names, 2)
        for x, y in product(factors[m], factors[n])
        if valid({m: x, n: y})
    }
    rows = []
    for first in sorted(open_pairs, key=repr):
        if first not in open_pairs:
            continue
        row = _complete(dict(first), factors, valid, open_pairs, rng)
        covered = open_pairs & set(combinations([(name, row[name]) for name in names], 2))
        if row and covered:
            rows.append(row)
        open_pairs -= covered or {first}
    return rows


def _complete(
    row: dict[str, Any], factors: dict[str, list[Any]], valid: Any, open_pairs: set, rng: random.Random
) -> dict[str, Any]:
    """The pair extended factor by factor with the value that covers most of what is open."""
    rest = [name for name in factors if name not in row]
    rng.shuffle(rest)
    for name in rest:
        choices = [v for v in factors[name] if valid({**row, name: v})]
        rng.shuffle(choices)

        def gain(value: Any, name: str = name) -> int:
            pairs = (
                ((k, row[k]), (name, value)) if _before(factors, k, name) else ((name, value), (k, row[k])) for k in row
            )
            return sum(pair in open_pairs for pair in pairs)

        row[name] = max(choices, key=gain)
    return row


def _before(factors: dict[str, list[Any]], a: str, b: str) -> bool:
    order = list(factors)
    return order.index(a) < order.index(b)
