"""Cross-entropy of a linear layer's output without the full logits: only tiles of them are computed.

Source: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", arXiv 2411.09009.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.tiled.products import TILE, product, slices, sum_dtype
from lowbit.torch_private import assert_async, is_fake

__all__ = ["linear_cross_entropy"]

_REDUCTIONS = ("mean", "sum", "none")
#: Rows of a tile, if there are as many. With fewer, the matmuls read the weight more often.
_ROWS = 1024


class _Options(NamedTuple):
    smoothing: float
    softcap: float | None
    tile: int
    rounded: bool


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    chunk: int | None = None,
    rounded: bool = False,
) -> Tensor:
    """``F.cross_entropy(F.linear(hidden, weight, bias), targets)`` without allocating the logits.

    Forward computes each row's log-sum-exp tile by tile. Backward computes each tile again, so there are four matmuls
    in total instead of three. Beyond inputs and gradients, memory is two tiles. Sums are in fp32, or fp64 for fp64
    inputs, and do not depend on the order of threads. Under autocast, operands are cast as for ``F.linear``.

    Args:
        hidden: ``[..., features]``, floating point.
        weight: ``[classes, features]``, in the dtype of ``hidden``.
        targets: ``[...]``, int64 class indices.
        bias: ``[classes]``, in the dtype of ``hidden``.
        ignore_index: Target value of rows that do not count, as in ``F.cross_entropy``. If all rows are ignored, the
            mean is NaN and the gradients are zero.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``, as in ``F.cross_entropy``.
        label_smoothing: From 0 to 1, as in ``F.cross_entropy``.
        softcap: If given, logits become ``softcap * tanh(logits / softcap)``.
        chunk: Logits per tile; 2^22 by default.
        rounded: On a CPU, round matmuls of 16-bit inputs to their dtype, as ``F.linear`` does. This is several times
            faster if the processor has bf16 matmul instructions.

    Returns:
        A scalar, or with ``reduction="none"`` a tensor of ``targets``' shape. The dtype is fp32, or fp64 for fp64
        inputs.

    Raises:
        ValueError: Shapes do not match or an option is out of range.
        TypeError: A dtype is not supported.
        IndexError: On a CPU, a target is not a class index. On CUDA an assertion fails instead.
        RuntimeError: Second-order gradients are requested.
    """
    _check(hidden, weight, targets, bias, reduction, softcap, label_smoothing, chunk)
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    flat = targets.reshape(-1)
    counted = flat != ignore_index
    _check_classes(flat, counted, len(weight))
    options = _Options(label_smoothing, softcap, TILE if chunk is None else chunk, rounded)
    classes = torch.where(counted, flat, 0)
    with torch.autocast(device, enabled=False):
        losses = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden.reshape(-1, hidden.shape[-1]), weight, bias, classes, counted, options
        )
        if reduction == "none":
            return losses.view(targets.shape)  # type: ignore[no-any-return]
        return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()  # type: ignore[no-any-return]


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss of each row. Rows with ``counted`` False have loss and gradients of zero."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, classes: Tensor, counted: Tensor,
        options: _Options,
    ) -> Tensor:  # fmt: skip
        total, highest, target_logit, logit_sum = _row_sums(hidden, weight, bias, classes, options)
        log_sum = total.log_().add_(highest)
        ctx.save_for_backward(hidden, weight, bias, classes, counted, log_sum)
        ctx.options = options
        smoothing = options.smoothing
        losses = log_sum - (1 - smoothing) * target_logit
        if logit_sum is not None:
            losses -= smoothing / len(weight) * logit_sum
        return losses.masked_fill_(~counted, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "memory.linear_cross_entropy has no gradients of gradients, and backward was called with "
                "create_graph=True; use F.cross_entropy(F.linear(hidden, weight), targets) for them"
            )
        hidden, weight, bias, classes, counted, log_sum = ctx.saved_tensors
        scale = torch.where(counted, grad, 0).to(log_sum.dtype).unsqueeze(1)
        wanted = ctx.needs_input_grad[:3]
        grads = _gradients(hidden, weight, bias, classes, log_sum, scale, ctx.options, wanted)
        return (*grads, None, None, None)


def _row_sums(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, classes: Tensor, options: _Options
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return for each row the sum of ``exp(logit - highest)``, the highest logit, the target's logit, and with
    smoothing the sum of all logits.
    """
    new = hidden.new_zeros(len(hidden), dtype=sum_dtype(hidden.dtype))
    total, target_logit, highest = new, new.clone(), new - torch.inf
    logit_sum = new.clone() if options.smoothing else None
    for rows, columns in _tiles(len(hidden), len(weight), options.tile):
        logits = _capped(_logits(hidden[rows], weight[columns], bias, columns, options), options.softcap)
        place, inside = _places(classes[rows], columns)
        target_logit[rows] += torch.where(inside, logits.gather(1, place), 0).squeeze(1)
        if logit_sum is not None:
            logit_sum[rows] += logits.sum(1)
        previous = highest[rows].clone()
        maximum = torch.maximum(previous, logits.amax(1))
        shift = torch.where(maximum == -torch.inf, 0, maximum)
        total[rows] = total[rows] * (previous - shift).exp() + logits.sub_(shift.unsqueeze(1)).exp_().sum(1)
        highest[rows] = maximum
    return total, highest, target_logit, logit_sum


def _gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, classes: Tensor, log_sum: Tensor, scale: Tensor,
    options: _Options, wanted: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of ``hidden``, ``weight`` and ``bias`` that are ``wanted``, in their dtypes. ``scale``
    ``[rows, 1]`` is the gradient of each row's loss.
    """
    sums, dtype = log_sum.dtype, hidden.dtype
    hidden_grad = torch.zeros_like(hidden, dtype=sums) if wanted[0] else None
    weight_grad = torch.zeros_like(weight, memory_format=torch.contiguous_format) if wanted[1] else None
    bias_grad = torch.zeros_like(bias) if bias is not None and wanted[2] else None
    # With few rows, a tile of logits spans more classes than a tile of the weight's gradient may.
    height = max(min(len(hidden), _ROWS), weight.shape[1])
    for columns in _column_tiles(height, len(weight), options.tile):
        weight_sum: Tensor | None = None
        bias_sum: Tensor | None = None
        for rows in _row_tiles(len(hidden), options.tile):
            grad = _tile_gradient(
                hidden[rows], weight[columns], bias, classes[rows], log_sum[rows], scale[rows], columns, options,
                len(weight),
            )  # fmt: skip
            if hidden_grad is not None:
                hidden_grad[rows] += product(grad, weight[columns], dtype, options.rounded)
            if weight_grad is not None:
                weight_sum = _plus(weight_sum, product(grad.t(), hidden[rows], dtype, options.rounded))
            if bias_grad is not None:
                bias_sum = _plus(bias_sum, grad.sum(0))
        if weight_grad is not None and weight_sum is not None:
            weight_grad[columns] = weight_sum.to(weight_grad.dtype)
        if bias_grad is not None and bias_sum is not None:
            bias_grad[columns] = bias_sum.to(bias_grad.dtype)
    return None if hidden_grad is None else hidden_grad.to(dtype), weight_grad, bias_grad


def _tile_gradient(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, classes: Tensor, log_sum: Tensor, scale: Tensor,
    columns: slice, options: _Options, count: int,
) -> Tensor:  # fmt: skip
    """Return the gradients of a tile's matmul outputs: ``scale * (softmax - targets)``, through the soft cap."""
    logits = _capped(_logits(hidden, weight, bias, columns, options), options.softcap)
    slope = None if options.softcap is None else 1 - (logits / options.softcap).square_()
    grad = logits.sub_(log_sum.unsqueeze(1)).exp_()
    if options.smoothing:
        grad -= options.smoothing / count
    place, inside = _places(classes, columns)
    grad.scatter_(1, place, grad.gather(1, place) - inside.to(grad.dtype) * (1 - options.smoothing))
    grad *= scale
    return grad if slope is None else grad.mul_(slope)


# -- tiles -------------------------------------------------------------------------------------------------------------
def _row_tiles(rows: int, tile: int) -> Iterator[slice]:
    return slices(0, rows, max(1, min(rows, _ROWS, tile)))


def _column_tiles(height: int, columns: int, tile: int) -> Iterator[slice]:
    return slices(0, columns, max(1, tile // max(1, min(height, tile))))


def _tiles(rows: int, columns: int, tile: int) -> Iterator[tuple[slice, slice]]:
    return ((r, c) for c in _column_tiles(min(rows, _ROWS), columns, tile) for r in _row_tiles(rows, tile))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, columns: slice, options: _Options) -> Tensor:
    logits = product(hidden, weight.t(), hidden.dtype, options.rounded)
    return logits if bias is None else logits.add_(bias[columns])


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _places(classes: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Return the column of each row's class in the tile ``[rows, 1]``, and whether the class is in the tile."""
    place = (classes - columns.start).unsqueeze(1)
    last = columns.stop - columns.start - 1
    return place.clamp(0, last), (place >= 0) & (place <= last)


def _plus(total: Tensor | None, term: Tensor) -> Tensor:
    return term if total is None else total.add_(term)


# -- checks ------------------------------------------------------------------------------------------------------------
def _check(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, reduction: str, softcap: float | None,
    smoothing: float, chunk: int | None,
) -> None:  # fmt: skip
    name = "memory.linear_cross_entropy"
    shapes = f"hidden {list(hidden.shape)} and weight {list(weight.shape)}"
    if weight.dim() != 2 or not hidden.dim() or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"{name}: expected hidden [..., features] and weight [classes, features], got {shapes}")
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"{name}: expected a target for each row, shape {list(hidden.shape[:-1])}, got {list(targets.shape)}; "
            f"shift or flatten hidden and targets alike"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{name}: expected bias {list(weight.shape[:1])}, got {list(bias.shape)}")
    if targets.dtype != torch.int64:
        raise TypeError(f"{name}: targets are classes in int64, got {targets.dtype}; for others use F.cross_entropy")
    autocast = torch.is_autocast_enabled(hidden.device.type)
    dtypes = {t.dtype for t in (hidden, weight, bias) if t is not None}
    if not all(dtype.is_floating_point for dtype in dtypes) or (len(dtypes) > 1 and not autocast):
        raise TypeError(f"{name}: expected one floating-point dtype, got {sorted(map(str, dtypes))}; cast, or autocast")
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{name}: reduction is one of {', '.join(_REDUCTIONS)}; got {reduction!r}")
    if not 0 <= smoothing <= 1:
        raise ValueError(f"{name}: label_smoothing is from 0 to 1, got {smoothing}")
    for option, value in (("softcap", softcap), ("chunk", chunk)):
        if value is not None and value <= 0:
            raise ValueError(f"{name}: {option} is positive, got {value}; leave it out for the default")


def _check_classes(classes: Tensor, counted: Tensor, count: int) -> None:
    """Raise IndexError for a CPU target that is no class. On CUDA use an assertion, which does not wait."""
    if torch.compiler.is_compiling() or classes.is_meta or is_fake(classes):
        return
    wrong = counted & ((classes < 0) | (classes >= count))
    if classes.device.type != "cpu":
        assert_async(~wrong.any())
    elif wrong.any():
        raise IndexError(
            f"memory.linear_cross_entropy: targets are classes from 0 to {count - 1}, got "
            f"{int(classes[wrong][0])}; give ignore_index for targets that do not count"
        )
