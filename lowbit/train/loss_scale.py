"""Dynamic loss scaling, which keeps fp16 gradients from underflow and overflow.

The loss is multiplied by a scale before backward, and gradients are divided by it before the step. A step with
non-finite gradients is skipped and the scale is reduced. After enough successful steps in a row the scale grows.
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

#: The smallest normal number of fp16. With a smaller scale, gradients of 1 and less lose bits.
LEAST = 2.0**-14

#: After this many steps in a row without a finite loss, the batch is not the cause.
PATIENCE = 8

#: The entries of a state, each with the expected value in words and a check.
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
    """``torch.amp.GradScaler`` for any device, with the same methods; each loads the other's state.

    Differences from torch's scaler:

    - It needs no device name, and gradients may lie on several devices.
    - All processes of ``group`` skip a step together, so FSDP2 shards stay consistent. Every process must take every
      step.
    - A skipped step calls no optimizer, not even a fused one. Step hooks do not run, and ``train.state`` does not
      advance.
    - ``skipped`` counts the skipped steps. ``gave_up`` is True, with a warning, if no scale can help.

    Args:
        init_scale: the first scale, above 0.
        growth_factor: the scale is multiplied by it after ``growth_interval`` steps in a row without a skip; above 1.
        backoff_factor: the scale is multiplied by it after a skip; between 0 and 1.
        growth_interval: number of steps.
        enabled: False makes every method act as without scaling, so one loop also works for bf16.
        group: the process group; None: the default group.

    Raises:
        ValueError: an argument is out of range. ``step`` and ``unscale_`` raise it for fp16 gradients, and for an
            optimizer that steps in the backward pass, which leaves no gradients to unscale.
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
        self._losses: list[Tensor] = []  # per loss since the last update: 1 if it is not finite
        self._lost: list[Tensor] = []  # per optimizer: 1 if a loss of any process is not finite
        self._lost_steps = 0
        self._skips, self._warned = False, False

    @property
    def gave_up(self) -> bool:
        """Whether no scale can help: it is below 2^-14, or 8 skipped steps in a row had a non-finite loss.

        Causes are NaN in the weights, a forward that overflows fp16, or a too high learning rate. One batch with an Inf
        is not enough.
        """
        return self._enabled and (self.get_scale() < LEAST or self._lost_steps >= PATIENCE)

    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or an iterable of tensors, by the scale."""
        scaled = super().scale(outputs)
        if self._enabled:
            losses = [scaled] if isinstance(scaled, Tensor) else scaled if isinstance(scaled, list | tuple) else ()
            self._losses += [1 - local(x).isfinite().all().float() for x in losses if isinstance(x, Tensor)]
        return scaled

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Call ``optimizer.step(*args, **kwargs)`` with unscaled gradients; if one is not finite, skip the step and
        return None.
        """
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        if fused:  # a fused step would check the gradients of this process only, and run its hooks even if it skips
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            if fused:
                optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Reduce or grow the scale after a step, or set it to ``new_scale``; warn once if no scale can help."""
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
        """Return torch's entries and ``skipped``; empty if scaling is disabled."""
        state = super().state_dict()
        return {**state, "skipped": self.skipped, "lost_steps": self._lost_steps} if state else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a LossScaler or of torch's GradScaler.

        Raises:
            ValueError: an entry is out of range. Nothing is loaded.
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

    # -- called by torch.amp.GradScaler --------------------------------------------------------------------------
    def _maybe_opt_step(self, optimizer: torch.optim.Optimizer, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        if any(flag.item() for flag in optimizer_state["found_inf_per_device"].values()):
            self.skipped += 1
            self._skips = True
            return None
        return optimizer.step(*args, **kwargs)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Divide the gradients by the scale; return 1 for the scale's device if one is not finite in any process."""
        _require_gradients(optimizer)
        by_device = super()._unscale_grads_(_local_parts(optimizer), inv_scale, found_inf, allow_fp16)
        device = inv_scale.device
        flags = torch.stack([
            torch.stack([x.to(device) for x in values]).amax() if values else torch.zeros((), device=device)
            for values in (list(by_device.values()), self._losses)
        ])  # fmt: skip
        if processes() > 1:
            dist.all_reduce(flags, dist.ReduceOp.MAX, self.group)
        elif not by_device:
            return {}  # torch's step then raises that there is no gradient
        self._lost.append(flags[1])
        return {device: flags[0]}

    def _complaint(self, lost: bool) -> str:
        skipped = f"LossScaler: {self.skipped} steps were skipped, and the scale is {self.get_scale():g}"
        if lost:
            why = "the loss itself is not finite, which no scale can change"
            remedy = "look for NaN in the weights or the data, or lower the learning rate"
        else:
            why = "the loss is finite and its gradients are not, at any scale: they are NaN"
            remedy = "look for a division by 0 or a root of 0 in the backward pass (torch.autograd.detect_anomaly)"
        return f"{skipped}; {why}. Go back to a checkpoint and {remedy}, or train in bf16, which has fp32's range"


def _require_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for an optimizer whose gradients cannot be unscaled."""
    if getattr(getattr(optimizer, "optimizer", optimizer), "in_backward", False):
        raise ValueError(refusal("in_backward scaler", "LossScaler"))
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None and param.grad.dtype == torch.float16:
                raise ValueError(
                    f"LossScaler: a gradient {list(param.shape)} is float16, and would underflow when it is unscaled; "
                    "keep parameters in fp32, or accumulate their gradients in fp32: "
                    "lowbit.train.mixed_(model, 'fp16', fp32_gradients=True)"
                )


def _local_parts(optimizer: torch.optim.Optimizer) -> Any:
    """A stand-in for the optimizer: per parameter, a plain tensor with this process's part of its gradient."""

    def part(grad: Tensor) -> Tensor:
        stand_in = local(grad)
        stand_in.grad = local(grad)
        return stand_in

    grads = [param.grad for group in optimizer.param_groups for param in group["params"]]
    return SimpleNamespace(param_groups=[{"params": [part(grad) for grad in grads if grad is not None]}])
