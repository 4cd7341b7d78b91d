"""The output layers of a model: the last Linears, which return logits or predictions."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from lowbit.models.blocks import find_blocks
from lowbit.torch_private import ConvNd

__all__ = ["find_output_layers"]


def find_output_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the output layers of ``model`` by path, according to its structure. Their names do not matter.

    Only Linears outside the repeated blocks are output layers. There are two kinds:

    - A Linear whose rows are the vocabulary of an ``nn.Embedding``. If several equal it in both axes, only the last.
    - In a model with repeated blocks, the last Linears: direct children of the model that are registered after every
      other layer with a weight matrix, or the last layer of a Sequential that is such a child. A Linear whose output is
      the input of the next is not an output layer.

    A plain stack of Linears has none, and neither has a model whose blocks are mainly convolutions: the classifier of
    such a network is a large part of its weights, and is usually quantized.
    """
    blocks = find_blocks(model)
    inside = {id(module) for block in blocks for module in block.modules()}
    outside = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) not in inside and not is_lazy(module.weight)
    }
    layers = _of_vocabulary(model, outside)
    if blocks and not _convolve(blocks):
        layers |= _last(model, outside)
    return {path: layer for path, layer in outside.items() if path in layers}


def _convolve(blocks: list[nn.Module]) -> bool:
    """Whether convolutions have most of the weights of the blocks."""
    sizes = {True: 0, False: 0}
    for module in {id(inner): inner for block in blocks for inner in block.modules()}.values():
        matrices = (p for p in module.parameters(recurse=False) if not is_lazy(p) and p.dim() > 1)
        sizes[isinstance(module, ConvNd)] += sum(p.numel() for p in matrices)
    return sizes[True] > sizes[False]


def _of_vocabulary(model: nn.Module, linears: dict[str, nn.Linear]) -> dict[str, nn.Linear]:
    """The Linears whose rows are the vocabulary of an embedding of their width, or of another width."""
    vocabularies = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    layers = {path: layer for path, layer in linears.items() if layer.out_features in vocabularies}
    square = [path for path, layer in layers.items() if layer.in_features == layer.out_features]
    return {path: layer for path, layer in layers.items() if path not in square[:-1]}


def _last(model: nn.Module, linears: dict[str, nn.Linear]) -> dict[str, nn.Linear]:
    """The Linears at the end of the model that are not followed by another layer."""
    layers: dict[str, nn.Linear] = {}
    for name, child in reversed(list(model.named_children())):
        weighted = [
            path
            for path, module in child.named_modules(prefix=name)
            if any(p is not None and (is_lazy(p) or p.dim() > 1) for p in module._parameters.values())
        ]
        if not weighted:
            continue
        last = weighted[-1]
        if last not in linears or not isinstance(child, nn.Linear | nn.Sequential):
            break
        if not any(_feeds(linears[last], after) for after in layers.values()):
            layers[last] = linears[last]
        if len(weighted) > 1:
            break
    return layers


def _feeds(layer: nn.Linear, after: nn.Linear) -> bool:
    """Whether the sizes suggest that ``after`` reads the output of ``layer``, instead of the same input."""
    fits = layer.out_features == after.in_features
    return fits and layer.in_features != after.in_features and layer.out_features != after.out_features
