"""A function around the forward of a module, which stays there whatever is done to the module.

The module gets a class of its own, a subclass of the one it has, as torch's ``fully_shard`` gives it one: the names of
parameters, ``isinstance``, hooks and copies stay as they are. Its ``forward`` is looked up at each call: the one that
was set on the module itself (``module.forward = ...``), or else that of its class, which ``type(module).forward`` still
is.
"""

from __future__ import annotations

import copyreg
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import nn

__all__ = ["AROUND", "Around", "change_class", "derived", "plain_class", "surround", "surrounding", "unsurround"]

#: Where a module keeps what is around its forward: in its ``__dict__``.
AROUND = "_lowbit_around"


class Around(Protocol):
    """Called in place of a module's forward: with the module, its forward, and what that is called with.

    ``prefix``: what the name of the module's class begins with.
    """

    prefix: str

    def __call__(self, module: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any: ...


def surround(module: nn.Module, around: Around) -> None:
    """Call ``around`` in place of ``module.forward``; it replaces what was around before."""
    plain = plain_class(module)
    vars(module)[AROUND] = around
    module.__class__ = _surrounded(plain, around.prefix)


def surrounding(module: nn.Module) -> Around | None:
    """What is around the module's forward."""
    return cast("Around | None", vars(module).get(AROUND))


def unsurround(module: nn.Module) -> None:
    """Take away what is around the module's forward; nothing where nothing is.

    A class that was made of the surrounded one since, as by ``fully_shard``, stays, and runs the plain forward.
    """
    if vars(module).pop(AROUND, None) is not None:
        module.__class__ = plain_class(module)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The module's class without what is around its forward."""
    plain: type[nn.Module] = vars(type(module)).get("_lowbit_plain", type(module))
    return plain


def change_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Give the module another class; what is around its forward stays."""
    around = surrounding(module)
    module.__class__ = cls if around is None else _surrounded(cls, around.prefix)


class _Forward:
    """``forward`` of a surrounded class. It goes before what the module has in its ``__dict__``, which it calls."""

    def __init__(self, plain: type[nn.Module]) -> None:
        self.plain = plain

    def __get__(self, module: nn.Module | None, cls: type | None = None) -> Any:
        if module is None:
            return self.plain.forward
        forward = module.__dict__.get("forward")
        if forward is None:
            forward = partial(self.plain.forward, module)
        around = module.__dict__.get(AROUND)
        if around is None:
            return forward
        called = partial(around.__call__, module, forward)
        if not torch.compiler.is_compiling():
            called.__wrapped__ = forward  # type: ignore[attr-defined]  # whose signature it has
        return called

    def __set__(self, module: nn.Module, forward: Any) -> None:
        module.__dict__["forward"] = forward

    def __delete__(self, module: nn.Module) -> None:
        try:
            del module.__dict__["forward"]
        except KeyError:
            raise AttributeError("forward") from None


#: The classes made so far, by what they are made of.
_CLASSES: dict[tuple[type, str], Any] = {}


def _surrounded(plain: type[nn.Module], prefix: str) -> Any:
    """The class of surrounded modules of the class ``plain``."""
    if (plain, prefix) in _CLASSES:
        return _CLASSES[plain, prefix]

    names = {"__module__": plain.__module__, "__doc__": plain.__doc__, "_lowbit_plain": plain}
    cls = derived(f"{prefix}{plain.__name__}", (plain,), names, _surrounded, plain, prefix)
    cls.forward = _Forward(plain)  # after what __init_subclass__ may set
    return _CLASSES.setdefault((plain, prefix), cls)


def derived(name: str, bases: tuple[type, ...], names: dict[str, Any], remake: Any, *key: Any) -> Any:
    """A class of which modules copy and pickle by ``remake(*key)``, which returns it."""

    def reduced(self: nn.Module, protocol: Any) -> Any:
        made = super(cls, self).__reduce_ex__(protocol)
        if isinstance(made, str) or made[0] is not copyreg.__newobj__ or made[1][0] is not cls:  # type: ignore[attr-defined]
            return made
        return (_new, (remake, key, *made[1][1:]), *made[2:])

    cls: Any = type(name, bases, {**names, "__reduce_ex__": reduced})
    return cls


def _new(remake: Any, key: tuple[Any, ...], *args: Any) -> Any:
    """A module of a derived class for copies and pickles to fill."""
    cls = remake(*key)
    return cls.__new__(cls, *args)
