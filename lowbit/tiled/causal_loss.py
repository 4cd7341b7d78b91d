"""Fused losses of Hugging Face causal language models, which compute their loss from labels and return no logits."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowbit.memory.fake import answer_without_data
from lowbit.models.wrap import Wrapper, plain_class, wrap, wrapper_of, wrappers
from lowbit.nn.base import full_name
from lowbit.tiled.loss import linear_cross_entropy
from lowbit.tiled.tied import Lookups, Tie, Ties, can_share

__all__ = [
    "CausalWrapper",
    "FusedEmbedding",
    "FusedHead",
    "FusedModel",
    "answers_without_logits",
    "fuse_causal_loss_",
    "fusible",
    "fusing_libraries",
    "has_causal_loss",
    "losses_alone",
]

#: The config entry that holds a model's soft cap of logits.
_SOFTCAP = "final_logit_softcapping"

#: Packages that replace a model's forward by one whose loss needs no logits. The trainers of trl (from 1.16) do so.
_FUSING = ("trl", "liger_kernel", "unsloth", "cut_cross_entropy")


def fuse_causal_loss_(causal: Any) -> nn.Module:
    """Fuse the last layer of a model that ``fusible`` returned with its loss, in place. Return the layer."""
    head: nn.Linear = causal.get_output_embeddings()
    fused = _Fused(causal.loss_function)
    wrap(causal, FusedModel(fused))
    wrap(head, FusedHead(fused))
    for module in causal.modules():
        if isinstance(module, nn.Embedding) and module.weight is head.weight:
            wrap(module, FusedEmbedding(fused))
    causal.loss_function = partial(_loss, fused, head)
    return head


def has_causal_loss(model: nn.Module) -> bool:
    """Return whether ``model`` uses transformers' loss for causal models, which shifts labels by one.

    Encoder-decoders that compute their loss themselves do not shift.
    """
    return any(wrapper_of(module, FusedModel) for module in model.modules()) or any(
        _asks_for_loss(causal) or not getattr(causal.config, "is_encoder_decoder", False) for causal in _causal(model)
    )


def answers_without_logits(model: nn.Module, causal: list[Any], batch: Any) -> bool:
    """Return whether ``model`` returns no logits for ``batch`` if the ``causal`` models in it are fused, by a forward
    on fake tensors.
    """
    paths = [path for path, module in model.named_modules() if any(module is one for one in causal)]

    def prepare(copied: nn.Module) -> None:
        for path in paths:
            fuse_causal_loss_(copied.get_submodule(path))

    answer = answer_without_data(model, prepare, batch)
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


def fusible(model: nn.Module) -> tuple[list[Any], list[str]]:
    """Return the causal language models in ``model`` whose loss can be fused, and the reasons why others cannot.

    Models that compute their loss in their forward, without ``loss_function``, are left out.
    """
    fusible, reasons = [], []
    for causal in _causal(model):
        head, name = causal.get_output_embeddings(), type(causal).__name__
        if plain_class(head) is not nn.Linear:
            reasons.append(f"the last layer of {name} is a {full_name(type(head))}, not an nn.Linear")
        elif _asks_for_loss(causal):
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
        in_eval: Whether models in eval mode return no logits either.
    """

    def __init__(self, plain: Callable[..., Tensor]) -> None:
        self.plain, self.active, self.done, self.in_eval = plain, False, False, False
        self.hidden: Tensor | None = None
        self.softcap: float | None = None
        self.weight: Tensor | None = None
        self.tie: Tie | None = None
        self._ties = Ties()

    def __reduce__(self) -> Any:
        return _Fused, (self.plain,)

    def tied(self) -> Tie:
        """Return the tie of this call. It is that of the previous call if no backward has used it since."""
        assert self.weight is not None
        if self.tie is None:
            self.tie = self._ties.of(self.weight)
        return self.tie


#: Calls of models with a soft cap hold this lock, because they change the config.
_CAPPED = threading.RLock()


@dataclass(eq=False)
class CausalWrapper(Wrapper):
    """Wrapper of a part of a model whose loss is fused."""

    fused: _Fused


class FusedModel(CausalWrapper):
    """Wrapper of the model: it returns no logits."""

    def __call__(self, module: Any, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        plain, fused = type(module).forward, self.fused
        arguments = inspect.signature(plain).bind_partial(module, *args, **kwargs).arguments if args else kwargs
        config = module.config.get_text_config()
        with _CAPPED if hasattr(config, _SOFTCAP) else nullcontext():
            if not (module.training or fused.in_eval) or arguments.get("labels") is None:
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


class FusedHead(CausalWrapper):
    """Wrapper of the last layer: it returns its input."""

    def __call__(self, module: nn.Module, forward: Any, /, hidden: Tensor) -> Any:
        if not self.fused.active:
            return forward(hidden)
        self.fused.hidden = hidden
        return hidden


class FusedEmbedding(CausalWrapper):
    """Wrapper of an embedding that shares the last layer's weight."""

    def __call__(self, module: Any, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        fused = self.fused
        if fused.weight is None or module.weight is not fused.weight or not can_share(fused.weight):
            return forward(*args, **kwargs)
        with Lookups(fused.weight, fused.tied):
            return forward(*args, **kwargs)


@contextmanager
def losses_alone(model: nn.Module) -> Iterator[None]:
    """A context in which fused models inside ``model`` compute the loss of ``labels`` without logits in eval mode too.

    By default a model in eval mode returns its logits, which may be its largest tensor.
    """
    entries = [entry.fused for module in model.modules() for entry in wrappers(module) if isinstance(entry, FusedModel)]
    for fused in entries:
        fused.in_eval = True
    try:
        yield
    finally:
        for fused in entries:
            fused.in_eval = False


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
