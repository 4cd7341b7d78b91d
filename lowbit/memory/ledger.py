"""Records the storages of a training step: the op and layer that made each, and its lifetime.

It sees all ops of torch's dispatcher, so real and fake tensors work alike. Scratch memory of kernels is not seen: a
profile adds it from the allocator, an estimate from measurements and a table.
"""

from __future__ import annotations

import copy
import gc
import os
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowbit.memory.repeated import tensors_of
from lowbit.torch_private import FakeTensor, current_node, graph_task, sequence_number

__all__ = ["KINDS", "MASTER_STATES", "OUTSIDE", "Ledger", "Op", "Piece"]

#: Purposes of memory; see ``lowbit.memory.Usage``.
KINDS = (
    "parameters", "buffers", "gradients", "optimizer state", "master copies", "weight copies", "activations", "inputs",
    "temporaries", "other",
)  # fmt: skip

#: The layer of ops outside of all modules of the model.
OUTSIDE = "(outside)"

#: Entries of optimizer states that are copies of parameters, by lowbit and other libraries.
MASTER_STATES = frozenset({"master", "masters", "master_param", "master_weight", "master_params"})

#: A tensor computed from these kinds only is a weight copy, such as a cast or quantized values.
_OF_WEIGHTS = frozenset({"parameters", "buffers", "weight copies"})

#: Namespaces of ops that compute nothing: marks of an optimizer step, queries about a tensor.
_ASIDE = frozenset({"profiler", "prim"})
_DEVICE = torch.ops.prim.device.default

_TORCH = os.path.dirname(torch.__file__)
_LOWBIT = os.path.dirname(os.path.dirname(__file__))


class Op(NamedTuple):
    """One call of an op. ``phase`` is forward, recomputation, backward, step or end."""

    name: str
    layer: str
    phase: str


class Piece:
    """One storage.

    Attributes:
        bytes: Its size.
        address: Its address, or 0 on meta.
        born: Number of the op that made it; -1 if it existed before.
        died: Number of the op after which it was freed; None if it is alive.
        kind: Purpose, or None if that follows from its lifetime.
        layer: The layer that made it.
        line: Line of the caller's code that made it.
    """

    __slots__ = ("address", "born", "bytes", "died", "kind", "layer", "line")

    def __init__(self, storage: torch.UntypedStorage, born: int, kind: str | None, layer: str, line: str) -> None:
        self.bytes = storage.nbytes()
        self.address = 0 if storage.device.type == "meta" else storage.data_ptr()
        self.born, self.died = born, None
        self.kind, self.layer, self.line = kind, layer, line

    died: int | None

    def copy(self, born: int, died: int | None, layer: str) -> Piece:
        """Return a storage of equal size and purpose that another layer made at another time."""
        other = copy.copy(self)
        other.address, other.born, other.died, other.layer = 0, born, died, layer
        return other


class Ledger(TorchDispatchMode):
    """Context that records every op, and every storage on ``device``.

    Args:
        model: The model, for the layers.
        device: The device.
        wrap: Returns, for the number of an op, a context in which it runs.
        lines: Whether to record the caller's line for each storage.
        seen: Called with number, function, arguments and result after each op that did not raise.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        wrap: Callable[[int], Any] | None = None,
        lines: bool = False,
        seen: Callable[[int, Any, tuple[Any, ...], dict[str, Any], Any], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self.device = model, device
        self.ops: list[Op] = []
        self.pieces: list[Piece] = []
        self._steps: dict[int, list[int]] = {}  # by optimizer, the ops before each step's end
        self.live = 0
        self._wrap, self._lines, self._seen = wrap, lines, seen
        self._open: dict[int, tuple[weakref.ref[Any], Piece]] = {}
        self._names = {module: name or type(model).__name__ for name, module in model.named_modules()}
        self._of_parameter: dict[int, str] = {}
        self._inside: list[str] = []
        self._stepping = False
        self._nodes: list[int] = []
        self._node_layers: list[str] = []
        self._exits = ExitStack()

    # -- entering and leaving ------------------------------------------------------------------------------------
    def __enter__(self) -> Ledger:
        self._write_down_model()
        keep = self._exits.callback
        for handle in (
            hooks.register_module_forward_pre_hook(self._enter_module),
            hooks.register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
            self.model.register_forward_pre_hook(self._given, with_kwargs=True),
        ):
            keep(handle.remove)
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.is_leaf:
                keep(parameter.register_post_accumulate_grad_hook(self._accumulated).remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._exits.close()
        self._write_down_gradients()
        self._inside.clear()

    def _write_down_model(self) -> None:
        owners = {
            id(tensor): self._names[module]
            for module in self.model.modules()
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None
        }
        for kind, tensors in (("parameters", self.model.parameters()), ("buffers", self.model.buffers())):
            for tensor in tensors:
                self.claim(tensor, kind, owners[id(tensor)])
                self._of_parameter[id(tensor)] = owners[id(tensor)]
        self._write_down_gradients()

    def _write_down_gradients(self) -> None:
        for parameter in self.model.parameters():
            self._accumulated(parameter)

    def baseline(self) -> None:
        """Record all other tensors of the process: optimizer states by name, the rest as ``other``."""
        parameters = {id(p) for p in self.model.parameters()}
        objects = gc.get_objects()
        for obj in objects:
            if issubclass(type(obj), Optimizer) and any(
                id(p) in parameters for g in obj.param_groups for p in g["params"]
            ):
                self._after_step(obj, (), {}, count=False)
        for obj in objects:
            if type(obj) in (Tensor, nn.Parameter) and obj.device == self.device:
                self.claim(obj, None, OUTSIDE)

    @property
    def steps(self) -> list[int]:
        """Number of ops at the end of each step, for the optimizer with the most steps."""
        return max(self._steps.values(), key=len, default=[])

    def owner(self, parameter: Tensor) -> str:
        """Return the layer of a parameter."""
        return self._of_parameter.get(id(parameter), OUTSIDE)

    def births(self, tensors: Iterable[Tensor]) -> list[int]:
        """Return the numbers of the ops that made tensors, as far as known."""
        keys = [storage._cdata for tensor in tensors for storage in _storages(tensor)]
        return [self._open[key][1].born for key in keys if key in self._open]

    # -- what a storage is ---------------------------------------------------------------------------------------
    def claim(self, tensors: Any, kind: str | None, layer: str | None = None) -> None:
        """Set the kind and layer of the storages of a tree of tensors."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor) and tensor.device == self.device:
                for storage in _storages(tensor):
                    piece = self._piece(storage, OUTSIDE if layer is None else layer)
                    if piece is None or kind is None or piece.kind in ("parameters", "buffers"):
                        continue
                    if kind != "inputs" or piece.layer == OUTSIDE:  # a model may be called with its own outputs
                        piece.kind = kind
                        piece.layer = piece.layer if layer is None else layer

    def _piece(self, storage: torch.UntypedStorage, layer: str, kind: str | None = None) -> Piece | None:
        key = storage._cdata
        known = self._open.get(key)
        if known is not None:
            return known[1]
        if storage.nbytes() == 0 or _is_file(storage):
            return None
        line = _caller() if self._lines and self.ops else ""
        try:
            piece = Piece(storage, len(self.ops) - 1, kind, layer, line)
        except RuntimeError:  # a storage without memory, as tracing may leave behind
            return None
        self.pieces.append(piece)
        self.live += piece.bytes
        self._open[key] = (weakref.ref(storage, partial(_gone, weakref.ref(self), key)), piece)
        return piece

    def _accumulated(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.claim(parameter.grad, "gradients", self.owner(parameter))

    # -- layer and phase -----------------------------------------------------------------------------------------
    def _given(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.claim((args, kwargs), "inputs")

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        name = self._names.get(module)
        if module is self.model and not self._inside:
            self._stepping = False  # in case a step has raised
        self._inside.append((self._inside[-1] if self._inside else OUTSIDE) if name is None else name)
        self._note_nodes()

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._inside and not torch.compiler.is_compiling():
            self._inside.pop()
            self._note_nodes()

    def _note_nodes(self) -> None:
        """Record that autograd nodes created from now on belong to the current layer."""
        if torch.is_grad_enabled():
            self._nodes.append(sequence_number())
            self._node_layers.append(self._inside[-1] if self._inside else OUTSIDE)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepping = True

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any, count: bool = True) -> None:
        for parameter, state in optimizer.state.items():
            layer = self.owner(parameter)
            for name, value in state.items() if isinstance(state, dict) else ():
                self.claim(value, "master copies" if name in MASTER_STATES else "optimizer state", layer)
        if count:
            self._stepping = False
            self._steps.setdefault(id(optimizer), []).append(len(self.ops))

    def _place(self) -> tuple[str, str]:
        """Return the layer and the phase of the next op."""
        if graph_task() == -1:
            if self._stepping and not self._inside:  # forward and backward of a closure keep their phases
                return "(optimizer)", "step"
            return (self._inside[-1] if self._inside else OUTSIDE), "forward"
        if torch.is_grad_enabled() and self._inside:
            return self._inside[-1], "recomputation"
        node = current_node()
        number = -1 if node is None else node._sequence_nr()
        index = bisect_right(self._nodes, number) - 1 if 0 <= number < 1 << 62 else -1
        return (self._node_layers[index] if index >= 0 else OUTSIDE), "backward"

    # -- ops -----------------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # the most frequent op; its own mode would be slower
        kwargs = kwargs or {}
        if func.namespace in _ASIDE:
            return func(*args, **kwargs)
        layer, phase = self._place()
        number = len(self.ops)
        self.ops.append(Op(_name(func), layer, phase))
        if self._wrap is None:
            out = func(*args, **kwargs)
        else:
            with self._wrap(number):
                out = func(*args, **kwargs)
        if self._seen is not None:
            self._seen(number, func, args, kwargs, out)
        kind = None if phase == "step" else _inherited(self._kinds(tensors_of(args, kwargs)))
        for tensor in tensors_of(out):
            if tensor.device == self.device:
                for storage in _storages(tensor):
                    self._piece(storage, layer, kind)
        return out

    def _kinds(self, tensors: Iterable[Tensor]) -> Iterable[str | None]:
        for tensor in tensors:
            for storage in _storages(tensor):
                # An unknown storage was made outside of all modes.
                piece = self._piece(storage, self.ops[-1].layer) if tensor.device == self.device else None
                yield None if piece is None else piece.kind


def _gone(ledger: weakref.ref[Ledger], key: int, storage: Any) -> None:
    """Record that a storage was freed, unless the ledger is gone already."""
    if (book := ledger()) is not None:
        _, piece = book._open.pop(key)
        piece.died = max(len(book.ops) - 1, piece.born)
        book.live -= piece.bytes


#: Names of ops, cached because torch builds the string at each request.
_name = cache(str)


def _inherited(kinds: Iterable[str | None]) -> str | None:
    known = list(kinds)
    return "weight copies" if known and all(kind in _OF_WEIGHTS for kind in known) else None


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """Return the storages of a tensor; for a wrapper subclass those of its inner tensors."""
    parts = getattr(type(tensor), "__tensor_flatten__", None)
    if parts is not None:
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return [storage for name in names for storage in _storages(getattr(tensor, name))]
    try:
        return [tensor.untyped_storage()]
    except (NotImplementedError, RuntimeError):  # sparse tensors and the like
        return []


def _is_file(storage: torch.UntypedStorage) -> bool:
    """Return whether the storage is a memory-mapped file, which no allocator holds."""
    return storage.device.type == "cpu" and storage.filename is not None


def _caller() -> str:
    """Return the file and line of the innermost frame outside of torch and lowbit."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH, _LOWBIT, "<")):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
