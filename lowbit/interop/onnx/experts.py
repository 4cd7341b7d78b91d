"""Modules that take the place of mixtures' experts during an export. Their forward writes QMoE of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from math import gcd, inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowbit.interop.graphs.layers import Layer
from lowbit.interop.graphs.weights import block_size, blocks
from lowbit.interop.onnx.layers import ORT, symbolic, weight_of
from lowbit.nn.experts import QuantExperts, are_alike, has_hooks
from lowbit.nn.linear import QuantLinear
from lowbit.nn.packed import PackedLinear

__all__ = ["Blocks", "Rows", "refuses", "refuses_blocks"]

#: The smallest block of QMoE.
_SMALLEST = 16


class _SwiGLU(NamedTuple):
    """``min(g, limit) * sigmoid(alpha * min(g, limit)) * (clamp(u, -limit, limit) + beta)``, for rows of g and u.

    Attributes:
        alpha, beta, limit: Its numbers.
        interleaved: Whether rows are ``[g0, u0, g1, u1, ...]``, as QMoE needs them, or ``[g0, g1, ..., u0, u1, ...]``.
    """

    alpha: float
    beta: float
    limit: float
    interleaved: bool

    def __call__(self, rows: Tensor) -> Tensor:
        gate, up = (rows[..., ::2], rows[..., 1::2]) if self.interleaved else rows.chunk(2, -1)
        gate = gate.clamp(max=self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up.clamp(-self.limit, self.limit) + self.beta)

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of QMoE."""
        limit = {} if self.limit == inf else {"swiglu_limit": self.limit}
        return {"activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": self.alpha,
                "activation_beta": self.beta, **limit}  # fmt: skip


def _swiglu(experts: QuantExperts) -> _SwiGLU | None:
    """The SwiGLU that a module's gate computes, or None.

    Classes write their gates in many forms, so values decide. Alpha and the limit are 1 and infinity, or numbers that
    the module has as attributes.
    """
    if experts._gate is None:
        return None
    down: Any = experts.down[0]
    width = 2 * down.in_features
    source = torch.Generator().manual_seed(0)
    rows = torch.randn(1 + 4096 // width, width, generator=source)
    rows = rows * 10 ** (8 * torch.rand(rows.shape, generator=source) - 2)  # beyond any limit
    expected = experts.activated(rows)
    return next((gate for gate in _gates(experts) if torch.allclose(gate(rows), expected, 1e-5, 1e-6)), None)


def _gates(experts: QuantExperts) -> Iterator[_SwiGLU]:
    """The gates that a module may have, the usual ones first."""
    numbers = [float(value) for value in vars(experts).values() if type(value) in (int, float) and value > 0]
    for limit, alpha in product((inf, *numbers), (1.0, *numbers)):
        for beta, interleaved in product((0.0, 1.0), (False, True)):
            yield _SwiGLU(alpha, beta, limit, interleaved)


def _layers(layers: Iterable[nn.Module]) -> list[Any]:
    """The layers, with those that are packed for the CPU as they were before."""
    return [layer.unpacked() if type(layer) is PackedLinear and not has_hooks(layer) else layer for layer in layers]


def refuses(experts: QuantExperts) -> str | None:
    """Why QMoE cannot compute experts, or None."""
    if not are_alike((*_layers(experts.gate_up), *_layers(experts.down))):
        return "its layers differ in their recipes, or have hooks, adapters or reordered columns"
    if _swiglu(experts) is None:
        return "its gate is no SwiGLU, the only gate of QMoE on CPUs"
    return None


def refuses_blocks(experts: QuantExperts) -> str | None:
    """The same for weights in blocks."""
    first: Any = experts.down[0]
    if _block(experts) < _SMALLEST:
        return (
            f"no blocks of {_SMALLEST} columns or more divide its {first.out_features} and {first.in_features} columns"
        )
    return refuses(experts)


def _block(experts: QuantExperts) -> int:
    """The largest block that divides the rows of both matrices and the groups of the scheme.

    With zero points a row has two blocks or more, because QMoE stores those of single blocks in another layout.
    """
    first: Any = experts.down[0]
    block = gcd(first.out_features, first.in_features, block_size(first.scheme))
    is_whole_row = first.scheme.affine and block == min(first.out_features, first.in_features)
    return block // 2 if is_whole_row else block


class _Experts(Layer):
    """QMoE for all experts of a mixture.

    The operator gets the routing weights of each token as a row with a number per expert, and chooses the largest
    ``k`` of them. This serves every router. QMoE leaves out experts with weights up to 1e-8, and negative ones.

    Args:
        experts: The experts, with alike layers and a SwiGLU as gate.
        attributes: Attributes for the weights.
    """

    def __init__(self, experts: QuantExperts, attributes: dict[str, Any]) -> None:
        super().__init__()
        gate_up, down, gate = _layers(experts.gate_up), _layers(experts.down), _swiglu(experts)
        assert gate is not None
        self.count = experts.num_experts
        self.attributes = {**gate.attributes, **attributes}
        half = down[0].in_features
        order = torch.arange(2 * half) if gate.interleaved else torch.arange(2 * half).view(2, half).t().flatten()
        for name, layers, rows in (("gate", gate_up, order), ("down", down, slice(None))):
            for part, stack in self.stacks(layers).items():
                self.register_buffer(f"{name}_{part}", None if stack is None else stack[:, rows].contiguous())

    def stacks(self, layers: list[QuantLinear]) -> dict[str, Tensor | None]:
        """Codes, scales, zero points and biases ``[E, N, ...]`` of one layer per expert."""
        bias = None if layers[0].bias is None else torch.stack([layer.bias.detach() for layer in layers])  # type: ignore[union-attr]
        return {**self.weights(layers), "bias": bias}

    def weights(self, layers: list[QuantLinear]) -> dict[str, Tensor | None]:
        """Codes, scales and zero points."""
        raise NotImplementedError

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        rows = top_k_weights.new_zeros(top_k_index.shape[0], self.count + 1)  # padding has the index after the last
        routing = rows.scatter_add(1, top_k_index, top_k_weights)[:, : self.count]
        parts = self._buffers
        inputs = (
            hidden_states, routing,
            parts["gate_codes"], parts["gate_scales"], parts["gate_bias"],
            parts["down_codes"], parts["down_scales"], parts["down_bias"],
            None, None, None,  # a separate matrix for the gate
            parts["gate_zeros"], parts["down_zeros"], None,
            routing,
        )  # fmt: skip
        chosen = min(int(top_k_index.shape[1]), self.count)
        result: Tensor = symbolic(
            f"{ORT}::QMoE", inputs, hidden_states.dtype, hidden_states.shape, k=chosen, **self.attributes
        )
        return result


class Blocks(_Experts):
    """QMoE of 4 bits, with a scale per block; ``level`` 4 quantizes inputs to 8 bits, in ONNX Runtime's own way."""

    def __init__(self, experts: QuantExperts, level: int = 0) -> None:
        super().__init__(experts, {"expert_weight_bits": 4, "block_size": _block(experts), "accuracy_level": level})

    def weights(self, layers: list[QuantLinear]) -> dict[str, Tensor | None]:
        stored = [blocks(layer.weight, self.attributes["block_size"]) for layer in layers]
        zeros = [part.zero_points for part in stored if part.zero_points is not None]
        return {
            "codes": torch.stack([part.codes.flatten(1) for part in stored]),
            "scales": torch.stack([part.scales for part in stored]),
            "zeros": torch.stack(zeros) if zeros else None,
        }


class Rows(_Experts):
    """QMoE of 8 bits, with a scale per row."""

    def __init__(self, experts: QuantExperts) -> None:
        super().__init__(experts, {"expert_weight_bits": 8})

    def weights(self, layers: list[QuantLinear]) -> dict[str, Tensor | None]:
        codes, scales = zip(*(weight_of(layer.weight) for layer in layers), strict=True)
        return {"codes": torch.stack(codes), "scales": torch.stack(scales), "zeros": None}
