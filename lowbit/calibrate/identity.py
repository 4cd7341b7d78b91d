"""Digests of tensors, of batches, and of the functions that a user gives.

A digest is the same in another process. That of a function is of its code and of all that the code reaches: defaults,
what it closes over, globals that it names. That of an installed library's function or class is of its name; that of any
other object, of what pickle would write.
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

#: Besides None and strings, what ``repr`` tells whole, and alike in every process.
_PLAIN = (
    type(...), type(NotImplemented), bool, int, float, complex, bytes, range, slice, torch.dtype, torch.device,
    torch.layout, torch.memory_format,
)  # fmt: skip

#: Members of a class that say where it is written or how Python keeps it, and not what it does.
_BESIDES = frozenset(
    {
        "__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__firstlineno__",
        "__static_attributes__", "__annotate_func__", "__annotations_cache__", "__abstractmethods__", "_abc_impl",
    }
)  # fmt: skip


def digest(value: Any, what: str = "the data") -> str:
    """SHA-256 of tensors, numbers, strings, functions and other objects, and of mappings, tuples and lists of them.

    ``what`` it is, for the error. Raises ValueError for what nothing would tell from another one, as an object that
    pickle cannot write.
    """
    total = hashlib.sha256()
    try:
        for piece in _Writer().of(value):
            total.update(piece)
    except (_NoDigest, RecursionError) as error:
        reason = error if isinstance(error, _NoDigest) else "it is nested too deeply"
        raise ValueError(
            f"{what} cannot be told from others: {reason}; use plain data, tensors, functions that import outside of "
            f"themselves, and objects that pickle can write"
        ) from None
    return total.hexdigest()


class _NoDigest(Exception):
    """Why something has no digest."""


class _Writer:
    """Writes a value as bytes. An object that comes again is written as the number of its first place."""

    def __init__(self) -> None:
        self.met: dict[int, tuple[int, Any]] = {}  # the object too, so that no other one gets its id

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
        elif id(value) in self.met:
            yield f"met {self.met[id(value)][0]}".encode()
        else:
            self.met[id(value)] = len(self.met), value
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
            if _is_own_module(value):
                raise _NoDigest(f"it holds all of the module {value.__name__}")
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
        own = {}
        for name in _loaded(value.__code__) & value.__globals__.keys():
            inner = value.__globals__[name]
            own.update(_reached(name, inner, _names_of(value.__code__)) if _is_own_module(inner) else {name: inner})
        yield from self.of((value.__defaults__, value.__kwdefaults__, value.__closure__, own, vars(value)))

    def _class(self, value: type) -> Iterator[bytes]:
        yield f"{value.__module__}.{value.__qualname__}".encode()
        if _is_library(value):
            return
        yield from self.of(value.__bases__)
        for name, member in sorted(vars(value).items()):
            if name not in _BESIDES and not isinstance(member, GetSetDescriptorType | MemberDescriptorType):
                yield name.encode()
                yield from self.of(member)

    def _pickled(self, value: Any) -> Iterator[bytes]:
        """What pickle would write: how the object is made, and of what."""
        try:
            reduced = value.__reduce_ex__(4)
        except Exception:  # what a class raises that does not want to be written has no end
            raise _NoDigest(f"pickle cannot write a {type(value).__module__}.{type(value).__qualname__}") from None
        if isinstance(reduced, str):
            yield f"{getattr(value, '__module__', None)}.{reduced}".encode()
            if not isinstance(value, BuiltinFunctionType):
                yield from self.of(getattr(value, "__dict__", None))
            return
        for part in reduced:
            yield from self.of(list(part) if isinstance(part, Iterator) else part)


def _content(cell: CellType) -> Any:
    """What a function closes over; a name that has no value yet has none."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code, and that of the functions inside it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _loaded(code: CodeType) -> set[str]:
    """The globals that code names. Raises _NoDigest for code that imports a module of the user's."""
    rows = [row for inner in _codes(code) for row in dis.get_instructions(inner)]
    for row in rows:
        if row.opname == "IMPORT_NAME" and not _installed(row.argval):
            raise _NoDigest(f"it imports {row.argval or 'a module beside it'} when it is called")
    return {row.argval for row in rows if row.opname in ("LOAD_GLOBAL", "LOAD_NAME")}


def _names_of(code: CodeType) -> set[str]:
    """Its globals, and the attributes of whatever it uses."""
    return {name for inner in _codes(code) for name in inner.co_names}


def _reached(name: str, module: ModuleType, names: set[str]) -> dict[str, Any]:
    """What code with these names reaches through a module of the user's."""
    found: dict[str, Any] = {}
    for attribute in names & vars(module).keys():
        inner, whole = vars(module)[attribute], f"{name}.{attribute}"
        found.update(_reached(whole, inner, names) if _is_own_module(inner) else {whole: inner})
    return found


def _is_own_module(value: Any) -> bool:
    return isinstance(value, ModuleType) and not _installed(value.__name__)


def _is_library(value: Any) -> bool:
    """Whether its name says what it is: a function or a class of an installed library, found by that name."""
    found: Any = sys.modules.get(value.__module__)
    for word in value.__qualname__.split("."):
        found = getattr(found, word, None)
    return found is value and _installed(value.__module__)


def _installed(name: str) -> bool:
    """Whether a module is of Python, of an installed package or of lowbit, whose version is a part of a run."""
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
