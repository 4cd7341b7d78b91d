"""A plan: how a model is trained within a budget, what that takes, and what else was to be had."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowbit._version import __version__
from lowbit.dist_utils import processes
from lowbit.machine import cpu_name
from lowbit.memory import heap
from lowbit.plan.base import BasePlan, plain_values
from lowbit.plan.fitting.adapt import alike
from lowbit.plan.fitting.choices import NOISE, described, quality_of, words
from lowbit.plan.fitting.comparison import Comparison
from lowbit.plan.fitting.identity import Identity
from lowbit.plan.fitting.plot import plot
from lowbit.plan.fitting.predict import Prediction
from lowbit.plan.fitting.rows import Rows
from lowbit.plan.fitting.run import Planned, Run
from lowbit.plan.settings import TrainingSettings
from lowbit.plan.techniques import MICRO_BATCHES
from lowbit.sizes import amount, amount_changed, share_changed
from lowbit.tables import aligned

__all__ = ["TrainingPlan"]


class TrainingPlan(BasePlan[Prediction, TrainingSettings]):
    """See ``lb.fit``. ``settings``: what is turned on. ``peak_bytes`` and ``seconds``: of a step, predicted.
    ``plain``: the prediction of plain training. ``frontier``: those that nothing is both smaller and faster than.
    ``beside``: by dimension the prediction with the plain choice in its place. ``strategies``: of several processes, by
    way to share the model the fastest prediction that fits, or the one that holds least.
    """

    _task, _classes = "train", (Prediction, TrainingSettings)

    def __init__(
        self,
        chosen: Prediction,
        budget: int,
        plain: Prediction,
        predictions: Sequence[Prediction],
        loss: Callable[[Any, Any], Tensor] | None = None,
        beside: Mapping[str, Prediction] | None = None,
        strategies: Iterable[Prediction] = (),
        *,
        identity: Identity,
        batch: Any = None,
        machine: Mapping[str, Any] | None = None,
        losses: Mapping[str, float] | None = None,
        compared: Comparison | None = None,
    ) -> None:
        self._others = {one.settings: one for one in (*predictions, chosen)}
        super().__init__(chosen, budget, plain, self._others.values(), lambda one: one.seconds)
        self._loss, self.beside, self.identity, self._batch = loss, dict(beside or {}), identity, batch
        self._machine = dict(machine or _machine())
        #: By choice the relative change of the loss that the caller gave in place of the record.
        self.losses = dict(losses or {})
        #: Of a loss that is no mean of cross-entropies, one forward in fp32 and in a lower precision.
        self.compared = compared
        self.strategies = [chosen if one.settings.strategy == chosen.settings.strategy else one for one in strategies]

    @property
    def seconds(self) -> float:
        return self.chosen.seconds

    def apply_(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor] | None = None,
        directory: str | Path | None = None,
        **options: Any,
    ) -> Run:
        """Make ``model`` train by the plan, in place; returns its ``Run``, with ``step(batch)`` and ``optimizer``.

        ``loss(output, batch)``: a mean over the rows of a batch, that of ``lb.fit`` unless given; no file holds it.
        ``directory``: where states and activations on
        disk go, the system's for temporary files unless given, and host memory for a model on a GPU. ``options``: of
        the optimizer, such as ``lr`` and ``weight_decay``.

        A plan of several processes shards the model by ``lb.distributed.shard_``: each process calls it, with the same
        model, and ``step`` with its own batch.

        On a CPU with glibc, and a budget below 1.5 times plain training, freed memory of large tensors goes back to the
        system from now on (``lowbit.memory.heap``), so that the process holds about what the plan says above its
        imports. Settings of the user stay.

        Raises ValueError, with the model untouched, for a model of other parameters than the planned one, one that
        trains by a plan already, and one on meta; where the loss is missing that the plan is of; and where other than
        ``gpus`` processes run.
        """
        loss = loss or self._loss
        self.identity.check(model, "plan.apply_")
        self.identity.check_loss(loss, self.settings)
        predictions = list(self._others.values())
        if heap.is_scarce(self.budget, self.plain.peak_bytes) and not any(
            param.is_cuda for param in model.parameters()
        ):
            heap.return_freed()
        planned = Planned(predictions, self.plain.peak_bytes, self._batch, self.identity.rows)
        return Run(model, self.settings, loss, directory, options, planned)

    # -- for people ----------------------------------------------------------------------------------------------
    def __str__(self) -> str:
        each = f" on each of {self.settings.gpus} processes" if self.settings.gpus > 1 else ""
        lines = [
            f"budget {amount(self.budget)}: a step holds {amount(self.peak_bytes)}{each}"
            + (f" in {self.chosen.peak_event}" if self.chosen.peak_event else "")
            + f", plain training {amount(self.plain.peak_bytes)}",
            f"loss by the choices together: {share_changed(quality_of(self.settings, self.losses) / 100, 2)}, a gain "
            f"counts as none; "
            f"recorded: language model cross-entropy of the demo's GPT, mean over seeds; fp32 is {NOISE}% from bf16 "
            f"there, by noise" + (f", given: {', '.join(self.losses)}" if self.losses else ""),
        ]
        compared = self.compared
        chosen = described(self.settings)["precision"].name
        lines += [] if compared is None else [compared.words(is_chosen=compared.precision == chosen)]
        if heap.returns_freed():
            lines.append(
                "on a CPU the process holds about as much above its imports: freed memory goes back to the system"
            )
        rows = [("choice", "is", "peak", "time", "loss", "which means")]
        for dimension, choice in described(self.settings, self.losses).items():
            loss = share_changed(choice.loss / 100, 2) if choice.loss or choice.name in self.losses else ""
            loss += " (given)" if choice.name in self.losses else ""
            if compared is not None and compared.precision == choice.name and compared.change is not None:
                loss = f"{share_changed(compared.change / 100, 2)} (one forward)"
            name = str(self.settings.micro_batches) if dimension == MICRO_BATCHES else choice.name
            rows.append((dimension, name, *self._beside(dimension), loss, choice.about))
        strategies = ["", self._of_strategies()] if self.strategies else []
        return "\n".join([*lines, "", aligned(rows, (2, 3, 4)), *strategies])

    def _of_strategies(self) -> str:
        """What each way takes on each process."""
        rows = [("strategy", "peak", "fits", "s a step", "settings")]
        for one in self.strategies:
            fits = "yes" if one.peak_bytes <= self.budget else "no"
            chosen = " (chosen)" if one is self.chosen else ""
            strategy = one.settings.strategy
            rows.append((strategy, amount(one.peak_bytes), fits, f"{one.seconds:.3g}", words(one.settings) + chosen))
        return aligned(rows, (1, 3))

    def _beside(self, dimension: str) -> tuple[str, str]:
        """The changes of the peak and of the time from the plain choice."""
        other = self.beside.get(dimension)
        if other is None:
            return "", ""
        time = (self.seconds - other.seconds) / max(other.seconds, 1e-12)
        return amount_changed(self.peak_bytes - other.peak_bytes), share_changed(time)

    def table(self) -> str:
        """The frontier and what is chosen: peaks and times, smallest first."""
        listed, plain = sorted({self.chosen, *self.frontier}, key=lambda one: one.peak_bytes), self.plain.seconds
        return self._table("time", listed, lambda one: (f"{one.seconds / plain:.2f}", words(one.settings)))

    def _refits(self) -> list[Prediction]:
        """The predictions of this arithmetic, the fastest first: what ``Run.refit`` chooses from."""
        found = [one for one in self._others.values() if alike(one.settings, self.settings)]
        return sorted(found, key=lambda one: (one.seconds, one.peak_bytes))

    def plot(self, path: str | Path) -> Path:
        """Draw the frontier with the budget and what is chosen, as PNG. Raises ImportError without matplotlib."""
        return plot(self.plain, self.chosen, self.frontier, self.budget, Path(path))

    # -- files -----------------------------------------------------------------------------------------------------
    def as_dict(self) -> dict[str, Any]:
        return {
            **super().as_dict(),
            "strategies": [plain_values(one) for one in self.strategies],
            "beside": {name: plain_values(one) for name, one in self.beside.items()},
            "refits": [plain_values(one) for one in self._refits()],
            "subject": self.identity.as_dict(),
            "machine": self._machine, "losses": self.losses,
            "compared": self.compared and self.compared._asdict(),
        }  # fmt: skip

    @classmethod
    def _of(cls, data: dict[str, Any]) -> TrainingPlan:
        chosen, plain, *others = map(cls._read, (data["chosen"], data["plain"], *data["frontier"], *data["refits"]))
        beside = {name: cls._read(one) for name, one in data["beside"].items()}
        strategies = map(cls._read, data.get("strategies", ()))
        rows = data["subject"].get("rows")
        identity = Identity(**{**data["subject"], "rows": rows and Rows(*rows)})
        return cls(
            chosen,
            data["budget"],
            plain,
            others,
            beside=beside,
            strategies=strategies,
            identity=identity,
            machine=data["machine"],
            losses=data.get("losses"),
            compared=data.get("compared") and Comparison(**data["compared"]),
        )

    # -- several processes -----------------------------------------------------------------------------------------
    @classmethod
    def everywhere(cls, made: Callable[[], TrainingPlan], loss: Callable[[Any, Any], Tensor] | None) -> TrainingPlan:
        """The plan that the first process of ``torch.distributed`` makes, in all of them: times that each measures for
        itself differ. Raises in all what it raises.
        """
        if processes() == 1:
            return made()
        said: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                said = [made().as_dict()]
            except Exception as error:
                said = [error]
        dist.broadcast_object_list(said)
        if isinstance(said[0], Exception):
            raise said[0]
        plan = cls._of(said[0])
        plan._loss = loss
        return plan


def _machine() -> dict[str, Any]:
    """What plans are of."""
    return {"cpu": cpu_name(), "threads": torch.get_num_threads(), "lowbit": __version__}
