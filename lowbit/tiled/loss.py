"""Cross-entropy and log-probabilities of a linear layer's output without the full logits: only tiles are computed.

Source: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", arXiv 2411.09009.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.memory.tile_loops import alike
from lowbit.tiled.products import TILE, product, slices, sum_dtype
from lowbit.torch_private import assert_async, is_fake

__all__ = ["LogProbs", "linear_cross_entropy", "linear_log_probs"]

_REDUCTIONS = ("mean", "sum", "none")
#: Rows of a tile, if there are as many. With fewer, the matmuls read the weight more often.
_ROWS = 1024


class _Options(NamedTuple):
    smoothing: float
    softcap: float | None
    tile: int
    rounded: bool
    temperature: float = 1.0


class LogProbs(NamedTuple):
    """The result of ``linear_log_probs``.

    Attributes:
        log_probs: Log-probability of each target; 0 if the target is ignored.
        entropy: Entropy of each row's distribution in nats; 0 if the target is ignored. None if it was not asked for.
    """

    log_probs: Tensor
    entropy: Tensor | None


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
    who = "memory.linear_cross_entropy"
    _check(who, hidden, weight, targets, bias, softcap=softcap, chunk=chunk)
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{who}: reduction is one of {', '.join(_REDUCTIONS)}; got {reduction!r}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{who}: label_smoothing is from 0 to 1, got {label_smoothing}")
    hidden, weight, bias, classes, counted = _rows(who, hidden, weight, bias, targets, ignore_index)
    options = _Options(label_smoothing, softcap, TILE if chunk is None else chunk, rounded)
    with torch.autocast(hidden.device.type, enabled=False):
        losses = _LinearCrossEntropy.apply(hidden, weight, bias, classes, counted, options)  # type: ignore[no-untyped-call]
        if reduction == "none":
            return losses.view(targets.shape)  # type: ignore[no-any-return]
        return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()  # type: ignore[no-any-return]


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    entropy: bool = True,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
    rounded: bool = False,
) -> LogProbs:
    """Return the log-probabilities of ``targets``, and the entropy of each row, without allocating the logits.

    The same as ``log_softmax(F.linear(hidden, weight, bias) / temperature)`` gathered at the targets. Preference and
    policy-gradient losses are functions of the result, see ``lowbit.train.preference``. Memory, sums and autocast are
    those of ``linear_cross_entropy``. Both results have gradients.

    Args:
        hidden: ``[..., features]``, floating point.
        weight: ``[classes, features]``, in the dtype of ``hidden``.
        targets: ``[...]``, int64 class indices.
        bias: ``[classes]``, in the dtype of ``hidden``.
        entropy: Whether to compute the entropy.
        ignore_index: Target value of rows that do not count.
        temperature: Divisor of the logits, after the soft cap.
        softcap: If given, logits become ``softcap * tanh(logits / softcap)``.
        chunk: Logits per tile; 2^22 by default.
        rounded: As for ``linear_cross_entropy``.

    Returns:
        ``log_probs`` and ``entropy`` of ``targets``' shape, in fp32, or fp64 for fp64 inputs.

    Raises:
        ValueError: Shapes do not match or an option is out of range.
        TypeError: A dtype is not supported.
        IndexError: On a CPU, a target is not a class index. On CUDA an assertion fails instead.
        RuntimeError: Second-order gradients are requested.
    """
    who = "memory.linear_log_probs"
    _check(who, hidden, weight, targets, bias, softcap=softcap, chunk=chunk, temperature=temperature)
    hidden, weight, bias, classes, counted = _rows(who, hidden, weight, bias, targets, ignore_index)
    options = _Options(0.0, softcap, TILE if chunk is None else chunk, rounded, temperature)
    with torch.autocast(hidden.device.type, enabled=False):
        if not entropy:
            losses = _LinearCrossEntropy.apply(hidden, weight, bias, classes, counted, options)  # type: ignore[no-untyped-call]
            return LogProbs(-losses.view(targets.shape), None)
        results = _LinearLogProbs.apply(hidden, weight, bias, classes, counted, options)  # type: ignore[no-untyped-call]
        return LogProbs(*(result.view(targets.shape) for result in results))


def _rows(
    who: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """Return the operands as autocast casts them, with one row per target, the classes, and which of them count."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    flat = targets.reshape(-1)
    counted = flat != ignore_index
    _check_classes(who, flat, counted, len(weight))
    return hidden.reshape(-1, hidden.shape[-1]), weight, bias, torch.where(counted, flat, 0), counted


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss of each row. Rows with ``counted`` False have loss and gradients of zero."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, classes: Tensor, counted: Tensor,
        options: _Options,
    ) -> Tensor:  # fmt: skip
        sums = _row_sums(hidden, weight, bias, classes, options, with_logits=options.smoothing > 0)
        log_sum = sums.total.log_().add_(sums.highest)
        ctx.save_for_backward(hidden, weight, bias, classes, counted, log_sum)
        ctx.options = options
        smoothing = options.smoothing
        losses = log_sum - (1 - smoothing) * sums.target_logit
        if sums.logits is not None:
            losses -= smoothing / len(weight) * sums.logits
        return losses.masked_fill_(~counted, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        _refuse_second_order("memory.linear_cross_entropy")
        hidden, weight, bias, classes, counted, log_sum = ctx.saved_tensors
        rows = _RowGradient(classes, log_sum, torch.where(counted, grad, 0).to(log_sum.dtype))
        grads = _gradients(hidden, weight, bias, rows, ctx.options, ctx.needs_input_grad[:3])
        return (*grads, None, None, None)


class _LinearLogProbs(torch.autograd.Function):
    """Log-probability and entropy of each row. Rows with ``counted`` False have zeros, and gradients of zero."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, classes: Tensor, counted: Tensor,
        options: _Options,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        sums = _row_sums(hidden, weight, bias, classes, options, with_entropy=True)
        assert sums.weighted is not None
        log_total = sums.total.log()
        entropy = log_total - sums.weighted / sums.total
        log_sum = log_total.add_(sums.highest)
        ctx.save_for_backward(hidden, weight, bias, classes, counted, log_sum, entropy)
        ctx.options = options
        log_probs = (sums.target_logit - log_sum).masked_fill_(~counted, 0)
        return log_probs, entropy.masked_fill(~counted, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, entropy_grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        _refuse_second_order("memory.linear_log_probs")
        hidden, weight, bias, classes, counted, log_sum, entropy = ctx.saved_tensors
        scale, entropy_scale = (torch.where(counted, g, 0).to(log_sum.dtype) for g in (grad, entropy_grad))
        rows = _RowGradient(classes, log_sum, -scale, entropy, entropy_scale)
        grads = _gradients(hidden, weight, bias, rows, ctx.options, ctx.needs_input_grad[:3])
        return (*grads, None, None, None)


def _refuse_second_order(who: str) -> None:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"{who} has no gradients of gradients, and backward was called with create_graph=True; "
            f"use F.cross_entropy or F.log_softmax of F.linear(hidden, weight) for them"
        )


class _RowSums(NamedTuple):
    """Sums over the logits of each row.

    Attributes:
        total: Sum of ``exp(logit - highest)``.
        highest: Highest logit.
        target_logit: The target's logit.
        logits: Sum of all logits, or None.
        weighted: Sum of ``exp(logit - highest) * (logit - highest)``, or None.
    """

    total: Tensor
    highest: Tensor
    target_logit: Tensor
    logits: Tensor | None
    weighted: Tensor | None


class _RowGradient(NamedTuple):
    """The gradient with respect to each row's results.

    Attributes:
        classes: Each row's target.
        log_sum: Logarithm of the sum of ``exp(logit)``.
        scale: Gradient of the row's negative log-probability.
        entropy: Entropy of the row, or None.
        entropy_scale: Gradient of the row's entropy, or None.
    """

    classes: Tensor
    log_sum: Tensor
    scale: Tensor
    entropy: Tensor | None = None
    entropy_scale: Tensor | None = None

    def of(self, rows: slice) -> _RowGradient:
        """Return some of the rows."""
        return _RowGradient(*(None if value is None else value[rows] for value in self))  # type: ignore[arg-type]


def _row_sums(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, classes: Tensor, options: _Options,
    with_logits: bool = False, with_entropy: bool = False,
) -> _RowSums:  # fmt: skip
    """Return the sums of each row, with two optional ones."""
    new = hidden.new_zeros(len(hidden), dtype=sum_dtype(hidden.dtype))
    total, target_logit, highest = new, new.clone(), new - torch.inf
    logit_sum, weighted = new.clone() if with_logits else None, new.clone() if with_entropy else None
    for rows, columns in _tiles(len(hidden), len(weight), options.tile):
        logits = _scaled(_logits(hidden[rows], weight[columns], bias, columns, options), options)
        place, inside = _places(classes[rows], columns)
        target_logit[rows] += torch.where(inside, logits.gather(1, place), 0).squeeze(1)
        if logit_sum is not None:
            logit_sum[rows] += logits.sum(1)
        previous = highest[rows].clone()
        maximum = torch.maximum(previous, logits.amax(1))
        shift = torch.where(maximum == -torch.inf, 0, maximum)
        rescale = (previous - shift).exp()
        logits.sub_(shift.unsqueeze(1))
        if weighted is not None:
            # The sums so far were relative to the previous highest logit; -inf * 0 counts as 0.
            moved = torch.where(rescale > 0, (weighted[rows] + (previous - shift) * total[rows]) * rescale, 0)
            weighted[rows] = moved + (logits.exp() * logits.clamp_min(torch.finfo(logits.dtype).min)).sum(1)
        total[rows] = total[rows] * rescale + logits.exp_().sum(1)
        highest[rows] = maximum
    return _RowSums(total, highest, target_logit, logit_sum, weighted)


def _gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, results: _RowGradient, options: _Options,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of ``hidden``, ``weight`` and ``bias`` that are ``wanted``, in their dtypes."""
    sums, dtype = results.log_sum.dtype, hidden.dtype
    hidden_grad = torch.zeros_like(hidden, dtype=sums) if wanted[0] else None
    weight_grad = torch.zeros_like(weight, memory_format=torch.contiguous_format) if wanted[1] else None
    bias_grad = torch.zeros_like(bias) if bias is not None and wanted[2] else None
    # With few rows, a tile of logits spans more classes than a tile of the weight's gradient may.
    height = max(min(len(hidden), _ROWS), weight.shape[1])
    for columns in alike(_column_tiles(height, len(weight), options.tile)):
        weight_sum: Tensor | None = None
        bias_sum: Tensor | None = None
        for rows in _row_tiles(len(hidden), options.tile):
            grad = _tile_gradient(hidden[rows], weight[columns], bias, results.of(rows), columns, options, len(weight))
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
    hidden: Tensor, weight: Tensor, bias: Tensor | None, results: _RowGradient, columns: slice, options: _Options,
    count: int,
) -> Tensor:  # fmt: skip
    """Return the gradients of a tile's matmul outputs, through temperature and soft cap.

    Those of the scaled logits are ``scale * (softmax - targets)``, and ``-entropy_scale * softmax * (log_softmax +
    entropy)`` for the entropy.
    """
    logits = _capped(_logits(hidden, weight, bias, columns, options), options.softcap)
    slope = None if options.softcap is None else 1 - (logits / options.softcap).square_()
    if options.temperature != 1:
        logits /= options.temperature
    log_probs = logits.sub_(results.log_sum.unsqueeze(1))
    of_entropy: Tensor | None = None
    if results.entropy is not None and results.entropy_scale is not None:
        inner = (log_probs + results.entropy.unsqueeze(1)).clamp_min_(torch.finfo(logits.dtype).min)
        of_entropy = inner.mul_(log_probs.exp()).mul_(results.entropy_scale.unsqueeze(1))
    grad = log_probs.exp_()
    if options.smoothing:
        grad -= options.smoothing / count
    place, inside = _places(results.classes, columns)
    grad.scatter_(1, place, grad.gather(1, place) - inside.to(grad.dtype) * (1 - options.smoothing))
    grad *= results.scale.unsqueeze(1)
    if of_entropy is not None:
        grad -= of_entropy
    if options.temperature != 1:
        grad /= options.temperature
    return grad if slope is None else grad.mul_(slope)


# -- tiles -------------------------------------------------------------------------------------------------------------
def _row_tiles(rows: int, tile: int) -> Iterator[slice]:
    return slices(0, rows, max(1, min(rows, _ROWS, tile)))


def _column_tiles(height: int, columns: int, tile: int) -> Iterator[slice]:
    return slices(0, columns, max(1, tile // max(1, min(height, tile))))


def _tiles(rows: int, columns: int, tile: int) -> Iterator[tuple[slice, slice]]:
    columns_of = alike(_column_tiles(min(rows, _ROWS), columns, tile))
    return ((r, c) for c in columns_of for r in _row_tiles(rows, tile))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, columns: slice, options: _Options) -> Tensor:
    logits = product(hidden, weight.t(), hidden.dtype, options.rounded)
    return logits if bias is None else logits.add_(bias[columns])


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _scaled(logits: Tensor, options: _Options) -> Tensor:
    capped = _capped(logits, options.softcap)
    return capped if options.temperature == 1 else capped.div_(options.temperature)


def _places(classes: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Return the column of each row's class in the tile ``[rows, 1]``, and whether the class is in the tile."""
    place = (classes - columns.start).unsqueeze(1)
    last = columns.stop - columns.start - 1
    return place.clamp(0, last), (place >= 0) & (place <= last)


def _plus(total: Tensor | None, term: Tensor) -> Tensor:
    return term if total is None else total.add_(term)


# -- checks ------------------------------------------------------------------------------------------------------------
def _check(
    name: str, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, **positive: float | None
) -> None:
    """Raise ValueError or TypeError for invalid operands, and for options that are not ``positive`` or None."""
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
    for option, value in positive.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name}: {option} is positive, got {value}; leave it out for the default")


def _check_classes(name: str, classes: Tensor, counted: Tensor, count: int) -> None:
    """Raise IndexError for a CPU target that is no class. On CUDA use an assertion, which does not wait."""
    if torch.compiler.is_compiling() or classes.is_meta or is_fake(classes):
        return
    wrong = counted & ((classes < 0) | (classes >= count))
    if classes.device.type != "cpu":
        assert_async(~wrong.any())
    elif wrong.any():
        raise IndexError(
            f"{name}: targets are classes from 0 to {count - 1}, got "
            f"{int(classes[wrong][0])}; give ignore_index for targets that do not count"
        )
