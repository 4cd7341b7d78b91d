"""fold_: folds BatchNorm layers into the convolution or Linear layers before them, for inference."""

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
    """A layer and the BatchNorm that is the only consumer of its result."""

    layer_name: str
    layer: Any
    norm_name: str
    norm: Any


class _Folded(NamedTuple):
    """The layer's parameters after folding."""

    weight: nn.Parameter
    bias: nn.Parameter


def fold_(model: nn.Module, pairs: Iterable[tuple[Pattern, Pattern]] | None = None) -> Report:
    """Fold each BatchNorm of ``model`` into the convolution or Linear before it, in place.

    For inference, before ``quantize_``. The layer gets a new weight and bias, computed in fp64 and rounded once to the
    weight's dtype. nn.Identity replaces the BatchNorm. A Linear's result must be ``[N, F]``.
    Source: Jacob et al., arXiv 1712.05877, section 3.2.

    Args:
        model: A model in eval mode.
        pairs: Patterns (``lowbit.models.names``) of layers and of the BatchNorms after them,
            ``[("conv1", "bn1"), ...]``. None: pairs that torch.fx traces, or if it cannot trace the model, neighbours
            in an nn.Sequential.

    Returns:
        The report, with the reason for each BatchNorm that was left.

    Raises:
        ValueError: The model is in training mode or has no BatchNorm layers, or ``pairs`` cannot be folded. The model
            is unchanged.
        TypeError: ``model`` is not an nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fold_: the model must be an nn.Module, got {type(model).__name__}")
    norms = {name: module for name, module in model.named_modules() if isinstance(module, _NORMS)}
    if not norms:
        raise ValueError("fold_: the model has no BatchNorm layers")
    if model.training:
        raise ValueError(
            "fold_: the model is in training mode, in which BatchNorm uses batch statistics; call model.eval() first"
        )
    names, shares = paths(model), holders(model)
    left: dict[str, str] = {}
    chosen: list[tuple[_Pair, _Folded]] = []
    for pair in _traced(model, norms, left) if pairs is None else _from_patterns(model, pairs):
        reason = _refusal(pair, names) or _shared(pair, shares)
        folded = None if reason else _folded(pair)
        if folded is None or not all(bool(p.isfinite().all()) for p in folded):
            reason = reason or f"the folded weight or bias of {pair.layer_name} is not finite"
            if pairs is not None:
                raise ValueError(f"fold_: ({pair.layer_name!r}, {pair.norm_name!r}): {reason}")
            left[pair.norm_name] = reason
            continue
        chosen.append((pair, folded))
    return _put(model, chosen, {name: left[name] for name in norms if name in left})


def _put(model: nn.Module, chosen: list[tuple[_Pair, _Folded]], left: dict[str, str]) -> Report:
    before, rows = model_bytes(model), []
    identities: dict[int, nn.Module] = {}
    for pair, folded in chosen:
        layer = pair.layer
        old_bytes = tensor_bytes((*layer.parameters(), *pair.norm.parameters(), *pair.norm.buffers()))
        layer.weight, layer.bias = folded
        identities[id(pair.norm)] = nn.Identity()
        take_over(identities[id(pair.norm)], pair.norm)
        rows.append(
            LayerReport(
                f"{pair.layer_name} + {pair.norm_name}", type(layer).__name__, None, folded.weight.numel(),
                8.0 * folded.weight.dtype.itemsize, old_bytes, tensor_bytes(layer.parameters()),
            )
        )  # fmt: skip
    swap(model, identities)
    return Report("fold_", None, tuple(rows), (), left, (), before, model_bytes(model))


# -- pairs -------------------------------------------------------------------------------------------------------------
def _from_patterns(model: nn.Module, pairs: Iterable[tuple[Pattern, Pattern]]) -> Iterator[_Pair]:
    """The pairs that the caller named. Matches of the two patterns must alternate in the model."""
    modules = list(model.named_modules(remove_duplicate=False))
    seen: set[str] = set()
    for patterns in pairs:
        if not isinstance(patterns, tuple | list) or len(patterns) != 2:
            raise ValueError(f"fold_: pairs are of two names, [('conv1', 'bn1'), ...], got {patterns!r}")
        for pattern in patterns_in(tuple(patterns), "fold_: pairs"):
            if unmatched([pattern], modules):
                raise ValueError(f"fold_: the model has no module {pattern!r}")
        layers, norms = ([index for index, row in enumerate(modules) if named(p, *row)] for p in patterns)
        in_turns = [index for pair in zip(layers, norms, strict=False) for index in pair]
        if len(layers) != len(norms) or (len(layers) > 1 and in_turns != sorted(in_turns)):
            raise ValueError(
                f"fold_: {shown(patterns[0])} matches {_listed(modules, layers)} and {shown(patterns[1])} matches "
                f"{_listed(modules, norms)}, but each layer needs the BatchNorm after it; 're:NAME' matches only the "
                f"module with that full name"
            )
        for pair in zip(layers, norms, strict=True):
            (layer_name, layer), (norm_name, norm) = (modules[index] for index in pair)
            for name in (layer_name, norm_name):
                if name in seen:
                    raise ValueError(f"fold_: {name!r} is in two pairs")
                seen.add(name)
            yield _Pair(layer_name, layer, norm_name, norm)


def _listed(modules: Sequence[tuple[str, nn.Module]], indices: Sequence[int]) -> str:
    return ", ".join(modules[index][0] for index in indices) or "nothing"


def _traced(model: nn.Module, norms: Mapping[str, nn.Module], left: dict[str, str]) -> list[_Pair]:
    """The pairs of ``norms``. Adds the reason for each other norm to ``left``."""
    modules = dict(model.named_modules())
    before = _in_sequentials(model)
    try:
        calls = [node for node in trace(model, fx.Tracer()).nodes if node.op == "call_module"]
        remedy = ""
    except Exception as error:  # the model's code can raise anything when it is traced
        calls = []
        cause = type(error).__name__
        remedy = f", and torch.fx cannot trace the model ({cause}); name it and the layer before in pairs=[...]"
    uses = Counter(node.target for node in calls)
    nodes: dict[str, fx.Node] = {str(node.target): node for node in calls}
    pairs = []
    for name, norm in norms.items():
        node = nodes.get(name)
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
        pairs.append(_Pair(layer_name, layer, name, norm))
    return pairs


def _in_sequentials(model: nn.Module) -> dict[int, str]:
    """By the ``id`` of each module in an nn.Sequential, the name of the module before it."""
    before: dict[int, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            children = list(module.named_children())
            for (first, _), (_, second) in pairwise(children):
                before[id(second)] = f"{name}.{first}" if name else first
    return before


# -- a pair ------------------------------------------------------------------------------------------------------------
def _refusal(pair: _Pair, names: Mapping[int, Sequence[str]]) -> str | None:
    """Why a BatchNorm cannot be folded."""
    layer_name, layer, _, norm = pair
    if kind(layer) is not None:
        return f"{layer_name} is quantized already; call fold_ before"
    if not isinstance(norm, _NORMS) or find(layer).listed not in _LAYERS:
        classes = f"a {type(layer).__name__} and a {type(norm).__name__}"
        return f"expected a convolution or Linear and a BatchNorm, got {classes}"
    reason = find(layer).reason or unusual(layer)
    if reason is not None:
        return f"of {layer_name}: {reason}"
    if norm.training:
        return "it is in training mode; call model.eval() first"
    if norm.running_mean is None or norm.running_var is None:
        return "it has no running statistics, and always uses batch statistics"
    if norm.num_features != layer.weight.shape[0]:
        return f"it has {norm.num_features} features, and {layer_name} {layer.weight.shape[0]} outputs"
    if layer.weight.is_meta:
        return f"{layer_name} is on the meta device, without values"
    if len(names[id(layer)]) > 1 or len(names[id(norm)]) > 1:
        return f"it or {layer_name} has several names in the model"
    if layer._forward_hooks or norm._forward_pre_hooks:
        return f"hooks between {layer_name} and it would see other values"
    return None


def _shared(pair: _Pair, shares: Mapping[int, Sequence[Holder]]) -> str | None:
    for parameter in pair.layer.parameters():
        for path, module in shares.get(id(parameter), []):
            if module is not pair.layer:
                return f"{pair.layer_name} shares its weight or bias with {path or 'the model itself'}"
    return None


@torch.no_grad()
def _folded(pair: _Pair) -> _Folded:
    """Compute w * g / sqrt(var + eps) and (b - mean) * g / sqrt(var + eps) + beta in fp64."""
    layer, norm = pair.layer, pair.norm
    weight: nn.Parameter = layer._parameters["weight"]
    bias, gain, shift = layer._parameters["bias"], norm._parameters["weight"], norm._parameters["bias"]
    mean, variance = (_double(norm._buffers[name]) for name in ("running_mean", "running_var"))
    factor = (variance + norm.eps).rsqrt() if gain is None else _double(gain) / (variance + norm.eps).sqrt()
    shifted = ((0.0 if bias is None else _double(bias)) - mean) * factor + (0.0 if shift is None else _double(shift))
    scaled = weight.double() * factor.view(-1, *[1] * (weight.dim() - 1))
    trained = (weight if bias is None else bias).requires_grad
    return _Folded(
        nn.Parameter(scaled.to(weight.dtype), weight.requires_grad),
        nn.Parameter(shifted.to((weight if bias is None else bias).dtype), trained),
    )


def _double(t: Tensor | None) -> Tensor:
    assert t is not None
    return t.double()
