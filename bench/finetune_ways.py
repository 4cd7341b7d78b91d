"""Ways to fine-tune a model of transformers within a memory limit, each run in a process of its own.

``started("finetune_ways", [question])`` runs ``main``. A question has a task of ``TASKS`` and its arguments.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import lowbit as lb
from lowbit.finetune.packing import Batch, Packed
from lowbit.finetune.session import Session, TuneConfig, add_adapters, first_batch, held_out_loss
from lowbit.finetune.texts import Document, read, split
from lowbit.memory.heap import trim
from lowbit.memory.shortage import ran_out
from lowbit.plan import TrainingPlan
from lowbit.plan.fitting.choices import words
from lowbit.plan.ladder.limits import LIMITS

__all__ = ["LENGTH", "LIBRARIES", "RANK", "ROWS", "WAYS", "Variant", "Way", "config_of"]

#: Rank of the adapters, rows per step, and tokens per row.
RANK, ROWS, LENGTH = 16, 2, 128

#: Bytes that a process may allocate above the budget: libraries keep memory that no allocator of tensors counts, such
#: as kernels that oneDNN generates for a shape, and their buffers.
LIBRARIES = 64 << 20

#: Called after each step.
OnStep = Callable[[], None]


class Prepared(NamedTuple):
    """A loaded model that is prepared for training.

    Attributes:
        train: Trains it, and calls the function after each step.
        results: The held-out losses after training, and before it if they were measured. For runs of lowbit also the
            settings at the end, which differ from the plan's if memory ran out.
    """

    train: Callable[[OnStep], object]
    results: Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Job:
    """What a variant trains.

    Attributes:
        model: Directory of the model.
        documents: Documents to train on.
        held_out: Documents for the held-out loss.
        config: Settings of the training.
        scratch: Directory for offloaded tensors and states.
    """

    model: Path
    documents: list[Document]
    held_out: list[Document]
    config: TuneConfig
    scratch: Path

    @property
    def rows(self) -> Packed:
        return Packed(self.documents, LENGTH, self.config.seed)

    def load(self, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
        """The model in training mode, with adapters if the configuration has them."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.model, dtype=dtype, **options)
        model.config.use_cache = False
        return self.adapted(model)

    def adapted(self, model: Any) -> Any:
        return (add_adapters(model, self.config.adapters, self.config.seed) if self.config.adapters else model).train()


@dataclass(frozen=True)
class Variant:
    """A configuration of a way.

    Attributes:
        name: Its description.
        dtype: Dtype of the weights.
        options: Keyword arguments of ``TrainingArguments``.
        base: Returns the keyword arguments of ``from_pretrained`` that quantize the base.
    """

    name: str
    dtype: str = "fp32"
    options: dict[str, Any] = field(default_factory=dict)
    base: Callable[[], dict[str, Any]] = dict


@dataclass(frozen=True)
class Way:
    """A program that fine-tunes.

    Attributes:
        name: Its name.
        adapters: Rank of the adapters that it trains; 0: all weights.
        variants: Its configurations, the best first; without any, ``lb.fit`` makes a plan.
        package: A package that it needs besides transformers and peft.
    """

    name: str
    adapters: int
    variants: tuple[Variant, ...] = ()
    package: str | None = None


# -- the configurations of others --------------------------------------------------------------------------------------
_PARTS = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": ROWS}
_CHECKPOINTS = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}

#: How the rows of a step run, from the fastest to that with the least memory.
_SHAPES: dict[str, dict[str, Any]] = {
    "": {"per_device_train_batch_size": ROWS},
    f", {ROWS} parts": _PARTS,
    f", {ROWS} parts, checkpointing": {**_PARTS, **_CHECKPOINTS},
}


def _variants(name: str, dtype: str, optimizer: str, base: Callable[[], dict[str, Any]] = dict) -> Iterator[Variant]:
    for shape, options in _SHAPES.items():
        yield Variant(f"{name}{shape}", dtype, {"optim": optimizer, **options}, base)


def _nf4() -> dict[str, Any]:
    from transformers import BitsAndBytesConfig

    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.float32}
    return {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **options), "device_map": "cpu"}


def _int8() -> dict[str, Any]:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig(version=2)), "device_map": "cpu"}


#: All ways.
WAYS = (
    Way("lowbit, all weights", 0),
    Way("Trainer, all weights", 0, (
        *_variants("fp32, AdamW", "fp32", "adamw_torch"), *_variants("fp32, Adafactor", "fp32", "adafactor"),
        *_variants("bf16, AdamW", "bf16", "adamw_torch"), *_variants("bf16, Adafactor", "bf16", "adafactor"))),
    Way("Trainer with bitsandbytes, all weights", 0, (
        *_variants("fp32, 8-bit AdamW", "fp32", "adamw_bnb_8bit"),
        *_variants("bf16, 8-bit AdamW", "bf16", "adamw_bnb_8bit")), "bitsandbytes"),
    Way("Trainer with torchao, all weights", 0, (
        *_variants("fp32, 8-bit AdamW", "fp32", "adamw_torch_8bit"),
        *_variants("fp32, 4-bit AdamW", "fp32", "adamw_torch_4bit"),
        *_variants("bf16, 4-bit AdamW", "bf16", "adamw_torch_4bit")), "torchao"),
    Way("lowbit, adapters", RANK),
    Way("peft, adapters", RANK, (
        *_variants("fp32 base", "fp32", "adamw_torch"), *_variants("bf16 base", "bf16", "adamw_torch"))),
    Way("peft with bitsandbytes, adapters", RANK, tuple(
        _variants("nf4 base", "fp32", "adamw_torch", _nf4)), "bitsandbytes"),
    Way("peft with torchao, adapters", RANK, tuple(
        _variants("int8 base", "fp32", "adamw_torch", _int8)), "torchao"),
)  # fmt: skip

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def config_of(way: Way, steps: int, eval_rows: int) -> TuneConfig:
    """The training of a way. The learning rate is the default for adapters, or for all weights."""
    return TuneConfig(
        steps=steps, rows=ROWS, length=LENGTH, adapters=way.adapters, eval_every=steps, eval_rows=eval_rows,
        save_every=steps, warmup=min(TuneConfig.warmup, steps),
    )  # fmt: skip


# -- training ----------------------------------------------------------------------------------------------------------
def _by_plan(job: Job, plan: TrainingPlan | None) -> Prepared:
    """A model that lowbit trains; without a plan in plain fp32."""
    session = Session(job.load(), job.documents, job.held_out, job.config, job.scratch, plan)

    def results() -> dict[str, Any]:
        (_, before), *_, (_, after) = session.history.held_out
        return {"before": before, "held_out": after, "ended": words(session.run.settings)}

    return Prepared(lambda on_step: session.train(lambda _: on_step()), results)


def _by_trainer(job: Job, variant: Variant) -> Prepared:
    """A model that transformers' Trainer trains, with the same rows, learning rates and clipping."""
    from torch.optim.lr_scheduler import LambdaLR
    from torch.utils.data import IterableDataset
    from transformers import Trainer, TrainerCallback, TrainingArguments

    config, rows = job.config, job.rows
    model = job.load(DTYPES[variant.dtype], **variant.base())
    if config.adapters and variant.options.get("gradient_checkpointing"):
        model.enable_input_require_grads()

    class Rows(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Batch]:
            for step in range(config.steps):
                batch = rows.batch(step, config.rows)
                yield from ({name: values[row] for name, values in batch.items()} for row in range(config.rows))

    class WithRates(Trainer):  # type: ignore[misc]
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            rates = LambdaLR(optimizer or self.optimizer, lambda step: config.lr_at(step) / config.peak_lr)
            self.lr_scheduler = rates
            return rates

    def train(on_step: OnStep) -> None:
        class Count(TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, *_: Any, **__: Any) -> None:
                on_step()

        arguments = TrainingArguments(
            str(job.scratch), max_steps=config.steps, learning_rate=config.peak_lr, weight_decay=config.weight_decay,
            max_grad_norm=config.clip, seed=config.seed, use_cpu=True, dataloader_pin_memory=False, report_to=[],
            save_strategy="no", logging_strategy="no", disable_tqdm=True, remove_unused_columns=False,
            **variant.options,
        )  # fmt: skip
        WithRates(model, arguments, train_dataset=Rows(), callbacks=[Count()]).train()

    def results() -> dict[str, Any]:
        return {"held_out": held_out_loss(model, Packed(job.held_out, LENGTH).all(), config.eval_rows, 1)}

    return Prepared(train, results)


def _prepared(job: Job, way: Way, number: int, plan: TrainingPlan | None) -> Prepared:
    return _by_trainer(job, way.variants[number]) if way.variants else _by_plan(job, plan)


# -- the process -------------------------------------------------------------------------------------------------------
def _job(question: dict[str, Any], scratch: Path) -> Job:
    from transformers import AutoTokenizer

    model = Path(question["model"])
    config = TuneConfig(**question["config"])
    documents, held = split(read(question["text"], AutoTokenizer.from_pretrained(model)), LENGTH)
    return Job(model, documents, held, config, scratch)


def _narrow(job: Job, scratch: Path) -> Job:
    """A job with two blocks of the model and a few tokens of its vocabulary, for one step."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(job.model)
    config.num_hidden_layers, config.vocab_size = 2, 512
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(scratch)
    few = [Document(document.ids % 512, document.trained) for document in job.documents]
    return replace(job, model=scratch, documents=few, held_out=few[:1], config=replace(job.config, steps=1))


def _measured(question: dict[str, Any], way: Way, scratch: Path) -> dict[str, Any]:
    """Train within ``question["budget"]`` and ``LIBRARIES`` above what the process holds before the model is loaded.

    A step of a narrow model runs first, so that one-time allocations of libraries and threads are not counted. The
    model is loaded without a limit, which counts its bytes later.
    """
    job, limits, number = _job(question, scratch / "run"), LIMITS["cpu"], question["variant"]
    plan = None
    if question["plan"] is not None:
        (scratch / "plan.json").write_text(json.dumps(question["plan"]))
        plan = TrainingPlan.load(scratch / "plan.json")
    _prepared(replace(_narrow(job, scratch / "narrow"), scratch=scratch / "warm"), way, number, None).train(
        lambda: None
    )
    gc.collect()
    trim()
    counted, held, times = limits.counted(), limits.held(), list[tuple[float, float]]()
    prepared = _prepared(job, way, number, plan)
    gc.collect()
    trim()
    limits.reset()
    budget = question["budget"]
    room = nullcontext() if budget is None else limits.within(counted + budget + LIBRARIES - limits.counted())
    try:
        with room:
            prepared.train(lambda: times.append((time.perf_counter(), time.process_time())))
    except (RuntimeError, MemoryError) as error:
        if not any(ran_out(one) for one in _causes(error)):
            raise
        return {"fits": False, "why": f"memory ran out in step {len(times) + 1}"}
    peak = limits.peak() - held
    seconds, processor = (
        (last - first) / max(1, len(times) - 1) for first, last in zip(times[0], times[-1], strict=True)
    )
    return {"fits": True, "peak": peak, "seconds": seconds, "processor_seconds": processor, **prepared.results()}


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _planned(question: dict[str, Any], way: Way, scratch: Path) -> dict[str, Any]:
    """A plan for the budget, or the reason why there is none."""
    job = _job(question, scratch)
    model = job.load()
    try:
        plan = lb.fit(model, first_batch(model, job.documents, job.config), question["budget"])
    except ValueError as error:
        return {"fits": False, "why": str(error)}
    return {"fits": True, "settings": words(plan.settings), "predicted": plan.peak_bytes, "plan": plan.as_dict()}


TASKS = {"measure": _measured, "plan": _planned}


def main() -> None:
    """The process: reads the question as JSON and prints the answer."""
    (question,) = json.loads(sys.stdin.read())
    way = next(one for one in WAYS if one.name == question["way"])
    with tempfile.TemporaryDirectory(prefix="lowbit-finetune-", ignore_cleanup_errors=True) as directory:
        scratch = Path(directory)
        for name in ("run", "warm", "narrow"):
            (scratch / name).mkdir()
        print(json.dumps(TASKS[question["task"]](question, way, scratch)), flush=True)


if __name__ == "__main__":
    main()
