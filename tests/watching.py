"""Modes of torch that note what they see."""

from __future__ import annotations

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class _Noting:
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def _note(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class WatchDispatch(_Noting, TorchDispatchMode):
    """The ops that pass through torch's dispatcher."""

    __torch_dispatch__ = _Noting._note


class WatchFunctions(_Noting, TorchFunctionMode):
    """Calls of torch's functions, before they become ops."""

    __torch_function__ = _Noting._note
