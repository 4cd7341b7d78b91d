"""Shared parts of a model: parameters of several modules, tensors on one storage, modules with several paths.

Tensors and modules are identified by ``id`` or storage, which is only valid while the model keeps them alive.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

__all__ = ["Holder", "holders", "model_bytes", "paths", "storage", "storage_key", "tensor_bytes"]


class Holder(NamedTuple):
    """A module that holds a parameter directly, and its first path in the model."""

    path: str
    module: nn.Module


def holders(model: nn.Module) -> dict[int, list[Holder]]:
    """The modules that hold each parameter directly, by ``id`` of the parameter, in the model's order."""
    by_parameter: dict[int, list[Holder]] = {}
    for path, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                by_parameter.setdefault(id(parameter), []).append(Holder(path, module))
    return by_parameter


def paths(model: nn.Module) -> dict[int, list[str]]:
    """All paths of each module, by ``id`` of the module, in the model's order."""
    by_module: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        by_module.setdefault(id(module), []).append(path)
    return by_module


def storage(tensor: Tensor) -> int:
    """Identity of a tensor's storage, also on the meta device; equal for views of one tensor."""
    return int(tensor.untyped_storage()._cdata)


def storage_key(tensor: Tensor) -> tuple[Any, ...]:
    """Identity of a tensor's elements: storage, offset, shape, strides and dtype."""
    return storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of these tensors; shared storage counts once."""
    initialized = [t for t in tensors if not is_lazy(t)]
    return sum({storage(t): t.untyped_storage().nbytes() for t in initialized}.values())


def model_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers; shared storage counts once."""
    return tensor_bytes((*model.parameters(), *model.buffers()))
