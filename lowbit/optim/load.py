"""States from a ``state_dict``, converted where they were kept otherwise.

torch's ``load_state_dict`` casts every state to its parameter's dtype, codes and scales too. So here states pass it
wrapped, and are taken over afterwards.
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
from lowbit.optim.kept import Keeping
from lowbit.optim.shards import Part, local, whole
from lowbit.optim.states import Storage, Stored, encoded, fill, zeros

__all__ = ["as_torch", "into"]

#: Moments by the names that other optimizers give them, and what makes ours of theirs.
_FOREIGN: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {"exp_avg_sq_root": ("exp_avg_sq", torch.sqrt)}

#: Settings of a group that stay the optimizer's own.
_OWN = ("bits", "master", "rounding")


@dataclass(frozen=True)
class _Wrapped:
    """A state that torch's ``load_state_dict`` passes on as it is."""

    value: Any


def into(optimizer: Keeping, state_dict: dict[str, Any]) -> None:
    """Loads ``state_dict`` into the optimizer; nothing is changed where it raises."""
    before = [dict(group) for group in optimizer.param_groups]
    states, groups = dict(optimizer.state), optimizer.param_groups

    def wrap(_: Any, given: dict[str, Any]) -> dict[str, Any]:
        kept = {k: {n: _Wrapped(v) for n, v in s.items()} for k, s in given["state"].items()}
        return {**given, "state": kept}

    def unwrap(self: Any) -> None:
        _take(self, before)

    hooks = (
        optimizer.register_load_state_dict_pre_hook(wrap),  # after those of users, who see tensors
        optimizer.register_load_state_dict_post_hook(unwrap, prepend=True),
    )
    try:
        torch.optim.Optimizer.load_state_dict(optimizer, state_dict)
    except BaseException:  # an interrupt too leaves the optimizer as it was
        optimizer.param_groups = groups
        optimizer.state.clear()
        optimizer.state.update(states)
        optimizer.settle()
        raise
    finally:
        for hook in hooks:
            hook.remove()


def _take(optimizer: Keeping, before: list[dict[str, Any]]) -> None:
    """Unwraps and converts what torch has loaded."""
    said: dict[str, None] = {}
    for group, own in zip(optimizer.param_groups, before, strict=True):
        saved = {name: group.get(name) for name in _OWN}
        if group.get("decoupled_weight_decay") is False and group.get("weight_decay"):
            said["weight decay was part of the gradient (L2), and is decoupled from now on"] = None
        for name in own:
            if name in _OWN or name not in group:
                group[name] = own[name]
        for place, param in enumerate(group["params"]):
            if param not in optimizer.state:
                continue
            name = optimizer.name_of(group, place)
            given = {key: _with_axes(key, wrapped.value) for key, wrapped in optimizer.state[param].items()}
            given = {key: value for key, value in given.items() if value is not None}
            if not saved["bits"]:
                given = {key: _as_float(key, value, said) for key, value in given.items()}
            if given:
                optimizer.state[param] = _state(optimizer, group, saved, param, name, given, said)
            else:  # older releases of torch save a momentum that has not begun as None
                del optimizer.state[param]
        optimizer.check(group)
    optimizer.settle()
    for param in optimizer.state:
        masters.forget(param)
    if said:
        user_warnings.warn(f"{type(optimizer).__name__}.load_state_dict: {'; '.join(said)}")


def _with_axes(key: str, value: Any) -> Any:
    """A state of a scalar parameter as lowbit keeps it: moments have an axis, the master has its parameter's none."""
    return value.reshape(1) if key != "master" and isinstance(value, Tensor) and not value.dim() else value


def _as_float(key: str, value: Any, said: dict[str, None]) -> Any:
    """A state of another optimizer, whose dtype is its parameter's, in a dtype that this package keeps states in."""
    if key == "step" or getattr(value, "dtype", None) not in (torch.float16, torch.float64):
        return value
    said[f"states in {str(value.dtype).removeprefix('torch.')} are read as fp32"] = None
    return value.float()


def _step(given: dict[str, Any], name: str) -> Tensor:
    """How many steps a state has made; torch's SGD keeps no count, and its momentum has begun.

    Raises:
        ValueError: the count is not a whole number of at least 0.
    """
    step = given.get("step", 1.0)
    count = float(step) if isinstance(step, int | float) or (isinstance(step, Tensor) and step.numel() == 1) else -1.0
    if not (count >= 0 and count.is_integer()):
        raise ValueError(
            f"step of {name}: expected a whole number of at least 0, got {step}; the state is damaged: load an earlier "
            "checkpoint, or write the number of steps made there"
        )
    return torch.tensor(count)


def _state(
    optimizer: Keeping, group: dict[str, Any], saved: dict[str, Any], param: Tensor, name: str,
    given: dict[str, Any], said: dict[str, None],
) -> dict[str, Any]:  # fmt: skip
    """A parameter's states as the optimizer keeps them."""
    if "max_exp_avg_sq" in given:
        raise ValueError(
            f"{type(optimizer).__name__}: the state of {name} is AMSGrad's, which has no low-bit states; train on "
            "with torch's optimizer, or drop its max_exp_avg_sq"
        )
    part, device = Part.of(param, name), local(param).device
    state: dict[str, Any] = {"step": _step(given, name)}
    storages = optimizer.kept_as({**group, "bits": saved["bits"] or "fp32"}, param)
    for moment, kept in optimizer.kept_as(group, param).items():
        before = storages[moment] if saved["bits"] else _found(storages[moment], moment, given)
        if before.kind != kept.kind:
            said[f"states kept as {before.kind} are converted to {kept.kind}"] = None
        elif moment in given:
            made = zeros(part, kept, name, device)
            for target, source in ((made.codes, given[moment]), (made.scale, given.get(f"{moment}_scale"))):
                if target is not None:
                    _copy(part, target, source, f"{moment} of {name}")
            state.update(_entries(moment, made))
            continue
        numbers = _numbers(given, moment, before, name, said)
        state.update(_entries(moment, encoded(part, kept, name, numbers.to(device))))
    shared = optimizer.from_torch(param, given)
    for whole_name, shape in optimizer.replicated(param).items():
        held: Any = shared.get(whole_name)
        if not isinstance(held, Tensor) or held.numel() != torch.Size(shape).numel():
            raise ValueError(f"the state of {name} needs {whole_name} {list(shape)}, but has {_shapes(given)}")
        if held is not given.get(whole_name):
            said[f"{whole_name} is averaged over the axes that this optimizer takes together"] = None
        state[whole_name] = whole(held).to(device, torch.float32, copy=True).reshape(shape)
    known = {"step", "master", *state, *optimizer.replicated(param), *(_FOREIGN[m][0] for m in _FOREIGN if m in state)}
    for extra in given.keys() - known:
        if not extra.endswith("_scale"):
            said[f"{extra} is dropped"] = None
    master = _master(group["master"], saved["master"], param, name, given.get("master"), part, said)
    if master is not None:
        state["master"] = master
    return state


def _found(storage: Storage, moment: str, given: dict[str, Any]) -> Storage:
    """What another optimizer kept a moment in: torch's are in the dtype of their parameter."""
    source = given.get(moment, given.get(_FOREIGN.get(moment, (moment,))[0]))
    kinds = {dtype: kind for kind, dtype in FLOAT_STATES.items()}
    return storage._replace(kind=kinds.get(source.dtype, storage.kind)) if isinstance(source, Tensor) else storage


def _entries(moment: str, made: Stored) -> dict[str, Tensor]:
    return {moment: made.codes} | ({} if made.scale is None else {f"{moment}_scale": made.scale})


def _copy(part: Part, target: Tensor, source: Any, what: str) -> None:
    """Copies a saved tensor: whole, or placed as the target is, or this process' part of it."""
    if not isinstance(source, Tensor):
        raise ValueError(f"{what}: expected a tensor, got {type(source).__name__}")
    mine = local(target)
    alike = hasattr(source, "placements") and getattr(target, "placements", None) == source.placements
    held = local(source) if alike else whole(source)
    if tuple(source.shape) != tuple(target.shape) and held.shape != mine.shape:
        raise ValueError(f"{what} is {list(target.shape)}, but the state has {list(source.shape)}")
    if held.dtype != mine.dtype:
        raise ValueError(f"{what} is {mine.dtype}, but the state has {held.dtype}; was it cast when it was loaded?")
    if alike or held.shape == mine.shape:
        mine.copy_(held)
    else:
        fill(part, target, held)


def _numbers(given: dict[str, Any], moment: str, kept: Storage, name: str, said: dict[str, None]) -> Tensor:
    """A moment of another kind as fp32 numbers of the whole tensor."""
    other, change = _FOREIGN.get(moment, (moment, lambda x: x))
    source, from_foreign = given.get(moment), moment not in given and other in given
    if from_foreign:
        source = given[other]
        said[f"{other} is kept as {moment}"] = None
    expected = kept.shape if kept.dtype is not None else kept.codes_shape()
    if not isinstance(source, Tensor) or tuple(source.shape) != tuple(expected):
        raise ValueError(f"the state of {name} needs {moment} {list(expected)}, but has {_shapes(given)}")
    scale = given.get(f"{moment}_scale")
    if kept.dtype is None and scale is None:
        raise ValueError(f"the state of {name} has codes of {kept.kind} for {moment}, but no {moment}_scale")
    numbers = Stored(kept, source, None if kept.dtype is not None else scale).numbers().reshape(kept.shape)
    return change(numbers) if from_foreign else numbers


def _master(
    kind: str | None, before: str | None, param: Tensor, name: str, saved: Any, part: Part, said: dict[str, None]
) -> Tensor | None:
    """The master of a parameter, from the saved one where there is one."""
    if param.dtype == torch.float32 or kind not in MASTERS:
        if saved is not None:
            said[f"master weights ({before}) are dropped"] = None
        return None
    mine = local(param)
    if saved is None:
        said[f"master weights ({kind}) begin as their parameters are"] = None
        return part.tensor(masters.first(kind, param, part), param.shape)
    was = part.tensor(torch.zeros_like(mine, dtype=MASTERS.get(before or "", torch.float32)), param.shape)
    _copy(part, was, saved, f"master of {name}")
    if before != kind:
        said[f"master weights kept as {before} are converted to {kind}"] = None
        made = part.tensor(masters.blank(kind, mine), param.shape)
        local(made).copy_(masters.stored(kind, masters.number(mine, local(was))))
        return made
    return was


def _shapes(given: dict[str, Any]) -> str:
    return ", ".join(f"{name} {list(v.shape)}" if isinstance(v, Tensor) else name for name, v in given.items())


def as_torch(optimizer: Keeping) -> dict[str, Any]:
    """What ``Optimizer.torch_state_dict`` returns."""
    made = torch.optim.Optimizer.state_dict(optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    kept = {id(param): (moments, optimizer.state[param]) for _, param, moments in optimizer.kept()}
    for index, param in enumerate(params):
        if id(param) not in kept:
            continue
        moments, state = kept[id(param)]
        made["state"][index] = {"step": state["step"].clone()}
        for moment, storage in moments.items():
            numbers = Stored(storage, state[moment], state.get(f"{moment}_scale")).numbers().reshape(param.shape)
            other = _FOREIGN.get(moment)
            made["state"][index].update({moment: numbers} if other is None else {other[0]: numbers.square()})
        shared = {name: state[name].clone() for name in optimizer.replicated(param)}
        made["state"][index].update(optimizer.to_torch(param, shared))
    made["param_groups"] = [{k: v for k, v in group.items() if k not in _OWN} for group in made["param_groups"]]
    return made
