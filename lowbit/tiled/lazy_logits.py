"""``LazyLogits``: the output of a last layer, which is computed only if something other than a cross-entropy reads it.

A tensor of this class stores the layer's input instead of logits. Views of batch and token axes, moves of the class
axis and casts to fp32 return such tensors again. ``F.cross_entropy`` then computes the loss tile by tile
(``lowbit.tiled.loss``). Every other operation computes the logits once and runs on them, so results and gradients are
those of plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lowbit.models.ties import storage
from lowbit.tiled.class_axis import carried, has_tensors, selected
from lowbit.tiled.head_call import REMEDY, HeadCall
from lowbit.tiled.loss import linear_cross_entropy
from lowbit.torch_private import make_wrapper_subclass, without_modes

__all__ = ["LazyLogits", "lazy_logits"]


class _Source(NamedTuple):
    """Everything from which logits can be computed.

    Attributes:
        call: The call of the last layer.
        hidden: Inputs of the layer ``[..., features]``.
        axis: Position of the class axis among the axes of the logits; the other axes are those of ``hidden``.
        shape: Shape of the logits.
        stride: Strides that plain logits would have.
        dtype: Dtype of the logits, into which the products are cast.
    """

    call: HeadCall
    hidden: Tensor
    axis: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def computed(self) -> Tensor:
        """Return the logits."""
        logits = self.call.multiplied(self.hidden).movedim(-1, self.axis).to(self.dtype)
        if all(size < 2 or a == b for size, a, b in zip(self.shape, logits.stride(), self.stride, strict=True)):
            return logits
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=logits.device).copy_(logits)

    def outline(self) -> Tensor:
        """Return a meta tensor with shape, strides and dtype of the logits."""
        with without_modes():
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class _Shared:
    """The memory that views of one tensor share.

    Attributes:
        source: Source of the whole tensor.
        tracked: Whether it has gradients.
        value: The tensor, once it was computed.
    """

    def __init__(self, source: _Source, tracked: bool) -> None:
        self.source, self.tracked = source, tracked
        self.value: Tensor | None = None
        self._version = 0

    def compute(self) -> Tensor:
        if self.value is None:
            with torch.inference_mode(False), torch.set_grad_enabled(self.tracked):
                self.value = self.source.computed()
            self._version = self.value._version
        return self.value

    @property
    def is_written(self) -> bool:
        """Whether the tensor was written to since it was computed."""
        return self.value is not None and self.value._version != self._version


class LazyLogits(Tensor):
    """Logits of a ``HeadCall`` that are not computed yet. ``lazy_logits`` creates the first."""

    _source: _Source
    _shared: _Shared
    _steps: tuple[Callable[[Tensor], Tensor], ...]  # the views that lead from the shared tensor to this one
    _value: Tensor | None
    _node: Any  # the autograd node of this tensor; another one follows if an autograd function returns the tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, LazyLogits) and first._shared.value is None:
            if func in _FACTS:
                return _known(func, *args, **kwargs)
            rule = _RULES.get(func) if _node(first) is first._node else None
            result = NotImplemented if rule is None else rule(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        name = getattr(func, "__name__", str(func))
        read = tree_map_only(LazyLogits, lambda logits: logits._read(name), (args, kwargs))
        return func(*read[0], **read[1])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run operations of code that skips ``__torch_function__``, such as that around an autograd function."""
        if func._schema.is_mutable:
            raise RuntimeError(f"memory.fuse_loss_: {func} writes to logits that are not computed; {REMEDY}")
        read = tree_map_only(LazyLogits, lambda logits: logits._read_below_autograd(str(func)), (args, kwargs or {}))
        return func(*read[0], **read[1])

    @classmethod
    def __tensor_flatten__(cls) -> tuple[list[str], None]:
        """Return the names of inner tensors: none is allocated for it."""
        return [], None

    def before_backward(self, run: Callable[[Any], object]) -> None:
        """Run a function when a backward pass reaches the logits or a loss of them. Nothing is computed for it.

        Args:
            run: Takes gradients, which it must not change.
        """
        if _is_tracked(self):
            self._source.call.before_backward.append(run)

    def _read(self, name: str) -> Tensor:
        """Return the logits as a plain tensor."""
        call, node = self._source.call, _node(self)
        call.read_by(name if node is self._node or node is None else node.name())
        if self._value is None:
            value = self._shared.compute()
            with torch.inference_mode(False), torch.set_grad_enabled(_is_tracked(self)):
                for step in self._steps:
                    value = step(value)
            self._value = value
        if node is not self._node:
            with torch.inference_mode(False), torch.enable_grad():
                followed = _Followed.apply(self, self._value.detach())  # type: ignore[no-untyped-call]
            self._value, self._node = call.announced(followed), node
        return self._value

    def _read_below_autograd(self, name: str) -> Tensor:
        self._source.call.read_by(name)
        if self._shared.is_written:
            raise RuntimeError(f"memory.fuse_loss_: {name} reads logits that were written to in place; {REMEDY}")
        return self._untracked()

    def _untracked(self) -> Tensor:
        """Return the logits without gradients; they are not stored."""
        with torch.no_grad():
            return self._source._replace(hidden=self._source.hidden.detach()).computed()

    def _derived(self, hidden: Tensor, axis: int, outline: Tensor, step: Callable[[Tensor], Tensor] | None) -> Tensor:
        """Return logits of ``hidden``: a view, if ``step`` leads there from this tensor, or else a copy."""
        call = self._source.call
        source = _Source(call, hidden, axis, tuple(outline.shape), outline.stride(), outline.dtype)
        with torch.set_grad_enabled(torch.is_grad_enabled() and _is_tracked(self)):
            if step is None:
                return _made(source)
            return _made(source, self._shared, (*self._steps, step))


def lazy_logits(call: HeadCall, hidden: Tensor) -> Tensor:
    """Return the logits of ``hidden`` ``[..., features]`` as ``LazyLogits`` ``[..., classes]``."""
    shape = (*hidden.shape[:-1], len(call.weight))
    with without_modes():
        outline = torch.empty(shape, dtype=call.dtype, device="meta")
    return _made(_Source(call, hidden, hidden.dim() - 1, shape, outline.stride(), call.dtype))


def _made(source: _Source, shared: _Shared | None = None, steps: tuple[Any, ...] = ()) -> Tensor:
    call = source.call
    logits: Any = _Logits.apply(source.hidden, call.weight, call.bias, source)  # type: ignore[no-untyped-call]
    logits._source, logits._steps, logits._value, logits._node = source, steps, None, _node(logits)
    logits._shared = _Shared(source, _is_tracked(logits)) if shared is None else shared
    return logits  # type: ignore[no-any-return]


def _is_tracked(logits: Any) -> bool:
    """Return whether the logits have gradients, without computing them."""
    return bool(_known(Tensor.requires_grad.__get__, logits))  # type: ignore[attr-defined]


def _node(logits: Any) -> Any:
    """Return the ``grad_fn`` of the logits, without computing them."""
    return _known(Tensor.grad_fn.__get__, logits)  # type: ignore[union-attr]


def _known(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function of ``_FACTS`` as for a plain tensor."""
    return Tensor.__torch_function__(func, (), args, kwargs)  # type: ignore[no-untyped-call]


class _Logits(torch.autograd.Function):
    """Creates ``LazyLogits``. Its backward runs only if something reads them below ``__torch_function__``."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, source: _Source) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.source = source
        return make_wrapper_subclass(  # type: ignore[no-any-return]
            LazyLogits, source.shape, strides=source.stride, dtype=source.dtype, device=hidden.device, storage_size=0
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if grad is None:
            return None, None, None, None
        source = ctx.source
        source.call.reached(grad)
        hidden, weight, bias, dtype = source.hidden, source.call.weight, source.call.bias, source.call.dtype
        grad = grad.movedim(source.axis, -1).to(dtype)
        rows = grad.reshape(-1, grad.shape[-1])
        wanted = ctx.needs_input_grad
        with source.call.without_autocast(hidden):
            return (
                (grad @ weight.to(dtype)).to(hidden.dtype) if wanted[0] else None,
                (rows.t() @ hidden.reshape(-1, hidden.shape[-1]).to(dtype)).to(weight.dtype) if wanted[1] else None,
                rows.sum(0).to(bias.dtype) if wanted[2] else None,
                None,
            )


class _Followed(torch.autograd.Function):
    """Gives computed logits the gradient of ``LazyLogits`` that an autograd function has returned."""

    @staticmethod
    def forward(ctx: Any, logits: LazyLogits, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


# -- rules: functions of lazy logits that need no values. They return NotImplemented for other calls -------------------
def _viewed(func: Any, logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """Views of batch and token axes, and moves of the class axis. A reshape may copy."""
    source = logits._source
    if func is Tensor.__getitem__ and has_tensors(args[0]):
        rows = selected(source.hidden, source.axis, args[0])
        if rows is None:
            return NotImplemented
        shape = (*rows.shape[:-1], source.shape[source.axis])
        with without_modes():
            outline = torch.empty(shape, dtype=source.dtype, device="meta")
        return logits._derived(rows, len(shape) - 1, outline, None)
    outline = source.outline()
    with without_modes():
        try:
            outlines = func(outline, *args, **kwargs)
        except NotImplementedError:
            return NotImplemented
    if any(like.dtype != source.dtype for like in _listed(outlines)):
        return NotImplemented
    results = carried(source.hidden, source.axis, source.shape, lambda probe: func(probe, *args, **kwargs))
    if results is None:
        return NotImplemented
    made = []
    for place, (like, (hidden, axis)) in enumerate(zip(_listed(outlines), results, strict=True)):
        is_view = storage(like) == storage(outline)
        step = partial(_step, place, func, args, kwargs) if is_view else None
        made.append(logits._derived(hidden, axis, like, step))
    return made[0] if isinstance(outlines, Tensor) else type(outlines)(made)


def _step(place: int, func: Any, args: Any, kwargs: Any, value: Tensor) -> Tensor:
    return _listed(func(value, *args, **kwargs))[place]


def _copied(func: Any, logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """``contiguous`` and ``clone``."""
    outline = logits._source.outline()
    with without_modes():
        like = func(outline, *args, **kwargs)
    return logits if like is outline else logits._derived(logits._source.hidden, logits._source.axis, like, None)


def _detached(func: Any, logits: LazyLogits) -> Any:
    source = logits._source
    with torch.no_grad():
        return logits._derived(source.hidden.detach(), source.axis, source.outline(), Tensor.detach)


def _cast(func: Any, logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """``float`` and ``to``: no change, or 16 bits to fp32, in which the loss is computed anyway."""
    source = logits._source
    wanted = {torch.float32} if func is Tensor.float else set()
    for value in (*args, *(value for key, value in kwargs.items() if key != "non_blocking")):
        if isinstance(value, torch.dtype):
            wanted.add(value)
        elif not isinstance(value, str | torch.device) or torch.device(value) != source.hidden.device:
            return NotImplemented
    if wanted <= {source.dtype}:
        return logits
    if wanted != {torch.float32} or source.dtype.itemsize != 2:
        return NotImplemented
    with without_modes():
        outline = source.outline().float()
    return logits._derived(source.hidden, source.axis, outline, None)


def _highest(func: Any, logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """``argmax``, which has no gradient: the logits are freed afterwards."""
    return func(logits._untracked(), *args, **kwargs)


def _cross_entropy(
    func: Any, logits: LazyLogits, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """``F.cross_entropy`` of class indices, with its parameters."""
    source, call = logits._source, logits._source.call
    shape = list(source.shape)
    classes = shape.pop(source.axis)
    is_plain = (
        isinstance(target, Tensor)
        and not isinstance(target, LazyLogits)
        and target.dtype == torch.int64
        and list(target.shape) == shape
        and source.axis == min(1, len(shape))
        and size_average is None
        and reduce is None
        and reduction in ("none", "mean", "sum")
        and 0 <= label_smoothing <= 1
    )
    weighted = weight is not None
    if not is_plain or (weighted and (label_smoothing or tuple(weight.shape) != (classes,))):
        return NotImplemented
    call.fused = True
    hidden, dtype = source.hidden, source.dtype
    if torch.is_autocast_enabled(hidden.device.type) and dtype != torch.float64:
        dtype = torch.float32
    with torch.set_grad_enabled(torch.is_grad_enabled() and _is_tracked(logits)), call.without_autocast(hidden):
        rows, matrix, bias = call.operands(hidden)
        loss = call.announced(linear_cross_entropy(
            rows, matrix, target, bias, ignore_index=ignore_index, reduction="none" if weighted else reduction,
            label_smoothing=label_smoothing, rounded=True,
        ))  # fmt: skip
        if weighted:
            loss = _weighted(loss, target, weight, ignore_index, reduction)
        return loss.to(dtype)


def _weighted(losses: Tensor, target: Tensor, weight: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """Multiply the loss of each row by the weight of its class, and reduce. The mean is over weights."""
    counted = target != ignore_index
    weights = torch.where(counted, weight.to(losses.dtype)[torch.where(counted, target, 0)], 0)
    losses = losses * weights
    if reduction == "none":
        return losses
    return losses.sum() / weights.sum() if reduction == "mean" else losses.sum()


def _listed(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def _named(*names: str) -> list[Any]:
    """Return the functions of these names, as methods and as functions of torch."""
    return [getattr(owner, name) for name in names for owner in (Tensor, torch) if hasattr(owner, name)]


_VIEWS = _named(
    "view", "reshape", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze", "transpose",
    "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "t", "narrow", "select", "split", "tensor_split", "chunk",
    "unbind", "expand", "__getitem__",
)  # fmt: skip

_RULES: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    **dict.fromkeys((*_VIEWS, Tensor.T.__get__, Tensor.mT.__get__), _viewed),  # type: ignore[attr-defined]
    **dict.fromkeys((Tensor.contiguous, *_named("clone")), _copied),
    **dict.fromkeys(_named("detach"), _detached),
    **dict.fromkeys((Tensor.float, Tensor.to), _cast),
    **dict.fromkeys(_named("argmax"), _highest),
}

#: Facts that are known without values.
_FACTS = {
    *(getattr(Tensor, name).__get__ for name in (
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "is_leaf", "_version", "_base",
        "itemsize", "nbytes",
        "is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "is_sparse", "is_quantized", "is_nested",
    )),
    *_named(
        "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "is_contiguous", "get_device",
        "is_floating_point", "is_complex", "element_size", "is_inference", "__len__",
    ),
}  # fmt: skip
