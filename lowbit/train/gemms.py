"""The three low-precision matmuls of a Linear as one differentiable function.

Axes: M tokens, K inputs, N outputs; ``x [M, K]``, ``w [N, K]``, ``y`` and its gradient ``g [M, N]``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from lowbit.autograd import backend_now, bias_gradient, first_order, on_backend
from lowbit.functional import scaled_mm
from lowbit.functional.dual import quantize_both
from lowbit.functional.rotation import by_kernel, hadamard, signed_hadamard
from lowbit.recipes import RECIPES, Cast, Gemm, Recipe, refuse_beyond
from lowbit.scaling import Scheme, scheme
from lowbit.tensor.quantized import Quantized
from lowbit.train import rules
from lowbit.train.eden import random_hadamard
from lowbit.train.view import View

__all__ = ["Products", "WeightOperands", "low_precision_linear"]

Side = Quantized | Tensor

#: Cast options that training supports, besides transforms.
_SUPPORTED: dict[str, tuple[str | None, ...]] = {
    "rounding": ("stochastic", "eden"), "scale": ("delayed",), "rule": ("search", "four-over-six")
}  # fmt: skip

#: Transforms of the operands of backward matmuls. Forward supports none, because backward contracts other axes.
_TRANSFORMS: dict[str | None, Callable[[Tensor, int, int], Tensor]] = {
    "hadamard": hadamard,
    "signed-hadamard": signed_hadamard,
}


@dataclass(frozen=True)
class Backward:
    """One backward matmul: the cast of ``g``, the treatment of the other operand, and its cast in forward.

    Attributes:
        role: ``grad_input`` or ``grad_weight``.
        g: cast of ``g``; None: it stays in floats.
        other: cast of the other operand, "reuse", "fold", "dequantize", or None.
        save: the form in which forward saves the other operand: "operand", "codes" or "high".
        forward: cast of the other operand in forward.
        forward_role: role of the other operand in forward.
        g_role: role whose stream and history ``g`` uses.
        unit: if scales are folded, the scheme of the bare codes.
        rotation: block of the transform of both operands along the contracted axis, or None.
    """

    role: str
    g: Cast | None
    other: Cast | str | None
    save: str
    forward: Cast | None
    forward_role: str
    g_role: str
    unit: Scheme | None
    rotation: int | None

    @classmethod
    def of(cls, role: str, gemm: Gemm, forward: Cast | None, forward_role: str, g_role: str) -> Backward:
        unit = scheme(f"{forward.scheme.format}:tensor") if forward is not None and gemm.b == "fold" else None
        for side in (gemm.a, forward if gemm.b == "reuse" else gemm.b):
            if isinstance(side, Cast):
                side.scheme.t().t()  # caches the transposed scheme, which compiled code cannot parse
        if unit is not None:
            unit.t().t()
        rotation = gemm.b.rotation(0) if isinstance(gemm.b, Cast) else None
        return cls(role, gemm.a, gemm.b, gemm.save, forward, forward_role, g_role, unit, rotation)

    def rotated(self, matrix: Tensor, is_g: bool, view: View | None) -> Tensor:
        """Transform an operand along the contracted axis: the columns of ``g`` in grad_input, else the rows."""
        if self.rotation is None or not isinstance(self.other, Cast):
            return matrix
        along_cols = is_g and self.role == "grad_input"
        if self.other.transform != "random-hadamard":
            return _TRANSFORMS[self.other.transform](matrix, self.rotation, 1 if along_cols else 0)
        assert view is not None
        signs = view.signs(self.g_role, matrix.device)
        return random_hadamard(matrix, signs) if along_cols else random_hadamard(matrix.t(), signs).t()

    @property
    def saved_cast(self) -> Cast | None:
        """The cast of the codes that forward saves for this matmul; None if it saves the float operand."""
        if self.save == "operand":
            assert isinstance(self.other, Cast)
            return self.other
        return self.forward if self.save == "codes" else None


@dataclass(frozen=True)
class Products:
    """A training recipe with its schemes resolved, so that compiled code need not do it.

    Attributes:
        stateful: whether some cast needs the training state.
        share_g: whether both backward matmuls use the same codes of ``g``.
        one_weight: whether all micro-batches of a step use the same weight operands. False with random signs, which
            each micro-batch draws separately.
        dual: the operands among ``"x"``, ``"w"`` and ``"g"`` that ``quantize_both`` quantizes for both of their
            matmuls.
    """

    input: Cast | None
    weight: Cast | None
    grad_input: Backward
    grad_weight: Backward
    stateful: bool
    share_g: bool
    one_weight: bool
    dual: frozenset[str]

    @classmethod
    def of(cls, recipe: Recipe) -> Products:
        """Raise ValueError for a recipe that is for inference only, or has a cast that training does not support."""
        if recipe.grad_input is None or recipe.grad_weight is None:
            names = ", ".join(row.name for row in RECIPES.values() if row.trains)
            raise ValueError(f"recipe {recipe.name!r} is for inference only; recipes that train: {names}")
        casts = recipe.casts(training=True)
        for role in casts:
            transforms = (*_TRANSFORMS, "random-hadamard") if role.startswith("grad") else ()
            refuse_beyond(recipe, "TrainLinear", (role,), True, transform=transforms, **_SUPPORTED)
            reason = rules.refuses(casts[role], role)
            if reason is not None:
                raise ValueError(f"recipe {recipe.name!r}: {role}: {reason}")
        stateful = any(cast.rounding != "nearest" or cast.scale == "delayed" for cast in casts.values())
        input, weight = casts.get("output.a"), casts.get("output.b")
        folds, g = "fold" in (recipe.grad_input.b, recipe.grad_weight.b), recipe.grad_input.a
        same_g = g is not None and g.rounding == "nearest" and g.transform is None and g == recipe.grad_weight.a
        share_g = same_g and not folds
        g_role = "grad_input.a" if share_g else "grad_weight.a"
        grad_input = Backward.of("grad_input", recipe.grad_input, weight, "output.b", "grad_input.a")
        grad_weight = Backward.of("grad_weight", recipe.grad_weight, input, "output.a", g_role)
        turned = isinstance(grad_input.other, Cast) and grad_input.other.transform == "random-hadamard"
        pairs = {
            "x": (input, grad_weight.saved_cast if grad_weight.save == "operand" else None),
            "w": (weight, grad_input.saved_cast if grad_input.save == "operand" else None),
            "g": (None, None) if share_g or folds else (grad_input.g, grad_weight.g),
        }
        dual = frozenset(name for name, pair in pairs.items() if _supports_dual(*pair))
        return cls(input, weight, grad_input, grad_weight, stateful, share_g, not turned, dual)

    def casts(self, recipe: Recipe) -> dict[str, Cast]:
        """The casts of ``recipe`` that are executed, by role; of a cast that both backward matmuls share, only the
        first.
        """
        casts = recipe.casts(training=True)
        return {role: how for role, how in casts.items() if not (self.share_g and role == "grad_weight.a")}


class WeightOperands(NamedTuple):
    """A weight as forward multiplies it, and the tensors saved for the gradient of the input."""

    forward: Side
    saved: tuple[Tensor, ...]

    @classmethod
    def of(cls, weight: Tensor, products: Products, view: View | None, keeps: bool) -> WeightOperands:
        if not keeps:
            return cls(_encoded(weight, products.weight, view, "output.b"), ())
        dual = "w" in products.dual
        return cls(*_both_ways(weight, products.weight, "output.b", products.grad_input, view, dual))

    @classmethod
    def given(cls, forward: Quantized) -> WeightOperands:
        """From codes that exist already, if backward multiplies the same codes."""
        return cls(forward, _parts(forward))


class _Operands(torch.autograd.Function):
    """Quantizes the operands in forward, and computes the layer's gradients in backward, once only.

    The first output only represents the matmul in the autograd graph: it has the result's shape, but storage for one
    element. The other outputs are the codes and scales of the operands, and separate ones for backward if needed:
    functions with a ``setup_context``, which torch.func needs, pass on results this way. All tensors for backward are
    saved before the matmul, so a checkpoint that recomputes a block stops before its last matmul.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(  # type: ignore[override]
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        products: Products,
        view: View | None,
        dtype: torch.dtype,
        operands: WeightOperands | None,
    ) -> tuple[Tensor, ...]:
        flat = x.reshape(-1, x.shape[-1])
        anchor = x.new_empty((), dtype=dtype).expand(*x.shape[:-1], weight.shape[0])
        dual = "x" in products.dual
        a, saved_x = _both_ways(flat, products.input, "output.a", products.grad_weight, view, dual)
        weight_codes: tuple[Tensor, ...] = ()
        for_backward: tuple[Tensor, ...] = ()
        if operands is None:
            b, saved_weight = WeightOperands.of(weight, products, view, True)
            weight_codes, for_backward = _parts(b), saved_weight if products.grad_input.save == "operand" else ()
        if products.grad_weight.save == "operand":
            for_backward += saved_x
        return anchor, *_parts(a), *weight_codes, *for_backward

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # type: ignore[override]
        x, weight, bias, products, view, _, operands = inputs
        ctx.backend, ctx.products, ctx.view = backend_now(), products, view
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        codes_x, rest = _split(output[1:], _count(products.input))
        codes_weight, rest = _split(rest, 0 if operands else _count(products.weight))
        separate = operands is None and products.grad_input.save == "operand"
        backward_weight, backward_x = _split(rest, _count(products.grad_input.saved_cast) if separate else 0)
        of_weight = {"codes": codes_weight, "operand": backward_weight}.get(products.grad_input.save, (weight,))
        if operands is not None and products.grad_input.saved_cast:
            of_weight = operands.saved
        of_x = {"codes": codes_x, "operand": backward_x}.get(products.grad_weight.save, (x,))
        wants_x, wants_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(*(of_weight if wants_x else ()), *(of_x if wants_w else ()))
        ctx.split = len(of_weight) if wants_x else 0
        ctx.shapes = (x.shape, weight.shape)
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if grad is None:
            return (None,) * 7
        products, view, saved = ctx.products, ctx.view, ctx.saved_tensors
        (shape, w_shape), (x_dtype, w_dtype, bias_dtype) = ctx.shapes, ctx.dtypes
        g = grad.reshape(-1, w_shape[0]).contiguous()  # the bias gradient is summed in one order for all strides
        grad_x = grad_w = grad_bias = first = second = None
        with on_backend(ctx.backend):
            if "g" in products.dual and all(ctx.needs_input_grad[:2]) and by_kernel(g):
                first, second = _dual_g(g, products, view)
            if ctx.needs_input_grad[0]:
                w = _restored(saved[: ctx.split], products.grad_input, view, w_shape, w_dtype)
                qg, w = _operands(g, w, products.grad_input, view, first)
                first = None
                grad_x = _product(qg, w.t(), None, x_dtype).reshape(shape)
                second = qg if products.share_g else second
                del qg, w  # frees them before the next matmul allocates its operands
            if ctx.needs_input_grad[1]:
                x_shape = torch.Size((g.shape[0], shape[-1]))
                x = _restored(saved[ctx.split :], products.grad_weight, view, x_shape, x_dtype)
                qg, x = _operands(g, x, products.grad_weight, view, second)
                grad_w = _product(qg.t(), x.t(), None, w_dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = bias_gradient(g, bias_dtype)
        return grad_x, grad_w, grad_bias, *[None] * 4


class _Forward(torch.autograd.Function):
    """The forward matmul; its gradient flows to ``anchor``, the output of ``_Operands``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(  # type: ignore[override]
        anchor: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        products: Products,
        operands: WeightOperands | None,
        *codes: Tensor,
    ) -> Tensor:
        of_x, of_weight = _split(codes, _count(products.input))
        flat = x.reshape(-1, x.shape[-1])
        a = flat if products.input is None else _quantized(of_x, products.input, flat.shape, x.dtype)
        b: Side = weight
        if operands is not None:
            b = operands.forward
        elif products.weight is not None:
            b = _quantized(of_weight[: _count(products.weight)], products.weight, weight.shape, weight.dtype)
        return _multiplied(a, b, bias, anchor.shape, anchor.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        ctx.inputs = len(inputs) - 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad, *[None] * ctx.inputs


for _function in (_Operands, _Forward):  # cached: torch reads the signature at every call, a fifth of a small layer
    _forward: Any = _function.forward
    _forward.__signature__ = inspect.signature(_forward)
_operands_of = cast(Callable[..., tuple[Tensor, ...]], _Operands.apply)
_forward_of = cast(Callable[..., Tensor], _Forward.apply)


def low_precision_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    products: Products,
    view: View | None,
    dtype: torch.dtype,
    operands: WeightOperands | None = None,
) -> Tensor:
    """``x [..., K] @ weight [N, K].T + bias [N]`` in ``dtype``.

    ``view`` is the view of the training state, for ``stateful`` products. ``operands`` are cached operands of the
    weight.
    """
    trains = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    if trains and torch.is_grad_enabled():
        anchor, *codes = _operands_of(x, weight, bias, products, view, dtype, operands)
        return _forward_of(anchor, x, weight, bias, products, operands, *codes)
    a = _encoded(x.reshape(-1, x.shape[-1]), products.input, view, "output.a")
    b = _encoded(weight, products.weight, view, "output.b") if operands is None else operands.forward
    return _multiplied(a, b, bias, torch.Size((*x.shape[:-1], weight.shape[0])), dtype)


def _encoded(x: Tensor, how: Cast | None, view: View | None, role: str, factors: Tensor | None = None) -> Side:
    """Quantize ``x``, multiplied by ``factors`` in fp32 if given; ``how`` None: leave it in floats."""
    if how is None:
        return x if factors is None else x * factors
    return rules.quantized(x, how, factors) if view is None else view.quantize(x, how, role, factors)


def _product(a: Side, b: Side, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``a @ b.T``; for two float operands torch's matmul, in the dtype of ``a``."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        y = a @ b.to(a.dtype).t()
        return (y if bias is None else y + bias).to(dtype)
    return cast(Tensor, scaled_mm(a, b, bias, out_dtype=dtype))


def _multiplied(a: Side, b: Side, bias: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """``a @ b.T + bias`` in the shape of the result, not as a view, so in-place ops and hooks work as with torch's
    Linear.
    """
    y: Tensor = torch.ops.aten._unsafe_view(_product(a, b, bias, dtype), list(shape))
    return y


def _parts(side: Side) -> tuple[Tensor, ...]:
    """The tensors of a Quantized; none for a float operand."""
    return () if isinstance(side, Tensor) else tuple(side.parts.values())


def _count(cast: Cast | None) -> int:
    """The number of ``_parts`` of an operand with this cast."""
    return 0 if cast is None else 2 + cast.scheme.affine + (cast.scheme.global_scale is not None)


def _split(tensors: Sequence[Tensor], first: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    return tuple(tensors[:first]), tuple(tensors[first:])


def _quantized(parts: Sequence[Tensor], cast: Cast, shape: torch.Size, dtype: torch.dtype) -> Quantized:
    """The inverse of ``_parts``."""
    scheme, rest = cast.scheme, list(parts[2:])
    zero_point = rest.pop(0) if scheme.affine else None
    return Quantized(parts[0], parts[1], zero_point, rest[0] if scheme.global_scale else None, scheme, shape, dtype)


def _saved_parts(product: Backward, side: Side, matrix: Tensor, view: View | None) -> tuple[Tensor, ...]:
    """The saved codes and scales of ``matrix``, which forward multiplied as ``side``."""
    if product.save == "operand":
        side = _encoded(product.rotated(matrix, is_g=False, view=view), product.saved_cast, view, f"{product.role}.b")
    return () if product.saved_cast is None else _parts(side)


def _supports_dual(first: Cast | None, second: Cast | None) -> bool:
    """Whether ``quantize_both`` supports these two casts of a matrix."""
    if first is None or second is None or first.transform is not None:
        return False
    plain = all(c.rule == "amax" and c.scale == "current" and not c.scheme.affine for c in (first, second))
    return plain and second.transform in (None, "signed-hadamard")


def _both_ways(
    matrix: Tensor, how: Cast | None, role: str, product: Backward, view: View | None, dual: bool
) -> tuple[Side, tuple[Tensor, ...]]:
    """A matrix as forward multiplies it, and the tensors saved for a backward matmul (``dual``: by one kernel)."""
    if dual:
        assert how is not None and product.saved_cast is not None
        side, other = _quantize_dual(
            matrix, (how, product.saved_cast), (role, f"{product.role}.b"), product.rotation, view
        )
        return side, _parts(other)
    encoded = _encoded(matrix, how, view, role)
    return encoded, _saved_parts(product, encoded, matrix, view)


def _dual_g(g: Tensor, products: Products, view: View | None) -> tuple[Side, Side]:
    """``g`` quantized for both backward matmuls by one kernel."""
    first, second = products.grad_input, products.grad_weight
    assert first.g is not None and second.g is not None
    return _quantize_dual(g, (first.g, second.g), (first.g_role, second.g_role), second.rotation, view)


def _quantize_dual(
    matrix: Tensor, casts: tuple[Cast, Cast], roles: tuple[str, str], block: int | None, view: View | None
) -> tuple[Quantized, Quantized]:
    if view is not None:
        return view.quantize_dual(matrix, casts, roles, block)
    return quantize_both(matrix, casts[0].scheme, casts[1].scheme, block)


def _restored(
    saved: tuple[Tensor, ...], product: Backward, view: View | None, shape: torch.Size, dtype: torch.dtype
) -> Side:
    """The other operand of a backward matmul: the saved one, or forward's codes computed again."""
    if product.saved_cast is not None:
        shape = torch.Size((saved[0].shape[0], shape[1]))  # a transform may have padded the rows
        return _quantized(saved, product.saved_cast, shape, dtype)
    matrix = saved[0].reshape(shape)
    return matrix if product.save == "high" else _encoded(matrix, product.forward, view, product.forward_role)


def _operands(
    g: Tensor, other: Side, product: Backward, view: View | None, quantized_g: Side | None = None
) -> tuple[Side, Side]:
    """Both operands as the backward matmul needs them; ``quantized_g``: the codes of ``g``, if computed already."""
    if product.other == "dequantize":
        assert isinstance(other, Quantized)
        return g, other.dequantize(g.dtype)
    factors = None
    if isinstance(product.other, Cast) and product.save != "operand":
        matrix = other if isinstance(other, Tensor) else other.dequantize(torch.float32)
        other = _encoded(product.rotated(matrix, is_g=False, view=view), product.other, view, f"{product.role}.b")
    if product.unit is not None:
        assert isinstance(other, Quantized)
        along_rows = product.role == "grad_weight"  # the rows of x are the rows of g; those of w are its columns
        factors = other.scale.float().reshape((-1, 1) if along_rows else (1, -1))
        scale = torch.ones(1, 1, device=g.device)
        other = Quantized(other.codes, scale, None, None, product.unit, other.shape, other.dtype)
    if quantized_g is None:
        quantized_g = _encoded(product.rotated(g, is_g=True, view=view), product.g, view, product.g_role, factors)
    return quantized_g, other
