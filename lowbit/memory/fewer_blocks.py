"""Estimates of deep models from four of their alike blocks.

The first and the last two blocks of a run run. The ops of one between them, and the storages that these allocate, then
stand for each block that did not run. That holds if the two in the middle agree: equal ops in equal order, storages of
equal sizes that die at the same op of the same or of a neighbouring block, and nothing that runs after the blocks reads
what they made. Otherwise ``Unlike`` is raised, and every block has to run.

In the following, A, B, C and D are the blocks (or periods of several blocks) that run. B is repeated after itself in
forward, and so before itself in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowbit.memory.alike import SHOWN, Run, runs_of
from lowbit.memory.ledger import Ledger, Op, Piece

__all__ = ["Fewer", "Hidden", "Unlike"]

#: Phases that visit the blocks in reverse.
_REVERSE = frozenset({"backward", "recomputation"})

#: Places of the blocks that run: A, B, C, D.
_A, _B, _C, _D = range(4)


class Unlike(Exception):
    """The blocks of a run turned out to differ."""


class _Cut(NamedTuple):
    """A run whose middle did not run.

    Attributes:
        shown: Paths of the blocks of A, B, C and D.
        hidden: Paths of the blocks of each period that did not run.
        pairs: Each trained parameter that took no part, with the one of B that stands for it.
    """

    shown: tuple[tuple[str, ...], ...]
    hidden: tuple[tuple[str, ...], ...]
    pairs: tuple[tuple[Tensor, Tensor], ...]


class Hidden:
    """The blocks of a model that need not run.

    Args:
        model: The model.
        runs: Its runs of alike blocks; by default they are searched for.
    """

    def __init__(self, model: nn.Module, runs: list[Run] | None = None) -> None:
        names = {module: name for name, module in model.named_modules()}
        self._model = model
        self._runs = runs_of(model) if runs is None else runs
        self.cuts = [_cut(run, names) for run in self._runs]
        parameters = (parameter for cut in self.cuts for pair in cut.pairs for parameter in pair)
        if any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in parameters):
            self._runs, self.cuts = [], []  # a hook would miss the parameters that get no gradient

    @property
    def paths(self) -> set[str]:
        """Paths of the hidden blocks."""
        return {path for cut in self.cuts for period in cut.hidden for path in period}

    def among(self, options: Mapping[str, Any]) -> Hidden:
        """Return those of the hidden blocks that need not run if blocks have options, given by path.

        A block stands for those of equal options next to it.
        """
        names = {module: name for name, module in self._model.named_modules()}

        def option(run: Run, period: tuple[str, ...]) -> list[Any]:
            return [options.get(names[run.holder._modules[name]]) for name in period]  # type: ignore[index]

        runs = list[Run]()
        for run in self._runs:
            stretches = (tuple(group) for _, group in groupby(run.periods, partial(option, run)))
            runs += [Run(run.holder, periods) for periods in stretches if len(periods) > SHOWN]
        return Hidden(self._model, runs)

    def times(self, model: nn.Module) -> dict[Tensor, int]:
        """Return, for parameters of a copy without the hidden blocks, of how many equal ones they are."""
        return {
            parameter: 1 + len(cut.hidden)
            for cut in self.cuts
            for path in cut.shown[_B]
            for parameter in model.get_submodule(path).parameters()
        }

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Context in which the model has only the blocks that run. Copies made inside have only these too."""
        holders = {id(run.holder): (run.holder, run.holder._modules) for run in self._runs}
        try:
            for holder, modules in holders.values():
                left = _without(modules, [run for run in self._runs if run.holder is holder])
                holder._modules = left
                # Paths stay those of the whole model, but a forward may index the list with 0, 1, 2 and so on.
                vars(holder)["_get_abs_string_index"] = list(left).__getitem__
            yield
        finally:
            for holder, modules in holders.values():
                holder._modules = modules
                vars(holder).pop("_get_abs_string_index", None)


class Fewer:
    """Leaves out blocks while a model runs, and adds them to the record afterwards.

    Args:
        hidden: The blocks.
        steps: Number of optimizer steps that will run.
        absent: Whether the model is a copy that does not have the blocks. No optimizer steps their parameters then.
    """

    def __init__(self, hidden: Hidden, steps: int, absent: bool = False) -> None:
        self._hidden, self._cuts, self._absent = hidden, hidden.cuts, absent
        if absent:
            self._cuts = [cut._replace(pairs=()) for cut in hidden.cuts]
        pairs = [pair for cut in self._cuts for pair in cut.pairs]
        self._inside = tuple(path for cut in self._cuts for period in cut.shown for path in period)
        #: By number of an op outside of the blocks, the ops that made its operands.
        self.reads = dict[int, list[int]]()
        self._gradients = [[torch.empty_like(parameter) for parameter, _ in pairs] for _ in range(steps)]

    @classmethod
    def of(cls, model: nn.Module, steps: int) -> Fewer | None:
        """Return the blocks of ``model`` to leave out in ``steps`` optimizer steps, or None if there are none."""
        hidden = Hidden(model)
        return cls(hidden, steps) if hidden.cuts else None

    def left_out(self) -> AbstractContextManager[None]:
        """Context in which the model has only the blocks that run."""
        return nullcontext() if self._absent else self._hidden.left_out()

    def add_gradients(self, ledger: Ledger) -> None:
        """Give gradients to parameters that took no part, after backward."""
        gradients = self._gradients.pop() if self._gradients else []
        pairs = [pair for cut in self._cuts for pair in cut.pairs]
        for (parameter, like), gradient in zip(pairs, gradients, strict=True):
            if like.grad is None:
                continue
            if (like.grad.dtype, like.grad.stride()) != (gradient.dtype, gradient.stride()):
                raise Unlike("gradients of another layout")
            parameter.grad = gradient
            ledger.claim(gradient, "gradients", ledger.owner(parameter))

    def read(self, ledger: Ledger, number: int, tensors: Sequence[Tensor]) -> None:
        """Record which ops made the operands of an op outside of the blocks."""
        if not ledger.ops[number].layer.startswith(self._inside):
            self.reads[number] = ledger.births(tensors)

    def renumber(self, moved: Callable[[int], int]) -> None:
        """Take the new numbers of ops."""
        _renumber(self.reads, moved)

    def extend(self, ledger: Ledger, seen: Any, since: int) -> int:
        """Add the ops and storages of the blocks that did not run.

        Args:
            ledger: The record.
            seen: What is known of the ops, an ``estimator.Seen``.
            since: Number of an op between two passes.

        Returns:
            The new number of op ``since``.

        Raises:
            Unlike: The blocks turned out to differ.
        """
        if self._absent:
            self._add_weights(ledger)
        for span in reversed(_passes(ledger.ops)):
            for cut in self._cuts:
                added = _Extension(ledger, seen, cut, span, self.reads).extend()
                span = range(span.start, span.stop + added)
                since += added if span.start < since else 0
        return since

    def _add_weights(self, ledger: Ledger) -> None:
        """Add parameters and buffers of blocks that the model does not have."""
        for piece in [piece for piece in ledger.pieces if piece.kind in ("parameters", "buffers") and piece.born < 0]:
            for cut in self._cuts:
                for index, path in enumerate(cut.shown[_B]):
                    if piece.layer == path or piece.layer.startswith(f"{path}."):
                        rest = piece.layer[len(path) :]
                        ledger.pieces += [piece.copy(-1, piece.died, period[index] + rest) for period in cut.hidden]


def _renumber(reads: dict[int, list[int]], moved: Callable[[int], int]) -> None:
    new = {moved(number): list(map(moved, births)) for number, births in reads.items()}
    reads.clear()
    reads.update(new)


def _cut(run: Run, names: Mapping[nn.Module, str]) -> _Cut:
    def paths(period: Sequence[str]) -> tuple[str, ...]:
        return tuple(names[run.holder._modules[name]] for name in period)  # type: ignore[index]

    def parameters(period: Sequence[str]) -> list[Tensor]:
        blocks = [run.holder._modules[name] for name in period]
        return [p for block in blocks if block is not None for p in block.parameters() if p.requires_grad]

    hidden = run.periods[2:-2]
    like = parameters(run.periods[1])
    pairs = tuple(pair for period in hidden for pair in zip(parameters(period), like, strict=True))
    return _Cut(tuple(map(paths, (*run.periods[:2], *run.periods[-2:]))), tuple(map(paths, hidden)), pairs)


def _without(modules: Mapping[str, nn.Module | None], runs: Sequence[Run]) -> dict[str, nn.Module | None]:
    """Return the entries of a list of modules without the hidden blocks of ``runs``."""
    hidden = {name for run in runs for period in run.periods[2:-2] for name in period}
    return {name: module for name, module in modules.items() if name not in hidden}


def _passes(ops: Sequence[Op]) -> list[range]:
    """Return the ops of each forward and backward pass."""
    passes, start = list[range](), 0
    for number, (before, op) in enumerate(zip(["", *(op.phase for op in ops)], [*ops, None], strict=True)):
        phase = "end" if op is None else op.phase
        if before != phase and (before in _REVERSE or before == "step") and phase not in _REVERSE:
            if before in _REVERSE:
                passes.append(range(start, number))
            start = number
    return passes


class _Extension:
    """Adds the hidden periods of one run to one pass.

    Attributes:
        forward: Numbers of the first ops of A, B, C and D in forward.
        backward: Numbers of their first ops in backward.
    """

    def __init__(self, ledger: Ledger, seen: Any, cut: _Cut, span: range, reads: dict[int, list[int]]) -> None:
        self.ledger, self.seen, self.cut, self.span, self.reads = ledger, seen, cut, span, reads
        self._places = {
            path: (place, number) for place, paths in enumerate(cut.shown) for number, path in enumerate(paths)
        }
        self._known = dict[str, tuple[int, int, str] | None]()
        ahead = [i for i in span if ledger.ops[i].phase == "forward"]
        back = [i for i in span if ledger.ops[i].phase in _REVERSE]
        self.forward = self._starts(ahead, (_A, _B, _C, _D))
        self.backward = self._starts(back, (_D, _C, _B, _A)) or [span.stop] * 4
        self.after = self._end(ahead)

    def _place(self, layer: str) -> tuple[int, int, str] | None:
        """Return the place of the period that contains a layer, the block in it, and the rest of the path."""
        if layer not in self._known:
            path, rest = layer, ""
            while path not in self._places and "." in path:
                path, _, part = path.rpartition(".")
                rest = f".{part}{rest}"
            self._known[layer] = (*self._places[path], rest) if path in self._places else None
        return self._known[layer]

    def _starts(self, numbers: Sequence[int], order: Sequence[int]) -> list[int]:
        """Return the first of the ops of A, B, C and D. Empty if none of them has an op."""
        starts = dict[int, int]()
        latest = -1
        for number in numbers:
            place = self._place(self.ledger.ops[number].layer)
            if place is None:
                continue
            starts.setdefault(place[0], number)
            rank = order.index(place[0])
            if rank < latest:
                raise Unlike("a block runs twice or out of order")
            latest = rank
        if starts and len(starts) < len(order):
            raise Unlike("a block does not run")
        return [starts[place] for place in range(4)] if starts else []

    def _end(self, ahead: Sequence[int]) -> int:
        """Return the first op after D in forward. Ops outside of modules follow each block, or none."""
        if not self.forward:
            return self.span.stop
        size, end = self.forward[_D] - self.forward[_C], max(i for i in ahead if self._place(self.ledger.ops[i].layer))
        last = [self._outline(number) for number in range(self.forward[_D], self.forward[_D] + size)]
        repeats = last == [self._outline(number) for number in range(self.forward[_C], self.forward[_D])]
        return self.forward[_D] + size if repeats else end + 1

    def extend(self) -> int:
        """Add the ops and storages, and return the number of added ops.

        Raises:
            Unlike: B and C differ, or a later op reads results of the blocks.
        """
        if not self.forward:
            if self.backward[0] != self.span.stop:
                raise Unlike("the blocks have only a backward")
            return 0
        self._check_ops()
        self._check_pieces()
        self._check_reads()
        count, ops = len(self.cut.hidden), self.ledger.ops
        sizes = self.forward[_C] - self.forward[_B], self.backward[_A] - self.backward[_B]
        #: By new number, the op that it repeats, and which of the periods after B it belongs to (0 for the op itself).
        order = [(number, 0) for number in range(self.forward[_C])]
        order += [(n, k) for k in range(1, count + 1) for n in range(self.forward[_B], self.forward[_C])]
        order += [(n, 0) for n in range(self.forward[_C], self.backward[_B])]
        order += [(n, k) for k in range(count, 0, -1) for n in range(self.backward[_B], self.backward[_A])]
        order += [(n, 0) for n in range(self.backward[_B], len(ops))]
        self._extend_pieces(*sizes)
        self.seen.reorder(order)
        _renumber(self.reads, self._moved)
        ops[:] = [ops[n]._replace(layer=self._renamed(ops[n].layer, k)) if k else ops[n] for n, k in order]
        return count * sum(sizes)

    def _moved(self, number: int) -> int:
        """Return the new number of an op that ran."""
        ahead, back = self.forward[_C] - self.forward[_B], self.backward[_A] - self.backward[_B]
        count = len(self.cut.hidden)
        return number + count * (ahead * (number >= self.forward[_C]) + back * (number >= self.backward[_B]))

    def _renamed(self, layer: str, copy: int) -> str:
        place = self._place(layer)
        return layer if place is None else self.cut.hidden[copy - 1][place[1]] + place[2]

    # -- checks ----------------------------------------------------------------------------------------------------
    def _check_ops(self) -> None:
        for starts, (one, other, end) in ((self.forward, (_B, _C, _D)), (self.backward, (_C, _B, _A))):
            first = [self._outline(n) for n in range(starts[one], starts[other])]
            second = [self._outline(n) for n in range(starts[other], starts[end])]
            if first != second:
                raise Unlike("two blocks run different ops")

    def _outline(self, number: int) -> tuple[Any, ...]:
        op, place = self.ledger.ops[number], self._place(self.ledger.ops[number].layer)
        return op.name, op.phase, (place[1:] if place else op.layer), self.seen.done[number][1]

    def _check_pieces(self) -> None:
        outlines: tuple[list[Any], list[Any]] = ([], [])
        for piece in self.ledger.pieces:
            birth = self._segment(piece.born)
            if birth is not None and birth[1] in (_B, _C):
                outlines[birth[1] == _C].append(self._lifetime(piece, birth))
        if sorted(outlines[0]) != sorted(outlines[1]):
            raise Unlike("storages of two blocks differ in size or lifetime")

    def _segment(self, number: int | None) -> tuple[str, int, int] | None:
        """Return the direction and the place of the period in which an op runs, and its number there."""
        if number is None or number not in self.span:
            return None
        if number >= self.backward[_D]:
            place = next(place for place in (_A, _B, _C, _D) if number >= self.backward[place])
            inside = place != _A or number < 2 * self.backward[_A] - self.backward[_B]
            return ("backward", place, number - self.backward[place]) if inside else None
        if self.forward[_A] <= number < self.after:
            place = next(place for place in (_D, _C, _B, _A) if number >= self.forward[place])
            return "forward", place, number - self.forward[place]
        return None

    def _lifetime(self, piece: Piece, birth: tuple[str, int, int]) -> tuple[str, ...]:
        death, place = self._segment(piece.died), self._place(piece.layer)
        if death is not None:
            # The neighbours of B and C on the other side are A and D, which may do a little more or less.
            offset = death[2] if death[1] == birth[1] else None
            end: tuple[Any, ...] = (death[0], death[1] - birth[1], offset)
        else:
            end = () if piece.kind == "gradients" else (piece.died,)  # an optimizer may free them one by one
        layer = place[1:] if place else piece.layer
        return tuple(map(str, (piece.bytes, piece.kind, layer, birth[0], birth[2], *end)))

    def _check_reads(self) -> None:
        """Check that ops after the last block read results of that block alone."""
        end = 2 * self.backward[_A] - self.backward[_B]
        for number, births in self.reads.items():
            ahead = number in self.span and self.ledger.ops[number].phase == "forward"
            if number < (self.after if ahead else end) or number not in self.span:
                continue
            sources = {segment[:2] for segment in map(self._segment, births) if segment is not None}
            if sources - ({("forward", _D)} if ahead else {("forward", _D), ("backward", _A)}):
                raise Unlike(f"{self.ledger.ops[number].name} after the blocks reads results of several of them")

    # -- storages --------------------------------------------------------------------------------------------------
    def _extend_pieces(self, ahead: int, back: int) -> None:
        """Move storages to their new times, and add those of the hidden periods."""
        count, moved = len(self.cut.hidden), self._moved
        added = list[Piece]()
        waiting = dict[tuple[str, int], list[Piece]]()
        for piece in self.ledger.pieces:
            if piece.kind == "gradients" and piece.born >= self.span.start:
                waiting.setdefault((piece.layer, piece.bytes), []).append(piece)

        placed = set[int]()  # ids of gradients that were added after backward
        for piece in list(self.ledger.pieces):
            birth, death = self._segment(piece.born), self._segment(piece.died)
            new_born, new_died = moved(piece.born), None if piece.died is None else moved(piece.died)
            if birth is not None and birth[:2] == ("forward", _B):
                # Copy k is k periods later in forward, and as much earlier in backward.
                for k in range(1, count + 1):
                    died = new_died
                    if death is not None and piece.died is not None:
                        shift = k * ahead if death[0] == "forward" else count * ahead + (count - k) * back
                        died = piece.died + shift
                    added.append(self._copy(piece, k, piece.born + k * ahead, died))
                if death is not None and piece.died is not None:
                    new_died = piece.died if death[0] == "forward" else piece.died + count * (ahead + back)
            elif birth is not None and birth[:2] == ("backward", _C):
                for k in range(1, count + 1):
                    shift = count * ahead + (count + 1 - k) * back
                    died = new_died if death is None or piece.died is None else piece.died + shift
                    later = waiting.get((self._renamed(piece.layer, k), piece.bytes))
                    if piece.kind == "gradients" and death is None and later:
                        gradient = later.pop(0)
                        gradient_died = None if gradient.died is None else moved(gradient.died)
                        added.append(self._copy(piece, k, piece.born + shift, gradient_died))
                        placed.add(id(gradient))
                    else:
                        added.append(self._copy(piece, k, piece.born + shift, died))
                if death is not None and piece.died is not None:
                    new_died = piece.died + count * ahead
            piece.born, piece.died = new_born, new_died
        pieces = [piece for piece in self.ledger.pieces if id(piece) not in placed]
        self.ledger.pieces[:] = sorted([*pieces, *added], key=lambda piece: piece.born)

    def _copy(self, piece: Piece, copy: int, born: int, died: int | None) -> Piece:
        return piece.copy(born, died, self._renamed(piece.layer, copy))
