"""The quantized layers of a model as Linears of a checkpoint: one per Linear, and two or three per expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from lowbit.convert.engine import origin, quantized_layers
from lowbit.interop.directories.names import Names
from lowbit.interop.directories.rules import Kind
from lowbit.interop.joining import rows
from lowbit.models.names import plain_name
from lowbit.models.wrap import plain_class
from lowbit.nn.base import kind
from lowbit.nn.experts import QuantExperts
from lowbit.nn.linear import QuantLinear
from lowbit.nn.packed import PackedLinear
from lowbit.tensor.quantized import Quantized

__all__ = ["Store", "Stored", "StoredLayer", "stored_layers"]


class Stored(NamedTuple):
    """How a layout stores a Linear.

    Attributes:
        kinds: The dtypes and shapes of its tensors by name, without the bias.
        tensors: Makes the tensors by name.
        about: What the layout's config needs to know.
    """

    kinds: dict[str, Kind]
    tensors: Callable[[], dict[str, Tensor]]
    about: Any


#: ``store(layer, begin, end)`` is how a layout stores rows of a layer. Raises ValueError for a layer that it cannot.
Store = Callable[[Any, int, int], Stored]


class StoredLayer(NamedTuple):
    """A Linear of a checkpoint: rows ``begin`` to ``end`` of a quantized layer.

    Attributes:
        path: Its path in the model, where experts have a Linear per matrix.
        layer: The quantized layer.
        begin: Its first row.
        end: The row after its last.
        stored: How it is stored.
    """

    path: str
    layer: QuantLinear | PackedLinear
    begin: int
    end: int
    stored: Stored

    @property
    def weight(self) -> Quantized:
        """The rows of the weight."""
        return rows(self.layer.weight, self.begin, self.end)


def stored_layers(model: nn.Module, names: Names, store: Store) -> dict[str, StoredLayer]:
    """The Linears by their names in the checkpoint.

    Raises:
        ValueError: The model has no quantized layer, or one that the layout cannot express.
    """
    for path, module in model.named_modules():
        if kind(module) in ("qat", "training"):
            raise ValueError(f"layer {path!r} is prepared for training; convert the model before writing it")
    layers: dict[str, StoredLayer] = {}
    refused: dict[str, str] = {}
    for path, module in quantized_layers(model).items():
        try:
            for inner, layer, begin, end in _linears(plain_name(path), module, names):
                layers[names.layer(inner)] = StoredLayer(inner, layer, begin, end, store(layer, begin, end))
        except ValueError as error:
            refused[path] = str(error)
    if refused:
        first, *others = refused
        more = f". The same or another reason holds for {len(others)} more: {', '.join(others[:4])}" if others else ""
        raise ValueError(f"layer {first!r}: {refused[first]}{more}")
    if not layers:
        raise ValueError("the model has no quantized layer; call lowbit.quantize_ first, or save_pretrained")
    return layers


def _linears(path: str, module: Any, names: Names) -> Iterator[tuple[str, Any, int, int]]:
    """The path, layer, first row and row after the last of each Linear of a quantized layer."""
    source = origin(module)
    plain = module if source is None else source.layer
    if isinstance(module, QuantLinear | PackedLinear) and (source is None or issubclass(plain_class(plain), nn.Linear)):
        if names.is_converted(f"{path}.weight"):
            raise ValueError(f"checkpoints have another matrix for it; {_skip(path)}")
        yield path, module, 0, module.out_features
        return
    if not isinstance(module, QuantExperts):
        raise ValueError(f"it was a {type(plain).__name__}, and only Linears can be quantized; {_skip(path)}")
    children = names.experts(path, plain)
    inner: list[Any] = [*module.gate_up, *module.down]
    if children is None or plain.is_transposed or any(layer.bias is not None for layer in inner):
        raise ValueError(f"checkpoints do not have one matrix without bias per expert; {_skip(path)}")
    for layers, parts in ((module.gate_up, children.first), (module.down, children.second)):
        for index, layer in enumerate(layers):
            rows = int(layer.out_features) // len(parts)  # type: ignore[arg-type]
            for part, child in enumerate(parts):
                yield f"{path}.{index}.{child}", layer, part * rows, (part + 1) * rows


def _skip(path: str) -> str:
    return f"quantize the model again with skip={path!r}"
