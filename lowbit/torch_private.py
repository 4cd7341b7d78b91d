"""All undocumented functions of torch that lowbit uses, as of torch 2.10 to 2.13.

If torch renames or changes one of these, only this file changes; ``tests/test_torch_private.py`` calls each. These are
used directly instead: ``torch.utils._pytree`` and ``TorchDispatchMode``, which torch's documentation names; operators
of ``torch.ops.aten``; attributes that have been stable for years (``_version``, ``_cdata``, ``_schema``,
``_parameters``, ``_buffers``, ``_modules``); methods that subclasses override (``_apply``, ``_load_from_state_dict``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch._functorch.utils import enable_single_level_autograd_function
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    is_fake,
)
from torch.autograd import forward_ad
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserved_version
from torch.distributed._composable_state import _module_state_mapping
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.conv import _ConvNd as ConvNd
from torch.nn.modules.conv import _ConvTransposeNd as ConvTransposeNd
from torch.nn.modules.pooling import _AvgPoolNd as AvgPoolNd
from torch.nn.modules.pooling import _MaxPoolNd as MaxPoolNd
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import _disable_current_modes as without_modes

__all__ = [
    "AvgPoolNd",
    "BatchNorm",
    "ConvNd",
    "ConvTransposeNd",
    "DataDependentOutputException",
    "DeviceType",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "MaxPoolNd",
    "NormBase",
    "OpOverload",
    "after_backward",
    "assert_async",
    "below_autograd",
    "below_torch_dispatch",
    "current_node",
    "decomposed_ops",
    "disabled_torch_function",
    "dispatches_to",
    "fake_tensor_log",
    "foreach_add_",
    "foreach_copy_",
    "functorch_level",
    "gradient_hooks",
    "graph_task",
    "has_foreach_kernels",
    "int_mm",
    "is_fake",
    "is_fully_sharded",
    "local_part",
    "make_subclass",
    "make_wrapper_subclass",
    "multiplies_bf16",
    "pop_saved_tensors_hooks",
    "preserved_version",
    "profiling",
    "push_saved_tensors_hooks",
    "refuse_data_pointer",
    "saved_tensors_hooks",
    "scaled_mm",
    "sequence_number",
    "set_gradient_hooks",
    "set_local_part",
    "single_level_function",
    "single_level_functions",
    "storage_holders",
    "transforms_tensors",
    "with_version_of",
    "without_modes",
]

# -- aliases, not wrappers: they run once per op, and a Python call would take time ------------------------------------
graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of this thread's backward pass; -1 outside of one."""

current_node: Callable[[], Any] = torch._C._current_autograd_node  # type: ignore[attr-defined]
"""The running autograd node; None between nodes. Its ``_sequence_nr()`` is a ``sequence_number``."""

sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number of the next autograd node in this thread."""

below_autograd: Callable[[], AbstractContextManager[Any]] = torch._C._AutoDispatchBelowAutograd
"""Context in which ops skip autograd's kernels."""

below_torch_dispatch: Callable[[], AbstractContextManager[Any]] = torch._C._DisableTorchDispatch  # type: ignore[attr-defined]
"""Context in which ops skip ``__torch_dispatch__`` of tensors and modes."""

make_subclass: Callable[..., Any] = Tensor._make_subclass
"""``make_subclass(cls, tensor, requires_grad=False, ...)``: a tensor of a subclass with the same storage."""

make_wrapper_subclass: Callable[..., Any] = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
"""``make_wrapper_subclass(cls, size, strides=, dtype=, device=, storage_size=)``: a tensor of a subclass without
memory."""

refuse_data_pointer: Callable[[Tensor], None] = torch._C._set_throw_on_mutable_data_ptr
"""Make a tensor raise if a kernel requests its data pointer for writing, as fake tensors do."""

disabled_torch_function: Any = torch._C._disabled_torch_function_impl
"""``__torch_function__`` of a subclass that only uses ``__torch_dispatch__``."""

fake_tensor_log = logging.getLogger("torch._subclasses.fake_tensor")
"""The logger to which fake tensors report ops that raise."""


# -- autograd ----------------------------------------------------------------------------------------------------------
def after_backward(run: Callable[[], None]) -> None:
    """Calls ``run`` at the end of the current backward pass."""
    torch.autograd.Variable._execution_engine.queue_callback(run)


def before_backward(tensor: Tensor, run: Callable[[Any], object]) -> None:
    """Calls ``run`` when a backward pass reaches ``tensor``. A write to a view replaces its node, not its base's."""
    for one in (tensor, tensor._base):
        if one is not None and one.grad_fn is not None:
            one.grad_fn.register_prehook(run)


def single_level_function() -> type:
    """The base of ``torch.autograd.Function`` for a single level of autograd, which torch.func does not transform."""
    return torch.autograd.function._SingleLevelFunction


def single_level_functions() -> AbstractContextManager[None]:
    """A context in which transforms of torch.func accept such functions."""
    context: AbstractContextManager[None] = enable_single_level_autograd_function()
    return context


def gradient_hooks(param: Tensor) -> dict[int, Any]:
    """The hooks of ``register_post_accumulate_grad_hook``."""
    return param._post_accumulate_grad_hooks or {}  # type: ignore[attr-defined]


def set_gradient_hooks(param: Tensor, hooks: dict[int, Any]) -> None:
    """Replaces the hooks of ``register_post_accumulate_grad_hook``; {} removes all, None would not."""
    param._post_accumulate_grad_hooks = hooks  # type: ignore[attr-defined]


def saved_tensors_hooks() -> Any:
    """The innermost pair of ``torch.autograd.graph.saved_tensors_hooks``, pack and unpack, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def push_saved_tensors_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
    """Enters ``torch.autograd.graph.saved_tensors_hooks``, without an object that can be entered only once."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_saved_tensors_hooks() -> None:
    """Leaves the context of ``push_saved_tensors_hooks``."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


def profiling() -> bool:
    """Whether torch's profiler is running."""
    return torch._C._autograd._profiler_enabled()


def with_version_of(tensor: Tensor) -> Tensor:
    """``tensor.detach()`` that shares the version counter; ``detach`` alone starts a new one."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


# -- torch.func and forward mode ---------------------------------------------------------------------------------------
def functorch_level() -> int | None:
    """The level of the innermost transform of torch.func (grad, vmap); None outside."""
    level: int | None = torch._C._functorch.maybe_current_level()
    return level


def transforms_tensors() -> tuple[bool, bool]:
    """Whether a transform of torch.func is active, and whether forward-mode AD is."""
    return torch._C._functorch.peek_interpreter_stack() is not None, forward_ad._current_level >= 0


# -- tensors -----------------------------------------------------------------------------------------------------------
def storage_holders(tensor: Tensor) -> int:
    """Number of tensors and other objects that share the storage of ``tensor``."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def local_part(param: Any) -> Tensor:
    """This process's shard of a DTensor; ``to_local`` would return an alias."""
    part: Tensor = param._local_tensor
    return part


def set_local_part(param: Any, part: Tensor) -> None:
    """Replaces this process's shard of a DTensor."""
    param._local_tensor = part


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` gathers parameters of this module, by itself or with a module around it."""
    states = [state for ref in _module_state_mapping.values() if (state := ref()) is not None]
    groups = [group for state in states for group in getattr(state, "_fsdp_param_groups", ())]
    groups += [vars(state).get("_fsdp_param_group") for state in states]  # torch 2.10 has one group per state
    return any(param._module_info.module is module for group in groups if group for param in group.fsdp_params)


# -- kernels -----------------------------------------------------------------------------------------------------------
def int_mm(a: Tensor, b: Tensor) -> Tensor:
    """``a [M, K] @ b [K, N]`` of int8, in int32, with cuBLAS."""
    return torch._int_mm(a, b)


def scaled_mm(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``a [M, K] @ b [K, N]`` of FP8 with scales, with cuBLAS."""
    return torch._scaled_mm(a, b, *args, **kwargs)


def foreach_add_(tensors: list[Tensor], number: float) -> None:
    """Adds a number to each tensor, in one call."""
    torch._foreach_add_(tensors, number)


def foreach_copy_(tensors: list[Tensor], sources: list[Tensor]) -> None:
    """Copies each source into its tensor, in one call."""
    torch._foreach_copy_(tensors, sources)


def assert_async(holds: Tensor, message: str = "") -> None:
    """Raises RuntimeError unless a boolean tensor is true; on CUDA and in graphs without synchronization."""
    torch._assert_async(holds, message)


def has_foreach_kernels(device: torch.device) -> bool:
    """Whether torch's optimizers use foreach kernels on this device by default."""
    return device.type in _foreach_utils._get_foreach_kernels_supported_devices()


def dispatches_to(op: str, key: str) -> bool:
    """Whether ``"namespace::op"`` has a kernel for a dispatch key such as ``"CUDA"``."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op, key)


def multiplies_bf16() -> bool:
    """Whether an x86 processor has AVX512_BF16, for a torch without ``get_capabilities``."""
    return bool(torch.cpu._is_avx512_bf16_supported())


def decomposed_ops() -> Any:
    """The ops of torch's quantized graphs, ``torch.ops.quantized_decomposed``, which an import registers."""
    import_module("torch.ao.quantization.fx._decomposed")
    return torch.ops.quantized_decomposed
