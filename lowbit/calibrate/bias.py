"""Bias correction: adds the mean output error of quantization to each layer's bias."""

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
    """The sum over rows of the plain layer's output minus the quantized layer's, in fp64."""

    def __init__(self, quantized: Any) -> None:
        self.quantized, self.rows = quantized, 0
        self.total = torch.zeros_like(quantized.bias, dtype=torch.float64)
        self.mask: Tensor | None = None

    def add(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        """A forward hook of the plain layer."""
        error = (output - self.quantized(*args, **kwargs)).double()
        if isinstance(self.quantized, QuantConv):
            error = error.movedim(-len(self.quantized.kernel_size) - 1, -1)
        elif self.mask is not None and error.shape[:-1] == self.mask.shape:
            error = error[self.mask]
        error = error.reshape(-1, error.shape[-1])
        self.rows += len(error)
        self.total += error.sum(0)


@torch.no_grad()
def correct_bias_(model: nn.Module, plain: nn.Module, batches: Iterable[Any]) -> Report:
    """Add to each bias of the quantized ``model``, in place, the mean output error of its layer.

    Each quantized layer is compared with the plain layer of the same name on the same inputs, without padding tokens.
    Layers without a bias, or with a shared one, are left.
    Source: Nagel et al., arXiv 1906.04721, section 4.2.

    Args:
        model: The quantized model.
        plain: The model before quantization, in eval mode. It is not changed.
        batches: Inputs of the model, as for ``lb.calibrate``.

    Returns:
        The report of the corrected layers, with the reason for each layer that was left.

    Raises:
        ValueError: ``plain`` is in training mode; no batch reaches a quantized layer; outputs have NaN or Inf; float
            parameters or buffers of ``model`` differ from ``plain`` (it was calibrated with a transform, or corrected
            already). Both models are unchanged.
        TypeError: A batch has another type.
    """
    if plain.training:
        raise ValueError("correct_bias_: the plain model is in training mode; call plain.eval() first")
    pairs, left = _pairs(model, plain)
    shifts = {name: _Shift(layer) for name, (layer, _) in pairs.items()}
    hooks = [layer.register_forward_hook(shifts[name].add, with_kwargs=True) for name, (_, layer) in pairs.items()]
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
            raise ValueError(f"correct_bias_: outputs of {name} have NaN or Inf; look for them in the batches")
    if not any(shift.rows for shift in shifts.values()):
        raise ValueError("correct_bias_: no batch reaches a quantized layer; give batches as the model will see them")
    for name, shift in shifts.items():
        if name in left:
            continue
        layer, bias = shift.quantized, shift.quantized.bias
        bias.copy_(bias.double() + shift.total / shift.rows)
        nbytes = tensor_bytes([bias])
        rows.append(LayerReport(name, type(layer).__name__, None, bias.numel(), 8.0 * bias.itemsize, nbytes, nbytes))
    return Report("correct_bias_", None, tuple(rows), (), left, (), size, size)


def _pairs(model: nn.Module, plain: nn.Module) -> tuple[dict[str, tuple[Any, nn.Module]], dict[str, str]]:
    """The quantized and plain layers with a bias, by name, and the reasons for layers that are left."""
    modules = dict(plain.named_modules())
    shares = holders(model)
    pairs: dict[str, tuple[Any, nn.Module]] = {}
    left: dict[str, str] = {}
    inside = ""
    for name, layer in model.named_modules():
        if not isinstance(layer, QuantLinear | QuantConv) or (inside and name.startswith(inside)):
            continue
        inside = f"{name}." if isinstance(layer, QuantConv) else inside
        plain_layer: Any = modules.get(name)
        if plain_layer is None or kind(plain_layer) is not None:
            left[name] = "the plain model has no plain layer of this name"
        elif layer.bias is None:
            left[name] = "it has no bias; fold BatchNorm into it first, or give it a bias of zeros"
        elif len(shares.get(id(layer.bias), ())) > 1:
            left[name] = "it shares its bias with another layer, which has another error; give each its own bias first"
        else:
            pairs[name] = layer, plain_layer
    if not pairs:
        reasons = "".join(f"; {name}: {reason}" for name, reason in left.items())
        raise ValueError(
            "correct_bias_: no quantized layer with a bias has its plain layer in the other model; expected the "
            f"quantized model and a copy of it from before quantize_{reasons}"
        )
    _require_same(model, plain)
    return pairs, left


def _require_same(model: nn.Module, plain: nn.Module) -> None:
    """Raise ValueError if a float tensor differs between the models."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for prefix, layer in model.named_modules():
        if isinstance(layer, QuantConv) and layer.bias is not None:
            tensors[f"{prefix}.bias".lstrip(".")] = layer.bias
    for name, before in (*plain.named_parameters(), *plain.named_buffers()):
        now = tensors.get(name)
        if now is not None and now.is_floating_point() and not torch.equal(now, before.to(now.dtype)):
            raise ValueError(
                f"correct_bias_: {name} differs from the plain model; a model that was corrected already, or "
                "calibrated with a transform, cannot be corrected"
            )
