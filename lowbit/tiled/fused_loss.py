"""``lb.memory.linear_cross_entropy`` as the loss of causal language models of transformers, whose logits are then never
held as a whole.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowbit.memory.fake import answer_without_data
from lowbit.memory.kept import Kept
from lowbit.models.check import check_model
from lowbit.models.wrap import Wrapper, plain_class, unwrap_all, wrap, wrapper_of
from lowbit.nn.base import full_name
from lowbit.report import Report, report_on
from lowbit.tiled.loss import linear_cross_entropy
from lowbit.tiled.tied import Lookups, Tie, can_share

__all__ = [
    "answers_without_logits",
    "can_fuse_loss",
    "fuse_loss_",
    "fusing_libraries",
    "has_causal_loss",
    "unfuse_loss_",
]

#: The entry of a config by which a model caps its logits before the loss.
_SOFTCAP = "final_logit_softcapping"

#: Packages whose forward, in place of a model's own, computes the loss without logits. The trainers of trl (from 1.16)
#: put theirs on the model.
_FUSING = ("trl", "liger_kernel", "unsloth", "cut_cross_entropy")


def fuse_loss_(model: nn.Module, *, batch: Any = None, loss: Callable[[Any, Any], Tensor] | None = None) -> Report:
    """Have ``model`` compute its loss and its last layer together by ``lb.memory.linear_cross_entropy``, in place.

    ``model``: a causal language model of transformers, or a module that has one inside, such as one of peft. In
    training mode, where it is given ``labels``, it answers with ``loss`` and with ``logits=None``; in evaluation, and
    without labels, it is as before. The loss is that of ``ForCausalLMLoss`` within the rounding of sums, with
    ``num_items_in_batch``, ``ignore_index`` and ``shift_labels``; logits in half precision are rounded as they are.

    Where an embedding shares the weight of the last layer, its gradient is added to that layer's in place, a 32nd of
    the rows at a time. No bit of the sum changes.

    ``batch`` and ``loss``: as ``lb.estimate`` takes them. With a batch the report says what activations are kept
    for backward, before and after, as estimated.

    Calls of a model with a soft cap wait for each other, since its config is another one meanwhile.
    Raises TypeError for what is no module; ValueError, with the model untouched, where there is no such model, its loss
    is another, its last layer is no plain ``nn.Linear``, and where that is done already, by this function or by the
    forward of another library (trl's trainers, Liger). The forward raises ValueError
    where the model changes its logits before the loss (a scale; the soft cap of Gemma and a cast to fp32 are served),
    and where the last layer has been replaced or sharded since. ``unfuse_loss_`` is the way back.
    """
    check_model(model)
    if _is_fused(model):
        raise ValueError("memory.fuse_loss_: the loss is fused already; call lowbit.memory.unfuse_loss_ first")
    libraries = fusing_libraries(model)
    if libraries:
        raise ValueError(
            f"memory.fuse_loss_: expected a model with a forward of its own, got one whose forward is that of "
            f"{', '.join(libraries)}, which computes the loss without logits already; leave fuse_loss_ out"
        )
    found, reasons = _found(model)
    if not found:
        raise ValueError(
            f"memory.fuse_loss_: expected a causal language model of transformers with a loss of its own, got "
            f"{type(model).__name__}{': ' + '; '.join(reasons) if reasons else ''}; call "
            f"lowbit.memory.linear_cross_entropy(hidden, weight, targets) where the loss is computed"
        )
    kept, heads = Kept(model, batch, loss), {}
    for causal in found:
        head = causal.get_output_embeddings()
        fused = _Fused(causal.loss_function)
        wrap(causal, FusedModel(fused))
        wrap(head, FusedHead(fused))
        for module in causal.modules():
            if isinstance(module, nn.Embedding) and module.weight is head.weight:
                wrap(module, FusedEmbedding(fused))
        causal.loss_function = partial(_loss, fused, head)
        heads.update({name: module for name, module in model.named_modules() if module is head})
    return kept.told(report_on("memory.fuse_loss_", model, heads, "fused with the loss"))


def unfuse_loss_(model: nn.Module) -> Report:
    """Undo ``fuse_loss_``, in place. Other models stay as they are.

    Raises ValueError, with the model untouched, where a forward has been replaced since.
    """
    check_model(model)
    heads = {}
    for path, wrapper in unwrap_all(model, "memory.unfuse_loss_", _Wrapper):
        module = model.get_submodule(path)
        if isinstance(wrapper, FusedModel):
            del module._loss_function
        elif isinstance(wrapper, FusedHead):
            heads[path] = module
    return report_on("memory.unfuse_loss_", model, heads, "as it was")


def has_causal_loss(model: nn.Module) -> bool:
    """Whether the loss of ``model`` is transformers' for causal models, whose labels are shifted by one. Encoders with
    decoders that compute their loss themselves do not shift.
    """
    return _is_fused(model) or any(
        _asks_for_loss(one) or not getattr(one.config, "is_encoder_decoder", False) for one in _causal(model)
    )


def can_fuse_loss(model: nn.Module) -> bool:
    """Whether ``fuse_loss_`` takes ``model``."""
    return not _is_fused(model) and not fusing_libraries(model) and bool(_found(model)[0])


def answers_without_logits(model: nn.Module, batch: Any) -> bool:
    """Whether ``model`` would, for such a batch, after ``fuse_loss_``; by a forward without data."""
    if not model.training or not can_fuse_loss(model):
        return False
    answer = answer_without_data(model, fuse_loss_, batch)
    return answer is not None and getattr(answer, "logits", answer) is None


def fusing_libraries(model: nn.Module) -> list[str]:
    """The libraries whose forwards compute the loss of causal language models inside without logits already."""
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    models = model.modules() if modeling is not None else ()
    found = {_fuses(module) for module in models if isinstance(module, modeling.PreTrainedModel)}
    return sorted(library for library in found if library is not None)


def _fuses(causal: nn.Module) -> str | None:
    """Which of ``_FUSING`` has made a forward that a call of ``causal`` runs."""
    forwards: tuple[Any, ...] = (causal.forward, type(causal).forward)
    for forward in forwards:
        while forward is not None:
            # Decorators copy the module's name from the function that they wrap; its globals they cannot.
            function = getattr(forward, "__func__", forward)
            library = str(getattr(function, "__globals__", {}).get("__name__", "")).partition(".")[0]
            if library in _FUSING:
                return library
            forward = getattr(function, "__wrapped__", None)
    return None


def _is_fused(model: nn.Module) -> bool:
    return any(wrapper_of(module, FusedModel) for module in model.modules())


def _found(model: nn.Module) -> tuple[list[Any], list[str]]:
    """The causal language models inside whose loss can be fused, and why others cannot."""
    found, reasons = [], []
    for causal in _causal(model):
        head, name = causal.get_output_embeddings(), type(causal).__name__
        if plain_class(head) is not nn.Linear:
            reasons.append(f"the last layer of {name} is a {full_name(type(head))}, not an nn.Linear")
        elif not _asks_for_loss(causal):
            reasons.append(f"{name} computes its loss in its forward, and not by loss_function")
        else:
            found.append(causal)
    return found, reasons


def _asks_for_loss(causal: nn.Module) -> bool:
    """Whether the forward calls ``self.loss_function``, as far as its source is known."""
    try:
        return "self.loss_function(" in inspect.getsource(inspect.unwrap(type(causal).forward))
    except (OSError, TypeError):
        return True


def _causal(model: nn.Module) -> Iterator[Any]:
    """The models of transformers that have the loss of causal language models."""
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    losses: Any = sys.modules.get("transformers.loss.loss_utils")
    for module in model.modules() if modeling is not None and losses is not None else ():
        if (
            isinstance(module, modeling.PreTrainedModel)
            and "labels" in inspect.signature(type(module).forward).parameters
            and module.get_output_embeddings() is not None
            and module.loss_function is losses.ForCausalLMLoss
        ):
            yield module


class _Fused(threading.local):
    """What model, last layer and loss share in a call of one thread. ``hidden``: what the last layer was given, and
    answers with; then what the loss was given. ``softcap``: of the model's logits. ``done``: whether the loss was
    asked for. ``weight``: of the last layer. ``tie``: of what it shares with embeddings, where there have been any.
    """

    def __init__(self, plain: Callable[..., Tensor]) -> None:
        self.plain, self.active, self.done = plain, False, False
        self.hidden: Tensor | None = None
        self.softcap: float | None = None
        self.weight: Tensor | None = None
        self.tie: Tie | None = None
        self._last: Callable[[], Tie | None] = _nothing

    def __reduce__(self) -> Any:
        return _Fused, (self.plain,)

    def tied(self) -> Tie:
        """The tie of this call, which is that of the last one while no backward has been there."""
        assert self.weight is not None
        if self.tie is None:
            last = self._last()
            self.tie = last if last is not None and last.serves(self.weight) else Tie(self.weight)
            self._last = weakref.ref(self.tie)
        return self.tie


def _nothing() -> None:
    """As a weak reference to what is gone."""


#: Held by calls of models with a soft cap, whose config is another one meanwhile.
_CAPPED = threading.RLock()


@dataclass(eq=False)
class _Wrapper(Wrapper):
    fused: _Fused


class FusedModel(_Wrapper):
    """The model, which answers without logits."""

    def __call__(self, module: Any, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        plain, fused = type(module).forward, self.fused
        given = inspect.signature(plain).bind_partial(module, *args, **kwargs).arguments if args else kwargs
        config = module.config.get_text_config()
        with _CAPPED if hasattr(config, _SOFTCAP) else nullcontext():
            if not module.training or given.get("labels") is None:
                return forward(*args, **kwargs)
            head = module.get_output_embeddings()
            _require_plain(head)
            fused.active, fused.done, fused.softcap = True, False, getattr(config, _SOFTCAP, None)
            fused.weight = head.weight
            try:
                if fused.softcap is not None:
                    setattr(config, _SOFTCAP, None)
                output = forward(*args, **kwargs)
            finally:
                if fused.softcap is not None:
                    setattr(config, _SOFTCAP, fused.softcap)
                hidden, fused.active, fused.hidden = fused.hidden, False, None
                fused.weight = fused.tie = None
        if not fused.done:
            raise ValueError(_refused(f"{type(module).__name__} computes its loss itself, of what is no logits"))
        if isinstance(output, tuple):
            return tuple(part for part in output if part is not hidden)
        output.logits = None
        return output


class FusedHead(_Wrapper):
    """The last layer, which hands its input on."""

    def __call__(self, module: nn.Module, forward: Any, /, hidden: Tensor) -> Any:
        if not self.fused.active:
            return forward(hidden)
        self.fused.hidden = hidden
        return hidden


class FusedEmbedding(_Wrapper):
    """An embedding that shares the last layer's weight."""

    def __call__(self, module: Any, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        fused = self.fused
        if fused.weight is None or module.weight is not fused.weight or not can_share(fused.weight):
            return forward(*args, **kwargs)
        with Lookups(fused.weight, fused.tied):
            return forward(*args, **kwargs)


def _loss(
    fused: _Fused,
    head: nn.Linear,
    logits: Tensor,
    labels: Tensor,
    vocab_size: int | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """transformers' ``ForCausalLMLoss``, where ``logits`` is what the last layer would have been given."""
    if not fused.active:
        return fused.plain(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
    if not _is_same(logits, fused.hidden):
        raise ValueError(_refused("the model changes its logits between the last layer and the loss"))
    _require_plain(head)
    if isinstance(head.weight, DTensor):
        raise ValueError(_refused("the last layer is sharded"))
    assert fused.hidden is not None
    hidden, targets = fused.hidden, shift_labels
    fused.done, fused.hidden = True, logits
    if targets is None:
        hidden, targets = hidden[..., :-1, :], labels[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    weight = head.weight if fused.tie is None or head.weight is not fused.weight else fused.tie.matrix()
    loss = linear_cross_entropy(
        hidden, weight, targets.to(hidden.device), head.bias, ignore_index=ignore_index, reduction=reduction,
        softcap=fused.softcap, rounded=True,
    )  # fmt: skip
    if num_items_in_batch is None:
        return loss
    return loss / (num_items_in_batch.to(loss.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch)


def _is_same(logits: Tensor, hidden: Tensor | None) -> bool:
    """Whether the model left its logits as they were, but for a cast: the loss computes in fp32 anyway."""
    if logits is hidden or hidden is None or logits.grad_fn is None:
        return logits is hidden
    cast = logits.grad_fn.name() == "ToCopyBackward0" and logits.dtype == torch.float32
    return cast and logits.grad_fn.next_functions[0][0] is hidden.grad_fn


def _require_plain(head: nn.Module) -> None:
    if plain_class(head) is not nn.Linear:
        raise ValueError(_refused(f"the last layer has become a {full_name(type(head))}"))


def _refused(why: str) -> str:
    return f"memory.fuse_loss_: {why}; call lowbit.memory.unfuse_loss_(model)"
