"""Loading of optimizer states from a ``state_dict``, with conversion of other formats.

torch's ``load_state_dict`` casts every state to its parameter's dtype, also codes and scales. So states are wrapped
before it runs and unwrapped afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit import user_warnings
from lowbit.ops.optim import FLOAT_STATES, MASTERS
from lowbit.optim import masters
from lowbit.optim.interface import StatefulOptimizer
from lowbit.optim.shards import Part, local, whole
from lowbit.optim.states import Storage, Stored, encoded, fill, zeros

__all__ = ["as_torch", "into"]

#: By moment: the name of the torch optimizer's moment, and the conversion from it.
_FOREIGN: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {"exp_avg_sq_root": ("exp_avg_sq", torch.sqrt)}

#: Settings of a group that loading does not change.
_STORAGE = ("bits", "master", "rounding")


@dataclass(frozen=True)
class _Wrapped:
    """A state that torch's ``load_state_dict`` passes on as it is."""

    value: Any


def into(optimizer: StatefulOptimizer, state_dict: dict[str, Any]) -> None:
    """Load ``state_dict`` into the optimizer. If it raises, nothing has changed."""
    before = [dict(group) for group in optimizer.param_groups]
    states, groups = dict(optimizer.state), optimizer.param_groups

    def wrap(_: Any, loaded: dict[str, Any]) -> dict[str, Any]:
        wrapped = {k: {n: _Wrapped(v) for n, v in s.items()} for k, s in loaded["state"].items()}
        return {**loaded, "state": wrapped}

    def unwrap(self: Any) -> None:
        _take(self, before)

    hooks = (
        optimizer.register_load_state_dict_pre_hook(wrap),  # runs after the users' hooks, which see tensors
        optimizer.register_load_state_dict_post_hook(unwrap, prepend=True),
    )
    try:
        torch.optim.Optimizer.load_state_dict(optimizer, state_dict)
    except BaseException:  # also after an interrupt
        optimizer.param_groups = groups
        optimizer.state.clear()
        optimizer.state.update(states)
        optimizer.settle()
        raise
    finally:
        for hook in hooks:
            hook.remove()


def _take(optimizer: StatefulOptimizer, before: list[dict[str, Any]]) -> None:
    """Unwrap and convert the states that torch has loaded."""
    notes: dict[str, None] = {}  # an ordered set
    for group, old in zip(optimizer.param_groups, before, strict=True):
        saved = {name: group.get(name) for name in _STORAGE}
        if group.get("decoupled_weight_decay") is False and group.get("weight_decay"):
            notes["weight decay was part of the gradient (L2) and is decoupled from now on"] = None
        for name in old:
            if name in _STORAGE or name not in group:
                group[name] = old[name]
        for index, param in enumerate(group["params"]):
            if param not in optimizer.state:
                continue
            name = optimizer.name_of(group, index)
            loaded = {key: _with_axes(key, wrapped.value) for key, wrapped in optimizer.state[param].items()}
            loaded = {key: value for key, value in loaded.items() if value is not None}
            if not saved["bits"]:
                loaded = {key: _as_float(key, value, notes) for key, value in loaded.items()}
            if loaded:
                optimizer.state[param] = _state(optimizer, group, saved, param, name, loaded, notes)
            else:  # older torch releases save None for a momentum before its first step
                del optimizer.state[param]
        optimizer.check(group)
    optimizer.settle()
    for param in optimizer.state:
        masters.forget(param)
    if notes:
        user_warnings.warn(f"{type(optimizer).__name__}.load_state_dict: {'; '.join(notes)}")


def _with_axes(key: str, value: Any) -> Any:
    """Moments of a scalar parameter get one axis; its master weight has none."""
    return value.reshape(1) if key != "master" and isinstance(value, Tensor) and not value.dim() else value


def _as_float(key: str, value: Any, notes: dict[str, None]) -> Any:
    """A state of a torch optimizer, in fp32 if lowbit does not store its dtype."""
    if key == "step" or getattr(value, "dtype", None) not in (torch.float16, torch.float64):
        return value
    notes[f"states in {str(value.dtype).removeprefix('torch.')} are read as fp32"] = None
    return value.float()


def _step(loaded: dict[str, Any], name: str) -> Tensor:
    """The step count of a state. torch's SGD has none, but its momentum exists after one step.

    Raises:
        ValueError: The count is not a whole number of at least 0.
    """
    step = loaded.get("step", 1.0)
    count = float(step) if isinstance(step, int | float) or (isinstance(step, Tensor) and step.numel() == 1) else -1.0
    if not (count >= 0 and count.is_integer()):
        raise ValueError(
            f"step of {name}: expected a whole number of at least 0, got {step}; the state is damaged: load an earlier "
            "checkpoint, or set the step to the number of steps made"
        )
    return torch.tensor(count)


def _state(
    optimizer: StatefulOptimizer, group: dict[str, Any], saved: dict[str, Any], param: Tensor, name: str,
    loaded: dict[str, Any], notes: dict[str, None],
) -> dict[str, Any]:  # fmt: skip
    """The ``loaded`` states of a parameter in the optimizer's formats; ``saved`` has the saved storage settings."""
    if "max_exp_avg_sq" in loaded:
        raise ValueError(
            f"{type(optimizer).__name__}: the state of {name} is from AMSGrad, which has no low-bit states; use "
            "torch's optimizer, or drop max_exp_avg_sq"
        )
    part, device = Part.of(param, name), local(param).device
    state: dict[str, Any] = {"step": _step(loaded, name)}
    storages = optimizer.storages({**group, "bits": saved["bits"] or "fp32"}, param)
    for moment, storage in optimizer.storages(group, param).items():
        before = storages[moment] if saved["bits"] else _float_storage(storages[moment], moment, loaded)
        if before.kind != storage.kind:
            notes[f"states kept as {before.kind} are converted to {storage.kind}"] = None
        elif moment in loaded:
            state_part = part.of_state(storage.shape)
            stored = zeros(state_part, storage, name, device)
            for target, source in ((stored.codes, loaded[moment]), (stored.scale, loaded.get(f"{moment}_scale"))):
                if target is not None:
                    _copy(state_part, target, source, f"{moment} of {name}")
            state.update(_entries(moment, stored))
            continue
        numbers = _numbers(loaded, moment, before, name, notes)
        state.update(_entries(moment, encoded(part.of_state(storage.shape), storage, name, numbers.to(device))))
    converted = optimizer.from_torch(param, loaded)
    replicated = optimizer.replicated(group, param)
    for key, shape in replicated.items():
        value: Any = converted.get(key)
        if not isinstance(value, Tensor) or value.numel() != torch.Size(shape).numel():
            raise ValueError(f"the state of {name} needs {key} {list(shape)}, but has {_shapes(loaded)}")
        if value is not loaded.get(key):
            notes[f"{key} is averaged over the axes that this optimizer flattens"] = None
        state[key] = whole(value).to(device, torch.float32, copy=True).reshape(shape)
    for key, first in optimizer.counters(group, param).items():
        state[key] = torch.tensor(float(loaded.get(key, first)))
    known = {"step", "master", *state, *replicated, *(_FOREIGN[m][0] for m in _FOREIGN if m in state)}
    for extra in loaded.keys() - known:
        if not extra.endswith("_scale"):
            notes[f"{extra} is dropped"] = None
    master = _master(group["master"], saved["master"], param, name, loaded.get("master"), part, notes)
    if master is not None:
        state["master"] = master
    return state


def _float_storage(storage: Storage, moment: str, loaded: dict[str, Any]) -> Storage:
    """Format of a torch optimizer's moment, which has the dtype of its parameter."""
    source = loaded.get(moment, loaded.get(_FOREIGN.get(moment, (moment,))[0]))
    kinds = {dtype: kind for kind, dtype in FLOAT_STATES.items()}
    return storage._replace(kind=kinds.get(source.dtype, storage.kind)) if isinstance(source, Tensor) else storage


def _entries(moment: str, stored: Stored) -> dict[str, Tensor]:
    return {moment: stored.codes} | ({} if stored.scale is None else {f"{moment}_scale": stored.scale})


def _copy(part: Part, target: Tensor, source: Any, name: str) -> None:
    """Copy a saved tensor, which is full, sharded like the target, or this process' shard."""
    if not isinstance(source, Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(source).__name__}")
    shard = local(target)
    same_placements = hasattr(source, "placements") and getattr(target, "placements", None) == source.placements
    saved = local(source) if same_placements else whole(source)
    if tuple(source.shape) != tuple(target.shape) and saved.shape != shard.shape:
        raise ValueError(f"{name}: expected shape {list(target.shape)}, but the state has {list(source.shape)}")
    if saved.dtype != shard.dtype:
        raise ValueError(
            f"{name}: expected {shard.dtype}, but the state has {saved.dtype}; load it without casting its dtype"
        )
    if same_placements or saved.shape == shard.shape:
        shard.copy_(saved)
    else:
        fill(part, target, saved)


def _numbers(loaded: dict[str, Any], moment: str, storage: Storage, name: str, notes: dict[str, None]) -> Tensor:
    """The full moment in fp32, from a state with format ``storage``."""
    other, convert = _FOREIGN.get(moment, (moment, lambda x: x))
    source, from_foreign = loaded.get(moment), moment not in loaded and other in loaded
    if from_foreign:
        source = loaded[other]
        notes[f"{other} is kept as {moment}"] = None
    expected = storage.shape if storage.dtype is not None else storage.codes_shape()
    if not isinstance(source, Tensor) or tuple(source.shape) != tuple(expected):
        raise ValueError(f"the state of {name} needs {moment} {list(expected)}, but has {_shapes(loaded)}")
    scale = loaded.get(f"{moment}_scale")
    if storage.dtype is None and scale is None:
        raise ValueError(f"the state of {name} has {storage.kind} codes for {moment}, but no {moment}_scale")
    numbers = Stored(storage, source, None if storage.dtype is not None else scale).numbers().reshape(storage.shape)
    return convert(numbers) if from_foreign else numbers


def _master(
    master: str | None, before: str | None, param: Tensor, name: str, saved: Any, part: Part, notes: dict[str, None]
) -> Tensor | None:
    """The master weight of a parameter, from the ``saved`` one if there is one."""
    if param.dtype == torch.float32 or master not in MASTERS:
        if saved is not None:
            notes[f"master weights ({before}) are dropped"] = None
        return None
    shard = local(param)
    if saved is None:
        notes[f"master weights ({master}) are initialized from the parameters"] = None
        return part.tensor(masters.first(master, param, part), param.shape)
    old = part.tensor(torch.zeros_like(shard, dtype=MASTERS.get(before or "", torch.float32)), param.shape)
    _copy(part, old, saved, f"master of {name}")
    if before != master:
        notes[f"master weights kept as {before} are converted to {master}"] = None
        new = part.tensor(masters.blank(master, shard), param.shape)
        local(new).copy_(masters.stored(master, masters.number(shard, local(old))))
        return new
    return old


def _shapes(loaded: dict[str, Any]) -> str:
    return ", ".join(f"{name} {list(v.shape)}" if isinstance(v, Tensor) else name for name, v in loaded.items())


def as_torch(optimizer: StatefulOptimizer) -> dict[str, Any]:
    """The result of ``Optimizer.torch_state_dict``."""
    state_dict = torch.optim.Optimizer.state_dict(optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    stepped = {id(param): (storages, optimizer.state[param]) for _, param, storages in optimizer.stored_states()}
    for index, param in enumerate(params):
        if id(param) not in stepped:
            continue
        storages, state = stepped[id(param)]
        entry = state_dict["state"][index] = {"step": state["step"].clone()}
        for moment, storage in storages.items():
            numbers = Stored(storage, state[moment], state.get(f"{moment}_scale")).numbers()
            numbers = numbers if param.dim() else numbers.reshape(())
            other = _FOREIGN.get(moment)
            entry.update({moment: numbers} if other is None else {other[0]: numbers.square()})
        replicated = optimizer.replicated(optimizer.group_of(param), param)
        entry.update(optimizer.to_torch(param, {name: state[name].clone() for name in replicated}))
    groups = state_dict["param_groups"]
    state_dict["param_groups"] = [{k: v for k, v in group.items() if k not in _STORAGE} for group in groups]
    return state_dict
