"""The fastest combination of choices that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lowbit.convert.select import check_model
from lowbit.memory.checkpoint.policies import choose
from lowbit.memory.planned import bytes_of
from lowbit.plan.fitting.choices import allowed, combinations, words
from lowbit.plan.fitting.plan import Plan
from lowbit.plan.fitting.predict import Prediction, Predictor
from lowbit.plan.serving import GenerationPlan, serve
from lowbit.plan.settings import Settings
from lowbit.progress import Progress
from lowbit.sizes import amount

__all__ = ["fit"]


def fit(
    model: nn.Module,
    batch: Any = None,
    budget: str | int | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    *,
    task: str = "train",
    context: int | None = None,
    rows: int = 1,
    keep: Iterable[str] = (),
    no: Iterable[str] = (),
    progress: Progress = lambda what, done, total: None,
) -> Plan | GenerationPlan:
    """The fastest way to train ``model`` on ``batch`` of which a step holds at most ``budget``. Nothing is computed.

    ``budget``: of the whole step, parameters and states included: bytes, a size such as ``"6GiB"``, or a share of the
    peak of plain training, ``"50%"``. ``batch`` and ``loss``: as ``lb.memory.estimate`` takes them; the batch may be
    taken in parts, whose gradients add up to those of the whole. ``keep``: names that the plan has to have, of its
    precision (``fp32``, ``bf16``, ``fp8``), optimizer (``adamw``, ``adamw8bit``), checkpoint policy and so on, see
    ``lowbit.plan.fitting.CHOICES``; ``no``: names that it must not have, such as ``disk``. ``fp8`` is taken where it is
    kept alone, since its losses differ from bf16's.

    ``task="generate"`` plans generation within ``context`` tokens of ``rows`` sequences at a time instead: see
    ``lowbit.plan.serving.serve``. ``batch`` is optional there, ``context`` is not.

    ``plan.apply_(model)`` does it. Sizes are those of torch's allocator. Times follow from arithmetic and traffic at
    the rates of this machine, and serve for comparison.
    Raises ValueError where nothing fits, with the least that would, and for unknown names; and as ``estimate``.
    """
    if task == "generate":
        return serve(model, batch, budget, context, rows, keep, no, progress)
    if task != "train" or batch is None or budget is None or context is not None or rows != 1:
        raise ValueError(
            f"fit: task is 'train', with batch and budget and without context and rows, or 'generate', with budget and "
            f"context; got task={task!r}, context={context}, rows={rows}, {'no' if batch is None else 'a'} batch and "
            f"budget={budget!r}"
        )
    check_model(model)
    predictor = Predictor(model, batch, loss)
    choices = allowed(keep, no)
    plain = predictor.whole(Settings())
    limit = bytes_of(budget, plain.peak_bytes, "fit")
    possible = [settings for settings in combinations(choices) if _applies(model, settings)]
    found: list[Prediction] = []
    for index, settings in enumerate(possible):
        progress("estimating", index, len(possible))
        found += [predictor.predicted(replace(settings, micro=count)) for count in predictor.parts()]
    progress("estimating", len(possible), len(possible))
    found.sort(key=lambda p: (p.seconds, p.peak_bytes))
    for index, one in enumerate(found):
        if one.peak_bytes > limit:
            continue
        found[index] = whole = predictor.whole(one.settings)
        if whole.peak_bytes <= limit:
            return Plan(whole, limit, plain, found, loss)
    least = min(found, key=lambda p: p.peak_bytes)
    raise ValueError(
        f"fit: no choice fits a step into {amount(limit)}; the least is {amount(least.peak_bytes)}, with "
        f"{words(least.settings)}. Ask for as much, or give a batch of fewer or shorter rows"
    )


def _applies(model: nn.Module, settings: Settings) -> bool:
    """Whether the model has what the policy looks for."""
    if settings.checkpoint is None:
        return True
    try:
        return bool(choose(model, settings.checkpoint))
    except ValueError:
        return False
