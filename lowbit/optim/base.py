"""Base class of the low-bit optimizers: groups, states, master weights, and steps bit-identical on any sharding.

A subclass names its update rules, rows of lowbit/ops/optim.py, and computes their factors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any, overload

import torch
from torch import Tensor

from lowbit.autograd import uncompiled
from lowbit.backends import steps
from lowbit.ops.optim import MASTERS
from lowbit.optim import load, masters, watch
from lowbit.optim.interface import StatefulOptimizer
from lowbit.optim.roster import Roster, Turn, shards_of
from lowbit.optim.shards import Part, local
from lowbit.optim.states import FEW, find, is_aligned, zeros
from lowbit.optim.step import ParamLayout, Work, advance, advance_joined, advance_listed
from lowbit.rounding import Rounding
from lowbit.torch_private import foreach_add_

__all__ = ["Optimizer"]

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MASTERS = (None, *MASTERS, "stochastic")
_ROUNDINGS = (None, "stochastic", "nearest")
_INF = float("inf")

#: Lower bound (included) and upper bound (excluded) of each hyperparameter.
_RANGES: dict[str, tuple[float, float]] = {
    "lr": (0, _INF), "betas": (0, 1), "eps": (0, _INF), "weight_decay": (0, _INF), "momentum": (0, _INF),
    "ns_steps": (1, 100), "beta1": (0, 1), "beta2_decay": (-_INF, 0), "d": (0, _INF),
    "dampening": (0, _INF), "scale": (0, _INF), "similarity": (0, _INF), "growth": (1, _INF),
}  # fmt: skip


def _in(value: Any, least: float, most: float) -> bool:
    number = isinstance(value, int | float | Tensor) and not isinstance(value, bool)
    return number and least <= float(value) < most


def _numbers(counts: list[Tensor]) -> list[int]:
    """The step counts as integers. Usually all are equal, so one read suffices."""
    first = int(counts[0])
    same_device = len(counts) > 4 and len({count.device for count in counts}) == 1
    if same_device and bool((torch.stack(counts) == first).all()):
        return [first] * len(counts)
    return [first, *map(int, counts[1:])]


class Optimizer(StatefulOptimizer):
    """Base class of the low-bit optimizers, a ``torch.optim.Optimizer``.

    Parameters may be DTensors, replicated or sharded. The step is bit-identical to the step of the full tensor. If
    other code writes to a parameter, its master weight is updated from it.

    Args:
        params: Parameters (fp32, bf16 or fp16), named parameters or parameter groups.
        defaults: Hyperparameters of the subclass, by name.
        bits: Bit width of states: 32, 16, 8 (default), 4, or a key of ``STATES``. Tensors with fewer than 4096
            elements have fp32 states. May differ between groups; fixed after the group's first step.
        master: How 16-bit parameters keep the bits that rounding cuts off. ``"fp32"`` stores an fp32 copy.
            ``"residual"`` (bf16 only) stores the next 8 bits of the significand. ``"stochastic"`` (bf16 only) rounds
            stochastically and stores nothing. None rounds to nearest, as torch does. May differ between groups; fixed
            after the group's first step.
        rounding: Rounding of states, ``"stochastic"`` or ``"nearest"``. None uses the default of the row of
            ``STATES``. May differ between groups.
        seed: Seed of all random bits, a 64-bit integer, the same in every group.

    Raises:
        TypeError: A parameter has another dtype.
        ValueError: A hyperparameter is out of range, or does not suit a parameter.
    """

    #: Rules that ``apply`` runs for one parameter at a time; parameters with another rule may step together.
    ONE_BY_ONE: frozenset[str] = frozenset()
    #: Hyperparameters with two values.
    PAIRS: tuple[str, ...] = ("betas",)
    #: Hyperparameters that may be None.
    OPTIONAL: tuple[str, ...] = ()
    #: Hyperparameters that determine the shapes or formats of states, and so are fixed after the first step.
    FIXED: tuple[str, ...] = ()
    #: Bit width of a class that has it in its name.
    BITS: int | None = None

    def __init__(
        self,
        params: Params,
        defaults: dict[str, Any],
        bits: int | str | None,
        master: str | None,
        rounding: str | None,
        seed: int,
    ) -> None:
        if bits is not None and self.BITS not in (None, bits):
            base = type(self).__name__.removesuffix(f"{self.BITS}bit")
            raise ValueError(
                f"{type(self).__name__} has bits={self.BITS}, got bits={bits!r}; use {base}(..., bits={bits!r})"
            )
        storage = {"bits": bits or self.BITS or 8, "master": master, "rounding": rounding, "seed": seed}
        self.in_backward = False  # whether parameters step during the backward pass
        #: Parameters that have stepped since the last call of step(); None before the first call.
        self.stepped: set[Tensor] | None = None
        self._watch = watch.Watch(type(self).__name__)
        self._indices: dict[Tensor, int] = {}
        self._layouts: dict[Tensor, tuple[tuple[Any, ...], ParamLayout]] = {}
        self._rosters: dict[int, Roster] = {}  # by the group's id
        super().__init__(params, {**defaults, **storage})

    # -- methods of subclasses -----------------------------------------------------------------------------------
    def factors(self, group: dict[str, Any], rule: str, step: int) -> tuple[float, ...]:
        """Factors of the rule at a step, counted from 1."""
        raise NotImplementedError

    def apply(self, work: Work, factors: tuple[float, ...]) -> None:
        """Step one parameter."""
        advance(work, factors)

    # -- groups --------------------------------------------------------------------------------------------------
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch.

        Args:
            param_group: ``params``, and the hyperparameters that differ from the defaults.

        Raises:
            TypeError: A parameter has an unsupported dtype.
            ValueError: A hyperparameter is out of range, or does not suit a parameter.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self.check(group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        for param in group["params"]:
            self._indices.setdefault(param, len(self._indices))

    def check(self, group: dict[str, Any]) -> None:
        """Check a group's settings and parameters, and replace ``bits`` by the name of its row of ``STATES``."""
        who = type(self).__name__
        group["bits"] = find(group["bits"]).name
        for name, allowed in (("master", _MASTERS), ("rounding", _ROUNDINGS)):
            if group[name] not in allowed:
                raise ValueError(f"{who}: {name} must be one of {', '.join(map(repr, allowed))}, got {group[name]!r}")
        for name in _RANGES.keys() & group.keys():
            least, most = _RANGES[name]
            pair = name in self.PAIRS
            values = group[name] if isinstance(group[name], tuple | list) else (group[name],)
            fit = [_in(value, least, most) or (value is None and name in self.OPTIONAL) for value in values]
            if len(values) != 1 + pair or not all(fit):
                expected = "two numbers, each" if pair else "a number"
                raise ValueError(
                    f"{who}: {name} must be {expected} at least {least:g} and less than {most:g}, got {group[name]!r}"
                )
        if not isinstance(group["seed"], int):
            raise ValueError(f"{who}: seed must be a 64-bit integer, got {group['seed']!r}")
        Rounding(group["seed"])  # raises for more than 64 bits
        if len(self.param_groups) > 1 and group["seed"] != self.param_groups[0]["seed"]:
            raise ValueError(
                f"{who}: all groups must have the same seed, {self.param_groups[0]['seed']}; got {group['seed']}"
            )
        for index, param in enumerate(group["params"]):
            name = self.name_of(group, index)
            if param.dtype not in _DTYPES:
                raise TypeError(
                    f"{who}: {name} is {param.dtype}; parameters must be float32, bfloat16 or float16"
                    + ("; pass torch.view_as_real(param)" if param.is_complex() else "")
                )
            if group["master"] in ("residual", "stochastic") and param.dtype == torch.float16:
                raise ValueError(
                    f"{who}: master={group['master']!r} is for bfloat16 parameters, but {name} is float16; use 'fp32'"
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("in_backward", False)  # the parameters of a copy have no hooks
        self.__dict__.setdefault("stepped", None)
        self._watch = watch.Watch(type(self).__name__)
        params = [param for group in self.param_groups for param in group["params"]]
        self._indices = {param: index for index, param in enumerate(params)}
        self.settle()

    def replaced(self, new: Mapping[Tensor, Tensor]) -> None:
        """Use new parameters, such as shards, in place of the old ones, with the same random bits."""
        self._indices = {new.get(param, param): index for param, index in self._indices.items()}
        for before, after in new.items():
            remainder = masters.of(before)
            if remainder is not None:
                masters.attach(after, remainder)
        self.settle()

    def _index_of(self, param: Tensor) -> int:
        """Index of the parameter, which selects its random bits.

        Accelerate replaces the parameters of groups by shards without notice, so a new parameter gets the index of the
        old one at the same position.
        """
        if param not in self._indices:
            params = [param for group in self.param_groups for param in group["params"]]
            who, known = type(self).__name__, len(self._indices)
            if len(params) != known:
                raise ValueError(
                    f"{who}: expected groups with {known} parameters, got {len(params)}; call add_param_group for more"
                )
            lost = len(self.state.keys() - set(params))
            if lost:
                raise ValueError(
                    f"{who}: parameters that have stepped ({lost}) are no longer in the groups, so their states would "
                    "be lost; call Accelerator.prepare before the optimizer's first step, and load states after it"
                )
            self._indices = dict(zip(params, self._indices.values(), strict=True))
        return self._indices[param]

    def settle(self) -> None:
        """Record the settings with which existing states are stored, so that later changes raise."""
        self._layouts, self._rosters = {}, {}
        needed = self.defaults.keys() - {"differentiable"}  # which torch sets for copies, not for their groups
        for group in self.param_groups:
            if not needed <= group.keys():
                continue  # while torch loads another optimizer's groups
            for index, param in enumerate(group["params"]):
                if self.state.get(param):
                    self._layout(group, index, param)

    # -- a step --------------------------------------------------------------------------------------------------
    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step every parameter that has a gradient. If it raises, nothing has changed.

        Args:
            closure: Computes the loss again, as in torch.

        Returns:
            The result of ``closure``.

        Raises:
            RuntimeError: A gradient is sparse, or a CUDA graph is being captured.
            ValueError: The sharding of a parameter is not supported.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._advance([(group, range(len(group["params"]))) for group in self.param_groups])
        if self.in_backward:
            self.stepped = set()
        return loss

    def advance(self, indices: Iterable[tuple[dict[str, Any], int]]) -> None:
        """Step the parameters at these indices of groups, if they have a gradient."""
        chosen: dict[int, tuple[dict[str, Any], list[int]]] = {}
        for group, index in indices:
            chosen.setdefault(id(group), (group, []))[1].append(index)
        self._advance(list(chosen.values()))

    @uncompiled
    @torch.no_grad()
    def _advance(self, chosen: Sequence[tuple[dict[str, Any], Sequence[int]]]) -> None:
        turns = self._turns(chosen)
        counted = [state["step"] for turn in turns for state in turn.states]
        if not counted:
            return
        foreach_add_(counted, 1)
        numbers = iter(_numbers(counted))
        for turn in turns:
            steps = list(islice(numbers, len(turn.params)))
            self._advance_alone(turn, steps)
            self._advance_listed(turn, steps)
            for param, step in zip(turn.params, steps, strict=True):
                if step == 1:
                    masters.forget(param)

    def _advance_alone(self, turn: Turn, steps: Sequence[int]) -> None:
        """Step the parameters that are not listed: one at a time, or several small ones in one op."""
        joined: dict[Any, list[Work]] = {}
        settled = self._settled(turn.group)
        for i in [i for i, key in enumerate(turn.list_keys) if key is None]:
            layout, shard = turn.layouts[i], turn.shards[i]
            key = layout.rule, steps[i], shard.device
            rng, factors = settled(*key)
            work = turn.work(i, steps[i], rng)
            if self._is_small(work):
                joined.setdefault((key, shard.dtype, work.grad.dtype), []).append(work)
            else:
                with self._watch.moving([work]):
                    self.apply(work, factors)
                self._watch.finite(work)
        for (key, *_), small in joined.items():
            moments = advance_joined(small, settled(*key)[1])
            self._watch.finite_joined(small, moments)

    def _advance_listed(self, turn: Turn, steps: Sequence[int]) -> None:
        """Step the listed parameters, all similar ones in one op."""
        settled = self._settled(turn.group)
        for (_, step, _), members in turn.alike(steps).items():
            layout, device = turn.layouts[members[0]], turn.shards[members[0]].device
            rng, factors = settled(layout.rule, step, device)
            first = turn.work(members[0], step, rng)
            watched = [turn.work(i, step, rng) for i in members] if self._watch.looks_at(first) else []
            with self._watch.moving(watched):
                columns, places = turn.columns(members), turn.places(members)
                finite = advance_listed(first, columns, places, factors, self._watch.looks_up_to(first))
            if not finite.all():
                for i, is_finite in zip(members, finite.tolist(), strict=True):
                    if not is_finite:
                        self._watch.finite(turn.work(i, step, rng))

    def _settled(self, group: dict[str, Any]) -> Callable[..., tuple[Tensor, tuple[float, ...]]]:
        """A cached ``f(rule, step, device)`` that returns the random seed and the rule's factors."""

        @cache
        def settled(rule: str, step: int, device: torch.device) -> tuple[Tensor, tuple[float, ...]]:
            return torch.tensor([group["seed"], step], device=device), self.factors(group, rule, step)

        return settled

    @torch.no_grad()
    def begin(self) -> None:
        """Create the states of parameters that ``lb.train.mixed_`` converted from fp32; otherwise the first step does.

        The bits that were cut off are then states, so ``offload_`` moves them and a sharding strategy shards them.
        """
        for group in self.param_groups:
            for index, param in enumerate(group["params"]):
                if param.requires_grad and masters.of(param) is not None and not self.state.get(param):
                    if group["master"] in MASTERS:
                        self.state[param] = self._init_state(group, param, self._layout(group, index, param))
                    masters.forget(param)

    def _turns(self, chosen: Sequence[tuple[dict[str, Any], Sequence[int]]]) -> list[Turn]:
        """The parameters that step now, by group. If it raises, nothing has changed."""
        turns: list[Turn] = []
        begun: dict[Tensor, dict[str, Any]] = {}
        for group, indices in chosen:
            candidates = group["params"]
            indices = [i for i in indices if candidates[i].grad is not None and candidates[i].numel()]
            params = [candidates[i] for i in indices]
            grads = [param.grad for param in params]
            for i, grad in zip(indices, grads, strict=True):
                if grad.layout is not torch.strided:
                    raise RuntimeError(
                        f"{type(self).__name__}: the gradient of {self.name_of(group, i)} is sparse ({grad.layout}), "
                        "but low-bit states are updated in whole blocks; create the Embedding with sparse=False, or "
                        "use torch.optim.SparseAdam for it"
                    )
            if not params:
                continue
            roster = self._roster(group, indices, params)
            states: list[Any] = list(map(self.state.get, params))
            for i, (param, state) in enumerate(zip(params, states, strict=True)):
                if not state:
                    begun[param] = states[i] = self._init_state(group, param, roster.layouts[i])
            turns.append(Turn.of(group, roster, grads, states))
        if turns and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{type(self).__name__} cannot step while a CUDA graph is captured: replays would reuse the learning "
                "rate, bias correction and random seed, which are host values; capture forward and backward only, and "
                "step outside the graph"
            )
        self.state.update(begun)
        return turns

    def _roster(self, group: dict[str, Any], indices: list[int], params: list[Tensor]) -> Roster:
        """The roster of the group's last step if it is still valid, else a new one."""
        shards, rules = shards_of(params), [self.rule(group, param) for param in params]
        facts = (*Roster.facts_of(group, params, shards, rules), *(group[name] for name in self.FIXED))
        known = self._rosters.get(id(group))
        if known is None or not known.is_valid(params, facts):
            layouts = [self._layout(group, index, param) for index, param in zip(indices, params, strict=True)]
            list_keys = [
                (layout.rule, shard.dtype, layout.kinds) if self._is_listed(layout, shard) else None
                for layout, shard in zip(layouts, shards, strict=True)
            ]
            known = self._rosters[id(group)] = Roster(params, facts, layouts, list_keys)
        return known

    def _layout(self, group: dict[str, Any], index: int, param: Tensor) -> ParamLayout:
        """The parameter's layout, cached until the group's settings change.

        Raises:
            ValueError: The parameter has stepped with other settings.
        """
        rule = self.rule(group, param)
        fixed = {name: group[name] for name in self.FIXED}
        settings = (rule, group["bits"], group["master"], param.dtype, fixed, group["rounding"])
        before, layout = self._layouts.get(param, (None, None))
        if layout is None or before != settings:
            name, storages = self.name_of(group, index), self.storages(group, param)
            if before is not None and before[4] != fixed and self.state.get(param):
                raise ValueError(
                    f"{type(self).__name__}: {name} has stepped with {before[4]}, and its group now has {fixed}; set "
                    "them before the first step, or create another optimizer"
                )
            if before is not None and before[:4] != settings[:4] and self.state.get(param):
                raise ValueError(
                    f"{type(self).__name__}: {name} has stepped with rule, bits, master and dtype {before[:4]}, and "
                    f"now has {settings[:4]}; create another optimizer and load this one's state_dict, which converts"
                )
            rounding = group["rounding"] or find(group["bits"]).rounding
            stream = 2 * self._index_of(param)
            part = Part.of(param, name)
            aligned = all(is_aligned(part.of_state(storage.shape), storage) for storage in storages.values())
            layout = ParamLayout(name, rule, part, storages, rounding, stream, param.numel() < FEW, aligned)
            self._layouts[param] = settings, layout
        return layout

    def _init_state(self, group: dict[str, Any], param: Tensor, layout: ParamLayout) -> dict[str, Any]:
        """The states before the first step: zeros, and the master weight."""
        device = local(param).device
        state: dict[str, Any] = {"step": torch.tensor(0.0)}
        for moment, storage in layout.moments.items():
            stored = zeros(layout.part.of_state(storage.shape), storage, layout.name, device)
            state[moment] = stored.codes
            if stored.scale is not None:
                state[f"{moment}_scale"] = stored.scale
        for name, shape in self.replicated(group, param).items():
            state[name] = torch.zeros(shape, device=device)
        for name, value in self.counters(group, param).items():
            state[name] = torch.tensor(value)
        if group["master"] in MASTERS and param.dtype != torch.float32:
            state["master"] = layout.part.tensor(masters.first(group["master"], param, layout.part), param.shape)
        return state

    def _is_listed(self, layout: ParamLayout, param: Tensor) -> bool:
        """Whether one C++ call can step this parameter together with similar ones."""
        return (
            param.device.type == "cpu"
            and layout.aligned
            and layout.rule not in self.ONE_BY_ONE
            and param.is_contiguous()
            and param.numel() > 0
            and steps.is_native()
        )

    def _is_small(self, work: Work) -> bool:
        """Whether the parameter may be concatenated with others for a step, with the same result."""
        return (
            work.layout.few
            and work.layout.rule not in self.ONE_BY_ONE
            and not self._watch.looks_at(work)
            and "master" not in work.state
            and not work.rounds_weights
            and work.param.is_contiguous()
        )

    # -- state on disk -------------------------------------------------------------------------------------------
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states of any bit width, or states of the torch optimizer of the same name.

        States that are stored differently are converted, with a warning. ``bits``, ``master`` and ``rounding`` of this
        optimizer do not change.

        Args:
            state_dict: From ``state_dict`` of this class or of the torch optimizer.

        Raises:
            ValueError: States have another rule or shape. Nothing has changed.
        """
        load.into(self, state_dict)

    def torch_state_dict(self) -> dict[str, Any]:
        """A state dict that the torch optimizer of the same name loads: full fp32 tensors, without master weights.

        If the model is sharded, all processes must call it.
        """
        return load.as_torch(self)
