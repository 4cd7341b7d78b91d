"""Calls of ops on fake tensors that are like earlier ones: an op's rule says of both the same.

A recurrent network is tens of thousands of calls of a few dozen kinds. torch looks at each argument of each of them
again, which costs most of the time of an estimate.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lowbit.models.ties import storage
from lowbit.torch_private import FakeTensor, below_torch_dispatch, make_subclass, refuse_data_pointer

__all__ = ["Repeated", "signature", "tensors_of"]

#: What leaves of arguments are besides tensors; others may change without telling.
_FIXED = frozenset({
    bool, complex, float, int, str, type(None), torch.device, torch.dtype, torch.layout, torch.memory_format,
})  # fmt: skip


def tensors_of(*trees: Any) -> list[Tensor]:
    """The tensors of trees, in their order."""
    found = list[Tensor]()
    for tree in trees:
        kind = type(tree)
        if isinstance(tree, Tensor):
            found.append(tree)
        elif kind is tuple or kind is list:
            found += tensors_of(*tree)
        elif kind is dict:
            found += tensors_of(*tree.values())
        elif kind not in _FIXED:
            found += [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return found


def signature(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """What an op's rule for fake tensors looks at in a call.

    Args:
        func: The overload that is called.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Returns:
        What is equal for calls that are alike; None where an argument is more than can be compared.
    """
    parts = _parts(args)
    named = _parts(kwargs.values()) if kwargs else ()
    if parts is None or named is None:
        return None
    modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype())
    return (func, modes, parts, tuple(kwargs), named)


def _parts(values: Iterable[Any]) -> tuple[Any, ...] | None:
    parts = list[Any]()
    for value in values:
        kind = type(value)
        if isinstance(value, FakeTensor):
            if value.constant is not None or value.layout != torch.strided:
                return None
            parts.append((
                value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device,
                value.requires_grad, value.is_conj(), value.is_neg(),
            ))  # fmt: skip
        elif kind in _FIXED:
            parts.append((kind, value))  # equal numbers of two types are two arguments
        elif kind is tuple or kind is list:
            within = _parts(value)
            if within is None:
                return None
            parts.append((kind, within))
        else:
            return None
    return tuple(parts)


class _Result(NamedTuple):
    """How a result is made: it is an argument (``place``), a view of one, or new (``place`` is None)."""

    place: int | None
    is_argument: bool
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    state: dict[str, Any]


class _Results(NamedTuple):
    kind: type
    each: tuple[_Result, ...]


class Repeated:
    """Results of ops of aten on fake tensors, made as those of an earlier call that was alike."""

    def __init__(self) -> None:
        self._known: dict[Any, _Results | None] = {}

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``func`` answers."""
        key = signature(func, args, kwargs) if func.namespace == "aten" else None
        if key is None:
            return func(*args, **kwargs)
        if key not in self._known:
            before = tensors_of(args, kwargs)
            places = [storage(tensor) for tensor in before]
            out = func(*args, **kwargs)
            changed = signature(func, args, kwargs) != key or places != [storage(tensor) for tensor in before]
            self._known[key] = None if changed else _results(func, before, out)
            return out
        results = self._known[key]
        if results is None:
            return func(*args, **kwargs)
        given = tensors_of(args, kwargs)
        if results.kind is FakeTensor:
            return _made(results.each[0], given)
        made = [_made(result, given) for result in results.each]
        return made if results.kind is list else tuple(made)


def _results(func: Any, given: list[Tensor], out: Any) -> _Results | None:
    """How the results of a call were made; None where another call that is alike may make them otherwise."""
    kind = type(out)
    made = list(out) if kind is tuple or kind is list else [out]
    by_values = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
    if by_values & set(func.tags) or not all(type(one) is FakeTensor and one.layout == torch.strided for one in made):
        return None  # sparse results have no storage
    places = [storage(tensor) for tensor in given]
    new = [storage(one) for one in made if storage(one) not in places]
    if len(new) != len(set(new)):  # results that are views of one another
        return None
    each = [_result(one, given, places) for one in made]
    return None if None in each else _Results(kind, cast(tuple[_Result, ...], tuple(each)))


def _result(one: FakeTensor, given: list[Tensor], places: list[int]) -> _Result | None:
    count = places.count(storage(one))
    place = places.index(storage(one)) if count else None
    is_argument = place is not None and given[place] is one
    whole = count == 1 or one.untyped_storage().nbytes() == _extent(one)
    odd = one.constant is not None or one.is_conj() or one.is_neg()
    if count > 1 or not whole or odd or (not is_argument and (one.requires_grad or one.is_inference())):
        return None
    state = {} if is_argument else {**one.__dict__}
    return _Result(
        place, is_argument, one.shape, one.stride(), int(one.storage_offset()), one.dtype, one.fake_device, state
    )


def _extent(tensor: Tensor) -> int:
    """Bytes of the storage that ``empty_strided`` makes for such a tensor."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + last) * tensor.element_size() if tensor.numel() else 0


def _made(result: _Result, given: list[Tensor]) -> Tensor:
    if result.place is not None and result.is_argument:
        return given[result.place]
    held = None if result.place is None else given[result.place].untyped_storage()
    with below_torch_dispatch():
        meta = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device="meta")
        if held is not None:
            meta.set_(held, result.offset, result.shape, result.stride)  # type: ignore[call-overload]
    made = make_subclass(  # as the class does, which then takes ten times as long to fill its dict
        FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=result.device
    )
    refuse_data_pointer(made)
    made.__dict__.update(result.state)
    return cast(Tensor, made)
