"""Selects the modules that a conversion converts, with their recipes, and gives reasons for the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from lowbit.convert.adapters import Adapter, find
from lowbit.models.check import check_model
from lowbit.models.names import is_inside, last_match, matches, patterns_in, plain_name, spells, unmatched
from lowbit.models.ties import paths
from lowbit.name_tables import did_you_mean
from lowbit.nn.base import KINDS, full_name, kind
from lowbit.recipes import LayerRecipes, Pattern, Recipe
from lowbit.report import left_lines

__all__ = [
    "DEFAULT_SKIP", "Chosen", "Judge", "Protection", "Selection", "Skip", "Verdict", "is_table",
    "nothing_found", "plain_layers", "recipe_for", "select",
]  # fmt: skip

#: The default of ``skip``: the output projection of language models. ``lowbit.convert.protect`` adds output layers with
#: other names.
DEFAULT_SKIP = ("lm_head",)

#: The type of ``skip``: a pattern of ``lowbit.models.names``, or several.
Skip = Pattern | Iterable[Pattern]

#: Paths and modules.
_Modules = list[tuple[str, nn.Module]]

#: Words in the names of parameters that are added or looked up, not multiplied.
_ADDED = frozenset({"token", "tokens", "embed", "embedding", "embeddings", "bias"})


class Verdict(NamedTuple):
    """What a conversion does with a module. Without ``adapter``, ``reason`` and ``error`` it has nothing to convert."""

    adapter: Adapter | None = None  # converts the module
    reason: str | None = None  # why the module stays
    error: str | None = None  # stops the conversion, unless the module is skipped
    inside: bool = False  # whether submodules are judged as well


#: ``judge(names, module)`` returns the verdict on a module with these names.
Judge = Callable[[list[str], nn.Module], Verdict]


class Chosen(NamedTuple):
    """A module to convert."""

    module: Any
    adapter: Adapter
    recipe: Recipe | None  # None in conversions without recipes


class Protection(NamedTuple):
    """The reason why a module stays unless a pattern of the recipes contains ``word`` literally."""

    word: str  # the part of the name that identifies it; empty: no pattern overrides the protection
    reason: str


@dataclass
class Selection:
    """The result of ``select``."""

    chosen: dict[str, Chosen] = field(default_factory=dict)  # modules to convert, by first name
    skipped: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)  # reasons, by name


class _Candidate(NamedTuple):
    names: list[str]
    module: nn.Module
    verdict: Verdict


def select(
    model: nn.Module,
    judge: Judge,
    recipes: LayerRecipes | None = None,
    skip: Skip = (),
    protect: Callable[[str, nn.Module], Protection | None] = lambda name, module: None,
) -> Selection:
    """Select the modules of ``model`` with an adapter from ``judge`` and a recipe, except skipped and protected ones.

    Args:
        model: The model to convert.
        judge: Returns the Verdict on a module.
        recipes: The recipes; None for conversions without recipes.
        skip: Patterns of modules to leave.
        protect: ``protect(name, module)`` returns the Protection of a module, or None.

    Raises:
        ValueError: A pattern matches nothing, or ``judge`` has an error for a module that is not skipped.
        TypeError: ``model`` is not an nn.Module, or a pattern has another type.
    """
    check_model(model)
    names, modules = paths(model), {id(module): module for module in model.modules()}
    patterns = () if recipes is None else patterns_in(tuple(pattern for pattern, _ in recipes.patterns), "recipes")
    every = [(plain_name(name), modules[key]) for key, aliases in names.items() for name in aliases]
    skips = patterns_in(skip, "skip")
    _refuse_missing("skip", skips, every, every)
    selection, layers, closed = Selection(), [], []

    def spelled(path: str, word: str) -> bool:
        return any(spells(pattern, path, word) for pattern in patterns)

    for aliases, module, verdict in _candidates(names, modules, judge):
        first, plain = aliases[0], [plain_name(name) for name in aliases]
        layers += [(path, module) for path in plain]
        closed += [] if verdict.inside else layers[-len(plain) :]
        if any(matches(pattern, path, module) for pattern in skips for path in plain):
            selection.skipped.append(first)
            continue
        protection = protect(first, module)
        if protection is not None and not any(spelled(path, protection.word) for path in plain):
            if protection.reason:
                selection.left[first] = protection.reason
            continue
        if verdict.error is not None:
            raise ValueError(f"{first or 'the model'} {verdict.error}")
        recipe = None if recipes is None else _recipe(recipes, plain, module)
        if recipes is not None and recipe is None:
            selection.skipped.append(first)
        elif verdict.adapter is not None:
            slower = None if recipe is None else verdict.adapter.slower(module, recipe)
            if slower is not None and not any(spelled(path, path.rpartition(".")[2]) for path in plain):
                selection.left[first] = slower
                continue
            selection.chosen[first] = Chosen(module, verdict.adapter, recipe)
        else:
            selection.left[first] = verdict.reason or ""
    if layers:
        _refuse_parts("skip", skips, layers, closed, every)
        _refuse_parts("recipes", patterns, layers, closed, every)
        _refuse_missing("recipes", patterns, layers, every)
    return selection


def _candidates(names: dict[int, list[str]], modules: dict[int, nn.Module], judge: Judge) -> Iterator[_Candidate]:
    """The modules with a verdict, and all their names; not those inside of a module that is converted as one."""
    above: str | None = None  # modules come depth first, so all submodules of this one come next
    for key, module in modules.items():
        first = names[key][0]
        if above is not None and first.startswith(f"{above}." if above else ""):
            continue
        verdict = judge(names[key], module)
        if not verdict.inside:
            above = first
        if verdict.adapter is not None or verdict.reason is not None or verdict.error is not None:
            yield _Candidate(names[key], module, verdict)


def recipe_for(recipes: LayerRecipes, path: str, module: nn.Module) -> Recipe | None:
    """The recipe of the layer at ``path``; None: it is left as it is."""
    return last_match(recipes.patterns, plain_name(path), module)


def _recipe(recipes: LayerRecipes, names: list[str], module: nn.Module) -> Recipe | None:
    """The recipe of a module with these names. Raises ValueError if two names have different recipes."""
    by_name = {name: recipe_for(recipes, name, module) for name in names}
    if any(recipe is None for recipe in by_name.values()):
        return None
    (first, recipe), *rest = by_name.items()
    for name, other in rest:
        if other != recipe:
            raise ValueError(
                f"{first} and {name} are one module, but have the recipes {recipe} and {other}; give both names one"
            )
    return recipe


def _refuse_missing(what: str, patterns: tuple[Pattern, ...], modules: _Modules, every: _Modules) -> None:
    """Raise ValueError for a pattern that matches none of ``modules``."""
    missed = [pattern for pattern in unmatched(patterns, modules) if pattern not in DEFAULT_SKIP]
    if missed:
        raise ValueError(
            f"{what}: the pattern {missed[0]!r} matches no {'module' if modules is every else 'layer'}"
            f"{did_you_mean(missed[0], _endings(every))}; names are such as {_examples(modules)}. A name matches from "
            f"any dot, and '*' matches any text; 're:' must match the full path"
        )


def _refuse_parts(
    what: str, patterns: tuple[Pattern, ...], layers: _Modules, closed: _Modules, every: _Modules
) -> None:
    """Raise ValueError for a pattern that matches no layer but a submodule of a ``closed`` one, converted as one."""
    for pattern in unmatched(patterns, layers):
        parts = [path for path, module in every if matches(pattern, path, module)]
        for path, layer in closed:
            part = next((part for part in parts if is_inside(part, path)), None)
            if part is not None:
                raise ValueError(
                    f"{what}: the pattern {pattern!r} matches {part!r}, a part of the {type(layer).__name__} {path!r}, "
                    f"which is one layer; name that instead"
                )


def _endings(modules: _Modules) -> set[str]:
    """The names of modules, and the rest of each name after each dot."""
    parts = [name.split(".") for name, _ in modules if name]
    return {".".join(words[start:]) for words in parts for start in range(len(words))}


def _examples(modules: _Modules, most: int = 4) -> str:
    names = [name for name, _ in modules]
    leaves = [name for name in names if name and not any(other.startswith(f"{name}.") for other in names)]
    return ", ".join(repr(name) for name in leaves[:most]) or "none (the model has no submodules)"


# -- judging plain layers ---------------------------------------------------------------------------------------------
def plain_layers(only: tuple[type[nn.Module], ...] | None = None, replaced: bool = True) -> Judge:
    """The judge for plain layers of the classes in the table, or only those in ``only``.

    ``replaced``: whether layers are replaced by new modules, which compiled code would not see.
    """
    allowed = None if only is None else {full_name(cls) for cls in only}

    def judge(names: list[str], module: nn.Module) -> Verdict:
        state = kind(module)
        if state is not None:
            return Verdict(error=_detailed(module, KINDS[state]))
        adapter, listed, reason = find(module)
        if listed is None or (allowed is not None and listed not in allowed):
            # A listed class may read the weights of its submodules itself.
            return Verdict(reason=_not_converted(module) if _holds_weights(module) else None, inside=listed is None)
        error = _not_ready(names, module, replaced)
        if error is not None:
            return Verdict(error=error)
        if adapter is None:
            return Verdict(reason=reason)
        reason = adapter.refuses(module)
        return Verdict(reason=reason) if reason is not None else Verdict(adapter=adapter)

    return judge


def _detailed(module: Any, remedy: str) -> str:
    recipe = getattr(module, "recipe", None)
    return remedy if recipe is None else remedy.replace(";", f" (recipe {recipe});", 1)


def _not_ready(names: list[str], module: nn.Module, replaced: bool) -> str | None:
    if any(p is not None and is_lazy(p) for p in module._parameters.values()):
        return (
            f"is a {type(module).__name__} whose weight has no shape yet; call the model on one input first, or name "
            f"the layer in skip=..."
        )
    compiled = vars(module).get("_compiled_call_impl") is not None
    if replaced and (compiled or any(name.split(".")[-1] == "_orig_mod" for name in names)):
        return "is compiled by itself, and its compiled code would not see the new layer; quantize first, then compile"
    return None


def _not_converted(module: nn.Module) -> str:
    name = type(module).__name__
    stacked = [f"{p} {list(w.shape)}" for p, w in _weights(module).items() if not is_lazy(w) and w.dim() == 3]
    if stacked and not hasattr(module, "kernel_size"):
        return f"{name} holds stacked matrices ({', '.join(stacked)}), and its class is not supported"
    return f"the class {name} is not supported"


def is_table(module: nn.Module) -> bool:
    """Whether the module is an embedding, which looks up rows of its weight."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) or "Embedding" in type(module).__name__


def _matrix(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and (is_lazy(parameter) or parameter.dim() > 1)


def _holds_weights(module: nn.Module) -> bool:
    """Whether the module has a weight matrix to mention in the report; not for embeddings and norms."""
    if is_table(module) or "Norm" in type(module).__name__:
        return False
    return bool(_weights(module))


def _weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """The module's own matrices, without parameters that are added or looked up, by their name or shape [1, N, D]."""
    return {
        name: p
        for name, p in module._parameters.items()
        if p is not None and _matrix(p) and _ADDED.isdisjoint(name.lower().split("_"))
        if is_lazy(p) or p.dim() == 2 or p.shape[0] > 1 or hasattr(module, "kernel_size")
    }


# -- nothing to do ----------------------------------------------------------------------------------------------------
def nothing_found(model: nn.Module, selection: Selection, what: str, converted: str) -> str:
    """The message of a conversion without a layer to convert."""
    classes = Counter(
        type(module).__name__ for module in model.modules() if any(_matrix(p) for p in module._parameters.values())
    )
    counts = ", ".join(f"{count} {name}" for name, count in classes.most_common()) or "no layer with a weight matrix"
    lines = [f"{what} found nothing to convert: it converts layers of class {converted}, and the model has {counts}"]
    if selection.skipped:
        lines.append(
            f"skipped as asked: {', '.join(selection.skipped)}; pass skip=(), or recipes that match these, to convert "
            f"them"
        )
    return "\n".join([*lines, *left_lines(selection.left)])
