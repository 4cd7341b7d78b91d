"""fold_: BatchNorm layers folded into the convolutions and Linear layers before them, for inference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from lowbit.convert.adapters import find, unusual
from lowbit.convert.engine import swap, take_over
from lowbit.convert.trace import trace
from lowbit.models.names import named, patterns_in, shown, unmatched
from lowbit.models.ties import Holder, holders, model_bytes, paths, tensor_bytes
from lowbit.nn.base import full_name, kind
from lowbit.recipes import Pattern
from lowbit.report import LayerReport, Report

__all__ = ["fold_"]

_LAYERS = tuple(map(full_name, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)))
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class _Pair(NamedTuple):
    """A layer and the BatchNorm that alone is given its result, with their names."""

    layer_name: str
    layer: Any
    norm_name: str
    norm: Any


class _Folded(NamedTuple):
    """The layer's parameters with the BatchNorm in them."""

    weight: nn.Parameter
    bias: nn.Parameter


def fold_(model: nn.Module, pairs: Iterable[tuple[Pattern, Pattern]] | None = None) -> Report:
    """Multiply each BatchNorm of ``model`` into the convolution or Linear before it, in place, and report: the layer
    gets a weight and a bias, and nn.Identity takes the place of the BatchNorm. For inference, before ``quantize_``.

    Computed in fp64 and rounded once to the weight's dtype. ``pairs``: patterns (``lowbit.models.names``)
    of layers and of the BatchNorms after them, ``[("conv1", "bn1"), ...]``; None: those that follow one another as
    torch.fx traces the model, or where it cannot, in an nn.Sequential. A BatchNorm that
    stays is reported with the reason. A Linear's result is taken to be ``[N, F]``.
    Raises, with the model untouched: ValueError for a model in training mode or without BatchNorm layers, and for
    ``pairs`` that cannot be folded; TypeError for what is no model.
    Source: Jacob et al., arXiv 1712.05877, section 3.2.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fold_: the model must be an nn.Module, got {type(model).__name__}")
    norms = {name: module for name, module in model.named_modules() if isinstance(module, _NORMS)}
    if not norms:
        raise ValueError("fold_: the model has no BatchNorm layers")
    if model.training:
        raise ValueError(
            "fold_: in training mode BatchNorm computes with each batch's own mean; call model.eval() first"
        )
    places, shares = paths(model), holders(model)
    left: dict[str, str] = {}
    chosen: list[tuple[_Pair, _Folded]] = []
    for pair in _following(model, norms, left) if pairs is None else _given(model, pairs):
        reason = _refusal(pair, places) or _shared(pair, shares)
        made = None if reason else _folded(pair)
        if made is None or not all(bool(p.isfinite().all()) for p in made):
            reason = reason or f"what it makes of {pair.layer_name}'s weight or bias is not finite"
            if pairs is not None:
                raise ValueError(f"fold_: ({pair.layer_name!r}, {pair.norm_name!r}): {reason}")
            left[pair.norm_name] = reason
            continue
        chosen.append((pair, made))
    return _put(model, chosen, {name: left[name] for name in norms if name in left})


def _put(model: nn.Module, chosen: list[tuple[_Pair, _Folded]], left: dict[str, str]) -> Report:
    before, rows = model_bytes(model), []
    made: dict[int, nn.Module] = {}
    for pair, folded in chosen:
        layer = pair.layer
        held = tensor_bytes((*layer.parameters(), *pair.norm.parameters(), *pair.norm.buffers()))
        layer.weight, layer.bias = folded
        made[id(pair.norm)] = nn.Identity()
        take_over(made[id(pair.norm)], pair.norm)
        rows.append(
            LayerReport(
                f"{pair.layer_name} + {pair.norm_name}", type(layer).__name__, None, folded.weight.numel(),
                8.0 * folded.weight.dtype.itemsize, held, tensor_bytes(layer.parameters()),
            )
        )  # fmt: skip
    swap(model, made)
    return Report("fold_", None, tuple(rows), (), left, (), before, model_bytes(model))


# -- which follow one another ------------------------------------------------------------------------------------------
def _given(model: nn.Module, pairs: Iterable[tuple[Pattern, Pattern]]) -> Iterator[_Pair]:
    """The pairs that a caller gave, each by two patterns that mean a layer and the BatchNorm after it, in turns."""
    modules = list(model.named_modules(remove_duplicate=False))
    seen: set[str] = set()
    for patterns in pairs:
        if not isinstance(patterns, tuple | list) or len(patterns) != 2:
            raise ValueError(f"fold_: pairs are of two names, [('conv1', 'bn1'), ...], got {patterns!r}")
        for pattern in patterns_in(tuple(patterns), "fold_: pairs"):
            if unmatched([pattern], modules):
                raise ValueError(f"fold_: the model has no module {pattern!r}")
        places = [[place for place, row in enumerate(modules) if named(p, *row)] for p in patterns]
        layers, norms = places
        in_turns = [place for pair in zip(layers, norms, strict=False) for place in pair]
        if len(layers) != len(norms) or (len(layers) > 1 and in_turns != sorted(in_turns)):
            raise ValueError(
                f"fold_: {shown(patterns[0])} means {_listed(modules, layers)} and {shown(patterns[1])} "
                f"{_listed(modules, norms)}, which are no layers each with the BatchNorm after it; 're:NAME' means "
                f"the module of that whole name alone"
            )
        for pair in zip(layers, norms, strict=True):
            (layer_name, layer), (norm_name, norm) = (modules[place] for place in pair)
            for name in (layer_name, norm_name):
                if name in seen:
                    raise ValueError(f"fold_: {name!r} is in two pairs")
                seen.add(name)
            yield _Pair(layer_name, layer, norm_name, norm)


def _listed(modules: Sequence[tuple[str, nn.Module]], places: Sequence[int]) -> str:
    return ", ".join(modules[place][0] for place in places) or "nothing"


def _following(model: nn.Module, norms: Mapping[str, nn.Module], left: dict[str, str]) -> list[_Pair]:
    """The pairs of ``norms``; ``left`` gets the reasons for those that are in none."""
    modules = dict(model.named_modules())
    before = _in_sequentials(model)
    try:
        calls = [node for node in trace(model, fx.Tracer()).nodes if node.op == "call_module"]
        remedy = ""
    except Exception as error:  # whatever a model's code raises when it is traced
        calls = []
        why = type(error).__name__
        remedy = f", and torch.fx cannot trace the model ({why}); name it and the layer before in pairs=[...]"
    uses = Counter(node.target for node in calls)
    traced: dict[str, fx.Node] = {str(node.target): node for node in calls}
    found = []
    for name, norm in norms.items():
        node = traced.get(name)
        if node is None:
            layer_name = before.get(id(norm))
        else:
            inputs = node.all_input_nodes
            source = inputs[0] if len(inputs) == 1 else None
            layer_name = str(source.target) if source is not None and source.op == "call_module" else None
            if source is not None and layer_name is not None and (len(source.users) > 1 or uses[source.target] > 1):
                left[name] = f"the result of {layer_name} is also used elsewhere, or the layer is called more than once"
                continue
            if uses[name] > 1:
                left[name] = "it is called more than once"
                continue
        layer = modules.get(layer_name or "")
        if layer_name is None or layer is None or find(layer).listed not in _LAYERS:
            left[name] = f"no convolution or Linear is right before it{'' if node is not None else remedy}"
            continue
        found.append(_Pair(layer_name, layer, name, norm))
    return found


def _in_sequentials(model: nn.Module) -> dict[int, str]:
    """The name of what comes before a module in an nn.Sequential, by the ``id`` of the module."""
    found: dict[int, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            children = list(module.named_children())
            for (first, _), (_, second) in pairwise(children):
                found[id(second)] = f"{name}.{first}" if name else first
    return found


# -- a pair ------------------------------------------------------------------------------------------------------------
def _refusal(pair: _Pair, places: Mapping[int, Sequence[str]]) -> str | None:
    """Why a BatchNorm stays."""
    layer_name, layer, _, norm = pair
    if kind(layer) is not None:
        return f"{layer_name} is quantized already; call fold_ before"
    if not isinstance(norm, _NORMS) or find(layer).listed not in _LAYERS:
        kinds = f"a {type(layer).__name__} and a {type(norm).__name__}"
        return f"expected a convolution or Linear and a BatchNorm, got {kinds}"
    reason = find(layer).reason or unusual(layer)
    if reason is not None:
        return f"of {layer_name}: {reason}"
    if norm.training:
        return "it is in training mode; call model.eval() first"
    if norm.running_mean is None or norm.running_var is None:
        return "it has no running statistics, and normalizes by each batch's own"
    if norm.num_features != layer.weight.shape[0]:
        return f"it has {norm.num_features} features, and {layer_name} {layer.weight.shape[0]} outputs"
    if layer.weight.is_meta:
        return f"{layer_name} is on the meta device and holds no numbers"
    if len(places[id(layer)]) > 1 or len(places[id(norm)]) > 1:
        return f"it or {layer_name} stands in several places of the model"
    if layer._forward_hooks or norm._forward_pre_hooks:
        return f"hooks between {layer_name} and it would be given other numbers"
    return None


def _shared(pair: _Pair, shares: Mapping[int, Sequence[Holder]]) -> str | None:
    for parameter in pair.layer.parameters():
        for path, module in shares.get(id(parameter), []):
            if module is not pair.layer:
                return f"{pair.layer_name} shares its weight or bias with {path or 'the model itself'}"
    return None


@torch.no_grad()
def _folded(pair: _Pair) -> _Folded:
    """w * g / sqrt(var + eps), and (b - mean) * g / sqrt(var + eps) + beta, in fp64."""
    layer, norm = pair.layer, pair.norm
    weight: nn.Parameter = layer._parameters["weight"]
    bias, gain, shift = layer._parameters["bias"], norm._parameters["weight"], norm._parameters["bias"]
    mean, variance = (_double(norm._buffers[name]) for name in ("running_mean", "running_var"))
    factor = (variance + norm.eps).rsqrt() if gain is None else _double(gain) / (variance + norm.eps).sqrt()
    moved = ((0.0 if bias is None else _double(bias)) - mean) * factor + (0.0 if shift is None else _double(shift))
    scaled = weight.double() * factor.view(-1, *[1] * (weight.dim() - 1))
    trained = (weight if bias is None else bias).requires_grad
    return _Folded(
        nn.Parameter(scaled.to(weight.dtype), weight.requires_grad),
        nn.Parameter(moved.to((weight if bias is None else bias).dtype), trained),
    )


def _double(t: Tensor | None) -> Tensor:
    assert t is not None
    return t.double()
