"""QuantExperts: the experts of a mixture, each with its own quantized matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lowbit.functional import hadamard, quantize
from lowbit.functional.grouped import multiplies_at_once
from lowbit.models.wrap import plain_class
from lowbit.nn.base import kind
from lowbit.nn.linear import PARTS, QuantLinear
from lowbit.op_calls import call
from lowbit.ops.grouped import has_rows_of_its_own
from lowbit.ops.spec import stored_global, stored_scale, stored_zero
from lowbit.torch_private import is_fake

__all__ = ["QuantExperts", "are_alike", "has_hooks", "stack_experts_", "stacks"]

#: Device types on which one kernel multiplies for all experts; their weights are views of one stack.
_STACKED_ON = ("cuda",)


def stacks(experts: Any) -> tuple[str, str]:
    """Names of the two stacks of matrices in an ``Experts`` module of transformers."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


class QuantExperts(nn.Module):
    """transformers' ``Experts`` modules, whose weights are stacks of matrices, with one QuantLinear per matrix.

    ``forward(hidden [T, H], index [T, k], weights [T, k])`` returns ``[T, H]``: for each token the sum over its ``k``
    experts of ``down(gate(gate_up(hidden))) * weight``. ``gate`` is the gate of the class of ``like``, by default
    ``act(gate) * up``, or its activation if it has no gate. An expert that no token chooses is not called. An index
    equal to the number of experts chooses none, as padding does.

    On CUDA devices tokens are sorted by expert, and one grouped matmul serves all experts. The host does not wait for
    the device, so a CUDA graph can capture it. The layers' codes and scales are views of stacked tensors (``stack_``).
    Integer matmuls are bit-identical to running one expert after the other. Float matmuls and the sum over a token's
    experts are accumulated in another order.

    Experts run one after the other on other devices and with gradients. The same holds for layers that are not plain
    QuantLinears of one scheme (with adapters or hooks, or packed), and for static input scales or scales that span
    rows.

    In ``torch.compile`` and ``torch.export`` each expert computes every token, because no shape may depend on the
    index. Results match eager mode within rounding, at E / k times the matmuls.

    Args:
        like: the module to replace.
        gate_up: one layer per expert.
        down: one layer per expert.
    """

    act_fn: Any

    @property
    def lowbit_kind(self) -> str:
        """ "qat" while the matrices are trained, else "quantized"."""
        return "qat" if kind(self.down[0]) == "qat" else "quantized"

    def __init__(self, like: Any, gate_up: Sequence[QuantLinear], down: Sequence[QuantLinear]) -> None:
        super().__init__()
        # The gate may read these: numbers and activations.
        vars(self).update({k: v for k, v in vars(like).items() if isinstance(v, int | float) or callable(v)})
        self._modules.update(like._modules)
        self.num_experts = len(down)
        self._gate = type(like)._apply_gate if like.has_gate else None
        self.recipe = down[0].recipe
        self.gate_up, self.down = nn.ModuleList(gate_up), nn.ModuleList(down)
        self.stack_()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self._all(hidden_states, top_k_index, top_k_weights)
        pair = self._stacked(hidden_states, top_k_weights)
        if pair is not None:
            return self._at_once(*pair, hidden_states, top_k_index, top_k_weights)
        result = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            if expert >= self.num_experts:
                continue
            token, slot = torch.where(top_k_index == expert)
            y = self._expert(expert, hidden_states[token]) * top_k_weights[token, slot, None]
            result.index_add_(0, token, y.to(result.dtype))
        return result

    def _all(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The result without data-dependent shapes: each expert computes every token."""
        result = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            chosen = index == expert
            weight = (weights * chosen).sum(-1, keepdim=True)
            y = self._expert(expert, hidden) * weight
            result = result + torch.where(chosen.any(-1, keepdim=True), y, 0).to(result.dtype)
        return result

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        """The output of one expert, before it is weighted."""
        output: Tensor = self.down[expert](self.activated(self.gate_up[expert](x)))
        return output

    def activated(self, y: Tensor) -> Tensor:
        """The gate, or the activation without a gate, of the first layers' outputs ``y [T, N]``."""
        activated: Tensor = self.act_fn(y) if self._gate is None else self._gate(self, y)
        return activated

    # -- all experts at once -------------------------------------------------------------------------------------------
    def _at_once(self, gate_up: _Stack, down: _Stack, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The result by grouped matmuls of rows sorted by expert."""
        tokens, choices = index.shape
        expert, order = index.flatten().sort(stable=True)
        ids = torch.arange(self.num_experts, dtype=expert.dtype, device=expert.device)
        offsets = torch.searchsorted(expert, ids, right=True, out_int32=True)
        x = hidden.index_select(0, order // choices)
        y = down.multiply(self.activated(gate_up.multiply(x, offsets)), offsets)
        # Rows after the last expert's are zeros; padding reads them.
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        y = y.index_select(0, back).view(tokens, choices, y.shape[-1])
        y = y * weights.masked_fill(index >= self.num_experts, 0)[..., None]
        return y.sum(1).to(hidden.dtype)

    def _stacked(self, hidden: Tensor, weights: Tensor) -> tuple[_Stack, _Stack] | None:
        """Both stacks, if one matmul can serve all experts; else None."""
        if hidden.device.type not in _STACKED_ON or not hidden.numel():
            return None
        if torch.is_grad_enabled() and any(t.requires_grad for t in (hidden, weights, *self._trained())):
            return None
        gate_up, down = (_stack(layers, hidden) for layers in (self.gate_up, self.down))
        return None if gate_up is None or down is None else (gate_up, down)

    def _trained(self) -> Iterator[Tensor]:
        """Parameters that may have gradients: the layers' biases and the parameters of activations."""
        for name, module in self._modules.items():
            if name not in ("gate_up", "down"):
                yield from cast(nn.Module, module).parameters()
        for layer in (*self.gate_up, *self.down):
            bias = layer._parameters.get("bias")
            if bias is not None:
                yield bias

    def stack_(self) -> None:
        """On CUDA devices, copy the experts' codes and scales into stacked tensors and make the parameters views of
        them.

        It runs automatically when the module is created, moved, copied or loaded. While it copies, one of the two
        stacks is in memory twice.
        """
        for layers in (self.gate_up, self.down):
            for name in PARTS if all(plain_class(layer) is QuantLinear for layer in layers) else ():
                parts: list[Any] = [layer._parameters[name] for layer in layers]
                if _may_stack(parts) and _stacked_tensor(parts) is None:
                    with torch.no_grad(), torch.inference_mode(False):
                        for part, view in zip(parts, torch.stack([p.detach() for p in parts]), strict=True):
                            part.data = view

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantExperts:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.stack_()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.stack_()


def stack_experts_(model: nn.Module) -> None:
    """Call ``stack_`` for all experts of a model, after their tensors were replaced."""
    for module in model.modules():
        if isinstance(module, QuantExperts):
            module.stack_()


class _Stack(NamedTuple):
    """Layers of one scheme, and their weights as one: codes ``[E, N, packed K]`` with stacked scales."""

    layers: nn.ModuleList
    parts: dict[str, Tensor | None]

    def multiply(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Apply the layers to rows ``x [T, K]`` that are sorted by expert."""
        first: Any = self.layers[0]
        x, dtype = first._operand(x)
        if first.rotation is not None:
            x = hadamard(x, first.rotation)
        inputs: tuple[Any, ...] = x, None, None, None, None
        if first._input_name is not None:
            q = quantize(x, first._input_name)
            inputs = q.codes, first._input_name, q.scale, q.zero_point, q.global_scale
        biases: Any = None if first.bias is None else torch.stack([layer.bias for layer in self.layers])  # type: ignore[misc]
        codes, scale, zero_point, global_scale = (self.parts[name] for name in PARTS)
        y: Tensor = call(
            "scaled_grouped_mm", inputs[0], codes, offsets, first.in_features, first.scheme.name,
            scale, zero_point, global_scale, *inputs[1:], biases, dtype,
        )  # fmt: skip
        return y


def _stack(layers: nn.ModuleList, x: Tensor) -> _Stack | None:
    """The stack of ``layers``, or None if they are not stacked or no kernel multiplies it."""
    first: Any = layers[0]
    if not are_alike(layers):
        return None
    if first.recipe.static or (first.recipe.input is not None and not has_rows_of_its_own(first.recipe.input)):
        return None
    dtype, shape = first._operand(x[:0])[1], (first.out_features, first.in_features)
    if not multiplies_at_once(x.device.type, first._input_name, dtype, first.scheme, shape):
        return None
    parts: dict[str, Tensor | None] = dict.fromkeys(PARTS)
    for name in PARTS:
        if first._parameters[name] is not None:
            parts[name] = stacked = _stacked_tensor([layer._parameters[name] for layer in layers])  # type: ignore[misc]
            if stacked is None:
                return None
    assert parts["scale"] is not None
    parts["scale"] = stored_scale(parts["scale"], first.scheme.name)
    parts["zero_point"] = stored_zero(parts["zero_point"], first.scheme.name)
    parts["global_scale"] = stored_global(parts["global_scale"])
    return _Stack(layers, parts)


def are_alike(layers: Iterable[Any]) -> bool:
    """Whether all layers compute the same function of their weight and bias, and nothing else."""
    first, *_ = layers = list(layers)
    return all(
        type(layer) is QuantLinear
        and layer.scheme == first.scheme
        and layer._input_name == first._input_name
        and layer.rotation == first.rotation
        and layer.columns is None
        and not (layer.consumers or has_hooks(layer))
        for layer in layers
    )


def has_hooks(layer: nn.Module) -> bool:
    """Whether calls of a layer run anything but its own forward."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))


def _may_stack(parts: list[Any]) -> bool:
    """Whether the parts are plain parameters on a device with stacking."""
    return _are_stackable(parts) and all(type(part) is nn.Parameter and not part.is_inference() for part in parts)


def _are_stackable(parts: list[Any]) -> bool:
    """Whether the parts are distinct contiguous parameters with equal shape, dtype and device, on a device with
    stacking.
    """
    return len(set(map(id, parts))) == len(parts) and all(
        isinstance(part, nn.Parameter)
        and part.device.type in _STACKED_ON
        and (part.shape, part.dtype, part.device) == (parts[0].shape, parts[0].dtype, parts[0].device)
        and part.is_contiguous()
        for part in parts
    )


def _stacked_tensor(parts: list[Tensor]) -> Tensor | None:
    """The tensor that the parts are consecutive slices of, or None.

    For fake tensors, a tensor of the same shape if ``stack_`` would stack real ones.
    """
    first = parts[0]
    if is_fake(first):
        return first.detach().expand(len(parts), *first.shape) if _are_stackable(parts) else None
    begin, size, storage = first.data_ptr(), first.nbytes, first.untyped_storage()
    if not size or begin + len(parts) * size > storage.data_ptr() + storage.nbytes():
        return None
    if any(part.data_ptr() != begin + i * size or not part.is_contiguous() for i, part in enumerate(parts)):
        return None
    return first.detach().as_strided((len(parts), *first.shape), (first.numel(), *first.stride()))
