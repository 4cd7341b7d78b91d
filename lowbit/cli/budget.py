"""Recipes by layer for ``lowbit quantize --bits`` and ``--size``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from torch import nn

from lowbit.calibrate import sensitivity
from lowbit.cli.console import bar, errors, size
from lowbit.cli.models import windows
from lowbit.recipes import Plan, plan
from lowbit.recipes import recipe as find_recipe

__all__ = ["CANDIDATES", "Budget", "bytes_in"]

#: What is chosen from where the user names no recipes.
CANDIDATES = ("int4-weight-only", "nf4", "int4-weight-only:group32", "int8-weight-only")

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def bytes_in(text: str) -> int:
    """The bytes that a size such as ``80MB`` or ``1.5GiB`` stands for. Raises ValueError for another text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(\w*)", text)
    unit = None if found is None else next((u for u in _UNITS if u.lower() == (found[2] or "B").lower()), None)
    if found is None or unit is None:
        raise ValueError(f"{text!r} is no size; write for instance 80MB or 1.5GiB ({', '.join(_UNITS)})")
    return int(float(found[1]) * _UNITS[unit])


class Budget(NamedTuple):
    """What the user allows: bits a weight or bytes in all; and by what text layers are judged."""

    bits: float | None
    size: str | None
    text: Path | None
    samples: int
    length: int
    plot: Path | None

    @property
    def given(self) -> bool:
        """Whether there is one."""
        return self.bits is not None or self.size is not None

    @property
    def label(self) -> str:
        """What it is called in the name of a directory."""
        return f"{self.bits:g}bit" if self.bits is not None else str(self.size).replace(" ", "")

    def check(self) -> None:
        """Raises ValueError for both kinds of budget, or no text."""
        if self.bits is not None and self.size is not None:
            raise ValueError("--bits and --size are two budgets; give one of them")
        if self.text is None:
            raise ValueError("--bits and --size choose recipes by what layers compute; give a text with --text FILE")
        if self.size is not None:
            bytes_in(self.size)

    def choose(self, model: nn.Module, directory: Path, recipes: str | None, method: str, skip: Iterable[str]) -> Plan:
        """The recipes by layer for ``model``, of which a table is printed to standard error."""
        assert self.text is not None
        candidates = CANDIDATES if recipes is None else tuple(name.strip() for name in recipes.split(","))
        data = windows(directory, self.text, self.samples, self.length)
        with bar("measuring layers") as progress:
            found = sensitivity(
                model, [None if name == "none" else find_recipe(name) for name in candidates], data, method=method,
                skip=skip, progress=progress,
            )  # fmt: skip
        if self.plot is not None:
            found.plot(self.plot)
        chosen = found.choose(self.bits, None if self.size is None else bytes_in(self.size))
        errors.print(str(found), soft_wrap=True)
        errors.print(
            f"chosen: {found.bits(chosen):.3f} bits a weight, {size(found.size(chosen))} in all, estimated loss "
            f"{found.loss(chosen):.4g}",
            soft_wrap=True,
        )
        return plan(chosen)
