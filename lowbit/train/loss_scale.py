"""Dynamic loss scaling, by which gradients in fp16 neither vanish nor overflow.

A loss is multiplied by a scale before its backward pass, and gradients are divided by it before the step. A step whose
gradients are not finite is skipped, and the scale backs off; after enough steps in succession it grows.
Source: Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.combinations import refusal
from lowbit.dist_utils import processes
from lowbit.optim.shards import local
from lowbit.user_warnings import warn

__all__ = ["LossScaler"]

#: The smallest normal number of fp16. By a smaller scale, gradients of 1 and less lose bits that they have without one.
LEAST = 2.0**-14

#: So many steps in succession whose losses are not finite are not the fault of a batch.
PATIENCE = 8

#: The numbers of a state: what each is, and the test that it is one.
_ENTRIES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "scale": ("a finite number above 0", lambda x: x > 0),
    "growth_factor": ("a finite number of at least 1", lambda x: x >= 1),
    "backoff_factor": ("a number above 0, at most 1", lambda x: 0 < x <= 1),
    "growth_interval": ("a whole number above 0", lambda x: x > 0 and x == int(x)),
    "_growth_tracker": ("a whole number of at least 0", lambda x: x >= 0 and x == int(x)),
    "skipped": ("a whole number of at least 0", lambda x: x >= 0 and x == int(x)),
    "lost_steps": ("a whole number of at least 0", lambda x: x >= 0 and x == int(x)),
}


class LossScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for any device, with the same methods and a state that either loads from the other.

    Beyond torch's: no device is named, and gradients may lie on several. The processes of ``group`` (None: all that
    run) skip a step together, so shards of FSDP2 stay those of one model; each of them must take each step. A skipped
    step calls no optimizer, a fused one neither, so hooks on its steps do not run: the state of ``train.state`` stays
    where it is. ``skipped`` counts those steps. ``gave_up`` says that no scale can help, which is a warning too.

    ``init_scale``: the first scale. ``growth_interval``: after so many steps in succession without a skip the scale is
    multiplied by ``growth_factor``. ``backoff_factor``: what it is multiplied by after a skip. Without ``enabled``
    every method does what it does without scaling, so that one loop serves bf16 too.

    Raises ValueError for factors that do not fit; and where gradients are to be unscaled, ValueError for gradients in
    fp16, and for an optimizer that steps in the backward pass, which leaves no gradients to look at.
    """

    def __init__(
        self,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        group: Any = None,
    ) -> None:
        for name, value, least, most in (
            ("init_scale", init_scale, 0, math.inf), ("growth_factor", growth_factor, 1, math.inf),
            ("backoff_factor", backoff_factor, 0, 1), ("growth_interval", growth_interval, 0, math.inf),
        ):  # fmt: skip
            if not least < value < most:
                raise ValueError(
                    f"LossScaler: {name} must be more than {least:g} and less than {most:g}, got {value!r}"
                )
        super().__init__("cpu", init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.group = group
        self.skipped = 0
        self._losses: list[Tensor] = []  # of each since the last update, 1 where it is not finite
        self._lost: list[Tensor] = []  # the same of all processes, once an optimizer
        self._lost_steps = 0
        self._skips, self._warned = False, False

    @property
    def gave_up(self) -> bool:
        """Whether no scale can help: it is below 2^-14, or no loss was finite in 8 skipped steps in succession.

        Weights that hold NaN, a forward that overflows fp16 and a learning rate that is too high lead here. A batch
        with an Inf does not.
        """
        return self._enabled and (self.get_scale() < LEAST or self._lost_steps >= PATIENCE)

    def scale(self, outputs: Any) -> Any:
        """As torch's: a tensor, or an iterable of them, times the scale."""
        scaled = super().scale(outputs)
        if self._enabled:
            losses = [scaled] if isinstance(scaled, Tensor) else scaled if isinstance(scaled, list | tuple) else ()
            self._losses += [1 - local(x).isfinite().all().float() for x in losses if isinstance(x, Tensor)]
        return scaled

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """``optimizer.step(*args, **kwargs)`` by unscaled gradients; None, and no step, where one is not finite."""
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        by_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
        if by_itself:  # a fused step looks at gradients itself, in this process alone, and runs its hooks all the same
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            if by_itself:
                optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """As torch's: the scale backs off, grows, or becomes ``new_scale``; warns, once, where none can help."""
        super().update(None if new_scale is None else float(new_scale))
        if not self._enabled:
            return
        lost = self._skips and any(self._lost)
        self._lost_steps = self._lost_steps + 1 if lost else 0
        if self._skips and not self._warned and self.gave_up:
            self._warned = True
            warn(self._complaint(lost))
        self._losses, self._lost, self._skips = [], [], False

    def state_dict(self) -> dict[str, Any]:
        """torch's entries, and ``skipped``; empty where scaling is not enabled."""
        state = super().state_dict()
        return {**state, "skipped": self.skipped, "lost_steps": self._lost_steps} if state else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a LossScaler, or of torch's GradScaler.

        Raises:
            ValueError: a number of the state cannot be one of a scaler's; nothing is loaded then.
        """
        for name, (expected, fits) in _ENTRIES.items() if self._enabled else ():
            value = state_dict.get(name, 1)
            if not (isinstance(value, int | float) and math.isfinite(value) and fits(value)):
                raise ValueError(
                    f"LossScaler.load_state_dict: {name}: expected {expected}, got {value!r}; the state is damaged: "
                    "load an earlier checkpoint, or begin with a new LossScaler"
                )
        super().load_state_dict(state_dict)
        self.skipped = state_dict.get("skipped", 0)
        self._lost_steps = state_dict.get("lost_steps", 0)

    # -- what torch's calls --------------------------------------------------------------------------------------
    def _maybe_opt_step(self, optimizer: torch.optim.Optimizer, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        if any(found.item() for found in optimizer_state["found_inf_per_device"].values()):
            self.skipped += 1
            self._skips = True
            return None
        return optimizer.step(*args, **kwargs)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Divide the gradients; 1 for the scale's device where one was not finite in some process."""
        _require_gradients(optimizer)
        found = super()._unscale_grads_(_local_parts(optimizer), inv_scale, found_inf, allow_fp16)
        device = inv_scale.device
        told = [torch.stack([x.to(device) for x in these]).amax() if these else torch.zeros((), device=device)
                for these in (list(found.values()), self._losses)]  # fmt: skip
        if processes() > 1:
            together = torch.stack(told)
            dist.all_reduce(together, dist.ReduceOp.MAX, self.group)
            told = list(together)
        elif not found:
            return {}  # of which torch's step says that there was no gradient
        self._lost.append(told[1])
        return {device: told[0]}

    def _complaint(self, lost: bool) -> str:
        skipped = f"LossScaler: {self.skipped} steps were skipped, and the scale is {self.get_scale():g}"
        if lost:
            why = "the loss itself is not finite, which no scale changes"
            remedy = "look for NaN in the weights or the data, or lower the learning rate"
        else:
            why = "the loss is finite and its gradients are not, which no scale has changed: they are NaN"
            remedy = "look for a division by 0 or a root of 0 in the backward pass (torch.autograd.detect_anomaly)"
        return f"{skipped}; {why}. Go back to a checkpoint and {remedy}, or train in bf16, which has fp32's range"


def _require_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError for an optimizer whose gradients cannot be unscaled."""
    if getattr(getattr(optimizer, "optimizer", optimizer), "in_backward", False):
        raise ValueError(refusal("in_backward scaler", "LossScaler"))
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None and param.grad.dtype == torch.float16:
                raise ValueError(
                    f"LossScaler: a gradient {list(param.shape)} is float16, in which it vanishes when it is unscaled; "
                    "keep parameters in fp32, or accumulate their gradients in fp32: "
                    "lowbit.train.mixed_(model, 'fp16', fp32_gradients=True)"
                )


def _local_parts(optimizer: torch.optim.Optimizer) -> Any:
    """What stands in for the optimizer: a plain tensor for each parameter, with this process' part of its gradient."""

    def part(grad: Tensor) -> Tensor:
        stand_in = local(grad)
        stand_in.grad = local(grad)
        return stand_in

    grads = [param.grad for group in optimizer.param_groups for param in group["params"]]
    return SimpleNamespace(param_groups=[{"params": [part(grad) for grad in grads if grad is not None]}])
