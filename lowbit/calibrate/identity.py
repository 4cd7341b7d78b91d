"""Digests of tensors, batches and user-defined functions, which are the same in every process.

The digest of a function covers its code, defaults, closure and referenced globals. Functions and classes of installed
libraries are identified by name, and other objects by their pickled state.
"""

from __future__ import annotations

import dis
import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    ModuleType,
)  # fmt: skip
from typing import Any

import torch
from torch import Tensor

__all__ = ["digest"]

#: Types besides None and str whose ``repr`` is complete and the same in every process.
_PLAIN = (
    type(...), type(NotImplemented), bool, int, float, complex, bytes, range, slice, torch.dtype, torch.device,
    torch.layout, torch.memory_format,
)  # fmt: skip

#: Members of a class that do not change its behavior.
_INCIDENTAL = frozenset(
    {
        "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__firstlineno__",
        "__static_attributes__", "__annotate_func__", "__annotations_cache__", "__abstractmethods__", "_abc_impl",
    }
)  # fmt: skip


def digest(value: Any, what: str = "the data") -> str:
    """Return the SHA-256 of tensors, numbers, strings, functions and other objects, also in dicts, tuples and lists.

    Args:
        value: The value.
        what: Its description for the error.

    Raises:
        ValueError: The value has no digest, for example because it cannot be pickled.
    """
    total = hashlib.sha256()
    try:
        for piece in _Writer().of(value):
            total.update(piece)
    except (_NoDigest, RecursionError) as error:
        reason = error if isinstance(error, _NoDigest) else "it is nested too deeply"
        raise ValueError(
            f"{what} has no digest to identify it: {reason}; use plain data, tensors, functions that import modules "
            f"outside of their body, and objects that can be pickled"
        ) from None
    return total.hexdigest()


class _NoDigest(Exception):
    """The reason why a value has no digest."""


class _Writer:
    """Writes a value as bytes. A repeated object is written as the number of its first occurrence."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, Any]] = {}  # with the object, so that its id is not reused

    def of(self, value: Any) -> Iterator[bytes]:
        if isinstance(value, Tensor):
            plain = value.detach().cpu().contiguous()
            yield f"{plain.dtype} {list(plain.shape)}".encode()
            yield plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        elif isinstance(value, str | None):
            yield repr(value).encode()
        elif isinstance(value, _PLAIN):
            yield f"\0{value!r}\0".encode()  # so that (1, 12) is not (11, 2)
        elif hasattr(value, "items") and not isinstance(value, type | ModuleType):
            rows = sorted(value.items(), key=lambda row: str(row[0]))
            yield f"map {len(rows)}".encode()
            for row in rows:
                yield from self.of(row)
        elif isinstance(value, tuple | list):
            yield str(len(value)).encode()
            for inner in value:
                yield from self.of(inner)
        elif isinstance(value, set | frozenset):
            yield f"set {sorted(digest(inner) for inner in value)}".encode()
        elif id(value) in self.seen:
            yield f"met {self.seen[id(value)][0]}".encode()
        else:
            self.seen[id(value)] = len(self.seen), value
            yield f"{type(value).__module__}.{type(value).__qualname__}".encode()
            yield from self._object(value)

    def _object(self, value: Any) -> Iterator[bytes]:
        if isinstance(value, FunctionType):
            yield from self._function(value)
        elif isinstance(value, type):
            yield from self._class(value)
        elif isinstance(value, CodeType):
            yield value.co_code
            parts = (value.co_consts, value.co_names, value.co_varnames, value.co_argcount, value.co_flags)
            yield from self.of((*parts, value.co_posonlyargcount, value.co_kwonlyargcount))
            yield getattr(value, "co_exceptiontable", b"")  # Python 3.10 has none
        elif isinstance(value, CellType):
            yield from self.of(_content(value))
        elif isinstance(value, ModuleType):
            yield value.__name__.encode()
            if _is_user_module(value):
                raise _NoDigest(f"it refers to the module {value.__name__} as a whole")
        elif isinstance(value, MappingProxyType):
            yield from self.of(dict(value))
        elif isinstance(value, staticmethod | classmethod):
            yield from self.of(value.__func__)
        elif isinstance(value, property):
            yield from self.of((value.fget, value.fset, value.fdel))
        elif isinstance(value, cached_property):
            yield from self.of(value.func)
        else:
            yield from self._pickled(value)

    def _function(self, value: FunctionType) -> Iterator[bytes]:
        yield f"{value.__module__}.{value.__qualname__}".encode()
        yield from self.of(value.__code__)
        if _is_library(value):
            return
        values = {}
        for name in _loaded(value.__code__) & value.__globals__.keys():
            inner = value.__globals__[name]
            reached = _reached(name, inner, _names_of(value.__code__)) if _is_user_module(inner) else {name: inner}
            values.update(reached)
        yield from self.of((value.__defaults__, value.__kwdefaults__, value.__closure__, values, vars(value)))

    def _class(self, value: type) -> Iterator[bytes]:
        yield f"{value.__module__}.{value.__qualname__}".encode()
        if _is_library(value):
            return
        yield from self.of(value.__bases__)
        for name, member in sorted(vars(value).items()):
            if name not in _INCIDENTAL and not isinstance(member, GetSetDescriptorType | MemberDescriptorType):
                yield name.encode()
                yield from self.of(member)

    def _pickled(self, value: Any) -> Iterator[bytes]:
        """The state that pickle would write."""
        try:
            reduced = value.__reduce_ex__(4)
        except Exception:  # __reduce_ex__ of a class can raise anything
            raise _NoDigest(f"pickle cannot write a {type(value).__module__}.{type(value).__qualname__}") from None
        if isinstance(reduced, str):
            yield f"{getattr(value, '__module__', None)}.{reduced}".encode()
            if not isinstance(value, BuiltinFunctionType):
                yield from self.of(getattr(value, "__dict__", None))
            return
        for part in reduced:
            yield from self.of(list(part) if isinstance(part, Iterator) else part)


def _content(cell: CellType) -> Any:
    """The value of a closure's cell; None if it has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code and the code of its inner functions."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _loaded(code: CodeType) -> set[str]:
    """The globals that code refers to. Raises _NoDigest for code that imports a user's module."""
    rows = [row for inner in _codes(code) for row in dis.get_instructions(inner)]
    for row in rows:
        if row.opname == "IMPORT_NAME" and not _installed(row.argval):
            raise _NoDigest(f"it imports {row.argval or 'a neighbouring module'} when it is called")
    return {row.argval for row in rows if row.opname in ("LOAD_GLOBAL", "LOAD_NAME")}


def _names_of(code: CodeType) -> set[str]:
    """The names of its globals and of all attributes that it uses."""
    return {name for inner in _codes(code) for name in inner.co_names}


def _reached(name: str, module: ModuleType, names: set[str]) -> dict[str, Any]:
    """The values that code with these names may read from a user's module."""
    values: dict[str, Any] = {}
    for attribute in names & vars(module).keys():
        inner, path = vars(module)[attribute], f"{name}.{attribute}"
        values.update(_reached(path, inner, names) if _is_user_module(inner) else {path: inner})
    return values


def _is_user_module(value: Any) -> bool:
    return isinstance(value, ModuleType) and not _installed(value.__name__)


def _is_library(value: Any) -> bool:
    """Whether a function or class belongs to an installed library and is identified by its name."""
    named: Any = sys.modules.get(value.__module__)
    for word in value.__qualname__.split("."):
        named = getattr(named, word, None)
    return named is value and _installed(value.__module__)


def _installed(name: str) -> bool:
    """Whether a module belongs to Python, an installed package or lowbit, whose version is a part of a run."""
    top = name.partition(".")[0]
    if top == "lowbit" or top in sys.builtin_module_names:
        return True
    file = getattr(sys.modules.get(top), "__file__", None)
    if file is None:
        return False
    path = Path(file)
    return path.is_relative_to(sysconfig.get_path("stdlib")) or not {"site-packages", "dist-packages"}.isdisjoint(
        path.parts
    )
