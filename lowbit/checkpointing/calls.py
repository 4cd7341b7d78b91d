"""State that a module call depends on besides its arguments, recorded in forward and restored for its recomputation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from lowbit.autograd import backend_now, on_backend
from lowbit.torch_private import NormBase

__all__ = ["Buffers", "CallState", "Contexts", "Flags", "Random", "Weights", "gather", "unmoved", "version_of"]

#: Returns the contexts of a call in forward and in backward, like ``context_fn`` of torch.utils.checkpoint.
Contexts = Callable[[], tuple[Any, Any]]


class Random:
    """State of the random generators that a call may use: the CPU's and those of its tensors' devices."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        tensors = list(tensors)
        self.cpu = torch.get_rng_state()
        self.kind = next((t.device.type for t in tensors if t.device.type not in ("cpu", "meta")), None)
        self.devices, self.states = get_device_states(*tensors) if self.kind else ([], [])

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.kind:
            set_device_states(self.devices, self.states, device_type=self.kind)


#: Getters and setters of torch settings that select kernels and dtypes, and that may be set during the forward only.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
)


@contextmanager
def _with_settings(values: list[Any]) -> Iterator[None]:
    current = [get() for get, _ in _SETTINGS]
    changed = [
        (setter, value, present)
        for (_, setter), value, present in zip(_SETTINGS, values, current, strict=True)
        if value != present
    ]
    try:
        for setter, value, _ in changed:
            setter(value)
        yield
    finally:
        for setter, _, present in changed:
            setter(present)


class CallState:
    """Random state, autocast, backend and torch settings, recorded when created."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        tensors = list(tensors)
        self.random = Random(tensors)
        kinds = {"cpu", *(t.device.type for t in tensors)}
        self.autocasts = [_autocast(kind) for kind in sorted(kinds) if torch.amp.is_autocast_available(kind)]
        self.backend = backend_now()
        self.settings = [get() for get, _ in _SETTINGS]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context with the recorded state; the random state advances from there."""
        self.random.restore()
        with ExitStack() as entered:
            for kind, settings in self.autocasts:
                entered.enter_context(torch.autocast(kind, **settings))
            entered.enter_context(on_backend(self.backend))
            entered.enter_context(_with_settings(self.settings))
            yield


def _autocast(kind: str) -> tuple[str, dict[str, Any]]:
    settings = {
        "dtype": torch.get_autocast_dtype(kind),
        "enabled": torch.is_autocast_enabled(kind),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }
    return kind, settings


@contextmanager
def unmoved(module: nn.Module) -> Iterator[None]:
    """Context after which running statistics of BatchNorm are as before it: only forward updates them."""
    norms = [m for m in module.modules() if isinstance(m, NormBase) and m.training and m.track_running_stats]
    copies = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers(recurse=False)]
    try:
        yield
    finally:
        for buffer, copy in copies:
            buffer.data.copy_(copy)  # via data, which leaves the version as it is: backward may have saved the buffer


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor has been written to; 0 for an inference tensor, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


class _Before(NamedTuple):
    """A buffer of a module before a call.

    Attributes:
        place: The dict with the buffer: the module's buffers or its plain attributes.
        name: Its key.
        tensor: The buffer.
        version: Its version.
        numbers: A copy of it; None if it is larger than ``_TABLE``.
    """

    place: dict[str, Any]
    name: str
    tensor: Tensor | None
    version: int
    numbers: Tensor | None

    def has_changed(self) -> bool:
        written = self.tensor is not None and version_of(self.tensor) != self.version
        return written or not self.is_current()

    def is_current(self) -> bool:
        return self.place.get(self.name) is self.tensor


#: Buffers with more elements are taken to be tables, such as masks and positions, and are not copied. A call that
#: changes one cannot be recomputed.
_TABLE = 1 << 20


class Buffers:
    """The buffers that a call changes, as they were before it, for the second run.

    BatchNorm's statistics are excluded, because training does not read them. Small tensors in plain attributes and
    attributes that are None count as buffers, because recurrent layers store states in them.
    """

    def __init__(self, module: nn.Module) -> None:
        norms = {m for m in module.modules() if isinstance(m, NormBase)}
        self._before = [
            _before(place, name, tensor)
            for owner in module.modules()
            if owner not in norms
            for place in (owner._buffers, vars(owner))
            for name, tensor in place.items()
            if place is owner._buffers or _is_state(name, tensor)
        ]

    def called(self) -> str | None:
        """After the call: release unchanged buffers, and return the name of a changed table or None."""
        changed = [buffer for buffer in self._before if buffer.has_changed()]
        # A replaced tensor is released, since its graph may be large.
        self._before = [buffer if buffer.is_current() else buffer._replace(tensor=None) for buffer in changed]
        return next((buffer.name for buffer in changed if buffer.tensor is not None and buffer.numbers is None), None)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context in which the buffers are as before the call; afterwards they are as they are now."""
        current = [buffer.place.get(buffer.name) for buffer in self._before]
        copies = [
            buffer.tensor.detach().clone() if buffer.is_current() and buffer.tensor is not None else None
            for buffer in self._before
        ]
        for buffer, value in zip(self._before, current, strict=True):
            _restore(buffer, buffer.numbers, value)
        try:
            yield
        finally:
            for buffer, value, copy in zip(self._before, current, copies, strict=True):
                buffer.place[buffer.name] = value
                if value is not None and value is buffer.tensor:
                    _restore(buffer, copy, value)


#: Attributes that torch gives every module.
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def _is_state(name: str, value: Any) -> bool:
    """Return whether a plain attribute may be a state that calls read and replace."""
    return name not in _MODULE_ATTRIBUTES and (value is None or (isinstance(value, Tensor) and value.numel() <= _TABLE))


def _before(place: dict[str, Any], name: str, buffer: Tensor | None) -> _Before:
    if buffer is None:
        return _Before(place, name, None, 0, None)
    copy = buffer.detach().clone() if buffer.numel() <= _TABLE else None
    return _Before(place, name, buffer, version_of(buffer), copy)


def _restore(buffer: _Before, numbers: Tensor | None, value: Any) -> None:
    """Restore a buffer: in place if the module still has the same tensor, else by replacing it."""
    if buffer.tensor is not None and value is buffer.tensor and numbers is not None:
        buffer.tensor.data.copy_(numbers)  # via data, as above
    else:
        buffer.place[buffer.name] = numbers


class Flags:
    """Settings of the modules of a call that may change before backward.

    These are training mode, plain numbers and strings such as a dropout probability, and ``requires_grad``.
    """

    def __init__(self, module: nn.Module) -> None:
        self._set = [(vars(owner), _settings(owner)) for owner in module.modules()]
        parameters = () if any(map(_is_sharded, module.modules())) else module.parameters()
        self._grads = [(parameter, parameter.requires_grad) for parameter in parameters if parameter.is_leaf]

    def called(self) -> None:
        """After the call: release values that the call itself has changed, such as a counter, except the mode."""
        self._set = [
            (place, {name: value for name, value in values.items() if name == "training" or place.get(name) == value})
            for place, values in self._set
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context in which the settings are as recorded; afterwards they are as they are now."""
        current = [(place, {name: place[name] for name in values if name in place}) for place, values in self._set]
        switched = [
            (parameter, parameter.requires_grad) for parameter, grad in self._grads if parameter.requires_grad != grad
        ]
        try:
            for place, values in self._set:
                place.update(values)
            for parameter, grad in switched:
                parameter.requires_grad_(not grad)
            yield
        finally:
            for place, values in current:
                place.update(values)
            for parameter, grad in switched:
                parameter.requires_grad_(grad)


def _settings(owner: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(owner).items()
        if name == "training" or (name not in _MODULE_ATTRIBUTES and isinstance(value, bool | int | float | str))
    }


class Weights:
    """The parameters of a module and their versions, recorded when created.

    Parameters that a hook of their gradient updates within backward are excluded, since such changes are intended. So
    are modules sharded by FSDP2, which replaces parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        sharded = any(map(_is_sharded, module.modules()))
        named = () if sharded else module.named_parameters()
        self._seen = {
            name: (ref(weight), weight._version)
            for name, weight in named
            if not weight.is_inference() and not getattr(weight, "_post_accumulate_grad_hooks", None)
        }

    def changed(self, module: nn.Module) -> str | None:
        """Return the name of a parameter of ``module`` that was replaced or written to, or None."""
        now = dict(module.named_parameters()) if self._seen else {}
        for name, (weight, version) in self._seen.items():
            if name not in now or weight() is not now[name] or now[name]._version != version:
                return name
        return None


def _is_sharded(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # importing it takes seconds
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def gather(module: nn.Module) -> None:
    """Gather the parameters of a module sharded by FSDP2.

    FSDP2 itself does so before each module's backward, but a segment is recomputed before the backward of its last
    module.
    """
    if _is_sharded(module):
        module.unshard()  # type: ignore[operator]
