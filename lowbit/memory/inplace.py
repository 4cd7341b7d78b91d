"""Activations that write over their input, where nothing else needs it: whether one may, and a model whose do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowbit.convert.engine import report_on
from lowbit.convert.report import Report
from lowbit.convert.select import check_model
from lowbit.memory.estimate import usual_loss
from lowbit.memory.kept import Kept
from lowbit.models.batches import feed
from lowbit.models.ties import tensor_bytes
from lowbit.models.writes import held_buffers
from lowbit.sizes import amount

__all__ = ["Verdict", "inplace_", "safe_inplace"]


class _Activation(NamedTuple):
    """``needs``: what backward of the in-place form needs, the output or the input. ``backward``: the op that backward
    of the other form calls, which may read the input.
    """

    needs: str
    backward: str


#: Classes with an option ``inplace``. One that needs its input keeps a copy of it, so that nothing is saved.
_ACTIVATIONS: dict[type[nn.Module], _Activation] = {
    nn.ReLU: _Activation("output", "threshold_backward"),
    nn.LeakyReLU: _Activation("output", "leaky_relu_backward"),
    nn.RReLU: _Activation("output", "rrelu_with_noise_backward"),
    nn.ELU: _Activation("output", "elu_backward"),
    nn.CELU: _Activation("output", "elu_backward"),
    nn.SELU: _Activation("output", "elu_backward"),
    nn.ReLU6: _Activation("input", "hardtanh_backward"),
    nn.Hardtanh: _Activation("input", "hardtanh_backward"),
    nn.Threshold: _Activation("input", "threshold_backward"),
    nn.SiLU: _Activation("input", "silu_backward"),
    nn.Mish: _Activation("input", "mish_backward"),
    nn.Hardswish: _Activation("input", "hardswish_backward"),
    nn.Hardsigmoid: _Activation("input", "hardsigmoid_backward"),
}


# -- a tensor ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Verdict:
    """Whether something is safe, as a bool, and why not, None where it is."""

    reason: str | None

    def __bool__(self) -> bool:
        return self.reason is None

    def __str__(self) -> str:
        return "safe" if self.reason is None else f"not safe: {self.reason}"


def safe_inplace(tensor: Tensor) -> Verdict:
    """Whether an in-place operation on ``tensor`` leaves gradients and other tensors as they are, with the reason.

    Refused are: a leaf that requires gradients, while gradients are on; an inference tensor outside of inference mode;
    a view, whose base would change too; an expanded tensor, whose elements share memory; and what the op that made it
    keeps for backward, as sigmoid does. What ops after it keep, a tensor does not know: torch refuses backward then.
    """
    return Verdict(next((why for why, holds in _UNSAFE if holds(tensor)), None))


def _kept_by_its_producer(tensor: Tensor) -> bool:
    node = tensor.grad_fn
    if node is None:
        return False
    kept = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        kept += node.saved_tensors  # type: ignore[attr-defined]
    storage = tensor.untyped_storage()._cdata
    return any(isinstance(t, Tensor) and t.untyped_storage()._cdata == storage for t in tree_leaves(kept))


_UNSAFE: tuple[tuple[str, Callable[[Tensor], bool]], ...] = (
    (
        "it is a leaf that requires gradients; write to it under torch.no_grad()",
        lambda t: t.is_leaf and t.requires_grad and torch.is_grad_enabled(),
    ),
    (
        "it is an inference tensor, which only inference mode may change; clone it",
        lambda t: t.is_inference() and not torch.is_inference_mode_enabled(),
    ),
    (
        "it is an expanded tensor, whose elements share memory; clone it",
        lambda t: any(size > 1 and stride == 0 for size, stride in zip(t.shape, t.stride(), strict=True)),
    ),
    ("it is a view, and its base would change too; clone it", lambda t: t._is_view()),
    (
        "the op that made it keeps it for backward; clone it, or use the operation that is not in place",
        _kept_by_its_producer,
    ),
)


# -- a model -----------------------------------------------------------------------------------------------------------
def inplace_(model: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor] | None = None) -> Report:
    """Make the activations of ``model`` in place where that is safe and saves memory, and report them.

    ``batch``: a tensor is passed as it is, a tuple by position, a dict by keyword. ``loss``: of the output and
    the batch, a scalar; by default ``usual_loss``.

    One call with backward is watched. An activation changes where backward needs its output alone, and where nobody
    reads its input afterwards: no op of forward, no backward, not the caller. Then the loss, the gradients of
    parameters and the buffers must come out with equal bits; activations that change them stay as they were. Call it in
    the mode that the model trains in. Gradients, buffers and the random state are left as they are. What a forward hook
    of the caller keeps without reading it is not seen.

    Reports what changed, with the bytes that each writes over in ``notes``, what activations are kept for backward
    before and after, and why others stay. Raises ValueError
    for a compiled model, TypeError for a batch that cannot be passed and for what is no module.
    """
    check_model(model)
    if hasattr(model, "_orig_mod"):
        raise ValueError("memory.inplace_: expected a model before torch.compile, got a compiled one; compile it after")
    found = {name: m for name, m in model.named_modules() if type(m) in _ACTIVATIONS and not m.inplace}
    run = partial(_bits, model, batch, usual_loss if loss is None else loss)
    left = {
        name: "backward needs its input, of which it would keep a copy"
        for name, module in found.items()
        if _ACTIVATIONS[type(module)].needs == "input"
    }
    rest = {name: module for name, module in found.items() if name not in left}
    with _Watch(model, rest) as watch:
        expected = run()
    left |= {name: why for name in rest if (why := watch.reason(name)) is not None}
    chosen = {name: module for name, module in rest.items() if name not in left}
    if chosen and not _equal(run(), expected):
        left |= dict.fromkeys(chosen, "two runs of the model differ, so that nothing can be compared")
        chosen = {}
    for name in _changing(chosen, run, expected):
        left[name] = "the loss, a gradient or a buffer comes out with other bits"
        del chosen[name]
    kept = Kept(model, batch, loss)
    for module in chosen.values():
        module.inplace = True  # type: ignore[assignment]
    report = report_on("memory.inplace_", model, chosen, "in place")
    notes = tuple(f"{name or 'the model itself'} writes over {amount(watch.bytes[name])}" for name in chosen)
    # What an activation function made is then made by the layer before it, so that rows would mislead.
    return kept.told(replace(report, left=left, notes=notes), layers=False)


def _changing(chosen: dict[str, nn.Module], run: Callable[[], list[Tensor]], expected: list[Tensor]) -> list[str]:
    """Names of those that change what ``run`` gives: none where all together do not, else each beside those before."""

    def same(names: list[str]) -> bool:
        with _in_place([chosen[name] for name in names]):
            try:
                return _equal(run(), expected)
            except RuntimeError as error:
                if "in-place" in str(error) or "inplace" in str(error):
                    return False
                raise

    if not chosen or same(list(chosen)):
        return []
    kept: list[str] = []
    for name in chosen:
        if same([*kept, name]):
            kept.append(name)
    return [name for name in chosen if name not in kept]


@contextmanager
def _in_place(modules: list[nn.Module]) -> Iterator[None]:
    for module in modules:
        module.inplace = True  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in modules:
            module.inplace = False  # type: ignore[assignment]


def _bits(model: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor]) -> list[Tensor]:
    """The loss, the gradients and the buffers that one call gives; all of these are put back."""
    devices = {t.device for t in (*model.parameters(), *model.buffers()) if t.is_cuda}
    parameters = [p for p in model.parameters() if p.requires_grad]
    with held_buffers(model), torch.random.fork_rng(list(devices)), torch.enable_grad():
        value = loss(feed(model, batch), batch)
        grads = torch.autograd.grad(value, parameters, allow_unused=True) if value.requires_grad else ()
        return [value.detach(), *(g for g in grads if g is not None), *(b.clone() for b in model.buffers())]


def _equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        if a.dim()
        else _equal([a.reshape(1)], [b.reshape(1)])
        for a, b in zip(found, expected, strict=True)
    )


class _Watch(TorchDispatchMode):
    """Who reads the inputs of some activations after them, in one call with backward."""

    def __init__(self, model: nn.Module, activations: dict[str, nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self.activations = model, activations
        self.reasons: dict[str, str] = {}
        #: Bytes of each one's inputs.
        self.bytes = dict.fromkeys(activations, 0)
        self.called: set[str] = set()
        #: By the address of a storage: whose input it is. The storages are held, so that no address comes twice.
        self.watched: dict[int, set[str]] = {}
        self.given: set[int] = {_address(t) for t in (*model.parameters(), *model.buffers())}
        self.held: list[Any] = []

    def __enter__(self) -> _Watch:
        self.hooks = [self.model.register_forward_pre_hook(self._begin, with_kwargs=True)]
        for name, module in self.activations.items():
            self.hooks += [module.register_forward_pre_hook(partial(self._judge, name), with_kwargs=True)]
            self.hooks += [module.register_forward_hook(partial(self._watch, name), with_kwargs=True)]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self.hooks:
            hook.remove()
        self.held.clear()

    def reason(self, name: str) -> str | None:
        return self.reasons.get(name) if name in self.called else "it is not called with this batch"

    def _begin(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        self.given |= {_address(t) for t in given}
        self.held += given

    def _judge(self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.called.add(name)
        given = _input(args, kwargs)
        verdict = safe_inplace(given)
        if _address(given) in self.given:
            self.reasons[name] = "its input is a tensor that the model is given, or one of its own"
        elif not verdict:
            self.reasons[name] = f"its input cannot change: {verdict.reason}"

    def _watch(self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], __: Any) -> None:
        given = _input(args, kwargs)
        self.bytes[name] += tensor_bytes([given])
        self.watched.setdefault(_address(given), set()).add(name)
        self.held.append(given.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _makes_view(func):
            for leaf in tree_leaves((args, kwargs or {})):
                names = self.watched.get(_address(leaf), set()) if isinstance(leaf, Tensor) else set()
                for name in names:
                    own = _ACTIVATIONS[type(self.activations[name])].backward
                    if func.overloadpacket.__name__ != own:
                        self.reasons.setdefault(name, f"its input is read again, by {func.overloadpacket.__name__}")
        return func(*args, **(kwargs or {}))


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The one argument of an activation function's module."""
    given: Tensor = args[0] if args else kwargs["input"]
    return given


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


def _makes_view(func: Any) -> bool:
    """Whether an op gives its input under another shape, without reading it."""
    aliases = [value.alias_info for value in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
