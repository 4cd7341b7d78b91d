"""torchtitan: ``LowbitConverter``, a ModelConverter that makes the layers of its model train in low precision.

It has the contract of ``torchtitan.protocols.model_converter``, both in the form that names converters in a job's
config (``model.converters = ["lowbit"]``) and in the form that lists configs with a ``build``. torchtitan is not
imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lowbit import recipes
from lowbit.convert.select import Skip
from lowbit.recipes import Recipe
from lowbit.train import prepare_
from lowbit.train.gemms import Products

__all__ = ["JobConfig", "LowbitConverter"]

#: What torchtitan calls the converter in ``model.converters``.
NAME = "lowbit"
#: torchtitan's models call their output layer so.
_OUTPUT = ("lm_head", "output")

Recipes = str | Recipe | recipes.Plan | Mapping[Any, str | Recipe | None]


@dataclass(kw_only=True)
class Config:
    """Which layers train in what: ``recipe`` and ``skip`` are those of ``lowbit.train.prepare_``.

    ``skip``: by default the output layer, ``lm_head`` or ``output``, of a model that has one.
    """

    recipe: Recipes = "fp8"
    skip: Skip | None = None

    def build(self, *, parallel_dims: Any = None, **_: Any) -> LowbitConverter:
        """The converter; torchtitan says more of its job than it needs."""
        return LowbitConverter(self, parallel_dims)


@dataclass
class JobConfig:
    """A section ``[lowbit]`` for torchtitan's JobConfig, merged by ``--job.custom_config_module``."""

    lowbit: Config = field(default_factory=Config)


class LowbitConverter:
    """torchtitan's ModelConverter for ``lowbit.train.prepare_``.

    ``config``: a ``Config``, or a job's config, whose section ``lowbit`` is read where it has one. ``recipe`` and
    ``skip`` go before what it says. ``parallel_dims``: torchtitan's; None for one process.
    Raises ValueError for tensor parallelism, and in ``convert`` for pipeline parallelism of a recipe that rounds
    stochastically or remembers scales, and for what ``prepare_`` refuses.
    """

    Config = Config

    def __init__(
        self,
        config: Any = None,
        parallel_dims: Any = None,
        *,
        recipe: Recipes | None = None,
        skip: Skip | None = None,
    ) -> None:
        said = config if isinstance(config, Config) else getattr(config, NAME, None) or Config()
        self.recipe = said.recipe if recipe is None else recipe
        self.skip = said.skip if skip is None else skip
        self.pipelined = bool(getattr(parallel_dims, "pp_enabled", False))
        if getattr(parallel_dims, "tp_enabled", False):
            raise ValueError(
                "LowbitConverter: expected whole layers, but the job shards them by tensor parallelism; set "
                "parallelism.tensor_parallel_degree = 1, and shard by FSDP"
            )

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

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Nothing is left to do: the training state of ``model`` follows its optimizer."""

    def key_filter(self) -> Callable[[str], bool]:
        """Which keys of a ``state_dict`` are of lowbit, and in no checkpoint of the plain model."""
        return lambda key: "lowbit_state" in key.split(".")

    def state_dict_transform(self) -> None:
        """What is saved needs no change: weights are those of the plain model."""

    def format_adapter(self) -> None:
        """Nor has it a format of its own."""


def register(protocols: Any) -> None:
    """Tell ``torchtitan.protocols.model_converter`` of the converter, in versions that find converters by name."""
    if hasattr(protocols, "register_model_converter"):
        protocols.register_model_converter(LowbitConverter, NAME)
