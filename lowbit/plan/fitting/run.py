"""Training by a plan."""

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
    elsewhere,
    make_optimizer,
    require_processes,
    sharded,
)
from lowbit.plan.subject import Subject
from lowbit.plan.techniques import techniques
from lowbit.sizes import budget_in
from lowbit.tiled.fused_loss import has_causal_loss
from lowbit.train.micro_batches import micro_batches
from lowbit.user_warnings import warn

__all__ = ["Planned", "Run"]

logger = logging.getLogger(__name__)

#: What a run takes when memory runs out in the optimizer's step.
_STATES = next(technique for technique in techniques() if technique.name == "disk")


class Planned(NamedTuple):
    """What a run knows of its plan. ``predictions``: what else the plan could have chosen, for ``refit``. ``plain``:
    the bytes of plain training. ``batch``: the one that was planned for, ``outlined``. ``rows``: its rows.
    """

    predictions: Sequence[Predicted] = ()
    plain: int = 0
    batch: Any = None
    rows: Rows | None = None


#: Of a run by settings alone.
NOT_PLANNED = Planned()


class Run:
    """``model`` and ``optimizer`` of a plan, and ``step``, which takes one step on a batch. ``settings``: those of the
    next step, which adapt. A training loop of your own takes each batch by ``parts``.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: TrainingSettings,
        loss: Callable[[Any, Any], Tensor] | None,
        directory: str | Path | None,
        options: dict[str, Any],
        planned: Planned = NOT_PLANNED,
    ) -> None:
        require_processes(settings)
        check_mode(model, "plan.apply_")
        make_optimizer([nn.Parameter(torch.zeros(1))], settings, **options)  # which raises for unknown options
        self._plain_model, self.settings = model, settings
        self._loss = loss or usual_loss
        self._predictions, self._plain, self._batch = planned.predictions, planned.plain, planned.batch
        on_gpu = any(param.is_cuda for param in model.parameters())
        self._where = str(directory or ("cpu" if on_gpu else tempfile.gettempdir()))
        optimizer = arrange_(model, settings, self._where, **options)
        self.model, self.optimizer = sharded(model, optimizer, settings)
        self._at, self._largest = "", 0
        self._is_checked = False
        self._watch = RowWatch(planned.rows, settings.micro_batches)
        model.register_forward_pre_hook(self._watch, with_kwargs=True)
        PLANNED.add(model)

    def step(self, batch: Any) -> float:
        """One step of training on a batch, in as many parts as planned; returns its mean loss before the step.

        Parts are weighed by their rows, under a model's own loss by their ``labels`` other than -100.
        Where memory runs out, all that the attempt has moved is put back, ``settings`` take less memory by the next of
        ``FALLBACKS``, a warning says which, and the step is taken again. A step that fails otherwise before the
        optimizer's is put back too. A batch that is larger than the planned one is warned of.
        Raises RuntimeError where memory runs out with nothing left that takes less, with all as before the step; and
        where it runs out after the optimizer has moved some of its parameters, which nothing puts back. Raises as
        ``lb.memory.micro_batches`` for a batch that cannot be split.
        """
        self._compare(batch)
        before, first = StepSnapshot(self.model), self.settings
        total = self._gradients(batch, before, first)
        self._advance(before)
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
        return self._elsewhere(micro_batches(batch, self.settings.micro_batches, targets=self._targets(batch)))

    def refit(self, budget: str | int, batch: Any = None) -> Predicted:
        """Go on within another budget, smaller or larger; returns what is predicted of a step from now on.

        Of the plan's predictions with the arithmetic of this run (precision, recipe, bits of the optimizer) the fastest
        that fits is taken, by an estimate of a step on ``batch``, or the planned one. Checkpoints, parts, and the place
        of states and activations may change. A change of parts changes losses by the order of sums, the others change
        no bit. ``budget``: as ``lb.fit`` takes it.

        Where several processes train, where weights lie elsewhere, and of a plan from a file without ``batch``, the
        plan's predictions count as they are, which sum what few estimates say.
        Raises ValueError where nothing fits, with the least that would; then the run goes on as it was.
        """
        asked = budget_in(budget, "run.refit")
        if asked.size is None and not self._plain:
            raise ValueError(f"run.refit: a share of plain training needs a run of a plan, got {budget!r}; give bytes")
        found = fastest(self._predictions, self.settings, asked.of(self._plain), self._whole(batch))
        self._change(found.settings)
        if batch is not None:
            self._batch, self._largest = outlined(batch), 0
            self._watch.planned = rows_of(self._plain_model, batch, rest=self._loss is not usual_loss)
        return found

    def _whole(self, batch: Any) -> Callable[[Predicted], Predicted]:
        """What makes an estimate of a whole step of a prediction."""
        batch = self._batch if batch is None else batch
        if batch is None or self.settings.gpus > 1 or self.settings.offload_weights:
            return lambda one: one
        loss = None if self._loss is usual_loss else self._loss
        predictor = Predictor(Subject(self._plain_model, batch, loss), trains=self.settings)
        return lambda one: predictor.whole(one.settings)

    # -- inside ----------------------------------------------------------------------------------------------------
    def _gradients(self, batch: Any, before: StepSnapshot, first: TrainingSettings) -> float:
        """Forward and backward, with settings that take less until memory suffices. Returns the loss."""
        while True:
            try:
                return self._attempt(batch)
            except BaseException as error:
                if not ran_out(error) or processes() > 1:  # other processes would wait for the parts that they know
                    before.restore()
                    self._change(first)
                    raise
                said = _first_line(error)
            # The error is gone by now, and the activations that its frames held with it.
            before.restore()
            reclaim()
            after = fallback(self.settings, Subject(self.model, batch), self._predictions)
            if after is None:
                tried = difference(first, self.settings)
                self._change(first)
                raise RuntimeError(
                    f"run.step: memory ran out in the {self._at} ({said}), and nothing that takes less is left"
                    f"{f' after {tried}' if tried else ''}. Model, optimizer and random states are as before the step; "
                    f"give a batch of fewer or shorter rows, plan with fewer bits (require=('bf16', 'adamw8bit')) or "
                    f"with 'disk' allowed, or end other processes that hold memory"
                )
            told = difference(self.settings, after)
            self._change(after)
            warn(f"run.step: memory ran out in the {self._at} ({said}); this step is taken again, and later ones too, "
                 f"with {told}")  # fmt: skip

    def _compare(self, batch: Any) -> None:
        """Warns of a batch that is larger than the one that was planned for, and than those that were warned of."""
        planned, given = _elements(self._batch), _elements(batch)
        if planned and given > max(planned, self._largest):
            self._largest = given
            warn(
                f"run.step: the batch has {given} elements, and the plan is of one with {planned}, so that a step may "
                f"hold more than was predicted; plan with the largest batch, or call run.refit(budget, batch)"
            )

    def _attempt(self, batch: Any) -> float:
        total = 0.0
        parts = micro_batches(batch, self.settings.micro_batches, targets=self._targets(batch))
        for number, (part, weight) in enumerate(self._elsewhere(parts), 1):
            of = f"of part {number} of {self.settings.micro_batches}"
            self._at = f"forward {of}"

            def loss(output: Any, part: Any, weight: float = weight, of: str = of) -> Tensor:
                if self.settings.micro_batches > 1 and not self._is_checked and self._may_be_no_mean(batch):
                    self._check_mean(output, part)
                value = scalar(self._loss(output, part), "run.step") * weight
                self._at = f"backward {of}"
                return value

            total += accumulate(self.model, part, loss, self._loss is not usual_loss).item()
        return total

    def _elsewhere(self, parts: Iterator[tuple[Any, float]]) -> Iterator[tuple[Any, float]]:
        """The parts; until the last one is done, activations go where the plan keeps them."""
        with elsewhere(self.settings, self._where):
            for part, weight in parts:
                with self._watch.allowing(part):
                    yield part, weight

    def _may_be_no_mean(self, batch: Any) -> bool:
        """Whether the loss may not be a mean over rows: it is the caller's, or of tokens some of which are padding."""
        if self._loss is not usual_loss:
            return True
        _, mask = predicted(batch)
        return mask is not None and "labels" not in batch and not bool(mask.all())

    @torch.no_grad()
    def _check_mean(self, output: Any, part: Any) -> None:
        """Raises ValueError where the loss is the sum of those of two halves, and warns where it is not their mean. A
        loss that cannot be taken of some rows is not looked at.
        """
        self._is_checked = True
        floats = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        exact = all(leaf.dtype.itemsize >= 4 and not leaf.is_cuda for leaf in floats)  # products there may be in TF32
        devices = list({leaf.device for leaf in floats if leaf.is_cuda})

        def of(rows: Any) -> float:
            with torch.random.fork_rng(devices):
                return float(self._loss(*copied(rows)))  # which may write to them

        try:
            whole = of((output, part))
            (first, its), (second, others) = ((of(half), weight) for half, weight in micro_batches((output, part), 2))
        except Exception:  # of whatever code the loss has
            logger.debug("run.step: the loss of some rows failed, so its mean is not checked", exc_info=True)
            return
        if abs(whole - first - second) <= 1e-3 * abs(whole) and abs(whole) > 1.1 * max(abs(first), abs(second)):
            raise ValueError(
                f"run.step: the loss of some rows is {whole:.4g}, the sum of {first:.4g} and {second:.4g}, and a plan "
                f"in {self.settings.micro_batches} parts weighs the mean of each by its rows; divide the loss by "
                f"the rows of "
                f"its batch, or plan with exclude=('micro-batches',)"
            )
        near = (1e-5 if exact else 1e-2) * max(abs(whole), abs(first), abs(second))
        if abs(whole - its * first - others * second) > near:
            warn(
                f"run.step: the loss of some rows is {whole:.7g}, and not the mean of those of its halves, {first:.7g} "
                f"and {second:.7g}, so that in {self.settings.micro_batches} parts, each of which is weighed by its "
                f"rows, a "
                f"step is not that of the whole batch; average over each row first, let the model compute the loss "
                f"from 'labels', or plan with exclude=('micro-batches',)"
            )

    def _targets(self, batch: Any) -> Callable[[Any], Tensor] | None:
        """What the mean of a model's own loss is over, where the batch has classes as labels; None for rows."""
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if self._loss is not usual_loss or not isinstance(labels, Tensor) or labels.is_floating_point():
            return None
        if labels.dim() == 2 and has_causal_loss(self._plain_model):
            return lambda part: part["labels"][:, 1:]
        return lambda part: part["labels"]

    def _advance(self, before: StepSnapshot) -> None:
        """The optimizer's step, once more with its states elsewhere where memory runs out before anything moved."""
        while True:
            marks = OptimizerVersions(self.optimizer)
            try:
                self.optimizer.step()
                return
            except BaseException as error:
                if not ran_out(error):
                    raise
                said = _first_line(error)
            moved = marks.moved()
            if moved:
                self.optimizer.zero_grad()
                raise RuntimeError(
                    f"run.step: memory ran out in the optimizer's step ({said}) after {moved} parameters and states "
                    f"had moved, so the model is between two steps; load the last checkpoint of model and optimizer, "
                    f"and go on with less memory: run.refit(budget), or a plan with 'disk'"
                )
            marks.restore()
            reclaim()
            shared = self.settings.gpus > 1
            if shared or self.settings.offload_states or not permits(self._predictions, _STATES):
                before.restore()
                raise RuntimeError(
                    f"run.step: memory ran out in the optimizer's step ({said}) before anything moved, and its states "
                    f"{'lie elsewhere already' if self.settings.offload_states else 'may not lie elsewhere'}. Model, "
                    f"optimizer and random states are as before the step; plan with 'adamw8bit' or with 'disk' "
                    f"allowed, or end other processes that hold memory"
                )
            self._change(replace(self.settings, **_STATES.changes))
            warn(f"run.step: memory ran out in the optimizer's step ({said}) before anything moved; its states lie in "
                 f"{self._where} from now on, and the step goes on")  # fmt: skip

    def _change(self, settings: TrainingSettings) -> None:
        change_(self._plain_model, self.optimizer, self.settings, settings, self._where)
        self.settings, self._watch.parts = settings, settings.micro_batches


def _elements(batch: Any) -> int:
    tree = dict(batch) if isinstance(batch, Mapping) else batch
    return sum(leaf.numel() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
