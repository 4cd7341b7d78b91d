"""Fuses the last layer of any model with the cross-entropy that its output is passed to, wherever that is computed.

In training, the layer returns ``LazyLogits``. The code that computes the loss does not change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lowbit.combinations import refusal
from lowbit.memory.fake import answer_without_data
from lowbit.models.losses import usual_loss
from lowbit.models.output_layers import find_output_layers
from lowbit.models.wrap import Wrapper, plain_class, wrap
from lowbit.nn.base import full_name
from lowbit.tiled.head_call import HeadCall, watched_calls
from lowbit.tiled.lazy_logits import lazy_logits
from lowbit.tiled.tied import Lookups, Ties, can_share
from lowbit.torch_private import is_fake, is_fully_sharded, transforms_tensors
from lowbit.user_warnings import warn

__all__ = ["LazyHead", "TiedTable", "find_heads", "fuse_heads_", "is_linear", "not_fused"]


@dataclass(eq=False)
class LazyHead(Wrapper):
    """Wrapper of the last layer: in training, its matmul returns ``LazyLogits``.

    Attributes:
        path: Path of the layer in the model.
        ties: The shared gradients of the layer's weight and of the embeddings that use it.
        warned: Whether it has warned that a loss was not fused.
    """

    path: str
    ties: Ties
    warned: bool = False

    def __call__(self, module: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        if not is_linear(module):
            self._warn(f"the last layer {self.path!r} has become a {full_name(type(module))}")
            return forward(*args, **kwargs)
        if is_fully_sharded(module):
            raise RuntimeError(refusal("fused loss fully_shard", "memory.fuse_loss_"))
        with _Matmuls(self._multiply):
            return forward(*args, **kwargs)

    def _multiply(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Takes the parameters of ``F.linear``."""
        dtype = _product_dtype(hidden, weight, bias)
        if dtype is None:
            return F.linear(hidden, weight, bias)
        tie = self.ties.of(weight, create=False) if can_share(weight) else None
        matrix = weight if tie is None else tie.matrix()
        return lazy_logits(HeadCall(matrix, bias, dtype, self.path, self._read), hidden)

    def _read(self, name: str) -> None:
        self._warn(f"{name} reads the logits of {self.path!r} before F.cross_entropy does")

    def _warn(self, why: str) -> None:
        if not self.warned:
            self.warned = True
            warn(
                f"memory.fuse_loss_: {why}, so all logits are allocated and the loss is not fused. Compute the loss "
                f"by F.cross_entropy first, or call lowbit.memory.unfuse_loss_(model)"
            )


@dataclass(eq=False)
class TiedTable(Wrapper):
    """Wrapper of an embedding that shares the weight of a ``LazyHead``: both add to one gradient."""

    ties: Ties

    def __call__(self, module: Any, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not module.training or not can_share(module.weight) or any(transforms_tensors()):
            return forward(*args, **kwargs)
        with Lookups(module.weight, lambda: self.ties.of(module.weight)):
            return forward(*args, **kwargs)


class _Matmuls(TorchFunctionMode):
    """Context in which ``multiply`` is called instead of ``F.linear``."""

    def __init__(self, multiply: Callable[..., Tensor]) -> None:
        super().__init__()
        self.multiply = multiply

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = self.multiply if func is F.linear else func
        return run(*args, **(kwargs or {}))


def _product_dtype(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """Return the dtype in which ``F.linear`` multiplies. None if its result cannot be a ``LazyLogits``."""
    tensors = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    plain = all(type(tensor) in (Tensor, nn.Parameter) or is_fake(tensor) for tensor in tensors)
    if not plain or any(transforms_tensors()) or not (hidden.requires_grad or weight.requires_grad):
        return None
    if not hidden.dim() or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or len(weight) < 2:
        return None
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    dtype = torch.float64 if hidden.dtype == torch.float64 else dtype
    same = all(tensor.dtype == dtype for tensor in tensors)
    return dtype if dtype.is_floating_point and (same or torch.is_autocast_enabled(device)) else None


def is_linear(module: nn.Module) -> bool:
    """Return whether a module computes ``F.linear`` of its input and its weight."""
    plain = plain_class(module)
    return issubclass(plain, nn.Linear) and plain.forward is nn.Linear.forward


def find_heads(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the last layers of ``model`` that can be fused, by path."""
    return {path: layer for path, layer in find_output_layers(model).items() if is_linear(layer)}


def fuse_heads_(model: nn.Module, paths: list[str]) -> None:
    """Fuse the layers at ``paths`` with the losses that they feed, in place."""
    for path in paths:
        head: Any = model.get_submodule(path)
        ties = Ties()
        wrap(head, LazyHead(path, ties))
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.weight is head.weight:
                wrap(module, TiedTable(ties))


def not_fused(
    model: nn.Module, paths: list[str], batch: Any, loss: Callable[[Any, Any], Tensor] | None
) -> dict[str, str]:
    """Return why layers at ``paths`` cannot be fused with the loss of ``batch``, by a step on fake tensors.

    Returns:
        A reason for each path, except those whose output is passed to a cross-entropy in every call, and not read
        before.
    """
    asleep = [path for path in paths if not model.get_submodule(path).training]
    if asleep:
        return dict.fromkeys(asleep, "the model is in evaluation mode; call model.train() first")

    def losses(output: Any, fake_batch: Any) -> Any:
        return (loss or usual_loss)(output, fake_batch), None

    with watched_calls() as calls:
        answer = answer_without_data(model, lambda copied: fuse_heads_(copied, paths), batch, losses)
    if answer is None:
        return dict.fromkeys(paths, "the model or its loss fails for this batch")
    reasons = dict.fromkeys(set(paths) - {call.path for call in calls}, "the model does not call it")
    for call in calls:
        if not call.fused:
            reasons.setdefault(call.path, f"{call.reader or 'nothing'} reads its output, and not F.cross_entropy")
    return reasons
