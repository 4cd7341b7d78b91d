"""Build models without weights, on the meta device, to be filled by ``load_model``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["empty_weights"]


class empty_weights(TorchFunctionMode):
    """Context in which ``torch.empty`` allocates on the meta device, so that new layers use no memory for weights.

    Layers allocate their weights with ``torch.empty``, and initializing meta tensors is free. Computed buffers, such
    as rotary frequencies, get their values, unlike under ``torch.device("meta")``; ``load_model`` needs them.

    Args:
        most: Largest number of tensors to allocate; None: no limit.

    Raises:
        ValueError: More than ``most`` tensors are allocated.
    """

    def __init__(self, most: int | None = None) -> None:
        super().__init__()
        self.most, self.count = most, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None and kwargs.get("out") is None:
            self.count += 1
            if self.most is not None and self.count > self.most:
                raise ValueError(f"the model has more than {self.most} tensors, many more than the weights hold")
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def to_meta_(model: nn.Module) -> nn.Module:
    """Move parameters and persistent buffers to the meta device; tied tensors stay tied."""
    copies: dict[int, Tensor] = {}
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                new = copies.setdefault(id(value), nn.Parameter(value.to("meta"), value.requires_grad))
                module._parameters[name] = new  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                module._buffers[name] = copies.setdefault(id(buffer), buffer.to("meta"))
    return model
