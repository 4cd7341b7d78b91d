"""The first NaN or Inf of a step, by the layer and the operand or result that has it."""

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
from lowbit.train.linear import TrainLinear
from lowbit.train.states import State
from lowbit.train.view import View
from lowbit.train.watcher import observed

__all__ = ["NonFinite", "find_nonfinite"]

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

#: By role, what is said of the elements, and where they come from; ``{who}`` is the layer. Parameters have the role of
#: their name, their gradients that of ``grad_`` before it, and operands of products that of their cast.
_TOLD = {
    "input": ("the input of {who}", "the modules before it gave finite results, so the batch or the code that calls it "
              "brought them"),
    "output": ("the output of {who}", "its inputs and weights are finite"),
    "loss": ("the loss", "what all modules gave is finite"),
    "grad_output": ("the gradient that reaches the output of {who}", "forward and the gradients after it are finite, "
                    "so the loss, or code between it and the next module, made them"),
    "grad_input": ("the gradient that {who} passes to its input", "the gradient that reached it is finite"),
    "parameter": ("{role} of {who}", "it has them before it computes, so the step of the optimizer before this one "
                  "made them, or they were loaded"),
    "gradient": ("{role} of {who}", "the gradient that reached it is finite"),
    "operand": ("the operand {role} of {who}", "what it is made of is finite, so scaling or quantizing it overflows"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """Where a step first meets Inf or NaN; printed, it is a sentence.

    ``path`` and ``kind``: the module's name in the model and its class. ``role``: ``input``, ``output``, ``loss``,
    ``grad_output``, ``grad_input``, a parameter's name such as ``weight``, its gradient such as ``grad_weight``, or of
    a TrainLinear the operand of a product, such as ``grad_weight.a``. ``told``: the row of the table of sentences.
    ``elements``: how many the tensor has; ``nans`` and ``infs`` of them are NaN and Inf.
    """

    path: str
    kind: str
    role: str
    told: str
    elements: int
    nans: int
    infs: int

    def __str__(self) -> str:
        subject, why = _TOLD[self.told]
        who = f"{self.path} ({self.kind})" if self.path else f"the model ({self.kind})"
        named = " and ".join(f"{count:,} {what}" for count, what in ((self.nans, "NaN"), (self.infs, "Inf")) if count)
        return f"{subject.format(who=who, role=self.role)} has {named} among {self.elements:,} elements; {why}"


def find_nonfinite(model: nn.Module, step: Callable[[], Any]) -> NonFinite | None:
    """Run a step again and name the first operand or result, in the order of computation, that holds Inf or NaN.

    ``step``: calls ``model``, and returns the loss, whose backward pass is run here; a step that runs backward itself
    returns None. It takes no step of an optimizer. Every module counts, prepared or not: its inputs, parameters and
    outputs in forward, then the gradients of outputs, operands, parameters and inputs. An input that holds -Inf alone
    is taken for a mask. The search ends at the first finding; None: there is none.

    The step begins with the first micro-batch of the model's training state. Hooks that run as a gradient is complete
    (``register_post_accumulate_grad_hook``) do not, since optimizers that step in the backward pass are such.
    Afterwards gradients, buffers, random state and training state are what they were. Checkpointing is as usual;
    compiled code runs uncompiled.
    Raises what ``step`` raises.
    """
    model = getattr(model, "_orig_mod", model)
    search = _Search()
    with _kept(model), search.hooks(model), torch.compiler.set_stance("force_eager"):
        try:
            loss = step()
            if isinstance(loss, Tensor):
                search.check(loss, "", model, "loss", "loss")
                if loss.requires_grad:
                    torch.autograd.backward(loss)
        except _Found:
            pass
    return search.found


class _Found(Exception):
    """Ends the step that is searched."""


class _Marked(torch.autograd.Function):
    """A module's own copy of its input, so that the gradient that the module passes back can be told from others'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, look: Callable[[Tensor], None]) -> Tensor:  # type: ignore[override]
        ctx.look = look
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.look(grad)
        return grad, None


_marked = cast(Callable[[Tensor, Callable[[Tensor], None]], Tensor], _Marked.apply)


class _Search:
    """What has been found, and the hooks that look."""

    def __init__(self) -> None:
        self.found: NonFinite | None = None

    def check(self, x: Any, path: str, module: nn.Module, role: str, told: str) -> None:
        """Note ``x`` and end the step, if it is a tensor that holds Inf or NaN."""
        if self.found is not None or not isinstance(x, Tensor) or x.dtype not in _FLOATS or all_finite(x.detach()):
            return
        nans, infs = int(x.isnan().sum()), int(x.isinf().sum())
        if told == "input" and not nans and not bool((x == torch.inf).any()):
            return
        kind = type(module).__name__
        self.found = NonFinite(
            path=path, kind=kind, role=role, told=told, elements=x.numel(), nans=nans, infs=infs
        )  # fmt: skip
        raise _Found

    @contextmanager
    def hooks(self, model: nn.Module) -> Iterator[None]:
        """Within, every module of ``model`` is looked at."""
        handles: list[RemovableHandle] = []
        modules = dict(model.named_modules())
        layers = [module for module in modules.values() if isinstance(module, TrainLinear)]
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
                    look = partial(self.check, path=path, module=module, role=f"grad_{name}", told="gradient")
                    handles.append(param.register_hook(look))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for layer, watcher in zip(layers, before, strict=True):
                vars(layer)["watcher"] = watcher

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Before a module's forward: a checkpoint's recomputation has been looked at already, but has other nodes."""
        if not in_backward():
            for x in pytree.tree_leaves((args, kwargs)):
                self.check(x, path, module, "input", "input")
            for name, param in module.named_parameters(recurse=False):
                self.check(param, path, module, name, "parameter")
        if isinstance(module, TrainLinear):  # also in place of what lowbit.train.watch would count
            vars(module)["watcher"] = partial(self._view, path, module)
        if not torch.is_grad_enabled():
            return None
        look = partial(self.check, path=path, module=module, role="grad_input", told="grad_input")
        marked: dict[int, Tensor] = {}

        def mark(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.requires_grad:
                return x
            if id(x) not in marked:  # what is one tensor to the module stays one
                marked[id(x)] = _marked(x, look)
            return marked[id(x)]

        changed: tuple[Any, Any] = pytree.tree_map(mark, (args, kwargs))
        return changed

    def _leave(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        """After a module's forward."""
        look = partial(self.check, path=path, module=module, role="grad_output", told="grad_output")
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
def _kept(model: nn.Module) -> Iterator[None]:
    """Within, a step begins, and no optimizer steps in the backward pass; afterwards gradients, buffers, random state
    and training states are as they were."""
    params = [(param, param.grad) for param in model.parameters()]
    hooked = [(p, hooks) for p in model.parameters() if (hooks := gradient_hooks(p))]
    layers = [module for module in model.modules() if isinstance(module, TrainLinear)]
    states = {id(layer.state): layer.state for layer in layers if layer.state is not None}.values()
    moved = [(one, int(one.micro_batch), one.pending) for one in states]
    try:
        with torch.random.fork_rng(), held_buffers(model):
            for param, _ in params:
                param.grad = None
            for param, _ in hooked:
                set_gradient_hooks(param, {})
            for one, _, _ in moved:
                one.set_micro_batch(-1)
            yield
    finally:
        with torch.no_grad():
            for param, grad in params:
                param.grad = grad
            for param, hooks in hooked:
                set_gradient_hooks(param, hooks)
        for one, number, pending in moved:
            one.pending = pending
            one.set_micro_batch(number)
