"""The blocks that a model repeats, and how they chain: a model that is run one block at a time."""

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
    """The blocks that a model repeats, stack by stack: the only answer to this question.

    A stack is an outermost ``ModuleList`` or ``Sequential`` in which modules of one class, with modules inside, come
    more than once. An encoder has one and a decoder another. A ``ModuleList`` of such modules alone is a stack as a
    whole, whatever their classes: hybrids have layers of several. Of other lists, such as a ``Sequential`` that begins
    with an embedding, the repeated modules are the stack.

    Lists of single layers count if there is no stack, or if they hold more parameters: then the largest is the answer.

    Args:
        model: the model, or a part of one.

    Returns:
        The stacks in the model's order, each with its blocks in order. A block that a list holds several times comes
        as often. Empty if the model repeats nothing.
    """
    found: list[list[nn.Module]] = []
    layers: list[list[nn.Module]] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        blocks = _repeated(module)
        if blocks:
            found.append(blocks)
            inside |= {id(inner) for block in blocks for inner in block.modules()}
        elif len(module) > 1 and len({plain_class(layer) for layer in module}) == 1:
            layers.append(list(module))
    largest = max(layers, key=_size, default=[])
    single = not any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in largest) or not found
    return [largest] if largest and single and (not found or _size(largest) > sum(map(_size, found))) else found


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of all ``stacks`` of ``model``, in order."""
    return [block for stack in stacks(model) for block in stack]


def largest_stack(model: nn.Module) -> list[nn.Module]:
    """The one of ``stacks(model)`` that holds most parameters, for what goes through one chain of blocks."""
    return max(stacks(model), key=_size, default=[])


def _repeated(place: nn.ModuleList | nn.Sequential) -> list[nn.Module]:
    """The blocks of a list: modules with modules inside, of classes that come more than once, or all of a hybrid."""
    whole = [module for module in place if any(True for _ in module.children())]
    classes = Counter(map(plain_class, whole))
    repeated = [module for module in whole if classes[plain_class(module)] > 1]
    hybrid = isinstance(place, nn.ModuleList) and len(whole) == len(place)
    return whole if repeated and hybrid else repeated


def _size(blocks: Iterable[nn.Module]) -> int:
    return sum(p.numel() for p in nn.ModuleList(blocks).parameters())


# -- chains -----------------------------------------------------------------------------------------------------------
def same(given: Any, other: Any) -> bool:
    """Whether two trees have the same structure and the same values, in tensors and in what objects of other classes
    hold.
    """
    leaves, structure = tree_flatten(given)
    others, other_structure = tree_flatten(other)
    return structure == other_structure and all(map(_same_leaf, leaves, others))


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
        """The block's output; it is given copies, which it may write to."""
        args, kwargs = copied(self.args), copied(self.kwargs)
        if self.keyword is None:
            return block(hidden.clone(), *args, **kwargs)
        return block(**{self.keyword: hidden.clone()}, **kwargs)


#: Answers for the block of an index: its forward, and what that is called with.
_Answer = Callable[[int, Any, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(eq=False)
class _Link(Wrapper):
    called: _Answer
    index: int

    def __call__(self, module: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self.called(self.index, forward, args, kwargs)


class _NotAChain(Exception):
    """The blocks do not feed one another, or something happens between them."""


def _hidden(output: Any) -> Any:
    return output[0] if isinstance(output, tuple | list) and output else output


def _formed(behind: tuple[Any, ...] | None, hidden: Tensor) -> Any:
    """What a block returns: the hidden state, and ``behind`` it what the first block returned there."""
    return hidden if behind is None else (hidden, *behind)


class Chain:
    """Blocks of which each is called once, in order, with the output of the one before.

    ``hidden``: for each batch what the block that comes next is given. ``calls[batch][block]``: what else.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = list(blocks)
        self.hidden: list[Tensor] = []
        self.calls: list[list[_Call]] = []
        self._form: Callable[[Tensor], Any] = partial(_formed, None)

    def record(self, model: nn.Module, batches: Sequence[Any]) -> bool:
        """Learn what the blocks are called with; of them only the first computes. False where they are no chain, or
        where the model cannot do without what the others compute.
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
                # Where blocks change the shape, what is behind them does not fit what blocks that compute nothing hand
                # on. Any other error comes again when the model is run as a whole.
                if isinstance(error, _NotAChain) or recording.last is not None:
                    return False
                raise
            self.hidden.append(recording.hidden)
            self.calls.append(recording.calls)
            self._form = partial(_formed, recording.behind)
            first = recording.first if number == 0 else first
        return first is None or self._repeats(first)

    def _repeats(self, output: Tensor) -> bool:
        """Whether the first block answers the first batch with ``output`` once more, now that others have come. It does
        not where it reads what a batch, or a block, has left in an attribute of a module.
        """
        try:
            again = self.run(0, 0)
        except RuntimeError:  # what another batch has left is of another shape
            return False
        return again.shape == output.shape and bool((again - output).norm() <= 1e-3 * output.norm())

    def run(self, index: int, number: int) -> Tensor:
        """The output of block ``index`` for batch ``number``."""
        output: Tensor = _hidden(self.calls[number][index].run(self.blocks[index], self.hidden[number]))
        return output

    def advance(self, index: int) -> None:
        """Take the outputs of block ``index`` as the hidden states from now on."""
        for number in range(len(self.hidden)):
            self.hidden[number] = self.run(index, number)

    def whole(self, model: nn.Module, batch: Any, number: int) -> Tensor | None:
        """What the last block returns in one call of ``model`` with ``batch``, which has this number, in which all
        blocks compute; None where blocks are given what the chain does not give them: what earlier ones have computed,
        or leave behind in what they are given.
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
        """Inside, blocks compute nothing, and the last one answers the hidden state of batch ``number``."""

        def called(index: int, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given, _ = _Call.split(args, kwargs)
            return self._form(self.hidden[number].clone() if index == len(self.blocks) - 1 else given)

        with self._with(called):
            yield

    def _with(self, called: _Answer) -> AbstractContextManager[None]:
        """Within, ``called`` answers for the blocks."""
        return wrapped((block, _Link(called, index)) for index, block in enumerate(self.blocks))


class _Recording:
    """One call of a model, of whose blocks only the first computes; and the second where it is given more of what the
    first returned than the hidden state, which has to be the same for all blocks.

    Raises _NotAChain where a block is not given what the one before returned, or where that is written to on the way.
    """

    hidden: Tensor
    first: Tensor

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.last: Any = None
        self.behind: tuple[Any, ...] | None = None
        self.returned = Unchanged(())
        self.given: list[Unchanged] = []

    def called(self, index: int, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward of block ``index``."""
        hidden, call = _Call.split(args, kwargs)
        if not isinstance(hidden, Tensor) or index != len(self.calls) or (index and hidden is not self.last):
            raise _NotAChain
        if not self.returned:
            raise _NotAChain
        self.calls.append(call)
        self.given.append(Unchanged(call))
        if index == 0:
            return self._first(hidden, forward, args, kwargs)
        if index == 1 and self._state(call):
            copy = hidden.clone()  # of all that it is given it may write to this
            args = tuple(copy if value is hidden else value for value in args)
            kwargs = {name: copy if value is hidden else value for name, value in kwargs.items()}
            behind = forward(*args, **kwargs)[1:]
            if not all(any(state is other for other in tree_leaves(behind)) for state in self._state(call)):
                raise _NotAChain
        return _formed(self.behind, hidden)

    def _first(self, hidden: Tensor, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.hidden = hidden.clone()
        output = forward(*args, **kwargs)
        self.last = _hidden(output)
        if not isinstance(self.last, Tensor) or self.last.shape != hidden.shape:
            raise _NotAChain
        self.first = self.last.clone()
        self.behind = tuple(output[1:]) if isinstance(output, tuple | list) else None
        self.returned = Unchanged((self.last, self.behind))
        return output

    def _state(self, call: _Call) -> list[Tensor]:
        """The tensors among a block's arguments that the first block returned behind the hidden state."""
        returned = {id(leaf) for leaf in tree_leaves(self.behind) if isinstance(leaf, Tensor)}
        return [leaf for leaf in tree_leaves(tuple(call)) if id(leaf) in returned]

    def finish(self, blocks: int) -> None:
        """The model's call is over."""
        if len(self.calls) != blocks or not all(self.given):
            raise _NotAChain
