"""Identity: checks that a plan is applied to the model, loss and batch size that it was made for."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakSet

from torch import nn

from lowbit.plan.fitting.rows import Rows, rows_of
from lowbit.plan.settings import TrainingSettings
from lowbit.plan.subject import Subject
from lowbit.user_warnings import warn

__all__ = ["PLANNED", "Identity", "check_mode", "identity_of"]


#: Models that train with a plan.
PLANNED: WeakSet[nn.Module] = WeakSet()


class Identity(NamedTuple):
    """The subject of a plan, as far as it is checked later.

    Attributes:
        model: Name of the model's class.
        parameters: Description of each parameter (shape, dtype, frozen), by name.
        loss: Name of the loss function; None for the model's own loss.
        rows: Rows of the batch, and the keyword of the argument with them.
    """

    model: str
    parameters: dict[str, str]
    loss: str | None
    rows: Rows | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        return {**self._asdict(), "rows": self.rows and list(self.rows)}

    def check(self, model: nn.Module, who: str) -> None:
        """Raise ValueError for another model, a model that already trains with a plan, or a model on meta."""
        if model in PLANNED:
            raise ValueError(
                f"{who}: this {type(model).__name__} already trains with a plan; use its run, run.refit(budget) for "
                f"another budget, or plan for a new model"
            )
        actual = identity_of(Subject(model, None))
        for name in (*self.parameters, *actual.parameters):
            planned, present = self.parameters.get(name), actual.parameters.get(name)
            if planned != present:
                raise ValueError(
                    f"{who}: the plan is for a {self.model} {_with(name, planned)}, but this {actual.model} is "
                    f"{_with(name, present)}; plan for this model, lb.fit(model, batch, budget), or pass the planned "
                    f"model unchanged"
                )
        if any(parameter.is_meta for parameter in model.parameters()):
            raise ValueError(
                f"{who}: this {actual.model} is on the meta device, without data; create or load it on the device "
                f"where it trains"
            )

    def check_loss(self, loss: Any, settings: TrainingSettings) -> None:
        """Raise ValueError if the loss is not of the planned kind."""
        if self.loss is not None and loss is None:
            raise ValueError(
                f"plan.apply_: the plan is for the loss function {self.loss}, which is not in the file; pass it: "
                f"plan.apply_(model, loss=...)"
            )
        if self.loss is None and loss is not None and settings.fused_loss:
            raise ValueError(
                "plan.apply_: expected no loss, because the plan has 'fused loss' for the default loss; to use your "
                "loss, plan with it: lb.fit(model, batch, budget, loss)"
            )


def _with(name: str, about: str | None) -> str:
    return f"without {name!r}" if about is None else f"with {name!r} of {about}"


def identity_of(subject: Subject) -> Identity:
    """Return the identity of a subject; without a batch it has no rows."""
    model, loss, batch = subject.model, subject.loss, subject.batch
    parameters = {
        name: f"{list(p.shape)} in {str(p.dtype).removeprefix('torch.')}{'' if p.requires_grad else ', frozen'}"
        for name, p in model.named_parameters()
    }
    loss_name = (
        None if loss is None else f"{getattr(loss, '__module__', '')}.{getattr(loss, '__qualname__', repr(loss))}"
    )
    rows = None if batch is None else rows_of(model, batch, rest=loss is not None)
    return Identity(type(model).__name__, parameters, loss_name, rows)


def check_mode(model: nn.Module, who: str) -> None:
    """Warn of a model in evaluation mode."""
    if not model.training:
        warn(
            f"{who}: {type(model).__name__} is in evaluation mode, as from_pretrained returns it, and would train "
            f"without dropout and with BatchNorm's running statistics; call model.train() first"
        )
