"""Checkpoints for a budget: which parts of each block to recompute, so that a step fits and takes the least time.

An estimate of every option says, for each block, the bytes that it keeps for backward, the most that is held while it
runs, and the time of its recomputation. The choice is exact but for the rounding of bytes: a table over the blocks, of
the least time for what all blocks up to there keep. A last estimate checks it, and where it is above the budget the
choice is made again with less.

Source: Jain et al., "Checkmate", arXiv 1910.02653, poses the problem; here blocks are its units.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from lowbit.convert.select import check_model
from lowbit.memory.checkpoint.parts import find_part, find_stacks
from lowbit.memory.checkpoint.policies import Chosen
from lowbit.memory.checkpoint.selective import kept_products
from lowbit.memory.estimate import Estimate, estimate
from lowbit.sizes import amount, bytes_in, is_bytes
from lowbit.tables import aligned

__all__ = ["CheckpointPlan", "Option", "best", "bytes_of", "plan_checkpoints"]

#: Steps into which bytes are rounded while choices are compared.
_STEPS = 4096

#: How often a choice that an estimate finds above the budget is made again.
_REPAIRS = 6

KEEP = "keep"


def _whole(block: nn.Module) -> list[Chosen]:
    return [Chosen((block,))]


def _but_products(block: nn.Module) -> list[Chosen]:
    return [Chosen((block,), kept_products)]


def _of_part(part: str) -> Callable[[nn.Module], list[Chosen]]:
    return lambda block: [Chosen(tuple(modules)) for modules in find_part(block, part)]


#: What can be done with a block, and why one would.
OPTIONS: dict[str, tuple[Callable[[nn.Module], list[Chosen]], str]] = {
    KEEP: (lambda block: [], "all that backward needs of it is kept: recomputing it is not needed for the budget"),
    "attention": (_of_part("attention"), "its attention alone is recomputed: much memory for little time"),
    "mlp": (_of_part("mlp"), "its feed-forward part alone is recomputed"),
    "save_matmuls": (_but_products, "all but the results of products is recomputed: cheap element-wise work"),
    "block": (_whole, "it is recomputed as a whole: the least memory"),
}


class Option(NamedTuple):
    """One option of one block. ``kept``: bytes from its forward to its backward. ``inside``: the most that is held
    while it runs, without what earlier blocks keep. ``seconds``: of its recomputation.
    """

    name: str
    kept: int
    inside: int
    seconds: float


class CheckpointPlan:
    """What to do with each block. ``peak_bytes``: estimated, of a step. ``seconds``: of all recomputation in a step,
    estimated. ``options``: by the path of the block the name of its option. ``checkpoint_(model, plan)`` does it.
    """

    def __init__(
        self, options: Mapping[str, str], peak_bytes: int, seconds: float, plain: Estimate, budget: int, least: int
    ) -> None:
        self.options, self.peak_bytes, self.seconds = dict(options), peak_bytes, seconds
        self.budget, self.plain_bytes, self.least_bytes = budget, plain.peak_bytes, least

    def why(self, block: str) -> str:
        """The reason of what is done with the block of that path. Raises KeyError for one that the plan has not."""
        name = self.options[block]
        return f"{block}: {name}, {OPTIONS[name][1]}"

    def chosen(self, model: nn.Module) -> list[Chosen]:
        """What of ``model`` is checkpointed. Raises AttributeError for a model without these blocks."""
        return _Options(self.options).chosen(model)

    def __str__(self) -> str:
        rows = [("block", "option"), *self.options.items()]
        return (
            f"budget {amount(self.budget)}: peak {amount(self.peak_bytes)} instead of {amount(self.plain_bytes)}, "
            f"{1e3 * self.seconds:.1f} ms of recomputation a step (estimated)\n{aligned(rows)}"
        )


def plan_checkpoints(
    model: nn.Module,
    batch: Any,
    budget: str | int,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: Any = "adamw",
    **settings: Any,
) -> CheckpointPlan:
    """Choose what to recompute of each block, so that a step holds at most ``budget`` and takes the least time.

    ``budget``: of the whole step, parameters and states included: bytes, a size such as ``"8GB"``, or a share of the
    peak without checkpoints, ``"80%"``. ``batch``, ``loss``, ``optimizer`` and ``settings`` are those of ``estimate``:
    what the model is trained with. Blocks are those of ``checkpoint_``. Nothing is computed, and ``model`` stays.

    Raises ValueError where no choice fits (it says what would), for a model without blocks, and as ``estimate``.
    """
    check_model(model)
    blocks = _blocks(model)
    run = _Runs(model, batch, loss, optimizer, settings, blocks)
    tables = {name: run.measured(dict.fromkeys(blocks, name)) for name in run.names}
    plain = tables[KEEP].usage
    allowed = bytes_of(budget, plain.peak_bytes, "memory.plan_checkpoints")
    options = [
        [Option(name, m.kept[place], m.inside[place], m.seconds[place]) for name, m in tables.items()]
        for place in range(len(blocks))
    ]
    outside = [max(m.outside[place] for m in tables.values()) for place in range(len(blocks) + 1)]
    least = min(m.usage.peak_bytes for m in tables.values())
    target = allowed
    for _ in range(_REPAIRS):
        names = best(options, outside, target)
        if names is None:
            break
        found = dict(zip(blocks, names, strict=True))
        checked = run.measured(found)
        if checked.usage.peak_bytes <= allowed:
            return CheckpointPlan(found, checked.usage.peak_bytes, sum(checked.seconds), plain, allowed, least)
        target -= checked.usage.peak_bytes - allowed
    smallest = min((m.usage for m in tables.values()), key=lambda usage: usage.peak_bytes)
    raise ValueError(
        f"memory.plan_checkpoints: a step fits into {amount(allowed)} by no choice of checkpoints; the least is "
        f"{amount(least)}, in {smallest.moment}. Ask for as much, take a smaller batch with accumulation, an "
        f"optimizer of fewer bits, or offload its states"
    )


def best(options: Sequence[Sequence[Option]], outside: Sequence[int], budget: int) -> list[str] | None:
    """The option of each block, in their order, of the least time in all such that at no moment more than ``budget``
    is held: while block b runs its ``inside`` and what blocks before it keep; outside, with b blocks done,
    ``outside[b]`` and what these keep. None where there is no such choice.
    """
    width = max(budget // _STEPS, 1)
    # By what is kept so far, rounded: its bytes, the time, and how it was reached.
    states: dict[int, tuple[float, int, tuple[Any, ...]]] = {0: (0.0, 0, ())}
    if outside[0] > budget:
        return None
    for place, choices in enumerate(options):
        following: dict[int, tuple[float, int, tuple[Any, ...]]] = {}
        for seconds, kept, path in states.values():
            for option in choices:
                total = kept + option.kept
                if kept + option.inside > budget or total + outside[place + 1] > budget:
                    continue
                reached = (seconds + option.seconds, total, (option.name, path))
                key = total // width
                if key not in following or reached[:2] < following[key][:2]:
                    following[key] = reached
        states = _undominated(following)
    if not states:
        return None
    path = min(states.values(), key=lambda state: state[:2])[2]
    names: list[str] = []
    while path:
        names.append(path[0])
        path = path[1]
    return names[::-1]


def _undominated(states: dict[int, tuple[float, int, Any]]) -> dict[int, tuple[float, int, Any]]:
    """The states that none is both smaller and faster than."""
    found, fastest = {}, math.inf
    for key in sorted(states):
        if states[key][0] < fastest:
            found[key], fastest = states[key], states[key][0]
    return found


def bytes_of(budget: str | int, whole: int, who: str) -> int:
    """A budget in bytes, where it may be a share of ``whole``. Raises ValueError for what is no budget."""
    share = re.fullmatch(r"(\d+(?:\.\d+)?)%", budget) if isinstance(budget, str) else None
    if share is not None:
        return int(whole * float(share[1]) / 100)
    size = bytes_in(budget) if isinstance(budget, str) else budget
    if not is_bytes(size) or not size:
        raise ValueError(f"{who}: budget is bytes above 0, '8GB' or '80%', got {budget!r}")
    return size


def _blocks(model: nn.Module) -> list[str]:
    names = {id(module): name for name, module in model.named_modules()}
    found = list(dict.fromkeys(names[id(block)] for stack in find_stacks(model) for block in stack))
    if not found:
        raise ValueError(
            f"memory.plan_checkpoints: {type(model).__name__} has no ModuleList or Sequential of two or more modules "
            f"of one class to plan for; give checkpoint_ a list of modules or patterns"
        )
    return found


# -- what an estimate says of blocks -----------------------------------------------------------------------------------
class _Measured(NamedTuple):
    usage: Estimate
    kept: list[int]
    inside: list[int]
    outside: list[int]
    seconds: list[float]


class _Runs:
    """Estimates of a model with given options."""

    def __init__(
        self, model: nn.Module, batch: Any, loss: Any, optimizer: Any, settings: dict[str, Any], blocks: list[str]
    ) -> None:
        self._arguments = (model, batch, loss)
        self._optimizer, self._settings, self._blocks = optimizer, settings, blocks
        modules = [model.get_submodule(path) for path in blocks]
        self.names = [
            name for name, (find, _) in OPTIONS.items() if name == KEEP or all(find(module) for module in modules)
        ]

    def measured(self, options: Mapping[str, str]) -> _Measured:
        usage = estimate(*self._arguments, optimizer=self._optimizer, checkpoint=_Options(options), **self._settings)
        return _read(usage, self._blocks)


class _Options(NamedTuple):
    """Options by the paths of blocks, as ``checkpoint_`` takes them."""

    options: Mapping[str, str]

    def chosen(self, model: nn.Module) -> list[Chosen]:
        return [one for path, name in self.options.items() for one in OPTIONS[name][0](model.get_submodule(path))]


def _read(usage: Estimate, blocks: list[str]) -> _Measured:
    """What each block keeps and holds, from the second step of an estimate."""
    places = {path: place for place, path in enumerate(blocks)}
    count, cache = len(blocks), dict[str, int | None]()

    def place_of(layer: str) -> int | None:
        if layer not in cache:
            path = layer
            while path not in places and "." in path:
                path = path.rpartition(".")[0]
            cache[layer] = places.get(path)
        return cache[layer]

    timeline, ops = usage.timeline, usage.ops
    backward = next((i for i, op in enumerate(ops) if op.phase == "backward"), len(ops))
    kept = [0] * count
    for holding in usage.held_at(backward):
        place = place_of(holding.layer)
        if place is not None and holding.kind in ("activations", "weight copies", "temporaries"):
            kept[place] += holding.bytes
    before = [sum(kept[:place]) for place in range(count + 1)]
    inside, outside, seconds = [0] * count, [0] * (count + 1), [0.0] * count
    done = 0
    for index, (moment, op) in enumerate(zip(timeline, ops, strict=True)):
        place = place_of(op.layer)
        if op.phase == "step":
            outside[0] = max(outside[0], moment.bytes)
        elif place is None:
            outside[done] = max(outside[done], moment.bytes - before[done])
        else:
            inside[place] = max(inside[place], moment.bytes - before[place])
            done = place + 1 if op.phase == "forward" else place
        if place is not None and op.phase == "recomputation":
            seconds[place] += usage.op_seconds[index]
    return _Measured(usage, kept, inside, outside, seconds)
