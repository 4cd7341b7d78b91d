"""Activations in few bits: what norms, activation functions and products of activations keep for backward.

A function of the table below keeps its inputs as codes, and backward computes it again from what these decode to. Its
result keeps its bits; gradients change by the rounding of the inputs.
Sources: COAT, arXiv 2410.19313; ActNN, arXiv 2104.14129.
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
from lowbit.functional import quantize
from lowbit.models.check import check_model
from lowbit.models.wrap import Wrapper, unwrap_all, wrap, wrapper_of
from lowbit.report import Report, report_on
from lowbit.scaling import Scheme
from lowbit.scaling import scheme as find_scheme
from lowbit.tensor.quantized import Quantized
from lowbit.torch_private import saved_tensors_hooks

__all__ = ["ACTIVATIONS", "FUNCTIONS", "compress_activations_", "uncompress_activations_"]

#: The scheme that is taken where none is named: 8.25 bits a number, and no block is clipped.
ACTIVATIONS = "mxfp8:ceil"

#: What keeps its inputs in few bits. Functions that keep their result for backward (softmax, sigmoid) are not here, nor
#: matrix products, whose operands are the recipe's matter, nor attention.
FUNCTIONS = frozenset(
    {
        F.layer_norm, F.rms_norm, F.group_norm,
        F.silu, F.gelu, F.mish, F.softplus, F.elu, F.hardswish,
        torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__,
        torch.pow, Tensor.pow, Tensor.__pow__, torch.square, Tensor.square,
    }
)  # fmt: skip
#: Rows shorter than this stay as they are: factors of a token, and the like.
_LEAST_COLS = 16


def compress_activations_(
    model: nn.Module,
    scheme: str | Scheme = ACTIVATIONS,
    *,
    batch: Any = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
) -> Report:
    """Let norms, activation functions and products in ``model`` keep their inputs for backward as codes, in place.

    ``scheme``: how they are quantized, without a global scale; any shape will do. The functions are those of
    ``FUNCTIONS``, called in a module without children (a norm) or in one that has a Linear (a SwiGLU). Of
    ``silu(gate) * up``, gate, silu(gate) and up are kept so. Losses keep their bits; gradients of these functions are
    those at the decoded inputs. Checkpointed modules recompute the same bits. Compiled code keeps what its partitioner
    chooses instead, and takes no part.

    ``batch`` and ``loss``: as ``lb.estimate`` takes them. With a batch the report says what activations are kept
    for backward, before and after, as estimated.

    Raises ValueError for a model whose activations are compressed already, for one without such modules, and for a
    scheme with a global scale; TypeError for what is no module.
    Source: COAT, arXiv 2410.19313, which takes groups of 16 in E4M3.
    """
    check_model(model)
    kind = find_scheme(scheme)
    if kind.global_scale:
        raise ValueError(
            f"train.compress_activations_: {kind} has a global scale, which takes a pass over each activation of its "
            f"own; use {ACTIVATIONS}, or another scheme that has none"
        )
    if any(wrapper_of(module, Compressing) for module in model.modules()):
        raise ValueError(
            "train.compress_activations_: activations of this model are compressed already; call "
            "lowbit.train.uncompress_activations_(model) first"
        )
    modules = {path: module for path, module in model.named_modules() if _computes(module)}
    if not modules:
        raise ValueError(
            f"train.compress_activations_: {type(model).__name__} has no module without children, and none with a "
            f"Linear; there is nothing whose inputs could be kept in few bits"
        )
    from lowbit.memory.kept import Kept  # memory imports this package

    kept = Kept(model, batch, loss)
    for module in model.modules():
        if _computes(module) or not isinstance(module, nn.Linear | nn.Embedding | nn.ModuleList | nn.ModuleDict):
            wrap(module, Compressing(kind if _computes(module) else None))
    return kept.told(report_on("train.compress_activations_", model, modules, f"inputs kept as {kind}"))


def uncompress_activations_(model: nn.Module) -> Report:
    """Undo ``compress_activations_``, in place. A model without compressed activations stays as it is.

    Raises ValueError, with the model untouched, where a forward has been replaced since.
    """
    check_model(model)
    removed = unwrap_all(model, "train.uncompress_activations_", Compressing)
    modules = {path: model.get_submodule(path) for path, _ in removed}
    computing = {path: module for path, module in modules.items() if _computes(module)}
    return report_on("train.uncompress_activations_", model, computing, "inputs kept as they are")


def _computes(module: nn.Module) -> bool:
    """Whether functions of the table may be called in the module's own forward."""
    children = list(module.children())
    if not children:
        return not isinstance(module, nn.Linear | nn.Embedding)
    return any(isinstance(child, nn.Linear) for child in children)


# -- where it is on ----------------------------------------------------------------------------------------------------
class _Active(threading.local):
    """Whether the module under way in this thread compresses, and the innermost mode that is there."""

    on = False
    mode: _Mode | None = None


_active = _Active()


@dataclass(eq=False)
class Compressing(Wrapper):
    """``scheme`` None: the module is not one of those whose functions keep codes, whatever it is called in."""

    scheme: Scheme | None

    def __call__(self, module: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or transformed() or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        before = _active.on, _active.mode
        _active.on = self.scheme is not None
        try:
            # A checkpoint inside the module that has the mode recomputes without it: what is called there has its own.
            if self.scheme is None or (_active.mode is not None and _active.mode.hooks == saved_tensors_hooks()):
                return forward(*args, **kwargs)
            _active.mode = _Mode(self.scheme)
            with _active.mode:
                return forward(*args, **kwargs)
        finally:
            _active.on, _active.mode = before


class _Mode(TorchFunctionMode):
    """Within, functions of the table keep codes. An input that several of them have is encoded once."""

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
        wanted = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not any(_is_activation(leaf) for leaf in wanted) or _keeps_nothing(func, wanted):
            return func(*args, **kwargs)
        return cast(Any, _FromCodes).apply(self, func, spec, *leaves)

    def _serves(self) -> bool:
        """Whether functions keep codes now. Not in a part of the module's forward that a checkpoint will recompute by
        itself: the mode will not be on there.
        """
        return _active.on and torch.is_grad_enabled() and saved_tensors_hooks() == self.hooks

    def encode(self, x: Tensor) -> Quantized:
        known = self.encoded.get(id(x))
        if known is not None and known[0]() is x and known[1] == x._version:
            return known[2]
        codes, key = quantize(x, self.scheme), id(x)
        self.encoded[key] = (weakref.ref(x, partial(_forget, weakref.ref(self), key)), x._version, codes)
        return codes


def _forget(mode: weakref.ref[_Mode], key: int, x: Any) -> None:
    """A tensor is gone. A reference to the mode would be a cycle, which keeps what its hooks hold: a block's inputs."""
    if (found := mode()) is not None:
        found.encoded.pop(key, None)


_PRODUCTS = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)


def _keeps_nothing(func: Any, wanted: Sequence[Tensor]) -> bool:
    """Whether backward needs no activation: of a product with a constant it needs the constant alone."""
    return func in _PRODUCTS and len(wanted) < 2


def _is_activation(x: Tensor) -> bool:
    """Whether ``x`` is kept as codes: no parameter, and long enough rows of floats that ops of lowbit take.

    Leaves may be activations: those of a block that a reentrant checkpoint recomputes are.
    """
    return (
        not isinstance(x, nn.Parameter)
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and x.dim() > 1
        and x.shape[-1] >= _LEAST_COLS
    )


# -- what is kept, and computed again ----------------------------------------------------------------------------------
class _FromCodes(torch.autograd.Function):
    """``func`` of leaves of a tree of arguments."""

    @staticmethod
    def forward(ctx: Any, mode: _Mode, func: Callable[..., Any], spec: TreeSpec, *leaves: Any) -> Any:  # type: ignore[override]
        device = next(leaf.device.type for leaf in leaves if isinstance(leaf, Tensor))
        ctx.func, ctx.spec, ctx.backend = func, spec, backend_now()
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        kept: list[Tensor | None] = []
        ctx.leaves = []
        for leaf in leaves:
            # In forward tensors require no grad: which of them did is what needs_input_grad says.
            number = len(ctx.leaves)
            if not isinstance(leaf, Tensor):
                ctx.leaves.append(leaf)
            elif ctx.needs_input_grad[number + 3] and _is_activation(leaf):
                codes = mode.encode(leaf)
                ctx.leaves.append(_Codes(len(kept), codes.scheme, leaf.shape, leaf.dtype))
                kept += [codes.codes, codes.scale, codes.zero_point]
            else:
                ctx.leaves.append(_Kept(len(kept)))
                kept.append(leaf)
        ctx.save_for_backward(*kept)
        args, kwargs = tree_unflatten(list(leaves), spec)
        return func(*args, **kwargs)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        kept = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        with on_backend(ctx.backend):
            leaves = [leaf.of(kept) if isinstance(leaf, _Codes | _Kept) else leaf for leaf in ctx.leaves]
        leaves = [
            leaf.detach().requires_grad_(wants) if isinstance(leaf, Tensor) else leaf
            for leaf, wants in zip(leaves, wanted, strict=True)
        ]
        args, kwargs = tree_unflatten(leaves, ctx.spec)
        with torch.enable_grad(), _autocast(*ctx.autocast):
            y = ctx.func(*args, **kwargs)
        inputs = [leaf for leaf, wants in zip(leaves, wanted, strict=True) if wants]
        found = iter(torch.autograd.grad([y], inputs, list(grads)))
        return None, None, None, *(next(found) if wants else None for wants in wanted)


class _Codes:
    """A leaf that is kept as codes: from which tensor on, and what they are."""

    def __init__(self, at: int, scheme: Scheme, shape: torch.Size, dtype: torch.dtype) -> None:
        self.at, self.scheme, self.shape, self.dtype = at, scheme, shape, dtype

    def of(self, kept: Sequence[Tensor]) -> Tensor:
        codes, scale, zero_point = kept[self.at : self.at + 3]
        return Quantized(codes, scale, zero_point, None, self.scheme, self.shape, self.dtype).dequantize()


class _Kept:
    """A leaf that is kept as it is."""

    def __init__(self, at: int) -> None:
        self.at = at

    def of(self, kept: Sequence[Tensor]) -> Tensor:
        return kept[self.at]


def _autocast(device: str, dtype: torch.dtype, enabled: bool) -> AbstractContextManager[Any]:
    return torch.autocast(device, dtype, enabled=True) if enabled else nullcontext()
