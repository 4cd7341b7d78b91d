"""transformers' Trainer on two processes, with DDP and with FSDP2: losses and weights of loops written by hand.

DDP and FSDP2 have the same bits on two processes, so each test asserts how the model is wrapped.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.bits import same_bits
from support.processes import run_processes
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import lowbit as lb

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

STEPS, ROWS = 4, 2
LAYERS = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
OPTIONS: dict[str, dict[str, Any]] = {"ddp": {}, "zero3": {"fsdp": True, "fsdp_config": LAYERS}}
ADAPTED = ("nf4", "int4-weight-only:group32")
ADAMW: tuple[Any, dict[str, Any]] = (lb.optim.AdamW8bit, {"lr": 1e-2, "weight_decay": 0.0})


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4 * STEPS * ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def network(recipe: str = "fp8") -> nn.Module:
    """Of a recipe for training; or of one for weights, which stay as they are beside adapters that train."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, tie_word_embeddings=False, **shape))
    if recipe not in ADAPTED:
        lb.train.prepare_(model, recipe)
        return model
    import peft

    lb.quantize_(model, recipe)
    return peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=4, task_type="CAUSAL_LM"))


def full(parameter: Tensor) -> Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()


def whole(model: nn.Module) -> list[Tensor]:
    return list(map(full, model.parameters()))


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@contextmanager
def counted_as_gpus() -> Iterator[None]:
    """Within, Accelerate takes processes on CPUs for those of GPUs: it knows FSDP for these alone."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    state = PartialState._shared_state
    state["distributed_type"] = DistributedType.MULTI_GPU
    yield
    assert state["distributed_type"] == DistributedType.FSDP, "what Accelerate makes of it, and goes on with"


def trainer(path: str, model: nn.Module, strategy: str, steps: int = STEPS, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    options = {"save_strategy": "no", "max_grad_norm": 0.0, **OPTIONS[strategy], **options}
    arguments = TrainingArguments(
        path, per_device_train_batch_size=ROWS, max_steps=steps, logging_steps=1, report_to=[], use_cpu=True,
        lr_scheduler_type="constant", disable_tqdm=True, **options,
    )  # fmt: skip
    if strategy == "ddp":
        optimizer = ADAMW[0](trained(model), **ADAMW[1])
        return Trainer(model=model, args=arguments, train_dataset=Texts(), optimizers=(optimizer, None))
    with counted_as_gpus():
        return Trainer(model=model, args=arguments, train_dataset=Texts(), optimizer_cls_and_kwargs=ADAMW)


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def assert_wrapped(trainer: Any, strategy: str) -> None:
    stepped = [parameter for group in trainer.optimizer.param_groups for parameter in group["params"]]
    sharded = [isinstance(parameter, DTensor) for parameter in (*trainer.model.parameters(), *stepped)]
    assert all(sharded) if strategy == "zero3" else not any(sharded)
    assert isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel) == (strategy == "ddp")
    assert trainer.accelerator.is_fsdp2 == (strategy == "zero3")


def by_hand(
    recipe: str, batches: list[list[Tensor]], strategy: str | None, groups: list[list[str]], clip: float
) -> tuple[list[float], list[Tensor]]:
    """Losses and weights of a loop over the batches of both processes: by a way of ``shard_``; or in one process, which
    takes them as two micro-batches. ``groups``: the names of parameters in each group of the optimizer.
    """
    model, losses = network(recipe), []
    named = dict(model.named_parameters())
    optimizer = ADAMW[0]([{"params": [named[name] for name in names]} for names in groups], **ADAMW[1])
    if strategy is not None:
        model, optimizer = lb.distributed.shard_(model, optimizer, strategy)
    for parts in batches:
        mine = parts if strategy is None else [parts[dist.get_rank()]]
        total = torch.zeros(())
        for tokens in mine:
            loss = model(input_ids=tokens, labels=tokens).loss / len(mine)
            loss.backward()
            total += loss.detach()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if strategy is not None:
            dist.all_reduce(total)
            total /= 2
        losses.append(float(total))
    return losses, whole(model)


def as_torchrun_does(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    port = Path(path, "port").read_text()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true"}


def with_port(path: Path) -> tuple[str]:
    import socket

    with socket.socket() as asked:
        asked.bind(("localhost", 0))
        (path / "port").write_text(str(asked.getsockname()[1]))
    return (str(path),)


def _in_group(rank: int, path: str, check: Callable[..., None], arguments: tuple[tuple[str, ...], ...]) -> None:
    """``check(path, *each)`` of the arguments. What holds the group goes before the group does: its threads wait for
    the interpreter's lock, which the destructor of a model of DDP keeps while it waits for them.
    """
    as_torchrun_does(rank, path)
    for each in arguments:
        check(path, *each)
        gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def _train(path: str, strategy: str, recipe: str) -> None:
    clip = 0.0 if recipe in ADAPTED else 1.0
    seen: list[Tensor] = []
    model = network(recipe)
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["input_ids"].clone()), with_kwargs=True)
    before, names = whole(model), [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    made = trainer(f"{path}/{strategy}", model, strategy, max_grad_norm=clip)
    if strategy == "zero3":  # Trainer makes groups of what decays, and of the rest
        decay = set(made.get_decay_parameter_names(model))
        groups = [[name for name in names if (name in decay) == first] for first in (True, False)]
    else:
        groups = [names]
    made.train()
    assert_wrapped(made, strategy)
    losses, weights = losses_of(made), whole(made.model)
    moved = [not same_bits(*pair) for pair in zip(before, weights, strict=True)]
    assert sum(moved) == len(names) and len(losses) == STEPS, "all that trains, and nothing else"

    batches = []
    for tokens in seen:
        parts = [torch.empty_like(tokens) for _ in range(2)]
        dist.all_gather(parts, tokens)
        assert not torch.equal(*parts), "each process has its own rows"
        batches.append(parts)
    loops = (strategy, None) if recipe in ADAPTED else (strategy,)  # recipes draw other bits in each process
    for loop in loops:
        found, expected = by_hand(recipe, batches, loop, groups, clip)
        assert losses == found, (strategy, recipe, loop)
        assert all(map(same_bits, weights, expected)), (strategy, recipe, loop)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("strategy", list(reversed(OPTIONS)))
def test_trainer_has_the_bits_of_a_loop_with_shard(tmp_path: Path, strategy: str):
    run_processes(_in_group, (*with_port(tmp_path), _train, ((strategy, "fp8"),)))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", OPTIONS)
def test_adapters_on_a_quantized_base_have_the_bits_of_one_process(tmp_path: Path, strategy: str):
    pytest.importorskip("peft")
    run_processes(_in_group, (*with_port(tmp_path), _train, tuple((strategy, recipe) for recipe in ADAPTED)))


def _accumulate(path: str, strategy: str, recipe: str) -> None:
    """Two micro-batches a step under autocast to bf16, beside one process that takes all four of both processes."""
    seen: list[Tensor] = []
    model = network(recipe)
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["input_ids"].clone()), with_kwargs=True)
    made = trainer(f"{path}/{strategy}", model, strategy, gradient_accumulation_steps=2, bf16=True)
    made.train()
    assert_wrapped(made, strategy)
    assert len(seen) == 2 * STEPS, "each micro-batch is taken once"

    model, expected = network(recipe), []
    optimizer = ADAMW[0](trained(model), **ADAMW[1])
    for first, second in zip(seen[::2], seen[1::2], strict=True):
        total = torch.zeros(())
        for tokens in (first, second):
            parts = [torch.empty_like(tokens) for _ in range(2)]
            dist.all_gather(parts, tokens)
            for part in parts:
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(input_ids=part, labels=part).loss / 4
                loss.backward()
                total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(total))
    within = {"ddp": 1e-6, "zero3": 2**-8}[strategy]  # under FSDP2 the model answers in bf16
    assert losses_of(made) == pytest.approx(expected, rel=within), (strategy, recipe)
    three = zip(*(trained(one) for one in (network(recipe), made.model, model)), strict=True)
    for start, mine, theirs in (map(full, parameters) for parameters in three):
        moved = (theirs - start).norm()
        near = {"ddp": 1e-3, "zero3": 0.5}[
            strategy
        ]  # Adam takes steps of the same size by gradients that bf16 has rounded
        assert (mine - theirs).norm() <= near * moved, (strategy, recipe)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", OPTIONS)
def test_accumulation_in_bf16_adds_up_to_the_whole_batch(tmp_path: Path, strategy: str):
    pytest.importorskip("peft")
    run_processes(_in_group, (*with_port(tmp_path), _accumulate, ((strategy, "fp8"), (strategy, "nf4"))))


def _resume(path: str, strategy: str, recipe: str) -> None:
    """Four steps with a checkpoint after two, from which another Trainer takes the last two again."""
    directory = f"{path}/{recipe}"
    straight = trainer(directory, network(recipe), strategy, save_strategy="steps", save_steps=2)
    straight.train()
    again = trainer(directory, network(recipe), strategy)
    again.train(resume_from_checkpoint=f"{directory}/checkpoint-2")
    assert_wrapped(again, strategy)
    assert losses_of(again) == losses_of(straight), (strategy, recipe)
    assert all(map(same_bits, whole(straight.model), whole(again.model))), (strategy, recipe)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", OPTIONS)
def test_a_checkpoint_of_two_processes_resumes_in_every_bit(tmp_path: Path, strategy: str):
    pytest.importorskip("peft")
    run_processes(_in_group, (*with_port(tmp_path), _resume, ((strategy, "fp8"), (strategy, "nf4"))))


def _refused(path: str) -> None:
    from transformers import Trainer, TrainingArguments

    options: dict[str, Any] = {"use_cpu": True, "report_to": [], "fsdp": True}
    arguments = TrainingArguments(path, fsdp_config=LAYERS, **options)
    with pytest.raises(ValueError, match=r"it found MULTI_CPU, and every process would keep the whole.*shard_\(model"):
        Trainer(model=network(), args=arguments, optimizer_cls_and_kwargs=ADAMW)
    arguments = TrainingArguments(path, fsdp_config={**LAYERS, "cpu_ram_efficient_loading": True}, **options)
    with counted_as_gpus(), pytest.raises(ValueError, match=r"the first of them \S+; leave it out of fsdp_config"):
        Trainer(model=network("nf4"), args=arguments, optimizer_cls_and_kwargs=ADAMW)
    arguments, model = TrainingArguments(path, fsdp_config=LAYERS, **options), network()
    with counted_as_gpus(), pytest.raises(RuntimeError, match="Passing `optimizers` is not allowed"):
        Trainer(model=model, args=arguments, optimizers=(ADAMW[0](trained(model), **ADAMW[1]), None))


@pytest.mark.slow
def test_what_trainer_would_not_shard_is_refused(tmp_path: Path):
    pytest.importorskip("peft")
    run_processes(_in_group, (*with_port(tmp_path), _refused, ((),)))
