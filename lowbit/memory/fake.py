"""Models and batches without data for estimates: fake tensors, with the values of small integer tensors.

A forward may inspect integers before it decides what to compute: whether a mask hides anything, where packed sequences
begin. ``fake_tensors`` therefore tracks the values of small integer tensors along with shapes.
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
from lowbit.memory.runnable import FAILURES, MOST, Call, call_of, prepared
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
    "outlined_model",
    "value_of",
    "values_needed",
    "written",
]  # fmt: skip

#: Most elements of a tensor whose values are tracked.
_KEPT = 1 << 20


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Context in which new tensors are fake, and ``value_of`` knows the values of small integer tensors."""
    quiet = mock.patch.object(fake_tensor_log, "disabled", True)  # an op that fails raises, and need not be logged
    with quiet, FakeTensorMode(allow_non_fake_inputs=True) as mode, _Values(mode), _told_to_transformers():
        yield mode


@contextmanager
def values_needed(caller: str, reader: str, instead: str) -> Iterator[None]:
    """Context that raises ValueError if ``reader`` needs an unknown tensor value. ``instead`` is the remedy."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"{caller}: {reader} reads values of tensors ({error}), and an estimate has none; {instead}"
        ) from None


def numbers_are_one() -> TorchDispatchMode:
    """Context in which reading a number from a tensor gives 1. An optimizer's memory does not depend on it."""
    return _Scalars()  # type: ignore[no-untyped-call]


class _Scalars(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))


def answer_without_data(
    model: nn.Module,
    prepare: Callable[[nn.Module], object],
    batch: Any,
    loss: Callable[[Any, Any], Any] | None = None,
) -> Any:
    """Return the output of a fake copy of ``model``, changed by ``prepare``, for a fake ``batch``. None if it fails.

    With ``loss``, a function of output and batch, return its result instead. The batch may then contain more than the
    forward accepts.
    """
    with torch.inference_mode(False), torch.enable_grad(), fake_tensors() as mode:
        fake_copy = fake_model(model, mode, None)
        prepare(fake_copy)
        try:
            inputs = fake_batch(batch, mode, None)
            output = call(fake_copy, inputs, rest=loss is not None)
            return output if loss is None else loss(output, inputs)
        except Exception:  # the model's code may raise anything
            return None


# -- copies -----------------------------------------------------------------------------------------------------------
def fake_batch(batch: Any, mode: FakeTensorMode, device: torch.device | str | None) -> Any:
    """Return the tree with fake tensors, on ``device`` unless it is None.

    A tensor that occurs twice is copied once, since token ids may also be the labels.
    """
    fakes: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in fakes:
            fakes[id(tensor)] = _fake(tensor, mode, device)
        return fakes[id(tensor)]

    return tree_map_only(Tensor, fake, batch)


def outlined(batch: Any) -> Any:
    """Return the tree with the information that ``fake_batch`` uses: meta tensors, and the values of small integer
    tensors.
    """

    def outline(tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", copy=True) if _is_kept(tensor) else tensor.detach().to("meta")

    return tree_map_only(Tensor, outline, batch)


def fake_model(model: nn.Module, mode: FakeTensorMode, device: torch.device | str | None) -> nn.Module:
    """Return a copy of ``model`` with fake tensors, on ``device`` unless it is None. Raise ValueError if it cannot be
    copied.
    """
    return _copied(model, lambda tensor: _fake(tensor, mode, device))


def outlined_model(model: nn.Module) -> nn.Module:
    """Return a copy of a fake model for ``fake_model``: meta tensors, and the known values of small integer tensors.

    Unlike fake tensors it may be used in other modes.
    """

    def outline(tensor: Tensor) -> Tensor:
        value = value_of(tensor)
        if value is not None:
            return value
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    return _copied(model, outline)


def _copied(model: nn.Module, convert: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a copy of ``model`` with converted tensors, without gradients. Raise ValueError if it cannot be copied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(convert(parameter), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = convert(buffer)
    for parameter in model.parameters():
        if parameter.grad is not None:
            memo[id(parameter.grad)] = None
    modules = list(model.modules())
    visited = set(modules)
    for module in modules:  # unregistered tensors and modules: tables in plain attributes, the state of a recipe
        for value in tree_leaves(list(vars(module).values())):
            if isinstance(value, Tensor) and id(value) not in memo:
                memo[id(value)] = convert(value)
            if isinstance(value, nn.Module) and value not in visited:
                visited.add(value)
                modules.append(value)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise ValueError(
            f"estimate: {type(model).__name__} cannot be copied, and an estimate needs a copy "
            f"({type(error).__name__}: {error}). Remove attributes that cannot be copied (a lock, a file, a tensor "
            f"with grad_fn), or profile a real step with memory.profile(model, batch, step)"
        ) from error


def _fake(tensor: Tensor, mode: FakeTensorMode, device: torch.device | str | None) -> Tensor:
    """Return a fake tensor of the same shape, strides and dtype. It shares no storage with other tensors."""
    if isinstance(tensor, FakeTensor):
        return tensor
    target = device if device is not None else "cpu" if tensor.device.type == "meta" else tensor.device
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=target)
    if tensor.device.type != "meta" and _is_kept(tensor):
        with without_modes():
            value = tensor.detach().to("cpu", copy=True)
        _keep(fake, value, _Shared())
    return fake


# -- values -----------------------------------------------------------------------------------------------------------
class _Shared:
    """State shared by views of one storage: whether an unknown value was written into it."""

    lost = False


class _Kept(NamedTuple):
    value: Tensor
    shared: _Shared


def _kept(tensor: Any) -> _Kept | None:
    record: _Kept | None = getattr(tensor, "_lowbit_value", None)
    return record


def _keep(tensor: Tensor, value: Tensor, shared: _Shared) -> None:
    tensor._lowbit_value = _Kept(value, shared)  # type: ignore[attr-defined]


def value_of(tensor: Any) -> Tensor | None:
    """Return the value of a fake tensor on the CPU, or None if it is unknown."""
    record = _kept(tensor)
    return None if record is None or record.shared.lost or record.value.shape != tensor.shape else record.value


def _is_kept(tensor: Any) -> bool:
    integers = isinstance(tensor, Tensor) and not (tensor.is_floating_point() or tensor.is_complex())
    return integers and tensor.layout == torch.strided and tensor.numel() <= _KEPT


@cache
def _traits(func: Any) -> tuple[bool, bool, bool]:
    """Return whether an op is deterministic, whether it writes to arguments, and whether its result or shape needs
    values.
    """
    aten, name = func.namespace == "aten", func._schema.name
    deterministic = (
        torch.Tag.nondeterministic_seeded not in func.tags and "::empty" not in name and "new_empty" not in name
    )
    by_value = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
    return aten and deterministic, func._schema.is_mutable, bool(by_value)


class _Values(TorchDispatchMode):
    """Mode that also computes ops on integers of known value, on the CPU. Ops of ``_RULES`` use these rules."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode
        self._repeated = Repeated()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        deterministic, writes, by_value = _traits(func)
        if by_value:
            value_tree = _computed(func, args, kwargs) if deterministic else None
            if value_tree is None:
                return _RULES.get(func, func)(*args, **kwargs)
            device = next(leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            return tree_map_only(Tensor, lambda value: _fake(value, self.mode, device), value_tree)
        rule = _RULES.get(func)
        out = self._repeated(func, args, kwargs) if rule is None else rule(*args, **kwargs)
        results = [out] if type(out) is FakeTensor else tree_leaves(out)
        value_tree = (
            _computed(func, args, kwargs) if deterministic and results and all(map(_is_kept, results)) else None
        )
        if value_tree is not None:
            for tensor, value in zip(results, tree_leaves(value_tree), strict=True):
                _keep(tensor, value, _shared(value, args))
        elif writes:
            for leaf in written(func, args, kwargs):
                if (record := _kept(leaf)) is not None:
                    record.shared.lost = True
        return out


def written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an op writes to."""
    arguments = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    names = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return tree_leaves([arguments[name] for name in names if name in arguments])


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an op on the values of its arguments, or None if one is unknown."""
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
    """Return the shared state of the argument that ``value`` is a view of, or a new one."""
    for leaf in tree_leaves(args):
        record = _kept(leaf)
        if record is not None and storage(record.value) == storage(value):
            return record.shared
    return _Shared()


@contextmanager
def _told_to_transformers() -> Iterator[None]:
    """Let transformers inspect fake tensors whose value is known.

    By default it inspects none and takes the longest path: a mask ``[rows, T, T]`` that hides nothing, and keys and
    values repeated for every head.
    """
    module = sys.modules.get("transformers.utils.import_utils")
    if not hasattr(module, "is_fake_tensor"):
        yield
        return
    with mock.patch.object(module, "is_fake_tensor", lambda x: isinstance(x, FakeTensor) and value_of(x) is None):
        yield


class Routed(TorchDispatchMode):
    """Mode within ``fake_tensors`` that decides ``topk`` of unknown numbers, so that a router sends tokens to experts.

    By default, the first of each row are taken to be the largest. So all tokens have the same experts, which needs the
    most memory in a forward without gradients.

    Args:
        all_experts: Only one expert has all tokens, and the others share the rest. With gradients, each expert that
            runs takes memory.
    """

    def __init__(self, all_experts: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._all_experts = all_experts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.topk.default and value_of(out[1]) is None and _is_kept(out[1]):
            axis = args[2] if len(args) > 2 else -1
            with without_modes():
                first = torch.empty(out[1].shape, dtype=torch.long)
                last = first.movedim(axis, -1)
                last.copy_(torch.arange(last.shape[-1]))
                count = args[0].shape[axis]
                if self._all_experts and 1 < last.shape[-1] < count:
                    rest = last[..., 1:]
                    rest.copy_((torch.arange(rest.numel()) % (count - 1) + 1).view(rest.shape))
            _keep(out[1], first, _Shared())
        return out


# -- rules that torch lacks -------------------------------------------------------------------------------------------
def _grouped_mm(*args: Any, **kwargs: Any) -> Tensor:
    """Grouped matmuls of any dtype, which the CPU supports; torch's rule for fake tensors supports only bf16."""
    a, b = args[:2]
    if a.dtype == torch.bfloat16:
        return cast(Tensor, torch.ops.aten._grouped_mm.default(*args, **kwargs))
    offsets: Any = kwargs.get("offs", args[2] if len(args) > 2 else None)
    groups = [] if a.dim() + b.dim() == 5 else [len(offsets)] if a.dim() == 2 else [len(a)]
    return cast(Tensor, a.new_empty(*groups, a.shape[-2], b.shape[-1], dtype=kwargs.get("out_dtype")))


def _rnn_layer(*args: Any, **kwargs: Any) -> Any:
    """A layer of oneDNN with the workspace that forward leaves for backward; torch's rule returns an empty one."""
    op = torch.ops.aten.mkldnn_rnn_layer.default
    *results, workspace = op(*args, **kwargs)
    call = call_of(op, args, kwargs, results)
    size = None if call is None else _workspace_bytes(call)
    return (*results, workspace if size is None else workspace.new_empty(size))


@cache
def _workspace_bytes(call: Call) -> int | None:
    """Return the size measured by the op itself, as it depends on the library. None if the call is too large to run."""
    if call.bytes > MOST:
        return None
    with without_modes(), torch.enable_grad():
        try:
            return int(prepared(call, torch.device("cpu"))()[-1].numel())
        except FAILURES:
            return None


def _ctc_loss(log_probs: Any, targets: Any, lengths: Any, target_lengths: Any, *rest: Any, **kwargs: Any) -> Any:
    """Losses, and the values that backward needs for each time and label. torch has no rule: lengths are values."""
    label_lengths = value_of(target_lengths) if isinstance(target_lengths, Tensor) else target_lengths
    if label_lengths is None:
        return torch.ops.aten._ctc_loss.Tensor(log_probs, targets, lengths, target_lengths, *rest, **kwargs)
    time, batch, _ = log_probs.shape
    with without_modes():
        labels = 2 * max(map(int, label_lengths), default=0) + 1
    return log_probs.new_empty(batch), log_probs.new_empty(batch, time, labels)


_RULES: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._ctc_loss.Tensor: _ctc_loss,
    torch.ops.aten._ctc_loss.default: _ctc_loss,
    torch.ops.aten._grouped_mm.default: _grouped_mm,
    torch.ops.aten.mkldnn_rnn_layer.default: _rnn_layer,
}
