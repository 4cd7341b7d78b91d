"""Every function that changes a model or an optimizer in place leaves no cycle: ``del`` frees each weight at once."""

from __future__ import annotations

import gc
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import lowbit as lb

with suppress(ImportError):
    import peft  # noqa: F401  # errors that its first import catches hold the frames of whoever asks for it

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(24).view(2, 12) % 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def network():
    return nn.Sequential(*(Block() for _ in range(3)))


def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    return transformers.LlamaForCausalLM(config).train()


def stem():
    return nn.Sequential(nn.Conv2d(3, 64, 1), nn.BatchNorm2d(64), nn.Flatten(), nn.Linear(64, 64))


def step(model, optimizer=None, x=X):
    optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def step_of_llama(model, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    return optimizer


def trains(change: Callable[[nn.Module], Any]):
    return lambda model: (change(model), step(model))


def runs(change: Callable[[nn.Module], Any], x: torch.Tensor = X):
    def use(model):
        model.eval()
        report = change(model)
        with torch.no_grad():
            model(x)
        return report

    return use


def offloaded(model, **options):
    optimizer = lb.optim.offload_(torch.optim.AdamW(model.parameters()), tempfile.mkdtemp(), **options)
    step(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return step(model, optimizer), scheduler


def in_backward(model):
    optimizer = lb.optim.in_backward_(model, lb.optim.AdamW)
    return step(model, optimizer)


def scaled(model):
    scaler, optimizer = lb.train.LossScaler(), torch.optim.AdamW(model.parameters())
    scaler.scale(model(X).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler, optimizer


def calibrated(model):
    model.eval()
    report = lb.calibrate(model, "int8-static", [X], method="minmax")
    lb.fuse_requantize_(model)
    model(X)
    return report


def qat(recipe, **options):
    def use(model):
        report = lb.qat.prepare_(model, recipe, **options)
        return report, step(model), lb.qat.convert_(model)

    return use


def square(answer, batch):
    return answer.square().mean()


def planned(*keep):
    def use(model):
        plan = lb.fit(model, X, "100%", square, require=keep)
        run = plan.apply_(model)
        return plan, run, run.step(X)

    return use


def watched(model):
    with lb.train.watch(model, every=1) as watch:
        step(model)
    return watch


def adapted(model):
    peft = pytest.importorskip("peft")
    lb.quantize_(model, "nf4")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["up", "down"]))
    return wrapped, step(wrapped)


def sharded(strategy):
    def use(model):
        made, optimizer = lb.distributed.shard_(model, torch.optim.AdamW(model.parameters()), strategy)
        return made, step(made, optimizer)

    return use


NETWORKS = {
    "nothing": step,
    "quantize_": runs(lambda m: lb.quantize_(m, "int8")),
    "quantize_ and back": runs(lambda m: (lb.quantize_(m, "nf4"), lb.dequantize_(m))),
    "prepack_": runs(lambda m: (lb.quantize_(m, "int4-weight-only"), lb.prepack_(m))),
    "prepack_ and back": runs(lambda m: (lb.quantize_(m, "int8"), lb.prepack_(m), lb.unprepack_(m))),
    "calibrate and fuse_requantize_": calibrated,
    "mixed_": trains(lambda m: lb.train.mixed_(m, "bf16")),
    "mixed_ and back": trains(lambda m: (lb.train.mixed_(m, "bf16"), lb.train.unmixed_(m))),
    "working copies": lambda m: (
        lb.train.mixed_(m, "bf16", working_copies=True),
        step(m, lb.optim.AdamW(m.parameters(), master="residual")),
    ),
    "prepare_": trains(lambda m: lb.train.prepare_(m, "fp8")),
    "prepare_ with histories": trains(lambda m: lb.train.prepare_(m, "fp8-delayed")),
    "prepare_ and back": runs(lambda m: (lb.train.prepare_(m, "fp8"), lb.train.convert_(m))),
    "watch": lambda m: (lb.train.prepare_(m, "fp8"), watched(m)),
    "compress_activations_": trains(lb.train.compress_activations_),
    "compress_activations_ and mixed_": trains(lambda m: (lb.train.mixed_(m), lb.train.compress_activations_(m))),
    "qat.prepare_": qat("int8"),
    "qat.prepare_ with static scales": qat("int8-static"),
    "qat.prepare_ with learned scales": qat("int4-weight-only", learn_scale=True),
    "offload_": offloaded,
    "offload_ with gradients": lambda m: offloaded(m, gradients=True),
    "in_backward_": in_backward,
    "LossScaler": scaled,
    "stream_blocks_": trains(lambda m: lb.memory.stream_blocks_(m, tempfile.mkdtemp())),
    "stream_blocks_ and back": trains(
        lambda m: (lb.memory.stream_blocks_(m, tempfile.mkdtemp()), lb.memory.unstream_(m))
    ),
    "checkpoint_ planned": trains(lambda m: lb.memory.checkpoint_(m, lb.memory.plan_checkpoints(m, X, "100%"))),
    "checkpoint_ and back": trains(lambda m: (lb.memory.checkpoint_(m), lb.memory.uncheckpoint_(m))),
    "plan.apply_": planned("fp32", "adamw", "everything kept", "memory", "activations in memory"),
    "peft": adapted,
} | {
    f"checkpoint_ {policy}": trains(lambda m, policy=policy: lb.memory.checkpoint_(m, policy))
    for policy in ("block", "every:2", "ratio:0.5", "sqrt", "segments:2", "save_matmuls")
}  # fmt: skip

LLAMAS = {
    "checkpoint_ attention": lambda m: (lb.memory.checkpoint_(m, "attention"), step_of_llama(m)),
    "checkpoint_ mlp": lambda m: (lb.memory.checkpoint_(m, "mlp"), step_of_llama(m)),
    "attention_": lambda m: (lb.memory.attention_(m), step_of_llama(m)),
    "fuse_loss_": lambda m: (lb.memory.fuse_loss_(m), step_of_llama(m)),
    "fuse_loss_ and back": lambda m: (lb.memory.fuse_loss_(m), lb.memory.unfuse_loss_(m), step_of_llama(m)),
}


def use_and_note(model: nn.Module, use: Callable[[nn.Module], Any], references: list) -> None:
    """The name is given up by the caller's frame too: ``references`` has weak ones of what must go."""
    references += [weakref.ref(model), *map(weakref.ref, [*model.parameters(), *model.buffers()])]
    held = use(model)
    references += map(weakref.ref, [*model.parameters(), *model.buffers()])
    del held


def check(make: Callable[[], nn.Module], use: Callable[[nn.Module], Any]) -> None:
    references: list = []
    gc.collect()
    gc.disable()
    try:
        use_and_note(make(), use, references)
        alive = [type(ref()).__name__ for ref in references if ref() is not None]
    finally:
        gc.enable()
    assert not alive, f"alive until the garbage collector runs: {alive}"


@pytest.mark.thinned(8)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.filterwarnings("ignore")
def test_a_network_is_freed_at_once(name):
    check(network, NETWORKS[name])


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", LLAMAS)
def test_a_model_of_transformers_is_freed_at_once(name):
    check(llama, LLAMAS[name])


def test_a_folded_network_is_freed_at_once():
    check(stem, runs(lb.fold_, torch.randn(2, 3, 1, 1)))


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2-replicated"])  # torch's fully_shard itself makes cycles
@pytest.mark.filterwarnings("ignore")
def test_a_sharded_network_is_freed_at_once(strategy, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        check(network, sharded(strategy))
    finally:
        torch.distributed.destroy_process_group()


def test_the_model_alone_keeps_the_optimizer_that_steps_in_backward():
    model = network()
    lb.optim.in_backward_(model, lb.optim.AdamW)
    before = model[0].up.weight.detach().clone()
    model(X).square().mean().backward()
    assert not torch.equal(model[0].up.weight, before) and model[0].up.weight.grad is None


def test_hooks_without_their_optimizer_say_so():
    model = network()
    lb.optim.in_backward_(model, lb.optim.AdamW)
    block = model[0]
    del model
    with pytest.raises(RuntimeError, match="keep one of them"):
        block(X).square().mean().backward()


def test_a_forward_keeps_its_module_as_any_method_does():
    model = network()
    lb.train.mixed_(model, "bf16")
    forward, expected = model.forward, model(X)
    del model
    assert torch.equal(forward(X), expected)
