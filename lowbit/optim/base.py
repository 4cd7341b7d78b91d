"""The optimizer that those of lowbit share: groups, states, masters, and a step that is the same on every sharding.

A subclass names the rules of lowbit/ops/optim.py that it steps by, and computes their factors.
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
from lowbit.optim.kept import Keeping
from lowbit.optim.roster import Roster, Turn, held
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

#: The least value of a hyperparameter, and the one that it must stay below.
_RANGES: dict[str, tuple[float, float]] = {
    "lr": (0, _INF), "betas": (0, 1), "eps": (0, _INF), "weight_decay": (0, _INF), "momentum": (0, _INF),
    "ns_steps": (1, 100), "beta1": (0, 1), "beta2_decay": (-_INF, 0), "d": (0, _INF),
    "dampening": (0, _INF),
}  # fmt: skip


def _in(value: Any, least: float, most: float) -> bool:
    number = isinstance(value, int | float | Tensor) and not isinstance(value, bool)
    return number and least <= float(value) < most


def _numbers(counts: list[Tensor]) -> list[int]:
    """What the counts of steps are; most often all are one number, which is read once."""
    first = int(counts[0])
    alike = len(counts) > 4 and len({count.device for count in counts}) == 1
    if alike and bool((torch.stack(counts) == first).all()):
        return [first] * len(counts)
    return [first, *map(int, counts[1:])]


class Optimizer(Keeping):
    """A ``torch.optim.Optimizer`` whose states have few bits: 8, unless ``bits`` says otherwise.

    ``bits``: what states are kept in, 32, 16, 8, 4 or a row of ``STATES``; tensors of fewer than 4096 elements keep
    theirs in fp32. ``master``: of parameters of 16 bits, ``"fp32"`` or ``"residual"`` (the 8 bits that bf16 lacks of
    24) keep what rounding cuts off; ``"stochastic"`` rounds bf16 stochastically, without more memory; None rounds to
    nearest, as torch does. ``rounding``: of states, ``"stochastic"`` or ``"nearest"``; None is what the row of
    ``STATES`` says. ``seed``: of all random bits.
    Each may differ between groups, but the seed; ``bits`` and ``master`` of a group stay as they are once it has
    stepped.

    What something else writes to a parameter, its master takes over. Parameters may be DTensors that are replicated or
    sharded; every bit of a step is that of the whole tensor.
    Raises TypeError and ValueError for parameters and hyperparameters that do not fit.
    """

    #: Rules that see a parameter as a whole: ``apply`` takes each, and none steps together with others.
    ONE_BY_ONE: frozenset[str] = frozenset()
    #: Hyperparameters that are two numbers, and those that may be None.
    PAIRS: tuple[str, ...] = ("betas",)
    OPTIONAL: tuple[str, ...] = ()
    #: The width of a class that has one by its name.
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
        own = {"bits": bits or self.BITS or 8, "master": master, "rounding": rounding, "seed": seed}
        self.in_backward = False  # whether parameters step during the backward pass
        #: Those that have since step() was last called; None where it never was.
        self.stepped: set[Tensor] | None = None
        self._watch = watch.Watch(type(self).__name__)
        self._places: dict[Tensor, int] = {}
        self._layouts: dict[Tensor, tuple[tuple[Any, ...], ParamLayout]] = {}
        self._rosters: dict[int, Roster] = {}  # by the group's id
        super().__init__(params, {**defaults, **own})

    # -- what a subclass says ------------------------------------------------------------------------------------
    def factors(self, group: dict[str, Any], rule: str, step: int) -> tuple[float, ...]:
        """The rule's factors at a step, which counts from 1."""
        raise NotImplementedError

    def apply(self, work: Work, factors: tuple[float, ...]) -> None:
        """One parameter's step."""
        advance(work, factors)

    # -- groups --------------------------------------------------------------------------------------------------
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Raises TypeError and ValueError for parameters and hyperparameters that do not fit."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self.check(group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        for param in group["params"]:
            self._places.setdefault(param, len(self._places))

    def check(self, group: dict[str, Any]) -> None:
        """Raises TypeError and ValueError for a group's settings and parameters; ``bits`` becomes the row's name."""
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
                what = "two numbers, each" if pair else "a number"
                raise ValueError(
                    f"{who}: {name} must be {what} at least {least:g} and less than {most:g}, got {group[name]!r}"
                )
        if not isinstance(group["seed"], int):
            raise ValueError(f"{who}: seed must be an integer of 64 bits, got {group['seed']!r}")
        Rounding(group["seed"])  # raises for more bits
        if len(self.param_groups) > 1 and group["seed"] != self.param_groups[0]["seed"]:
            raise ValueError(f"{who}: every group has one seed, {self.param_groups[0]['seed']}; got {group['seed']}")
        for place, param in enumerate(group["params"]):
            name = self.name_of(group, place)
            if param.dtype not in _DTYPES:
                raise TypeError(
                    f"{who}: {name} is {param.dtype}; parameters are float32, bfloat16 or float16"
                    + (": give a complex one as torch.view_as_real(param)" if param.is_complex() else "")
                )
            if group["master"] in ("residual", "stochastic") and param.dtype == torch.float16:
                raise ValueError(
                    f"{who}: master={group['master']!r} is for bfloat16 parameters, but {name} is float16; use 'fp32'"
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("in_backward", False)  # of a copy, whose parameters have no hooks
        self.__dict__.setdefault("stepped", None)
        self._watch = watch.Watch(type(self).__name__)
        params = [param for group in self.param_groups for param in group["params"]]
        self._places = {param: place for place, param in enumerate(params)}
        self.settle()

    def replaced(self, new: Mapping[Tensor, Tensor]) -> None:
        """Told that parameters have become others, such as their shards: these keep the random bits of the old."""
        self._places = {new.get(param, param): place for param, place in self._places.items()}
        for before, after in new.items():
            remainder = masters.of(before)
            if remainder is not None:
                masters.attach(after, remainder)
        self.settle()

    def _place(self, param: Tensor) -> int:
        """The place that its random bits are counted by. Accelerate puts shards into groups without a word: each keeps
        the place of the parameter where it lies. Raises ValueError where states would be left behind.
        """
        if param not in self._places:
            params = [param for group in self.param_groups for param in group["params"]]
            who, known = type(self).__name__, len(self._places)
            if len(params) != known:
                raise ValueError(
                    f"{who}: the groups have {len(params)} parameters, and {known} were given; call add_param_group "
                    "for more"
                )
            lost = len(self.state.keys() - set(params))
            if lost:
                raise ValueError(
                    f"{who}: the groups have other parameters than the {lost} that have stepped, whose states would be "
                    "lost; let Accelerator.prepare have the optimizer before its first step, and load states after it"
                )
            self._places = dict(zip(params, self._places.values(), strict=True))
        return self._places[param]

    def settle(self) -> None:
        """Holds groups to the settings that their states are kept by, where there are states."""
        self._layouts, self._rosters = {}, {}
        for group in self.param_groups:
            for place, param in enumerate(group["params"]):
                if self.state.get(param) and "bits" in group:  # not while torch loads another optimizer's groups
                    self._layout(group, place, param)

    # -- a step --------------------------------------------------------------------------------------------------
    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of every parameter that has a gradient; answers what ``closure`` does.

        Raises, before anything has changed, RuntimeError for a sparse gradient, and ValueError for a sharding that
        does not fit.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._advance([(group, range(len(group["params"]))) for group in self.param_groups])
        if self.in_backward:
            self.stepped = set()
        return loss

    def advance(self, places: Iterable[tuple[dict[str, Any], int]]) -> None:
        """One step of those parameters, by their groups and places in them, that have a gradient."""
        chosen: dict[int, tuple[dict[str, Any], list[int]]] = {}
        for group, place in places:
            chosen.setdefault(id(group), (group, []))[1].append(place)
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
        """Those that no list takes: each by itself, or small ones joined."""
        joined: dict[Any, list[Work]] = {}
        settled = self._settled(turn.group)
        for i in [i for i, kind in enumerate(turn.kinds) if kind is None]:
            layout, mine = turn.layouts[i], turn.mine[i]
            key = layout.rule, steps[i], mine.device
            rng, factors = settled(*key)
            work = turn.work(i, steps[i], rng)
            if self._is_small(work):
                joined.setdefault((key, mine.dtype, work.grad.dtype), []).append(work)
            else:
                with self._watch.moving([work]):
                    self.apply(work, factors)
                self._watch.finite(work)
        for (key, *_), small in joined.items():
            moments = advance_joined(small, settled(*key)[1])
            self._watch.finite_joined(small, moments)

    def _advance_listed(self, turn: Turn, steps: Sequence[int]) -> None:
        """Those that step in one op with all that are like them."""
        settled = self._settled(turn.group)
        for (_, step, _), members in turn.alike(steps).items():
            layout, device = turn.layouts[members[0]], turn.mine[members[0]].device
            rng, factors = settled(layout.rule, step, device)
            first = turn.work(members[0], step, rng)
            looked = [turn.work(i, step, rng) for i in members] if self._watch.looks_at(first) else []
            with self._watch.moving(looked):
                columns, places = turn.columns(members), turn.places(members)
                finite = advance_listed(first, columns, places, factors, self._watch.looks_up_to(first))
            if not finite.all():
                for i, one in zip(members, finite.tolist(), strict=True):
                    if not one:
                        self._watch.finite(turn.work(i, step, rng))

    def _settled(self, group: dict[str, Any]) -> Callable[..., tuple[Tensor, tuple[float, ...]]]:
        """``f(rule, step, device)``: the random seed and the rule's factors, made once for all parameters."""

        @cache
        def settled(rule: str, step: int, device: torch.device) -> tuple[Tensor, tuple[float, ...]]:
            return torch.tensor([group["seed"], step], device=device), self.factors(group, rule, step)

        return settled

    @torch.no_grad()
    def begin(self) -> None:
        """Make the states of parameters that were fp32 before ``lb.train.mixed_``, so that what they lack is a state:
        ``offload_`` moves it, a sharding strategy shares it out. Otherwise the first step does so.
        """
        for group in self.param_groups:
            for place, param in enumerate(group["params"]):
                if param.requires_grad and masters.of(param) is not None and not self.state.get(param):
                    if group["master"] in MASTERS:
                        self.state[param] = self._init_state(group, param, self._layout(group, place, param))
                    masters.forget(param)

    def _turns(self, chosen: Sequence[tuple[dict[str, Any], Sequence[int]]]) -> list[Turn]:
        """What a step is to do; raises before anything has changed."""
        turns: list[Turn] = []
        begun: dict[Tensor, dict[str, Any]] = {}
        for group, places in chosen:
            given = group["params"]
            now = [i for i in places if given[i].grad is not None and given[i].numel()]
            params = [given[i] for i in now]
            grads = [param.grad for param in params]
            for i, grad in zip(now, grads, strict=True):
                if grad.layout is not torch.strided:
                    self._refuse_sparse(grad, self.name_of(group, i))
            if not params:
                continue
            roster = self._roster(group, now, params)
            states: list[Any] = list(map(self.state.get, params))
            for i, (param, state) in enumerate(zip(params, states, strict=True)):
                if not state:
                    begun[param] = states[i] = self._init_state(group, param, roster.layouts[i])
            turns.append(Turn.of(group, roster, grads, states))
        if turns and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{type(self).__name__} cannot step while a CUDA graph is captured: learning rate, bias correction and "
                "random seed are numbers of the host, which replays would repeat; capture forward and backward, and "
                "step outside of the graph"
            )
        self.state.update(begun)
        return turns

    def _roster(self, group: dict[str, Any], places: list[int], params: list[Tensor]) -> Roster:
        """The one of the group's last step, unless what it holds by has changed."""
        mine, rules = held(params), [self.rule(group, param) for param in params]
        facts = Roster.facts_of(group, params, mine, rules)
        known = self._rosters.get(id(group))
        if known is None or not known.holds(params, facts):
            layouts = [self._layout(group, place, param) for place, param in zip(places, params, strict=True)]
            kinds = [
                (layout.rule, part.dtype, layout.kinds) if self._is_listed(layout, part) else None
                for layout, part in zip(layouts, mine, strict=True)
            ]
            known = self._rosters[id(group)] = Roster(params, facts, layouts, kinds)
        return known

    def _layout(self, group: dict[str, Any], place: int, param: Tensor) -> ParamLayout:
        """Made once, unless the group's settings change. Raises ValueError where states are kept otherwise by now."""
        rule = self.rule(group, param)
        settings = (rule, group["bits"], group["master"], param.dtype, group["rounding"])
        before, layout = self._layouts.get(param, (None, None))
        if layout is None or before != settings:
            name, kept = self.name_of(group, place), self.kept_as(group, param)
            if before is not None and before[:4] != settings[:4] and self.state.get(param):
                raise ValueError(
                    f"{type(self).__name__}: {name} has stepped with rule, bits, master and dtype {before[:4]}, "
                    f"and now has {settings[:4]}; make another optimizer and load this one's state_dict, which converts"
                )
            rounding = group["rounding"] or find(group["bits"]).rounding
            stream = 2 * self._place(param)
            part = Part.of(param, name)
            aligned = all(is_aligned(part, storage) for storage in kept.values())
            layout = ParamLayout(name, rule, part, kept, rounding, stream, param.numel() < FEW, aligned)
            self._layouts[param] = settings, layout
        return layout

    def _refuse_sparse(self, grad: Tensor, name: str) -> None:
        raise RuntimeError(
            f"{type(self).__name__}: the gradient of {name} is sparse ({grad.layout}), and a step of low-bit states "
            "moves whole blocks; make the Embedding with sparse=False, or use torch.optim.SparseAdam for it"
        )

    def _init_state(self, group: dict[str, Any], param: Tensor, layout: ParamLayout) -> dict[str, Any]:
        """The states before the first step: zeros, and the master."""
        mine = local(param)
        state: dict[str, Any] = {"step": torch.tensor(0.0)}
        for moment, kept in layout.moments.items():
            made = zeros(layout.part, kept, layout.name, mine.device)
            state[moment] = made.codes
            if made.scale is not None:
                state[f"{moment}_scale"] = made.scale
        for whole, shape in self.replicated(param).items():
            state[whole] = torch.zeros(shape, device=mine.device)
        if group["master"] in MASTERS and param.dtype != torch.float32:
            state["master"] = layout.part.tensor(masters.first(group["master"], param, layout.part), param.shape)
        return state

    def _is_listed(self, layout: ParamLayout, param: Tensor) -> bool:
        """Whether one C++ call steps this parameter and others like it."""
        return (
            param.device.type == "cpu"
            and layout.aligned
            and layout.rule not in self.ONE_BY_ONE
            and param.is_contiguous()
            and param.numel() > 0
            and steps.is_native()
        )

    def _is_small(self, work: Work) -> bool:
        """Whether a step of several parameters that are joined does the same to this one."""
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
        """As torch's, for states of any bits and those of torch's optimizer of this name.

        What is kept otherwise here is converted, with a warning that says so; ``bits``, ``master`` and ``rounding``
        stay this optimizer's own. Raises ValueError for states of another rule or shape, and changes nothing then.
        """
        load.into(self, state_dict)

    def torch_state_dict(self) -> dict[str, Any]:
        """The state as torch's optimizer of this name takes it: whole tensors in fp32, second moments as squares.

        Every process of a sharded model takes part. Masters are left out.
        """
        return load.as_torch(self)
