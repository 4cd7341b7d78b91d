"""What a conversion did, layer by layer: prints as a table, and is JSON data by ``to_dict``."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from io import StringIO
from typing import TYPE_CHECKING, Any, NoReturn

from lowbit.sizes import amount
from lowbit.tables import rich_table

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

__all__ = ["LayerReport", "Report", "families", "family", "left_lines"]

#: Longer tables show layers whose names differ in numbers only, and that came out alike, as one row.
_MOST_ROWS = 40

#: What the printed table may take; names of layers are long, and are broken beyond it.
_WIDTH = 180


@dataclass(frozen=True)
class LayerReport:
    """One converted layer.

    ``kind``: the class it had. ``weights``: how many numbers its weights hold; ``bits`` a weight, scales included.
    ``bytes_before``, ``bytes_after``: of its parameters and buffers. ``sqnr``: 10 log10 of the weights' energy over
    that of the error of quantization, in dB, where the conversion measures it (inf: no error). ``consumers``: after
    ``join_``, the layers that take this layer's codes.
    """

    name: str
    kind: str
    recipe: str | None
    weights: int
    bits: float
    bytes_before: int
    bytes_after: int
    sqnr: float | None = None
    consumers: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Report:
    """What a function did to a model in place. ``print(report)`` shows it as a table, ``to_dict()`` gives JSON data.

    ``layers``: the layers that it changed, and ``done`` what was done to them, for people. ``skipped``: names left
    because the caller asked for it. ``left``: names left for another reason, with the reason. ``notes``: what else is
    worth knowing. ``bytes_before`` and ``bytes_after`` are of the whole model, tensors that are shared counted once.
    """

    what: str
    recipe: str | None
    layers: tuple[LayerReport, ...]
    skipped: tuple[str, ...] = ()
    left: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    bytes_before: int = 0
    bytes_after: int = 0
    done: str = "converted"

    @property
    def converted(self) -> tuple[str, ...]:
        """The names of ``layers``."""
        return tuple(layer.name for layer in self.layers)

    @property
    def bits(self) -> float:
        """Bits a weight of ``layers``, scales included."""
        weights = sum(layer.weights for layer in self.layers)
        return sum(layer.bits * layer.weights for layer in self.layers) / weights if weights else math.nan

    def to_dict(self) -> dict[str, Any]:
        """JSON data. An infinite or undefined SQNR is None, which JSON has a word for."""
        data = asdict(self)
        for layer in data["layers"]:
            sqnr = layer["sqnr"]
            layer["sqnr"] = sqnr if sqnr is not None and math.isfinite(sqnr) else None
        return {**data, "layers": list(data["layers"]), "skipped": list(self.skipped), "notes": list(self.notes)}

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"{self.what} changes the model in place and returns this report, which is no model; write "
            f"`report = lowbit.{self.what}(model, ...)`, and call the model"
        )

    def __repr__(self) -> str:
        return f"<{self._headline()}; print it for a table>"

    def __str__(self) -> str:
        from rich.console import Console  # imported when it is needed: the library imports without it

        console = Console(file=(out := StringIO()), width=_WIDTH, color_system=None, legacy_windows=False)
        if self.layers:
            console.print(self.table())
        lines = [line.rstrip() for line in out.getvalue().splitlines()]
        return "\n".join([self._headline(), *lines, *self._remarks()])

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        table = [self.table()] if self.layers else []
        return Group(Text(self._headline()), *table, *(Text(line) for line in self._remarks()))

    def table(self, every_layer: bool | None = None) -> Table:
        """``layers`` as a table of rich. ``every_layer``: a row for each (None: where they are few)."""
        each = len(self.layers) <= _MOST_ROWS if every_layer is None else every_layer
        rows = [(layer.name, [layer]) for layer in self.layers] if each else families(list(self.layers))
        measured = any(layer.sqnr is not None for layer in self.layers)
        joined = any(layer.consumers for layer in self.layers)
        numbers = ("bits a weight", "before", "after", *(("SQNR dB",) if measured else ()))
        head = ("layer", "class", "recipe", *numbers, *(("codes go to",) if joined else ()))
        cells = (
            [*_row(name, layers, measured), *([", ".join(layers[0].consumers)] if joined else [])]
            for name, layers in rows
        )
        return rich_table(head, cells, numbers=range(3, 3 + len(numbers)), boxed=True)

    def _headline(self) -> str:
        some = f"{len(self.layers)} layer{'' if len(self.layers) == 1 else 's'}"
        whole = f"{amount(self.bytes_before)} -> {amount(self.bytes_after)} in all"
        return f"{self.what}{f' {self.recipe}' if self.recipe else ''}: {some} {self.done}, {whole}"

    def _remarks(self) -> list[str]:
        lines = [f"skipped: {', '.join(_shortened(list(self.skipped)))}"] if self.skipped else []
        return [*lines, *left_lines(self.left), *self.notes]


def families(layers: list[LayerReport]) -> list[tuple[str, list[LayerReport]]]:
    """Layers that came out alike and whose names differ in numbers only, under a name with ``*`` for the numbers."""
    found: dict[tuple[Any, ...], list[LayerReport]] = {}
    for layer in layers:
        alike = (family(layer.name), layer.kind, layer.recipe, layer.weights, layer.bits, layer.consumers)
        found.setdefault(alike, []).append(layer)
    return [(key[0] if len(several) > 1 else several[0].name, several) for key, several in found.items()]


def family(name: str) -> str:
    """A name with ``*`` for the numbers in it."""
    return ".".join("*" if word.isdigit() else word for word in name.split("."))


def _row(name: str, layers: list[LayerReport], measured: bool) -> list[str]:
    first = layers[0]
    cells = [
        name or "the model itself" if len(layers) == 1 else f"{len(layers)} x {name}",
        first.kind,
        first.recipe or "",
        f"{first.bits:.2f}",
        amount(sum(layer.bytes_before for layer in layers)),
        amount(sum(layer.bytes_after for layer in layers)),
    ]
    if measured:
        values = [layer.sqnr for layer in layers if layer.sqnr is not None and not math.isnan(layer.sqnr)]
        low, high = (f"{min(values):.1f}", f"{max(values):.1f}") if values else ("", "")
        cells.append(low if low == high else f"{low} to {high}")
    return cells


def left_lines(left: dict[str, str]) -> list[str]:
    """One line a reason, with the first names that it holds for."""
    reasons: dict[str, list[str]] = {}
    for name, reason in left.items():
        reasons.setdefault(reason, []).append(name or "the model itself")
    return [f"left {', '.join(_shortened(names))}: {reason}" for reason, names in reasons.items()]


def _shortened(names: list[str], most: int = 4) -> list[str]:
    more = len(names) - most
    return names if more <= 0 else [*names[: most - 1], f"{names[most - 1]} and {more} more"]
