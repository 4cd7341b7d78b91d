"""Bias correction: what quantization shifts the mean of each output channel by, taken back by the layer's bias."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.models.batches import feed, mask_of
from lowbit.models.ties import holders, model_bytes, tensor_bytes
from lowbit.nn.base import kind
from lowbit.nn.conv import QuantConv
from lowbit.nn.linear import QuantLinear
from lowbit.report import LayerReport, Report

__all__ = ["correct_bias_"]


class _Shift:
    """The mean over rows of what ``plain`` computes less what ``made`` computes of the same inputs, in fp64."""

    def __init__(self, made: Any) -> None:
        self.made, self.rows = made, 0
        self.total = torch.zeros_like(made.bias, dtype=torch.float64)
        self.mask: Tensor | None = None

    def add(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        """A forward hook of the plain layer."""
        lost = (output - self.made(*args, **kwargs)).double()
        if isinstance(self.made, QuantConv):
            lost = lost.movedim(-len(self.made.kernel_size) - 1, -1)
        elif self.mask is not None and lost.shape[:-1] == self.mask.shape:
            lost = lost[self.mask]
        lost = lost.reshape(-1, lost.shape[-1])
        self.rows += len(lost)
        self.total += lost.sum(0)


@torch.no_grad()
def correct_bias_(model: nn.Module, plain: nn.Module, batches: Iterable[Any]) -> Report:
    """Add to each bias of the quantized ``model``, in place, what its layer's outputs have lost in the mean, and
    report.

    ``plain``: the model that was quantized, in eval mode; it stays as it is. Its layers are given ``batches`` as
    ``lb.calibrate`` gives them, and what the quantized layer of the same name makes of the same inputs is held against
    theirs, without padding tokens. Layers without a bias, or that share one, are left.
    Raises, with both models as they were: ValueError for ``plain`` in training mode, no batches, NaN and Inf, and a
    ``model`` that holds other numbers beside its codes than ``plain`` (it was calibrated with a transform, or corrected
    already); TypeError for batches of other types.
    Source: Nagel et al., arXiv 1906.04721, section 4.2.
    """
    if plain.training:
        raise ValueError("correct_bias_: the plain model is in training mode; call plain.eval() first")
    pairs, left = _pairs(model, plain)
    shifts = {name: _Shift(made) for name, (made, _) in pairs.items()}
    hooks = [before.register_forward_hook(shifts[name].add, with_kwargs=True) for name, (_, before) in pairs.items()]
    try:
        for batch in batches:
            for shift in shifts.values():
                shift.mask = mask_of(batch)
            feed(plain, batch)
    finally:
        for hook in hooks:
            hook.remove()
    rows, size = [], model_bytes(model)
    for name, shift in shifts.items():
        if not shift.rows:
            left[name] = "no batch reaches it"
        elif not bool(shift.total.isfinite().all()):
            raise ValueError(f"correct_bias_: outputs of {name} hold NaN or Inf; look for them in the batches")
    if not any(shift.rows for shift in shifts.values()):
        raise ValueError("correct_bias_: no batch reaches a quantized layer; give some of what the model will see")
    for name, shift in shifts.items():
        if name in left:
            continue
        bias = shift.made.bias
        bias.copy_(bias.double() + shift.total / shift.rows)
        held = tensor_bytes([bias])
        rows.append(LayerReport(name, type(shift.made).__name__, None, bias.numel(), 8.0 * bias.itemsize, held, held))
    return Report("correct_bias_", None, tuple(rows), (), left, (), size, size)


def _pairs(model: nn.Module, plain: nn.Module) -> tuple[dict[str, tuple[Any, nn.Module]], dict[str, str]]:
    """By name each quantized layer that has a bias, with the plain layer; and why others are left."""
    modules = dict(plain.named_modules())
    shares = holders(model)
    pairs: dict[str, tuple[Any, nn.Module]] = {}
    left: dict[str, str] = {}
    inside = ""
    for name, made in model.named_modules():
        if not isinstance(made, QuantLinear | QuantConv) or (inside and name.startswith(inside)):
            continue
        inside = f"{name}." if isinstance(made, QuantConv) else inside
        before: Any = modules.get(name)
        if before is None or kind(before) is not None:
            left[name] = "the plain model has no plain layer of this name"
        elif made.bias is None:
            left[name] = "it has no bias; fold BatchNorm into it first, or give it a bias of zeros"
        elif len(shares.get(id(made.bias), ())) > 1:
            left[name] = "it shares its bias with another layer, which has lost something else; give each its own first"
        else:
            pairs[name] = made, before
    if not pairs:
        why = "".join(f"; {name}: {reason}" for name, reason in left.items())
        raise ValueError(
            "correct_bias_: no quantized layer with a bias has its plain layer in the other model; expected the "
            f"quantized model and a copy of it from before quantize_{why}"
        )
    _require_same(model, plain)
    return pairs, left


def _require_same(model: nn.Module, plain: nn.Module) -> None:
    """Raise ValueError where something that both models hold in floating point is not the same in them."""
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for prefix, made in model.named_modules():
        if isinstance(made, QuantConv) and made.bias is not None:
            held[f"{prefix}.bias".lstrip(".")] = made.bias
    for name, before in (*plain.named_parameters(), *plain.named_buffers()):
        now = held.get(name)
        if now is not None and now.is_floating_point() and not torch.equal(now, before.to(now.dtype)):
            raise ValueError(
                f"correct_bias_: {name} is not what it is in the plain model; a model that was corrected already, or "
                "calibrated with a transform, cannot be corrected"
            )
