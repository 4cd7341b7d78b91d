"""Estimate of the memory of text generation on fake tensors: the prompt, then one more token.

Between the two, only the tokens, the cache and the model are held.
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

#: Runs the model on tokens ``[B, T]`` that follow those in the cache.
Forward = Callable[[nn.Module, Tensor, Any], object]

PREFILL, DECODING = "prefill", "decoding"


class Generation(Estimate):
    """Estimate returned by ``estimate_generation``. Phases are ``prefill`` and ``decoding``.

    Attributes:
        weights: Bytes of the model.
        packed: Whether the model has packed layers.
        cache: The full cache, of fake tensors.
        cache_bytes: Bytes of the cache.
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
    """Return the memory that ``model`` needs to generate the last of ``context`` tokens, in bytes of the allocator.

    Nothing is computed, and ``model``, which may be on the meta device, is not changed. All tokens are routed to the
    same experts, which needs the most memory.

    Args:
        model: The model.
        context: Number of tokens. The prompt is all but the last, which is decoded by itself.
        rows: Number of sequences.
        forward: Runs the model.
        cache: Returns an empty cache for the model.
        part: Prompt tokens per forward; None for all at once.
        prepare: Called on the copy of the model first.

    Raises:
        ValueError: The forward reads tensor values, or the model cannot be copied.
    """
    check_model(model)
    with torch.inference_mode(False), torch.no_grad(), fake_tensors() as fake, Routed():  # type: ignore[no-untyped-call]
        fake_copy = fake_model(model, fake, None).eval()
        if prepare is not None:
            prepare(fake_copy)
        device = next((t.device for t in (*fake_copy.parameters(), *fake_copy.buffers())), torch.device("cpu"))
        seen, phases = Seen(), dict[int, str]()
        with Ledger(fake_copy, device, seen=seen) as ledger:
            full_cache, since = cache(fake_copy), 0
            prompt = torch.zeros(rows, context - 1, dtype=torch.long, device=device)
            forwards = f"the forward of {type(model).__name__}"
            with values_needed("fit", forwards, "profile a real generation with memory.profile(model)"):
                for tokens, counts, phase in _calls(prompt, part):
                    since = since if counts else len(ledger.ops)
                    phases[len(ledger.ops)] = phase
                    forward(fake_copy, tokens, full_cache)
                    since = since if counts else len(ledger.ops)
    phase = PREFILL
    for number, op in enumerate(ledger.ops):
        phase = phases.get(number, phase)
        ledger.ops[number] = op._replace(phase=phase)
    return Generation(ledger, seen, since, can_run(model, ledger.device), full_cache)


def _calls(prompt: Tensor, part: int | None) -> Iterator[tuple[Tensor, bool, str]]:
    """Yield the tokens of each call, whether it may be the peak, and its phase.

    Of equal parts of the prompt the last needs the most memory, since the cache grows. So earlier parts run as one call
    that does not count.
    """
    length = prompt.shape[1]
    part = length if part is None else min(part, length)
    last = (length // part - 1) * part
    if last:
        yield prompt[:, :last], False, PREFILL
    for begin in range(last, length, part):
        yield prompt[:, begin : begin + part], True, PREFILL
    yield prompt.new_zeros(len(prompt), 1), True, DECODING


def found_in(root: Any, sort: type) -> list[Any]:
    """Return the objects of class ``sort`` in containers and attributes of ``root``, each once.

    Modules and objects of that class are not searched.
    """
    objects, seen, todo = [], set[int](), [root]
    while todo:
        entry = todo.pop()
        if id(entry) in seen or isinstance(entry, nn.Module | type):
            continue
        seen.add(id(entry))
        if isinstance(entry, sort):
            objects.append(entry)
        elif isinstance(entry, Mapping):
            todo += entry.values()
        elif isinstance(entry, list | tuple | set):
            todo += entry
        elif hasattr(entry, "__dict__"):
            todo += vars(entry).values()
    return objects
