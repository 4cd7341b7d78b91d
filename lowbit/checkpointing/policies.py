"""The policies of checkpointing: what of a model is recomputed, by name.

A new one is a row of ``POLICIES``. One that acts on single blocks says so by ``block``; plans then choose it block by
block, and ``lb.fit``, ``lowbit doctor`` and the documents know it. ``fallback`` lets runs fall back on it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from lowbit.checkpointing.calls import Contexts
from lowbit.checkpointing.parts import PARTS, find_part, find_stages, split_part
from lowbit.checkpointing.selective import kept_products
from lowbit.models.blocks import stacks
from lowbit.models.names import matches, named, patterns_in, plain_name, shown, unmatched
from lowbit.models.wrap import plain_class
from lowbit.name_tables import did_you_mean

__all__ = ["POLICIES", "Choice", "Chosen", "Policy", "choose"]

#: What ``checkpoint_`` takes.
Choice = Any


class Chosen(NamedTuple):
    """Modules that are recomputed as one, and what of their results is kept."""

    modules: tuple[nn.Module, ...]
    contexts: Contexts | None = None


#: The modules of one block that a policy recomputes, those in one sequence as one.
InBlock = Callable[[nn.Module], Sequence[Sequence[nn.Module]]]


class Policy(NamedTuple):
    """``choose(model)``, or ``choose(model, argument)`` with ``argument``, which reads it from its text: the modules
    to checkpoint, those in one sequence as one; none where a model has no such modules, for which ``missing(model)``
    has words. ``about``: what is recomputed. ``contexts``: what keeps results besides. ``block(block)``: what it
    chooses of one block, of a policy that acts on single blocks. ``fallback``: its rank among the policies that a run
    takes when memory runs out, of which each keeps less than those before; None: no run takes it.
    """

    choose: Callable[..., Sequence[Sequence[nn.Module]]]
    about: str
    argument: Callable[[str], Any] | None = None
    contexts: Contexts | None = None
    block: InBlock | None = None
    fallback: int | None = None
    missing: Callable[[nn.Module], str] = lambda model: "" if stacks(model) else no_stacks(model)

    def of(self, block: nn.Module) -> list[Chosen]:
        """What it checkpoints of one block."""
        return [] if self.block is None else [Chosen(tuple(modules), self.contexts) for modules in self.block(block)]


def choose(model: nn.Module, policy: Choice) -> list[Chosen]:
    """What ``policy`` checkpoints of ``model``. Raises as ``checkpoint_``."""
    found = _chosen(model, policy)
    if not found and not _is_plan(policy):  # a plan weighs a budget, which may need no checkpoints
        got = repr(policy) if isinstance(policy, str) else f"a {type(policy).__name__}"
        raise ValueError(
            f"memory.checkpoint_: expected a policy that chooses modules of {plain_class(model).__name__}, got {got} "
            f"that chooses none; their names are in model.named_modules(). memory.uncheckpoint_(model) undoes "
            f"checkpoints"
        )
    return found


def _is_plan(policy: Choice) -> bool:
    return hasattr(policy, "chosen") and not isinstance(policy, nn.Module)


def _chosen(model: nn.Module, policy: Choice) -> list[Chosen]:
    if _is_plan(policy):
        return list(policy.chosen(model))
    if isinstance(policy, str) and (policy.split(":")[0] in POLICIES or not _is_pattern(policy)):
        return _by_name(model, policy)
    if isinstance(policy, Mapping):
        return [chosen for pattern, one in policy.items() for chosen in _by_pattern(model, pattern, one)]
    if callable(policy) and not isinstance(policy, nn.Module):
        return _each(_outermost(model, lambda module, path: matches(policy, path, module)))
    if isinstance(policy, str | nn.Module):
        return _listed(model, [policy])
    if not isinstance(policy, Iterable) or isinstance(policy, bytes):
        raise TypeError(
            f"memory.checkpoint_: expected a policy's name, a list of modules or of patterns, a mapping of patterns to "
            f"policies, or a function of module and path; got {type(policy).__name__}. memory.uncheckpoint_(model) "
            f"undoes checkpoints"
        )
    return _listed(model, policy)


# -- named policies ---------------------------------------------------------------------------------------------------
def _by_name(model: nn.Module, policy: str) -> list[Chosen]:
    name, colon, text = policy.partition(":")
    row = POLICIES.get(name)
    if row is None:
        raise ValueError(
            f"memory.checkpoint_: expected a policy ({', '.join(POLICIES)}), got {policy!r}"
            f"{did_you_mean(name, POLICIES)}; for a module's name write a list, [{policy!r}]"
        )
    if (row.argument is not None) != bool(colon):
        expected = f"{name}:N" if row.argument else name
        raise ValueError(f"memory.checkpoint_: expected {expected!r}, got {policy!r}")
    argument = () if row.argument is None else (row.argument(text),)
    found = [Chosen(tuple(modules), row.contexts) for modules in row.choose(model, *argument)]
    missing = "" if found else row.missing(model)
    if missing:
        raise ValueError(f"memory.checkpoint_: {missing}")
    return found


def no_stacks(model: nn.Module) -> str:
    """What to say of a model without blocks."""
    return (
        f"{plain_class(model).__name__} has no ModuleList or Sequential of two or more modules of one class; pass a "
        f"list of modules or of their names to say what to checkpoint"
    )


def _stacks(model: nn.Module) -> list[list[nn.Module]]:
    return [list(dict.fromkeys(stack)) for stack in stacks(model)]


def _some_blocks(model: nn.Module, take: Callable[[list[nn.Module]], Iterable[nn.Module]]) -> list[list[nn.Module]]:
    return [[block] for stack in _stacks(model) for block in take(stack)]


def _every(model: nn.Module, k: int) -> list[list[nn.Module]]:
    return _some_blocks(model, lambda stack: stack[::k])


def _ratio(model: nn.Module, share: float) -> list[list[nn.Module]]:
    def spread(stack: list[nn.Module]) -> list[nn.Module]:
        count = round(share * len(stack))
        return [stack[i * len(stack) // count] for i in range(count)]

    return _some_blocks(model, spread)


def _segments(model: nn.Module, k: int) -> list[list[nn.Module]]:
    return [segment for stack in _stacks(model) for segment in _divided(stack, k)]


def _sqrt(model: nn.Module) -> list[list[nn.Module]]:
    return [segment for stack in _stacks(model) for segment in _divided(stack, round(math.sqrt(len(stack))))]


def _divided(stack: list[nn.Module], parts: int) -> list[list[nn.Module]]:
    """``stack`` in so many parts, or as many as it has modules, whose sizes differ by one at most."""
    parts = min(parts, len(stack))
    ends = [i * len(stack) // parts for i in range(parts + 1)]
    return [stack[begin:end] for begin, end in itertools.pairwise(ends)]


def _in_blocks(block: InBlock, model: nn.Module) -> list[Sequence[nn.Module]]:
    found = [segment for stack in _stacks(model) for one in stack for segment in block(one)]
    return list({tuple(map(id, segment)): segment for segment in found}.values())  # hybrids share one among blocks


def _no_part(part: str, instead: str, model: nn.Module) -> str:
    blocks = [block for stack in _stacks(model) for block in stack]
    if not blocks:
        return no_stacks(model)
    classes = ", ".join(dict.fromkeys(plain_class(block).__name__ for block in blocks))
    others = [other for other in PARTS if other != part and any(find_part(block, other) for block in blocks)]
    return (
        f"expected a module of {instead} in the blocks ({classes}), found none {_where_it_is(part, blocks[0])}; use "
        f"{', '.join(map(repr, ('block', *others)))}, or a list of patterns such as ['*.mixer'] for modules of another "
        f"name"
    )


def _where_it_is(part: str, block: nn.Module) -> str:
    """Why a block has no module of that part."""
    layers, functions = split_part(block, part)
    if not functions:
        return "that is called so"
    return (
        f"but {', '.join(layers)} with a function between them, where a module is needed (block.{functions[0]} = "
        f"torch.nn.ReLU(), where it is a ReLU)"
    )


def _no_stages(model: nn.Module) -> str:
    return (
        f"expected convolutions with a stride, or poolings, after blocks or layers of a Sequential in "
        f"{plain_class(model).__name__}, found none; use 'block', or a list of modules"
    )


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"memory.checkpoint_: expected a whole number from 1 after the colon, got {text!r}")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise ValueError(f"memory.checkpoint_: expected a share above 0 and up to 1 after the colon, got {text!r}")
    return share


def _by_block(block: InBlock, about: str, **more: Any) -> Policy:
    """A policy that acts on each block."""
    return Policy(partial(_in_blocks, block), about, block=block, **more)


def _whole(block: nn.Module) -> list[list[nn.Module]]:
    return [[block]]


def _of_part(part: str, about: str, instead: str, **more: Any) -> Policy:
    """The policy that recomputes one part of each block."""
    return _by_block(partial(find_part, part=part), about, missing=partial(_no_part, part, instead), **more)


POLICIES = {
    "attention": _of_part("attention", "the attention of each block", "attention", fallback=1),
    "mlp": _of_part("mlp", "the feed-forward part of each block", "the feed-forward part"),
    "save_matmuls": _by_block(
        _whole, "each block, but for the results of products, convolutions and attention", contexts=kept_products,
        fallback=2,
    ),
    "block": _by_block(_whole, "each repeated block", fallback=4),
    "sqrt": Policy(_sqrt, "about sqrt(N) segments of consecutive blocks, each as one", fallback=3),
    "every": Policy(_every, "each N-th block, from the first", _count),
    "ratio": Policy(_ratio, "a share of the blocks, spread evenly", _share),
    "segments": Policy(_segments, "N segments of consecutive blocks, each as one", _count),
    "stages": Policy(
        find_stages, "of a convolutional net what comes before its last down-sampling", missing=_no_stages
    ),
}  # fmt: skip


# -- policies by pattern, list and function ---------------------------------------------------------------------------
def _is_pattern(text: str) -> bool:
    return text.startswith("re:") or any(letter in text for letter in ".*?[")


def _paths(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(plain_name(path), module) for path, module in model.named_modules()]


def _outermost(model: nn.Module, wanted: Callable[[nn.Module, str], bool]) -> list[nn.Module]:
    """The modules that are wanted and not inside of one that is."""
    inside: set[int] = set()
    found = []
    for path, module in _paths(model):
        if id(module) not in inside and wanted(module, path):
            inside |= {id(inner) for inner in module.modules()}
            found.append(module)
    return found


def _each(modules: Iterable[nn.Module]) -> list[Chosen]:
    return [Chosen((called,)) for module in modules for called in _called(module)]


def _by_pattern(model: nn.Module, pattern: Any, policy: Choice) -> list[Chosen]:
    _refuse_missing(model, [pattern])
    if policy is None:
        return []
    above = _outermost(model, lambda module, path: named(pattern, path, module))
    return [chosen for module in above for chosen in _chosen(module, policy)]


def _listed(model: nn.Module, given: Iterable[Any]) -> list[Chosen]:
    inside = {id(module) for module in model.modules()}
    found: list[Chosen] = []
    for one in given:
        if not isinstance(one, nn.Module):
            (pattern,) = patterns_in((one,), "memory.checkpoint_: policy")
            _refuse_missing(model, [pattern])
            wanted = partial(_is_named, pattern)
            found += _each(_outermost(model, wanted))
        elif id(one) not in inside:
            raise ValueError(
                f"memory.checkpoint_: a {type(one).__name__} of the list is no module of the model; take modules from "
                f"the model that is to be checkpointed"
            )
        else:
            found += _each([one])
    return found


def _is_named(pattern: Any, module: nn.Module, path: str) -> bool:
    return named(pattern, path, module)


def _called(module: nn.Module) -> list[nn.Module]:
    """The module, or those in it where it is a list or a mapping of modules, which nobody calls."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return [module]
    return [called for child in module.children() for called in _called(child)]


def _refuse_missing(model: nn.Module, patterns: list[Any]) -> None:
    missing = unmatched(patterns, _paths(model))
    if missing:
        raise ValueError(
            f"memory.checkpoint_: no module of {plain_class(model).__name__} is meant by "
            f"{', '.join(map(shown, missing))}; names are those of model.named_modules()"
        )
