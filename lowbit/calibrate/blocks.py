"""A model run one block at a time, so that no more than one block's inputs are held."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

__all__ = ["Chain", "Feed", "feed"]

#: Calls a model with a batch.
Feed = Callable[[nn.Module, Any], Any]


def batches_in(given: Iterable[Any] | None) -> list[Any]:
    """The batches that a caller gave; none for None.

    Raises TypeError for a tensor or a mapping, which is one batch, and for numbers that are in no tensor.
    """
    if isinstance(given, Tensor | Mapping):
        raise TypeError(f"batches: expected several of them, got one {type(given).__name__}; write [batch]")
    data = [] if given is None else list(given)
    for batch in data:
        for value in batch.values() if isinstance(batch, Mapping) else [batch]:
            if isinstance(value, list | tuple) and value and all(map(_is_numbers, value)):
                raise TypeError(
                    "batches: numbers in lists are no batch; make a tensor of them, for instance "
                    "torch.tensor([tokens]) of shape [1, T]; tokenizers do with return_tensors='pt'"
                )
    return data


def _is_numbers(value: Any) -> bool:
    """Whether ``value`` is a number, or lists of them."""
    if isinstance(value, list | tuple):
        return all(map(_is_numbers, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def feed(model: nn.Module, batch: Any) -> Any:
    """Call ``model``: with a tensor as it is, with a tuple or list by position, with a mapping by keyword.

    Raises TypeError for a batch of another type.
    """
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    raise TypeError(
        f"a batch is a tensor, a tuple of arguments or a dict of keyword arguments; got {type(batch).__name__}"
    )


class _Call(NamedTuple):
    """What a block is called with besides the hidden state, and the name of that if it is given by keyword."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keyword: str | None

    @classmethod
    def split(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, _Call]:
        if args:
            return args[0], cls(args[1:], kwargs, None)
        name = next((name for name, value in kwargs.items() if isinstance(value, Tensor)), None)
        if name is None:
            return None, cls((), kwargs, None)
        return kwargs[name], cls((), {k: v for k, v in kwargs.items() if k != name}, name)

    def run(self, block: nn.Module, hidden: Tensor) -> Any:
        if self.keyword is None:
            return block(hidden, *self.args, **self.kwargs)
        return block(**{self.keyword: hidden}, **self.kwargs)


class _NotAChain(Exception):
    """The blocks do not feed one another."""


def _hidden(output: Any) -> Any:
    return output[0] if isinstance(output, tuple | list) and output else output


class Chain:
    """Blocks of which each is called once, in order, with the output of the one before.

    ``hidden``: for each batch what the block that comes next is given. ``calls[batch][block]``: what else.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = list(blocks)
        self.hidden: list[Tensor] = []
        self.calls: list[list[_Call]] = []
        self._form: Callable[[Tensor], Any] = lambda hidden: hidden

    def record(self, model: nn.Module, batches: Sequence[Any]) -> bool:
        """Learn what the blocks are called with; of them only the first computes. False where they are no chain."""
        self.hidden, self.calls = [], []
        for batch in batches:
            calls: list[_Call] = []
            try:
                with self._patched(self._recorder(calls)):
                    feed(model, batch)
            except _NotAChain:
                return False
            if len(calls) != len(self.blocks):
                return False
            self.calls.append(calls)
        return True

    def _recorder(self, calls: list[_Call]) -> Callable[[int, Any, tuple[Any, ...], dict[str, Any]], Any]:
        last: Any = None

        def called(index: int, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal last
            hidden, call = _Call.split(args, kwargs)
            if not isinstance(hidden, Tensor) or index != len(calls) or (index and hidden is not last):
                raise _NotAChain
            calls.append(call)
            if index:
                return self._form(hidden)
            self.hidden.append(hidden)
            output = forward(*args, **kwargs)
            last = _hidden(output)
            if not isinstance(last, Tensor) or last.shape != hidden.shape:
                raise _NotAChain
            behind = tuple(output[1:]) if isinstance(output, tuple | list) else None
            self._form = lambda hidden: hidden if behind is None else (hidden, *behind)
            return output

        return called

    def run(self, index: int, number: int) -> Tensor:
        """The output of block ``index`` for batch ``number``."""
        output: Tensor = _hidden(self.calls[number][index].run(self.blocks[index], self.hidden[number]))
        return output

    def advance(self, index: int) -> None:
        """Take the outputs of block ``index`` as the hidden states from now on."""
        for number in range(len(self.hidden)):
            self.hidden[number] = self.run(index, number)

    @contextmanager
    def replayed(self, number: int) -> Iterator[None]:
        """Inside, blocks compute nothing, and the last one answers the hidden state of batch ``number``."""

        def called(index: int, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given, _ = _Call.split(args, kwargs)
            return self._form(self.hidden[number] if index == len(self.blocks) - 1 else given)

        with self._patched(called):
            yield

    @contextmanager
    def _patched(self, called: Callable[[int, Any, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
        def patch(index: int, forward: Any) -> Any:
            return lambda *args, **kwargs: called(index, forward, args, kwargs)

        own = [vars(block).get("forward") for block in self.blocks]
        try:
            for index, block in enumerate(self.blocks):
                block.forward = patch(index, block.forward)  # type: ignore[method-assign]
            yield
        finally:
            for block, forward in zip(self.blocks, own, strict=True):
                del block.forward
                if forward is not None:
                    block.forward = forward  # type: ignore[method-assign]
