"""What a forward through checkpointed modules leaves for backward, and how backward makes the rest of it again.

A frame stands for the calls of one segment in one forward: of one module, or of several that follow one another. What
autograd would save inside of them is a holder without a value. The first holder that backward asks for runs the calls
again, one after another, and fills all holders. A call is given again what it was given: tensors that an earlier call
of the frame returned are taken from its second run, all others are kept, each once. They are kept by an autograd node,
so whatever saves the activations around (another frame, an offload to the host) has them.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from lowbit.checkpointing.calls import (
    Buffers,
    CallState,
    Contexts,
    Flags,
    Random,
    Weights,
    gather,
    unmoved,
    version_of,
)

__all__ = ["Frame", "NotReplayed"]


class NotReplayed(RuntimeError):
    """A checkpointed module cannot be computed again, or computed something else."""


class _Filled(Exception):
    """All that backward needs is there."""


class _Keep(torch.autograd.Function):
    """An autograd node that saves tensors. Its output is empty and takes part in nothing."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("nothing depends on what is kept")


class _Holder:
    """The place of one saved tensor."""

    __slots__ = ("__weakref__", "frame", "value")

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.value: Tensor | None = None


class _Source(NamedTuple):
    """Where a call finds a tensor again: in what an earlier ``call`` returned, or kept, at ``place``."""

    made: bool
    call: int
    place: int


class _Known(NamedTuple):
    tensor: ref[Tensor]
    version: int
    source: _Source


class _Call(NamedTuple):
    """One call of a module. ``first``: how many tensors had been saved before it."""

    path: str
    module: nn.Module
    forward: Callable[..., Any]
    given: list[Any]
    structure: TreeSpec
    kept: Any
    around: CallState
    buffers: Buffers
    flags: Flags
    context: Any
    first: int

    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that this call keeps."""
        if self.kept is None:
            return ()
        try:
            saved = self.kept.grad_fn.saved_tensors
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise NotReplayed(
                f"an input of the checkpointed {self.path!r} has been written to since it was called, and backward "
                f"cannot compute the module again from it; write to a copy, or leave the module out of checkpoint_"
            ) from error
        return tuple(t.detach().requires_grad_(t.requires_grad) for t in saved)


class Frame:
    """The calls of a segment in one forward. ``last``: the place in the segment of the latest call.

    ``contexts``: what keeps results of a call besides. ``offload``: makes the context in which inputs are kept.
    """

    def __init__(
        self, contexts: Contexts | None = None, offload: Callable[[], AbstractContextManager[Any]] | None = None
    ) -> None:
        self._contexts, self._offload = contexts, offload
        self.last = -1
        self.calls: list[_Call] = []
        self._holders: list[ref[_Holder]] = []
        self._saved: list[tuple[Any, ...]] = []
        self._weights: list[Weights] = []  # after each call, which may write to them itself
        self._known: dict[int, _Known] = {}

    # -- forward ------------------------------------------------------------------------------------------------------
    def run(
        self,
        path: str,
        module: nn.Module,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Call ``forward``, and keep what computes it again. Raises NotReplayed where it writes to what came from
        outside of the segment.
        """
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        outside = list[Tensor]()
        given = [self._source(leaf, outside) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        first, again = (nullcontext(), nullcontext()) if self._contexts is None else self._contexts()
        kept, around = self._keep(outside), CallState(tensors)
        buffers, flags = Buffers(module), Flags(module)
        self.calls.append(
            _Call(path, module, forward, given, structure, kept, around, buffers, flags, again, len(self._saved))
        )
        versions = [version_of(t) for t in outside]
        with saved_tensors_hooks(self._pack, _unpack), first:
            output = forward(*args, **kwargs)
        flags.called()
        table = buffers.called()
        if table is not None:
            raise NotReplayed(
                f"{path!r} is checkpointed and changes its buffer {table!r}, which is too large to be copied at each "
                f"call, so that it cannot be computed again as it was; leave the module out of checkpoint_"
            )
        self._weights.append(Weights(module))
        if versions != [version_of(t) for t in outside]:
            place = next(i for i, t in enumerate(outside) if versions[i] != version_of(t))
            raise NotReplayed(
                f"{path!r} is checkpointed and writes to a tensor {tuple(outside[place].shape)} that it is given, "
                f"and cannot be computed again from it. Make the write one to a copy (an activation with "
                f"inplace=False), or leave the module out of checkpoint_{_of_caches(args, kwargs)}"
            )
        made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        for tensor in tensors:  # which later calls of the segment may have been given, and may write to
            known = self._known[id(tensor)]
            self._known[id(tensor)] = known._replace(version=version_of(tensor))
        for place, tensor in enumerate(made):
            self._learn(tensor, _Source(True, len(self.calls) - 1, place))
        return output

    def _source(self, tensor: Tensor, outside: list[Tensor]) -> _Source:
        known = self._known.get(id(tensor))
        if known is not None and known.tensor() is tensor and known.version == version_of(tensor):
            return known.source
        source = _Source(False, len(self.calls), len(outside))
        outside.append(tensor)
        self._learn(tensor, source, replace=True)
        return source

    def _keep(self, tensors: list[Tensor]) -> Any:
        if not tensors:
            return None
        with nullcontext() if self._offload is None else self._offload():
            return _Keep.apply(torch.empty(0, requires_grad=True), *tensors)  # type: ignore[no-untyped-call]

    def _learn(self, tensor: Tensor, source: _Source, replace: bool = False) -> None:
        known = self._known.get(id(tensor))
        if replace or known is None or known.tensor() is not tensor:
            self._known[id(tensor)] = _Known(ref(tensor), version_of(tensor), source)

    def _pack(self, tensor: Tensor) -> _Holder:
        holder = _Holder(self)
        self._holders.append(ref(holder))
        self._saved.append(_facts(tensor))
        return holder

    # -- backward -----------------------------------------------------------------------------------------------------
    def recompute(self) -> None:
        """Run the calls again, and fill the holders that are alive. Raises NotReplayed where they save others."""
        for call, weights in zip(self.calls, self._weights, strict=False):  # the last call may be under way
            self._refuse_changed(call, weights)
        kept = [call.inputs() for call in self.calls]
        now = Random(t for tensors in kept for t in tensors)
        made: list[list[Tensor]] = []
        filled = 0

        def fill(tensor: Tensor) -> Tensor:
            nonlocal filled
            self._check(filled, tensor)
            tensor = tensor.detach()
            holder = self._holders[filled]()
            if holder is not None:
                holder.value = tensor
            filled += 1
            if filled == len(self._holders):
                raise _Filled
            return tensor

        try:
            with torch.enable_grad(), saved_tensors_hooks(fill, lambda tensor: tensor):
                for call in self.calls:
                    output = self._again(call, kept, made)
                    made.append([leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)])
        except _Filled:
            return
        finally:
            now.restore()
        self._refuse(filled, "nothing more")

    def _refuse_changed(self, call: _Call, weights: Weights) -> None:
        name = weights.changed(call.module)
        if name is not None:
            raise NotReplayed(
                f"{name!r} of the checkpointed {call.path!r} has been written to or replaced since forward, and with "
                f"it backward would compute another function; call backward before the optimizer's step, and do not "
                f"give weights by functional_call, or memory.uncheckpoint_(model) first"
            )

    def _again(self, call: _Call, kept: list[tuple[Tensor, ...]], made: list[list[Tensor]]) -> Any:
        def found(leaf: Any) -> Any:
            if not isinstance(leaf, _Source):
                return leaf
            return (made if leaf.made else kept)[leaf.call][leaf.place]

        args, kwargs = tree_unflatten([found(leaf) for leaf in call.given], call.structure)
        gather(call.module)
        with call.flags.again(), unmoved(call.module), call.buffers.again(), call.around.again(), call.context:
            return call.forward(*args, **kwargs)

    def _check(self, place: int, tensor: Tensor) -> None:
        if self._saved[place] != _facts(tensor):
            shape, dtype, _ = _facts(tensor)
            self._refuse(place, f"{shape} {dtype}")

    def _refuse(self, place: int, got: str) -> None:
        call = next(call for call in reversed(self.calls) if call.first <= place)
        shape, dtype, _ = self._saved[place]
        raise NotReplayed(
            f"the checkpointed {call.path!r} computes something else in backward: forward saved {shape} {dtype}, its "
            f"second run {got}. Its forward has to depend on its arguments, parameters and torch's random state alone, "
            f"not on a counter, a clock or Python's random; make it so, or leave the module out of checkpoint_"
            f"{_of_caches(*tree_unflatten(call.given, call.structure))}"
        )


def _of_caches(args: Any, kwargs: Any) -> str:
    """What helps a call that keeps states for generation besides."""
    return "; or call the model with use_cache=False" if kwargs.get("use_cache") else ""


def _unpack(holder: _Holder) -> Tensor:
    if holder.value is None:
        holder.frame.recompute()
    value, holder.value = holder.value, None
    assert value is not None
    return value


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device
