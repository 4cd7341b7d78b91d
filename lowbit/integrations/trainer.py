"""transformers' Trainer by a plan: ``Trainer(model, train_dataset=data, **plan_arguments(plan, args))``.

Trainer reads the sizes of batches and the optimizer's class as it is made, so these are arguments. A callback does the
rest: it prepares the model once Trainer has moved it to its device, and moves states of the optimizer before training.
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
from lowbit.plan.settings import TrainingSettings, elsewhere, optimizer_class, prepare_model_
from lowbit.plan.techniques import STRATEGY, in_use

__all__ = ["RequireSharding", "plan_arguments"]


class Refusal(NamedTuple):
    """What Trainer cannot do by a plan: ``asked(args, settings)`` says whether it is asked for."""

    asked: Callable[[Any, TrainingSettings], Any]
    what: str
    remedy: str


_ADAMW = ("adamw_torch", "adamw_torch_fused")

REFUSALS = (
    Refusal(lambda args, _: args.deepspeed or args.fsdp, "DeepSpeed or FSDP",
            "a plan is one of whole parameters; leave them out, or train by lowbit.optim and lowbit.memory yourself"),
    Refusal(lambda args, _: args.n_gpu > 1, "several GPUs in one process",
            "a plan is one of a single device; start one process a GPU with torchrun, or set CUDA_VISIBLE_DEVICES"),
    Refusal(lambda args, settings: args.fp16 or (args.bf16 and settings.precision != "bf16"), "its own mixed precision",
            "the plan says what is computed in what; leave out fp16 and bf16, or plan with require=('bf16',)"),
    Refusal(lambda args, _: args.auto_find_batch_size, "auto_find_batch_size",
            "the plan says in how many parts a batch is taken; leave it out"),
    Refusal(lambda args, _: str(getattr(args.optim, "value", args.optim)) not in _ADAMW or args.optim_args,
            "an optimizer other than AdamW",
            f"the plan brings its AdamW; leave out optim_args, and set optim to one of {', '.join(_ADAMW)}"),
)  # fmt: skip


def plan_arguments(
    plan: TrainingPlan, args: TrainingArguments, *, callbacks: Iterable[Any] = (), directory: str | Path | None = None
) -> dict[str, Any]:
    """The keyword arguments that make transformers' Trainer train by ``plan``: ``args``, ``callbacks``, and
    ``optimizer_cls_and_kwargs``.

    ``per_device_train_batch_size`` of ``args`` is the batch that was planned for. Parts of it become
    ``gradient_accumulation_steps``, so that a step of the optimizer sees the rows that it would see without the plan.
    Where the planned number of parts does not divide the batch, the next larger one that does is taken. ``args`` itself
    stays as it is. Learning rate, betas and weight decay are those of ``args``; checkpointing of ``args`` gives way to
    the plan's. ``callbacks``: yours. ``directory``: where states on disk go; the system's for temporary files unless
    given, and host memory for a model on a GPU.

    Trainer's steps do not adapt where memory runs out, as ``Run.step`` does. Losses are those of ``Run.step`` but for
    the order of sums: Trainer divides the sum over a part by the number of all targets. States of 8 bits round by
    random bits of each parameter's place in the optimizer, and Trainer has groups with and without weight decay.
    Raises ValueError for what Trainer cannot do by a plan, before anything is changed; in ``Trainer(...)`` and
    ``train()`` for a model or an optimizer that the plan did not make.
    """
    settings = plan.settings
    for dimension, technique in in_use(settings).items():
        if technique.acts == "placement":
            instead = "gpus=1" if dimension == STRATEGY else f"exclude=({technique.name!r},)"
            raise ValueError(
                f"trainer.plan_arguments: the plan has {technique.name!r} ({technique.about}), which plan.apply_ "
                f"does and Trainer does not, since it places the model itself; plan with {instead}"
            )
    for row in REFUSALS:
        if row.asked(args, settings):
            raise ValueError(
                f"trainer.plan_arguments: args ask for {row.what}, which does not go with a plan: {row.remedy}"
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
    cls, own = optimizer_class(settings)
    options = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon, **own}
    return {
        "args": changed,
        "callbacks": [_ByPlan(plan, directory), *callbacks],
        "optimizer_cls_and_kwargs": (cls, options),
    }


class RequireSharding(TrainerCallback):  # type: ignore[misc]
    """Refuses a Trainer that is asked for FSDP and would not shard its model, or would fail at it.

    Every Trainer of a process with layers of lowbit has it (``transformers.trainer.DEFAULT_CALLBACKS``). A model
    without modules of lowbit is not looked at.
    """

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Raises ValueError, at the end of ``Trainer(...)``."""
        if not args.fsdp or args.fsdp_config.get("xla", False):
            return
        if any(type(module).__module__.startswith("lowbit.") for module in model.modules()):
            _require_sharding(model)


def _require_sharding(model: Any) -> None:
    from accelerate.state import AcceleratorState  # which Trainer needs, and this file does not

    accelerator = AcceleratorState()
    plugin = getattr(accelerator, "fsdp_plugin", None)
    if plugin is None:
        raise ValueError(
            f"Trainer: args ask for FSDP, and Accelerate shards on several accelerators alone; it found "
            f"{accelerator.distributed_type.value}, and every process would keep the whole model. Leave fsdp out, or "
            f"use lowbit.distributed.shard_(model, optimizer, 'zero3') in a loop of your own"
        )
    if plugin.cpu_ram_efficient_loading:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        others = [name for name in model.state_dict() if name not in parameters]
        if others:
            raise ValueError(
                f"Trainer: cpu_ram_efficient_loading needs a model whose state is parameters alone, and this one has "
                f"{len(others)} other tensors, the first of them {others[0]}; leave it out of fsdp_config, so that "
                f"every process makes the same model"
            )


class _ByPlan(TrainerCallback):  # type: ignore[misc]
    """Prepares the model that Trainer is given, and places the states of the optimizer that it makes."""

    def __init__(self, plan: TrainingPlan, directory: str | Path | None) -> None:
        self._identity, self._settings, self._directory = plan.identity, plan.settings, directory
        self._model: weakref.ref[nn.Module] | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **given: Any) -> None:
        if given.get("optimizer") is not None:
            raise ValueError(
                "trainer.plan_arguments: expected a Trainer that makes its optimizer by the plan, got "
                "optimizers=(...); leave it out, or use plan.apply_(model), whose run has one"
            )
        if self._model is not None:
            raise ValueError(
                "trainer.plan_arguments: these arguments are another Trainer's; call plan_arguments for each Trainer"
            )
        self._identity.check(model, "trainer.plan_arguments")
        prepare_model_(model, self._settings)
        if self._settings.offload_activations:
            wrap(model, _Offloading(self._settings, self._where(model)))
        self._model = weakref.ref(model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        if model is None or self._model is None or self._model() is not model:
            raise ValueError(
                "trainer.plan_arguments: expected the model that Trainer was made with, got another, which the plan "
                "did not prepare; give Trainer a model, not model_init"
            )
        inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        cls, own = optimizer_class(self._settings)
        wanted = {name: value for name, value in own.items() if name != "bits"}
        if type(inner) is not cls or any(inner.param_groups[0][name] != value for name, value in wanted.items()):
            raise ValueError(
                f"trainer.plan_arguments: expected the plan's {cls.__module__}.{cls.__name__}, got "
                f"{type(inner).__module__}.{type(inner).__name__}; pass all that plan_arguments returns to Trainer"
            )
        if self._settings.offload_states and not hasattr(inner, OFFLOADED):
            offload_(inner, self._where(model))

    def _where(self, model: Any) -> str:
        on_gpu = any(param.is_cuda for param in model.parameters())
        return str(self._directory or ("cpu" if on_gpu else tempfile.gettempdir()))


@dataclass(eq=False)
class _Offloading(Wrapper):
    """The model with its activations elsewhere."""

    settings: TrainingSettings
    where: str

    def __call__(self, module: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with elsewhere(self.settings, self.where):
            return forward(*args, **kwargs)
