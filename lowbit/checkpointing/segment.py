"""The wrapper of a checkpointed module."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lowbit.checkpointing.caches import is_cache, is_filled, place_of
from lowbit.checkpointing.calls import Contexts
from lowbit.checkpointing.frame import Frame
from lowbit.combinations import refusal
from lowbit.models.wrap import Wrapper
from lowbit.offload.activations import Offloading, offload_activations
from lowbit.torch_private import transforms_tensors
from lowbit.user_warnings import warn

__all__ = ["Offload", "Recomputed", "Segment"]


class Offload:
    """Where the inputs that a model's checkpoints keep are moved to, as ``offload_activations`` moves them."""

    def __init__(self, where: str | os.PathLike[str]) -> None:
        self.where = where
        self.context: Offloading | None = offload_activations(where)

    def __call__(self) -> Offloading:
        if self.context is None:
            self.context = offload_activations(self.where)
        return self.context

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "context": None}  # a copy moves its own


@dataclass(eq=False)
class Segment:
    """Modules that follow one another and are recomputed as one. ``size``: how many. ``contexts``: what keeps results
    besides, None for nothing. ``offload``: where what is kept goes, None for nowhere.
    """

    size: int
    contexts: Contexts | None = None
    offload: Offload | None = None
    _open: dict[int, ref[Frame]] = field(default_factory=dict, repr=False)  # by thread

    def frame(self, index: int) -> Frame:
        """The frame of a call of the module at ``index``: the open one, or a new one where the segment begins again."""
        thread = threading.get_ident()
        opened = self._open.pop(thread, None)
        frame = None if opened is None else opened()
        if frame is None or frame.last >= index:
            frame = Frame(self.contexts, self.offload)
        frame.last = index
        if index + 1 < self.size:
            self._open[thread] = ref(frame)
        return frame

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": {}}  # a copy has no forward under way


@dataclass(eq=False)
class Recomputed(Wrapper):
    """Around a forward: without gradients nothing, else what backward computes again. ``path``: the module's.

    ``index``: its place in the segment. ``numbered``: whether modules of the model say which layer of a cache they use.
    """

    path: str
    segment: Segment
    index: int = 0
    numbered: bool = False
    outermost = True
    prefix = "Checkpointed"

    def __call__(self, module: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if module.__dict__.get("gradient_checkpointing"):
            self._take_over(module)
        caches = [value for value in (*args, *kwargs.values()) if is_cache(value)]
        if caches and not getattr(module, "_can_checkpoint_with_cache", False):  # transformers' word for "only reads"
            if not module.training:
                return forward(*args, **kwargs)  # a cache that the caller may go on with
            self._refuse_filled(module, caches)
            args = tuple(None if is_cache(value) else value for value in args)
            kwargs = {name: None if is_cache(value) else value for name, value in kwargs.items()}
        if torch.compiler.is_compiling():
            return self._compiled(forward, args, kwargs)
        if _is_transformed(args, kwargs):
            raise RuntimeError(refusal("checkpoint func", "memory.checkpoint_"))
        frame = self.segment.frame(self.index)
        return frame.run(self.path, module, forward, args, kwargs)

    def _compiled(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.segment.size > 1 or self.segment.offload is not None:
            raise RuntimeError(refusal("segments compile", "memory.checkpoint_"))
        if self.segment.contexts is None:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=self.segment.contexts, **kwargs)

    def _refuse_filled(self, module: nn.Module, caches: list[Any]) -> None:
        """Raises ValueError for a cache that this module would read."""
        place = place_of(module)
        if place is None and self.numbered:
            return  # the model numbers the layers that use its cache, and this one is not among them
        if any(is_filled(cache, place or 0) for cache in caches):
            raise ValueError(
                f"memory.checkpoint_: expected an empty cache for {self.path!r} in training, got one with tokens, to "
                f"which a second run would append again; call the model without that cache, checkpoint what is "
                f'given no cache (memory.checkpoint_(model, "mlp"), which prefix tuning can be trained with), or '
                f"memory.uncheckpoint_(model) first"
            )

    def _take_over(self, module: nn.Module) -> None:
        """Switch the checkpointing of transformers off, where it has been enabled since."""
        module.gradient_checkpointing = False  # type: ignore[assignment]
        if not torch.compiler.is_compiling():
            warn(
                f"{self.path!r} is checkpointed by memory.checkpoint_, which takes the place of transformers' gradient "
                f"checkpointing; for that one call memory.uncheckpoint_(model) first"
            )


def _is_transformed(args: Any, kwargs: Any) -> bool:
    """Whether a transform of torch.func is under way, or arguments carry derivatives of forward mode."""
    by_func, by_forward_mode = transforms_tensors()
    if by_func or not by_forward_mode:
        return by_func
    tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)
