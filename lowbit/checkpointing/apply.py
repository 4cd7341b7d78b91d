"""``checkpoint_`` and ``uncheckpoint_``: switch gradient checkpointing of a model's modules on and off."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lowbit.checkpointing.caches import place_of
from lowbit.checkpointing.parts import BlockFunction
from lowbit.checkpointing.policies import Choice, choose
from lowbit.checkpointing.segment import Offload, Recomputed, RecomputedFunction, Segment
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
    """Checkpoint modules of ``model``, in place: only their inputs are saved for backward, which runs their forward
    again.

    Losses and gradients are bit-identical to those without checkpointing. A new policy replaces the previous one.
    Without gradients, forward runs as usual.

    The second run restores the state of the first. For the module, this covers buffers, states in plain attributes,
    ``train`` or ``eval`` mode, ``requires_grad``, and numbers such as a dropout probability. It also covers autocast,
    random state, backend (``use_backend``), torch's default dtype and attention kernels. Afterwards all of these, and
    the running statistics of BatchNorm, are as before the second run. Inside torch.compile, torch's own checkpointing
    is used, one module at a time.

    Parameter names, ``isinstance``, copies and pickles are unaffected. The class of a checkpointed module is called
    ``Checkpointed...``. Modules may be converted before and after (``quantize_``, ``train.prepare_``,
    ``train.convert_``). Gradient checkpointing of Hugging Face models is switched off. In training mode a key-value
    cache is not passed to a checkpointed layer.

    A module must not write to its inputs, must compute the same result twice, and its weights must not change before
    backward. Otherwise the call or backward raises ``NotReplayed``, which names the module. Not detected are:

    - Weights that are written to or assigned through ``weight.data``.
    - Weights of modules sharded by FSDP2, and weights that are updated during backward (``in_backward_``).
    - Any weights in compiled code, because torch's checkpointing does not check them.
    - With ``"save_matmuls"``: writes to saved results that torch does not see, for example through ``numpy()``.

    Args:
        model: The model that contains the modules.
        policy: A name from ``POLICIES``: ``"block"``, ``"attention"``, ``"mlp"``, ``"every:2"``, ``"ratio:0.5"``,
            ``"sqrt"``, ``"segments:4"``, ``"save_matmuls"`` or ``"stages"``. Or a list of modules or patterns
            (``lowbit.models.names``), a function ``(module, path) -> bool``, or the result of ``plan_checkpoints``. Or
            a dict ``{pattern: policy or None}``, which applies each policy within the modules that its pattern matches.
            If selected modules are nested, only the outermost is checkpointed, except for modules listed as objects.
        to: ``"cpu"`` or a directory to which the saved inputs are offloaded until backward (see
            ``offload_activations``). By default they stay on their device.
        batch: An example batch, as for ``lb.estimate``. With it, the report has the estimated bytes saved for backward
            before and after.
        loss: A function of output and batch, as for ``lb.estimate``.

    Returns:
        A report of the checkpointed modules.

    Raises:
        ValueError: The policy is unknown, selects no module or has a pattern without a match, or a listed module is not
            part of ``model``. ``model`` is unchanged.
        TypeError: ``policy`` has none of the supported types. ``model`` is unchanged.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
    """
    check_model(model)
    groups = choose(model, policy)
    offload = None if to is None else Offload(to)
    names = {id(module): name for name, module in model.named_modules()}
    activations = Kept(model, batch, loss)
    uncheckpoint_(model)
    notes = _switch_off(model)
    numbered = place_of(model) is not None
    for group in groups:
        segment = Segment(len(group.modules), group.contexts, offload)
        for index, module in enumerate(group.modules):
            if isinstance(module, BlockFunction):
                path = f"{names[id(module.block)]}.{module.name}"
                _replace_function(module, Recomputed(path, segment, index, numbered))
            else:
                wrap(module, Recomputed(names[id(module)], segment, index, numbered))
    modules = [module for group in groups for module in group.modules if isinstance(module, nn.Module)]
    layers = {names[id(module)]: module for module in modules}
    report = report_on("memory.checkpoint_", model, layers, "checkpointed")
    return activations.told(replace(report, notes=notes + _saves_little(model, layers.values())))


def uncheckpoint_(model: nn.Module) -> Report:
    """Undo ``checkpoint_``, in place.

    Args:
        model: A model with or without checkpointed modules.

    Returns:
        A report of the modules that were restored; empty if none was checkpointed.
    """
    check_model(model)
    modules = {path: model.get_submodule(path) for path, _ in unwrap_all(model, "memory.uncheckpoint_", Recomputed)}
    for block in model.modules():
        functions = {name: value for name, value in vars(block).items() if isinstance(value, RecomputedFunction)}
        vars(block).update({name: value.function for name, value in functions.items()})
    return report_on("memory.uncheckpoint_", model, modules, "restored")


def _replace_function(place: BlockFunction, recomputed: Recomputed) -> None:
    vars(place.block)[place.name] = RecomputedFunction(vars(place.block)[place.name], recomputed)


def recomputing(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Return a context in which each of ``modules`` is checkpointed. Modules that already are stay as they are."""
    plain = [module for module in dict.fromkeys(modules) if wrapper_of(module, Recomputed) is None]
    return wrapped((module, Recomputed(type(module).__name__, Segment(1))) for module in plain)


#: A policy that checkpoints a smaller share of the model's weights saves almost no memory.
_LITTLE = 0.05


def _saves_little(model: nn.Module, chosen: Iterable[nn.Module]) -> tuple[str, ...]:
    """Return a warning if the checkpointed modules hold few of the weights. Embeddings are not counted."""
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) for p in m.parameters()}
    total = sum(p.numel() for p in model.parameters() if id(p) not in tables)
    inside = sum(p.numel() for p in nn.ModuleList(chosen).parameters() if id(p) not in tables)
    if not chosen or not total or inside >= _LITTLE * total:
        return ()
    return (
        f"warning: the checkpointed modules hold {inside / total:.1%} of the weights outside of embeddings, so nearly "
        f"all activations are saved; check with lb.estimate, or pass a list of other modules",
    )


def _switch_off(model: nn.Module) -> tuple[str, ...]:
    """Switch the gradient checkpointing of Hugging Face models off, and return a note for the report if it was on."""
    enabled = [module for module in model.modules() if vars(module).get("gradient_checkpointing")]
    for module in enabled:
        module.gradient_checkpointing = False  # type: ignore[assignment]
    return ("gradient checkpointing of transformers is switched off; this takes its place",) if enabled else ()
