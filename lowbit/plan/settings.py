"""How a model is trained within a memory: one record of every technique that plans and rungs of the ladder turn on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import memory, optim
from lowbit.checkpointing.block_table import BlockOptions, blocks_of
from lowbit.dist_utils import processes
from lowbit.distributed.strategies import STRATEGIES, shard_
from lowbit.models.batches import call
from lowbit.tiled.fused_loss import fusing_libraries
from lowbit.train import compress_activations_, mixed_, prepare_
from lowbit.user_warnings import warn

__all__ = [
    "ARITHMETIC", "PLACEMENT", "STEPPING", "TrainingSettings", "accumulate", "arrange_", "elsewhere", "make_optimizer",
    "optimizer_class", "policy_of", "prepare_model_", "require_processes", "sharded",
]  # fmt: skip


@dataclass(frozen=True)
class TrainingSettings:
    """How a model trains; as it stands, in plain fp32 with torch's AdamW.

    ``bf16_params``: the model comes with weights that train in 16 bits, of which the optimizer keeps what ``master``
    says, unlike torch's; of fp16 it keeps the weights in fp32. ``loaded``: the precision that weights come in.
    ``checkpoint``: the policy by which backward recomputes, or of each block its option; None for none. ``precision``:
    the precision of products, whose matrices are then stored in it. ``bits``: of the optimizer's states, 32, 8 or 4.
    ``master``: what makes up for matrices of 16 bits in the optimizer, ``"residual"`` or ``"stochastic"``.
    ``attention``: a model of transformers computes it without holding scores; ``fused_loss``: its loss without logits.
    ``recipe``: of the feed-forward layers. ``activation_codes``: norms and activation functions keep codes for
    backward. ``offload_states``: those of the optimizer lie elsewhere, on disk or beside a GPU;
    ``offload_activations``: what backward needs does; ``offload_weights``: weights of blocks do while others compute,
    and gradients. ``micro_batches``: how many parts a batch is taken in. ``gpus``: how many processes train together,
    ``strategy``: how they share the model, a row of ``lowbit.distributed.STRATEGIES``, ``group_size``: of how many
    processes ``hsdp`` makes a group.
    """

    checkpoint: str | tuple[str, ...] | None = None
    attention: bool = False
    fused_loss: bool = False
    precision: str | None = None
    bits: int = 32
    master: str = "residual"
    recipe: str | None = None
    activation_codes: bool = False
    offload_states: bool = False
    offload_activations: bool = False
    offload_weights: bool = False
    micro_batches: int = 1
    gpus: int = 1
    strategy: str = "ddp"
    group_size: int | None = None
    bf16_params: bool = False
    loaded: str = "fp32"

    @property
    def fully(self) -> bool:
        """Whether parameters are shared between steps (``fully_shard``)."""
        return self.gpus > 1 and STRATEGIES[self.strategy].parameters

    @property
    def group(self) -> int:
        """The number of processes among which the model is sharded."""
        return (self.group_size if STRATEGIES[self.strategy].grouped else None) or self.gpus

    @property
    def working_copies(self) -> bool:
        """Whether matrices are stored in the precision of products. ``fully_shard`` takes parameters of one dtype."""
        return (self.bf16_params or self.precision is not None) and not self.fully


#: The fields that decide the step of the optimizer, and those that decide which process or device holds the model.
STEPPING = ("bf16_params", "loaded", "precision", "bits", "master")
PLACEMENT = ("gpus", "strategy", "group_size", "offload_weights")

#: All other fields decide what forward and backward compute, so that estimates never ignore a new field.
_OTHERS = {*PLACEMENT, "bits", "master", "checkpoint", "micro_batches", "offload_states", "offload_activations"}
ARITHMETIC = tuple(field.name for field in fields(TrainingSettings) if field.name not in _OTHERS)


def arrange_(model: nn.Module, settings: TrainingSettings, where: str, **options: Any) -> torch.optim.Optimizer:
    """Make ``model`` train by ``settings``, in place, and make its optimizer with ``options``, such as ``lr``. Offload
    takes states and weights to ``where``.
    """
    prepare_model_(model, settings)
    if settings.offload_weights:
        memory.stream_blocks_(model, where)
    optimizer = make_optimizer(model.parameters(), settings, **options)
    if isinstance(optimizer, optim.Optimizer) and (settings.offload_states or settings.master == "stochastic"):
        optimizer.begin()  # the bits that bf16 lacks go with the states, or are not needed
    if settings.offload_states:
        optim.offload_(optimizer, where, gradients=settings.offload_weights)
    return optimizer


def require_processes(settings: TrainingSettings) -> None:
    """Raises ValueError where settings are of several processes, and ``torch.distributed`` runs other than so many."""
    if settings.gpus not in (1, processes()):
        raise ValueError(
            f"the plan is of {settings.gpus} processes, and {processes()} run; start the script with torchrun "
            f"--nproc-per-node {settings.gpus}, and call torch.distributed.init_process_group() first, or plan with "
            f"gpus={processes()}"
        )


def sharded(
    model: nn.Module, optimizer: torch.optim.Optimizer, settings: TrainingSettings
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """What ``lowbit.distributed.shard_`` makes of them by the settings; on one process they are as they were."""
    if settings.gpus == 1:
        return model, optimizer
    options: dict[str, Any] = {} if settings.fully else {"gradient_as_bucket_view": True}
    if settings.group_size is not None:
        options["group_size"] = settings.group_size
    return shard_(model, optimizer, settings.strategy, **options)


def prepare_model_(model: nn.Module, settings: TrainingSettings) -> None:
    """What ``arrange_`` does to the model but for the place of its weights."""
    if settings.attention:
        memory.attention_(model)
    if settings.fused_loss:
        libraries = fusing_libraries(model)
        if libraries:
            warn(f"plan: {', '.join(libraries)} computes the loss of this model without logits; lowbit leaves it so")
        else:
            memory.fuse_loss_(model)
    if settings.checkpoint is not None:
        memory.checkpoint_(model, policy_of(model, settings.checkpoint))
    if settings.recipe is not None:
        # Codes of weights that serve all micro-batches would stay from forward to the optimizer's step.
        prepare_(model, settings.recipe, reuse_weights=False)
    if settings.activation_codes:
        compress_activations_(model)
    if settings.precision is not None:
        mixed_(model, settings.precision, working_copies=settings.working_copies)


def policy_of(model: nn.Module, checkpoint: str | tuple[str, ...]) -> Any:
    """What ``checkpoint_`` takes. Raises ValueError for options of another number of blocks."""
    if isinstance(checkpoint, str):
        return checkpoint
    blocks = blocks_of(model)
    if len(blocks) != len(checkpoint):
        raise ValueError(
            f"the plan is of a model with {len(checkpoint)} blocks, and {type(model).__name__} has {len(blocks)}; "
            f"make a plan for this model"
        )
    return BlockOptions(dict(zip(blocks, checkpoint, strict=True)))


def make_optimizer(parameters: Iterable[Any], settings: TrainingSettings, **options: Any) -> torch.optim.Optimizer:
    """The AdamW of the settings. Codes of quantized layers are parameters too, and are left out, as none trains."""
    cls, own = optimizer_class(settings)
    made: torch.optim.Optimizer = cls(_floats(parameters), **own, **options)
    return made


def _floats(parameters: Iterable[Any]) -> list[Any]:
    """Parameters, or groups of them, without those that are codes."""
    return [
        {**one, "params": _floats(one["params"])} if isinstance(one, dict) else one
        for one in parameters
        if isinstance(one, dict) or one.is_floating_point()
    ]


def optimizer_class(settings: TrainingSettings) -> tuple[Any, dict[str, Any]]:
    """The class of AdamW that the settings have, and the keyword arguments by which it has their bits and masters."""
    if settings.working_copies:
        master = "fp32" if settings.loaded == "fp16" and settings.precision is None else settings.master
        return optim.AdamW, {"bits": settings.bits, "master": master}
    if settings.bits == 32:
        return torch.optim.AdamW, {}
    return optim.AdamW, {"bits": settings.bits}


def accumulate(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any, Any], Tensor],
    rest: bool = False,
    look: Callable[[Tensor], object] = lambda value: None,
) -> Tensor:
    """Forward and backward; returns the loss. The answer of the model goes as soon as the loss has been computed.
    ``rest``: the batch may have more than the forward takes. ``look``: is given the loss before backward.
    """
    value = loss(call(model, batch, rest=rest), batch)
    look(value)
    value.backward()  # type: ignore[no-untyped-call]
    return value.detach()


def elsewhere(settings: TrainingSettings, where: str) -> AbstractContextManager[Any]:
    """The context of forward and backward, in which offload keeps activations in ``where``."""
    return memory.offload_activations(where) if settings.offload_activations else nullcontext()
