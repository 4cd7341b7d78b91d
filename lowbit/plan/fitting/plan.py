"""``TrainingPlan``: the techniques that ``lb.fit`` chose, the predicted memory and time, and the alternatives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
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
from lowbit.plan.fitting.choices import NOISE, RECORD, described, loss_words, name_in, quality_of, words
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

#: The longest time that processes wait for a plan. If the first process ends, they stop at once.
_PLANNING = timedelta(days=1)


class TrainingPlan(BasePlan[Prediction, TrainingSettings]):
    """The plan that ``lb.fit`` returns.

    Attributes:
        settings: The chosen ``TrainingSettings``.
        peak_bytes: Predicted peak memory of a step.
        seconds: Predicted time of a step.
        plain: The prediction of plain training.
        frontier: The predictions that no other beats in both memory and time.
        beside: Per dimension, the prediction with its plain technique instead of the chosen one.
        device: Name of the device that ``lb.fit`` planned for; None for a device of this machine.
        strategies: With several processes, per sharding strategy the fastest prediction that fits, or the smallest.
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
        device: str | None = None,
    ) -> None:
        self._others = {one.settings: one for one in (*predictions, chosen)}
        super().__init__(chosen, budget, plain, self._others.values(), lambda one: one.seconds)
        self._loss, self.beside, self.identity, self._batch = loss, dict(beside or {}), identity, batch
        self._machine = dict(machine or _machine())
        #: By technique, the relative change of the loss that the caller passed in place of the record.
        self.losses = dict(losses or {})
        #: For a loss other than a mean cross-entropy: one forward in fp32 and one in a lower precision.
        self.compared = compared
        self.device = device
        self.strategies = [chosen if one.settings.strategy == chosen.settings.strategy else one for one in strategies]

    @property
    def seconds(self) -> float:
        return self.chosen.seconds

    def apply_(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor] | None = None,
        directory: str | Path | None = None,
        *,
        adapt: bool = True,
        **options: Any,
    ) -> Run:
        """Prepare ``model`` for training by the plan, in place.

        On a CPU with glibc and a budget below 1.5 times plain training, large freed tensors go back to the system from
        now on (``lowbit.memory.heap``), unless the user has configured malloc.

        Args:
            model: The planned model, or one with equal parameters. With several processes, each passes the same model,
                which ``lb.distributed.shard_`` shards.
            loss: ``loss(output, batch)``, a mean over the rows of a batch. Default: the loss of ``lb.fit``, which a
                saved plan does not contain.
            directory: Offload target. Default: the system's directory for temporary files, or host memory for a model
                on a GPU.
            adapt: Whether ``run.step`` keeps a snapshot of the state before the step, to repeat a step with less memory
                if memory runs out.
            **options: Options of the optimizer, such as ``lr`` and ``weight_decay``.

        Returns:
            The ``Run``, with ``step(batch)`` and ``optimizer``.

        Raises:
            ValueError: For a model with other parameters than the planned one, that trains by a plan already, or that
                is on the meta device; for a missing loss; if the number of processes is not ``gpus``. The model is then
                unchanged.
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
        return Run(model, self.settings, loss, directory, options, planned, adapt)

    # -- for people ----------------------------------------------------------------------------------------------
    def __str__(self) -> str:
        each = f" on each of {self.settings.gpus} processes" if self.settings.gpus > 1 else ""
        lines = [
            f"budget {amount(self.budget)}: a step holds {amount(self.peak_bytes)}{each}"
            + (f" in {self.chosen.peak_event}" if self.chosen.peak_event else "")
            + f", plain training {amount(self.plain.peak_bytes)}",
            f"loss by the choices together: {self._loss_change()}; a prior, recorded: {RECORD}"
            f"{'; base: SmolLM2-135M before training' if self.settings.base else ''}; fp32 is {NOISE}% from "
            f"bf16 there, by noise; losses= replaces it"
            + (f", given: {', '.join(self.losses)}" if self.losses else ""),
        ]
        if self.device is not None:
            lines.insert(1, (
                f"for {self.device}: times are rooflines of its data sheet ({self.seconds:.3g} s a step), which a real "
                f"step does not reach; the CUDA context and libraries take 0.5 to 1 GiB more"
            ))  # fmt: skip
        compared = self.compared
        chosen = described(self.settings)["precision"].name
        lines += [] if compared is None else [compared.words(is_chosen=compared.precision == chosen)]
        if heap.returns_freed():
            lines.append(
                "on a CPU the process holds about as much above its imports: freed memory goes back to the system"
            )
        rows = [("choice", "is", "peak", "time", "loss", "which means")]
        for dimension, choice in described(self.settings, self.losses).items():
            loss = loss_words(choice, self.losses)
            if compared is not None and compared.precision == choice.name and compared.change is not None:
                loss = f"{share_changed(compared.change / 100, 2)} (one forward)"
            name = str(self.settings.micro_batches) if dimension == MICRO_BATCHES else name_in(self.settings, choice)
            rows.append((dimension, name, *self._beside(dimension), loss, choice.about))
        strategies = ["", self._of_strategies()] if self.strategies else []
        return "\n".join([*lines, "", aligned(rows, (2, 3, 4)), *strategies])

    def _loss_change(self) -> str:
        """The increase of the loss in words. Gains count as zero."""
        increase = quality_of(self.settings, self.losses)
        return share_changed(increase / 100, 2) if increase else "no measurable change"

    def _of_strategies(self) -> str:
        """A table of the strategies, per process."""
        rows = [("strategy", "peak", "fits", "s a step", "settings")]
        for one in self.strategies:
            fits = "yes" if one.peak_bytes <= self.budget else "no"
            chosen = " (chosen)" if one is self.chosen else ""
            strategy = one.settings.strategy
            rows.append((strategy, amount(one.peak_bytes), fits, f"{one.seconds:.3g}", words(one.settings) + chosen))
        return aligned(rows, (1, 3))

    def _beside(self, dimension: str) -> tuple[str, str]:
        """The changes of peak and time compared with the plain technique."""
        other = self.beside.get(dimension)
        if other is None:
            return "", ""
        time = (self.seconds - other.seconds) / max(other.seconds, 1e-12)
        return amount_changed(self.peak_bytes - other.peak_bytes), share_changed(time)

    def table(self) -> str:
        """A table of the frontier and the chosen prediction, smallest peak first."""
        listed, plain = sorted({self.chosen, *self.frontier}, key=lambda one: one.peak_bytes), self.plain.seconds
        return self._table("time", listed, lambda one: (f"{one.seconds / plain:.2f}", words(one.settings)))

    def _refits(self) -> list[Prediction]:
        """The predictions that ``Run.refit`` chooses from: those with this arithmetic, fastest first."""
        candidates = [one for one in self._others.values() if alike(one.settings, self.settings)]
        return sorted(candidates, key=lambda one: (one.seconds, one.peak_bytes))

    def plot(self, path: str | Path) -> Path:
        """Draw the frontier, the budget and the chosen prediction as PNG. Raises ImportError without matplotlib."""
        return plot(self.plain, self.chosen, self.frontier, self.budget, Path(path))

    # -- files -----------------------------------------------------------------------------------------------------
    def as_dict(self) -> dict[str, Any]:
        return {
            **super().as_dict(),
            "strategies": [plain_values(one) for one in self.strategies],
            "beside": {name: plain_values(one) for name, one in self.beside.items()},
            "refits": [plain_values(one) for one in self._refits()],
            "subject": self.identity.as_dict(),
            "machine": self._machine, "device": self.device, "losses": self.losses,
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
            device=data.get("device"),
            compared=data.get("compared") and Comparison(**data["compared"]),
        )

    # -- several processes -----------------------------------------------------------------------------------------
    @classmethod
    def broadcast(cls, make: Callable[[], TrainingPlan], loss: Callable[[Any, Any], Tensor] | None) -> TrainingPlan:
        """The plan of the first process for all processes, as timings differ. Its errors are raised in all of them.

        The others wait for as long as the first process plans, which may exceed the timeout of their process group.
        """
        if processes() == 1:
            return make()
        group = dist.new_group(backend="gloo", timeout=_PLANNING)
        result: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                result = [make().as_dict()]
            except Exception as error:
                result = [error]
        dist.broadcast_object_list(result, group=group)
        dist.destroy_process_group(group)
        if isinstance(result[0], Exception):
            raise result[0]
        plan = cls._of(result[0])
        plan._loss = loss
        return plan


def _machine() -> dict[str, Any]:
    """The machine and version that a plan is for."""
    return {"cpu": cpu_name(), "threads": torch.get_num_threads(), "lowbit": __version__}
