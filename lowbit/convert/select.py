"""Which modules of a model a conversion takes, with which recipe, and why the others stay as they are."""

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

#: Left in high precision unless the caller says otherwise: the output projection of language models.
DEFAULT_SKIP = ("lm_head",)

#: Which modules a caller leaves out: a pattern of ``lowbit.models.names``, or several.
Skip = Pattern | Iterable[Pattern]

#: Modules with their paths.
_Modules = list[tuple[str, nn.Module]]

#: Words in the names of parameters that no product has for a weight.
_ADDED = frozenset({"token", "tokens", "embed", "embedding", "embeddings", "bias"})


class Verdict(NamedTuple):
    """What a conversion does with one kind of module.

    ``adapter``: converts it. ``reason``: it stays, for this reason. ``error``: the conversion stops, unless the module
    is skipped. With none of them it has nothing to convert. ``inside``: the modules inside are looked at as well.
    """

    adapter: Adapter | None = None
    reason: str | None = None
    error: str | None = None
    inside: bool = False


#: Says what becomes of a module with these names.
Judge = Callable[[list[str], nn.Module], Verdict]


class Chosen(NamedTuple):
    """A module to convert; ``recipe`` is None for conversions that have none."""

    module: Any
    adapter: Adapter
    recipe: Recipe | None


class Protection(NamedTuple):
    """Why a module stays unless a mapping of recipes spells ``word``, the part of its name that tells what it is; with
    no ``word`` whatever is spelled.
    """

    word: str
    reason: str


@dataclass
class Selection:
    """The modules to convert by (first) name, the names that were skipped, and why others are left as they are."""

    chosen: dict[str, Chosen] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)


class _Candidate(NamedTuple):
    names: list[str]
    module: nn.Module
    verdict: Verdict


def select(
    model: nn.Module,
    judge: Judge,
    plan: LayerRecipes | None = None,
    skip: Skip = (),
    protect: Callable[[str, nn.Module], Protection | None] = lambda name, module: None,
) -> Selection:
    """The modules of ``model`` that ``judge`` gives an adapter, ``skip`` does not mean and ``plan`` has a recipe for.

    ``protect``: what stays unless a pattern of ``plan`` spells it.
    Raises TypeError for what is no model or no pattern; ValueError for a pattern without a match and as
    ``judge`` says.
    """
    check_model(model)
    names, modules = paths(model), {id(module): module for module in model.modules()}
    patterns = () if plan is None else patterns_in(tuple(pattern for pattern, _ in plan.patterns), "recipes")
    every = [(plain_name(name), modules[key]) for key, several in names.items() for name in several]
    skips = patterns_in(skip, "skip")
    _refuse_missing("skip", skips, every, every)
    found, reached, whole = Selection(), [], []

    def spelled(path: str, word: str) -> bool:
        return any(spells(pattern, path, word) for pattern in patterns)

    for candidate in _candidates(names, modules, judge):
        several, module, verdict = candidate
        first, plain = several[0], [plain_name(name) for name in several]
        reached += [(path, module) for path in plain]
        whole += [] if verdict.inside else reached[-len(plain) :]
        if any(matches(pattern, path, module) for pattern in skips for path in plain):
            found.skipped.append(first)
            continue
        protection = protect(first, module)
        if protection is not None and not any(spelled(path, protection.word) for path in plain):
            if protection.reason:
                found.left[first] = protection.reason
            continue
        if verdict.error is not None:
            raise ValueError(f"{first or 'the model'} {verdict.error}")
        recipe = None if plan is None else _one_recipe(plan, plain, module)
        if plan is not None and recipe is None:
            found.skipped.append(first)
        elif verdict.adapter is not None:
            slower = None if recipe is None else verdict.adapter.slower(module, recipe)
            if slower is not None and not any(spelled(path, path.rpartition(".")[2]) for path in plain):
                found.left[first] = slower
                continue
            found.chosen[first] = Chosen(module, verdict.adapter, recipe)
        else:
            found.left[first] = verdict.reason or ""
    if reached:
        _refuse_parts("skip", skips, reached, whole, every)
        _refuse_parts("recipes", patterns, reached, whole, every)
        _refuse_missing("recipes", patterns, reached, every)
    return found


def _candidates(names: dict[int, list[str]], modules: dict[int, nn.Module], judge: Judge) -> Iterator[_Candidate]:
    """The modules that ``judge`` has something to say of, with all their names; not those inside of a whole one."""
    above: str | None = None  # the module whose inside comes next, if any does: modules come depth first
    for key, module in modules.items():
        first = names[key][0]
        if above is not None and first.startswith(f"{above}." if above else ""):
            continue
        verdict = judge(names[key], module)
        if not verdict.inside:
            above = first
        if verdict.adapter is not None or verdict.reason is not None or verdict.error is not None:
            yield _Candidate(names[key], module, verdict)


def recipe_for(plan: LayerRecipes, path: str, module: nn.Module) -> Recipe | None:
    """The recipe that ``plan`` has for the layer at ``path``; None: it is left as it is."""
    return last_match(plan.patterns, plain_name(path), module)


def _one_recipe(plan: LayerRecipes, names: list[str], module: nn.Module) -> Recipe | None:
    """The recipe of a module with these names. Raises ValueError where two names ask for two recipes."""
    recipes = {name: recipe_for(plan, name, module) for name in names}
    if any(recipe is None for recipe in recipes.values()):
        return None
    (first, recipe), *others = recipes.items()
    for name, other in others:
        if other != recipe:
            raise ValueError(
                f"{first} and {name} are one module, and the recipes ask for {recipe} and {other}; give both names one"
            )
    return recipe


def _refuse_missing(what: str, patterns: tuple[Pattern, ...], meant: _Modules, every: _Modules) -> None:
    """Raises ValueError for a pattern that means none of ``meant``."""
    missed = [pattern for pattern in unmatched(patterns, meant) if pattern not in DEFAULT_SKIP]
    if missed:
        raise ValueError(
            f"{what}: the pattern {missed[0]!r} matches no {'module' if meant is every else 'layer'}"
            f"{did_you_mean(missed[0], _endings(every))}; names are such as {_examples(meant)}. A name matches from "
            f"any dot, and '*' stands for any part of it; 're:' has to match the whole path"
        )


def _refuse_parts(what: str, patterns: tuple[Pattern, ...], layers: _Modules, whole: _Modules, every: _Modules) -> None:
    """Raises ValueError for a pattern that means no layer, but a part of one of the ``whole``, which would be converted
    with it all the same.
    """
    for pattern in unmatched(patterns, layers):
        parts = [path for path, module in every if matches(pattern, path, module)]
        for path, layer in whole:
            part = next((part for part in parts if is_inside(part, path)), None)
            if part is not None:
                raise ValueError(
                    f"{what}: the pattern {pattern!r} means {part!r}, a part of the {type(layer).__name__} {path!r}, "
                    f"which is one layer; name that instead"
                )


def _endings(modules: _Modules) -> set[str]:
    """The names of modules, and what follows each of their dots."""
    parts = [name.split(".") for name, _ in modules if name]
    return {".".join(words[start:]) for words in parts for start in range(len(words))}


def _examples(modules: _Modules, most: int = 4) -> str:
    names = [name for name, _ in modules]
    leaves = [name for name in names if name and not any(other.startswith(f"{name}.") for other in names)]
    return ", ".join(repr(name) for name in leaves[:most]) or "none (the model has no modules inside)"


# -- judging plain layers ---------------------------------------------------------------------------------------------
def plain_layers(only: tuple[type[nn.Module], ...] | None = None, replaced: bool = True) -> Judge:
    """The judge of conversions that start from plain layers: those in the table, or of it the classes ``only``.

    ``replaced``: a new module takes the layer's place, which a layer that is compiled by itself would not notice.
    """
    allowed = None if only is None else {full_name(cls) for cls in only}

    def judge(names: list[str], module: nn.Module) -> Verdict:
        found = kind(module)
        if found is not None:
            return Verdict(error=_detailed(module, KINDS[found]))
        adapter, listed, reason = find(module)
        if listed is None or (allowed is not None and listed not in allowed):
            # What a listed class does with the modules inside is its own.
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
        return f"{name} holds stacked matrices ({', '.join(stacked)}), and is not a class that is converted"
    return f"{name} is not a class that is converted"


def is_table(module: nn.Module) -> bool:
    """Whether the module looks rows of its weight up, as embeddings do, instead of multiplying with it."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) or "Embedding" in type(module).__name__


def _matrix(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and (is_lazy(parameter) or parameter.dim() > 1)


def _holds_weights(module: nn.Module) -> bool:
    """Whether the module has a weight matrix that a reader of the report would miss: not embeddings and norms."""
    if is_table(module) or "Norm" in type(module).__name__:
        return False
    return bool(_weights(module))


def _weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """The module's own matrices, without what is added to activations or looked up: by its name, or ``[1, N, D]``."""
    return {
        name: p
        for name, p in module._parameters.items()
        if p is not None and _matrix(p) and _ADDED.isdisjoint(name.lower().split("_"))
        if is_lazy(p) or p.dim() == 2 or p.shape[0] > 1 or hasattr(module, "kernel_size")
    }


# -- nothing to do ----------------------------------------------------------------------------------------------------
def nothing_found(model: nn.Module, found: Selection, what: str, converted: str) -> str:
    """Why a conversion found nothing to do, and what to try."""
    kinds = Counter(
        type(module).__name__ for module in model.modules() if any(_matrix(p) for p in module._parameters.values())
    )
    seen = ", ".join(f"{count} {name}" for name, count in kinds.most_common()) or "no layer with a weight matrix"
    lines = [f"{what} found nothing to convert: it converts layers of class {converted}, and the model has {seen}"]
    if found.skipped:
        lines.append(
            f"skipped as asked: {', '.join(found.skipped)}; pass skip=(), or recipes that mean these, to convert them"
        )
    return "\n".join([*lines, *left_lines(found.left)])
