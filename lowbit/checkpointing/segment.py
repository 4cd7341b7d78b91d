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

__all__ = ["Offload", "Recomputed", "RecomputedFunction", "Segment"]


class Offload:
    """Offload of the inputs that a model's checkpoints save, to ``where``. See ``offload_activations``."""

    def __init__(self, where: str | os.PathLike[str]) -> None:
        self.where = where
        self.context: Offloading | None = offload_activations(where)

    def __call__(self) -> Offloading:
        if self.context is None:
            self.context = offload_activations(self.where)
        return self.context

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "context": None}  # a copy offloads by itself


@dataclass(eq=False)
class Segment:
    """Consecutive modules that are recomputed together.

    Attributes:
        size: Number of modules.
        contexts: Contexts that save some of their results; None to save none.
        offload: Where saved inputs are offloaded; None to keep them on their device.
    """

    size: int
    contexts: Contexts | None = None
    offload: Offload | None = None
    _open: dict[int, ref[Frame]] = field(default_factory=dict, repr=False)  # by thread

    def frame(self, index: int) -> Frame:
        """Return the frame for a call of the module at ``index``: the open one, or a new one if the segment starts
        again.
        """
        thread = threading.get_ident()
        open_frame = self._open.pop(thread, None)
        frame = None if open_frame is None else open_frame()
        if frame is None or frame.last >= index:
            frame = Frame(self.contexts, self.offload)
        frame.last = index
        if index + 1 < self.size:
            self._open[thread] = ref(frame)
        return frame

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": {}}  # no forward of a copy is running


@dataclass(eq=False)
class Recomputed(Wrapper):
    """Wrapper of a forward that backward recomputes. Without gradients it does nothing.

    Attributes:
        path: Path of the module.
        segment: The segment that the module belongs to.
        index: Position of the module in the segment.
        numbered: Whether modules of the model have an index of their layer in a cache.
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
        if caches and not getattr(module, "_can_checkpoint_with_cache", False):  # set if a module only reads the cache
            if not module.training:
                return forward(*args, **kwargs)  # the caller may go on to use the cache
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
        """Raise ValueError for a cache that this module would read."""
        place = place_of(module)
        if place is None and self.numbered:
            return  # this module does not use the model's cache
        if any(is_filled(cache, place or 0) for cache in caches):
            raise ValueError(
                f"memory.checkpoint_: expected an empty cache for {self.path!r} in training, got one with tokens, to "
                f"which the recomputation would append again; call the model without that cache, checkpoint only "
                f'modules that take no cache (memory.checkpoint_(model, "mlp"), which works with prefix tuning), or '
                f"call memory.uncheckpoint_(model) first"
            )

    def _take_over(self, module: nn.Module) -> None:
        """Switch off gradient checkpointing of transformers that was enabled after ``checkpoint_``."""
        module.gradient_checkpointing = False  # type: ignore[assignment]
        if not torch.compiler.is_compiling():
            warn(
                f"{self.path!r} is checkpointed by memory.checkpoint_, which takes the place of transformers' gradient "
                f"checkpointing; to use the latter, call memory.uncheckpoint_(model) first"
            )


#: Stands for the module of a function, which has no parameters, buffers or mode.
_NO_MODULE = nn.Module()


@dataclass(frozen=True, eq=False)
class RecomputedFunction:
    """A function between checkpointed modules, in place of the attribute of the block that calls it."""

    function: Callable[..., Any]
    recomputed: Recomputed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.recomputed(_NO_MODULE, self.function, *args, **kwargs)


def _is_transformed(args: Any, kwargs: Any) -> bool:
    """Return whether a torch.func transform is active, or arguments carry forward-mode derivatives."""
    by_func, by_forward_mode = transforms_tensors()
    if by_func or not by_forward_mode:
        return by_func
    tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)
