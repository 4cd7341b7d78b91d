"""TrainingSettings: all techniques that a plan or a rung of the ladder uses, and functions that apply them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import memory, optim
from lowbit.checkpointing.block_table import BlockOptions, blocks_of
from lowbit.dist_utils import processes, same_random_numbers
from lowbit.distributed.strategies import STRATEGIES, shard_
from lowbit.models.batches import call
from lowbit.optim.names import FAMILIES
from lowbit.plan.adapters import add_adapters_, quantize_base_
from lowbit.tiled.causal_loss import fusing_libraries
from lowbit.train import compress_activations_, mixed_, prepare_
from lowbit.user_warnings import warn

__all__ = [
    "ARITHMETIC", "PLACEMENT", "PREPARE", "STEPPING", "TrainingSettings", "accumulate", "arrange_", "make_optimizer",
    "offloading", "optimizer_class", "policy_of", "prepare_model_", "require_processes", "sharded",
]  # fmt: skip


@dataclass(frozen=True)
class TrainingSettings:
    """The techniques of a training run. The defaults are plain training in fp32 with torch's AdamW."""

    checkpoint: str | tuple[str, ...] | None = None
    """Checkpointing policy, or one option per block; None saves all activations."""
    attention: bool = False
    """Whether attention is computed without allocating the scores (``lb.memory.attention_``)."""
    fused_loss: bool = False
    """Whether the loss is computed without allocating the logits (``lb.memory.fuse_loss_``)."""
    tiles: int | None = None
    """Tokens on which feed-forward parts run at a time (``lb.memory.tile_``); None: all."""
    precision: str | None = None
    """Precision of matmuls and of their stored weights (``lb.train.mixed_``); None keeps the model's."""
    optimizer: str = "adamw"
    """Optimizer: a family of ``lowbit.optim.names``."""
    bits: int = 32
    """Bits of the optimizer states: 32, 8 or 4."""
    master: str = "residual"
    """How the optimizer updates 16-bit matrices: ``"residual"`` or ``"stochastic"``. fp16 weights have fp32 masters."""
    recipe: str | None = None
    """Recipe of the Linear layers (``lb.train.prepare_``)."""
    activation_codes: bool = False
    """Whether norms and activation functions save 8-bit values for backward (``lb.train.compress_activations_``)."""
    offload_states: bool = False
    """Whether optimizer states are on disk, or for a GPU in host memory."""
    offload_activations: bool = False
    """Whether activations saved for backward are on disk, or for a GPU in host memory."""
    offload_weights: bool = False
    """Whether gradients and the weights of idle blocks are on disk, or for a GPU in host memory."""
    resident: int = 0
    """Number of blocks whose weights stay in memory while those of the others are offloaded."""
    micro_batches: int = 1
    """Number of micro-batches per batch."""
    adapters: int | str | None = None
    """LoRA adapters that are trained instead of the weights: their rank, or a ``peft.LoraConfig`` as JSON."""
    base: str | None = None
    """Recipe of the frozen layers (``lb.quantize_``)."""
    gpus: int = 1
    """Number of processes that train together."""
    strategy: str = "ddp"
    """Sharding strategy of these processes: a row of ``lb.distributed.STRATEGIES``."""
    group_size: int | None = None
    """Number of processes per group of ``hsdp``."""
    bf16_params: bool = False
    """Whether the model comes with trainable 16-bit matrices, so that the optimizer needs ``master``."""
    loaded: str = "fp32"
    """Precision of the weights that the model comes with."""
    frozen: bool = False
    """Whether the model comes with frozen linear layers."""
    loss_outside: bool = field(default=False, compare=False)
    """Whether a fused loss is not that of a Hugging Face causal model, so that it may be computed after forward."""

    @property
    def fully(self) -> bool:
        """Whether parameters are sharded between steps (``fully_shard``)."""
        return self.gpus > 1 and STRATEGIES[self.strategy].parameters

    @property
    def group(self) -> int:
        """The number of processes among which the model is sharded."""
        return (self.group_size if STRATEGIES[self.strategy].grouped else None) or self.gpus

    @property
    def working_copies(self) -> bool:
        """Whether matrices are stored in the precision of matmuls. ``fully_shard`` needs parameters of one dtype."""
        return (self.trains_half or self.precision is not None) and not self.fully

    @property
    def trains_half(self) -> bool:
        """Whether matrices that are trained come in 16 bits. Adapters are in fp32."""
        return self.bf16_params and self.adapters is None


#: Fields that change the optimizer step, and fields that change on which process or device the model is.
STEPPING = ("adapters", "base", "bf16_params", "loaded", "precision", "optimizer", "bits", "master")
PLACEMENT = ("gpus", "strategy", "group_size", "offload_weights", "resident")

#: Fields that change forward and backward: all others, so that estimates cannot ignore a new field.
_OTHERS = {
    *PLACEMENT, "optimizer", "bits", "master", "checkpoint", "micro_batches", "offload_states", "offload_activations",
}  # fmt: skip
ARITHMETIC = tuple(field.name for field in fields(TrainingSettings) if field.name not in _OTHERS)


def arrange_(model: nn.Module, settings: TrainingSettings, target: str, **options: Any) -> torch.optim.Optimizer:
    """Apply ``settings`` to ``model`` in place, and return its optimizer, created with ``options`` such as ``lr``.

    States and weights are offloaded to ``target``, if the settings say so. With several processes, all call it, and new
    adapters have the same values in all of them: ``fully_shard`` takes each shard from another process.
    """
    with same_random_numbers() if settings.gpus > 1 else nullcontext():
        prepare_model_(model, settings)
    if settings.offload_weights:
        blocks = blocks_of(model)[settings.resident :]
        memory.stream_blocks_(model, target, [model.get_submodule(path) for path in blocks])
    optimizer = make_optimizer(model.parameters(), settings, **options)
    if isinstance(optimizer, optim.Optimizer) and (settings.offload_states or settings.master == "stochastic"):
        optimizer.begin()  # masters are offloaded with the states; stochastic rounding has none
    if settings.offload_states:
        optim.offload_(optimizer, target, gradients=settings.offload_weights)
    return optimizer


def require_processes(settings: TrainingSettings) -> None:
    """Raise ValueError for settings of several processes, if ``torch.distributed`` runs another number of processes."""
    if settings.gpus not in (1, processes()):
        raise ValueError(
            f"the plan is for {settings.gpus} processes, but {processes()} run; start the script with torchrun "
            f"--nproc-per-node {settings.gpus} and call torch.distributed.init_process_group() first, or plan with "
            f"gpus={processes()}"
        )


def sharded(
    model: nn.Module, optimizer: torch.optim.Optimizer, settings: TrainingSettings
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return model and optimizer, sharded with ``lb.distributed.shard_`` if the settings have several processes."""
    if settings.gpus == 1:
        return model, optimizer
    # Gradients that are not sharded are views of the buckets of DistributedDataParallel, not copies.
    options: dict[str, Any] = {} if STRATEGIES[settings.strategy].gradients else {"gradient_as_bucket_view": True}
    if settings.group_size is not None:
        options["group_size"] = settings.group_size
    return shard_(model, optimizer, settings.strategy, **options)


def _fuse_loss_(model: nn.Module) -> None:
    libraries = fusing_libraries(model)
    if libraries:
        warn(f"plan: {', '.join(libraries)} already computes the loss without logits; lowbit does not change it")
    else:
        memory.fuse_loss_(model)


#: Functions that prepare a model for another value of a field than the default, in the order of their calls.
PREPARE: dict[str, Callable[[nn.Module, Any, TrainingSettings], object]] = {
    "base": lambda model, value, settings: quantize_base_(model, value, settings.adapters),
    "adapters": lambda model, value, settings: add_adapters_(model, value),
    "attention": lambda model, value, settings: memory.attention_(model),
    "fused_loss": lambda model, value, settings: _fuse_loss_(model),
    "tiles": lambda model, value, settings: memory.tile_(model, value),
    "checkpoint": lambda model, value, settings: memory.checkpoint_(model, policy_of(model, value)),
    # Reused weight codes would stay in memory from forward to the optimizer step.
    "recipe": lambda model, value, settings: prepare_(model, value, reuse_weights=False),
    "activation_codes": lambda model, value, settings: compress_activations_(model),
    "precision": lambda model, value, settings: mixed_(model, value, working_copies=settings.working_copies),
}


def prepare_model_(model: nn.Module, settings: TrainingSettings, names: Collection[str] = PREPARE) -> None:
    """Apply the settings that change the model, except offload of its weights, and only those called ``names``."""
    for name, prepare in PREPARE.items():
        value = getattr(settings, name)
        if name in names and value != getattr(TrainingSettings, name):
            prepare(model, value, settings)


def policy_of(model: nn.Module, checkpoint: str | tuple[str, ...]) -> Any:
    """Return the policy for ``checkpoint_``. Raises ValueError for options of another number of blocks."""
    if isinstance(checkpoint, str):
        return checkpoint
    blocks = blocks_of(model)
    if len(blocks) != len(checkpoint):
        raise ValueError(
            f"the plan is for a model with {len(checkpoint)} blocks, but {type(model).__name__} has {len(blocks)}; "
            f"make a plan for this model"
        )
    return BlockOptions(dict(zip(blocks, checkpoint, strict=True)))


def make_optimizer(parameters: Iterable[Any], settings: TrainingSettings, **options: Any) -> torch.optim.Optimizer:
    """Create the optimizer of the settings. The codes of quantized layers are parameters too, but do not train."""
    cls, precision = optimizer_class(settings)
    optimizer: torch.optim.Optimizer = cls(_floats(parameters), **precision, **options)
    return optimizer


def _floats(parameters: Iterable[Any]) -> list[Any]:
    """Return the floating-point parameters; parameter groups keep only these too."""
    return [
        {**entry, "params": _floats(entry["params"])} if isinstance(entry, dict) else entry
        for entry in parameters
        if isinstance(entry, dict) or entry.is_floating_point()
    ]


def optimizer_class(settings: TrainingSettings) -> tuple[Any, dict[str, Any]]:
    """Return a function that creates the optimizer, and its keyword arguments for bits and masters."""
    if settings.optimizer == TrainingSettings.optimizer and settings.bits == 32 and not settings.working_copies:
        return torch.optim.AdamW, {}
    create = next(row.make for row in FAMILIES if row.family == settings.optimizer)
    if not settings.working_copies:
        return create, {"bits": settings.bits}
    master = "fp32" if settings.loaded == "fp16" and settings.precision is None else settings.master
    return create, {"bits": settings.bits, "master": master}


def accumulate(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any, Any], Tensor],
    rest: bool = False,
    look: Callable[[Tensor], object] = lambda value: None,
) -> Tensor:
    """Run forward and backward, and return the detached loss. The model's output is freed before backward.

    Args:
        model: Module to train.
        batch: Batch for the model.
        loss: ``loss(output, batch)``.
        rest: Whether the batch may contain more than forward accepts.
        look: Called with the loss before backward.
    """
    value = loss(call(model, batch, rest=rest), batch)
    look(value)
    value.backward()  # type: ignore[no-untyped-call]
    return value.detach()


def offloading(settings: TrainingSettings, target: str) -> AbstractContextManager[Any]:
    """Return the context for forward and backward, which offloads activations to ``target`` if the settings say so."""
    return memory.offload_activations(target) if settings.offload_activations else nullcontext()
