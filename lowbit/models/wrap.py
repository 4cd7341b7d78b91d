"""Wrappers: replace the forward of a module in a way that survives copies, pickles and later changes of the module.

A module has a stack of them, innermost first, in its ``__dict__``. Its class becomes a subclass, as with torch's
``fully_shard``, whose ``forward`` reads the stack at each call. Parameter names, ``isinstance``, hooks, copies and
pickles stay valid, and ``type(module).forward`` is still the plain forward. A forward that other code assigns
(``module.forward = ...``) goes around the existing wrappers and becomes an entry of the stack.
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

#: The key of the stack in a module's ``__dict__``.
WRAPPERS = "_lowbit_wrappers"


class Wrapper:
    """Called instead of a module's forward, with the module, its forward, and the arguments.

    It holds no reference to the module: such a cycle would keep the weights after ``del model`` until the garbage
    collector runs. A hook would not do: hooks do not run after an interrupt, or if an earlier hook raises.

    Attributes:
        outermost: whether it stays outside of wrappers, and of assigned forwards, that come later.
        innermost: whether it stays inside of all others: it may compute without the forward.
        prefix: prefix of the name of the module's class.
    """

    outermost: ClassVar[bool] = False
    innermost: ClassVar[bool] = False
    prefix: ClassVar[str] = ""

    def __call__(self, module: Any, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


_Wrapper = TypeVar("_Wrapper", bound=Wrapper)


def wrap(module: nn.Module, wrapper: Wrapper) -> None:
    """Call ``wrapper`` instead of ``module.forward``."""
    stack = _stack(module)
    position = len(stack) if wrapper.outermost else 0 if wrapper.innermost else _inner(stack)
    _put(module, (*stack[:position], wrapper, *stack[position:]))


def unwrap(module: nn.Module, wrapper: Wrapper, who: str = "unwrap") -> None:
    """Remove ``wrapper`` from ``module``. Without wrappers the module has its plain class again.

    Raises:
        ValueError: other code has assigned a forward around it, which may call it. ``who`` starts the message.
    """
    _unwrap([("", module, wrapper)], who)


def unwrap_all(model: nn.Module, who: str, *classes: type[_Wrapper]) -> list[tuple[str, _Wrapper]]:
    """Remove the wrappers of ``classes`` from all modules of ``model``, and return them with the paths of their
    modules.

    Raises:
        ValueError: other code has assigned a forward around one. The model is unchanged.
    """
    modules = list(model.named_modules())
    rows = [
        (path, module, entry) for path, module in modules for entry in wrappers(module) if isinstance(entry, classes)
    ]
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
    """Wrap each module with its wrapper in a ``with`` block. A forward that other code assigns meanwhile stays."""
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
    """The module's outermost wrapper of that class, or None."""
    return next((wrapper for wrapper in reversed(wrappers(module)) if isinstance(wrapper, cls)), None)


def replaced_forward(layer: nn.Module) -> Any:
    """The ``forward`` that other code assigned on ``layer``, or None if the forward of its class runs."""
    return _origin(layer, plain_class(layer), _assigned(_stack(layer)))


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The module's class without wrappers."""
    plain: type[nn.Module] = vars(type(module)).get("_lowbit_plain", type(module))
    return plain


def change_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Change the module's class and keep its wrappers.

    A bound method of the old class, which accelerate assigns when it removes a hook, is dropped.
    """
    stack = wrappers(module) if replaced_forward(module) is None else _stack(module)
    module.__class__ = cls
    _put(module, stack)


# -- the stack ---------------------------------------------------------------------------------------------------------
@dataclass(eq=False)
class _Assigned:
    """An entry of the stack: a forward that other code assigned."""

    forward: Any
    outermost: ClassVar[bool] = False
    prefix: ClassVar[str] = ""


def _stack(module: nn.Module) -> tuple[Any, ...]:
    """Wrappers and assigned forwards, innermost first."""
    state = module.__dict__
    assigned = (_Assigned(state["forward"]),) if "forward" in state else ()
    return state.get(WRAPPERS, assigned)  # type: ignore[no-any-return]


def _inner(stack: tuple[Any, ...]) -> int:
    """Number of entries inside the outermost wrappers."""
    return sum(not entry.outermost for entry in stack)


def _assigned(stack: tuple[Any, ...]) -> Any:
    """The last forward that other code assigned."""
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
    """Set the module's stack, and the class that reads it."""
    plain, prefix = plain_class(module), "".join(entry.prefix for entry in stack)
    _store(module, stack)
    # A class that was derived since from the class with wrappers, as by ``fully_shard``, stays.
    module.__class__ = _wrapped_class(plain, prefix) if WRAPPERS in vars(module) else plain


def _remove(module: nn.Module, wrapper: Wrapper) -> None:
    _put(module, tuple(entry for entry in _stack(module) if entry is not wrapper))


def _origin(module: nn.Module, plain: type[nn.Module], forward: Any) -> Any:
    """The assigned forward that ``forward`` stands for: itself, the one inside a ``_Bound``, or None for the class's.

    Libraries that assign a forward save the previous one, and assign it again, or a method of it, to undo that.
    """
    is_method = isinstance(forward, MethodType) and forward.__self__ is module
    function = forward.__func__ if is_method else forward
    if isinstance(function, _Bound) and function.module is module:
        return function.assigned
    return None if is_method and function is plain.forward else forward


# -- the forward -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Bound:
    """``module.forward`` as read: a wrapper around the inner forward, with its signature. Two reads are equal, as for
    methods.

    ``assigned`` is the last forward inside that other code assigned. A call may come later than the read: a wrapper
    that was removed since does not run, nor does an outermost one inside a forward assigned since, which it already
    surrounds.
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
    """Descriptor ``forward`` of a class with wrappers; it takes precedence over the module's ``__dict__``."""

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
        """Assign a forward around the existing wrappers, replacing an assigned one directly below.

        Assigning an earlier forward again removes the later ones.
        """
        stack, origin = _stack(module), _origin(module, self.plain, forward)
        positions = [i for i, entry in enumerate(stack) if isinstance(entry, _Assigned) and entry.forward is origin]
        if origin is None or positions:
            below = positions[0] + 1 if positions else 0
            _store(module, (*stack[:below], *(entry for entry in stack[below:] if isinstance(entry, Wrapper))))
            return
        position = _inner(stack)
        below = position - 1 if position and isinstance(stack[position - 1], _Assigned) else position
        _store(module, (*stack[:below], _Assigned(origin), *stack[position:]))

    def __delete__(self, module: nn.Module) -> None:
        """Remove the last assigned forward."""
        stack = _stack(module)
        positions = [i for i, entry in enumerate(stack) if isinstance(entry, _Assigned)]
        if not positions:
            raise AttributeError("forward")
        _store(module, (*stack[: positions[-1]], *stack[positions[-1] + 1 :]))


# -- classes -----------------------------------------------------------------------------------------------------------
#: Cache of derived classes, by plain class and prefix.
_CLASSES: dict[tuple[type, str], Any] = {}


def _wrapped_class(plain: type[nn.Module], prefix: str) -> Any:
    """The class of modules of class ``plain`` with wrappers.

    Without a prefix it has the same name, because configs and lists of other libraries contain class names.
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
    """A class whose modules are copied and pickled by ``remake(*key)``, which returns the class."""

    def reduced(self: nn.Module, protocol: Any) -> Any:
        reduction = super(cls, self).__reduce_ex__(protocol)
        if isinstance(reduction, str) or reduction[0] is not copyreg.__newobj__ or reduction[1][0] is not cls:  # type: ignore[attr-defined]
            return reduction
        return (_new, (remake, key, *reduction[1][1:]), *reduction[2:])

    class Unregistered:
        """Base that hides ``__init_subclass__`` of later bases, which may register the class."""

        def __init_subclass__(cls, **kwargs: Any) -> None:
            pass

    cls: Any = type(name, (Unregistered, *bases), {**names, "__reduce_ex__": reduced})
    return cls


def _new(remake: Any, key: tuple[Any, ...], *args: Any) -> Any:
    """An empty module of a derived class, for copies and pickles to fill."""
    cls = remake(*key)
    return cls.__new__(cls, *args)
