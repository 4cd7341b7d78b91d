"""SignRound: learns the rounding of each weight and the scale of each block by signed gradient descent.

The layers of a model's block are learned together, to minimize the error of the block's outputs against the
unquantized model. Source: Cheng et al., arXiv 2309.05516.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lowbit.calibrate.recording import Observed
from lowbit.datafree import scales
from lowbit.functional import fake_quantize, quantize
from lowbit.reference import scale_value, spread
from lowbit.scaling import Scheme
from lowbit.tensor.quantized import Quantized, Scales

__all__ = ["ITERATIONS", "tune"]

#: Steps, batches per step, the maximum shift of a weight (in steps between codes), and the range of a scale's factor.
ITERATIONS, _BATCHES, _REACH, _SCALES = 200, 2, 0.5, (0.5, 1.2)

#: Learning rate of scales relative to weights. With equal rates scales oscillate, and the loss stays high.
_SCALE_SPEED = 0.1


def tune(
    layers: Sequence[Observed], run: Callable[[int], Tensor], targets: Sequence[Tensor], iterations: int = ITERATIONS
) -> None:
    """Set ``layer.tuned`` of each layer. ``run(number)`` returns the block's output for a batch, ``targets`` are the
    desired outputs.
    """
    roundings = {layer.weight_name: _Rounding(layer) for layer in layers}
    for layer in layers:
        layer.rounding = roundings[layer.weight_name]
    try:
        _descend(list(roundings.values()), run, targets, iterations)
    finally:
        for layer in layers:
            layer.rounding = None
    for layer in layers:
        layer.tuned = roundings[layer.weight_name].quantized()


def _descend(
    roundings: list[_Rounding], run: Callable[[int], Tensor], targets: Sequence[Tensor], iterations: int
) -> None:
    """Run the descent, and keep the step with the smallest loss. The first step is the unchanged start."""
    generator = torch.Generator().manual_seed(0)
    order = torch.cat([torch.randperm(len(targets), generator=generator) for _ in range(1 + iterations * _BATCHES)])
    learned = [row for rounding in roundings for row in rounding.learned]
    least = None
    for step in range(iterations):
        batches = order[step * _BATCHES : (step + 1) * _BATCHES].tolist()
        total = 0.0
        tensors = [tensor for tensor, _ in learned]
        slopes = [torch.zeros_like(tensor) for tensor in tensors]
        for number in batches:
            loss = (run(number).float() - targets[number].float()).square().mean()
            total += float(loss.detach()) / float(targets[number].float().square().mean().clamp(min=1e-30))
            for slope, grad in zip(slopes, torch.autograd.grad(loss, tensors, allow_unused=True), strict=True):
                if grad is not None:
                    slope += grad
        if least is None or total < least:
            least = total
            for rounding in roundings:
                rounding.keep()
        rate = (1 - step / iterations) / iterations
        with torch.no_grad():
            for (tensor, speed), slope in zip(learned, slopes, strict=True):
                tensor -= rate * speed * slope.sign()
            for rounding in roundings:
                rounding.clamp()


class _Rounding:
    """The learned rounding of one weight.

    Attributes:
        shift: The shift of each weight [out, in], in steps between codes.
        factor: The factor of each block's scale; None if scales are not floating-point.
    """

    def __init__(self, layer: Observed) -> None:
        statistics = layer.statistics
        importance = statistics.squares if statistics is not None and statistics.rows else None
        self.weight, self.scheme = layer.rotated(layer.weight.float()), layer.recipe.weight
        self.start = scales.search(self.weight, self.scheme, importance)
        self.gaps = _gaps(self.weight, self.scheme, self.start)
        self.shift = torch.zeros_like(self.weight, requires_grad=True)
        self.factor: Tensor | None = None
        if self.start.scale.is_floating_point() and not self.scheme.affine:
            self.factor = torch.ones_like(self.start.scale, dtype=torch.float32, requires_grad=True)
        self.best: tuple[Tensor, Tensor | None] = self.shift.detach(), self.factor

    @property
    def learned(self) -> list[tuple[Tensor, float]]:
        """The learned tensors, with their relative learning rates."""
        return [(self.shift, 1.0), *([] if self.factor is None else [(self.factor, _SCALE_SPEED)])]

    def clamp(self) -> None:
        self.shift.clamp_(-_REACH, _REACH)
        if self.factor is not None:
            self.factor.clamp_(*_SCALES)

    def keep(self) -> None:
        """Save the current state as the best."""
        self.best = self.shift.detach().clone(), None if self.factor is None else self.factor.detach().clone()

    def _scales(self, factor: Tensor | None) -> Scales:
        if factor is None:
            return self.start
        return scales.rescaled(self.start, self.start.scale.float() * factor)

    def __call__(self) -> Tensor:
        """The rounded weight, with a straight-through gradient for shift and factor."""
        moved = self.weight + self.shift * self.gaps
        factor = None if self.factor is None else self.factor.detach()
        rounded = fake_quantize(moved.detach(), self.scheme, *self._scales(factor))
        straight = moved - moved.detach()
        if self.factor is None or factor is None:
            return rounded + straight
        # d(s Q(w / s)) / d(log s) = s Q(w / s) - w
        block = self.scheme.block_of(*self.weight.shape)
        wide = spread(self.factor / factor - 1, block, *self.weight.shape)
        return rounded + straight + (rounded - moved.detach()) * wide

    def quantized(self) -> Quantized:
        """The codes of the best step."""
        shift, factor = self.best
        return quantize(self.weight + shift * self.gaps, self.scheme, *self._scales(factor))


def _gaps(weight: Tensor, scheme: Scheme, start: Scales) -> Tensor:
    """The distance between the two decoded values around each weight."""
    step = spread(scale_value(start.scale, scheme, start.global_scale), scheme.block_of(*weight.shape), *weight.shape)
    if scheme.format.kind == "integer":
        return step
    table = torch.tensor(sorted({value for value in scheme.format.table if math.isfinite(value)}))
    above = torch.searchsorted(table, weight / step).clamp(1, len(table) - 1)
    return (table[above] - table[above - 1]) * step
