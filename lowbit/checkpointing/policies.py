"""The checkpointing policies, by name: each selects the modules of a model that backward recomputes.

A new policy is a row of ``POLICIES``. A policy with ``block`` acts on single blocks, so plans can choose it block by
block, and ``lb.fit`` and ``lowbit doctor`` list it. With ``fallback``, a run that is out of memory may switch to it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from lowbit.checkpointing.calls import Contexts
from lowbit.checkpointing.parts import PARTS, BlockFunction, find_part, find_stages, own_layers, split_part
from lowbit.checkpointing.selective import kept_products
from lowbit.models.blocks import stacks
from lowbit.models.names import matches, named, patterns_in, plain_name, shown, unmatched
from lowbit.models.wrap import plain_class
from lowbit.name_tables import did_you_mean

__all__ = ["POLICIES", "Choice", "Chosen", "Policy", "choose"]

#: The types of ``checkpoint_``'s ``policy``.
Choice = Any


#: Modules, and functions of blocks between them, that are recomputed together.
Together = Sequence[nn.Module | BlockFunction]


class Chosen(NamedTuple):
    """Modules that are recomputed together, and the contexts that save some of their results (None: save no result)."""

    modules: tuple[nn.Module | BlockFunction, ...]
    contexts: Contexts | None = None


#: Returns the modules of one block that a policy recomputes. Those in one inner sequence are recomputed together.
InBlock = Callable[[nn.Module], Sequence[Together]]


class Policy(NamedTuple):
    """A named way to select modules to checkpoint.

    Attributes:
        choose: ``choose(model)``, or ``choose(model, argument)``, returns the modules to checkpoint. Those in one inner
            sequence are recomputed together. Empty if the model has no such modules.
        about: The recomputed modules, for documents and tables.
        argument: Parses the text after the colon of ``"name:text"``; None if the policy has no argument.
        contexts: Contexts that save some results of the modules.
        block: Selects modules of one block; None if the policy does not act on single blocks.
        fallback: Rank among the policies to which a run switches when memory runs out. Each saves less for backward
            than the policies of lower rank. None: never switched to.
        missing: Returns the error for a model in which ``choose`` selects nothing, or "" if that is no error.
    """

    choose: Callable[..., Sequence[Together]]
    about: str
    argument: Callable[[str], Any] | None = None
    contexts: Contexts | None = None
    block: InBlock | None = None
    fallback: int | None = None
    missing: Callable[[nn.Module], str] = lambda model: "" if stacks(model) else no_stacks(model)

    def of(self, block: nn.Module) -> list[Chosen]:
        """Return the modules of one block that the policy checkpoints."""
        return [] if self.block is None else [Chosen(tuple(modules), self.contexts) for modules in self.block(block)]


def choose(model: nn.Module, policy: Choice) -> list[Chosen]:
    """Return the modules of ``model`` that ``policy`` selects. Raises like ``checkpoint_``."""
    groups = _chosen(model, policy)
    if not groups and not _is_plan(policy):  # a plan may need no checkpoints to meet its budget
        got = repr(policy) if isinstance(policy, str) else f"a {type(policy).__name__}"
        raise ValueError(
            f"memory.checkpoint_: expected a policy that chooses modules of {plain_class(model).__name__}, got {got} "
            f"that chooses none; model.named_modules() lists their names. To remove checkpoints, call "
            f"memory.uncheckpoint_(model)"
        )
    return groups


def _is_plan(policy: Choice) -> bool:
    return hasattr(policy, "chosen") and not isinstance(policy, nn.Module)


def _chosen(model: nn.Module, policy: Choice) -> list[Chosen]:
    if _is_plan(policy):
        return list(policy.chosen(model))
    if isinstance(policy, str) and (policy.split(":")[0] in POLICIES or not _is_pattern(policy)):
        return _by_name(model, policy)
    if isinstance(policy, Mapping):
        return [group for pattern, inner in policy.items() for group in _by_pattern(model, pattern, inner)]
    if callable(policy) and not isinstance(policy, nn.Module):
        return _each(_outermost(model, lambda module, path: matches(policy, path, module)))
    if isinstance(policy, str | nn.Module):
        return _listed(model, [policy])
    if not isinstance(policy, Iterable) or isinstance(policy, bytes):
        raise TypeError(
            f"memory.checkpoint_: expected a policy's name, a list of modules or of patterns, a mapping of patterns to "
            f"policies, or a function of module and path; got {type(policy).__name__}. To remove checkpoints, call "
            f"memory.uncheckpoint_(model)"
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
    groups = [Chosen(tuple(modules), row.contexts) for modules in row.choose(model, *argument)]
    missing = "" if groups else row.missing(model)
    if missing:
        raise ValueError(f"memory.checkpoint_: {missing}")
    return groups


def no_stacks(model: nn.Module) -> str:
    """Return the error for a model without repeated blocks."""
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
    """Split ``stack`` into ``parts`` runs, or one per module if there are fewer. Their sizes differ by at most one."""
    parts = min(parts, len(stack))
    ends = [i * len(stack) // parts for i in range(parts + 1)]
    return [stack[begin:end] for begin, end in itertools.pairwise(ends)]


def _in_blocks(segments_of: InBlock, model: nn.Module) -> list[Together]:
    segments = [segment for stack in _stacks(model) for block in stack for segment in segments_of(block)]
    return list({tuple(segment): segment for segment in segments}.values())  # hybrids share modules among blocks


def _no_part(part: str, instead: str, model: nn.Module) -> str:
    blocks = [block for stack in _stacks(model) for block in stack]
    if not blocks:
        return no_stacks(model)
    classes = ", ".join(dict.fromkeys(plain_class(block).__name__ for block in blocks))
    other_parts = [other for other in PARTS if other != part and any(find_part(block, other) for block in blocks)]
    return (
        f"expected a module of {instead} in the blocks ({classes}), found none {_why_missing(part, blocks[0])}; use "
        f"{', '.join(map(repr, ('block', *other_parts)))}, or a list of patterns such as ['*.mixer'] for modules with "
        f"other names"
    )


def _why_missing(part: str, block: nn.Module) -> str:
    """Return why a block has no module for that part."""
    layers, functions = split_part(block, part)
    layers_of_block = own_layers(block)
    if not functions and len(layers_of_block) > 1:
        return f"with such a name, but layers that the block's own forward calls ({', '.join(layers_of_block)})"
    if not functions:
        return "with such a name"
    return (
        f"but {', '.join(layers)} with a method between them, which must be a module (for a ReLU: "
        f"block.{functions[0]} = torch.nn.ReLU())"
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
    return Policy(partial(_in_blocks, block), about, block=block, **more)


def _full_block(block: nn.Module) -> list[list[nn.Module]]:
    return [[block]]


def _of_part(part: str, about: str, instead: str, **more: Any) -> Policy:
    """Return the policy that recomputes one part of each block."""
    return _by_block(partial(find_part, part=part), about, missing=partial(_no_part, part, instead), **more)


POLICIES = {
    "attention": _of_part("attention", "the attention of each block", "attention", fallback=1),
    "mlp": _of_part("mlp", "the feed-forward part of each block", "the feed-forward part"),
    "save_matmuls": _by_block(
        _full_block, "each block except matmuls, convolutions and attention, whose results are saved",
        contexts=kept_products, fallback=2,
    ),
    "block": _by_block(_full_block, "each repeated block", fallback=4),
    "sqrt": Policy(_sqrt, "about sqrt(N) segments of consecutive blocks, each as a unit", fallback=3),
    "every": Policy(_every, "every N-th block, starting with the first", _count),
    "ratio": Policy(_ratio, "a fraction N of the blocks, evenly spaced", _share),
    "segments": Policy(_segments, "N segments of consecutive blocks, each as a unit", _count),
    "stages": Policy(
        find_stages, "in a convolutional network, the layers before its last down-sampling", missing=_no_stages
    ),
}  # fmt: skip


# -- policies by pattern, list and function ---------------------------------------------------------------------------
def _is_pattern(text: str) -> bool:
    return text.startswith("re:") or any(letter in text for letter in ".*?[")


def _paths(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(plain_name(path), module) for path, module in model.named_modules()]


def _outermost(model: nn.Module, wanted: Callable[[nn.Module, str], bool]) -> list[nn.Module]:
    """Return the modules for which ``wanted`` is true and that are not inside another such module."""
    inside: set[int] = set()
    modules = []
    for path, module in _paths(model):
        if id(module) not in inside and wanted(module, path):
            inside |= {id(inner) for inner in module.modules()}
            modules.append(module)
    return modules


def _each(modules: Iterable[nn.Module]) -> list[Chosen]:
    return [Chosen((called,)) for module in modules for called in _called(module)]


def _matching(model: nn.Module, pattern: Any) -> list[nn.Module]:
    """Return the outermost modules that ``pattern`` matches. Raise ValueError if there are none."""
    if unmatched([pattern], _paths(model)):
        raise ValueError(
            f"memory.checkpoint_: no module of {plain_class(model).__name__} is matched by {shown(pattern)}; use names "
            f"of model.named_modules()"
        )
    return _outermost(model, lambda module, path: named(pattern, path, module))


def _by_pattern(model: nn.Module, pattern: Any, policy: Choice) -> list[Chosen]:
    roots = _matching(model, pattern)
    return [] if policy is None else [group for module in roots for group in _chosen(module, policy)]


def _listed(model: nn.Module, entries: Iterable[Any]) -> list[Chosen]:
    inside = {id(module) for module in model.modules()}
    groups: list[Chosen] = []
    for entry in entries:
        if not isinstance(entry, nn.Module):
            (pattern,) = patterns_in((entry,), "memory.checkpoint_: policy")
            groups += _each(_matching(model, pattern))
        elif id(entry) not in inside:
            raise ValueError(
                f"memory.checkpoint_: a {type(entry).__name__} of the list is no module of the model; list modules of "
                f"the model itself"
            )
        else:
            groups += _each([entry])
    return groups


def _called(module: nn.Module) -> list[nn.Module]:
    """Return the module, or its children if it is a list or dict of modules, which is never called itself."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return [module]
    return [called for child in module.children() for called in _called(child)]
