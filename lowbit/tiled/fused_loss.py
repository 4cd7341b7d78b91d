"""``fuse_loss_``: Hugging Face causal language models compute their loss without allocating all logits at once."""

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

#: The config entry that holds a model's soft cap of logits.
_SOFTCAP = "final_logit_softcapping"

#: Packages that replace a model's forward by one whose loss needs no logits. The trainers of trl (from 1.16) do so.
_FUSING = ("trl", "liger_kernel", "unsloth", "cut_cross_entropy")


def fuse_loss_(model: nn.Module, *, batch: Any = None, loss: Callable[[Any, Any], Tensor] | None = None) -> Report:
    """Have ``model`` compute its last layer and its loss together with ``lb.memory.linear_cross_entropy``, in place.

    In training mode with ``labels``, the model returns ``loss`` and ``logits=None``. In evaluation and without labels
    it is unchanged. The loss equals that of ``ForCausalLMLoss`` up to rounding of sums, and supports
    ``num_items_in_batch``, ``ignore_index`` and ``shift_labels``. Logits of 16-bit models are rounded to their dtype as
    before.

    If an embedding shares the weight of the last layer, its gradient is added to the gradient of that layer in place,
    in 32 parts. The sum is bit-identical.

    Calls of a model with a soft cap run one at a time across threads, because its config is changed during the call.
    Afterwards the forward raises ValueError if the model changes its logits before the loss. A soft cap and a cast to
    fp32 are supported. It also raises ValueError if the last layer has been replaced or sharded.

    Args:
        model: A Hugging Face causal language model, or a module that contains one, such as a peft model.
        batch: An example batch, as for ``lb.estimate``. With it, the report has the estimated bytes saved for backward
            before and after.
        loss: A function of output and batch, as for ``lb.estimate``.

    Returns:
        A report of the last layers that were fused with the loss.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: There is no such model, it has another loss, or its last layer is not a plain ``nn.Linear``. The
            loss is fused already, by this function or by another library (trl's trainers, Liger). ``model`` is
            unchanged.
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
    fusible, reasons = _fusible(model)
    if not fusible:
        raise ValueError(
            f"memory.fuse_loss_: expected a Hugging Face causal language model with its original loss, got "
            f"{type(model).__name__}{': ' + '; '.join(reasons) if reasons else ''}; call "
            f"lowbit.memory.linear_cross_entropy(hidden, weight, targets) to compute the loss instead"
        )
    activations, heads = Kept(model, batch, loss), {}
    for causal in fusible:
        head = causal.get_output_embeddings()
        fused = _Fused(causal.loss_function)
        wrap(causal, FusedModel(fused))
        wrap(head, FusedHead(fused))
        for module in causal.modules():
            if isinstance(module, nn.Embedding) and module.weight is head.weight:
                wrap(module, FusedEmbedding(fused))
        causal.loss_function = partial(_loss, fused, head)
        heads.update({name: module for name, module in model.named_modules() if module is head})
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
    for path, wrapper in unwrap_all(model, "memory.unfuse_loss_", _Wrapper):
        module = model.get_submodule(path)
        if isinstance(wrapper, FusedModel):
            del module._loss_function
        elif isinstance(wrapper, FusedHead):
            heads[path] = module
    return report_on("memory.unfuse_loss_", model, heads, "as it was")


def has_causal_loss(model: nn.Module) -> bool:
    """Return whether ``model`` uses transformers' loss for causal models, which shifts labels by one.

    Encoder-decoders that compute their loss themselves do not shift.
    """
    return _is_fused(model) or any(
        _asks_for_loss(causal) or not getattr(causal.config, "is_encoder_decoder", False) for causal in _causal(model)
    )


def can_fuse_loss(model: nn.Module) -> bool:
    """Return whether ``fuse_loss_`` supports ``model``."""
    return not _is_fused(model) and not fusing_libraries(model) and bool(_fusible(model)[0])


def answers_without_logits(model: nn.Module, batch: Any) -> bool:
    """Return whether ``model`` needs no logits for ``batch`` after ``fuse_loss_``, by a forward on fake tensors."""
    if not model.training or not can_fuse_loss(model):
        return False
    answer = answer_without_data(model, fuse_loss_, batch)
    return answer is not None and getattr(answer, "logits", answer) is None


def fusing_libraries(model: nn.Module) -> list[str]:
    """Return the libraries that have replaced a forward in ``model`` by one whose loss needs no logits."""
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    models = model.modules() if modeling is not None else ()
    libraries = {_fuses(module) for module in models if isinstance(module, modeling.PreTrainedModel)}
    return sorted(library for library in libraries if library is not None)


def _fuses(causal: nn.Module) -> str | None:
    """Return the package of ``_FUSING`` that defines a forward which a call of ``causal`` runs."""
    forwards: tuple[Any, ...] = (causal.forward, type(causal).forward)
    for forward in forwards:
        while forward is not None:
            # Decorators copy ``__module__`` from the wrapped function, but cannot copy its globals.
            function = getattr(forward, "__func__", forward)
            library = str(getattr(function, "__globals__", {}).get("__name__", "")).partition(".")[0]
            if library in _FUSING:
                return library
            forward = getattr(function, "__wrapped__", None)
    return None


def _is_fused(model: nn.Module) -> bool:
    return any(wrapper_of(module, FusedModel) for module in model.modules())


def _fusible(model: nn.Module) -> tuple[list[Any], list[str]]:
    """Return the causal language models in ``model`` whose loss can be fused, and the reasons why others cannot."""
    fusible, reasons = [], []
    for causal in _causal(model):
        head, name = causal.get_output_embeddings(), type(causal).__name__
        if plain_class(head) is not nn.Linear:
            reasons.append(f"the last layer of {name} is a {full_name(type(head))}, not an nn.Linear")
        elif not _asks_for_loss(causal):
            reasons.append(f"{name} computes its loss in its forward, and not by loss_function")
        else:
            fusible.append(causal)
    return fusible, reasons


def _asks_for_loss(causal: nn.Module) -> bool:
    """Return whether the forward calls ``self.loss_function``. Assume so if its source is not available."""
    try:
        return "self.loss_function(" in inspect.getsource(inspect.unwrap(type(causal).forward))
    except (OSError, TypeError):
        return True


def _causal(model: nn.Module) -> Iterator[Any]:
    """Yield the Hugging Face models in ``model`` that use the causal language model loss."""
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
    """State that model, last layer and loss share during a call in one thread.

    Attributes:
        plain: The model's original loss function.
        active: Whether a call is under way that computes a fused loss.
        done: Whether the loss was computed.
        hidden: The input, and fused output, of the last layer. After the loss: the tensor that the loss received.
        softcap: The soft cap of the model's logits.
        weight: The last layer's weight.
        tie: Shares its gradient with embeddings; None before the first lookup.
    """

    def __init__(self, plain: Callable[..., Tensor]) -> None:
        self.plain, self.active, self.done = plain, False, False
        self.hidden: Tensor | None = None
        self.softcap: float | None = None
        self.weight: Tensor | None = None
        self.tie: Tie | None = None
        self._last: Callable[[], Tie | None] = lambda: None

    def __reduce__(self) -> Any:
        return _Fused, (self.plain,)

    def tied(self) -> Tie:
        """Return the tie of this call. It is that of the previous call if no backward has used it since."""
        assert self.weight is not None
        if self.tie is None:
            previous = self._last()
            self.tie = previous if previous is not None and previous.serves(self.weight) else Tie(self.weight)
            self._last = weakref.ref(self.tie)
        return self.tie


#: Calls of models with a soft cap hold this lock, because they change the config.
_CAPPED = threading.RLock()


@dataclass(eq=False)
class _Wrapper(Wrapper):
    fused: _Fused


class FusedModel(_Wrapper):
    """Wrapper of the model: it returns no logits."""

    def __call__(self, module: Any, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        plain, fused = type(module).forward, self.fused
        arguments = inspect.signature(plain).bind_partial(module, *args, **kwargs).arguments if args else kwargs
        config = module.config.get_text_config()
        with _CAPPED if hasattr(config, _SOFTCAP) else nullcontext():
            if not module.training or arguments.get("labels") is None:
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
            raise ValueError(_refused(f"{type(module).__name__} computes its loss without loss_function"))
        if isinstance(output, tuple):
            return tuple(part for part in output if part is not hidden)
        output.logits = None
        return output


class FusedHead(_Wrapper):
    """Wrapper of the last layer: it returns its input."""

    def __call__(self, module: nn.Module, forward: Any, /, hidden: Tensor) -> Any:
        if not self.fused.active:
            return forward(hidden)
        self.fused.hidden = hidden
        return hidden


class FusedEmbedding(_Wrapper):
    """Wrapper of an embedding that shares the last layer's weight."""

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
    """transformers' ``ForCausalLMLoss``, but ``logits`` is the input of the last layer."""
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
    """Return whether the model left its logits unchanged, except for a cast to fp32, in which the loss is computed
    anyway.
    """
    if logits is hidden or hidden is None or logits.grad_fn is None:
        return logits is hidden
    cast = logits.grad_fn.name() == "ToCopyBackward0" and logits.dtype == torch.float32
    return cast and logits.grad_fn.next_functions[0][0] is hidden.grad_fn


def _require_plain(head: nn.Module) -> None:
    if plain_class(head) is not nn.Linear:
        raise ValueError(_refused(f"the last layer has become a {full_name(type(head))}"))


def _refused(why: str) -> str:
    return f"memory.fuse_loss_: {why}; call lowbit.memory.unfuse_loss_(model)"
