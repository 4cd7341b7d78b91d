"""Layers of a traced program as modules again, so that recipes, calibration and names work on the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx, nn

__all__ = ["layer_names", "with_layers"]


def _geometry(axes: int, args: tuple[Any, ...]) -> dict[str, Any]:
    """The arguments of a convolution in a graph, with torch's defaults."""
    defaults: tuple[Any, ...] = (1, 0, 1, 1)
    stride, padding, dilation, groups = (*args[3:], *defaults[len(args[3:]) :])
    return {
        "stride": _each(stride, axes), "dilation": _each(dilation, axes), "groups": groups,
        "padding": padding if isinstance(padding, str) else _each(padding, axes),
    }  # fmt: skip


#: The classes of layers, whose names a program's nodes have.
_CLASSES = ("Linear", "Embedding", "Conv1d", "Conv2d", "Conv3d")


def _each(values: Any, axes: int) -> tuple[int, ...]:
    sizes = [values] if isinstance(values, int) else list(values)
    return tuple(sizes * axes if len(sizes) == 1 else sizes)


def _linear(weight: nn.Parameter, args: tuple[Any, ...]) -> nn.Module:
    return nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")


def _embedding(weight: nn.Parameter, args: tuple[Any, ...]) -> nn.Module:
    return nn.Embedding(weight.shape[0], weight.shape[1], device="meta")


def _conv(cls: type[nn.Module], axes: int) -> Callable[[nn.Parameter, tuple[Any, ...]], nn.Module]:
    def make(weight: nn.Parameter, args: tuple[Any, ...]) -> nn.Module:
        options = _geometry(axes, args)
        inputs = weight.shape[1] * options["groups"]
        return cls(inputs, weight.shape[0], weight.shape[2:], bias=False, device="meta", **options)

    return make


_ATEN = torch.ops.aten

#: The ops of layers, with the place of the weight among their arguments, that of the bias, and the module.
_LAYERS: dict[Any, tuple[int, int | None, Callable[[nn.Parameter, tuple[Any, ...]], nn.Module]]] = {
    _ATEN.linear.default: (1, 2, _linear),
    _ATEN.embedding.default: (0, None, _embedding),
    _ATEN.conv1d.default: (1, 2, _conv(nn.Conv1d, 1)),
    _ATEN.conv2d.default: (1, 2, _conv(nn.Conv2d, 2)),
    _ATEN.conv3d.default: (1, 2, _conv(nn.Conv3d, 3)),
    _ATEN.conv1d.padding: (1, 2, _conv(nn.Conv1d, 1)),
    _ATEN.conv2d.padding: (1, 2, _conv(nn.Conv2d, 2)),
    _ATEN.conv3d.padding: (1, 2, _conv(nn.Conv3d, 3)),
}


class _Place(NamedTuple):
    """A layer in a program: its node, those of its weight and bias, and its name."""

    node: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    name: str


def _places(program: fx.GraphModule) -> list[_Place]:
    """The layers of a program. Calls that differ in op, geometry or bias have names of their own."""
    places: list[_Place] = []
    names: dict[str, list[Any]] = {}
    for node in program.graph.nodes:
        row = _LAYERS.get(node.target) if node.op == "call_function" else None
        if row is None:
            continue
        weight = node.args[row[0]]
        bias = node.args[row[1]] if row[1] is not None and len(node.args) > row[1] else None
        parts = [weight] if bias is None else [weight, bias]
        if not all(isinstance(part, fx.Node) and part.op == "get_attr" for part in parts):
            continue
        name = _name(program, node, weight)
        kind = (node.target, weight, bias, str(node.args[3:]))
        variants = names.setdefault(name, [])
        if kind not in variants:
            variants.append(kind)
        index = variants.index(kind)
        places.append(_Place(node, weight, bias, f"{name}_{index}" if index else name))
    return places


def _name(program: fx.GraphModule, node: fx.Node, weight: fx.Node) -> str:
    """The name of a layer in the model."""
    path, stack = str(weight.target), list((node.meta.get("nn_module_stack") or {}).values())
    parent, _, own = path.rpartition(".")
    if stack and str(stack[-1][1]).rpartition(".")[2] in _CLASSES:
        parent, own = stack[-1][0], "weight"  # several layers may share a weight
    if own != "weight":  # one of several weights of a module
        parent = f"{parent}.{own.removesuffix('weight').rstrip('_') or own}".lstrip(".")
    held = program.get_submodule(parent)._modules if _has(program, parent) else {}
    return f"{parent}.layer".lstrip(".") if not parent or held else parent


def _has(program: fx.GraphModule, path: str) -> bool:
    try:
        program.get_submodule(path)
    except AttributeError:
        return False
    return True


def layer_names(program: fx.GraphModule) -> dict[str, list[fx.Node]]:
    """The nodes of each layer of a program, by its name in the model."""
    names: dict[str, list[fx.Node]] = {}
    for place in _places(program):
        names.setdefault(place.name, []).append(place.node)
    return names


def with_layers(program: fx.GraphModule) -> fx.GraphModule:
    """Replace the ops of a program's layers by calls of modules with their names and parameters, in place.

    Args:
        program: ``torch.export.export(...).module()``.

    Returns:
        ``program``, whose Linears, embeddings and convolutions are modules of torch.
    """
    places = _places(program)
    parameters: dict[fx.Node, Any] = {
        node: _attribute(program, str(node.target)) for node in program.graph.nodes if node.op == "get_attr"
    }
    for node in parameters:  # modules hold them from here on
        holder, _, own = str(node.target).rpartition(".")
        if hasattr(_attribute(program, holder), own):
            delattr(_attribute(program, holder), own)
    modules: dict[str, nn.Module] = {}
    for node, weight, bias, name in places:
        if name not in modules:
            module = _LAYERS[node.target][2](parameters[weight], node.args)
            module.weight = parameters[weight]
            if bias is not None:
                module.bias = parameters[bias]
            modules[name] = module
            _put(program, name, module)
        x = node.args[1 if isinstance(modules[name], nn.Embedding) else 0]
        with program.graph.inserting_before(node):
            call = program.graph.call_module(name, (x,))
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        program.graph.erase_node(node)
    for index, (node, value) in enumerate(parameters.items()):
        if node.users:
            node.target = f"kept_{index}"
            setattr(program, node.target, value)
        else:
            program.graph.erase_node(node)
    program.recompile()
    return program


def _attribute(module: nn.Module, path: str) -> Any:
    for part in filter(None, path.split(".")):
        module = getattr(module, part)
    return module


def _put(program: nn.Module, name: str, module: nn.Module) -> None:
    """Set a module by its path, with the parents that it lacks."""
    *parents, last = name.split(".")
    for part in parents:
        if not hasattr(program, part):
            program.add_module(part, nn.Module())
        program = getattr(program, part)
    program._modules.pop(last, None)
    program.add_module(last, module)
