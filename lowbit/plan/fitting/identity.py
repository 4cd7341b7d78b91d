"""By what the subject of a plan is known again: a model by its parameters, a loss by its name, and the rows of a
batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakSet

from torch import nn

from lowbit.plan.fitting.rows import Rows, rows_of
from lowbit.plan.settings import TrainingSettings
from lowbit.plan.subject import Subject
from lowbit.user_warnings import warn

__all__ = ["PLANNED", "Identity", "check_mode", "identity_of"]


#: Models that train by a plan.
PLANNED: WeakSet[nn.Module] = WeakSet()


class Identity(NamedTuple):
    """``model``: the name of its class. ``parameters``: by name what each is like, in words. ``loss``: the name of the
    one that was given; None for the model's own. ``rows``: of the batch, and the keyword of the argument that has them.
    """

    model: str
    parameters: dict[str, str]
    loss: str | None
    rows: Rows | None = None

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**self._asdict(), "rows": self.rows and list(self.rows)}

    def check(self, model: nn.Module, who: str) -> None:
        """Raises ValueError for another model, one that trains by a plan already, and one without numbers."""
        if model in PLANNED:
            raise ValueError(
                f"{who}: this {type(model).__name__} trains by a plan already; go on with its run, "
                f"run.refit(budget) for another budget, or plan for a fresh model"
            )
        own = identity_of(Subject(model, None))
        for name in (*self.parameters, *own.parameters):
            planned, has = self.parameters.get(name), own.parameters.get(name)
            if planned != has:
                raise ValueError(
                    f"{who}: the plan is of a {self.model} {_with(name, planned)}, and this {own.model} is "
                    f"{_with(name, has)}; plan for this model, lb.fit(model, batch, budget), or give the one that was "
                    f"planned, as it was"
                )
        if any(parameter.is_meta for parameter in model.parameters()):
            raise ValueError(
                f"{who}: this {own.model} is on the meta device, without numbers to train; make or load it on the "
                f"device where it trains"
            )

    def check_loss(self, loss: Any, settings: TrainingSettings) -> None:
        """Raises ValueError where the loss is not of the planned kind."""
        if self.loss is not None and loss is None:
            raise ValueError(
                f"plan.apply_: the plan is of a loss that was given, {self.loss}, which no file holds; give it again: "
                f"plan.apply_(model, loss=...)"
            )
        if loss is not None and settings.fused_loss:
            raise ValueError(
                "plan.apply_: the plan has 'fused loss', with which the model answers its own loss and no logits, and "
                "a loss was given; plan for that loss: lb.fit(model, batch, budget, loss)"
            )


def _with(name: str, like: str | None) -> str:
    return f"without {name!r}" if like is None else f"with {name!r} of {like}"


def identity_of(subject: Subject) -> Identity:
    """Without rows for a subject without a batch."""
    model, loss, batch = subject.model, subject.loss, subject.batch
    parameters = {
        name: f"{list(one.shape)} in {str(one.dtype).removeprefix('torch.')}{'' if one.requires_grad else ', frozen'}"
        for name, one in model.named_parameters()
    }
    named = None if loss is None else f"{getattr(loss, '__module__', '')}.{getattr(loss, '__qualname__', repr(loss))}"
    rows = None if batch is None else rows_of(model, batch, rest=loss is not None)
    return Identity(type(model).__name__, parameters, named, rows)


def check_mode(model: nn.Module, who: str) -> None:
    """Warns of a model in evaluation mode."""
    if not model.training:
        warn(
            f"{who}: {type(model).__name__} is in evaluation mode, as from_pretrained answers it, and would train "
            f"without dropout and with the kept statistics of BatchNorm; call model.train() first"
        )
