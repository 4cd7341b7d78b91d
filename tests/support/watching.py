"""A mode of torch that notes what it sees."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class WatchDispatch(TorchDispatchMode):
    """The ops that pass through torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))
