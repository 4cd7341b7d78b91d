"""``FromDeepSpeed``: a DeepSpeed configuration in the terms of lowbit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from lowbit import optim
from lowbit.checkpointing import checkpoint_
from lowbit.distributed.all_gather import all_gather_
from lowbit.distributed.hooks import compress_gradients_
from lowbit.distributed.strategies import STRATEGIES, shard_
from lowbit.train.loss_scale import LossScaler
from lowbit.train.mixed import mixed_

__all__ = ["SCHEDULES", "FromDeepSpeed"]


# -- schedules --------------------------------------------------------------------------------------------------------
def _warmup(
    step: int,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 1e-3,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> float:
    """DeepSpeed's ``WarmupLR``: the learning rate of a step, counted from 0."""
    steps = max(2, warmup_num_steps)
    if step >= steps:
        return warmup_max_lr
    share = math.log(step + 1) / math.log(steps) if warmup_type == "log" else step / steps
    return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * share


def _warmup_decay(step: int, total_num_steps: int, warmup_num_steps: int = 1000, **options: Any) -> float:
    """DeepSpeed's ``WarmupDecayLR``: ``WarmupLR``, then a line to 0."""
    steps = max(2, warmup_num_steps)
    if step < steps:
        return _warmup(step, warmup_num_steps=warmup_num_steps, **options)
    left = max(0.0, (total_num_steps - step) / max(1.0, total_num_steps - steps))
    low, high = options.get("warmup_min_lr", 0.0), options.get("warmup_max_lr", 1e-3)
    return float(low + (high - low) * left)


#: Learning rates by step, by DeepSpeed's name of the scheduler.
SCHEDULES: Mapping[str, Callable[..., float]] = {"WarmupLR": _warmup, "WarmupDecayLR": _warmup_decay}


def _relative(rate: Callable[[int], float], base: float, step: int) -> float:
    return rate(step) / base


# -- the translation --------------------------------------------------------------------------------------------------
@dataclass
class FromDeepSpeed:
    """A DeepSpeed configuration in the terms of lowbit; ``print`` shows the calls.

    Attributes:
        strategy: Sharding strategy, a row of ``STRATEGIES``.
        shard: Keyword arguments of ``shard_``.
        precision: Argument of ``lb.train.mixed_``; None for fp32.
        scaler: Keyword arguments of ``lb.train.LossScaler``, for fp16.
        optimizer: Class and keyword arguments; None if the configuration leaves the optimizer to the caller.
        scheduler: Class name and arguments of DeepSpeed's scheduler, see ``schedule``.
        clip: Largest norm of all gradients.
        micro_batches: Micro-batches per step.
        batch_size: Samples of a process per micro-batch.
        world_size: Number of processes; None if unknown.
        checkpoint: Policy of ``lb.memory.checkpoint_``.
        checkpoint_to: Its argument ``to``.
        offload_states: Argument ``to`` of ``lb.optim.offload_``.
        gather: Format of ``all_gather_``.
        compress: Format of ``compress_gradients_``.
        notes: Translated keys whose meaning differs, with the difference.
        auto: Keys with the value ``"auto"``, which the Trainer of transformers decides.
        unsupported: Keys without a counterpart, with the reason.
    """

    strategy: str = "ddp"
    shard: dict[str, Any] = field(default_factory=dict)
    precision: str | None = None
    scaler: dict[str, Any] = field(default_factory=dict)
    optimizer: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None
    scheduler: tuple[str, dict[str, Any]] | None = None
    clip: float | None = None
    micro_batches: int = 1
    batch_size: int | None = None
    world_size: int | None = None
    checkpoint: str | None = None
    checkpoint_to: str | None = None
    offload_states: str | None = None
    gather: str | None = None
    compress: str | None = None
    notes: dict[str, str] = field(default_factory=dict)
    auto: tuple[str, ...] = ()
    unsupported: dict[str, str] = field(default_factory=dict)

    @property
    def working_copies(self) -> bool:
        """Whether weights are stored in bf16, with fp32 masters in the optimizer, as DeepSpeed stores them."""
        lowbit = self.optimizer is not None and issubclass(self.optimizer[0], optim.Optimizer)
        return self.precision == "bf16" and lowbit and not STRATEGIES[self.strategy].parameters

    def apply_(
        self, model: nn.Module, make: Callable[[Any], torch.optim.Optimizer] | None = None
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Prepare ``model`` in place, create its optimizer, and shard both with ``shard_``.

        The training loop does the rest: clipping, micro-batches, the loss scaler and the schedule.

        Args:
            model: The model, the same in all processes.
            make: A function from parameters to the optimizer. Default: the optimizer of the configuration.

        Returns:
            The model to call in place of ``model``, and the optimizer.

        Raises:
            ValueError: The configuration has no optimizer and ``make`` is missing; or as ``shard_``.
        """
        if make is None and self.optimizer is None:
            raise ValueError(
                "from_deepspeed: the configuration has no optimizer; pass apply_(model, make=...) with a function "
                "from the model's parameters to an optimizer"
            )
        copies = self.working_copies and make is None
        if self.checkpoint is not None:
            checkpoint_(model, self.checkpoint, to=self.checkpoint_to)
        if self.precision is not None:
            mixed_(model, self.precision, working_copies=copies)
        if self.gather is not None:
            all_gather_(model, self.gather)
        optimizer = self._optimizer(model, copies) if make is None else make(model.parameters())
        wrapped, optimizer = shard_(model, optimizer, self.strategy, **self.shard)
        if self.compress is not None:
            compress_gradients_(wrapped, self.compress)
        if self.offload_states is not None:
            optim.offload_(optimizer, self.offload_states)
        return wrapped, optimizer

    def _optimizer(self, model: nn.Module, copies: bool) -> torch.optim.Optimizer:
        assert self.optimizer is not None
        make: Callable[..., torch.optim.Optimizer] = self.optimizer[0]
        return make(model.parameters(), **self.optimizer[1], **({"master": "fp32"} if copies else {}))

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR | None:
        """The scheduler of the configuration; None without one. Call its ``step`` after each optimizer step."""
        if self.scheduler is None:
            return None
        rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        if not all(rates):
            raise ValueError("from_deepspeed: the schedule needs an optimizer whose learning rate is not 0")
        rate = partial(SCHEDULES[self.scheduler[0]], **self.scheduler[1])
        return torch.optim.lr_scheduler.LambdaLR(optimizer, [partial(_relative, rate, base) for base in rates])

    def loss_scaler(self) -> LossScaler:
        """The loss scaler of the configuration; it does nothing unless ``precision`` is fp16."""
        return LossScaler(enabled=self.precision == "fp16", **self.scaler)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if self.checkpoint is not None:
            yield _call("lb.memory.checkpoint_", "model", repr(self.checkpoint), to=self.checkpoint_to)
        if self.precision is not None:
            yield _call("lb.train.mixed_", "model", repr(self.precision), working_copies=self.working_copies or None)
        if self.gather is not None:
            yield _call("lb.distributed.all_gather_", "model", repr(self.gather))
        if self.optimizer is None:
            yield "optimizer = ...  # the configuration leaves it to the caller"
        else:
            kind, options = self.optimizer
            name = f"{'lb' if issubclass(kind, optim.Optimizer) else 'torch'}.optim.{kind.__name__}"
            options = {**options, **({"master": "fp32"} if self.working_copies else {})}
            yield "optimizer = " + _call(name, "model.parameters()", **options)
        shard = _call("lb.distributed.shard_", "model", "optimizer", repr(self.strategy), **self.shard)
        yield f"model, optimizer = {shard}"
        if self.compress is not None:
            yield _call("lb.distributed.compress_gradients_", "model", repr(self.compress))
        if self.offload_states is not None:
            yield _call("lb.optim.offload_", "optimizer", repr(self.offload_states))
        if self.precision == "fp16":
            yield "scaler = " + _call("lb.train.LossScaler", **self.scaler)
        if self.scheduler is not None:
            yield f"scheduler = config.schedule(optimizer)  # {self.scheduler[0]}"
        if self.batch_size is not None:
            count = "" if self.world_size is None else f", world_size={self.world_size}"
            yield f"# batch_size={self.batch_size} per process in each micro-batch{count}"
        if self.micro_batches > 1:
            yield f"# {self.micro_batches} micro-batches per step: lb.memory.micro_batches(batch, {self.micro_batches})"
        if self.clip is not None:
            yield f"nn.utils.clip_grad_norm_(model.parameters(), {self.clip})  # before each optimizer step"
        yield from (f"# note: {key}: {text}" for key, text in self.notes.items())
        yield from (f"# decided by the Trainer of transformers: {key}" for key in self.auto)
        yield from (f"# no counterpart: {key}: {reason}" for key, reason in self.unsupported.items())


def _call(name: str, *args: str, **options: Any) -> str:
    named = [f"{key}={value if isinstance(value, torch.dtype) else repr(value)}" for key, value in options.items()
             if value is not None]  # fmt: skip
    return f"{name}({', '.join([*args, *named])})"
