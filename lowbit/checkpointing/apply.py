"""``checkpoint_`` and ``uncheckpoint_``: a model's modules are given what recomputes them, or lose it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lowbit.checkpointing.caches import place_of
from lowbit.checkpointing.policies import Choice, choose
from lowbit.checkpointing.segment import Offload, Recomputed, Segment
from lowbit.memory.kept import Kept
from lowbit.models.check import check_model
from lowbit.models.wrap import unwrap_all, wrap, wrapped, wrapper_of
from lowbit.report import Report, report_on

__all__ = ["checkpoint_", "recomputing", "uncheckpoint_"]


def checkpoint_(
    model: nn.Module,
    policy: Choice = "block",
    *,
    to: str | os.PathLike[str] | None = None,
    batch: Any = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
) -> Report:
    """Checkpoint the parts of ``model`` that ``policy`` says, in place: of such a part backward has its inputs alone,
    and computes its inside again. No bit of losses and gradients changes. Another policy replaces the one before.

    ``policy``: a row of ``POLICIES``, ``"block"``, ``"attention"``, ``"mlp"``, ``"every:2"``, ``"ratio:0.5"``,
    ``"sqrt"``, ``"segments:4"``, ``"save_matmuls"``, ``"stages"``; a list of modules or of patterns
    (``lowbit.models.names``); ``{pattern: policy or None}``, for the modules that each pattern names; or a function
    ``(module, path) -> bool``. Of nested modules the outermost is taken, but for modules of a list.
    The plan of ``plan_checkpoints`` is a policy too.

    ``batch`` and ``loss``: as ``estimate`` takes them. With a batch the report says what activations are kept for
    backward, before and after, as estimated.

    ``to``: ``"cpu"`` or a directory, where the kept inputs are moved until backward (``offload_activations``).

    The second run has the autocast, the random state, the backend (``use_backend``), the buffers and the states in
    plain attributes of the first, the mode of each module (``train``, ``eval``), ``requires_grad``, numbers such as a
    dropout's, and torch's default dtype and kernels of attention. It leaves all as it is, such as the running
    statistics of BatchNorm; inside torch.compile torch's own
    checkpointing does it, one module at a time. Without gradients nothing changes. Names of parameters, ``isinstance``,
    copies and pickles stay as they are; a module's class is called ``Checkpointed...``. Modules may be converted before
    and after (``quantize_``, ``train.prepare_``, ``train.convert_``). Gradient checkpointing of transformers is
    switched off where it is on, and a cache of keys and values is not passed to a checkpointed layer in training mode.

    A module must not write to its inputs, its weights must stay until backward, and it must compute the same twice:
    ``NotReplayed``, a RuntimeError, names one that does not. What nothing tells: weights that are written to or
    assigned through ``weight.data``, those of modules that FSDP2 has sharded, those that step in backward
    (``in_backward_``), and any weights in compiled code, where torch's checkpointing looks at none; and, under
    ``"save_matmuls"``, results that are written into where torch does not see it, as through ``numpy()``.

    Raises ValueError for an unknown policy, one that chooses nothing, a pattern without a match, and for modules that
    are not of ``model``; TypeError for what is no policy; each before anything is changed.
    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
    """
    check_model(model)
    chosen = choose(model, policy)
    place = None if to is None else Offload(to)
    names = {id(module): name for name, module in model.named_modules()}
    kept = Kept(model, batch, loss)
    uncheckpoint_(model)
    notes = _switch_off(model)
    numbered = place_of(model) is not None
    for one in chosen:
        segment = Segment(len(one.modules), one.contexts, place)
        for index, module in enumerate(one.modules):
            wrap(module, Recomputed(names[id(module)], segment, index, numbered))
    layers = {names[id(module)]: module for one in chosen for module in one.modules}
    report = report_on("memory.checkpoint_", model, layers, "checkpointed")
    return kept.told(replace(report, notes=notes + _saves_little(model, layers.values())))


def uncheckpoint_(model: nn.Module) -> Report:
    """Undo ``checkpoint_``, in place; nothing where nothing is checkpointed."""
    check_model(model)
    modules = {path: model.get_submodule(path) for path, _ in unwrap_all(model, "memory.uncheckpoint_", Recomputed)}
    return report_on("memory.uncheckpoint_", model, modules, "restored")


def recomputing(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Within, each of ``modules`` is checkpointed; afterwards it is what it was."""
    others = [module for module in dict.fromkeys(modules) if wrapper_of(module, Recomputed) is None]
    return wrapped((module, Recomputed(type(module).__name__, Segment(1))) for module in others)


#: A policy that checkpoints less than this share of a model's weights saves next to nothing.
_LITTLE = 0.05


def _saves_little(model: nn.Module, chosen: Iterable[nn.Module]) -> tuple[str, ...]:
    """What the report says if most of the model is outside of what is checkpointed. Embeddings are not counted."""
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) for p in m.parameters()}
    total = sum(p.numel() for p in model.parameters() if id(p) not in tables)
    inside = sum(p.numel() for p in nn.ModuleList(chosen).parameters() if id(p) not in tables)
    if not chosen or not total or inside >= _LITTLE * total:
        return ()
    return (
        f"warning: what is checkpointed holds {inside / total:.1%} of the weights outside of embeddings, so nearly all "
        f"activations are kept; lb.estimate says how many, and a list of modules chooses others",
    )


def _switch_off(model: nn.Module) -> tuple[str, ...]:
    """Switch the gradient checkpointing of transformers off; what the report says of it."""
    on = [module for module in model.modules() if vars(module).get("gradient_checkpointing")]
    for module in on:
        module.gradient_checkpointing = False  # type: ignore[assignment]
    return ("transformers' gradient checkpointing is switched off; this takes its place",) if on else ()
