"""``Report``: the result of functions that change a model in place, layer by layer, as a table or JSON data."""

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

#: In longer tables, layers with the same result whose names differ only in numbers share a row.
_MOST_ROWS = 40

#: Columns of printed text.
_WIDTH = 180


@dataclass(frozen=True)
class LayerReport:
    """One converted layer."""

    #: Qualified name in the model.
    name: str
    #: Name of its class before the conversion.
    kind: str
    #: Name of its recipe, if any.
    recipe: str | None
    #: Number of elements of its weights.
    weights: int
    #: Bits per weight element, including scales.
    bits: float
    #: Bytes of its parameters and buffers before the conversion.
    bytes_before: int
    #: Bytes of its parameters and buffers after the conversion.
    bytes_after: int
    #: Signal-to-quantization-noise ratio of the weights in dB (inf: no error); None if it was not measured.
    sqnr: float | None = None
    #: After ``fuse_requantize_``: the layers that receive this layer's codes.
    consumers: tuple[str, ...] = ()
    #: Estimated bytes that the layer allocates and saves for backward, before the change.
    activations_before: int | None = None
    #: Estimated bytes that the layer allocates and saves for backward, after the change.
    activations_after: int | None = None


@dataclass(frozen=True, repr=False)
class Report:
    """The changes that a function made to a model in place.

    ``print(report)`` shows a table, ``to_dict()`` returns JSON data. The printed table omits empty columns, and bytes
    of weights if none changed. Estimates are None if the function got no ``batch``, or if the model could not be
    estimated; ``notes`` then has the reason.
    """

    #: Name of the function.
    what: str
    #: Name of the recipe, if any.
    recipe: str | None
    #: The layers that were changed.
    layers: tuple[LayerReport, ...]
    #: Names of layers that the caller excluded.
    skipped: tuple[str, ...] = ()
    #: Names of other layers that were not changed, each with the reason.
    left: dict[str, str] = field(default_factory=dict)
    #: Further remarks.
    notes: tuple[str, ...] = ()
    #: Bytes of the model before the change; shared tensors are counted once.
    bytes_before: int = 0
    #: Bytes of the model after the change.
    bytes_after: int = 0
    #: Participle for the change, such as "converted", for printing.
    done: str = "converted"
    #: Estimated bytes that are saved for backward when the forward ends, before the change.
    activations_before: int | None = None
    #: The same after the change.
    activations_after: int | None = None
    #: Estimated peak bytes of forward and backward, before the change.
    peak_before: int | None = None
    #: The same after the change.
    peak_after: int | None = None

    @property
    def converted(self) -> tuple[str, ...]:
        """The names of ``layers``."""
        return tuple(layer.name for layer in self.layers)

    @property
    def bits(self) -> float:
        """Bits per weight element of ``layers``, including scales."""
        weights = sum(layer.weights for layer in self.layers)
        return sum(layer.bits * layer.weights for layer in self.layers) / weights if weights else math.nan

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON data. An infinite or undefined SQNR becomes None, because JSON has no number for it."""
        data = asdict(self)
        for layer in data["layers"]:
            sqnr = layer["sqnr"]
            layer["sqnr"] = sqnr if sqnr is not None and math.isfinite(sqnr) else None
        return {**data, "layers": list(data["layers"]), "skipped": list(self.skipped), "notes": list(self.notes)}

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"{self.what} changes the model in place and returns a Report, not a model; write "
            f"`report = lowbit.{self.what}(model, ...)`, and call the model"
        )

    def __repr__(self) -> str:
        return f"<{self._headline()}; print it for a table>"

    def __str__(self) -> str:
        from rich.console import Console  # here, so that lowbit imports without rich

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
        """``layers`` as a table of rich.

        Args:
            every_layer: True for one row per layer, False for one row per family of equal layers. None picks the first
                if there are few layers.
        """
        if every_layer is None:
            every_layer = len(self.layers) <= _MOST_ROWS
        rows = [(layer.name, [layer]) for layer in self.layers] if every_layer else families(list(self.layers))
        columns = [column for column in _COLUMNS if column.shown(self.layers)]
        head = ("layer", *(column.title for column in columns))
        cells = ([_row_name(name, layers), *(column.cell(layers) for column in columns)] for name, layers in rows)
        numbers = [index for index, column in enumerate(columns, 1) if column.number]
        return rich_table(head, cells, numbers=numbers, boxed=True)

    def _headline(self) -> str:
        count = f"{len(self.layers)} layer{'' if len(self.layers) == 1 else 's'}"
        parts = [f"{self.what}{f' {self.recipe}' if self.recipe else ''}: {count} {self.done}"]
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
    """The Report of the function ``what``, which has changed ``layers`` but not their weights."""
    size = model_bytes(model)
    rows = []
    for name, layer in layers.items():
        weights = [w for module in layer.modules() for w in _weights(module)]
        count, layer_bytes = sum(w.numel() for w in weights), tensor_bytes((*layer.parameters(), *layer.buffers()))
        bits = 8 * sum(w.nbytes for w in weights) / max(count, 1)
        recipe = getattr(getattr(layer, "recipe", None), "name", None)
        rows.append(LayerReport(name, plain_class(layer).__name__, recipe, count, bits, layer_bytes, layer_bytes))
    return Report(what, None, tuple(rows), bytes_before=size, bytes_after=size, done=done)


def _weights(module: nn.Module) -> list[Any]:
    """The weights of a module without its submodules: a quantized weight, or all parameters except the bias."""
    if hasattr(type(module), "lowbit_kind") and isinstance(weight := getattr(module, "weight", None), Quantized):
        return [weight]
    return [p for name, p in module.named_parameters(recurse=False) if name != "bias" and not is_lazy(p)]


def families(layers: list[LayerReport]) -> list[tuple[str, list[LayerReport]]]:
    """Groups of layers with the same result whose names differ only in numbers; ``*`` replaces the numbers."""
    groups: dict[tuple[Any, ...], list[LayerReport]] = {}
    for layer in layers:
        key = (family(layer.name), layer.kind, layer.recipe, layer.weights, layer.bits, layer.consumers)
        groups.setdefault(key, []).append(layer)
    return [(key[0] if len(group) > 1 else group[0].name, group) for key, group in groups.items()]


def family(name: str) -> str:
    """``name`` with ``*`` in place of numbers."""
    return ".".join("*" if word.isdigit() else word for word in name.split("."))


# -- columns ----------------------------------------------------------------------------------------------------------
class _Column(NamedTuple):
    """A column of the table: ``shown`` tells whether it is printed, ``cell`` is the text for a group of layers."""

    title: str
    shown: Callable[[Sequence[LayerReport]], bool]
    cell: Callable[[Sequence[LayerReport]], str]
    number: bool = True


def _row_name(name: str, layers: Sequence[LayerReport]) -> str:
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


#: The columns after the name. Cells that are not sums show the first layer of a family, whose layers are equal there.
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
    """One line per reason, with the first names of its layers."""
    reasons: dict[str, list[str]] = {}
    for name, reason in left.items():
        reasons.setdefault(reason, []).append(name or "the model itself")
    return [f"left {', '.join(_shortened(names))}: {reason}" for reason, names in reasons.items()]


def _shortened(names: list[str], most: int = 4) -> list[str]:
    more = len(names) - most
    return names if more <= 0 else [*names[: most - 1], f"{names[most - 1]} and {more} more"]
