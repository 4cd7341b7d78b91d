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

    - A Linear whose rows are the vocabulary of an ``nn.Embedding``. If they also are an embedding's width, as those of
      a projection to the width of the model, only Linears after the blocks count; without blocks, the last.
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
    layers = _of_vocabulary(model, outside, inside)
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


def _of_vocabulary(model: nn.Module, linears: dict[str, nn.Linear], inside: set[int]) -> set[str]:
    """The paths of the Linears whose rows are the vocabulary of an embedding."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    vocabularies, widths = {table.num_embeddings for table in tables}, {table.embedding_dim for table in tables}
    after_blocks: set[str] = set()
    for path, module in model.named_modules():
        after_blocks = set() if id(module) in inside else after_blocks | {path}
    paths = [path for path, layer in linears.items() if layer.out_features in vocabularies]
    ambiguous = [path for path in paths if linears[path].out_features in widths]
    chosen = after_blocks.intersection(ambiguous) if inside else set(ambiguous[-1:])
    return set(paths).difference(ambiguous) | chosen


def _last(model: nn.Module, linears: dict[str, nn.Linear]) -> set[str]:
    """The paths of the Linears at the end of the model that are not followed by another layer."""
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
    return set(layers)


def _feeds(layer: nn.Linear, after: nn.Linear) -> bool:
    """Whether the sizes suggest that ``after`` reads the output of ``layer``, instead of the same input."""
    fits = layer.out_features == after.in_features
    return fits and layer.in_features != after.in_features and layer.out_features != after.out_features
