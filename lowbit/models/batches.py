"""Batches from callers: type checks, calling a model with them, padding masks and token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import Parameter, Signature, signature
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from lowbit.models.replicas import is_replicating

__all__ = ["arguments", "batches_in", "call", "copied", "feed", "given", "kinds", "mask_of", "tokens_of"]

Tree = TypeVar("Tree")


def batches_in(batches: Iterable[Any] | None) -> list[Any]:
    """Return a list of the batches that a caller passed, empty for None.

    Raises:
        TypeError: a tensor or a mapping, which is one batch, or lists of numbers instead of tensors.
    """
    if isinstance(batches, Tensor | Mapping):
        raise TypeError(f"batches: expected several of them, got one {type(batches).__name__}; write [batch]")
    rows = [] if batches is None else list(batches)
    for batch in rows:
        for value in batch.values() if isinstance(batch, Mapping) else [batch]:
            if isinstance(value, list | tuple) and value and all(map(_is_numbers, value)):
                raise TypeError(
                    "batches: numbers in lists are no batch; make a tensor of them, for instance "
                    "torch.tensor([tokens]) of shape [1, T], or use return_tensors='pt' of the tokenizer"
                )
    return rows


def _is_numbers(value: Any) -> bool:
    """Whether ``value`` is a number, or nested lists of numbers."""
    if isinstance(value, list | tuple):
        return all(map(_is_numbers, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def kinds(batches: Iterable[Any]) -> list[int]:
    """Index of the first batch of each structure: the same arguments with the same types and numbers of axes."""
    first: dict[tuple[Any, ...], int] = {}
    for number, batch in enumerate(batches):
        leaves, structure = tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)
        axes = (leaf.dim() if isinstance(leaf, Tensor) else None for leaf in leaves)
        first.setdefault((str(structure), *map(type, leaves), *axes), number)
    return list(first.values())


def feed(model: nn.Module, batch: Any) -> Any:
    """``call`` with copies of the tensors, because a model may write to its inputs. Raises TypeError as ``call``."""
    return call(model, copied(dict(batch) if isinstance(batch, Mapping) else batch))


def call(model: nn.Module, batch: Any, *, rest: bool = False) -> Any:
    """Call ``model``: with a tensor, with a tuple or list as positional arguments, or with a mapping as keyword
    arguments.

    Args:
        model: the model.
        batch: the batch.
        rest: drop what the forward does not accept, such as targets for the loss.

    Raises:
        TypeError: a batch of another type, or one that the forward does not accept.
    """
    args, kwargs = arguments(model, batch, rest=rest)
    try:
        return model(*args, **kwargs)
    except TypeError as error:
        if (reason := _mismatch(model, args, kwargs)) is None:
            raise
        raise TypeError(
            f"the forward of {type(model).__name__} does not take the batch: {reason}. Pass a tuple of positional "
            f"arguments or a dict of keyword arguments; for further entries, such as targets, pass a loss: "
            f"loss=lambda output, batch: ..."
        ) from error


def arguments(model: nn.Module, batch: Any, *, rest: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments of ``call``. Raises TypeError for another type of batch."""
    args, kwargs = given(batch)
    return _taken(model, args, kwargs) if rest else (args, kwargs)


def given(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as positional and keyword arguments. Raises TypeError for another type."""
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    raise TypeError(
        f"a batch is a tensor, a tuple of arguments or a dict of keyword arguments, got {type(batch).__name__}; from a "
        f"DataLoader pass one batch, next(iter(loader)), and convert arrays with torch.from_numpy(array)"
    )


def _taken(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that the forward has parameters for."""
    params = _parameters(model)
    kinds = {param.kind for param in params}
    if Parameter.VAR_POSITIONAL not in kinds:
        args = args[: sum(p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD) for p in params)]
    if Parameter.VAR_KEYWORD not in kinds:
        kwargs = {name: kwargs[name] for param in params if (name := param.name) in kwargs}
    return args, kwargs


def _mismatch(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The reason why the forward does not accept these arguments, or None."""
    try:
        Signature(_parameters(model)).bind(*args, **kwargs)
    except TypeError as error:
        names = ", ".join(str(param).partition(":")[0] for param in _parameters(model))
        return f"{error}; it takes ({names})"
    return None


def _parameters(model: nn.Module) -> list[Parameter]:
    """Parameters of the forward of the model's class, or of the class of the model that it wraps."""
    while (inner := _wrapped(model)) is not None:
        model = inner
    return list(signature(type(model).forward).parameters.values())[1:]


def _wrapped(model: nn.Module) -> nn.Module | None:
    """The model inside a wrapper of replicas, such as DistributedDataParallel, or inside torch.compile."""
    inner = model.module if is_replicating(model) else getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None


def copied(tree: Tree) -> Tree:
    """``tree`` with a copy of each tensor."""
    copies: Tree = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)
    return copies


def mask_of(batch: Any, name: str = "attention_mask") -> Tensor | None:
    """The mask of a batch of tokens, bool [B, T], False for padding; None if the batch has none under ``name``."""
    mask = batch.get(name) if isinstance(batch, Mapping) else None
    return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None


def tokens_of(batch: Any) -> Tensor | None:
    """The token ids of a batch, integers [B, T]: the tensor itself, the first of a tuple, or ``input_ids``. None
    without ids.
    """
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
    else:
        ids = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype == torch.bool:
        return None
    return None if ids.is_floating_point() or ids.is_complex() else ids
