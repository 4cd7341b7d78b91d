"""Offload of any optimizer's states and gradients to host memory or files.

Source: Ren et al., "ZeRO-Offload", arXiv 2101.06840, and "ZeRO-Infinity", arXiv 2104.07857, for states on disk.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from lowbit.combinations import refusal
from lowbit.optim.base import Optimizer
from lowbit.optim.outlook import states_to_come
from lowbit.optim.plain import WeakMethod, plain_step, replace_step_, require_own_step
from lowbit.storage.directory import ScratchDirectory
from lowbit.storage.mapped import drop_pages, mapped_like
from lowbit.storage.targets import side_stream
from lowbit.torch_private import FakeTensor

__all__ = ["CHUNK_BYTES", "LEAST_BYTES", "OFFLOADED", "clip_grad_norm_", "offload_", "unoffload_"]

#: Parameters step together up to this many bytes, so that small ones need no step each.
CHUNK_BYTES = 16 << 20
#: States with fewer bytes are not offloaded.
LEAST_BYTES = 4096
#: The attribute of an optimizer with its ``_Offload``.
OFFLOADED = "_lowbit_offload"

_Any = TypeVar("_Any", bound=torch.optim.Optimizer)
_Slot = tuple[dict[str, Any], int]


def offload_(optimizer: _Any, to: str | os.PathLike[str] = "cpu", gradients: bool = False) -> _Any:
    """Offload the states of ``optimizer``, with master weights, to host memory or files.

    A step loads the states of a few parameters at a time, and is bit-identical to the step without offload.
    Schedulers, clipping, gradient accumulation, ``zero_grad``, ``add_param_group``, ``state_dict`` and
    ``load_state_dict`` work as before. Step hooks run once per step.

    Files belong to this process and are removed with it. After a crash, the next call for the same directory removes
    them. A half-written step is never read: training resumes from the last saved ``state_dict``.

    Disk space is allocated before anything moves: for all states before a step, and for all gradients when the first
    one appears. So after an OSError for a full disk, weights and states are unchanged and the step can be repeated.

    Args:
        optimizer: Any optimizer except LBFGS.
        to: ``"cpu"`` for pinned host memory, if parameters are on CUDA devices; or a directory, whose files are mapped
            into memory.
        gradients: Also offload gradients, which then accumulate in ``to``. With a directory and parameters on the CPU,
            ``param.grad`` is the mapped tensor. For parameters on CUDA devices, gradients are in host memory and
            ``param.grad`` is None. ``step`` and ``zero_grad`` of the optimizer free them. Clip with
            ``lowbit.optim.clip_grad_norm_(optimizer, ...)``. A ``LossScaler`` or ``GradScaler`` then raises an error,
            because it finds no gradients.

    Returns:
        The same optimizer.

    Raises:
        TypeError: ``optimizer`` is not an optimizer, or LBFGS, whose step needs all parameters at once. Parameters are
            DTensors.
        ValueError: The optimizer is offloaded already, steps in the backward pass, or its ``step`` was replaced.
        ValueError: Parameters are on the meta device, or ``to="cpu"`` and all are on the CPU.
        OSError: The disk is full.
    """
    _check(optimizer, to)
    before = vars(optimizer).get("step"), vars(optimizer).get("zero_grad")
    offload = _Offload(None if to == "cpu" else ScratchDirectory(to), gradients, before)
    offload.allocate(optimizer, list(_slots(optimizer)), "optim.offload_: the optimizer has not changed")
    offload.park(optimizer, list(_params(optimizer)))
    setattr(optimizer, OFFLOADED, offload)
    replace_step_(optimizer, _step, "optim.offload_")
    optimizer.zero_grad = WeakMethod(_zero_grad, optimizer)  # type: ignore[method-assign]
    offload.hooks.append(optimizer.register_load_state_dict_post_hook(_loaded))
    offload.watch(optimizer)
    return optimizer


def unoffload_(optimizer: _Any) -> _Any:
    """Undo ``offload_``: move states back to the devices of their parameters.

    Gradients in host memory become ``param.grad``.

    Args:
        optimizer: Any optimizer. One that is not offloaded does not change.

    Returns:
        The same optimizer.
    """
    offload: _Offload | None = getattr(optimizer, OFFLOADED, None)
    if offload is None:
        return optimizer
    try:
        for param in _params(optimizer):
            for key, value in offload.states.get(param, {}).items():
                if optimizer.state.get(param, {}).get(key) is value:
                    optimizer.state[param][key] = value.to(param.device, copy=True)
    except BaseException:  # no memory for all of them
        offload.park(optimizer, _params(optimizer))
        raise
    for param in _params(optimizer):
        if param in offload.gradients:
            param.grad = offload.gradients.pop(param).to(param.device)
        elif offload.files is not None and param.grad is not None:
            param.grad = param.grad.clone()
    for hook in (*offload.hooks, *offload.watched.values()):
        hook.remove()
    for name, value in zip(("step", "zero_grad"), offload.before, strict=True):
        vars(optimizer).pop(name)
        if value is not None:
            setattr(optimizer, name, value)
    delattr(optimizer, OFFLOADED)
    return optimizer


@torch.no_grad()
def clip_grad_norm_(optimizer: torch.optim.Optimizer, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for an optimizer's gradients, offloaded or not.

    After ``offload_(..., gradients=True)`` for parameters on CUDA devices, the norm is computed on the host.

    Args:
        optimizer: Any optimizer.
        max_norm: Upper bound of the norm.
        norm_type: Order of the norm.

    Returns:
        The norm before clipping.

    Raises:
        ValueError: The optimizer steps in the backward pass.
    """
    if getattr(optimizer, "in_backward", False):
        raise ValueError(refusal("in_backward clip", "optim.clip_grad_norm_"))
    offload: _Offload | None = getattr(optimizer, OFFLOADED, None)
    offloaded = {} if offload is None else offload.gradients
    candidates = (offloaded.get(param, param.grad) for param in _params(optimizer))
    gradients = [gradient for gradient in candidates if gradient is not None]
    if offloaded:
        torch.cuda.synchronize()  # copies to the host may be running
    norm = torch.nn.utils.get_total_norm(gradients, norm_type)
    for gradient in gradients:
        gradient.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0).to(gradient.device))
    return norm


# -- offloaded tensors -------------------------------------------------------------------------------------------------
class _Offload:
    """The offloaded states and gradients of one optimizer."""

    def __init__(self, files: ScratchDirectory | None, gradients: bool, before: tuple[Any, Any]) -> None:
        self.files, self.moves_gradients, self.before = files, gradients, before
        self.states: dict[Tensor, dict[str, Tensor]] = {}  # in host memory or files, by parameter and name
        self.gradients: dict[Tensor, Tensor] = {}  # in host memory, for parameters on CUDA devices
        self.hooks: list[Any] = []
        self.watched: dict[Tensor, Any] = {}  # hooks by parameter
        self.coming: dict[Any, dict[str, Tensor] | None] = {}  # states of the first step, by group, shape and so on

    def home(self, param: Tensor, name: str, like: Tensor) -> Tensor:
        """The offloaded tensor with this name, created if there is none with the shape and dtype of ``like``."""
        homes = self.states.setdefault(param, {})
        known = homes.get(name)
        if known is None or (known.shape, known.dtype) != (like.shape, like.dtype):
            if self.files is not None:
                known = mapped_like(like, self.files)
            else:
                known = torch.empty_like(like, device="cpu", pin_memory=True)
            homes[name] = known
        return known

    def moves(self, value: Any) -> bool:
        """Whether a state is offloaded."""
        large = isinstance(value, Tensor) and value.nbytes >= LEAST_BYTES
        return large and (self.files is not None or value.device.type == "cuda")

    # -- disk space --------------------------------------------------------------------------------------------------
    def allocate(
        self, optimizer: torch.optim.Optimizer, slots: list[_Slot], outcome: str, coming: bool = False
    ) -> set[Tensor]:
        """Create files for the states of these parameters, all or none.

        Args:
            optimizer: The optimizer.
            slots: The parameters.
            outcome: Sentence for errors that says what has changed and what to do.
            coming: Whether to include states that the first step will create.

        Returns:
            The parameters whose first step needs data, so that their states are not known yet.

        Raises:
            OSError: The disk is full. Nothing has changed.
        """
        unknown: set[Tensor] = set()
        if self.files is None:
            return unknown
        with self._all_or_none(outcome):
            for group, index in slots:
                param = group["params"][index]
                states: dict[str, Any] | None = optimizer.state.get(param)
                if not states and coming:
                    key = (id(group), param.shape, param.stride(), param.dtype, param.device)
                    if key not in self.coming:
                        self.coming[key] = states_to_come(optimizer, group, index)
                    states = self.coming[key]
                    if states is None:
                        unknown.add(param)
                for name, like in (states or {}).items():
                    if self.moves(like):
                        self.home(param, name, like)
        return unknown

    def _allocate_gradients(self) -> None:
        outcome = "No weight has changed: drop the gradients of this backward pass (zero_grad), and make room"
        with self._all_or_none(outcome):
            for param in self.watched:
                if param.nbytes and param.device.type == "cpu":
                    self.home(param, ".grad", param.detach())

    @contextmanager
    def _all_or_none(self, outcome: str) -> Iterator[None]:
        """After an OSError inside, remove the files that were created inside, and add ``outcome`` to the message."""
        before = {param: dict(homes) for param, homes in self.states.items()}
        try:
            yield
        except OSError as error:
            self.states = before  # frees the files
            raise OSError(error.errno, f"{error.strerror}. {outcome}", error.filename) from error

    # -- a step ------------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def fetch(self, optimizer: torch.optim.Optimizer, slots: list[_Slot]) -> None:
        """Copy the states and gradients of these parameters to their devices."""
        for group, index in slots:
            param = group["params"][index]
            if param in self.gradients:
                param.grad = self.gradients[param].to(param.device, non_blocking=True)
            if param.device.type == "cpu":
                continue  # the step works on the mapped tensors
            stream = side_stream(param.device)
            for name, value in self.states.get(param, {}).items():
                with torch.cuda.stream(stream):
                    fetched = value.to(param.device, non_blocking=True)
                fetched.record_stream(torch.cuda.current_stream(param.device))
                optimizer.state[param][name] = fetched
            torch.cuda.current_stream(param.device).wait_stream(stream)

    @torch.no_grad()
    def park(self, optimizer: torch.optim.Optimizer, params: Iterable[Tensor]) -> None:
        """Offload the states of these parameters, and drop the pages of mapped ones."""
        for param in params:
            for name, value in optimizer.state.get(param, {}).items():
                if not self.moves(value):
                    continue
                home = self.home(param, name, value)
                if home is not value:
                    if value.is_cuda:
                        side_stream(value.device).wait_stream(torch.cuda.current_stream(value.device))
                        with torch.cuda.stream(side_stream(value.device)):
                            home.copy_(value, non_blocking=True)
                        value.record_stream(side_stream(value.device))
                    else:
                        home.copy_(value)
                    optimizer.state[param][name] = home
            if self.files is not None:
                for home in self.states.get(param, {}).values():
                    drop_pages(home)

    # -- gradients ---------------------------------------------------------------------------------------------------
    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Register the hooks that offload gradients, also for parameters of groups that were added later."""
        for param in _params(optimizer) if self.moves_gradients else ():
            if param not in self.watched and param.requires_grad:
                hook = partial(_call, weakref.WeakMethod(self._move_gradient))
                self.watched[param] = param.register_post_accumulate_grad_hook(hook)
                if param.grad is not None:
                    self._move_gradient(param)

    @torch.no_grad()
    def _move_gradient(self, param: Tensor) -> None:
        gradient = param.grad
        if gradient is None or gradient.layout is not torch.strided:
            return
        if param.is_cuda:
            if param in self.gradients:
                self.gradients[param].add_(gradient.cpu())
            else:
                home = torch.empty_like(gradient, device="cpu", pin_memory=True)
                self.gradients[param] = home.copy_(gradient, non_blocking=True)
            param.grad = None
        elif self.files is not None and gradient.nbytes:
            if ".grad" not in self.states.get(param, {}):
                self._allocate_gradients()
            home = self.home(param, ".grad", gradient)
            if gradient is not home:
                param.grad = home.copy_(gradient)
            drop_pages(home)


# -- the methods of an optimizer ---------------------------------------------------------------------------------------
def _call(method: weakref.WeakMethod[Callable[[Tensor], None]], param: Tensor) -> None:
    """A hook with a weak reference, because the garbage collector does not see the hooks of a parameter."""
    move = method()
    if move is not None:
        move(param)


def _step(optimizer: torch.optim.Optimizer) -> None:
    offload: _Offload | None = getattr(optimizer, OFFLOADED, None)
    if offload is None:  # a scheduler that was created before unoffload_ still calls this
        _advance(optimizer, list(_slots(optimizer)))
        return
    slots = [slot for slot in _slots(optimizer) if _has_gradient(offload, *slot)]
    outcome = "No weight and no state has changed: make room, and call step() again"
    unknown = offload.allocate(optimizer, slots, outcome, coming=True)
    offload.watch(optimizer)
    if unknown:  # these step first, as long as an error can be undone
        first = [(group, index) for group, index in slots if group["params"][index] in unknown]
        slots = [(group, index) for group, index in slots if group["params"][index] not in unknown]
        with _undone_after_errors(optimizer, offload, unknown, outcome):
            _step_chunks(optimizer, offload, first)
    _step_chunks(optimizer, offload, slots)
    for device in {param.device for param in offload.states if param.is_cuda}:
        side_stream(device).synchronize()  # other code may read the states from now on


@contextmanager
def _undone_after_errors(
    optimizer: torch.optim.Optimizer, offload: _Offload, params: set[Tensor], outcome: str
) -> Iterator[None]:
    """After an error inside, restore the weights of these parameters, which had no states before."""
    weights = {param: param.detach().clone() for param in params}
    try:
        yield
    except BaseException as error:
        for param, weight in weights.items():
            param.detach().copy_(weight)
            optimizer.state.pop(param, None)
            for name in [name for name in offload.states.get(param, ()) if name != ".grad"]:
                del offload.states[param][name]
        if isinstance(error, OSError):
            raise OSError(error.errno, f"{error.strerror}. {outcome}", error.filename) from error
        raise


def _step_chunks(optimizer: torch.optim.Optimizer, offload: _Offload, slots: list[_Slot]) -> None:
    for chunk in _chunks(slots):
        params = [group["params"][index] for group, index in chunk]
        try:
            offload.fetch(optimizer, chunk)
            _advance(optimizer, chunk)
        finally:
            offload.park(optimizer, params)
            for param in params:
                drop_pages(param)  # the weights of streamed blocks are in files too
                if offload.gradients.pop(param, None) is not None:
                    param.grad = None
                elif offload.moves_gradients and offload.files is not None and param.grad is not None:
                    drop_pages(param.grad)


def _zero_grad(optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
    getattr(optimizer, OFFLOADED).gradients.clear()
    type(optimizer).zero_grad(optimizer, set_to_none)


def _loaded(optimizer: torch.optim.Optimizer) -> None:
    """Offload the states that ``load_state_dict`` has created."""
    offload = getattr(optimizer, OFFLOADED)
    offload.coming.clear()  # the groups are new
    offload.allocate(optimizer, list(_slots(optimizer)), "The states are loaded, and are in memory")
    offload.park(optimizer, list(_params(optimizer)))


def _advance(optimizer: torch.optim.Optimizer, slots: list[_Slot]) -> None:
    """Step some parameters, without step hooks."""
    if isinstance(optimizer, Optimizer):
        optimizer.advance(slots)
        return
    before = [group["params"] for group in optimizer.param_groups]
    chosen = {id(group["params"][index]) for group, index in slots}
    try:
        for group in optimizer.param_groups:
            group["params"] = [param for param in group["params"] if id(param) in chosen]
        plain_step(optimizer)
    finally:
        for group, params in zip(optimizer.param_groups, before, strict=True):
            group["params"] = params


def _slots(optimizer: torch.optim.Optimizer) -> Iterator[_Slot]:
    return ((group, index) for group in optimizer.param_groups for index in range(len(group["params"])))


def _params(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (group["params"][index] for group, index in _slots(optimizer))


def _has_gradient(offload: _Offload, group: dict[str, Any], index: int) -> bool:
    param = group["params"][index]
    return param.grad is not None or param in offload.gradients


def _chunks(slots: list[_Slot]) -> Iterator[list[_Slot]]:
    """The parameters in chunks of up to ``CHUNK_BYTES``, at least one parameter each."""
    chunk: list[_Slot] = []
    size = 0
    for group, index in slots:
        param = group["params"][index]
        if chunk and size + param.nbytes > CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append((group, index))
        size += param.nbytes
    if chunk:
        yield chunk


def _check(optimizer: Any, to: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optim.offload_: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("optim.offload_: a step of LBFGS needs all parameters at once; use another optimizer")
    if any(hasattr(param, "placements") for param in _params(optimizer)):
        raise TypeError(refusal("offload dtensor", "optim.offload_"))
    if hasattr(optimizer, OFFLOADED):
        raise ValueError("optim.offload_: the optimizer is offloaded already; call lowbit.optim.unoffload_ first")
    if getattr(optimizer, "in_backward", False):
        raise ValueError(refusal("in_backward offload", "optim.offload_"))
    require_own_step(optimizer, "optim.offload_")
    if any(isinstance(param, FakeTensor) for param in _params(optimizer)):
        raise ValueError(refusal("offload estimate", "optim.offload_"))
    devices = {param.device.type for param in _params(optimizer)}
    if "meta" in devices:
        raise ValueError(
            "optim.offload_: expected parameters with data, but some are on the meta device; load the model first, and "
            "create the optimizer for its parameters"
        )
    if to == "cpu" and devices == {"cpu"}:
        raise ValueError(
            'optim.offload_: to="cpu" is for parameters on CUDA devices, but these are on the CPU, as are their '
            "states; give a directory, so that they are in files"
        )
