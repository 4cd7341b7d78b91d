"""What a conversion did, layer by layer: prints as a table, and is JSON data by ``to_dict``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import StringIO
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from torch import nn
from torch.nn.parameter import is_lazy

from lowbit.models.ties import model_bytes, tensor_bytes
from lowbit.models.wrap import plain_class
from lowbit.sizes import amount
from lowbit.tables import rich_table
from lowbit.tensor.quantized import Quantized

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

__all__ = ["LayerReport", "Report", "families", "family", "left_lines", "report_on"]

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
    ``fuse_requantize_``, the layers that take this layer's codes. ``activations_before``, ``activations_after``: bytes
    that the layer makes and keeps for backward, where they were estimated.
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
    activations_before: int | None = None
    activations_after: int | None = None


@dataclass(frozen=True, repr=False)
class Report:
    """What a function did to a model in place. ``print(report)`` shows it as a table, ``to_dict()`` gives JSON data.

    ``layers``: the layers that it changed, and ``done`` what was done to them, for people. ``skipped``: names left
    because the caller asked for it. ``left``: names left for another reason, with the reason. ``notes``: what else is
    worth knowing. ``bytes_before`` and ``bytes_after`` are of the whole model, tensors that are shared counted once.

    Functions that take ``batch`` and change the memory of a step give estimates in bytes. ``activations_before`` and
    ``activations_after`` are kept for backward when the forward ends. ``peak_before`` and ``peak_after`` are the peak
    of forward and backward. They are None without a batch, and if the model has no estimate, for a reason in ``notes``.

    The printed table has no column that is empty, and no bytes of weights if none changed.
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
    activations_before: int | None = None
    activations_after: int | None = None
    peak_before: int | None = None
    peak_after: int | None = None

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
        columns = [column for column in _COLUMNS if column.shown(self.layers)]
        head = ("layer", *(column.title for column in columns))
        cells = ([_named(name, layers), *(column.cell(layers) for column in columns)] for name, layers in rows)
        numbers = [place for place, column in enumerate(columns, 1) if column.number]
        return rich_table(head, cells, numbers=numbers, boxed=True)

    def _headline(self) -> str:
        some = f"{len(self.layers)} layer{'' if len(self.layers) == 1 else 's'}"
        parts = [f"{self.what}{f' {self.recipe}' if self.recipe else ''}: {some} {self.done}"]
        if self.bytes_before != self.bytes_after:
            parts.append(f"{amount(self.bytes_before)} -> {amount(self.bytes_after)} in all")
        if self.activations_before is not None and self.activations_after is not None:
            parts.append(f"activations kept for backward: {_change(self.activations_before, self.activations_after)}")
        return ", ".join(parts)

    def _remarks(self) -> list[str]:
        lines = [f"skipped: {', '.join(_shortened(list(self.skipped)))}"] if self.skipped else []
        if self.peak_before is not None and self.peak_after is not None:
            lines.append(f"peak of forward and backward, estimated: {_change(self.peak_before, self.peak_after)}")
        return [*lines, *left_lines(self.left), *self.notes]


def report_on(what: str, model: nn.Module, layers: Mapping[str, Any], done: str) -> Report:
    """The Report of ``what``, which has changed what ``layers`` do and not what they hold."""
    size = model_bytes(model)
    rows = []
    for name, layer in layers.items():
        weights = [w for module in layer.modules() for w in _weights(module)]
        numbers, held = sum(w.numel() for w in weights), tensor_bytes((*layer.parameters(), *layer.buffers()))
        bits = 8 * sum(w.nbytes for w in weights) / max(numbers, 1)
        recipe = getattr(getattr(layer, "recipe", None), "name", None)
        rows.append(LayerReport(name, plain_class(layer).__name__, recipe, numbers, bits, held, held))
    return Report(what, None, tuple(rows), bytes_before=size, bytes_after=size, done=done)


def _weights(module: nn.Module) -> list[Any]:
    """What a module itself multiplies by: a quantized weight, or its parameters but the bias."""
    if hasattr(type(module), "lowbit_kind") and isinstance(weight := getattr(module, "weight", None), Quantized):
        return [weight]
    return [p for name, p in module.named_parameters(recurse=False) if name != "bias" and not is_lazy(p)]


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


# -- columns ----------------------------------------------------------------------------------------------------------
class _Column(NamedTuple):
    """A column of the table: ``shown(layers)`` says whether it tells anything, ``cell`` writes it for some layers."""

    title: str
    shown: Callable[[Sequence[LayerReport]], bool]
    cell: Callable[[Sequence[LayerReport]], str]
    number: bool = True


def _named(name: str, layers: Sequence[LayerReport]) -> str:
    return name or "the model itself" if len(layers) == 1 else f"{len(layers)} x {name}"


def _change(before: int, after: int) -> str:
    return f"{amount(before)} as before" if before == after else f"{amount(before)} -> {amount(after)}"


def _weights_changed(layers: Sequence[LayerReport]) -> bool:
    return any(layer.bytes_before != layer.bytes_after for layer in layers) or _is_measured(layers)


def _is_measured(layers: Sequence[LayerReport]) -> bool:
    return any(layer.sqnr is not None for layer in layers)


def _activations_changed(layers: Sequence[LayerReport]) -> bool:
    return any(layer.activations_before != layer.activations_after for layer in layers)


def _sum_of(field: str) -> Callable[[Sequence[LayerReport]], str]:
    return lambda layers: amount(sum(getattr(layer, field) or 0 for layer in layers))


def _range_of_sqnr(layers: Sequence[LayerReport]) -> str:
    values = [layer.sqnr for layer in layers if layer.sqnr is not None and not math.isnan(layer.sqnr)]
    low, high = (f"{min(values):.1f}", f"{max(values):.1f}") if values else ("", "")
    return low if low == high else f"{low} to {high}"


#: After the layer's name. The first layer stands for a family, whose layers are alike in what is no sum.
_COLUMNS = (
    _Column("class", lambda layers: True, lambda layers: layers[0].kind, number=False),
    _Column(
        "recipe",
        lambda layers: any(layer.recipe for layer in layers),
        lambda layers: layers[0].recipe or "",
        number=False,
    ),
    _Column("bits a weight", _weights_changed, lambda layers: f"{layers[0].bits:.2f}"),
    _Column("before", _weights_changed, _sum_of("bytes_before")),
    _Column("after", _weights_changed, _sum_of("bytes_after")),
    _Column("SQNR dB", _is_measured, _range_of_sqnr),
    _Column("activations before", _activations_changed, _sum_of("activations_before")),
    _Column("activations after", _activations_changed, _sum_of("activations_after")),
    _Column(
        "codes go to",
        lambda layers: any(layer.consumers for layer in layers),
        lambda layers: ", ".join(layers[0].consumers),
        number=False,
    ),
)


def left_lines(left: dict[str, str]) -> list[str]:
    """One line a reason, with the first names that it holds for."""
    reasons: dict[str, list[str]] = {}
    for name, reason in left.items():
        reasons.setdefault(reason, []).append(name or "the model itself")
    return [f"left {', '.join(_shortened(names))}: {reason}" for reason, names in reasons.items()]


def _shortened(names: list[str], most: int = 4) -> list[str]:
    more = len(names) - most
    return names if more <= 0 else [*names[: most - 1], f"{names[most - 1]} and {more} more"]
