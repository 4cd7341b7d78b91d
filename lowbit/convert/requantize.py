"""fuse_requantize_: requantization fusion, by which adjacent static layers exchange 8-bit codes instead of floats."""

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

#: Modules, functions and tensor methods that commute with decoding, so that they can run on codes.
_ANY = (nn.Identity, nn.Dropout, nn.Flatten, nn.Unflatten, torch.flatten, torch.reshape, "flatten", "reshape", "view")
#: Commute only if code 0 decodes to zero.
_SIGNED = (nn.ReLU, torch.relu, F.relu, "relu")


def fuse_requantize_(model: nn.Module) -> Report:
    """Let layers pass 8-bit codes to following layers with static input scales, in place.

    A layer returns codes if every layer that reads its output has the same static input scheme and scale. ReLU (with
    schemes without a zero point), flattening and dropout may lie between. The model's results are bit-identical. Layers
    return codes for fp32 inputs without gradients (``torch.no_grad()``), and floats otherwise.

    Call it last, for inference. ``unfuse_requantize_`` and ``dequantize_`` undo it. State dicts, files and
    ``load_model`` do not contain it.

    Args:
        model: A quantized model that torch.fx can trace.

    Returns:
        The report. ``layers`` are the layers that return codes, with their ``consumers``.

    Raises:
        ValueError: torch.fx cannot trace the model.
    """
    unfuse_requantize_(model)
    try:
        graph = trace(model, _Tracer())
    except Exception as error:  # the model's code can raise anything when it is traced
        raise ValueError(
            f"fuse_requantize_: torch.fx cannot trace {type(model).__name__} ({error}); call it on a part of the model "
            f"that can be traced, or leave it out, with the same results"
        ) from error
    modules = dict(model.named_modules())
    calls = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    consumers: dict[str, tuple[str, ...]] = {}
    for node in graph.nodes:
        layer = _static(modules, node)
        if layer is None or calls.count(str(node.target)) > 1:
            continue
        names = _consumers(modules, node)
        if names:
            layer.consumers = (_inner(modules[names[0]]),)
            consumers[str(node.target)] = names
    report = report_on("fuse_requantize_", model, {name: modules[name] for name in consumers}, "joined")
    return replace(report, layers=tuple(replace(row, consumers=consumers[row.name]) for row in report.layers))


def unfuse_requantize_(model: nn.Module) -> Report:
    """Undo ``fuse_requantize_`` in place.

    Args:
        model: Any model.

    Returns:
        The report of the layers that return floats again.
    """
    fused = {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear) and m.consumers}
    for layer in fused.values():
        layer.consumers = ()
    return report_on("unfuse_requantize_", model, fused, "separated")


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, QuantLinear | QuantConv) or super().is_leaf_module(m, module_qualified_name)


def _inner(module: nn.Module) -> QuantLinear:
    layer = module.linear if isinstance(module, QuantConv) else module
    assert isinstance(layer, QuantLinear)
    return layer


def _static(modules: dict[str, nn.Module], node: fx.Node) -> QuantLinear | None:
    """The layer that a node calls, if its input scales are static."""
    module = modules.get(str(node.target)) if node.op == "call_module" else None
    if not isinstance(module, QuantLinear | QuantConv):
        return None
    layer = _inner(module)
    return layer if plain_class(layer) is QuantLinear and layer.recipe.static else None


def _consumers(modules: dict[str, nn.Module], node: fx.Node) -> tuple[str, ...]:
    """The layers that consume the output of ``node`` if all of them can take codes; none otherwise."""
    names: list[str] = []
    signed = True
    for user in _users(modules, node):
        if user is None:
            return ()
        layer = _static(modules, user)
        if layer is not None:
            names.append(str(user.target))
        else:
            signed = False
    first = None
    for name in names:
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
        key = (scheme.name, *(None if t is None else float(t) for t in scales))
        first = first or key
        if key != first:
            return ()
    return tuple(names)


def _users(modules: dict[str, nn.Module], node: fx.Node) -> Iterator[fx.Node | None]:
    """The static layers after ``node``, also behind ``_ANY`` and ``_SIGNED``, and the nodes in ``_SIGNED``; None for
    each other user.
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
