"""``fuse_loss_``: a model's last layer and its cross-entropy are computed together, without allocating all logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lowbit.memory.kept import Kept
from lowbit.models.check import check_model
from lowbit.models.wrap import plain_class, unwrap_all, wrapper_of
from lowbit.nn.base import full_name
from lowbit.report import Report, report_on
from lowbit.tiled.causal_loss import (
    CausalWrapper,
    FusedHead,
    FusedModel,
    answers_without_logits,
    fuse_causal_loss_,
    fusible,
    fusing_libraries,
)
from lowbit.tiled.fused_head import LazyHead, TiedTable, find_heads, fuse_heads_, is_linear, not_fused

__all__ = ["fuse_loss_", "takes_labels", "unfuse_loss_", "why_not_fused"]

_Loss = Callable[[Any, Any], Tensor] | None


def fuse_loss_(
    model: nn.Module, *, head: str | nn.Module | None = None, batch: Any = None, loss: _Loss = None
) -> Report:
    """Have ``model`` compute its last layer and its loss together with ``lb.memory.linear_cross_entropy``, in place.

    In evaluation mode and without gradients the model is unchanged. In training there are two kinds of models.

    Any model whose last ``nn.Linear`` feeds ``F.cross_entropy`` or ``nn.CrossEntropyLoss``, in its forward or in your
    training loop: the layer returns logits that are not computed. Views of batch and token axes, moves of the class
    axis and casts to fp32 do not compute them, and ``F.cross_entropy`` computes its loss without them. ``argmax``
    computes them and frees them. Any other operation computes and keeps them, so its result is the same as before. If
    this happens before the loss, the loss is not fused, and a warning says so once. Targets are class indices. All
    options of ``F.cross_entropy`` are supported except the combination of ``weight`` and ``label_smoothing``, with
    which logits are computed. So are they in a model compiled by ``torch.compile``, and if an autograd function returns
    them. ``DistributedDataParallel`` has such a function with ``find_unused_parameters``, and in the first step with
    ``static_graph``.

    Hugging Face causal language models that are called with ``labels``, if ``head`` is None: the model returns ``loss``
    and ``logits=None``. The loss equals that of ``ForCausalLMLoss`` up to rounding of sums, and supports
    ``num_items_in_batch``, ``ignore_index`` and ``shift_labels``. Calls of a model with a soft cap run one at a time
    across threads, because its config is changed during the call. Afterwards the forward raises ValueError if the model
    changes its logits before the loss, except by a soft cap and a cast to fp32. It also raises ValueError if the last
    layer has been replaced or sharded.

    Logits of 16-bit models are rounded to their dtype as before. If an embedding shares the weight of the last layer,
    its gradient is added to the gradient of that layer in place, in 32 parts. The sum is bit-identical.

    Args:
        model: The model.
        head: The last layer, or its path. By default that of a Hugging Face causal language model, or else the output
            layers that the structure of the model shows.
        batch: An example batch, as for ``lb.estimate``. With it, a step on fake tensors finds the last layers whose
            output a cross-entropy reads, and the report has the estimated bytes saved for backward before and after.
        loss: A function of output and batch, as for ``lb.estimate``.

    Returns:
        A report of the last layers that were fused with the loss.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: There is no such layer, it is not a plain ``nn.Linear``, or the loss of ``batch`` does not read it
            by a cross-entropy. The loss is fused already, by this function or by another library (trl's trainers,
            Liger). ``model`` is unchanged.

    Example:
        >>> lb.memory.fuse_loss_(model, head="head")
        >>> loss = F.cross_entropy(model(ids).view(-1, vocabulary), targets.view(-1))
    """
    check_model(model)
    if _is_fused(model):
        raise ValueError("memory.fuse_loss_: the loss is fused already; call lowbit.memory.unfuse_loss_ first")
    libraries = fusing_libraries(model)
    if libraries:
        raise ValueError(
            f"memory.fuse_loss_: expected a model with its original forward, got one whose forward is that of "
            f"{', '.join(libraries)}, which computes the loss without logits already; leave fuse_loss_ out"
        )
    causal, others = fusible(model) if head is None else ([], [])
    heads = {} if causal else _heads(model, head, others)
    if heads and batch is not None:
        reasons = not_fused(model, list(heads), batch, loss)
        fused = {path: layer for path, layer in heads.items() if path not in reasons}
        if not fused:
            path, reason = next(iter(reasons.items()))
            raise ValueError(
                f"memory.fuse_loss_: expected a loss that passes the output of {path!r} to F.cross_entropy, but "
                f"{reason}; pass loss=lambda output, batch: ... as your training computes it, or another head="
            )
        heads = fused
    activations = Kept(model, batch, loss)
    fuse_heads_(model, list(heads))
    for one in causal:
        last = fuse_causal_loss_(one)
        heads.update({name: module for name, module in model.named_modules() if module is last})
    return activations.told(report_on("memory.fuse_loss_", model, heads, "fused with the loss"))


def unfuse_loss_(model: nn.Module) -> Report:
    """Undo ``fuse_loss_``, in place.

    Args:
        model: A model with or without a fused loss.

    Returns:
        A report of the last layers that were restored; empty if none was fused.

    Raises:
        ValueError: A forward has been replaced since. ``model`` is unchanged.
    """
    check_model(model)
    heads = {}
    for path, wrapper in unwrap_all(model, "memory.unfuse_loss_", CausalWrapper, LazyHead, TiedTable):
        module = model.get_submodule(path)
        if isinstance(wrapper, FusedModel):
            del module._loss_function
        elif isinstance(wrapper, FusedHead | LazyHead):
            heads[path] = module
    return report_on("memory.unfuse_loss_", model, heads, "as it was")


def why_not_fused(model: nn.Module, batch: Any, loss: _Loss) -> str | None:
    """Return why ``fuse_loss_`` does not save the logits of ``batch``, as the end of a sentence, or None if it does."""
    if _is_fused(model):
        return "its loss is fused already"
    libraries = fusing_libraries(model)
    if libraries:
        return f"{', '.join(libraries)} computes its loss without logits already"
    if not model.training:
        return "it is in evaluation mode"
    causal, reasons = fusible(model)
    if causal:
        fits = loss is None and answers_without_logits(model, causal, batch)
        return None if fits else "a Hugging Face causal model must be called with labels and return its own loss"
    heads = {} if reasons else find_heads(model)
    if not heads:
        return "; ".join(reasons) or "its structure does not show its last Linear"
    unfused = not_fused(model, list(heads), batch, loss)
    return next((f"its loss is no cross-entropy of {path!r}: {reason}" for path, reason in unfused.items()), None)


def takes_labels(model: nn.Module) -> bool:
    """Return whether ``model`` is a Hugging Face causal model whose loss of ``labels`` can be fused."""
    return not _is_fused(model) and not fusing_libraries(model) and bool(fusible(model)[0])


def _is_fused(model: nn.Module) -> bool:
    return any(wrapper_of(module, FusedModel) or wrapper_of(module, LazyHead) for module in model.modules())


def _heads(model: nn.Module, head: str | nn.Module | None, reasons: list[str]) -> dict[str, nn.Module]:
    """Return the last layers to fuse, by path. Raise ValueError if there is none."""
    if head is None:
        found: dict[str, nn.Module] = {} if reasons else {**find_heads(model)}
        if not found:
            why = f": {'; '.join(reasons)}" if reasons else ""
            raise ValueError(
                f"memory.fuse_loss_: expected a model with a last nn.Linear that its structure shows, got "
                f"{type(model).__name__}{why}; call lowbit.memory.linear_cross_entropy(hidden, weight, targets) to "
                f"compute the loss instead, or pass head=, the path of the layer that returns logits"
            )
        return found
    modules = dict(model.named_modules())
    paths = [path for path, module in modules.items() if path == head or module is head]
    if not paths:
        linears = [path for path, module in modules.items() if is_linear(module)]
        raise ValueError(
            f"memory.fuse_loss_: expected head= to be a module of {type(model).__name__} or its path, got {head!r}; "
            f"its last Linear layers are {', '.join(map(repr, linears[-3:])) or 'none'}"
        )
    layer = modules[paths[0]]
    if not is_linear(layer):
        raise ValueError(
            f"memory.fuse_loss_: expected head= to be an nn.Linear, got {paths[0]!r}, a "
            f"{full_name(plain_class(layer))}; fuse the loss before the layer is converted, or pass another layer"
        )
    return {paths[0]: layer}
