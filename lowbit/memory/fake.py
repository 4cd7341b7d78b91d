"""Models and batches without data, for estimates: fake tensors, which have shapes, and the values that decide.

A forward may look at whole numbers before it chooses what to compute: whether a mask hides anything, where packed
sequences begin. ``fake_tensors`` keeps the values of those that are small, as it keeps shapes.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from lowbit.memory.repeated import Repeated, tensors_of
from lowbit.memory.runnable import FAILURES, MOST, Call, call_of, made
from lowbit.models.batches import call
from lowbit.models.ties import storage
from lowbit.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    fake_tensor_log,
    without_modes,
)

__all__ = [
    "Routed",
    "answer_without_data",
    "fake_batch",
    "fake_model",
    "fake_tensors",
    "numbers_are_one",
    "outlined",
    "value_of",
    "values_needed",
    "written",
]  # fmt: skip

#: Elements of the largest tensor whose values are kept.
_KEPT = 1 << 20


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Within, tensors that are made are fake, and ``value_of`` knows those of small whole numbers."""
    quiet = mock.patch.object(fake_tensor_log, "disabled", True)  # an op that fails raises, and need not be logged
    with quiet, FakeTensorMode(allow_non_fake_inputs=True) as mode, _Values(mode), _told_to_transformers():
        yield mode


@contextmanager
def values_needed(caller: str, reader: str, instead: str) -> Iterator[None]:
    """Raises ValueError where ``reader`` reads a value that is not known: ``instead`` says what to do."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"{caller}: {reader} reads values of tensors ({error}), and an estimate has none; {instead}"
        ) from None


def numbers_are_one() -> TorchDispatchMode:
    """Within, reading a number from a tensor gives 1: no memory of an optimizer depends on the count of its steps."""
    return _Scalars()  # type: ignore[no-untyped-call]


class _Scalars(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))


def answer_without_data(model: nn.Module, prepare: Callable[[nn.Module], object], batch: Any) -> Any:
    """What a copy of ``model``, changed by ``prepare``, answers to a batch of the same shapes; None where it fails."""
    with torch.inference_mode(False), fake_tensors() as mode:
        copied = fake_model(model, mode, None)
        prepare(copied)
        try:
            return call(copied, fake_batch(batch, mode, None))
        except Exception:  # of whatever code the model has
            return None


# -- copies -----------------------------------------------------------------------------------------------------------
def fake_batch(batch: Any, mode: FakeTensorMode, device: torch.device | str | None) -> Any:
    """The same tree with fake tensors for its tensors, on ``device`` unless it is None. One that is there twice is made
    once: token ids may be the labels too.
    """
    made: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = _fake(tensor, mode, device)
        return made[id(tensor)]

    return tree_map_only(Tensor, fake, batch)


def outlined(batch: Any) -> Any:
    """The same tree with all that ``fake_batch`` looks at: tensors on meta, but for small ones of whole numbers."""

    def outline(tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", copy=True) if _is_kept(tensor) else tensor.detach().to("meta")

    return tree_map_only(Tensor, outline, batch)


def fake_model(model: nn.Module, mode: FakeTensorMode, device: torch.device | str | None) -> nn.Module:
    """A copy of ``model`` with fake tensors, on ``device`` unless it is None. Raises ValueError where there is none."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(_fake(parameter, mode, device), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _fake(buffer, mode, device)
    for parameter in model.parameters():
        if parameter.grad is not None:
            memo[id(parameter.grad)] = None
    modules = list(model.modules())
    known = set(modules)
    for module in modules:  # what is not registered: tables that a module keeps for itself, the state of a recipe
        for value in tree_leaves(list(vars(module).values())):
            if isinstance(value, Tensor) and id(value) not in memo:
                memo[id(value)] = _fake(value, mode, device)
            if isinstance(value, nn.Module) and value not in known:
                known.add(value)
                modules.append(value)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise ValueError(
            f"estimate: {type(model).__name__} cannot be copied, and an estimate is made of a copy "
            f"({type(error).__name__}: {error}). Take what has no copy out of the model (a lock, a file, a result with "
            f"a gradient), or profile a real step with memory.profile(model, batch, step)"
        ) from error


def _fake(tensor: Tensor, mode: FakeTensorMode, device: torch.device | str | None) -> Tensor:
    """A tensor of the same shape, strides and dtype without data. A view stands alone."""
    if isinstance(tensor, FakeTensor):
        return tensor
    place = device if device is not None else "cpu" if tensor.device.type == "meta" else tensor.device
    with mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place)
    if tensor.device.type != "meta" and _is_kept(tensor):
        with without_modes():
            value = tensor.detach().to("cpu", copy=True)
        _keep(made, value, _Shared())
    return made


# -- values -----------------------------------------------------------------------------------------------------------
class _Shared:
    """What views of one storage share: whether a value that nobody knows was written into it."""

    lost = False


class _Kept(NamedTuple):
    value: Tensor
    shared: _Shared


def _kept(tensor: Any) -> _Kept | None:
    found: _Kept | None = getattr(tensor, "_lowbit_value", None)
    return found


def _keep(tensor: Tensor, value: Tensor, shared: _Shared) -> None:
    tensor._lowbit_value = _Kept(value, shared)  # type: ignore[attr-defined]


def value_of(tensor: Any) -> Tensor | None:
    """The value of a fake tensor, on the CPU, or None where it is not known."""
    kept = _kept(tensor)
    return None if kept is None or kept.shared.lost or kept.value.shape != tensor.shape else kept.value


def _is_kept(tensor: Any) -> bool:
    whole = isinstance(tensor, Tensor) and not (tensor.is_floating_point() or tensor.is_complex())
    return whole and tensor.layout == torch.strided and tensor.numel() <= _KEPT


@cache
def _traits(func: Any) -> tuple[bool, bool, bool]:
    """Whether an op has one result for its arguments; writes into them; and answers by their values alone: with a
    number, or with a shape.
    """
    aten, name = func.namespace == "aten", func._schema.name
    sure = torch.Tag.nondeterministic_seeded not in func.tags and "::empty" not in name and "new_empty" not in name
    by_value = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
    return aten and sure, func._schema.is_mutable, bool(by_value)


class _Values(TorchDispatchMode):
    """Ops on whole numbers whose values are known are computed too, on the CPU; those of ``_RULES`` follow these."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode
        self._repeated = Repeated()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sure, writes, by_value = _traits(func)
        if by_value:
            answer = _computed(func, args, kwargs) if sure else None
            if answer is None:
                return _RULES.get(func, func)(*args, **kwargs)
            device = next(leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            return tree_map_only(Tensor, lambda value: _fake(value, self.mode, device), answer)
        rule = _RULES.get(func)
        out = self._repeated(func, args, kwargs) if rule is None else rule(*args, **kwargs)
        made = [out] if type(out) is FakeTensor else tree_leaves(out)
        answer = _computed(func, args, kwargs) if sure and made and all(map(_is_kept, made)) else None
        if answer is not None:
            for tensor, value in zip(made, tree_leaves(answer), strict=True):
                _keep(tensor, value, _shared(value, args))
        elif writes:
            for leaf in written(func, args, kwargs):
                if (kept := _kept(leaf)) is not None:
                    kept.shared.lost = True
        return out


def written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an op writes into."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    names = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return tree_leaves([given[name] for name in names if name in given])


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """What an op answers to the values of its arguments, or None where one is not known."""
    values = {id(leaf): value_of(leaf) for leaf in tensors_of(args, kwargs)}
    if any(value is None for value in values.values()):
        return None

    def real(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        return values[id(leaf)] if isinstance(leaf, Tensor) else leaf

    with without_modes(), torch.no_grad():
        return func(*tree_map(real, args), **tree_map(real, kwargs))


def _shared(value: Tensor, args: Any) -> _Shared:
    """Of the argument that ``value`` is a view of, or one of its own."""
    for leaf in tree_leaves(args):
        kept = _kept(leaf)
        if kept is not None and storage(kept.value) == storage(value):
            return kept.shared
    return _Shared()


@contextmanager
def _told_to_transformers() -> Iterator[None]:
    """transformers looks at no value of a fake tensor, and takes the longest way: a mask of [rows, T, T] that hides
    nothing, keys and values repeated for every head. Of one whose value is known it may.
    """
    module = sys.modules.get("transformers.utils.import_utils")
    if not hasattr(module, "is_fake_tensor"):
        yield
        return
    with mock.patch.object(module, "is_fake_tensor", lambda x: isinstance(x, FakeTensor) and value_of(x) is None):
        yield


class Routed(TorchDispatchMode):
    """Within ``fake_tensors``: of unknown numbers the first of each row are taken to be the largest. Of all ways in
    which a router may send tokens to experts it is the one that gives an expert most.

    A forward without gradients holds no more than that. What a backward holds depends on how many experts are given
    any.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.topk.default and value_of(out[1]) is None and _is_kept(out[1]):
            axis = args[2] if len(args) > 2 else -1
            with without_modes():
                first = torch.empty(out[1].shape, dtype=torch.long)
                first.movedim(axis, -1).copy_(torch.arange(first.shape[axis]))
            _keep(out[1], first, _Shared())
        return out


# -- rules that torch lacks -------------------------------------------------------------------------------------------
def _grouped_mm(*args: Any, **kwargs: Any) -> Tensor:
    """Grouped products of any dtype, as the CPU computes them; torch's rule for fake tensors knows bf16 alone."""
    a, b = args[:2]
    if a.dtype == torch.bfloat16:
        return cast(Tensor, torch.ops.aten._grouped_mm.default(*args, **kwargs))
    offsets: Any = kwargs.get("offs", args[2] if len(args) > 2 else None)
    groups = [] if a.dim() + b.dim() == 5 else [len(offsets)] if a.dim() == 2 else [len(a)]
    return cast(Tensor, a.new_empty(*groups, a.shape[-2], b.shape[-1], dtype=kwargs.get("out_dtype")))


def _rnn_layer(*args: Any, **kwargs: Any) -> Any:
    """A layer of oneDNN, with the workspace that its forward leaves to its backward; torch's rule makes it empty."""
    op = torch.ops.aten.mkldnn_rnn_layer.default
    *results, workspace = op(*args, **kwargs)
    call = call_of(op, args, kwargs, results)
    size = None if call is None else _workspace_bytes(call)
    return (*results, workspace if size is None else workspace.new_empty(size))


@cache
def _workspace_bytes(call: Call) -> int | None:
    """Measured by the op itself, as the library decides; None where it is too large to be run."""
    if call.bytes > MOST:
        return None
    with without_modes(), torch.enable_grad():
        try:
            return int(made(call, torch.device("cpu"))()[-1].numel())
        except FAILURES:
            return None


def _ctc_loss(log_probs: Any, targets: Any, lengths: Any, target_lengths: Any, *rest: Any, **kwargs: Any) -> Any:
    """Losses, and what backward needs of every time and label; torch has no rule, as lengths are values."""
    known = value_of(target_lengths) if isinstance(target_lengths, Tensor) else target_lengths
    if known is None:
        return torch.ops.aten._ctc_loss.Tensor(log_probs, targets, lengths, target_lengths, *rest, **kwargs)
    time, batch, _ = log_probs.shape
    with without_modes():
        labels = 2 * max(map(int, known), default=0) + 1
    return log_probs.new_empty(batch), log_probs.new_empty(batch, time, labels)


_RULES: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._ctc_loss.Tensor: _ctc_loss,
    torch.ops.aten._ctc_loss.default: _ctc_loss,
    torch.ops.aten._grouped_mm.default: _grouped_mm,
    torch.ops.aten.mkldnn_rnn_layer.default: _rnn_layer,
}
