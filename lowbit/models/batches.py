"""What callers give a model to look at: checked, handed to it, and told apart from padding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

__all__ = ["batches_in", "call", "copied", "feed", "kinds", "mask_of", "tokens_of"]

Tree = TypeVar("Tree")


def batches_in(given: Iterable[Any] | None) -> list[Any]:
    """The batches that a caller gave; none for None.

    Raises TypeError for a tensor or a mapping, which is one batch, and for numbers that are in no tensor.
    """
    if isinstance(given, Tensor | Mapping):
        raise TypeError(f"batches: expected several of them, got one {type(given).__name__}; write [batch]")
    data = [] if given is None else list(given)
    for batch in data:
        for value in batch.values() if isinstance(batch, Mapping) else [batch]:
            if isinstance(value, list | tuple) and value and all(map(_is_numbers, value)):
                raise TypeError(
                    "batches: numbers in lists are no batch; make a tensor of them, for instance "
                    "torch.tensor([tokens]) of shape [1, T]; tokenizers do with return_tensors='pt'"
                )
    return data


def _is_numbers(value: Any) -> bool:
    """Whether ``value`` is a number, or lists of them."""
    if isinstance(value, list | tuple):
        return all(map(_is_numbers, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def kinds(batches: Iterable[Any]) -> list[int]:
    """The number of the first batch of each kind: with the same arguments, of the same types and numbers of axes."""
    first: dict[tuple[Any, ...], int] = {}
    for number, batch in enumerate(batches):
        leaves, structure = tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)
        axes = (leaf.dim() if isinstance(leaf, Tensor) else None for leaf in leaves)
        first.setdefault((str(structure), *map(type, leaves), *axes), number)
    return list(first.values())


def feed(model: nn.Module, batch: Any) -> Any:
    """``call`` with copies, since a model may write to what it is given. Raises TypeError as ``call``."""
    return call(model, copied(dict(batch) if isinstance(batch, Mapping) else batch))


def call(model: nn.Module, batch: Any) -> Any:
    """Call ``model``: with a tensor as it is, with a tuple or list by position, with a mapping by keyword.

    Raises TypeError for a batch of another type.
    """
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    raise TypeError(
        f"a batch is a tensor, a tuple of arguments or a dict of keyword arguments; got {type(batch).__name__}"
    )


def copied(tree: Tree) -> Tree:
    """``tree`` with a copy of each tensor in it."""
    copies: Tree = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)
    return copies


def mask_of(batch: Any, name: str = "attention_mask") -> Tensor | None:
    """Where a batch of tokens is no padding, bool [B, T], where it says so; ``name``: as transformers names it."""
    mask = batch.get(name) if isinstance(batch, Mapping) else None
    return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None


def tokens_of(batch: Any) -> Tensor | None:
    """The token ids of a batch, integers [B, T], where it is one of tokens: a tensor as it is, the first of a tuple, or
    ``input_ids``. None where it has none.
    """
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
    else:
        ids = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype == torch.bool:
        return None
    return None if ids.is_floating_point() or ids.is_complex() else ids
