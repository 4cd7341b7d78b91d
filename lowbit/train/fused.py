"""Fused layers: RMSNorm and gated MLPs of a model compute by ``lb.rms_norm`` and ``lb.swiglu``.

Layers are found by what they compute: a copy with small weights runs on random inputs and is compared with the formula.
So the names of classes and attributes do not matter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowbit.autograd import transformed
from lowbit.functional import rms_norm, swiglu
from lowbit.models.check import check_model
from lowbit.models.wrap import WRAPPERS, Wrapper, plain_class, replaced_forward, unwrap_all, wrap, wrapper_of
from lowbit.ops.spec import FLOATS
from lowbit.report import Report, report_on

__all__ = ["FusedGate", "FusedNorm", "fuse_layers_", "unfuse_layers_"]

#: Values of eps that code contains as numbers; others are attributes of the module.
_USUAL_EPS = (1e-6, 1e-5, 1e-8, 1e-12, 0.0)
#: Factors of random inputs: eps decides the result for the small ones.
_SCALES = (1.0, 1e-3, 1e-4)


def fuse_layers_(model: nn.Module, *, batch: Any = None, loss: Callable[[Any, Any], Tensor] | None = None) -> Report:
    """Make RMSNorm and gated MLPs of ``model`` compute in one pass each, in place, which saves less for backward.

    A norm saves its input and one number per row. Of ``activation(gate) * up`` the tensors gate and up are saved, not
    their product's operand ``activation(gate)``. Layers are found by what they compute, also in hand-written models:
    norms with a weight w or 1 + w, and modules with Linear layers that compute ``down(activation(gate(x)) * up(x))``
    with silu or the tanh form of gelu; gate and up may be one layer. Parameters and ``state_dict`` do not change.
    Results differ from the plain layers by roundings: all steps are fp32, and only the result is rounded. With
    ``compress_activations_``, before or after, the saved inputs are codes.

    Calls that the ops do not serve run the plain layers: float64, a weight in another dtype than the input, other
    arguments, and transforms of ``torch.func``.

    Args:
        model: the model, which is changed in place.
        batch: a batch as for ``lb.estimate``. With it, the report has the estimated bytes of activations saved for
            backward, before and after.
        loss: a loss function as for ``lb.estimate``.

    Returns:
        A report of the changed modules.

    Raises:
        ValueError: layers of the model are fused already, or none computes one of these formulas.
        TypeError: ``model`` is not a module.
    """
    check_model(model)
    if any(wrapper_of(module, FusedNorm) or wrapper_of(module, FusedGate) for module in model.modules()):
        raise ValueError(
            "train.fuse_layers_: layers of this model are fused already; call lowbit.train.unfuse_layers_(model) first"
        )
    fusable = {path: (module, wrapper) for path, module in model.named_modules() if (wrapper := _fused(module))}
    if not fusable:
        raise ValueError(
            f"train.fuse_layers_: expected RMSNorm layers or gated MLPs with silu or the tanh form of gelu, and "
            f"{type(model).__name__} has none; there is nothing to fuse"
        )
    from lowbit.memory.kept import Kept  # memory imports this package

    kept = Kept(model, batch, loss)
    for module, wrapper in fusable.values():
        wrap(module, wrapper)
    modules = {path: module for path, (module, _) in fusable.items()}
    return kept.told(report_on("train.fuse_layers_", model, modules, "fused"))


def unfuse_layers_(model: nn.Module) -> Report:
    """Undo ``fuse_layers_``, in place. A model without fused layers stays as it is.

    Raises:
        ValueError: a forward was replaced since. The model is unchanged.
    """
    check_model(model)
    removed = unwrap_all(model, "train.unfuse_layers_", FusedNorm, FusedGate)
    modules = {path: model.get_submodule(path) for path, _ in removed}
    return report_on("train.unfuse_layers_", model, modules, "as before")


# -- layers that are fused ---------------------------------------------------------------------------------------------
def _served(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call has one argument, a tensor in a dtype of the ops."""
    plain = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
    return plain and args[0].dtype in FLOATS and not transformed()


@dataclass(eq=False)
class FusedNorm(Wrapper):
    """Wrapper of an RMSNorm, whose parameter has the name ``weight``."""

    innermost: ClassVar[bool] = True

    weight: str
    eps: float
    offset: int

    def __call__(self, module: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        weight = getattr(module, self.weight)
        if not _served(args, kwargs) or args[0].dtype != weight.dtype:
            return forward(*args, **kwargs)
        return rms_norm(args[0], weight, self.eps, self.offset)


@dataclass(eq=False)
class FusedGate(Wrapper):
    """Wrapper of a gated MLP with layers of these names. ``up`` None: the layer ``gate`` makes both.

    ``up_first``: whether the first half of its result is up.
    """

    innermost: ClassVar[bool] = True

    gate: str
    up: str | None
    down: str
    activation: str
    up_first: bool = False

    def __call__(self, module: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self.compute(module, args[0]) if _served(args, kwargs) else forward(*args, **kwargs)

    def compute(self, module: nn.Module, x: Tensor, gated: Callable[..., Tensor] = swiglu) -> Any:
        """The result of the MLP by a function of gate, up and activation."""
        gate = getattr(module, self.gate)(x)
        if self.up is not None:
            up = getattr(module, self.up)(x)
        else:
            gate, up = reversed(gate.chunk(2, -1)) if self.up_first else gate.chunk(2, -1)
        return getattr(module, self.down)(gated(gate, up, self.activation))


# -- find them ---------------------------------------------------------------------------------------------------------
def _fused(module: nn.Module) -> FusedNorm | FusedGate | None:
    """The wrapper of a module that computes one of the formulas, else None."""
    if replaced_forward(module) is not None or any(b is not None for b in module._buffers.values()):
        return None
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    if not module._modules and len(parameters) == 1:
        return _norm(module, *parameters.items())
    return _gate(module) if module._modules and not parameters else None


def _stand_in(module: nn.Module, parameters: Mapping[str, Tensor], layers: Mapping[str, nn.Module]) -> nn.Module:
    """The module without wrappers in training mode, with these parameters and layers; others are copied."""
    plain = plain_class(module)
    made: nn.Module = plain.__new__(plain)
    made.__dict__.update({name: value for name, value in vars(module).items() if name != WRAPPERS})
    made._parameters = {name: nn.Parameter(p, requires_grad=False) for name, p in parameters.items()}
    made._modules = {name: layers[name] if name in layers else copy.deepcopy(m) for name, m in module._modules.items()}
    return made.train()


def _result(module: nn.Module, x: Tensor) -> Tensor | None:
    """The module's result for ``x`` if it is a tensor of its shape and dtype; None if not, or if it raises."""
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        try:
            y = type(module).forward(module, x)
        except Exception:  # the module may expect anything else
            return None
    return y if isinstance(y, Tensor) and y.dtype == x.dtype and y.shape[:-1] == x.shape[:-1] else None


def _equal(actual: Tensor | None, wanted: Tensor) -> bool:
    """Whether results agree but for roundings."""
    share = 1e-5 if wanted.dtype == torch.float32 else 0.05
    return (
        actual is not None
        and actual.shape == wanted.shape
        and torch.allclose(actual.float(), wanted.float(), rtol=share, atol=0.2 * share)
    )


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), device="cpu")


def _norm(module: nn.Module, named: tuple[str, Tensor]) -> FusedNorm | None:
    name, given = named
    if given.dim() != 1 or given.numel() < 2:
        return None
    weight = _random(given.numel())
    x = _random(len(_SCALES), 2, given.numel()) * torch.tensor(_SCALES)[:, None, None]
    y = _result(_stand_in(module, {name: weight}, {}), x)
    found = [float(value) for value in vars(module).values() if isinstance(value, float) and 0 <= value < 1e-2]
    for eps, offset in product(dict.fromkeys((*found, *_USUAL_EPS)), (0, 1)):
        if _equal(y, rms_norm(x, weight, eps, offset)):
            narrow, half = x[0].bfloat16(), weight.bfloat16()
            y = _result(_stand_in(module, {name: half}, {}), narrow)  # not an fp32 result
            return FusedNorm(name, eps, offset) if _equal(y, rms_norm(narrow, half, eps, offset)) else None
    return None


def _gate(module: nn.Module) -> FusedGate | None:
    layers = {name: layer for name, layer in module.named_children() if _is_linear(layer)}
    others = [child for name, child in module.named_children() if name not in layers]
    if len(layers) not in (2, 3) or any(True for child in others for _ in (*child.parameters(), *child.buffers())):
        return None
    for fused in _gates(layers):
        if all(_computes(module, layers, fused, dtype) for dtype in (torch.float32, torch.bfloat16)):
            return fused
    return None


def _is_linear(layer: nn.Module) -> bool:
    sizes = (getattr(layer, "in_features", None), getattr(layer, "out_features", None))
    return not any(True for _ in layer.children()) and all(isinstance(size, int) for size in sizes)


def _gates(layers: Mapping[str, Any]) -> Iterator[FusedGate]:
    """Every assignment of the layers that fits their sizes, with each activation."""
    for names, activation in product(permutations(layers), _ACTIVATIONS):
        first, down = layers[names[0]], layers[names[-1]]
        if len(names) == 2 and first.out_features == 2 * down.in_features:
            yield FusedGate(names[0], None, names[1], activation)
            yield FusedGate(names[0], None, names[1], activation, up_first=True)
        elif len(names) == 3:
            up = layers[names[1]]
            if (first.in_features, first.out_features) == (up.in_features, up.out_features) and (
                up.out_features == down.in_features
            ):
                yield FusedGate(*names, activation)


#: The activations of ``swiglu`` in torch.
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
}


def _computes(module: nn.Module, layers: Mapping[str, Any], fused: FusedGate, dtype: torch.dtype) -> bool:
    """Whether a small copy of the module computes what ``fused`` does."""
    width, hidden = 8, 16
    first = layers[fused.gate]
    outputs = width if layers[fused.down].out_features == first.in_features else width + 1
    small: dict[str, nn.Module] = {fused.down: _small_linear(hidden, outputs, 0, dtype)}
    small[fused.gate] = _small_linear(width, hidden if fused.up is not None else 2 * hidden, 1, dtype)
    if fused.up is not None:
        small[fused.up] = _small_linear(width, hidden, 2, dtype)
    stand_in, x = _stand_in(module, {}, small), 3 * _random(2, 5, width).to(dtype)
    with torch.no_grad():
        wanted = fused.compute(stand_in, x, lambda gate, up, activation: _ACTIVATIONS[activation](gate) * up)
    return _equal(_result(stand_in, x), wanted)


def _small_linear(inputs: int, outputs: int, seed: int, dtype: torch.dtype) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, device="meta")
    for number, name in enumerate(("weight", "bias")):
        shape = getattr(layer, name).shape
        numbers = torch.randn(shape, generator=torch.Generator().manual_seed(2 * seed + number), device="cpu")
        setattr(layer, name, nn.Parameter((numbers / 4).to(dtype), requires_grad=False))
    return layer
