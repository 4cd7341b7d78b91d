"""fuse_requantize_: adjacent static layers exchange 8-bit codes instead of floats (requantization fusion)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from lowbit.convert.trace import trace
from lowbit.models.wrap import plain_class
from lowbit.nn.conv import QuantConv
from lowbit.nn.linear import QuantLinear, is_signed
from lowbit.report import Report, report_on

__all__ = ["fuse_requantize_", "unfuse_requantize_"]

#: What computes the same of codes as of the numbers that they stand for: modules, functions and methods of tensors.
_ANY = (nn.Identity, nn.Dropout, nn.Flatten, nn.Unflatten, torch.flatten, torch.reshape, "flatten", "reshape", "view")
#: The same where codes are integers of which 0 is zero.
_SIGNED = (nn.ReLU, torch.relu, F.relu, "relu")


def fuse_requantize_(model: nn.Module) -> Report:
    """Let layers return codes to the static layers that consume them, in place, and report: ``layers`` are those that
    return codes, with the ``consumers`` of each.

    A layer returns codes where every consumer of its output is a layer with the same static input scheme and scale.
    ReLU (of schemes without a zero point), flattening and dropout may lie between. No bit of the model's results
    changes. Codes are for fp32 inputs without gradients (``torch.no_grad()``); else layers return floats, as before.
    For inference, as the last step: ``unfuse_requantize_`` and ``dequantize_`` undo it; state, files and ``load_model``
    do not contain it.

    Raises ValueError for a model that torch.fx cannot trace.
    """
    unfuse_requantize_(model)
    try:
        graph = trace(model, _Tracer())
    except Exception as error:  # what a model does when it is traced has no end
        raise ValueError(
            f"fuse_requantize_ follows the calls of a model by torch.fx, which cannot trace {type(model).__name__} "
            f"({error}); "
            f"call it on a part of the model that it can, or leave it out: the model computes the same"
        ) from error
    modules = dict(model.named_modules())
    calls = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    joined: dict[str, tuple[str, ...]] = {}
    for node in graph.nodes:
        layer = _static(modules, node)
        if layer is None or calls.count(str(node.target)) > 1:
            continue
        names = _consumers(modules, node)
        if names:
            layer.consumers = (_inner(modules[names[0]]),)
            joined[str(node.target)] = names
    report = report_on("fuse_requantize_", model, {name: modules[name] for name in joined}, "joined")
    return replace(report, layers=tuple(replace(row, consumers=joined[row.name]) for row in report.layers))


def unfuse_requantize_(model: nn.Module) -> Report:
    """Undo ``fuse_requantize_``, in place, and report which layers return floats again."""
    joined = {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear) and m.consumers}
    for layer in joined.values():
        layer.consumers = ()
    return report_on("unfuse_requantize_", model, joined, "separated")


class _Tracer(fx.Tracer):
    """Takes quantized layers as they are."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, QuantLinear | QuantConv) or super().is_leaf_module(m, module_qualified_name)


def _inner(module: nn.Module) -> QuantLinear:
    found = module.linear if isinstance(module, QuantConv) else module
    assert isinstance(found, QuantLinear)
    return found


def _static(modules: dict[str, nn.Module], node: fx.Node) -> QuantLinear | None:
    """The layer that a node calls, where its input scales are static."""
    module = modules.get(str(node.target)) if node.op == "call_module" else None
    if not isinstance(module, QuantLinear | QuantConv):
        return None
    layer = _inner(module)
    return layer if plain_class(layer) is QuantLinear and layer.recipe.static else None


def _consumers(modules: dict[str, nn.Module], node: fx.Node) -> tuple[str, ...]:
    """The layers that consume the output of ``node``, where all of them can take codes; else none."""
    found: list[str] = []
    signed = True
    for user in _users(modules, node):
        if user is None:
            return ()
        layer = _static(modules, user)
        if layer is not None:
            found.append(str(user.target))
        else:
            signed = False
    first = None
    for name in found:
        layer, module = _inner(modules[name]), modules[name]
        scheme, scales = layer.recipe.input, layer.input_scales
        assert scheme is not None and scales is not None
        if isinstance(module, QuantConv) and module.padding_mode != "zeros":
            return ()
        if (
            scheme.format.bits != 8
            or scheme.global_scale
            or scales.scale.numel() != 1
            or not (signed or is_signed(scheme))
        ):
            return ()
        key = (scheme.name, *(None if one is None else float(one) for one in scales))
        first = first or key
        if key != first:
            return ()
    return tuple(found)


def _users(modules: dict[str, nn.Module], node: fx.Node) -> Iterator[fx.Node | None]:
    """The static layers behind ``node``, through what computes the same of codes, and the nodes on the way that ask for
    integers; None for everything else.
    """
    for user in node.users:
        if _static(modules, user) is not None:
            yield user
        elif _is(modules, user, _ANY):
            yield from _users(modules, user)
        elif _is(modules, user, _SIGNED):
            yield user
            yield from _users(modules, user)
        else:
            yield None


def _is(modules: dict[str, nn.Module], node: fx.Node, kinds: tuple[Any, ...]) -> bool:
    if node.op == "call_module":
        return plain_class(modules[str(node.target)]) in kinds
    return node.op in ("call_function", "call_method") and node.target in kinds
