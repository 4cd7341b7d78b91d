"""What one call of a module depends on besides its arguments, and how backward makes the call with it again."""

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

#: Makes the two contexts of a call, in forward and in backward, as torch.utils.checkpoint's ``context_fn``.
Contexts = Callable[[], tuple[Any, Any]]


class Random:
    """The state of the random generators that a call may draw from: the CPU's, and those of its tensors' devices."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        tensors = list(tensors)
        self.cpu = torch.get_rng_state()
        self.kind = next((t.device.type for t in tensors if t.device.type not in ("cpu", "meta")), None)
        self.devices, self.states = get_device_states(*tensors) if self.kind else ([], [])

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.kind:
            set_device_states(self.devices, self.states, device_type=self.kind)


#: Settings of torch that choose among kernels and dtypes, which may be in force for the forward alone: what reads each
#: and what sets it.
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
    now = [get() for get, _ in _SETTINGS]
    changed = [
        (put, value, present)
        for (_, put), value, present in zip(_SETTINGS, values, now, strict=True)
        if value != present
    ]
    try:
        for put, value, _ in changed:
            put(value)
        yield
    finally:
        for put, _, present in changed:
            put(present)


class CallState:
    """Random state, autocast, backend and settings of torch as they are now."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        tensors = list(tensors)
        self.random = Random(tensors)
        kinds = {"cpu", *(t.device.type for t in tensors)}
        self.autocasts = [_autocast(kind) for kind in sorted(kinds) if torch.amp.is_autocast_available(kind)]
        self.backend = backend_now()
        self.settings = [get() for get, _ in _SETTINGS]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within, all is as it was; the random state moves on from there."""
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
    """Afterwards the running statistics of BatchNorm in ``module`` are as before: forward alone moves them."""
    norms = [m for m in module.modules() if isinstance(m, NormBase) and m.training and m.track_running_stats]
    held = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers(recurse=False)]
    try:
        yield
    finally:
        for buffer, before in held:
            buffer.data.copy_(before)  # by data: no version moves, since backward may have saved the buffer


def version_of(tensor: Tensor) -> int:
    """How often a tensor has been written to; 0 of one that does not count."""
    return 0 if tensor.is_inference() else tensor._version


class _Before(NamedTuple):
    """A buffer of a module before a call: the tensor, its version, and a copy of its numbers unless it is a table.

    ``place``: the module's buffers, or its plain attributes.
    """

    place: dict[str, Any]
    name: str
    tensor: Tensor | None
    version: int
    numbers: Tensor | None

    def has_moved(self) -> bool:
        moved = self.tensor is not None and version_of(self.tensor) != self.version
        return moved or not self.is_there()

    def is_there(self) -> bool:
        return self.place.get(self.name) is self.tensor


#: Buffers of more numbers are tables, such as masks and positions: a call that changes one cannot be made again.
_TABLE = 1 << 20


class Buffers:
    """The buffers of a module before a call, of which those that the call has changed are kept: a second run begins
    with what they were then. BatchNorm's statistics are left out, since in training it does not read them. Small
    tensors in plain attributes, and attributes that are None, count as buffers: recurrent layers keep states in them.
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
        """After the call: let go of what has not changed. The name of a table that has, or None."""
        moved = [one for one in self._before if one.has_moved()]
        self._before = [one if one.is_there() else one._replace(tensor=None) for one in moved]  # nor its graph
        return next((one.name for one in moved if one.tensor is not None and one.numbers is None), None)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within, they are as before the call; afterwards as they are now."""
        now = [one.place.get(one.name) for one in self._before]
        numbers = [
            one.tensor.detach().clone() if one.is_there() and one.tensor is not None else None for one in self._before
        ]
        for one, present in zip(self._before, now, strict=True):
            _put(one, one.numbers, present)
        try:
            yield
        finally:
            for one, present, those in zip(self._before, now, numbers, strict=True):
                one.place[one.name] = present
                if present is not None and present is one.tensor:
                    _put(one, those, present)


#: The attributes that torch gives every module.
_OWN = frozenset(vars(nn.Module()))


def _is_state(name: str, value: Any) -> bool:
    """Whether a plain attribute may be a state that calls read and replace."""
    return name not in _OWN and (value is None or (isinstance(value, Tensor) and value.numel() <= _TABLE))


def _before(place: dict[str, Any], name: str, buffer: Tensor | None) -> _Before:
    if buffer is None:
        return _Before(place, name, None, 0, None)
    copy = buffer.detach().clone() if buffer.numel() <= _TABLE else None
    return _Before(place, name, buffer, version_of(buffer), copy)


def _put(one: _Before, numbers: Tensor | None, present: Any) -> None:
    """Numbers into a buffer that is the tensor of before, or in the place of another one."""
    if one.tensor is not None and present is one.tensor and numbers is not None:
        one.tensor.data.copy_(numbers)  # by data: no version moves, since backward may have saved the buffer
    else:
        one.place[one.name] = numbers


class Flags:
    """What is set on the modules of a call from outside: whether each is in training mode, numbers such as the share
    that a dropout drops, and which parameters take gradients. All may be set anew before backward.
    """

    def __init__(self, module: nn.Module) -> None:
        self._set = [(vars(owner), _settings(owner)) for owner in module.modules()]
        parameters = () if any(map(_is_sharded, module.modules())) else module.parameters()
        self._grads = [(parameter, parameter.requires_grad) for parameter in parameters if parameter.is_leaf]

    def called(self) -> None:
        """After the call: let go of what the call itself has changed, such as a counter, but for the mode."""
        self._set = [
            (place, {name: value for name, value in values.items() if name == "training" or place.get(name) == value})
            for place, values in self._set
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within, all is set as it was; afterwards as it is now."""
        now = [(place, {name: place[name] for name in values if name in place}) for place, values in self._set]
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
            for place, values in now:
                place.update(values)
            for parameter, grad in switched:
                parameter.requires_grad_(grad)


def _settings(owner: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(owner).items()
        if name == "training" or (name not in _OWN and isinstance(value, bool | int | float | str))
    }


class Weights:
    """The parameters of a module as they are now: which, and how often each has been written to.

    What steps within backward (a hook of its gradient) may have changed by right, and is left out, as are modules in
    which FSDP2 puts others in the place of parameters.
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
        """The name of a parameter of ``module`` that is another one by now, or has been written to."""
        now = dict(module.named_parameters()) if self._seen else {}
        for name, (weight, version) in self._seen.items():
            if name not in now or weight() is not now[name] or now[name]._version != version:
                return name
        return None


def _is_sharded(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # which takes seconds to import
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def gather(module: nn.Module) -> None:
    """Gather the parameters of a module that FSDP2 has sharded: it does so itself before the backward of each module,
    and the second run of a segment comes before that of its last.
    """
    if _is_sharded(module):
        module.unshard()  # type: ignore[operator]
