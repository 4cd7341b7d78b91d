"""Low-bit activations: save the inputs of norms, activation functions and elementwise products for backward as codes.

A function of the table ``FUNCTIONS`` saves its inputs as codes, and backward computes it again from the decoded inputs.
Its result is bit-identical; gradients differ by the rounding of the inputs. Sources: COAT, arXiv 2410.19313; ActNN,
arXiv 2104.14129.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lowbit.autograd import backend_now, first_order, on_backend, transformed
from lowbit.functional import quantize, rms_norm, swiglu
from lowbit.models.check import check_model
from lowbit.models.wrap import Wrapper, unwrap_all, wrap, wrapper_of
from lowbit.report import Report, report_on
from lowbit.scaling import Scheme
from lowbit.scaling import scheme as find_scheme
from lowbit.tensor.quantized import Quantized
from lowbit.torch_private import saved_tensors_hooks
from lowbit.train.linear import TrainLayer
from lowbit.train.states import State

__all__ = ["ACTIVATIONS", "FUNCTIONS", "compress_activations_", "uncompress_activations_"]

#: The default scheme: 8.25 bits per element, and no block is clipped.
ACTIVATIONS = "mxfp8:ceil"

#: The functions whose inputs are saved as codes. Not included are functions that save their result (softmax, sigmoid),
#: matmuls, whose operands the recipe decides, and attention.
FUNCTIONS = frozenset(
    {
        F.layer_norm, F.rms_norm, F.group_norm,
        F.silu, F.gelu, F.mish, F.softplus, F.elu, F.hardswish,
        torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__,
        rms_norm, swiglu,
        torch.pow, Tensor.pow, Tensor.__pow__, torch.square, Tensor.square,
    }
)  # fmt: skip
#: Shorter rows are saved as they are: they are per-token factors and the like.
_LEAST_COLS = 16


def compress_activations_(
    model: nn.Module,
    scheme: str | Scheme = ACTIVATIONS,
    *,
    batch: Any = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
) -> Report:
    """Make norms, activation functions and products in ``model`` save their inputs for backward as codes, in place.

    The functions are those of ``FUNCTIONS``, if called in a module without children (a norm) or in a module with a
    Linear (a SwiGLU). Of ``silu(gate) * up`` the tensors gate, silu(gate) and up are saved as codes. Losses are
    bit-identical; gradients of these functions are computed at the decoded inputs. Checkpointed modules recompute
    bit-identically. Compiled code is not affected: its partitioner chooses what to save. Source: COAT, arXiv
    2410.19313, which uses groups of 16 in E4M3.

    Args:
        model: the model, which is changed in place.
        scheme: a scheme without a global scale, for tensors of any shape.
        batch: a batch as for ``lb.estimate``. With it, the report has the estimated bytes of activations saved for
            backward, before and after.
        loss: a loss function as for ``lb.estimate``.

    Returns:
        A report of the modules whose functions save codes.

    Raises:
        ValueError: the activations are compressed already, the model has no such modules, or the scheme has a global
            scale.
        TypeError: ``model`` is not a module.
    """
    check_model(model)
    resolved = find_scheme(scheme)
    if resolved.global_scale:
        raise ValueError(
            f"train.compress_activations_: {resolved} has a global scale, which needs an extra pass over each "
            f"activation; use {ACTIVATIONS}, or another scheme without a global scale"
        )
    if any(wrapper_of(module, Compressing) for module in model.modules()):
        raise ValueError(
            "train.compress_activations_: activations of this model are compressed already; call "
            "lowbit.train.uncompress_activations_(model) first"
        )
    modules = {path: module for path, module in model.named_modules() if _computes(module)}
    if not modules:
        raise ValueError(
            f"train.compress_activations_: expected modules without children or with a Linear, and "
            f"{type(model).__name__} has none; there is nothing to compress"
        )
    from lowbit.memory.kept import Kept  # memory imports this package

    kept = Kept(model, batch, loss)
    for module in model.modules():
        if _computes(module) or not isinstance(module, nn.Linear | nn.Embedding | nn.ModuleList | nn.ModuleDict):
            wrap(module, Compressing(resolved if _computes(module) else None))
    return kept.told(report_on("train.compress_activations_", model, modules, f"inputs saved as {resolved}"))


def uncompress_activations_(model: nn.Module) -> Report:
    """Undo ``compress_activations_``, in place. A model without compressed activations stays as it is.

    Raises:
        ValueError: a forward was replaced since. The model is unchanged.
    """
    check_model(model)
    removed = unwrap_all(model, "train.uncompress_activations_", Compressing)
    modules = {path: model.get_submodule(path) for path, _ in removed}
    computing = {path: module for path, module in modules.items() if _computes(module)}
    return report_on("train.uncompress_activations_", model, computing, "inputs saved as they are")


def _computes(module: nn.Module) -> bool:
    """Whether the module's own forward may call functions of the table."""
    children = list(module.children())
    if not children:
        return not isinstance(module, nn.Linear | nn.Embedding | TrainLayer | State)
    return any(isinstance(child, nn.Linear) for child in children)


# -- modules that compress ---------------------------------------------------------------------------------------------
class _Active(threading.local):
    """Whether the module that runs in this thread compresses, and the innermost active mode."""

    on = False
    mode: _Mode | None = None


_active = _Active()


@dataclass(eq=False)
class Compressing(Wrapper):
    """Wrapper of a module's forward; ``scheme`` None: its functions do not save codes, whatever module calls it."""

    scheme: Scheme | None

    def __call__(self, module: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or transformed() or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        before = _active.on, _active.mode
        _active.on = self.scheme is not None
        try:
            # A checkpoint inside the module that entered the mode recomputes without it, so modules there enter theirs.
            if self.scheme is None or (_active.mode is not None and _active.mode.hooks == saved_tensors_hooks()):
                return forward(*args, **kwargs)
            _active.mode = _Mode(self.scheme)
            with _active.mode:
                return forward(*args, **kwargs)
        finally:
            _active.on, _active.mode = before


class _Mode(TorchFunctionMode):
    """While active, functions of the table save codes. A tensor that several functions read is encoded once."""

    def __init__(self, scheme: Scheme) -> None:
        super().__init__()
        self.scheme, self.hooks = scheme, saved_tensors_hooks()
        self.encoded: dict[int, tuple[weakref.ref[Tensor], int, Quantized]] = {}

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in FUNCTIONS or kwargs.get("inplace") or not self._serves():
            return func(*args, **kwargs)
        leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
        trainable = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not any(_is_activation(leaf) for leaf in trainable) or _keeps_nothing(func, trainable):
            return func(*args, **kwargs)
        return cast(Any, _FromCodes).apply(self, func, spec, *leaves)

    def _serves(self) -> bool:
        """Whether functions save codes now. Not inside a checkpoint in the module: the mode is not active when it
        recomputes.
        """
        return _active.on and torch.is_grad_enabled() and saved_tensors_hooks() == self.hooks

    def encode(self, x: Tensor) -> Quantized:
        entry = self.encoded.get(id(x))
        if entry is not None and entry[0]() is x and entry[1] == x._version:
            return entry[2]
        codes, key = quantize(x, self.scheme), id(x)
        self.encoded[key] = (weakref.ref(x, partial(_forget, weakref.ref(self), key)), x._version, codes)
        return codes


def _forget(mode_ref: weakref.ref[_Mode], key: int, x: Any) -> None:
    """Drop a freed tensor's codes. The reference is weak because a cycle would keep the inputs of a block alive."""
    if (mode := mode_ref()) is not None:
        mode.encoded.pop(key, None)


_PRODUCTS = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)


def _keeps_nothing(func: Any, trainable: Sequence[Tensor]) -> bool:
    """Whether backward needs no activation: for a product with a constant it needs only the constant."""
    return func in _PRODUCTS and len(trainable) < 2


def _is_activation(x: Tensor) -> bool:
    """Whether ``x`` is saved as codes: not a parameter, and a float tensor with rows long enough.

    Leaf tensors may be activations: a reentrant checkpoint detaches the inputs of the block that it recomputes.
    """
    return (
        not isinstance(x, nn.Parameter)
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and x.dim() > 1
        and x.shape[-1] >= _LEAST_COLS
    )


# -- save for backward and recompute -----------------------------------------------------------------------------------
class _FromCodes(torch.autograd.Function):
    """Call ``func`` with the leaves of a pytree of arguments; backward calls it again with decoded leaves."""

    @staticmethod
    def forward(ctx: Any, mode: _Mode, func: Callable[..., Any], spec: TreeSpec, *leaves: Any) -> Any:  # type: ignore[override]
        device = next(leaf.device.type for leaf in leaves if isinstance(leaf, Tensor))
        ctx.func, ctx.spec, ctx.backend = func, spec, backend_now()
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        saved: list[Tensor | None] = []
        ctx.leaves = []
        for leaf in leaves:
            # Tensors do not require grad inside forward; needs_input_grad says which of them did.
            number = len(ctx.leaves)
            if not isinstance(leaf, Tensor):
                ctx.leaves.append(leaf)
            elif ctx.needs_input_grad[number + 3] and _is_activation(leaf):
                codes = mode.encode(leaf)
                ctx.leaves.append(_Codes(len(saved), codes.scheme, leaf.shape, leaf.dtype))
                saved += [codes.codes, codes.scale, codes.zero_point]
            else:
                ctx.leaves.append(_Kept(len(saved)))
                saved.append(leaf)
        ctx.save_for_backward(*saved)
        args, kwargs = tree_unflatten(list(leaves), spec)
        return func(*args, **kwargs)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        saved = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        with on_backend(ctx.backend):
            leaves = [leaf.of(saved) if isinstance(leaf, _Codes | _Kept) else leaf for leaf in ctx.leaves]
        leaves = [
            leaf.detach().requires_grad_(wants) if isinstance(leaf, Tensor) else leaf
            for leaf, wants in zip(leaves, needed, strict=True)
        ]
        args, kwargs = tree_unflatten(leaves, ctx.spec)
        with torch.enable_grad(), _autocast(*ctx.autocast):
            y = ctx.func(*args, **kwargs)
        inputs = [leaf for leaf, wants in zip(leaves, needed, strict=True) if wants]
        grads_of_inputs = iter(torch.autograd.grad([y], inputs, list(grads)))
        return None, None, None, *(next(grads_of_inputs) if wants else None for wants in needed)


class _Codes:
    """A leaf that is saved as codes; ``at``: index of its first saved tensor."""

    def __init__(self, at: int, scheme: Scheme, shape: torch.Size, dtype: torch.dtype) -> None:
        self.at, self.scheme, self.shape, self.dtype = at, scheme, shape, dtype

    def of(self, saved: Sequence[Tensor]) -> Tensor:
        codes, scale, zero_point = saved[self.at : self.at + 3]
        return Quantized(codes, scale, zero_point, None, self.scheme, self.shape, self.dtype).dequantize()


class _Kept:
    """A leaf that is saved as it is; ``at``: index of the saved tensor."""

    def __init__(self, at: int) -> None:
        self.at = at

    def of(self, saved: Sequence[Tensor]) -> Tensor:
        return saved[self.at]


def _autocast(device: str, dtype: torch.dtype, enabled: bool) -> AbstractContextManager[Any]:
    return torch.autocast(device, dtype, enabled=True) if enabled else nullcontext()
