"""The memory of training that does not depend on a batch: parameters, gradients, states, masters and buffers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.memory.estimator import MakeOptimizer, check_trainable
from lowbit.memory.fake import fake_model, fake_tensors
from lowbit.memory.ledger import MASTER_STATES
from lowbit.models.ties import tensor_bytes
from lowbit.optim.outlook import states_to_come
from lowbit.sizes import amount, budget_in
from lowbit.tables import aligned

__all__ = ["StaticEstimate", "model_of_size", "static_estimate"]

#: Columns of the matrix that stands for a number of parameters.
_COLUMNS = 4096

#: Printed below the table.
_WITHOUT = (
    "not included: activations, temporaries of the step, and casts of weights in forward; lb.estimate(model, batch) "
    "includes them"
)


class StaticEstimate:
    """The memory of training without activations, as returned by ``lb.estimate`` without a batch.

    ``print`` shows a table.

    Attributes:
        by_kind: Bytes of each kind: parameters, buffers, gradients, optimizer state, master copies.
        parameters: Number of elements of all parameters.
    """

    def __init__(self, by_kind: dict[str, int], parameters: int) -> None:
        self.by_kind = {kind: size for kind, size in by_kind.items() if size}
        self.parameters = parameters

    @property
    def total_bytes(self) -> int:
        """The sum of ``by_kind``: a lower bound of the peak, if all gradients exist before the optimizer step."""
        return sum(self.by_kind.values())

    @property
    def peak_bytes(self) -> int:
        """The same sum, under the name that estimates of a step have."""
        return self.total_bytes

    def fits(self, budget: str | int) -> bool:
        """Return whether the sum is at most ``budget``. Activations need memory in addition.

        Args:
            budget: Bytes, or a size such as ``"24GiB"``.

        Raises:
            ValueError: ``budget`` is no size, or has no unit.
        """
        return self.total_bytes <= budget_in(budget, "estimate.fits", shares=False).of(0)

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        return {"total_bytes": self.total_bytes, "by_kind": self.by_kind, "parameters": self.parameters}

    def __str__(self) -> str:
        count = max(self.parameters, 1)
        rows = [(kind, amount(size), f"{size / count:.2f}") for kind, size in self.by_kind.items()]
        total = ("total", amount(self.total_bytes), f"{self.total_bytes / count:.2f}")
        return f"{aligned([('kind', 'size', 'bytes per parameter'), *rows, total], (1, 2))}\n\n{_WITHOUT}"


def static_estimate(
    model: nn.Module,
    optimizer: MakeOptimizer | None,
    prepare: Callable[[nn.Module], object],
    device: torch.device | str | None,
    counters: bool = True,
) -> StaticEstimate:
    """Return the estimate of a prepared copy of ``model``, which is not changed. No forward runs.

    Args:
        model: The model.
        optimizer: Creates an optimizer for parameters. None: there are no states.
        prepare: Called on a copy of the model without data.
        device: As for ``lb.estimate``.
        counters: Whether states of one number per parameter count, such as ``step``.

    Raises:
        ValueError: The model has no estimate, or the states of the optimizer depend on values.
        TypeError: ``model`` is not a module.
    """
    check_trainable(model, device)
    with torch.inference_mode(False), torch.enable_grad(), fake_tensors() as mode:
        copied = fake_model(model, mode, device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of missing processor instructions: nothing is computed here
            prepare(copied)
        trained = [parameter for parameter in copied.parameters() if parameter.requires_grad]
        stepper = None if optimizer is None else optimizer(trained)
    sizes = {
        "parameters": tensor_bytes(copied.parameters()),
        "buffers": tensor_bytes(copied.buffers()),
        "gradients": sum(map(_gradient_bytes, trained)),
        "optimizer state": 0,
        "master copies": 0,
    }
    for name, state in () if stepper is None else _states(stepper):
        if counters or state.dim():
            sizes["master copies" if name in MASTER_STATES else "optimizer state"] += state.nbytes
    return StaticEstimate(sizes, sum(parameter.numel() for parameter in copied.parameters()))


def _gradient_bytes(parameter: Tensor) -> int:
    dtype = parameter.grad_dtype or parameter.dtype
    return parameter.numel() * dtype.itemsize


def _states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield the states that the first step creates, on meta. Parameters of one shape and group have the same."""
    for group in optimizer.param_groups:
        known: dict[Any, dict[str, Tensor] | None] = {}
        for index, parameter in enumerate(group["params"]):
            key = parameter.shape, parameter.stride(), parameter.dtype, parameter.device
            if key not in known:
                known[key] = states_to_come(optimizer, group, index)
            states = known[key]
            if states is None:
                raise ValueError(
                    f"estimate: the step of {type(optimizer).__name__} needs values or a closure, so its states are "
                    f"unknown; profile a real step with memory.profile(model, batch, step)"
                )
            yield from states.items()


def model_of_size(parameters: float) -> nn.Module:
    """Return a model with this number of parameters on meta: a matrix of 4096 columns, and one row of the rest.

    Raises:
        ValueError: The number is not a positive integer.
    """
    number = isinstance(parameters, int | float) and not isinstance(parameters, bool)
    if not number or not 1 <= parameters < math.inf or parameters != int(parameters):
        raise ValueError(f"estimate: parameters must be a positive number of elements such as 7e9, got {parameters!r}")
    rows, rest = divmod(int(parameters), _COLUMNS)
    model = nn.Module()
    if rows:
        model.matrix = nn.Linear(_COLUMNS, rows, bias=False, device="meta")
    if rest:
        model.rest = nn.Linear(rest, 1, bias=False, device="meta")
    return model
