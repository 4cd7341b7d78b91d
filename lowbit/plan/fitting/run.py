"""``Run``: training by a plan, which adapts if memory runs out."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lowbit.dist_utils import processes
from lowbit.memory.estimator import scalar
from lowbit.memory.fake import outlined
from lowbit.memory.shortage import ran_out, reclaim
from lowbit.models.batches import copied
from lowbit.models.losses import predicted, usual_loss
from lowbit.plan.adapters import save_adapters
from lowbit.plan.fitting.adapt import (
    OptimizerVersions,
    Predicted,
    StepSnapshot,
    change_,
    difference,
    fallback,
    fastest,
    permits,
)
from lowbit.plan.fitting.identity import PLANNED, check_mode
from lowbit.plan.fitting.predict import Predictor
from lowbit.plan.fitting.rows import Rows, RowWatch, rows_of
from lowbit.plan.settings import (
    TrainingSettings,
    accumulate,
    arrange_,
    make_optimizer,
    offloading,
    require_processes,
    sharded,
)
from lowbit.plan.subject import Subject
from lowbit.plan.techniques import techniques
from lowbit.sizes import budget_in
from lowbit.tiled.causal_loss import has_causal_loss
from lowbit.train.micro_batches import micro_batches, share_of_targets
from lowbit.user_warnings import warn

__all__ = ["Planned", "Run"]

logger = logging.getLogger(__name__)

#: The technique that a run adds if memory runs out in the optimizer step.
_STATES = next(technique for technique in techniques() if technique.name == "disk")


class Planned(NamedTuple):
    """The parts of a plan that a run needs."""

    predictions: Sequence[Predicted] = ()
    """All predictions of the plan, from which ``refit`` chooses."""
    plain: int = 0
    """Peak bytes of plain training."""
    batch: Any = None
    """The planned batch, ``outlined``."""
    rows: Rows | None = None


#: For a run that has settings and no plan.
NOT_PLANNED = Planned()


class Run:
    """Trains a model by a plan: ``step`` takes one optimizer step, or use ``parts`` in a training loop of your own.

    Attributes:
        model: The prepared model, wrapped by its sharding strategy if there are several processes.
        optimizer: The optimizer of the plan.
        settings: The settings of the next step. They change if memory runs out, and by ``refit``.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: TrainingSettings,
        loss: Callable[[Any, Any], Tensor] | None,
        directory: str | Path | None,
        options: dict[str, Any],
        planned: Planned = NOT_PLANNED,
        adapt: bool = True,
    ) -> None:
        require_processes(settings)
        check_mode(model, "plan.apply_")
        make_optimizer([nn.Parameter(torch.zeros(1))], settings, **options)  # raises for unknown options
        self._plain_model, self.settings = model, settings
        self._loss = loss or usual_loss
        self._predictions, self._plain, self._batch = planned.predictions, planned.plain, planned.batch
        on_gpu = any(param.is_cuda for param in model.parameters())
        self._where = str(directory or ("cpu" if on_gpu else tempfile.gettempdir()))
        optimizer = arrange_(model, settings, self._where, **options)
        self.model, self.optimizer = sharded(model, optimizer, settings)
        self._at, self._largest = "", 0
        self._is_checked, self._adapts = False, adapt
        self._watch = RowWatch(planned.rows, settings.micro_batches)
        model.register_forward_pre_hook(self._watch, with_kwargs=True)
        PLANNED.add(model)

    def step(self, batch: Any) -> float:
        """Take one optimizer step on a batch, in the micro-batches of the settings.

        Micro-batches are weighted by their rows, or by their ``labels`` other than -100 if the model computes the
        loss; so are the batches of several processes. If memory runs out, the run restores the state before the step,
        adds the next of ``FALLBACKS``, warns, and repeats the step. It also restores that state if a step fails
        otherwise before the optimizer step. A batch larger than the planned one causes a warning.
        ``apply_(model, adapt=False)`` turns restoring and repeating off.

        Args:
            batch: Tensors in any nesting, as the model or the loss takes them.

        Returns:
            The mean loss of the batch before the step. With several processes, the mean of what they return is that of
            all their batches.

        Raises:
            RuntimeError: If memory runs out and no fallback is left; the state is then that before the step. Also if
                memory runs out after the optimizer moved some parameters, which cannot be restored.
            ValueError: As ``lb.memory.micro_batches`` for a batch that cannot be split.
        """
        self._compare(batch)
        if self._adapts:
            snapshot = StepSnapshot(self.model)
            total = self._gradients(batch, snapshot)
            self._advance(snapshot)
        else:
            total = self._attempt(batch)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def parts(self, batch: Any) -> Iterator[tuple[Any, float]]:
        """The parts of a batch as ``step`` takes them, for a training loop of your own.

        The gradients of this loop are bit-identical to those of ``step``::

            for part, weight in run.parts(batch):
                (loss(run.model(part)) * weight).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()

        Activations go where the plan keeps them while the loop runs, so forward and backward belong into its body.
        Memory that runs out in the loop is not adapted to, as it is in ``step``.

        Args:
            batch: Tensors in any nesting, as ``step`` takes them.

        Returns:
            An iterator over each part and its weight. Weighted mean losses add up to the mean loss of the batch.

        Raises:
            ValueError: For a batch that cannot be split.
        """
        self._compare(batch)
        return self._offloading(self._weighted(batch))

    def refit(self, budget: str | int, batch: Any = None) -> Predicted:
        """Continue within another budget, smaller or larger.

        Takes the plan's fastest prediction with the arithmetic of this run (precision, recipe, optimizer bits) that
        fits by an estimate of a whole step. Checkpoints, micro-batches and offload may change. A change of
        micro-batches changes the order of sums; all other changes are bit-identical. With several processes, with
        weights offloaded, or for a plan from a file without ``batch``, the stored predictions count unchanged.

        Args:
            budget: As for ``lb.fit``.
            batch: The batch to estimate; None takes the planned one.

        Returns:
            The prediction for steps from now on.

        Raises:
            ValueError: If nothing fits, with the smallest budget that would. The run then continues unchanged.
        """
        asked = budget_in(budget, "run.refit")
        if asked.size is None and not self._plain:
            raise ValueError(f"run.refit: a share of plain training needs a run of a plan, got {budget!r}; give bytes")
        prediction = fastest(self._predictions, self.settings, asked.of(self._plain), self._whole(batch))
        self._change(prediction.settings)
        if batch is not None:
            self._batch, self._largest = outlined(batch), 0
            self._watch.planned = rows_of(self._plain_model, batch, rest=self._loss is not usual_loss)
        return prediction

    def save_adapters(self, directory: str | Path) -> None:
        """Write the adapters that the plan added as files of peft.

        ``peft.PeftModel.from_pretrained(base, directory)`` loads them onto the base model. With several processes, all
        call it, and the first one writes.

        Args:
            directory: Created if it does not exist.

        Raises:
            ValueError: The plan has no adapters.
        """
        save_adapters(self._plain_model, Path(directory))

    def _whole(self, batch: Any) -> Callable[[Predicted], Predicted]:
        """A function from a prediction to the estimate of its whole step."""
        batch = self._batch if batch is None else batch
        if batch is None or self.settings.gpus > 1 or self.settings.offload_weights:
            return lambda prediction: prediction
        loss = None if self._loss is usual_loss else self._loss
        predictor = Predictor(Subject(self._plain_model, batch, loss), trains=self.settings)
        return lambda prediction: predictor.whole(prediction.settings)

    # -- inside ----------------------------------------------------------------------------------------------------
    def _gradients(self, batch: Any, snapshot: StepSnapshot) -> float:
        """Forward and backward, with fallbacks until memory suffices. Returns the loss."""
        first = self.settings
        while True:
            try:
                return self._attempt(batch)
            except BaseException as error:
                if not ran_out(error) or processes() > 1:  # other processes would wait for their micro-batches
                    snapshot.restore()
                    self._change(first)
                    raise
                message = _first_line(error)
            # Outside of the except block, so that the error's frames no longer hold the activations.
            snapshot.restore()
            reclaim()
            after = fallback(self.settings, Subject(self.model, batch), self._predictions)
            if after is None:
                tried = difference(first, self.settings)
                self._change(first)
                raise RuntimeError(
                    f"run.step: memory ran out in the {self._at} ({message}), and nothing that takes less is left"
                    f"{f' after {tried}' if tried else ''}. Model, optimizer and random states are as before the step; "
                    f"give a batch of fewer or shorter rows, plan with fewer bits (require=('bf16', 'adamw8bit')) or "
                    f"with 'disk' allowed, or end other processes that hold memory"
                )
            changes = difference(self.settings, after)
            self._change(after)
            warn(f"run.step: memory ran out in the {self._at} ({message}); this step is repeated, and later steps run, "
                 f"with {changes}")  # fmt: skip

    def _compare(self, batch: Any) -> None:
        """Warn of a batch that is larger than the planned one and all before."""
        planned, elements = _elements(self._batch), _elements(batch)
        if planned and elements > max(planned, self._largest):
            self._largest = elements
            warn(
                f"run.step: the batch has {elements} elements, and the plan is of one with {planned}, so that a step "
                f"may hold more than was predicted; plan with the largest batch, or call run.refit(budget, batch)"
            )

    def _attempt(self, batch: Any) -> float:
        total = 0.0
        for number, (part, weight) in enumerate(self._offloading(self._weighted(batch)), 1):
            of = f"of micro-batch {number} of {self.settings.micro_batches}"
            self._at = f"forward {of}"

            def loss(output: Any, part: Any, weight: float = weight, of: str = of) -> Tensor:
                if self.settings.micro_batches > 1 and not self._is_checked and self._may_be_no_mean(batch):
                    self._check_mean(output, part)
                value = scalar(self._loss(output, part), "run.step") * weight
                self._at = f"backward {of}"
                return value

            total += accumulate(self.model, part, loss, self._loss is not usual_loss).item()
        return total

    def _weighted(self, batch: Any) -> Iterator[tuple[Any, float]]:
        """The micro-batches of a batch with their weights, which the processes average."""
        targets = self._targets(batch)
        share = 1.0 if targets is None or self.settings.gpus == 1 else share_of_targets(batch, targets)
        parts = micro_batches(batch, self.settings.micro_batches, targets=targets)
        return ((part, weight * share) for part, weight in parts)

    def _offloading(self, parts: Iterator[tuple[Any, float]]) -> Iterator[tuple[Any, float]]:
        """Yield the micro-batches, with activations offloaded as planned."""
        with offloading(self.settings, self._where):
            for part, weight in parts:
                with self._watch.allowing(part):
                    yield part, weight

    def _may_be_no_mean(self, batch: Any) -> bool:
        """Whether the loss may not be a mean over rows: a caller's loss, or a batch with padding."""
        if self._loss is not usual_loss:
            return True
        _, mask = predicted(batch)
        return mask is not None and "labels" not in batch and not bool(mask.all())

    @torch.no_grad()
    def _check_mean(self, output: Any, part: Any) -> None:
        """Raise ValueError if the loss is the sum over two halves, and warn if it is not their mean. A loss that fails
        on half of the rows is not checked.
        """
        self._is_checked = True
        floats = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        exact = all(leaf.dtype.itemsize >= 4 and not leaf.is_cuda for leaf in floats)  # matmuls there may be in TF32
        devices = list({leaf.device for leaf in floats if leaf.is_cuda})

        def of(rows: Any) -> float:
            with torch.random.fork_rng(devices):
                return float(self._loss(*copied(rows)))  # the loss may write to its inputs

        try:
            whole = of((output, part))
            halves = [(of(half), weight) for half, weight in micro_batches((output, part), 2)]
            (first, _), (second, _) = halves
        except Exception:  # a caller's loss can raise anything
            logger.debug("run.step: the loss of some rows failed, so its mean is not checked", exc_info=True)
            return
        if abs(whole - first - second) <= 1e-3 * abs(whole) and abs(whole) > 1.1 * max(abs(first), abs(second)):
            raise ValueError(
                f"run.step: the loss of some rows is {whole:.4g}, the sum of {first:.4g} and {second:.4g}, and a plan "
                f"with {self.settings.micro_batches} micro-batches weighs the mean of each by its rows; divide the "
                f"loss by the rows of its batch, or plan with exclude=('micro-batches',)"
            )
        near = (1e-5 if exact else 1e-2) * max(abs(whole), abs(first), abs(second))
        if abs(whole - sum(value * weight for value, weight in halves)) > near:
            warn(
                f"run.step: the loss of some rows is {whole:.7g}, and not the mean of the losses of its halves, "
                f"{first:.7g} and {second:.7g}. With {self.settings.micro_batches} micro-batches, each weighted by its "
                f"rows, a step differs from that of the whole batch; average over each row first, let the model "
                f"compute the loss from 'labels', or plan with exclude=('micro-batches',)"
            )

    def _targets(self, batch: Any) -> Callable[[Any], Tensor] | None:
        """A function from a micro-batch to the labels over which the model's loss is a mean; None for rows."""
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if self._loss is not usual_loss or not isinstance(labels, Tensor) or labels.is_floating_point():
            return None
        if labels.dim() == 2 and has_causal_loss(self._plain_model):
            return lambda part: part["labels"][:, 1:]
        return lambda part: part["labels"]

    def _advance(self, snapshot: StepSnapshot) -> None:
        """The optimizer step; if memory runs out before a parameter moved, it is repeated with states offloaded."""
        while True:
            versions = OptimizerVersions(self.optimizer)
            try:
                self.optimizer.step()
                return
            except BaseException as error:
                if not ran_out(error):
                    raise
                message = _first_line(error)
            moved = versions.moved()
            if moved:
                self.optimizer.zero_grad()
                raise RuntimeError(
                    f"run.step: memory ran out in the optimizer's step ({message}) after {moved} parameters and states "
                    f"had moved, so the model is between two steps; load the last checkpoint of model and optimizer, "
                    f"and go on with less memory: run.refit(budget), or a plan with 'disk'"
                )
            versions.restore()
            reclaim()
            shared = self.settings.gpus > 1
            if shared or self.settings.offload_states or not permits(self._predictions, _STATES):
                snapshot.restore()
                raise RuntimeError(
                    f"run.step: memory ran out in the optimizer's step ({message}) before anything moved, and its "
                    f"states are {'offloaded already' if self.settings.offload_states else 'not to be offloaded'}. "
                    f"Model, optimizer and random states are as before the step; plan with 'adamw8bit' or with 'disk' "
                    f"allowed, or end other processes that hold memory"
                )
            self._change(replace(self.settings, **_STATES.changes))
            warn(f"run.step: memory ran out in the optimizer's step ({message}) before anything moved; its states "
                 f"are offloaded to {self._where} from now on, and the step goes on")  # fmt: skip

    def _change(self, settings: TrainingSettings) -> None:
        change_(self._plain_model, self.optimizer, self.settings, settings, self._where)
        self.settings, self._watch.parts = settings, settings.micro_batches


def _elements(batch: Any) -> int:
    tree = dict(batch) if isinstance(batch, Mapping) else batch
    return sum(leaf.numel() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
