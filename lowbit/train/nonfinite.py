"""find_nonfinite: rerun a step and locate the first NaN or Inf, by layer and operand or result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from lowbit.autograd import in_backward
from lowbit.models.writes import held_buffers
from lowbit.optim.watch import all_finite
from lowbit.recipes import Cast
from lowbit.tensor.quantized import Quantized
from lowbit.torch_private import gradient_hooks, set_gradient_hooks
from lowbit.train.linear import TrainLayer
from lowbit.train.states import State
from lowbit.train.view import View
from lowbit.train.watcher import observed

__all__ = ["NonFinite", "find_nonfinite"]

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

#: Per kind of tensor, its name and the likely cause; ``{who}`` is the module. The role of a parameter is its name, the
#: role of its gradient ``grad_`` and its name, and the role of a matmul operand the name of its cast.
_SENTENCES = {
    "input": ("the input of {who}", "the modules before it gave finite results, so look at the batch or the calling "
              "code"),
    "output": ("the output of {who}", "its inputs and weights are finite"),
    "loss": ("the loss", "the outputs of all modules are finite"),
    "grad_output": ("the gradient that reaches the output of {who}", "forward and the gradients after it are finite, "
                    "so look at the loss, or at code between it and the next module"),
    "grad_input": ("the gradient that {who} passes to its input", "the gradient that reached it is finite"),
    "parameter": ("{role} of {who}", "present before its forward, so look at the previous optimizer step or at the "
                  "loaded weights"),
    "gradient": ("{role} of {who}", "the gradient that reached it is finite"),
    "operand": ("the operand {role} of {who}", "it is finite before the cast, so scaling or quantizing it overflows"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """The first tensor of a step with NaN or Inf; ``str()`` of it is a sentence.

    Attributes:
        path: name of the module in the model.
        kind: class of the module.
        role: ``input``, ``output``, ``loss``, ``grad_output``, ``grad_input``, a parameter's name such as ``weight``,
            its gradient such as ``grad_weight``, or an operand of a TrainLinear such as ``grad_weight.a``.
        told: key of the table of sentences.
        elements: number of elements of the tensor.
        nans: number of NaN.
        infs: number of Inf.
    """

    path: str
    kind: str
    role: str
    told: str
    elements: int
    nans: int
    infs: int

    def __str__(self) -> str:
        subject, why = _SENTENCES[self.told]
        who = f"{self.path} ({self.kind})" if self.path else f"the model ({self.kind})"
        counts = " and ".join(f"{count:,} {what}" for count, what in ((self.nans, "NaN"), (self.infs, "Inf")) if count)
        return f"{subject.format(who=who, role=self.role)} has {counts} among {self.elements:,} elements; {why}"


def find_nonfinite(model: nn.Module, step: Callable[[], Any]) -> NonFinite | None:
    """Run a step again and return its first tensor with Inf or NaN, in the order of computation.

    Every module is checked, prepared or not: inputs, parameters and outputs in forward, then the gradients of outputs,
    operands, parameters and inputs. An input with only -Inf is ignored as a mask. The search stops at the first match.
    No optimizer step is taken.

    The step starts with the first micro-batch of the model's training state. Hooks of
    ``register_post_accumulate_grad_hook`` do not run, because optimizers that step in the backward pass use them.
    Gradients, buffers, random state and training state are restored afterwards. Checkpointing works as usual; compiled
    code runs uncompiled.

    Args:
        model: the model that ``step`` calls.
        step: runs a forward and returns the loss, whose backward pass this function runs. A step that runs backward
            itself returns None.

    Returns:
        The first tensor with Inf or NaN, or None if there is none. Exceptions of ``step`` are passed on.
    """
    model = getattr(model, "_orig_mod", model)
    search = _Search()
    with _restored(model), search.hooks(model), torch.compiler.set_stance("force_eager"):
        try:
            loss = step()
            if isinstance(loss, Tensor):
                search.check(loss, "", model, "loss", "loss")
                if loss.requires_grad:
                    torch.autograd.backward(loss)
        except _Stop:
            pass
    return search.found


class _Stop(Exception):
    """Ends the step when the search is over."""


class _Marked(torch.autograd.Function):
    """A module's own copy of its input, so that the gradient it passes back can be checked separately."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, look: Callable[[Tensor], None]) -> Tensor:  # type: ignore[override]
        ctx.look = look
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.look(grad)
        return grad, None


_marked = cast(Callable[[Tensor, Callable[[Tensor], None]], Tensor], _Marked.apply)


def _is_weight(x: Tensor) -> bool:
    """Whether a tensor is a parameter or a view of one. A hook of the parameter checks its gradient."""
    return isinstance(x if x._base is None else x._base, nn.Parameter)


class _Search:
    """The result of the search, and the hooks that check tensors."""

    def __init__(self) -> None:
        self.found: NonFinite | None = None

    def check(self, x: Any, path: str, module: nn.Module, role: str, sentence: str) -> None:
        """If ``x`` is a tensor with Inf or NaN, record it with a key of ``_SENTENCES`` and end the step."""
        if self.found is not None or not isinstance(x, Tensor) or x.dtype not in _FLOATS or all_finite(x.detach()):
            return
        nans, infs = int(x.isnan().sum()), int(x.isinf().sum())
        if sentence == "input" and not nans and not bool((x == torch.inf).any()):
            return
        kind = type(module).__name__
        self.found = NonFinite(
            path=path, kind=kind, role=role, told=sentence, elements=x.numel(), nans=nans, infs=infs
        )  # fmt: skip
        raise _Stop

    @contextmanager
    def hooks(self, model: nn.Module) -> Iterator[None]:
        """Check every module of ``model`` while active."""
        handles: list[RemovableHandle] = []
        modules = dict(model.named_modules())
        layers = [module for module in modules.values() if isinstance(module, TrainLayer)]
        before = [layer.watcher for layer in layers]
        owned: set[int] = set()
        for path, module in modules.items():
            if isinstance(module, State):
                continue
            handles.append(module.register_forward_pre_hook(partial(self._enter, path), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(self._leave, path)))
            for name, param in module.named_parameters(recurse=False):
                if param.requires_grad and id(param) not in owned:
                    owned.add(id(param))
                    look = partial(self.check, path=path, module=module, role=f"grad_{name}", sentence="gradient")
                    handles.append(param.register_hook(look))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for layer, watcher in zip(layers, before, strict=True):
                vars(layer)["watcher"] = watcher

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Pre-hook of a module. In a checkpoint's recomputation values were checked before, but the graph is new."""
        if not in_backward():
            for x in pytree.tree_leaves((args, kwargs)):
                self.check(x, path, module, "input", "input")
            for name, param in module.named_parameters(recurse=False):
                self.check(param, path, module, name, "parameter")
        if isinstance(module, TrainLayer):  # replaces a watcher of lowbit.train.watch
            vars(module)["watcher"] = partial(self._view, path, module)
        if not torch.is_grad_enabled():
            return None
        look = partial(self.check, path=path, module=module, role="grad_input", sentence="grad_input")
        marked: dict[int, Tensor] = {}

        def mark(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.requires_grad or _is_weight(x):
                return x
            if id(x) not in marked:  # a tensor that is passed twice stays one tensor
                marked[id(x)] = _marked(x, look)
            return marked[id(x)]

        changed: tuple[Any, Any] = pytree.tree_map(mark, (args, kwargs))
        return changed

    def _leave(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        """Hook after a module's forward."""
        look = partial(self.check, path=path, module=module, role="grad_output", sentence="grad_output")
        for y in pytree.tree_leaves(output):
            if not in_backward():
                self.check(y, path, module, "output", "output")
            if isinstance(y, Tensor) and y.requires_grad:
                y.register_hook(look)

    def _view(self, path: str, module: nn.Module, view: View | None) -> View:
        def look(role: str, x: Tensor, how: Cast, q: Quantized) -> None:
            self.check(x, path, module, role, "operand")
            self.check(q.dequantize(torch.float32), path, module, role, "operand")

        return observed(view, look)


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Run a step without in-backward optimizers, and restore gradients, buffers, random state and training states."""
    params = [(param, param.grad) for param in model.parameters()]
    hooked = [(p, hooks) for p in model.parameters() if (hooks := gradient_hooks(p))]
    layers = [module for module in model.modules() if isinstance(module, TrainLayer)]
    states = {id(layer.state): layer.state for layer in layers if layer.state is not None}.values()
    saved = [(state, int(state.micro_batch), state.pending) for state in states]
    try:
        with torch.random.fork_rng(), held_buffers(model):
            for param, _ in params:
                param.grad = None
            for param, _ in hooked:
                set_gradient_hooks(param, {})
            for state, _, _ in saved:
                state.set_micro_batch(-1)
            yield
    finally:
        with torch.no_grad():
            for param, grad in params:
                param.grad = grad
            for param, hooks in hooked:
                set_gradient_hooks(param, hooks)
        for state, number, pending in saved:
            state.pending = pending
            state.set_micro_batch(number)
