"""The demo's training loop, with checkpoints from which a run resumes bit-identically.

A step depends only on weights, optimizer state, loss scale, random state and step, which ``Trainer.save`` writes.
Batches and learning rate are functions of the step.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowbit.demo.config import FLOATS, OUTSIDE, TrainConfig
from lowbit.demo.data import Corpus
from lowbit.demo.optimizers import find
from lowbit.demo.step import arrange_, evaluate, loss_of, optimizer_of, update
from lowbit.dist_utils import processes
from lowbit.distributed import STRATEGIES, shard_, torchrun
from lowbit.distributed.checkpoint import saved
from lowbit.files import read_checked, write_checked
from lowbit.interrupts import Interrupted, stop_on_signals
from lowbit.memory.profiler import Profile, profile
from lowbit.optim import offload_
from lowbit.plan import TrainingPlan
from lowbit.plan.settings import TrainingSettings, offloading, prepare_model_
from lowbit.train import (
    LossScaler,
    convert_,
    find_nonfinite,
    state,
    uncompress_activations_,
    watch,
)
from lowbit.train.micro_batches import micro_batches

__all__ = [
    "FLOATS",
    "OUTSIDE",
    "PROFILED",
    "SHARED_STATE",
    "STATE",
    "History",
    "TrainConfig",
    "Trainer",
]


#: The step whose memory is profiled, counted from 0: optimizer states exist, and no evaluation is near.
PROFILED = 2

#: File name of a run's state.
STATE = "checkpoint.pt"

#: Directory name of the state of a run on several processes, written by ``lowbit.distributed.save``.
SHARED_STATE = "checkpoint"


@dataclass
class History:
    """The progress of a run."""

    train: list[float] = field(default_factory=list)
    """Training loss of each step, in nats per token."""
    held_out: list[tuple[int, float]] = field(default_factory=list)
    """Held-out losses, as (finished steps, loss)."""
    seconds: float = 0.0
    skipped: int = 0
    """Steps without an update, because gradients overflowed fp16."""
    peak_bytes: int = 0
    """Peak memory of the profiled step; 0 if none was profiled."""


class Trainer:
    """One training run.

    Args:
        model: The model, prepared in place.
        corpus: The data.
        config: The configuration.
        directory: Directory for the state.
        every: Steps between measurements of quantization error, in a run with a recipe; 0: none.
        profile_memory: Whether to profile the step ``PROFILED``; ``memory`` then has the profile.
        plan: Adds checkpointing, micro-batches and offload; its step is profiled too.
        strategy: Sharding strategy of ``lowbit.distributed``; each process trains on its share of every batch, and all
            processes save one state. None: one process.

    Results are bit-identical with and without ``every`` and ``profile_memory``.
    """

    def __init__(
        self,
        model: nn.Module,
        corpus: Corpus,
        config: TrainConfig,
        directory: Path,
        every: int = 0,
        profile_memory: bool = False,
        plan: TrainingPlan | None = None,
        strategy: str | None = None,
    ) -> None:
        self.model, self.corpus, self.config, self.plan, self.strategy = model, corpus, config, plan, strategy
        self.path, self._directory = directory / (STATE if strategy is None else SHARED_STATE), str(directory)
        self._together = torchrun.Together(strategy, config.batch, self.path)
        self._settings = TrainingSettings() if plan is None else plan.settings
        self.prepared = arrange_(model, config)
        prepare_model_(model, self._settings)
        self.optimizer = optimizer_of(model, config)
        if self._settings.offload_states:
            offload_(self.optimizer, self._directory)
        #: The model, or its wrapper for several processes.
        self._called = model
        if strategy is not None:
            with torchrun.waiting("the broadcast of parameters"):
                self._called, self.optimizer = shard_(model, self.optimizer, strategy)
        self.scaler = LossScaler(enabled=config.floats == "fp16")
        #: Updates the training state of a recipe; None without a recipe, and in the tail.
        self.attached = None if config.recipe is None else state(model).attach(self.optimizer)
        self.watch = watch(model, every) if every and config.recipe is not None else None
        self.windows = corpus.held_out_windows(config.eval_windows, config.context)
        self.history = History()
        self.memory: Profile | None = None
        self._profiles = profile_memory or plan is not None
        self.step = 0

    @property
    def saved(self) -> bool:
        """Whether there is a saved state; the same in every process."""
        return torchrun.first(lambda: saved(self.path), "whether there is a state")

    def _waiting(self, collective: str) -> AbstractContextManager[None]:
        return self._together.waiting(collective, self.step)

    def run(self, on_step: Callable[[Trainer], None] = lambda _: None) -> History:
        """Train until ``config.steps``, and call ``on_step`` after each step.

        Raises:
            Interrupted: SIGINT or SIGTERM arrived, also in the last step; the state is saved.
            FloatingPointError: A loss is not finite.
        """
        if self.step == 0:
            torch.manual_seed(self.config.seed)
        with stop_on_signals() as stopped:
            while self.step < self.config.steps:
                if self._profiles and self.step == PROFILED:
                    with profile(self.model) as self.memory:
                        self._train_step()
                    self.history.peak_bytes = self.memory.peak_bytes - self.memory.by_kind.get("other", 0)
                else:
                    self._train_step()
                on_step(self)
                stop = self._together.anywhere(
                    stopped(), self.step
                )  # once per step: a signal during a save stops after the next step
                if stop or self.step % self.config.save_every == 0 or self.step == self.config.steps:
                    self.save()
                if stop:
                    break
            stop = self._together.anywhere(stopped(), self.step)
        if stop:
            raise Interrupted(self.step, self.path)
        return self.history

    def _begin_tail(self) -> None:
        """Remove the recipe: later steps compute in ``config.outside`` only."""
        if self.attached is None:
            return
        if self.watch is not None:
            self.watch.close()
        self.attached.remove()
        self.attached = None
        uncompress_activations_(self.model)
        convert_(self.model)

    def _train_step(self) -> None:
        config, start = self.config, time.perf_counter()
        if self.step >= config.tail_begins:
            self._begin_tail()
        batch = self.corpus.batch(self.step, config.batch, config.context, config.seed)
        inputs_BT, targets_BT = (part[self._together.share] for part in batch)

        def recompute() -> Tensor:
            scaled: Tensor = self.scaler.scale(loss_of(self.model, inputs_BT, targets_BT))
            return scaled

        with offloading(self._settings, self._directory):
            parts = micro_batches((inputs_BT, targets_BT), self._settings.micro_batches)
            losses = [self._backward(inputs, targets, weight) for (inputs, targets), weight in parts]
        self.history.train.append(self._together.mean(sum(losses), self.step))
        if config.floats != "fp16" and not math.isfinite(self.history.train[-1]):  # before the update
            self._fail(f"the loss at step {self.step} is {self.history.train[-1]}", recompute)
        for group in self.optimizer.param_groups:
            group["lr"] = config.lr_at(self.step) * find(config.optimizer).lr
        with self._waiting(self._together.waits.update):
            update(self.model, self.optimizer, self.scaler, config.clip)
        skipped = self.scaler.skipped > self.history.skipped
        self.history.skipped = self.scaler.skipped
        if self.scaler.gave_up or not (skipped or math.isfinite(self.history.train[-1])):
            self._fail(f"the loss at step {self.step} is {self.history.train[-1]}", recompute)
        self.step += 1
        self.history.seconds += time.perf_counter() - start
        if self.step % config.eval_every == 0 or self.step == config.steps:
            held_out = self._held_out_loss()
            self.history.held_out.append((self.step, held_out))
            if not math.isfinite(held_out):
                self._fail(f"the held-out loss after {self.step} steps is {held_out}", self._held_out_loss)

    def _backward(self, inputs_BT: Tensor, targets_BT: Tensor, weight: float) -> float:
        """Forward and backward of a micro-batch; returns its weighted loss."""
        with self._waiting(self._together.waits.forward):
            loss = weight * loss_of(self._called, inputs_BT, targets_BT)
        with self._waiting(self._together.waits.backward):
            torch.autograd.backward(self.scaler.scale(loss))
        return loss.item()

    def _held_out_loss(self) -> float:
        """The held-out loss in the run's precision, with the rows of a micro-batch at a time; not distributed."""
        with self._waiting(self._together.waits.forward):
            return evaluate(self.model, self.windows, -(-self.config.batch // self._settings.micro_batches))

    def _fail(self, problem: str, recompute: Callable[[], Any]) -> NoReturn:
        """Raise FloatingPointError with the first tensor that is not finite when the loss is computed again."""
        cause = self._find_nonfinite(recompute)
        config, skipped = self.config, self.scaler.skipped
        steps = f", with {skipped} steps skipped by the loss scaler" if skipped else ""
        wider = "" if config.precision == "fp32" else f" or train in a wider format than {config.precision}"
        first = "" if cause is None else f": {cause}"
        raise FloatingPointError(f"{problem}{steps}{first}; lower the learning rate ({config.lr}){wider}")

    def _find_nonfinite(self, recompute: Callable[[], Any]) -> object:
        """The first tensor that is not finite, of the first process that has one."""
        if self.strategy is not None and STRATEGIES[self.strategy].gathered:
            return None  # the search stops in the middle of a step, and other processes would wait for its collectives
        causes: list[object] = [find_nonfinite(self.model, recompute)]
        if processes() > 1:
            texts = [None if causes[0] is None else str(causes[0])] * processes()
            with self._waiting("the all-gather of non-finite tensors"):
                dist.all_gather_object(texts, texts[0])
            causes = list(texts)
        return next((cause for cause in causes if cause is not None), None)

    @property
    def tokens_per_second(self) -> float:
        return self.step * self.config.batch * self.config.context / max(self.history.seconds, 1e-9)

    # -- state on disk -------------------------------------------------------------------------------------------
    def save(self) -> None:
        """Write the state; the previous file stays intact until the new one is complete.

        Raises:
            OSError: It cannot be written, for instance to a full disk; the message says how to continue.
            RuntimeError: The same, on several processes.
        """
        if self.strategy is not None:
            self._save_together()
            return
        state = {
            **self._values(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "random": torch.get_rng_state(),
            "watch": None if self.watch is None else self.watch.state_dict(),
        }
        payload = io.BytesIO()
        torch.save(state, payload)
        try:
            write_checked(self.path, lambda file: file.write(payload.getbuffer()))
        except OSError as error:
            size = f"{payload.tell():,} bytes"
            raise OSError(error.errno, self._unsaved(error.strerror, size), str(self.path)) from error

    def _save_together(self) -> None:
        try:
            self._together.save(self._called, self.optimizer, scaler=self.scaler, **self._values())
        except torchrun.Lost:
            raise
        except RuntimeError as error:
            raise RuntimeError(f"{self.path}: {self._unsaved(error, 'the checkpoint')}") from error

    def _unsaved(self, reason: object, size: str) -> str:
        before = "the state that was saved before it is whole" if saved(self.path) else "none was saved before it"
        return (
            f"the state after step {self.step} is not saved ({reason}), and {before}; make room for {size}, then "
            f"continue with --resume"
        )

    def _values(self) -> dict[str, Any]:
        """The values of a state that are not tensors."""
        return {
            "config": asdict(self.config),
            "plan": asdict(self._settings),
            "corpus": self.corpus.fingerprint,
            "step": self.step,
            "history": asdict(self.history),
        }

    def load(self) -> None:
        """Load the saved state; with the same number of processes the run continues bit-identically.

        Raises:
            FileNotFoundError: There is no state.
            ValueError: The state is damaged, has another configuration or text, or is from before the tail in which
                this run is.
        """
        if self.strategy is not None:
            state = self._together.load(self._called, self.optimizer, self._check, scaler=self.scaler)
            self._continue(state)
            return
        if not self.path.exists():
            raise FileNotFoundError(f"nothing to resume: {self.path} does not exist; run without --resume first")
        try:
            payload = read_checked(self.path)
        except ValueError as error:
            raise ValueError(f"{error}; delete it to start over") from None
        try:
            self._restore(torch.load(io.BytesIO(payload), weights_only=True))
        except ValueError:
            raise
        except Exception as error:  # the checksum is right, but the contents are not from a run
            raise ValueError(f"{self.path} is no checkpoint of this run ({error}); delete it to start over") from error

    def _check(self, state: dict[str, Any]) -> None:
        """Raise ValueError for the state of another run."""
        old = {**asdict(TrainingSettings()), **state.get("plan", {}), **state["config"]}
        new = {**asdict(self._settings), **asdict(self.config)}
        changed = [f"{k} {old.get(k)} -> {new[k]}" for k in new if old.get(k) != new[k]]
        if changed:
            raise ValueError(f"{self.path} is of another run ({', '.join(changed)}); resume with the same settings")
        if state["corpus"] != self.corpus.fingerprint:
            raise ValueError(
                f"{self.path} was trained on another text (its CRC {state['corpus']:08x}, this one's "
                f"{self.corpus.fingerprint:08x}); resume with the same data and the same Python version"
            )

    def _continue(self, state: dict[str, Any]) -> None:
        self.step, self.history = state["step"], History(**state["history"])
        self.history.held_out = [(step, loss) for step, loss in self.history.held_out]

    def _restore(self, state: dict[str, Any]) -> None:
        self._check(state)
        if state["step"] > self.config.tail_begins:
            self._begin_tail()
        elif self.attached is None and self.config.recipe is not None:
            raise ValueError(
                f"{self.path} is of step {state['step']}, before the tail that begins after step "
                f"{self.config.tail_begins}, but this run is in its tail; load it into a new Trainer"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["random"])
        self._continue(state)
        if self.watch is not None and state["watch"] is not None:
            self.watch.load_state_dict(state["watch"])
