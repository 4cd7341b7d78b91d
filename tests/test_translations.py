"""Code examples of courses on memory-efficient training in lowbit's calls: they run, and are shorter.

Each function is one example. Its decorator has the number of lines of the original, without model and data.
"""

from __future__ import annotations

import copy
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowbit as lb
from lowbit.bench.handwritten import Shape, Transformer, next_token_loss, tokens

SHAPE = Shape(layers=3, width=32, heads=4, vocabulary=96, length=16, rows=4)

#: The examples, with the lines of their originals.
EXAMPLES: list[tuple[int, Callable[..., Any]]] = []


def original(lines: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(example: Callable[..., Any]) -> Callable[..., Any]:
        EXAMPLES.append((lines, example))
        return example

    return add


def fresh() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Transformer(SHAPE), tokens(SHAPE)


def step(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """The gradients of a step."""
    next_token_loss(model(ids), ids).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def assert_gradients(model: nn.Module, ids: Tensor, *, exact: bool = True) -> None:
    """The gradients equal those of the plain model."""
    plain, _ = fresh()
    for grad, expected in zip(step(model, ids), step(plain, ids), strict=True):
        if exact:
            assert torch.equal(grad, expected)
        else:
            torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-6)


def body(example: Callable[..., Any]) -> list[str]:
    """The lines of an example without its decorator, its signature and its assertions."""
    lines = textwrap.dedent(inspect.getsource(example)).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("def ")) + 1
    return [line for line in lines[start:] if line.strip() and not line.strip().startswith(("assert", '"""'))]


# -- checkpointing ----------------------------------------------------------------------------------------------------
@original(9)
def checkpoint_every_block(model: nn.Module, ids: Tensor, directory: Path) -> None:
    lb.memory.checkpoint_(model, "block")
    assert_gradients(model, ids)


@original(110)
def checkpoint_attention_and_feed_forward_of_each_block(model: nn.Module, ids: Tensor, directory: Path) -> None:
    lb.memory.checkpoint_(model, ["*.attn", "*.ff"])
    assert_gradients(model, ids)


@original(60)
def checkpoint_attention_only(model: nn.Module, ids: Tensor, directory: Path) -> None:
    lb.memory.checkpoint_(model, "attention")
    assert_gradients(model, ids)


@original(40)
def checkpoint_selected_modules(model: nn.Module, ids: Tensor, directory: Path) -> None:
    lb.memory.checkpoint_(model, lambda module, path: path.endswith(".ff"))
    assert_gradients(model, ids)


@original(22)
def checkpoint_half_of_the_layers(model: nn.Module, ids: Tensor, directory: Path) -> None:
    lb.memory.checkpoint_(model, "ratio:0.5")
    assert_gradients(model, ids)


@original(45)
def compare_memory_with_and_without_checkpoints(model: nn.Module, ids: Tensor, directory: Path) -> None:
    plain = lb.estimate(model, ids)
    saving = lb.estimate(model, ids, checkpoint="block")
    assert saving.peak_bytes < plain.peak_bytes


# -- precision --------------------------------------------------------------------------------------------------------
@original(35)
def train_in_fp16_with_loss_scaling(model: nn.Module, ids: Tensor, directory: Path) -> None:
    lb.train.mixed_(model, "fp16")
    optimizer = lb.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = lb.train.LossScaler()
    for _ in range(3):
        scaler.scale(next_token_loss(model(ids), ids)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert next_token_loss(model(ids), ids) < next_token_loss(fresh()[0](ids), ids)


@original(20)
def train_in_bf16(model: nn.Module, ids: Tensor, directory: Path) -> None:
    lb.train.mixed_(model, "bf16")
    assert all(grad.isfinite().all() for grad in step(model, ids))


@original(15)
def compare_number_formats(model: nn.Module, ids: Tensor, directory: Path) -> None:
    weight = torch.randn(64, 64)
    sizes = {scheme: lb.quantize(weight, scheme).nbytes for scheme in ("int8:row", "fp8_e4m3:row", "int4:group32")}
    assert sizes["int4:group32"] < sizes["int8:row"] < weight.nbytes / 3


# -- attention --------------------------------------------------------------------------------------------------------
@original(55)
def attention_without_scores(model: nn.Module, ids: Tensor, directory: Path) -> None:
    lb.memory.attention_(model)
    assert_gradients(model, ids, exact=False)


@original(45)
def flash_attention_in_a_forward(model: nn.Module, ids: Tensor, directory: Path) -> None:
    q, k, v = torch.randn(3, 2, 4, 16, 8).unbind()
    out = lb.memory.attention(q, k, v, causal=True)
    assert torch.allclose(out, F.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-5)


# -- accumulation and offload -----------------------------------------------------------------------------------------
@original(35)
def accumulate_gradients_over_parts_of_a_batch(model: nn.Module, ids: Tensor, directory: Path) -> None:
    for part, weight in lb.memory.micro_batches(ids, 4):
        (next_token_loss(model(part), part) * weight).backward()
    plain, _ = fresh()
    for p, expected in zip(model.parameters(), step(plain, ids), strict=True):
        torch.testing.assert_close(p.grad, expected, rtol=1e-4, atol=1e-6)


@original(35)
def accumulate_gradients_over_batches_of_a_loader(model: nn.Module, ids: Tensor, directory: Path) -> None:
    batches = list(ids.split(2))
    for batch, weight in zip(batches, lb.memory.accumulation_weights(batches), strict=True):
        (next_token_loss(model(batch), batch) * weight).backward()
    plain, _ = fresh()
    for p, expected in zip(model.parameters(), step(plain, ids), strict=True):
        torch.testing.assert_close(p.grad, expected, rtol=1e-4, atol=1e-6)


@original(75)
def offload_optimizer_states(model: nn.Module, ids: Tensor, directory: Path) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    lb.optim.offload_(optimizer, directory)
    step(model, ids)
    optimizer.step()
    plain, _ = fresh()
    step(plain, ids)
    torch.optim.AdamW(plain.parameters()).step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@original(25)
def offload_gradients_too(model: nn.Module, ids: Tensor, directory: Path) -> None:
    optimizer = lb.optim.AdamW(model.parameters(), lr=1e-3, bits=32)
    lb.optim.offload_(optimizer, directory, gradients=True)
    step(model, ids)
    optimizer.step()
    assert not torch.equal(next(model.parameters()), next(fresh()[0].parameters()))


@original(60)
def offload_activations(model: nn.Module, ids: Tensor, directory: Path) -> None:
    with lb.memory.offload_activations(directory):
        assert_gradients(model, ids)


# -- measurement ------------------------------------------------------------------------------------------------------
@original(55)
def profile_memory_of_a_step(model: nn.Module, ids: Tensor, directory: Path) -> None:
    with lb.memory.profile(model) as profile:
        loss = next_token_loss(model(ids), ids)
        profile.snapshot("after forward")
        loss.backward()
    assert "after forward" in str(profile)


@original(35)
def analyze_memory_per_layer(model: nn.Module, ids: Tensor, directory: Path) -> None:
    estimate = lb.estimate(model, ids)
    assert any("blocks.0" in layer for layer in estimate.by_layer)


@original(40)
def find_leaks(model: nn.Module, ids: Tensor, directory: Path) -> None:
    kept = []
    with lb.memory.profile(model) as profile:
        for _ in range(4):
            kept.append(next_token_loss(model(ids), ids))
            profile.step()
    assert profile.leaks()


@original(60)
def find_out_whether_a_large_model_fits(model: nn.Module, ids: Tensor, directory: Path) -> None:
    with torch.device("meta"):
        large = Transformer(Shape(24, 2048, 16, 50257, 256, 1))
    assert not lb.estimate(large, torch.zeros(1, 256, dtype=torch.long, device="meta")).fits("16GiB")


@original(15)
def compare_techniques_in_a_table(model: nn.Module, ids: Tensor, directory: Path) -> None:
    plan = lb.fit(model, ids, "60%", quality="any")
    assert plan.peak_bytes <= plan.budget


# -- quantization -----------------------------------------------------------------------------------------------------
@original(20)
def quantize_after_training(model: nn.Module, ids: Tensor, directory: Path) -> None:
    calibration = lb.calibrate(model.eval(), "int8-static", [ids])
    lb.quantize_(model, "int8-static", calibration)
    exact = fresh()[0].eval()(ids)
    assert (model(ids) - exact).norm() < 0.05 * exact.norm()


@original(20)
def train_with_quantization(model: nn.Module, ids: Tensor, directory: Path) -> None:
    lb.qat.prepare_(model, "int8", learn_scale=True)
    step(model, ids)
    trained = model.eval()(ids)
    lb.qat.convert_(model)
    assert torch.equal(model(ids), trained)


@pytest.mark.parametrize("lines, example", EXAMPLES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_an_example_runs_and_is_shorter(lines: int, example: Callable[..., Any], tmp_path: Path) -> None:
    assert len(body(example)) < lines
    model, ids = fresh()
    example(copy.deepcopy(model), ids, tmp_path)
