"""What callers give a model to look at: checked, handed to it, and told apart from padding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import Parameter, Signature, signature
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

__all__ = ["arguments", "batches_in", "call", "copied", "feed", "given", "kinds", "mask_of", "tokens_of"]

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


def call(model: nn.Module, batch: Any, *, rest: bool = False) -> Any:
    """Call ``model``: with a tensor as it is, with a tuple or list by position, with a mapping by keyword.

    ``rest``: the batch may have more than the forward takes, such as targets, which are for the loss.

    Raises TypeError for a batch of another type, and for one that the forward does not take.
    """
    args, kwargs = arguments(model, batch, rest=rest)
    try:
        return model(*args, **kwargs)
    except TypeError as error:
        if (reason := _mismatch(model, args, kwargs)) is None:
            raise
        raise TypeError(
            f"the forward of {type(model).__name__} does not take the batch: {reason}. A tuple is its arguments by "
            f"position, a dict by keyword; what it does not take, such as targets, is for a loss that you give: "
            f"loss=lambda output, batch: ..."
        ) from error


def arguments(model: nn.Module, batch: Any, *, rest: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What ``call`` calls ``model`` with, by position and by keyword. Raises TypeError for what is no batch."""
    args, kwargs = given(batch)
    return _taken(model, args, kwargs) if rest else (args, kwargs)


def given(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as arguments by position and by keyword. Raises TypeError for what is none."""
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    raise TypeError(
        f"a batch is a tensor, a tuple of arguments or a dict of keyword arguments, got {type(batch).__name__}; of a "
        f"DataLoader take one batch, next(iter(loader)), and of arrays make tensors, torch.from_numpy(array)"
    )


def _taken(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Those of the arguments that the forward has parameters for."""
    known = _parameters(model)
    kinds = {one.kind for one in known}
    if Parameter.VAR_POSITIONAL not in kinds:
        args = args[: sum(one.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD) for one in known)]
    if Parameter.VAR_KEYWORD not in kinds:
        kwargs = {name: kwargs[name] for one in known if (name := one.name) in kwargs}
    return args, kwargs


def _mismatch(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why the forward cannot be called so; None where it can."""
    try:
        Signature(_parameters(model)).bind(*args, **kwargs)
    except TypeError as error:
        names = ", ".join(str(one).partition(":")[0] for one in _parameters(model))
        return f"{error}; it takes ({names})"
    return None


def _parameters(model: nn.Module) -> list[Parameter]:
    """Those of the forward that the model's class has, or the class of the model that it wraps."""
    while (within := _wrapped(model)) is not None:
        model = within
    return list(signature(type(model).forward).parameters.values())[1:]


def _wrapped(model: nn.Module) -> nn.Module | None:
    """The model that DistributedDataParallel, DataParallel or torch.compile stands around."""
    parallel = isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel)
    within = model.module if parallel else getattr(model, "_orig_mod", None)
    return within if isinstance(within, nn.Module) else None


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
