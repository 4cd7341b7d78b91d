"""The blocks that a model repeats, and Chain, which runs a model one block at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from lowbit.models.batches import copied, feed
from lowbit.models.wrap import Wrapper, plain_class, wrapped
from lowbit.models.writes import Unchanged

__all__ = ["Chain", "find_blocks", "largest_stack", "same", "stacks"]


def stacks(model: nn.Module) -> list[list[nn.Module]]:
    """Find the blocks that a model repeats, stack by stack. All of lowbit uses this function.

    A stack is an outermost ``ModuleList`` or ``Sequential`` that contains several modules of one class, with children.
    An encoder has one stack, a decoder another. If a ``ModuleList`` contains only modules with children, all of them
    are the stack, whatever their classes, because hybrid models mix several. In other lists, such as a ``Sequential``
    that starts with an embedding, only the repeated modules are the stack.

    Lists of single layers count if there is no such stack, or if they have more parameters: then the largest is
    returned.

    Args:
        model: the model, or a part of one.

    Returns:
        The stacks in the model's order, each with its blocks in order. A block that a list contains several times is
        repeated. Empty if the model repeats nothing.
    """
    stacks: list[list[nn.Module]] = []
    layers: list[list[nn.Module]] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        blocks = _repeated(module)
        if blocks:
            stacks.append(blocks)
            inside |= {id(inner) for block in blocks for inner in block.modules()}
        elif len(module) > 1 and len({plain_class(layer) for layer in module}) == 1:
            layers.append(list(module))
    largest = max(layers, key=_size, default=[])
    single = not any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in largest) or not stacks
    return [largest] if largest and single and (not stacks or _size(largest) > sum(map(_size, stacks))) else stacks


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of all ``stacks`` of ``model``, in order."""
    return [block for stack in stacks(model) for block in stack]


def largest_stack(model: nn.Module) -> list[nn.Module]:
    """The stack with the most parameters, for functions that run one chain of blocks."""
    return max(stacks(model), key=_size, default=[])


def _repeated(layers: nn.ModuleList | nn.Sequential) -> list[nn.Module]:
    """The blocks of a list: modules with children whose class is repeated, or all modules of a hybrid."""
    parents = [module for module in layers if any(True for _ in module.children())]
    classes = Counter(map(plain_class, parents))
    repeated = [module for module in parents if classes[plain_class(module)] > 1]
    hybrid = isinstance(layers, nn.ModuleList) and len(parents) == len(layers)
    return parents if repeated and hybrid else repeated


def _size(blocks: Iterable[nn.Module]) -> int:
    return sum(p.numel() for p in nn.ModuleList(blocks).parameters())


# -- chains -----------------------------------------------------------------------------------------------------------
def same(tree: Any, other: Any) -> bool:
    """Whether two trees have the same structure and the same values, including the attributes of other objects."""
    leaves, structure = tree_flatten(tree)
    other_leaves, other_structure = tree_flatten(other)
    return structure == other_structure and all(map(_same_leaf, leaves, other_leaves))


def _same_leaf(leaf: Any, other: Any) -> bool:
    if leaf is other or isinstance(leaf, Callable):  # type: ignore[arg-type]
        return True
    if type(leaf) is not type(other):
        return False
    if isinstance(leaf, Tensor):
        return leaf.shape == other.shape and leaf.dtype == other.dtype and leaf.equal(other)
    if hasattr(leaf, "__dict__"):
        return same(vars(leaf), vars(other))
    return bool(leaf == other)


class _Call(NamedTuple):
    """A block's arguments besides the hidden state; ``keyword``: the hidden state's name if passed by keyword."""

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
        """The block's output; it gets copies, which it may write to."""
        args, kwargs = copied(self.args), copied(self.kwargs)
        if self.keyword is None:
            return block(hidden.clone(), *args, **kwargs)
        return block(**{self.keyword: hidden.clone()}, **kwargs)


#: Replaces a block's forward; called with the block's index, its forward, and the arguments.
_Handler = Callable[[int, Any, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(eq=False)
class _Link(Wrapper):
    called: _Handler
    index: int

    def __call__(self, module: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self.called(self.index, forward, args, kwargs)


class _NotAChain(Exception):
    """The blocks are not called one after the other on each other's output."""


def _hidden(output: Any) -> Any:
    return output[0] if isinstance(output, tuple | list) and output else output


def _formed(extra: tuple[Any, ...] | None, hidden: Tensor) -> Any:
    """A block's return value: the hidden state, and the extra results of the first block if it has some."""
    return hidden if extra is None else (hidden, *extra)


class Chain:
    """Blocks that are each called once, in order, with the previous block's output.

    Attributes:
        blocks: the blocks.
        hidden: per batch, the input of the next block.
        calls: ``calls[batch][block]``: the block's other arguments.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = list(blocks)
        self.hidden: list[Tensor] = []
        self.calls: list[list[_Call]] = []
        self._form: Callable[[Tensor], Any] = partial(_formed, None)

    def record(self, model: nn.Module, batches: Sequence[Any]) -> bool:
        """Record the blocks' arguments; only the first block computes.

        Returns False if the blocks are not a chain, or if the model needs results of the other blocks.
        """
        self.hidden, self.calls = [], []
        first: Tensor | None = None
        for number, batch in enumerate(batches):
            recording = _Recording()
            try:
                with self._with(recording.called):
                    feed(model, batch)
                recording.finish(len(self.blocks))
            except Exception as error:
                # If blocks change the shape, later layers fail on the output of blocks that compute nothing. Any other
                # error occurs again when the whole model runs.
                if isinstance(error, _NotAChain) or recording.last is not None:
                    return False
                raise
            self.hidden.append(recording.hidden)
            self.calls.append(recording.calls)
            self._form = partial(_formed, recording.extra)
            first = recording.first if number == 0 else first
        return first is None or self._repeats(first)

    def _repeats(self, output: Tensor) -> bool:
        """Whether the first block returns ``output`` for the first batch again, after the other batches.

        It does not if it reads state that a batch or a block has left in an attribute of a module.
        """
        try:
            again = self.run(0, 0)
        except RuntimeError:  # the state of another batch has another shape
            return False
        return again.shape == output.shape and bool((again - output).norm() <= 1e-3 * output.norm())

    def run(self, index: int, number: int) -> Tensor:
        """The output of block ``index`` for batch ``number``."""
        output: Tensor = _hidden(self.calls[number][index].run(self.blocks[index], self.hidden[number]))
        return output

    def advance(self, index: int) -> None:
        """Replace the hidden states by the outputs of block ``index``."""
        for number in range(len(self.hidden)):
            self.hidden[number] = self.run(index, number)

    def whole(self, model: nn.Module, batch: Any, number: int) -> Tensor | None:
        """The last block's result in one call of ``model`` with batch ``number``, in which all blocks compute.

        None if the blocks get arguments that the chain does not pass, such as results of earlier blocks.
        """
        last = self.hidden[number]

        def called(index: int, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal last
            hidden, call = _Call.split(args, kwargs)
            if not same((hidden, tuple(call)), (last, tuple(self.calls[number][index]))):
                raise _NotAChain
            output = forward(*args, **kwargs)
            last = _hidden(output).clone()
            return output

        try:
            with self._with(called):
                feed(model, batch)
        except _NotAChain:
            return None
        return last

    @contextmanager
    def replayed(self, number: int) -> Iterator[None]:
        """While active, blocks do not compute, and the last one returns the hidden state of batch ``number``."""

        def called(index: int, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden, _ = _Call.split(args, kwargs)
            return self._form(self.hidden[number].clone() if index == len(self.blocks) - 1 else hidden)

        with self._with(called):
            yield

    def _with(self, called: _Handler) -> AbstractContextManager[None]:
        """While active, ``called`` replaces the forward of each block."""
        return wrapped((block, _Link(called, index)) for index, block in enumerate(self.blocks))


class _Recording:
    """One call of a model in which only the first block computes.

    The second block computes too if it gets more results of the first than the hidden state; these must be the same for
    all blocks. Raises _NotAChain if a block does not get the previous block's output, or if that is modified on the
    way.
    """

    hidden: Tensor
    first: Tensor

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.last: Any = None
        self.extra: tuple[Any, ...] | None = None
        self.returned = Unchanged(())
        self.arguments: list[Unchanged] = []

    def called(self, index: int, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replaces the forward of block ``index``."""
        hidden, call = _Call.split(args, kwargs)
        if not isinstance(hidden, Tensor) or index != len(self.calls) or (index and hidden is not self.last):
            raise _NotAChain
        if not self.returned:
            raise _NotAChain
        self.calls.append(call)
        self.arguments.append(Unchanged(call))
        if index == 0:
            return self._first(hidden, forward, args, kwargs)
        if index == 1 and self._state(call):
            copy = hidden.clone()  # the only argument that the block may write to
            args = tuple(copy if value is hidden else value for value in args)
            kwargs = {name: copy if value is hidden else value for name, value in kwargs.items()}
            extra = forward(*args, **kwargs)[1:]
            if not all(any(state is other for other in tree_leaves(extra)) for state in self._state(call)):
                raise _NotAChain
        return _formed(self.extra, hidden)

    def _first(self, hidden: Tensor, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.hidden = hidden.clone()
        output = forward(*args, **kwargs)
        self.last = _hidden(output)
        if not isinstance(self.last, Tensor) or self.last.shape != hidden.shape:
            raise _NotAChain
        self.first = self.last.clone()
        self.extra = tuple(output[1:]) if isinstance(output, tuple | list) else None
        self.returned = Unchanged((self.last, self.extra))
        return output

    def _state(self, call: _Call) -> list[Tensor]:
        """The tensors among a block's arguments that are extra results of the first block."""
        returned = {id(leaf) for leaf in tree_leaves(self.extra) if isinstance(leaf, Tensor)}
        return [leaf for leaf in tree_leaves(tuple(call)) if id(leaf) in returned]

    def finish(self, blocks: int) -> None:
        """Check after the model's call that every block was called, with arguments that are unmodified."""
        if len(self.calls) != blocks or not all(self.arguments):
            raise _NotAChain
