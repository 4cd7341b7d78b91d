"""Layers whose weight the code of a model reads itself: what it reads there is no tensor once the layer is quantized.

Found in the source of the functions that the model's ``forward`` may reach: chains of attributes such as
``self.conv.weight.squeeze``, which are then followed from each module. Both ways to be wrong are mild. A read that is
missed (there is no source, or it goes through a function's argument) raises a TypeError at the first call, because a
``Quantized`` is not a Tensor. A read that never happens leaves a layer in high precision, and the report says why.
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

#: What a quantized layer's ``weight`` answers as the plain one does: of any layer, and of a Linear.
_ANSWERED = ("dtype", "device")
_ANSWERED_BY_LINEAR = (*_ANSWERED, "shape", "ndim", "size", "dim", "numel")

#: Stands in a path for a subscript.
_ANY = "*"

#: What a test may consist of, to be evaluated on a module.
_PLAIN = (
    ast.Compare, ast.cmpop, ast.BoolOp, ast.boolop, ast.UnaryOp, ast.unaryop, ast.Attribute, ast.Name, ast.Constant,
    ast.expr_context,
)  # fmt: skip


class _Read(NamedTuple):
    """A chain of attributes that the code of a module reads, ``("conv1d", "weight", "squeeze")`` of ``self``.

    ``tests``: the conditions around it, and whether they hold there. ``me``: what the function calls ``self``.
    """

    path: tuple[str, ...]
    tests: tuple[tuple[ast.expr, bool], ...]
    me: str
    where: str


class _Code(NamedTuple):
    """What a function reads, and every name of an attribute in it, which may be that of a function it calls."""

    reads: tuple[_Read, ...] = ()
    names: frozenset[str] = frozenset()


def read_layers(model: nn.Module, trained: bool = False) -> dict[int, str]:
    """By ``id`` each module inside of ``model`` of which other code than its own reads a weight, and that code's name.

    ``trained``: whether what runs in training mode alone counts as well. Branches that the attributes of a module rule
    out, as they are now, are left out, and so are torch's own classes, whose fused kernels a conversion switches off.
    """
    modules = list(model.modules())
    reads: dict[type, list[_Read]] = {plain_class(module): [] for module in modules}
    names, seen = {"forward", "__call__"}, set[str]()
    while new := names - seen:
        seen |= new
        for cls, own in reads.items():
            for name in new:
                code = _code(getattr(cls, name, None))
                own += code.reads
                names |= code.names
    readers: dict[int, str] = {}
    for module in modules:
        for read in reads[plain_class(module)]:
            for layers, (parameter, *attributes) in _resolved(module, read.path):
                plain = find(layers[-1]).listed == full_name(nn.Linear)
                answered = attributes and attributes[0] in (_ANSWERED_BY_LINEAR if plain else _ANSWERED)
                if not (answered and parameter == "weight") and all(
                    _may_be(test, holds, module, read.me, trained) for test, holds in read.tests
                ):
                    readers.update({id(layer): read.where for layer in layers})
    return readers


def _resolved(
    module: nn.Module, path: tuple[str, ...], layers: tuple[nn.Module, ...] = ()
) -> Iterator[tuple[tuple[nn.Module, ...], tuple[str, ...]]]:
    """The modules on the way to each weight inside of ``module`` that ``path`` names, and its end from there on."""
    if not path:
        return
    name, rest = path[0], path[1:]
    if layers and name != "bias":  # which a quantized layer has as well
        yield from (((*layers, holder), path) for holder in _holders(module, name))
    inner: Iterable[nn.Module | None] = module._modules.values() if name == _ANY else (module._modules.get(name),)
    for child in inner:
        if child is not None:
            yield from _resolved(child, rest, (*layers, child))


def _holders(module: nn.Module, name: str) -> list[nn.Module]:
    """The module whose parameter ``module.name`` is: itself, or of a property, as peft's layers have, one inside."""
    if name in module._parameters:
        return [module]
    if not isinstance(getattr(type(module), name, None), property):
        return []
    try:
        value = getattr(module, name)
    except Exception:  # of whatever the property computes
        return []
    inside = () if value is None else module.modules()
    return [inner for inner in inside if any(p is value for p in inner._parameters.values())]


def _may_be(test: ast.expr, holds: bool, module: nn.Module, me: str, trained: bool) -> bool:
    """Whether ``test`` may be ``holds``: it is evaluated where only attributes of ``module`` decide it.

    What ``eval`` sees is a test in the source of the model's class, which Python has imported already, and holds no
    call: nothing but ``_PLAIN``. So it runs the properties and comparisons that the model's own call runs, and no other
    code.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _may_be(test.operand, not holds, module, me, trained)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And if holds else ast.Or):
        return all(_may_be(part, holds, module, me, trained) for part in test.values)
    if isinstance(test, ast.Attribute) and test.attr == "training":
        return trained or not holds
    for node in ast.walk(test):
        another = isinstance(node, ast.Name) and node.id != me
        if another or not isinstance(node, _PLAIN) or (isinstance(node, ast.Attribute) and node.attr == "training"):
            return True
    try:
        return bool(eval(compile(ast.Expression(test), "", "eval"), {"__builtins__": {}}, {me: module})) is holds
    except Exception:  # of whatever the attributes are
        return True


# -- reading source ---------------------------------------------------------------------------------------------------
def _code(attribute: Any) -> _Code:
    """What the function behind an attribute of a class reads; nothing of what is no function of Python."""
    if isinstance(attribute, property):
        attribute = attribute.fget
    function = inspect.unwrap(getattr(attribute, "__func__", attribute))
    if not isinstance(function, FunctionType) or (function.__module__ or "").split(".")[0] == "torch":
        return _Code()  # of code that torch.fx wrote the module is None
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
    """Collects the chains of attributes of ``me``, of local names for them as well."""

    def __init__(self, me: str, where: str) -> None:
        self.me, self.where = me, where
        self.reads: list[_Read] = []
        self.names: set[str] = set()
        self.tests: list[tuple[ast.expr, bool]] = []
        self.local: dict[str, tuple[str, ...]] = {me: ()}

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
        """Notes a chain as a whole, and what is in its subscripts."""
        if isinstance(node, ast.Attribute):
            self.names.add(node.attr)
        path = self._path(node) if isinstance(node, ast.Attribute | ast.Subscript | ast.Name) else None
        if path and isinstance(node.ctx, ast.Load):  # type: ignore[attr-defined]
            self.reads.append(_Read(path, tuple(self.tests), self.me, self.where))
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
