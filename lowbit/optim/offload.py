"""States of any optimizer in host memory or in files, and gradients too: parameters step a few at a time.

Source: Ren et al., "ZeRO-Offload", arXiv 2101.06840, and "ZeRO-Infinity", arXiv 2104.07857, whose states go to disk.
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

#: Parameters step together up to this many bytes of them, so that small ones cost no step each.
CHUNK_BYTES = 16 << 20
#: States of fewer bytes stay where they are.
LEAST_BYTES = 4096
#: The attribute of an optimizer that says what is offloaded.
OFFLOADED = "_lowbit_offload"

_Any = TypeVar("_Any", bound=torch.optim.Optimizer)
_Place = tuple[dict[str, Any], int]


def offload_(optimizer: _Any, to: str | os.PathLike[str] = "cpu", gradients: bool = False) -> _Any:
    """Keep the states of ``optimizer``, masters too, in ``to``; it stays the same object, and is returned.

    ``to``: ``"cpu"``, pinned memory of the host, for parameters on CUDA devices; or a directory, in whose files
    states are mapped into memory. A step brings the states of a few parameters at a time to their device, and has the
    bits that it has without. Schedulers, clipping, accumulation, ``zero_grad``, ``add_param_group``, ``state_dict`` and
    ``load_state_dict`` work as before; hooks of steps run once a step.

    ``gradients``: they move as they appear, and add up in ``to``. In files each stays ``param.grad``. Those of
    parameters on CUDA devices are in host memory, ``param.grad`` is None, ``step`` uses them up, ``zero_grad`` of the
    optimizer drops them, and clipping is ``lowbit.optim.clip_grad_norm_(optimizer, ...)``; a ``LossScaler`` or
    ``GradScaler`` raises, as it finds no gradients.

    Files belong to this process, and go with it. After a crash the next call for the same directory removes
    them: a half-written step is never read, and training resumes from the last ``state_dict`` that was saved.

    Room is made before anything moves: for all states of a step before it, for all gradients when the first appears. So
    an OSError of a full disk leaves weights and states as they were, and the step can be made again.

    Raises TypeError for what is no optimizer, for LBFGS, whose step needs all parameters at once, and for DTensors;
    ValueError for an optimizer that is offloaded already, steps in backward, or has a ``step`` of its own, for
    parameters on the meta device, and for ``"cpu"`` where all are on the CPU; OSError where the disk has no room.
    """
    _check(optimizer, to)
    before = vars(optimizer).get("step"), vars(optimizer).get("zero_grad")
    offload = _Offload(None if to == "cpu" else ScratchDirectory(to), gradients, before)
    offload.make_room(optimizer, list(_places(optimizer)), "optim.offload_: the optimizer is as it was")
    offload.park(optimizer, list(_params(optimizer)))
    setattr(optimizer, OFFLOADED, offload)
    replace_step_(optimizer, _step, "optim.offload_")
    optimizer.zero_grad = WeakMethod(_zero_grad, optimizer)  # type: ignore[method-assign]
    offload.hooks.append(optimizer.register_load_state_dict_post_hook(_loaded))
    offload.watch(optimizer)
    return optimizer


def unoffload_(optimizer: _Any) -> _Any:
    """Undo ``offload_``: states are beside their parameters again. An optimizer that is not offloaded stays as it is.

    Gradients that wait in host memory become ``param.grad``.
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
    """``torch.nn.utils.clip_grad_norm_`` of an optimizer's gradients, wherever ``offload_`` has put them.

    Returns the norm before. On CUDA devices with ``offload_(..., gradients=True)`` it is computed on the host.
    Raises ValueError for an optimizer that steps in the backward pass.
    """
    if getattr(optimizer, "in_backward", False):
        raise ValueError(refusal("in_backward clip", "optim.clip_grad_norm_"))
    offload: _Offload | None = getattr(optimizer, OFFLOADED, None)
    waiting = {} if offload is None else offload.gradients
    given = [waiting.get(param, param.grad) for param in _params(optimizer)]
    gradients = [gradient for gradient in given if gradient is not None]
    if waiting:
        torch.cuda.synchronize()  # copies to the host are under way
    norm = torch.nn.utils.get_total_norm(gradients, norm_type)
    for gradient in gradients:
        gradient.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0).to(gradient.device))
    return norm


# -- what is offloaded -------------------------------------------------------------------------------------------------
class _Offload:
    """Where the states of one optimizer are. ``states``: the tensors in ``to``, by parameter and name."""

    def __init__(self, files: ScratchDirectory | None, gradients: bool, before: tuple[Any, Any]) -> None:
        self.files, self.moves_gradients, self.before = files, gradients, before
        self.states: dict[Tensor, dict[str, Tensor]] = {}
        self.gradients: dict[Tensor, Tensor] = {}  # of parameters on CUDA devices
        self.hooks: list[Any] = []
        self.watched: dict[Tensor, Any] = {}
        self.coming: dict[Any, dict[str, Tensor] | None] = {}  # by what parameters are alike in

    def home(self, param: Tensor, name: str, like: Tensor) -> Tensor:
        """The tensor in ``to`` of that name, made where there is none of its shape and dtype."""
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
        """Whether a state gains by being in ``to``."""
        large = isinstance(value, Tensor) and value.nbytes >= LEAST_BYTES
        return large and (self.files is not None or value.device.type == "cuda")

    # -- room --------------------------------------------------------------------------------------------------------
    def make_room(
        self, optimizer: torch.optim.Optimizer, places: list[_Place], left: str, coming: bool = False
    ) -> set[Tensor]:
        """Files for the states of these parameters, all of them or none.

        Args:
            optimizer: The optimizer.
            places: Its parameters.
            left: What an error says of the state that it leaves.
            coming: Whether there is to be room for states that the first step will make.

        Returns:
            The parameters whose first step needs data, so that nobody knows what it makes.

        Raises:
            OSError: The disk has no room; nothing has changed.
        """
        unknown: set[Tensor] = set()
        if self.files is None:
            return unknown
        with self._all_or_none(left):
            for group, place in places:
                param = group["params"][place]
                states: dict[str, Any] | None = optimizer.state.get(param)
                if not states and coming:
                    key = (id(group), param.shape, param.stride(), param.dtype, param.device)
                    if key not in self.coming:
                        self.coming[key] = states_to_come(optimizer, group, place)
                    states = self.coming[key]
                    if states is None:
                        unknown.add(param)
                for name, like in (states or {}).items():
                    if self.moves(like):
                        self.home(param, name, like)
        return unknown

    def _make_room_for_gradients(self) -> None:
        """Files for all gradients that move. Raises OSError where the disk has no room, with nothing changed."""
        left = "No weight has changed: drop the gradients of this backward pass (zero_grad), and make room"
        with self._all_or_none(left):
            for param in self.watched:
                if param.nbytes and param.device.type == "cpu":
                    self.home(param, ".grad", param.detach())

    @contextmanager
    def _all_or_none(self, left: str) -> Iterator[None]:
        """An error inside leaves no file that was made inside. ``left``: what it says of the state that it leaves."""
        before = {param: dict(homes) for param, homes in self.states.items()}
        try:
            yield
        except OSError as error:
            self.states = before  # which frees the files
            raise OSError(error.errno, f"{error.strerror}. {left}", error.filename) from error

    # -- a step ------------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def fetch(self, optimizer: torch.optim.Optimizer, places: list[_Place]) -> None:
        """The states and gradients of these parameters, on their devices."""
        for group, place in places:
            param = group["params"][place]
            if param in self.gradients:
                param.grad = self.gradients[param].to(param.device, non_blocking=True)
            if param.device.type == "cpu":
                continue  # files are where a step reads and writes
            stream = side_stream(param.device)
            for name, value in self.states.get(param, {}).items():
                with torch.cuda.stream(stream):
                    fetched = value.to(param.device, non_blocking=True)
                fetched.record_stream(torch.cuda.current_stream(param.device))
                optimizer.state[param][name] = fetched
            torch.cuda.current_stream(param.device).wait_stream(stream)

    @torch.no_grad()
    def park(self, optimizer: torch.optim.Optimizer, params: Iterable[Tensor]) -> None:
        """Move the states of these parameters to ``to``, and let go of their pages."""
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
        """Have the gradients of all parameters moved, those of later groups too."""
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
                self._make_room_for_gradients()
            home = self.home(param, ".grad", gradient)
            if gradient is not home:
                param.grad = home.copy_(gradient)
            drop_pages(home)


# -- the methods of an optimizer ---------------------------------------------------------------------------------------
def _call(method: weakref.WeakMethod[Callable[[Tensor], None]], param: Tensor) -> None:
    """A hook that keeps nothing alive: the collector does not see those that a parameter has."""
    found = method()
    if found is not None:
        found(param)


def _step(optimizer: torch.optim.Optimizer) -> None:
    offload: _Offload | None = getattr(optimizer, OFFLOADED, None)
    if offload is None:  # a scheduler that was made meanwhile still calls this
        _advance(optimizer, list(_places(optimizer)))
        return
    places = [place for place in _places(optimizer) if _has_gradient(offload, *place)]
    left = "No weight and no state has changed: make room, and call step() again"
    unknown = offload.make_room(optimizer, places, left, coming=True)
    offload.watch(optimizer)
    if unknown:  # first, while they can go back
        first = [(group, place) for group, place in places if group["params"][place] in unknown]
        places = [(group, place) for group, place in places if group["params"][place] not in unknown]
        with _going_back(optimizer, offload, unknown, left):
            _step_chunks(optimizer, offload, first)
    _step_chunks(optimizer, offload, places)
    for device in {param.device for param in offload.states if param.is_cuda}:
        side_stream(device).synchronize()  # others may read the states from now on


@contextmanager
def _going_back(optimizer: torch.optim.Optimizer, offload: _Offload, params: set[Tensor], left: str) -> Iterator[None]:
    """An error inside leaves these parameters, which have no states yet, as they were."""
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
            raise OSError(error.errno, f"{error.strerror}. {left}", error.filename) from error
        raise


def _step_chunks(optimizer: torch.optim.Optimizer, offload: _Offload, chosen: list[_Place]) -> None:
    for places in _chunks(chosen):
        params = [group["params"][place] for group, place in places]
        try:
            offload.fetch(optimizer, places)
            _advance(optimizer, places)
        finally:
            offload.park(optimizer, params)
            for param in params:
                drop_pages(param)  # a weight that is streamed lies in a file too
                if offload.gradients.pop(param, None) is not None:
                    param.grad = None
                elif offload.moves_gradients and offload.files is not None and param.grad is not None:
                    drop_pages(param.grad)


def _zero_grad(optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
    getattr(optimizer, OFFLOADED).gradients.clear()
    type(optimizer).zero_grad(optimizer, set_to_none)


def _loaded(optimizer: torch.optim.Optimizer) -> None:
    """Move what ``load_state_dict`` has put beside the parameters."""
    offload = getattr(optimizer, OFFLOADED)
    offload.coming.clear()  # the groups are others
    offload.make_room(optimizer, list(_places(optimizer)), "The states are loaded, and are in memory")
    offload.park(optimizer, list(_params(optimizer)))


def _advance(optimizer: torch.optim.Optimizer, places: list[_Place]) -> None:
    """A step of some parameters, without the hooks of steps."""
    if isinstance(optimizer, Optimizer):
        optimizer.advance(places)
        return
    before = [group["params"] for group in optimizer.param_groups]
    chosen = {id(group["params"][place]) for group, place in places}
    try:
        for group in optimizer.param_groups:
            group["params"] = [param for param in group["params"] if id(param) in chosen]
        plain_step(optimizer)
    finally:
        for group, params in zip(optimizer.param_groups, before, strict=True):
            group["params"] = params


def _places(optimizer: torch.optim.Optimizer) -> Iterator[_Place]:
    return ((group, place) for group in optimizer.param_groups for place in range(len(group["params"])))


def _params(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (group["params"][place] for group, place in _places(optimizer))


def _has_gradient(offload: _Offload, group: dict[str, Any], place: int) -> bool:
    param = group["params"][place]
    return param.grad is not None or param in offload.gradients


def _chunks(places: list[_Place]) -> Iterator[list[_Place]]:
    """A few parameters at a time."""
    chunk: list[_Place] = []
    size = 0
    for group, place in places:
        param = group["params"][place]
        if chunk and size + param.nbytes > CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append((group, place))
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
            "optim.offload_: expected parameters with data, and some are on the meta device; load the model first, and "
            "make the optimizer of its parameters"
        )
    if to == "cpu" and devices == {"cpu"}:
        raise ValueError(
            'optim.offload_: to="cpu" is for parameters on CUDA devices, and these are on the CPU, as are their '
            "states; give a directory, in whose files they take no memory"
        )
