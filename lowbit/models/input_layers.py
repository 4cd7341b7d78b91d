"""The layers of a model that read its raw input: pixels, audio samples, measurements."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.parameter import is_lazy

from lowbit.models.blocks import find_blocks

__all__ = ["find_input_layers"]

#: A convolution with at most this many input channels reads an image or a waveform.
_RAW_CHANNELS = 4

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def find_input_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of ``model`` that read its raw input, according to its structure.

    These are ungrouped convolutions with one to four input channels. The first layer with a weight also counts if it is
    a convolution, or a Linear before the repeated blocks. This applies to the model and to each Hugging Face model
    inside it (the encoder of Whisper, the vision tower of CLIP). A model with one layer has none.
    """
    weighted = list(_weighted(model))
    if len(weighted) < 2:
        return []
    layers: list[nn.Module] = [
        layer
        for layer in weighted
        if isinstance(layer, _CONVOLUTIONS) and layer.groups == 1 and layer.in_channels <= _RAW_CHANNELS
    ]
    for part in model.modules():
        if part is not model and not isinstance(getattr(type(part), "main_input_name", None), str):
            continue
        first = next(_weighted(part), None)
        if isinstance(first, _CONVOLUTIONS) or (isinstance(first, nn.Linear) and _is_before_blocks(part, first)):
            layers.append(first)
    return layers


def _weighted(model: nn.Module) -> Iterator[nn.Module]:
    """The modules with a parameter of two or more axes, in the order of registration."""
    for module in model.modules():
        if any(p is not None and (is_lazy(p) or p.dim() > 1) for p in module._parameters.values()):
            yield module


def _is_before_blocks(part: nn.Module, layer: nn.Module) -> bool:
    blocks = find_blocks(part)
    return bool(blocks) and all(layer is not module for block in blocks for module in block.modules())
