"""Hugging Face Trainer with a training plan: ``Trainer(model, train_dataset=data, **plan_arguments(plan, args))``.

Trainer reads batch sizes and optimizer class in its constructor, so these are arguments. A callback does the rest: it
prepares the model after Trainer has moved it to the device, and offloads optimizer states before training.
"""

from __future__ import annotations

import copy
import tempfile
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import TrainerCallback, TrainingArguments

from lowbit.models.wrap import Wrapper, wrap
from lowbit.optim import offload_
from lowbit.optim.offload import OFFLOADED
from lowbit.plan import TrainingPlan
from lowbit.plan.settings import TrainingSettings, offloading, optimizer_class, prepare_model_
from lowbit.plan.techniques import STRATEGY, in_use

__all__ = ["RequireSharding", "plan_arguments"]


class Refusal(NamedTuple):
    """A feature of ``TrainingArguments`` that cannot be combined with a plan."""

    is_used: Callable[[Any, TrainingSettings], Any]
    """Function of the arguments and the plan's settings."""
    feature: str
    remedy: str


_ADAMW = ("adamw_torch", "adamw_torch_fused")

REFUSALS = (
    Refusal(lambda args, _: args.deepspeed or args.fsdp, "DeepSpeed or FSDP",
            "a plan needs unsharded parameters; leave them out, or use lowbit.optim and lowbit.memory directly"),
    Refusal(lambda args, _: args.n_gpu > 1, "several GPUs in one process",
            "a plan is for one device; start one process per GPU with torchrun, or set CUDA_VISIBLE_DEVICES"),
    Refusal(lambda args, settings: args.fp16 or (args.bf16 and settings.precision != "bf16"), "mixed precision",
            "the plan chooses the precision; leave out fp16 and bf16, or plan with require=('bf16',)"),
    Refusal(lambda args, _: args.auto_find_batch_size, "auto_find_batch_size",
            "the plan chooses the number of micro-batches; leave it out"),
    Refusal(lambda args, _: str(getattr(args.optim, "value", args.optim)) not in _ADAMW or args.optim_args,
            "an optimizer other than AdamW",
            f"the plan uses its own AdamW; leave out optim_args, and set optim to one of {', '.join(_ADAMW)}"),
    Refusal(lambda _, settings: settings.optimizer != TrainingSettings.optimizer, "AdamW",
            "this plan uses another optimizer; plan without requiring it, or use plan.apply_"),
)  # fmt: skip


def plan_arguments(
    plan: TrainingPlan, args: TrainingArguments, *, callbacks: Iterable[Any] = (), directory: str | Path | None = None
) -> dict[str, Any]:
    """Keyword arguments for a Hugging Face Trainer that trains with a plan.

    Micro-batches of the plan become ``gradient_accumulation_steps``, so that an optimizer step sees as many rows as
    without the plan. If their number does not divide the batch, the next larger divisor is used.

    Two things differ from ``plan.apply_`` and ``Run.step``. Trainer does not switch to a cheaper setting if memory runs
    out. Losses and states may differ in rounding: Trainer divides the loss sum of each micro-batch by the number of all
    targets, and its parameter groups (with and without weight decay) change the random bits of 8-bit states.

    Args:
        plan: The training plan.
        args: The arguments; not changed. ``per_device_train_batch_size`` is the batch size of the plan. Learning rate,
            betas, epsilon and weight decay apply; the plan replaces checkpointing.
        callbacks: Your own callbacks.
        directory: Where to offload; by default the directory for temporary files, or host memory for a model on a GPU.

    Returns:
        ``args``, ``callbacks`` and ``optimizer_cls_and_kwargs``.

    Raises:
        ValueError: ``args`` or the plan need something that the other does not support. ``Trainer(...)`` and
            ``train()`` raise it for another model than the plan's, or another optimizer.
    """
    settings = plan.settings
    for dimension, technique in in_use(settings).items():
        if technique.acts == "placement":
            option = "gpus=1" if dimension == STRATEGY else f"exclude=({technique.name!r},)"
            raise ValueError(
                f"trainer.plan_arguments: the plan has {technique.name!r} ({technique.about}), which Trainer does not "
                f"support, because it places the model itself; plan with {option}, or use plan.apply_"
            )
    for row in REFUSALS:
        if row.is_used(args, settings):
            raise ValueError(
                f"trainer.plan_arguments: args ask for {row.feature}, which cannot be combined with a plan: "
                f"{row.remedy}"
            )
    rows = args.per_device_train_batch_size
    parts = next((count for count in range(settings.micro_batches, rows) if rows % count == 0), rows)
    changed = copy.copy(args)
    changed.per_device_train_batch_size = rows // parts
    changed.gradient_accumulation_steps = args.gradient_accumulation_steps * parts
    if settings.checkpoint is not None:
        for name in ("activation_checkpointing", "gradient_checkpointing"):
            if hasattr(changed, name):
                setattr(changed, name, False)
    cls, arguments = optimizer_class(settings)
    betas = (args.adam_beta1, args.adam_beta2)
    options = {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon, **arguments}
    return {
        "args": changed,
        "callbacks": [_PlanCallback(plan, directory), *callbacks],
        "optimizer_cls_and_kwargs": (cls, options),
    }


class RequireSharding(TrainerCallback):  # type: ignore[misc]
    """Raises an error if a Trainer is asked for FSDP, but would not shard the model or would fail.

    In a process with layers of lowbit every Trainer has it (``transformers.trainer.DEFAULT_CALLBACKS``). It does
    nothing for models without modules of lowbit.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Check the model at the end of ``Trainer(...)``; raises ValueError."""
        if not args.fsdp or args.fsdp_config.get("xla", False):
            return
        if any(type(module).__module__.startswith("lowbit.") for module in model.modules()):
            _require_sharding(model)


def _require_sharding(model: Any) -> None:
    from accelerate.state import AcceleratorState  # Trainer needs accelerate, the rest of this file does not

    accelerator = AcceleratorState()
    plugin = getattr(accelerator, "fsdp_plugin", None)
    if plugin is None:
        raise ValueError(
            f"Trainer: args ask for FSDP, but Accelerate only shards on several accelerators; it found "
            f"{accelerator.distributed_type.value}, and every process would keep the whole model. Leave out fsdp, or "
            f"use lowbit.distributed.shard_(model, optimizer, 'zero3') in your own training loop"
        )
    if plugin.cpu_ram_efficient_loading:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        buffers = [name for name in model.state_dict() if name not in parameters]
        if buffers:
            raise ValueError(
                f"Trainer: cpu_ram_efficient_loading needs a model with parameters only, but this model has "
                f"{len(buffers)} other tensors, the first of them {buffers[0]}; leave it out of fsdp_config, so that "
                f"every process loads the model"
            )


class _PlanCallback(TrainerCallback):  # type: ignore[misc]
    """Prepares the model of a Trainer, and offloads its optimizer states."""

    def __init__(self, plan: TrainingPlan, directory: str | Path | None) -> None:
        self._identity, self._settings, self._directory = plan.identity, plan.settings, directory
        self._model: weakref.ref[nn.Module] | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if kwargs.get("optimizer") is not None:
            raise ValueError(
                "trainer.plan_arguments: expected a Trainer that creates the plan's optimizer, got "
                "optimizers=(...); leave it out, or use plan.apply_(model)"
            )
        if self._model is not None:
            raise ValueError(
                "trainer.plan_arguments: these arguments are another Trainer's; call plan_arguments for each Trainer"
            )
        self._identity.check(model, "trainer.plan_arguments")
        prepare_model_(model, self._settings)
        if self._settings.offload_activations:
            wrap(model, _Offloading(self._settings, self._target(model)))
        self._model = weakref.ref(model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        if model is None or self._model is None or self._model() is not model:
            raise ValueError(
                "trainer.plan_arguments: expected the model that Trainer was created with, got another model, which is "
                "not prepared; give Trainer a model, not model_init"
            )
        inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps the optimizer
        cls, arguments = optimizer_class(self._settings)
        expected = {name: value for name, value in arguments.items() if name != "bits"}
        if type(inner) is not cls or any(inner.param_groups[0][name] != value for name, value in expected.items()):
            raise ValueError(
                f"trainer.plan_arguments: expected the plan's {cls.__module__}.{cls.__name__}, got "
                f"{type(inner).__module__}.{type(inner).__name__}; pass all that plan_arguments returns to Trainer"
            )
        if self._settings.offload_states and not hasattr(inner, OFFLOADED):
            offload_(inner, self._target(model))

    def _target(self, model: Any) -> str:
        on_gpu = any(param.is_cuda for param in model.parameters())
        return str(self._directory or ("cpu" if on_gpu else tempfile.gettempdir()))


@dataclass(eq=False)
class _Offloading(Wrapper):
    """Runs the model with offloaded activations."""

    settings: TrainingSettings
    target: str

    def __call__(self, module: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with offloading(self.settings, self.target):
            return forward(*args, **kwargs)
