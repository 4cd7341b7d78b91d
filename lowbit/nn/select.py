"""Choosing the layers of a model that a conversion takes, and saying why the others stay as they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from lowbit.nn.attention import QuantMultiheadAttention
from lowbit.nn.conv import QuantConv2d
from lowbit.nn.converters import Converter, class_name
from lowbit.nn.linear import QuantLinear

__all__ = ["DEFAULT_SKIP", "Selection", "left_lines", "matches", "nothing_found", "select"]

#: Left in high precision unless the caller says otherwise: the output projection of language models.
DEFAULT_SKIP = ("lm_head",)

#: Layers that must be turned back before they can be quantized, and how.
_UNREADY = {
    "lowbit.train.linear.TrainLinear": "is being trained in low precision; call lowbit.train.convert_(model) first",
}

#: Classes whose subclasses are not looked into: what they do with the layers inside is their own.
_WHOLE = (nn.Linear, nn.Conv2d, nn.MultiheadAttention)

_QUANTIZED = (QuantLinear, QuantConv2d, QuantMultiheadAttention)


@dataclass
class Selection:
    """The layers to convert by (first) name, the names that were skipped, and why others are left as they are."""

    layers: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)


def matches(pattern: str, name: str) -> bool:
    """Whether ``pattern`` names the module ``name`` or one that it is inside of, in full or from any dot on."""
    words = name.split(".")
    spans = (".".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1))
    return any(fnmatchcase(span, pattern) for span in spans)


def select(model: nn.Module, skip: Iterable[str], table: dict[str, Converter], inside_only: bool = True) -> Selection:
    """The layers of ``model`` that ``table`` converts and ``skip`` does not name. Raises as ``quantize_`` does."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be an nn.Module, got {type(model).__name__}")
    names: dict[int, list[str]] = {}
    modules: dict[int, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
        modules[id(module)] = module
    patterns = _patterns(skip, [name for several in names.values() for name in several])
    found = Selection()
    outer: str | None = None  # the layer whose inside comes next, if any does: modules come depth first
    for key, module in modules.items():
        first = names[key][0]
        if outer is not None and first.startswith(f"{outer}." if outer else ""):
            continue
        known = class_name(module) in table or class_name(module) in _UNREADY or isinstance(module, _QUANTIZED)
        if known or isinstance(module, _WHOLE):
            outer = first
        elif not _holds_weights(module):
            continue
        if any(matches(pattern, name) for pattern in patterns for name in names[key]):
            found.skipped.append(first)
            continue
        _must_be_ready(first, module)
        if class_name(module) not in table:
            found.left[first] = _unknown(module, table)
            continue
        if inside_only and _compiled(module, names[key]):
            raise ValueError(
                f"{first} is compiled by itself, and its compiled code would go on with the layer as it is; "
                f"quantize first, then compile"
            )
        reason = table[class_name(module)].refuses(module)
        if reason is None:
            found.layers[first] = module
        else:
            found.left[first] = reason
    if inside_only and "" in found.layers:
        raise ValueError(
            f"the model itself is a {type(model).__name__}, which cannot be replaced in place; "
            f"convert nn.Sequential(model) instead"
        )
    return found


def _patterns(skip: Iterable[str], names: list[str]) -> tuple[str, ...]:
    if isinstance(skip, str):
        raise TypeError(f"skip must be a collection of patterns, got the string {skip!r}; write skip=({skip!r},)")
    patterns = tuple(skip)
    for pattern in patterns:
        if pattern not in DEFAULT_SKIP and not any(matches(pattern, name) for name in names):
            raise ValueError(f"skip pattern {pattern!r} matches no module; names are such as {_examples(names)}")
    return patterns


def _must_be_ready(name: str, module: nn.Module) -> None:
    name = name or "the model"
    if isinstance(module, _QUANTIZED):
        raise ValueError(
            f"{name} is quantized already (recipe {module.recipe}); "
            f"quantize the original model, or name the layers to leave in skip=..."
        )
    if class_name(module) in _UNREADY:
        raise ValueError(f"{name} {_UNREADY[class_name(module)]}")
    if any(p is not None and is_lazy(p) for p in module._parameters.values()):
        raise ValueError(
            f"{name} is a {type(module).__name__} whose weight has no shape yet; call the model on one input first, "
            f"or name the layer in skip=..."
        )


def _compiled(module: nn.Module, names: list[str]) -> bool:
    in_place = vars(module).get("_compiled_call_impl") is not None
    return in_place or any(name.split(".")[-1] == "_orig_mod" for name in names)


def _unknown(module: nn.Module, table: dict[str, Converter]) -> str:
    kind = type(module).__name__
    for base in _WHOLE:
        if isinstance(module, base) and f"{base.__module__}.{base.__qualname__}" in table:
            return f"a {kind} is not exactly nn.{base.__name__}, and may compute something else"
    return f"{kind} is not a class that is converted"


def _matrix(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and (is_lazy(parameter) or parameter.dim() > 1)


def _holds_weights(module: nn.Module) -> bool:
    """Whether ``module`` has a weight matrix that a reader of the report would miss: not embeddings and norms."""
    if any(word in type(module).__name__ for word in ("Embedding", "Norm")):
        return False
    return any(_matrix(p) for p in module._parameters.values())


def _examples(names: list[str], most: int = 4) -> str:
    leaves = [name for name in names if name and not any(other.startswith(f"{name}.") for other in names)]
    return ", ".join(repr(name) for name in leaves[:most]) or "none (the model has no modules inside)"


def left_lines(left: dict[str, str], most: int = 4) -> list[str]:
    """One line a reason, with the first names that it holds for."""
    reasons: dict[str, list[str]] = {}
    for name, reason in left.items():
        reasons.setdefault(reason, []).append(name or "the model itself")
    more = {reason: f" and {len(names) - most} more" if len(names) > most else "" for reason, names in reasons.items()}
    return [f"left {', '.join(names[:most])}{more[reason]}: {reason}" for reason, names in reasons.items()]


def nothing_found(model: nn.Module, found: Selection, what: str, converted: str) -> str:
    """Why a conversion found nothing to do, and what to try."""
    kinds = Counter(
        type(module).__name__ for module in model.modules() if any(_matrix(p) for p in module._parameters.values())
    )
    seen = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()) or "no layer with a weight matrix"
    lines = [f"{what} found nothing to convert: it converts layers of class {converted}, and the model has {seen}"]
    lines += (
        [f"skipped as asked: {', '.join(found.skipped)}; pass skip=() to convert these too"] if found.skipped else []
    )
    return "\n".join([*lines, *left_lines(found.left)])
