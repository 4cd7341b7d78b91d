"""An estimate of the memory of generation, before anything is allocated: the prompt, then one token more.

Both run on fake tensors, as in ``estimate``. Nothing but the tokens, the cache and the model is held between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.memory.estimator import Estimate, Seen, can_run
from lowbit.memory.fake import Routed, fake_model, fake_tensors, values_needed
from lowbit.memory.ledger import Ledger
from lowbit.models.check import check_model
from lowbit.models.ties import model_bytes
from lowbit.nn.base import kind

__all__ = ["Generation", "estimate_generation", "found_in"]

#: What the model answers to tokens [B, T], which go on from what the cache holds.
Forward = Callable[[nn.Module, Tensor, Any], object]

PREFILL, DECODING = "prefill", "decoding"


class Generation(Estimate):
    """See ``estimate_generation``. ``weights``: bytes of the model, and ``packed``: whether layers of it are packed.
    ``cache``: a full one, of fake tensors, which holds ``cache_bytes``. Phases are ``prefill`` and ``decoding``.
    """

    def __init__(self, ledger: Ledger, seen: Seen, since: int, run: bool, cache: Any) -> None:
        super().__init__(ledger, seen, since, run)
        self.weights, self.cache = model_bytes(ledger.model), cache
        self.packed = any(kind(module) == "packed" for module in ledger.model.modules())
        self.cache_bytes = sum({id(t.untyped_storage()): t.nbytes for t in found_in(cache, Tensor)}.values())


def estimate_generation(
    model: nn.Module,
    context: int,
    rows: int,
    forward: Forward,
    cache: Callable[[nn.Module], Any],
    *,
    part: int | None = None,
    prepare: Callable[[nn.Module], object] | None = None,
) -> Generation:
    """What ``model`` holds while it generates the last of ``context`` tokens, of ``rows`` sequences at a time, in bytes
    of the allocator.

    Nothing is computed, and ``model`` stays as it is; it may be on the meta device. The prompt is all tokens but the
    last, ``part`` of them at a time (None: all at once); the last is decoded by itself. ``cache(model)``: an empty
    cache. ``prepare(model)``: called on the copy first. All tokens are sent to the same experts, which holds most.

    Raises ValueError for a model whose forward reads values of tensors, and one that cannot be copied.
    """
    check_model(model)
    with torch.inference_mode(False), torch.no_grad(), fake_tensors() as fake, Routed():  # type: ignore[no-untyped-call]
        copied = fake_model(model, fake, None).eval()
        if prepare is not None:
            prepare(copied)
        place = next((t.device for t in (*copied.parameters(), *copied.buffers())), torch.device("cpu"))
        seen, phases = Seen(), dict[int, str]()
        with Ledger(copied, place, seen=seen) as ledger:
            held, since = cache(copied), 0
            prompt = torch.zeros(rows, context - 1, dtype=torch.long, device=place)
            forwards = f"the forward of {type(model).__name__}"
            with values_needed("fit", forwards, "profile a real generation with memory.profile(model)"):
                for tokens, counts, phase in _calls(prompt, part):
                    since = since if counts else len(ledger.ops)
                    phases[len(ledger.ops)] = phase
                    forward(copied, tokens, held)
                    since = since if counts else len(ledger.ops)
    phase = PREFILL
    for number, op in enumerate(ledger.ops):
        phase = phases.get(number, phase)
        ledger.ops[number] = op._replace(phase=phase)
    return Generation(ledger, seen, since, can_run(model, ledger.device), held)


def _calls(prompt: Tensor, part: int | None) -> Iterator[tuple[Tensor, bool, str]]:
    """The tokens of each call, whether it may be the one that holds most, and its phase. Of equal parts the last holds
    most, since the cache grows: those before are taken as one that does not count.
    """
    length = prompt.shape[1]
    part = length if part is None else min(part, length)
    last = (length // part - 1) * part
    if last:
        yield prompt[:, :last], False, PREFILL
    for begin in range(last, length, part):
        yield prompt[:, begin : begin + part], True, PREFILL
    yield prompt.new_zeros(len(prompt), 1), True, DECODING


def found_in(thing: Any, sort: type) -> list[Any]:
    """The objects of class ``sort`` within containers and attributes of ``thing``, each once; not those inside
    another such object, and none of modules.
    """
    found, seen, todo = [], set[int](), [thing]
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, nn.Module | type):
            continue
        seen.add(id(one))
        if isinstance(one, sort):
            found.append(one)
        elif isinstance(one, Mapping):
            todo += one.values()
        elif isinstance(one, list | tuple | set):
            todo += one
        elif hasattr(one, "__dict__"):
            todo += vars(one).values()
    return found
