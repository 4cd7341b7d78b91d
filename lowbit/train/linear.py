"""TrainLinear: a Linear whose three products, one forward and two backward, run in low precision.

Axes: M tokens, K inputs, N outputs; ``x [M, K]``, ``w [N, K]``, ``y`` and its gradient ``g [M, N]``.

The weight stays in high precision for the optimizer and is encoded anew in each forward. What backward needs is kept
once, as the codes that forward multiplied: a byte an element for FP8, transposed by striding alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lowbit import recipes
from lowbit.autograd import backend_now, on_backend
from lowbit.convert.adapters import Adapter
from lowbit.convert.engine import Task, convert, sync_fused_kernels
from lowbit.convert.quantize import measured
from lowbit.convert.report import Report
from lowbit.convert.select import DEFAULT_SKIP, plain_layers, protections
from lowbit.functional import quantize, scaled_mm
from lowbit.nn.base import forget_bound_forward, replaced_forward
from lowbit.nn.linear import result_dtype
from lowbit.quantized import Quantized
from lowbit.recipes import RECIPES, Cast, Gemm, Recipe
from lowbit.recipes import recipe as find_recipe
from lowbit.scaling import Scheme, scheme

__all__ = ["TrainLinear", "convert_", "prepare_"]


class Product(NamedTuple):
    """How one backward product encodes ``g``, and what it does with the operand that forward saved.

    ``encoded``: the scheme in which the saved operand is encoded anew, or None; ``unit``: where its scales are folded
    into ``g`` instead, the scheme that its bare codes have, or None. With neither, it is multiplied as it is.
    """

    grad: Scheme
    encoded: Scheme | None = None
    unit: Scheme | None = None


class Plan(NamedTuple):
    """A training recipe with its schemes looked up, so that compiled code need not."""

    input: Scheme
    weight: Scheme
    grad_input: Product
    grad_weight: Product

    @property
    def folds(self) -> bool:
        """Whether ``g`` is multiplied by scales, in fp32, before it is encoded."""
        return self.grad_input.unit is not None or self.grad_weight.unit is not None

    @classmethod
    def of(cls, recipe: Recipe) -> Plan:
        """Raises ValueError for a recipe that does not train, or folds scales that it cannot."""
        if recipe.grad_input is None or recipe.grad_weight is None or recipe.input is None:
            able = ", ".join(row.name for row in RECIPES.values() if row.trains)
            raise ValueError(f"recipe {recipe.name!r} is for inference only; recipes that train: {able}")
        grad_input = _product(recipe.grad_input, recipe.weight)
        grad_weight = _product(recipe.grad_weight, recipe.input)
        return cls(recipe.input, recipe.weight, grad_input, grad_weight)


def _product(gemm: Gemm, saved: Scheme) -> Product:
    assert gemm.a is not None
    grad = gemm.a.scheme
    for one in (grad, saved):
        one.t().t()  # looked up now: a scheme's transpose is parsed once
    if gemm.b == "reuse":
        return Product(grad)
    if isinstance(gemm.b, Cast):
        return Product(grad, encoded=gemm.b.scheme.t().t())
    return Product(grad, unit=scheme(f"{saved.format.name}:tensor").t().t())


class TrainLinear(nn.Linear):
    """``nn.Linear`` trained in low precision: same parameters, same ``state_dict``, same results in shape and dtype.

    Input ``[..., in_features]`` fp32, bf16 or fp16; weight fp32, bf16 or fp16. Gradients have the dtype of what they
    belong to; the bias's is summed in fp32. Recomputation (checkpointing) gives the same bits. Backward runs on the
    backend of its forward; inside torch.compile each call chooses anew.
    Raises ValueError for a recipe that is for inference only, RuntimeError for a gradient of a gradient.
    Source: docs/numerics.md section 9; recipes.Training.
    """

    lowbit_kind = "training"

    recipe: Recipe
    _plan: Plan

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        recipe: str | Recipe = "fp8",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe = find_recipe(recipe)
        self._plan = Plan.of(self.recipe)

    def forward(self, x: Tensor) -> Tensor:
        return _low_precision_linear(x, self.weight, self.bias, self._plan, result_dtype(x))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


class _LowPrecisionLinear(torch.autograd.Function):
    """The three products. Codes carry no gradient, so backward has no derivative, and raises for one."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan, dtype: torch.dtype
    ) -> Tensor:
        ctx.backend, ctx.plan = backend_now(), plan
        qx = quantize(x.reshape(-1, x.shape[-1]), plan.input)
        qw = quantize(weight, plan.weight)
        wants_x, wants_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(*(_parts(qw) if wants_x else [None] * 4), *(_parts(qx) if wants_w else [None] * 4))
        ctx.shapes = (x.shape, qw.shape, qx.shape)
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        y = cast(Tensor, scaled_mm(qx, qw, bias, out_dtype=dtype))
        return y.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        plan, saved = ctx.plan, ctx.saved_tensors
        (shape, w_shape, x_shape), (x_dtype, w_dtype, bias_dtype) = ctx.shapes, ctx.dtypes
        g = grad.reshape(-1, w_shape[0])
        g = g.float() if plan.folds else g  # once, for both products
        grad_x = grad_w = grad_bias = None
        with on_backend(ctx.backend):
            if ctx.needs_input_grad[0]:
                qw = Quantized(saved[0], saved[1], saved[2], saved[3], plan.weight, w_shape, w_dtype)
                qg, qw = _operands(g, qw, plan.grad_input, along_rows=False)
                grad_x = cast(Tensor, scaled_mm(qg, qw.t(), out_dtype=x_dtype)).reshape(shape)
            if ctx.needs_input_grad[1]:
                qx = Quantized(saved[4], saved[5], saved[6], saved[7], plan.input, x_shape, x_dtype)
                qg, qx = _operands(g, qx, plan.grad_weight, along_rows=True)
                grad_w = scaled_mm(qg.t(), qx.t(), out_dtype=w_dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = g.sum(0, dtype=torch.float32).to(bias_dtype)
        return grad_x, cast("Tensor | None", grad_w), grad_bias, None, None


_low_precision_linear = cast(Callable[..., Tensor], _LowPrecisionLinear.apply)


def _parts(q: Quantized) -> list[Tensor | None]:
    return [q.codes, q.scale, q.zero_point, q.outer_scale]


def _operands(g: Tensor, saved: Quantized, product: Product, along_rows: bool) -> tuple[Quantized, Quantized]:
    """``g`` encoded, and the saved operand as ``product`` wants it; ``along_rows``: its rows are the rows of ``g``."""
    if product.encoded is not None:
        return quantize(g, product.grad), quantize(saved.dequantize(torch.float32), product.encoded)
    if product.unit is None:
        return quantize(g, product.grad), saved
    folded = g * saved.scale.float().reshape((-1, 1) if along_rows else (1, -1))
    one = torch.ones(1, 1, device=g.device)
    bare = Quantized(saved.codes, one, None, None, product.unit, saved.shape, saved.dtype)
    return quantize(folded, product.grad), bare


def prepare_(
    model: nn.Module,
    recipe: str | Recipe | recipes.Plan | Mapping[str, str | Recipe | None] = "fp8",
    skip: Iterable[str] = DEFAULT_SKIP,
) -> Report:
    """Make the nn.Linear layers of ``model`` train in low precision, in place.

    ``recipe``: one that trains, or such recipes by layer, as for ``quantize_``. Parameters, names, hooks, checkpointing
    and optimizers that hold them stay as they are. Subclasses that compute what nn.Linear does are taken as well.
    ``skip`` and what is left as for ``quantize_``; an output layer keeps sharing its weight with an embedding.
    Raises ValueError, with the model untouched: a recipe for inference only, nothing to convert, layers that are
    prepared or quantized already or whose weight has no shape yet, a pattern without a match.
    """
    chosen = recipes.plan(recipe)
    plans = {one: Plan.of(one) for one in chosen.recipes}
    names, protect = protections(model, skip, chosen, unties=False)

    def make(layer: nn.Linear, adapter: Adapter, recipe: Recipe) -> tuple[nn.Linear, Recipe]:
        return layer, recipe

    def measure(layer: nn.Linear, made: Any, recipe: Recipe | None) -> dict[str, Any]:
        return measured(layer, layer, layer.weight.numel(), 8.0 * layer.weight.dtype.itemsize)

    def put(model: nn.Module, made: dict[int, Any]) -> None:
        for layer, recipe in made.values():
            forget_bound_forward(layer)
            layer._lowbit_class, layer.__class__ = type(layer), TrainLinear
            layer.recipe, layer._plan = recipe, plans[recipe]
        sync_fused_kernels(model)

    judge = plain_layers(only=(nn.Linear,), replaced=False)
    task = Task("train.prepare_", "nn.Linear", judge, make, measure, put, replaces=False)
    return convert(model, task, chosen, names, protect)[0]


def convert_(model: nn.Module) -> tuple[str, ...]:
    """Make every TrainLinear of ``model`` the nn.Linear it was, with what it has learned; return their names.

    Raises ValueError, with the model untouched, where a layer has got a forward of its own since.
    """
    prepared: dict[str, Any] = {name: module for name, module in model.named_modules() if type(module) is TrainLinear}
    hooked = [name or "the model" for name, layer in prepared.items() if replaced_forward(layer) is not None]
    if hooked:
        raise ValueError(
            f"the forward of {', '.join(hooked)} was replaced on the layer itself (accelerate's hooks do so), and "
            f"would go on in low precision; remove that first, then call convert_ again"
        )
    for layer in prepared.values():
        forget_bound_forward(layer)
        del layer.recipe, layer._plan
        layer.__class__ = vars(layer).pop("_lowbit_class", nn.Linear)
    sync_fused_kernels(model)
    return tuple(prepared)
