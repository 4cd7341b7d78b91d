"""Saves the inputs of checkpointed modules in forward, and recomputes their other activations in backward.

A frame covers the calls of one segment in one forward: of one module, or of several consecutive modules. A tensor that
autograd would save inside them becomes a holder without a value. The first holder that backward unpacks runs all calls
again, in order, which fills all holders. Inputs that an earlier call of the frame returned are taken from its second
run. All others are saved once, by an autograd node, so that enclosing saved-tensor hooks apply to them (another frame,
an offload to the host).

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
    """Raised if a checkpointed module cannot be recomputed, or recomputes something else."""


class _Filled(Exception):
    """Ends the recomputation when all holders are filled."""


class _Keep(torch.autograd.Function):
    """An autograd node that saves tensors. Its empty output is used nowhere."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("the output of this node is not used")


class _Holder:
    """Stands for one saved tensor."""

    __slots__ = ("__weakref__", "frame", "value")

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.value: Tensor | None = None


class _Source(NamedTuple):
    """Where a call gets an input again: output or saved input ``place`` of ``call``."""

    is_output: bool
    call: int
    place: int


class _Known(NamedTuple):
    tensor: ref[Tensor]
    version: int
    source: _Source


class _Call(NamedTuple):
    """One call of a module. ``first`` is the number of tensors saved before it."""

    path: str
    module: nn.Module
    forward: Callable[..., Any]
    leaves: list[Any]
    structure: TreeSpec
    saved: Any
    state: CallState
    buffers: Buffers
    flags: Flags
    context: Any
    first: int

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the tensors that are saved for this call."""
        if self.saved is None:
            return ()
        try:
            saved = self.saved.grad_fn.saved_tensors
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise NotReplayed(
                f"an input of the checkpointed {self.path!r} has been written to since its call, so backward cannot "
                f"recompute the module; write to a copy, or leave the module out of checkpoint_"
            ) from error
        return tuple(t.detach().requires_grad_(t.requires_grad) for t in saved)


class Frame:
    """The calls of a segment in one forward.

    Args:
        contexts: Contexts that save some results of each call.
        offload: Returns the context in which inputs are saved.
    """

    def __init__(
        self, contexts: Contexts | None = None, offload: Callable[[], AbstractContextManager[Any]] | None = None
    ) -> None:
        self._contexts, self._offload = contexts, offload
        self.last = -1
        self.calls: list[_Call] = []
        self._holders: list[ref[_Holder]] = []
        self._saved: list[tuple[Any, ...]] = []
        self._weights: list[Weights] = []  # recorded after each call, which may write to weights itself
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
        """Call ``forward`` and save its inputs and state. Raise NotReplayed if it writes to an input from outside the
        segment.
        """
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        outside = list[Tensor]()
        inputs = [self._source(leaf, outside) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        first, recompute_context = (nullcontext(), nullcontext()) if self._contexts is None else self._contexts()
        saved, state = self._keep(outside), CallState(tensors)
        buffers, flags = Buffers(module), Flags(module)
        self.calls.append(
            _Call(
                path,
                module,
                forward,
                inputs,
                structure,
                saved,
                state,
                buffers,
                flags,
                recompute_context,
                len(self._saved),
            )
        )
        versions = [version_of(t) for t in outside]
        with saved_tensors_hooks(self._pack, _unpack), first:
            output = forward(*args, **kwargs)
        flags.called()
        table = buffers.called()
        if table is not None:
            raise NotReplayed(
                f"{path!r} is checkpointed and changes its buffer {table!r}, which is too large to be copied at each "
                f"call, so backward cannot recompute the module; leave it out of checkpoint_"
            )
        self._weights.append(Weights(module))
        if versions != [version_of(t) for t in outside]:
            place = next(i for i, t in enumerate(outside) if versions[i] != version_of(t))
            raise NotReplayed(
                f"{path!r} is checkpointed and writes to a tensor {tuple(outside[place].shape)} that it is given, "
                f"so backward cannot recompute it. Write to a copy (for an activation: inplace=False), or leave the "
                f"module out of checkpoint_{_of_caches(args, kwargs)}"
            )
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        for tensor in tensors:  # the call may have written to outputs of earlier calls
            known = self._known[id(tensor)]
            self._known[id(tensor)] = known._replace(version=version_of(tensor))
        for place, tensor in enumerate(outputs):
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
        """Run the calls again and fill the live holders. Raise NotReplayed if they save other tensors than before."""
        for call, weights in zip(self.calls, self._weights, strict=False):  # the last call may still be running
            self._refuse_changed(call, weights)
        saved = [call.inputs() for call in self.calls]
        random = Random(t for tensors in saved for t in tensors)
        outputs: list[list[Tensor]] = []
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
                    output = self._again(call, saved, outputs)
                    outputs.append([leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)])
        except _Filled:
            return
        finally:
            random.restore()
        self._refuse(filled, "nothing more")

    def _refuse_changed(self, call: _Call, weights: Weights) -> None:
        name = weights.changed(call.module)
        if name is not None:
            raise NotReplayed(
                f"{name!r} of the checkpointed {call.path!r} has been written to or replaced since forward, so "
                f"backward would compute another function; call backward before the optimizer step, do not pass "
                f"weights by functional_call, or call memory.uncheckpoint_(model) first"
            )

    def _again(self, call: _Call, saved: list[tuple[Tensor, ...]], outputs: list[list[Tensor]]) -> Any:
        def input_of(leaf: Any) -> Any:
            if not isinstance(leaf, _Source):
                return leaf
            return (outputs if leaf.is_output else saved)[leaf.call][leaf.place]

        args, kwargs = tree_unflatten([input_of(leaf) for leaf in call.leaves], call.structure)
        gather(call.module)
        with call.flags.again(), unmoved(call.module), call.buffers.again(), call.state.again(), call.context:
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
            f"second run {got}. Its forward may depend only on its arguments, parameters and torch's random state, "
            f"not on a counter, a clock or Python's random; change it, or leave the module out of checkpoint_"
            f"{_of_caches(*tree_unflatten(call.leaves, call.structure))}"
        )


def _of_caches(args: Any, kwargs: Any) -> str:
    """Return a remedy for a call that fills a cache."""
    return "; or call the model with use_cache=False" if kwargs.get("use_cache") else ""


def _unpack(holder: _Holder) -> Tensor:
    if holder.value is None:
        holder.frame.recompute()
    value, holder.value = holder.value, None
    assert value is not None
    return value


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device
