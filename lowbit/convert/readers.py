"""Finds layers whose weight the model's own code reads, which would fail on a quantized weight.

Parses the source of the functions that the model's ``forward`` may call for chains of attributes such as
``self.conv.weight.squeeze``, and follows each chain from each module. Both kinds of error are mild. After a missed read
(without source, or through a function's argument) the first call raises TypeError, because a ``Quantized`` is not a
Tensor. A read that never happens leaves a layer in high precision, with the reason in the report.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn

from lowbit.convert.adapters import find
from lowbit.models.wrap import plain_class
from lowbit.nn.base import full_name

__all__ = ["read_layers"]

#: Attributes that a quantized layer's ``weight`` has as well: of any layer, and of a Linear.
_SUPPORTED = ("dtype", "device")
_SUPPORTED_BY_LINEAR = (*_SUPPORTED, "shape", "ndim", "size", "dim", "numel")

#: A subscript in a path.
_ANY = "*"

#: Syntax that is evaluated in a test.
_PLAIN = (
    ast.Compare, ast.cmpop, ast.BoolOp, ast.boolop, ast.UnaryOp, ast.unaryop, ast.Attribute, ast.Name, ast.Constant,
    ast.expr_context,
)  # fmt: skip


class _Read(NamedTuple):
    """A chain of attributes that a module's code reads."""

    path: tuple[str, ...]  # from self, such as ("conv1d", "weight", "squeeze")
    tests: tuple[tuple[ast.expr, bool], ...]  # the conditions around it, and their values there
    self_name: str  # the function's name for self
    function: str


class _Code(NamedTuple):
    """The reads of a function, and all names of attributes in it, which may be functions that it calls."""

    reads: tuple[_Read, ...] = ()
    names: frozenset[str] = frozenset()


def read_layers(model: nn.Module, trained: bool = False) -> dict[int, str]:
    """By ``id``, each module in ``model`` whose weight is read by other modules' code, with the reading function.

    ``trained``: whether code that runs only in training mode counts as well. Branches that the current attributes of a
    module rule out do not count. Neither do torch's classes, whose fused kernels a conversion switches off.
    """
    modules = list(model.modules())
    reads: dict[type, list[_Read]] = {plain_class(module): [] for module in modules}
    names, seen = {"forward", "__call__"}, set[str]()
    while new := names - seen:
        seen |= new
        for cls, class_reads in reads.items():
            for name in new:
                code = _code(getattr(cls, name, None))
                class_reads += code.reads
                names |= code.names
    readers: dict[int, str] = {}
    for module in modules:
        for read in reads[plain_class(module)]:
            for layers, (parameter, *attributes) in _resolved(module, read.path):
                plain = find(layers[-1]).listed == full_name(nn.Linear)
                supported = attributes and attributes[0] in (_SUPPORTED_BY_LINEAR if plain else _SUPPORTED)
                if not (supported and parameter == "weight") and all(
                    _may_be(test, holds, module, read.self_name, trained) for test, holds in read.tests
                ):
                    readers.update({id(layer): read.function for layer in layers})
    return readers


def _resolved(
    module: nn.Module, path: tuple[str, ...], layers: tuple[nn.Module, ...] = ()
) -> Iterator[tuple[tuple[nn.Module, ...], tuple[str, ...]]]:
    """The modules on the way to each weight in ``module`` that ``path`` reads, and the rest of the path."""
    if not path:
        return
    name, rest = path[0], path[1:]
    if layers and name != "bias":  # a quantized layer has a bias as well
        yield from (((*layers, holder), path) for holder in _holders(module, name))
    inner: Iterable[nn.Module | None] = module._modules.values() if name == _ANY else (module._modules.get(name),)
    for child in inner:
        if child is not None:
            yield from _resolved(child, rest, (*layers, child))


def _holders(module: nn.Module, name: str) -> list[nn.Module]:
    """The module with the parameter ``module.name``: itself, or a submodule if it is a property, as in peft."""
    if name in module._parameters:
        return [module]
    if not isinstance(getattr(type(module), name, None), property):
        return []
    try:
        value = getattr(module, name)
    except Exception:  # a property can raise anything
        return []
    inside = () if value is None else module.modules()
    return [inner for inner in inside if any(p is value for p in inner._parameters.values())]


def _may_be(test: ast.expr, holds: bool, module: nn.Module, self_name: str, trained: bool) -> bool:
    """Whether ``test`` may be ``holds``. It is evaluated if it depends only on attributes of ``module``.

    ``eval`` is safe here: the test is in the source of the model's class, which is imported already, and contains only
    ``_PLAIN`` syntax, without calls. It runs the same properties and comparisons as a call of the model.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _may_be(test.operand, not holds, module, self_name, trained)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And if holds else ast.Or):
        return all(_may_be(part, holds, module, self_name, trained) for part in test.values)
    if isinstance(test, ast.Attribute) and test.attr == "training":
        return trained or not holds
    for node in ast.walk(test):
        other_name = isinstance(node, ast.Name) and node.id != self_name
        if other_name or not isinstance(node, _PLAIN) or (isinstance(node, ast.Attribute) and node.attr == "training"):
            return True
    try:
        return bool(eval(compile(ast.Expression(test), "", "eval"), {"__builtins__": {}}, {self_name: module})) is holds
    except Exception:  # a property or comparison can raise anything
        return True


# -- reading source ---------------------------------------------------------------------------------------------------
def _code(attribute: Any) -> _Code:
    """The reads of the Python function of a class attribute; none for other attributes."""
    if isinstance(attribute, property):
        attribute = attribute.fget
    function = inspect.unwrap(getattr(attribute, "__func__", attribute))
    # The __module__ of code that torch.fx generated is None.
    if not isinstance(function, FunctionType) or (function.__module__ or "").split(".")[0] == "torch":
        return _Code()
    return _parsed(function)


@lru_cache(maxsize=4096)
def _parsed(function: FunctionType) -> _Code:
    try:
        source = inspect.getsource(function)
        tree = ast.parse(f"if 1:\n{source}" if source[:1].isspace() else source)
    except (OSError, TypeError, SyntaxError):
        return _Code()
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    chains = _Chains(names[0] if names else "", function.__qualname__)
    chains.visit(tree)
    return _Code(tuple(chains.reads), frozenset(chains.names))


class _Chains(ast.NodeVisitor):
    """Collects the chains of attributes of ``self_name``, also through local variables."""

    def __init__(self, self_name: str, function: str) -> None:
        self.self_name, self.function = self_name, function
        self.reads: list[_Read] = []
        self.names: set[str] = set()
        self.tests: list[tuple[ast.expr, bool]] = []
        self.local: dict[str, tuple[str, ...]] = {self_name: ()}

    def _path(self, node: ast.expr) -> tuple[str, ...] | None:
        if isinstance(node, ast.Name):
            return self.local.get(node.id)
        if not isinstance(node, ast.Attribute | ast.Subscript):
            return None
        path = self._path(node.value)
        if path is None or (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice)):
            return path
        return (*path, node.attr if isinstance(node, ast.Attribute) else _ANY)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Attribute):
            self.names.add(node.attr)
        path = self._path(node) if isinstance(node, ast.Attribute | ast.Subscript | ast.Name) else None
        if path and isinstance(node.ctx, ast.Load):  # type: ignore[attr-defined]
            self.reads.append(_Read(path, tuple(self.tests), self.self_name, self.function))
            self.names.update(path)
            for inner in ast.walk(node):
                if isinstance(inner, ast.Subscript):
                    self.visit(inner.slice)
            return
        super().visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        path = self._path(node.value)
        if path and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            self.local[node.targets[0].id] = path
            self.names.update(path)
        else:
            self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        path = self._path(node.iter)
        if path and isinstance(node.target, ast.Name):
            self.local[node.target.id] = (*path, _ANY)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        for branch, holds in ((node.body, True), (node.orelse, False)):
            self.tests.append((node.test, holds))
            for statement in branch:
                self.visit(statement)
            self.tests.pop()

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            return
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if not all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
            self.generic_visit(node)
