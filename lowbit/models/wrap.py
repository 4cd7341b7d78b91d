"""Wrappers: the one way to put something in place of a module's forward, which stays whatever is done to the module.

A module has a stack of them, innermost first, in its ``__dict__``. Its class becomes a subclass of the one it has, as
torch's ``fully_shard`` makes one, whose ``forward`` reads the stack at each call: names of parameters, ``isinstance``,
hooks, copies and pickles stay as they are, and ``type(module).forward`` is still the forward of the plain class. A
forward that others set (``module.forward = ...``) goes around the wrappers that are there and is an entry of the stack.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

__all__ = [
    "WRAPPERS", "Wrapper", "change_class", "derived", "plain_class", "replaced_forward", "unwrap", "unwrap_all", "wrap",
    "wrapped", "wrapper_of", "wrappers",
]  # fmt: skip

#: Where a module keeps its stack: in its ``__dict__``.
WRAPPERS = "_lowbit_wrappers"


class Wrapper:
    """Called in place of a module's forward: with the module, its forward, and what that is called with.

    It holds no reference to the module: that would be a cycle, and ``del model`` would free no weight until the garbage
    collector runs. It is no hook: those do not run after an interrupt, nor where a hook before them raised.

    ``outermost``: it stays outside of wrappers, and of forwards that others set, that come later. ``prefix``: what the
    name of the module's class begins with.
    """

    outermost: ClassVar[bool] = False
    prefix: ClassVar[str] = ""

    def __call__(self, module: Any, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


_Wrapper = TypeVar("_Wrapper", bound=Wrapper)


def wrap(module: nn.Module, wrapper: Wrapper) -> None:
    """Call ``wrapper`` in place of ``module.forward``."""
    stack = _stack(module)
    place = len(stack) if wrapper.outermost else _inner(stack)
    _put(module, (*stack[:place], wrapper, *stack[place:]))


def unwrap(module: nn.Module, wrapper: Wrapper, who: str = "unwrap") -> None:
    """Take ``wrapper`` away from ``module``, which has it. With the last one its class is the plain one again.

    Raises ValueError, in the name of ``who``, where others have set a forward around it, which may call it.
    """
    _unwrap([("", module, wrapper)], who)


def unwrap_all(model: nn.Module, who: str, *classes: type[_Wrapper]) -> list[tuple[str, _Wrapper]]:
    """Take away the wrappers of ``classes`` in all modules of ``model``; each with the path of its module.

    Raises ValueError, with the model untouched, where others have set a forward around one.
    """
    modules = list(model.named_modules())
    rows = [(path, module, one) for path, module in modules for one in wrappers(module) if isinstance(one, classes)]
    _unwrap(rows, who)
    return [(path, wrapper) for path, _, wrapper in rows]


def _unwrap(rows: Sequence[tuple[str, nn.Module, Wrapper]], who: str) -> None:
    covered = []
    for path, module, wrapper in rows:
        stack = _stack(module)
        if any(isinstance(entry, _Assigned) for entry in stack[stack.index(wrapper) :]):
            covered.append(path or "the model")
    if covered:
        raise ValueError(f"{who}: the forward of {', '.join(covered)} has been replaced since; undo that first")
    for _, module, wrapper in rows:
        _remove(module, wrapper)


@contextmanager
def wrapped(pairs: Iterable[tuple[nn.Module, Wrapper]]) -> Iterator[None]:
    """Within, each of the modules has the wrapper beside it. A forward that others set meanwhile stays."""
    pairs = list(pairs)
    try:
        for module, wrapper in pairs:
            wrap(module, wrapper)
        yield
    finally:
        for module, wrapper in pairs:
            _remove(module, wrapper)


def wrappers(module: nn.Module) -> tuple[Wrapper, ...]:
    """The wrappers of ``module``, innermost first."""
    return tuple(entry for entry in _stack(module) if isinstance(entry, Wrapper))


def wrapper_of(module: nn.Module, cls: type[_Wrapper]) -> _Wrapper | None:
    """The module's wrapper of that class, the outermost of several; None where it has none."""
    return next((wrapper for wrapper in reversed(wrappers(module)) if isinstance(wrapper, cls)), None)


def replaced_forward(layer: nn.Module) -> Any:
    """The ``forward`` that others set on ``layer``, which runs in place of its class's; None where its class's runs."""
    return _origin(layer, plain_class(layer), _assigned(_stack(layer)))


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The module's class without its wrappers."""
    plain: type[nn.Module] = vars(type(module)).get("_lowbit_plain", type(module))
    return plain


def change_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Give the module another class; its wrappers stay.

    A bound method of the class that it had, which accelerate sets where it removes a hook, does not.
    """
    stack = wrappers(module) if replaced_forward(module) is None else _stack(module)
    module.__class__ = cls
    _put(module, stack)


# -- the stack ---------------------------------------------------------------------------------------------------------
@dataclass(eq=False)
class _Assigned:
    """An entry of the stack: a forward that others have set."""

    forward: Any
    outermost: ClassVar[bool] = False
    prefix: ClassVar[str] = ""


def _stack(module: nn.Module) -> tuple[Any, ...]:
    """Wrappers, and forwards that others set, innermost first."""
    state = module.__dict__
    own = (_Assigned(state["forward"]),) if "forward" in state else ()
    return state.get(WRAPPERS, own)  # type: ignore[no-any-return]


def _inner(stack: tuple[Any, ...]) -> int:
    """How many entries are inside of the outermost wrappers."""
    return sum(not entry.outermost for entry in stack)


def _assigned(stack: tuple[Any, ...]) -> Any:
    """The last forward that others set."""
    return next((entry.forward for entry in reversed(stack) if isinstance(entry, _Assigned)), None)


def _store(module: nn.Module, stack: tuple[Any, ...]) -> None:
    state = vars(module)
    for name in (WRAPPERS, "forward"):
        state.pop(name, None)
    if any(isinstance(entry, Wrapper) for entry in stack):
        state[WRAPPERS] = stack
    elif stack:
        state["forward"] = stack[-1].forward


def _put(module: nn.Module, stack: tuple[Any, ...]) -> None:
    """Give the module this stack, and the class that reads it."""
    plain, prefix = plain_class(module), "".join(entry.prefix for entry in stack)
    _store(module, stack)
    # A class that was made of the one with wrappers since, as by ``fully_shard``, stays when they go.
    module.__class__ = _wrapped_class(plain, prefix) if WRAPPERS in vars(module) else plain


def _remove(module: nn.Module, wrapper: Wrapper) -> None:
    _put(module, tuple(entry for entry in _stack(module) if entry is not wrapper))


def _origin(module: nn.Module, plain: type[nn.Module], forward: Any) -> Any:
    """``forward``, or the one set on the module that ``module.forward`` was around when it was read; None: the class's.

    Libraries that set a forward keep the one before, and set that again, or a method of it, to undo it.
    """
    is_method = isinstance(forward, MethodType) and forward.__self__ is module
    function = forward.__func__ if is_method else forward
    if isinstance(function, _Bound) and function.module is module:
        return function.assigned
    return None if is_method and function is plain.forward else forward


# -- the forward -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Bound:
    """``module.forward`` as it is read: a wrapper around the forward inside, which has the signature. Read twice it is
    equal, as a method is.

    ``assigned``: the last one inside that others set. It stays right where it is called later: a wrapper that was taken
    away runs no more, and an outermost one not where a forward was set since, which it is around, and which calls this.
    """

    wrapper: Wrapper
    module: nn.Module
    __wrapped__: Any = field(compare=False)
    assigned: Any

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        stack = _stack(self.module)
        if self.wrapper not in stack or (self.wrapper.outermost and _assigned(stack) is not self.assigned):
            return self.__wrapped__(*args, **kwargs)
        return self.wrapper(self.module, self.__wrapped__, *args, **kwargs)


class _Forward:
    """``forward`` of a class of modules with wrappers. It goes before what is in the module's ``__dict__``."""

    def __init__(self, plain: type[nn.Module]) -> None:
        self.plain = plain

    def __get__(self, module: nn.Module | None, cls: type | None = None) -> Any:
        if module is None:
            return self.plain.forward
        forward: Any = partial(self.plain.forward, module)
        assigned = None
        for entry in _stack(module):
            if isinstance(entry, _Assigned):
                forward = assigned = entry.forward
            elif torch.compiler.is_compiling():
                forward = partial(entry.__call__, module, forward)
            else:
                forward = _Bound(entry, module, forward, assigned)
        return forward

    def __set__(self, module: nn.Module, forward: Any) -> None:
        """Sets a forward around the wrappers that are there, in place of one that was set there; one that was there
        before takes away those set since.
        """
        stack, origin = _stack(module), _origin(module, self.plain, forward)
        known = [place for place, entry in enumerate(stack) if isinstance(entry, _Assigned) and entry.forward is origin]
        if origin is None or known:
            below = known[0] + 1 if known else 0
            _store(module, (*stack[:below], *(entry for entry in stack[below:] if isinstance(entry, Wrapper))))
            return
        place = _inner(stack)
        below = place - 1 if place and isinstance(stack[place - 1], _Assigned) else place
        _store(module, (*stack[:below], _Assigned(origin), *stack[place:]))

    def __delete__(self, module: nn.Module) -> None:
        """Takes away the last one that was set."""
        stack = _stack(module)
        places = [place for place, entry in enumerate(stack) if isinstance(entry, _Assigned)]
        if not places:
            raise AttributeError("forward")
        _store(module, (*stack[: places[-1]], *stack[places[-1] + 1 :]))


# -- classes -----------------------------------------------------------------------------------------------------------
#: The classes made so far, by what they are made of.
_CLASSES: dict[tuple[type, str], Any] = {}


def _wrapped_class(plain: type[nn.Module], prefix: str) -> Any:
    """The class of modules of the class ``plain`` that have wrappers. Without a prefix it has the same name: configs
    and lists of classes of other libraries have names.
    """
    if (plain, prefix) in _CLASSES:
        return _CLASSES[plain, prefix]

    names = {
        "__module__": plain.__module__,
        "__qualname__": f"{prefix}{plain.__name__}" if prefix else plain.__qualname__,
        "__doc__": plain.__doc__,
        "_lowbit_plain": plain,
        "forward": _Forward(plain),
    }
    becomes = getattr(plain, "cls_to_become", None)  # a lazy module's class after its first call
    if becomes is not None:
        names["cls_to_become"] = _wrapped_class(becomes, prefix)
    cls = derived(f"{prefix}{plain.__name__}", (plain,), names, _wrapped_class, plain, prefix)
    return _CLASSES.setdefault((plain, prefix), cls)


def derived(name: str, bases: tuple[type, ...], names: dict[str, Any], remake: Any, *key: Any) -> Any:
    """A class of which modules copy and pickle by ``remake(*key)``, which returns it."""

    def reduced(self: nn.Module, protocol: Any) -> Any:
        made = super(cls, self).__reduce_ex__(protocol)
        if isinstance(made, str) or made[0] is not copyreg.__newobj__ or made[1][0] is not cls:  # type: ignore[attr-defined]
            return made
        return (_new, (remake, key, *made[1][1:]), *made[2:])

    class Unregistered:
        """Before classes whose ``__init_subclass__`` may enter a class in a table."""

        def __init_subclass__(cls, **kwargs: Any) -> None:
            pass

    cls: Any = type(name, (Unregistered, *bases), {**names, "__reduce_ex__": reduced})
    return cls


def _new(remake: Any, key: tuple[Any, ...], *args: Any) -> Any:
    """A module of a derived class for copies and pickles to fill."""
    cls = remake(*key)
    return cls.__new__(cls, *args)
