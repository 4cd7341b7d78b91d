"""Repeated calls of ops on fake tensors: the result of an earlier equal call is reused instead of the op's fake rule.

A recurrent network has tens of thousands of calls of a few dozen kinds. torch inspects every argument of each, which
would take most of the time of an estimate.
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

#: Immutable types of arguments besides tensors. Others may change unnoticed.
_FIXED = frozenset({
    bool, complex, float, int, str, type(None), torch.device, torch.dtype, torch.layout, torch.memory_format,
})  # fmt: skip


def tensors_of(*trees: Any) -> list[Tensor]:
    """Return the tensors of trees, in order."""
    tensors = list[Tensor]()
    for tree in trees:
        kind = type(tree)
        if isinstance(tree, Tensor):
            tensors.append(tree)
        elif kind is tuple or kind is list:
            tensors += tensors_of(*tree)
        elif kind is dict:
            tensors += tensors_of(*tree.values())
        elif kind not in _FIXED:
            tensors += [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return tensors


def signature(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return a key that is equal for calls with equal results on fake tensors, or None if an argument cannot be
    compared.

    Args:
        func: The overload that is called.
        args: Its arguments.
        kwargs: Its keyword arguments.
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
            parts.append((kind, value))  # 1, 1.0 and True are equal but differ as arguments
        elif kind is tuple or kind is list:
            within = _parts(value)
            if within is None:
                return None
            parts.append((kind, within))
        else:
            return None
    return tuple(parts)


class _Result(NamedTuple):
    """How to create a result: argument ``place`` (if ``is_argument``) or a view of it, or with ``place`` None a new
    tensor.
    """

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
    """Calls aten ops on fake tensors, and reuses the results of earlier equal calls."""

    def __init__(self) -> None:
        self._known: dict[Any, _Results | None] = {}

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of ``func``."""
        key = signature(func, args, kwargs) if func.namespace == "aten" else None
        if key is None:
            return func(*args, **kwargs)
        if key not in self._known:
            operands_before = tensors_of(args, kwargs)
            places = [storage(tensor) for tensor in operands_before]
            out = func(*args, **kwargs)
            changed = signature(func, args, kwargs) != key or places != [storage(tensor) for tensor in operands_before]
            self._known[key] = None if changed else _results(func, operands_before, out)
            return out
        results = self._known[key]
        if results is None:
            return func(*args, **kwargs)
        operands = tensors_of(args, kwargs)
        if results.kind is FakeTensor:
            return _created(results.each[0], operands)
        outputs = [_created(result, operands) for result in results.each]
        return outputs if results.kind is list else tuple(outputs)


def _results(func: Any, operands: list[Tensor], out: Any) -> _Results | None:
    """Return how to create the results of a call, or None if an equal call may create them differently."""
    kind = type(out)
    tensors = list(out) if kind is tuple or kind is list else [out]
    by_values = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
    if by_values & set(func.tags) or not all(
        type(tensor) is FakeTensor and tensor.layout == torch.strided for tensor in tensors
    ):
        return None  # sparse results have no storage
    places = [storage(tensor) for tensor in operands]
    new = [storage(tensor) for tensor in tensors if storage(tensor) not in places]
    if len(new) != len(set(new)):  # results that are views of one another
        return None
    each = [_result(tensor, operands, places) for tensor in tensors]
    return None if None in each else _Results(kind, cast(tuple[_Result, ...], tuple(each)))


def _result(tensor: FakeTensor, operands: list[Tensor], places: list[int]) -> _Result | None:
    count = places.count(storage(tensor))
    place = places.index(storage(tensor)) if count else None
    is_argument = place is not None and operands[place] is tensor
    full = count == 1 or tensor.untyped_storage().nbytes() == _extent(tensor)
    odd = tensor.constant is not None or tensor.is_conj() or tensor.is_neg()
    if count > 1 or not full or odd or (not is_argument and (tensor.requires_grad or tensor.is_inference())):
        return None
    state = {} if is_argument else {**tensor.__dict__}
    return _Result(
        place,
        is_argument,
        tensor.shape,
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
        tensor.fake_device,
        state,
    )


def _extent(tensor: Tensor) -> int:
    """Return the bytes of the storage that ``empty_strided`` allocates for such a tensor."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + last) * tensor.element_size() if tensor.numel() else 0


def _created(result: _Result, operands: list[Tensor]) -> Tensor:
    if result.place is not None and result.is_argument:
        return operands[result.place]
    shared = None if result.place is None else operands[result.place].untyped_storage()
    with below_torch_dispatch():
        meta = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device="meta")
        if shared is not None:
            meta.set_(shared, result.offset, result.shape, result.stride)  # type: ignore[call-overload]
    result_tensor = make_subclass(  # like FakeTensor.__new__, which takes ten times as long to fill its dict
        FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=result.device
    )
    refuse_data_pointer(result_tensor)
    result_tensor.__dict__.update(result.state)
    return cast(Tensor, result_tensor)
