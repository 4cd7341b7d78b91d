"""What of a model is shared: parameters that several modules hold, tensors on one storage, modules in several places.

Tensors and modules are told apart while the model keeps them alive: another one may get the number of one that is gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

__all__ = ["Holder", "holders", "model_bytes", "paths", "storage", "storage_key", "tensor_bytes"]


class Holder(NamedTuple):
    """A module that holds a parameter itself, and its (first) path in the model."""

    path: str
    module: nn.Module


def holders(model: nn.Module) -> dict[int, list[Holder]]:
    """The modules that hold each parameter of ``model``, in the model's order, by the parameter's ``id``."""
    found: dict[int, list[Holder]] = {}
    for path, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                found.setdefault(id(parameter), []).append(Holder(path, module))
    return found


def paths(model: nn.Module) -> dict[int, list[str]]:
    """Every path of each module of ``model``, in the model's order, by the module's ``id``."""
    found: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        found.setdefault(id(module), []).append(path)
    return found


def storage(tensor: Tensor) -> int:
    """The storage of a tensor, on the meta device too: views of one tensor have the same."""
    return int(tensor.untyped_storage()._cdata)


def storage_key(tensor: Tensor) -> tuple[Any, ...]:
    """Which numbers of its storage a tensor is, and how it reads them: one place, one tensor."""
    return storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of these tensors, shared storage counted once."""
    initialized = [t for t in tensors if not is_lazy(t)]
    return sum({storage(t): t.untyped_storage().nbytes() for t in initialized}.values())


def model_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, shared storage counted once."""
    return tensor_bytes((*model.parameters(), *model.buffers()))
