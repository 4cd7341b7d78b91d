"""The state of a model's training: step, seed, and the largest magnitudes that delayed scaling remembers.

A model has one State, which all its TrainLinear layers share. Forward and backward read it; only ``advance``, called
once an optimizer step, moves it on. So recomputation (checkpointing) sees the numbers that forward saw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lowbit.functional.quantize import quantize
from lowbit.recipes import Cast
from lowbit.rounding import Rounding
from lowbit.tensor.quantized import Quantized

__all__ = ["History", "State", "View"]

_SMALLEST_SCALE = 2.0**-126


@dataclass
class History:
    """Largest magnitudes of one operand: ``amax`` fp32 ``[steps]``, the newest first, and that of the step under way.

    0 stands for a step that is not there yet. Numbers that are not finite are not remembered.
    """

    amax: Tensor
    pending: Tensor

    def record(self, amax: Tensor) -> None:
        """A maximum, so that recording a tensor twice is recording it once."""
        self.pending = torch.maximum(self.pending, torch.where(amax.isfinite(), amax, 0.0))

    def advance(self) -> None:
        """A step in which the operand was not seen, or held zeros alone, leaves the history as it is."""
        moved = torch.cat([self.pending.reshape(1), self.amax[:-1]])
        self.amax = torch.where(self.pending > 0, moved, self.amax)
        self.pending = torch.zeros_like(self.pending)


class State:
    """What the training of one model remembers between steps.

    ``seed`` and ``step`` choose, with a stream for each operand and an element's place, the bits of stochastic
    rounding; the streams are ``<path of the layer>/<role>``, such as ``"blocks.0.up/grad_weight.a"``. Micro-batches of
    one step draw the same bits. ``histories`` are by stream. Each process of a distributed run has its own.

    Call ``attach(optimizer)`` once, or ``advance()`` after each step of the optimizer.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.step = seed, 0
        self.histories: dict[str, History] = {}

    def advance(self) -> None:
        """A step of the optimizer is done: the next one draws other random bits and has this one in its histories."""
        self.step += 1
        for history in self.histories.values():
            history.advance()

    def attach(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Advance after each ``optimizer.step()``; of several optimizers of a model, attach one.

        Returns a handle whose ``remove()`` ends that.
        """
        return optimizer.register_step_post_hook(lambda *_: self.advance())

    def state_dict(self) -> dict[str, Any]:
        """Numbers and plain tensors, which ``torch.save`` writes and ``torch.load(weights_only=True)`` reads."""
        histories = self.histories.items()
        return {
            "seed": self.seed,
            "step": self.step,
            "amax": {stream: one.amax.clone() for stream, one in histories},
            "pending": {stream: one.pending.clone() for stream, one in histories},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned. Raises ValueError for anything else, with this State as it was."""
        try:
            seed, step, amax, pending = (state[key] for key in ("seed", "step", "amax", "pending"))
            fits = isinstance(seed, int) and isinstance(step, int) and amax.keys() == pending.keys()
            fits = fits and all(t.dim() == 1 and t.dtype == torch.float32 for t in amax.values())
            fits = fits and all(t.dim() == 0 and t.dtype == torch.float32 for t in pending.values())
        except (AttributeError, KeyError, TypeError):
            fits = False
        if not fits or len(state) != 4:
            raise ValueError(
                "train.State: expected what state_dict() returns: the integers seed and step, and under amax and "
                "pending a float32 tensor for each stream"
            )
        self.seed, self.step = seed, step
        self.histories = {stream: History(amax[stream].clone(), pending[stream].clone()) for stream in amax}

    def history(self, stream: str, steps: int, device: torch.device) -> History:
        """The history of a stream, on ``device``. Raises ValueError where a loaded one has another length."""
        one = self.histories.get(stream)
        if one is None:
            one = History(torch.zeros(steps, device=device), torch.zeros((), device=device))
            self.histories[stream] = one
        if len(one.amax) != steps:
            raise ValueError(
                f"train.State: the history of {stream!r} has {len(one.amax)} steps, and the recipe asks for {steps}; "
                f"load the state of a training with the same recipe"
            )
        if one.amax.device != device:
            one.amax, one.pending = one.amax.to(device), one.pending.to(device)
        return one


@dataclass(frozen=True)
class View:
    """What one call of one layer sees of the State, in its forward and its backward.

    ``records``: whether magnitudes are remembered; not where no gradient is wanted, as in evaluation.
    """

    state: State
    path: str
    step: int
    records: bool

    def quantize(self, x: Tensor, cast: Cast, role: str) -> Quantized:
        """``x [rows, cols]`` as ``cast`` says; ``role``: which operand of which product it is."""
        stream = f"{self.path}/{role}"
        rounding = Rounding(self.state.seed, self.step, stream) if cast.rounding == "stochastic" else "nearest"
        scale = self._delayed_scale(x, cast, stream) if cast.scale == "delayed" else None
        return quantize(x, cast.scheme, scale, rounding=rounding)

    def _delayed_scale(self, x: Tensor, cast: Cast, stream: str) -> Tensor:
        """fp32 ``[1, 1]`` of the history, or of ``x`` while there is none; NaN where ``x`` is not finite.

        By docs/numerics.md section 5 but for where the amax comes from.
        """
        history = self.state.history(stream, cast.history, x.device)
        empty = torch.zeros((), device=x.device)
        now = torch.linalg.vector_norm(x.detach(), torch.inf).float() if x.numel() else empty
        if self.records:
            history.record(now)
        past = history.amax.max()
        amax = torch.where(past > 0, past, now)
        scale = amax / torch.full_like(amax, cast.scheme.amax_divisor)
        scale = scale.clamp(min=_SMALLEST_SCALE).where(amax > 0, 1.0)
        return scale.where(now.isfinite(), torch.nan).reshape(1, 1)
