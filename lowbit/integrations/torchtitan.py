"""torchtitan: ``LowbitConverter``, a ModelConverter that makes the layers of its model train in low precision, and
``PlanConverter``, one that makes its model train by a plan.

They have the contract of ``torchtitan.protocols.model_converter``, both in the form that names converters in a job's
config (``model.converters = ["lowbit"]``) and in the form that lists configs with a ``build``. torchtitan is not
imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowbit import recipes
from lowbit.convert.select import Skip
from lowbit.plan import TECHNIQUES, Plan
from lowbit.plan.settings import Settings, optimizer_class, prepare_model_
from lowbit.plan.techniques import PARTS, WAY, in_use
from lowbit.recipes import Recipe
from lowbit.train import prepare_
from lowbit.train.gemms import Products

__all__ = ["JobConfig", "LowbitConverter", "PlanConverter"]

#: What torchtitan calls the converters in ``model.converters``. The first is the name of their section too.
NAME, PLAN_NAME = "lowbit", "lowbit_plan"
#: torchtitan's models call their output layer so.
_OUTPUT = ("lm_head", "output")

Recipes = str | Recipe | recipes.Plan | Mapping[Any, str | Recipe | None]


@dataclass(kw_only=True)
class Config:
    """Which layers train in what: ``recipe`` and ``skip`` are those of ``lowbit.train.prepare_``.

    ``skip``: by default the output layer, ``lm_head`` or ``output``, of a model that has one. ``plan``: the file of a
    plan for ``PlanConverter``, which has its own recipe; ``done_by_job``: what of it the job does, see there.
    """

    recipe: Recipes = "fp8"
    skip: Skip | None = None
    plan: str | None = None
    done_by_job: tuple[str, ...] = ()

    def build(self, *, parallel_dims: Any = None, **_: Any) -> LowbitConverter | PlanConverter:
        """The converter, of a plan where there is one; torchtitan says more of its job than it needs."""
        return LowbitConverter(self, parallel_dims) if self.plan is None else PlanConverter(self, parallel_dims)


@dataclass
class JobConfig:
    """A section ``[lowbit]`` for torchtitan's JobConfig, merged by ``--job.custom_config_module``."""

    lowbit: Config = field(default_factory=Config)


def _section(config: Any) -> Config:
    """What a converter is given: its own config, or the section of a job's."""
    return config if isinstance(config, Config) else getattr(config, NAME, None) or Config()


class _Converter:
    """What all converters have. Raises ValueError for tensor parallelism."""

    Config = Config

    def __init__(self, parallel_dims: Any) -> None:
        self.pipelined = bool(getattr(parallel_dims, "pp_enabled", False))
        if getattr(parallel_dims, "tp_enabled", False):
            raise ValueError(
                f"{type(self).__name__}: expected whole layers, but the job shards them by tensor parallelism; set "
                f"parallelism.tensor_parallel_degree = 1, and shard by FSDP"
            )

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Nothing is left to do: the training state of ``model`` follows its optimizer."""

    def key_filter(self) -> Callable[[str], bool]:
        """Which keys of a ``state_dict`` are of lowbit, and in no checkpoint of the plain model."""
        return lambda key: "lowbit_state" in key.split(".")

    def state_dict_transform(self) -> None:
        """What is saved needs no change: weights are those of the plain model."""

    def format_adapter(self) -> None:
        """Nor has it a format of its own."""


# -- recipes -----------------------------------------------------------------------------------------------------------
class LowbitConverter(_Converter):
    """torchtitan's ModelConverter for ``lowbit.train.prepare_``.

    ``config``: a ``Config``, or a job's config, whose section ``lowbit`` is read where it has one. ``recipe`` and
    ``skip`` go before what it says. ``parallel_dims``: torchtitan's; None for one process.
    Raises ValueError for tensor parallelism and for a section with a plan, and in ``convert`` for pipeline parallelism
    of a recipe that rounds stochastically or remembers scales, and for what ``prepare_`` refuses.
    """

    def __init__(
        self,
        config: Any = None,
        parallel_dims: Any = None,
        *,
        recipe: Recipes | None = None,
        skip: Skip | None = None,
    ) -> None:
        super().__init__(parallel_dims)
        said = _section(config)
        if said.plan is not None:
            raise ValueError(
                f"LowbitConverter: expected a recipe, but the section has the plan {said.plan!r}; name the converter "
                f"of plans, model.converters = [{PLAN_NAME!r}], or leave plan out"
            )
        self.recipe = said.recipe if recipe is None else recipe
        self.skip = said.skip if skip is None else skip

    def convert(self, model: nn.Module) -> None:
        """Prepare the layers of ``model``, which may be on the meta device, in place; sharding comes afterwards."""
        skip = self.skip
        if skip is None:
            skip = tuple(name for name in _OUTPUT if hasattr(model, name))
        plan = recipes.plan(self.recipe)
        stateful = [one.name for one in plan.recipes if Products.of(one).stateful]
        if self.pipelined and stateful:
            raise ValueError(
                f"LowbitConverter: expected recipes without a state for pipeline parallelism, whose stages would lose "
                f"it, got {', '.join(stateful)}; use fp8, or set parallelism.pipeline_parallel_degree = 1"
            )
        prepare_(model, plan, skip=skip)


# -- plans -------------------------------------------------------------------------------------------------------------
#: What a plan asks for that no ModelConverter can do, as ``done_by_job`` calls it: dimensions of ``TECHNIQUES``.
BEYOND = tuple(
    dimension
    for dimension, row in TECHNIQUES.items()
    if dimension != "masters" and any(technique.acts != "model" for technique in row)
)

#: How a job does it, where the technique's own line of code is not enough.
_BY_JOB = {
    "optimizer": "give the TrainSpec a build_optimizers_fn that makes lowbit.plan.settings.make_optimizer(parameters, "
    "plan.settings, lr=...)",
    "states": "call lb.optim.offload_(optimizer, directory) of each optimizer that build_optimizers_fn makes",
    WAY: "set the degrees of parallelism to so many processes: data_parallel_replicate_degree for ddp, "
    "data_parallel_shard_degree for zero2 and zero3",
    PARTS: "set training.global_batch_size to the rows of a step in all processes, and divide "
    "training.local_batch_size by {settings.micro}",
}


def _beyond(settings: Settings) -> Iterator[tuple[str, str, str]]:
    """By dimension what the settings ask for that no ModelConverter can do, and how a job does it."""
    if optimizer_class(settings)[0] is not torch.optim.AdamW:
        yield "optimizer", f"lowbit.optim.AdamW with bits={settings.bits}", _BY_JOB["optimizer"]
    for dimension, technique in in_use(settings).items():
        if dimension in BEYOND and dimension != "optimizer":
            by_job = _BY_JOB.get(dimension, technique.code).format(settings=settings)
            yield dimension, f"{technique.name!r} ({technique.about})", by_job


class PlanConverter(_Converter):
    """torchtitan's ModelConverter for a plan of ``lb.fit``: checkpoints, recipe and precision of its model.

    ``config``: as of ``LowbitConverter``; its ``plan`` is a file that ``Plan.save`` wrote. ``plan``: a plan or a file,
    which goes before. ``done_by_job``: what of ``BEYOND`` the job does itself; a converter has neither batches
    nor optimizer. The plan is one of a whole model: of what FSDP shards each process holds its part.
    Raises ValueError without a plan; for what the plan asks for that neither a converter nor the job does, with what
    does it; for tensor and pipeline parallelism, and where torchtitan checkpoints activations too.
    """

    def __init__(
        self,
        config: Any = None,
        parallel_dims: Any = None,
        *,
        plan: Plan | str | Path | None = None,
        done_by_job: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__(parallel_dims)
        said = _section(config)
        found = said.plan if plan is None else plan
        if found is None:
            raise ValueError("PlanConverter: expected a plan, got none; set lowbit.plan to a file that plan.save wrote")
        self.plan = found if isinstance(found, Plan) else Plan.load(found)
        self._refuse(said.done_by_job if done_by_job is None else done_by_job)
        mode = getattr(getattr(config, "activation_checkpoint", None), "mode", "none")
        if self.plan.settings.checkpoint is not None and mode != "none":
            raise ValueError(
                f"PlanConverter: the plan recomputes by {self.plan.settings.checkpoint!r}, and torchtitan by {mode!r}, "
                f"which would compute twice; set activation_checkpoint.mode = 'none'"
            )
        if self.pipelined:
            raise ValueError(
                "PlanConverter: expected a whole model, but the job divides it by pipeline parallelism; set "
                "parallelism.pipeline_parallel_degree = 1"
            )

    def convert(self, model: nn.Module) -> None:
        """Make ``model``, which may be on the meta device, train by the plan, in place; sharding comes afterwards."""
        prepare_model_(model, self.plan.settings)

    def _refuse(self, done: Iterable[str]) -> None:
        settings, done = self.plan.settings, tuple(done)
        unknown = set(done) - set(BEYOND)
        if unknown:
            raise ValueError(
                f"PlanConverter: done_by_job names {', '.join(sorted(unknown))}, and there is {', '.join(BEYOND)}"
            )
        for dimension, what, by_job in _beyond(settings):
            if dimension not in done:
                raise ValueError(
                    f"PlanConverter: the plan asks for {what}, which no ModelConverter can do: {by_job}, and add "
                    f"{dimension!r} to lowbit.done_by_job"
                )


def register(protocols: Any) -> None:
    """Tell ``torchtitan.protocols.model_converter`` of the converters, in versions that find converters by name."""
    if hasattr(protocols, "register_model_converter"):
        protocols.register_model_converter(LowbitConverter, NAME)
        protocols.register_model_converter(PlanConverter, PLAN_NAME)
