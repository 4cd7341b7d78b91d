"""Memory without a batch is that of a real model and its optimizer after a step, to the byte."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.optim.names import OPTIMIZERS, find_optimizer

MASTERS = {"master"}


class Tied(nn.Module):
    """Matrices of several sizes, a tied weight, a norm with buffers, vectors, and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(100, 64), nn.Linear(64, 100, bias=False)
        self.head.weight = self.embedding.weight
        self.up, self.norm = nn.Linear(64, 128), nn.BatchNorm1d(128)
        self.down, self.odd = nn.Linear(128, 64), nn.Linear(64, 77)
        self.conv, self.frozen = nn.Conv1d(64, 64, 3), nn.Linear(64, 64).requires_grad_(False)


def held(model, optimizer):
    """Bytes by kind after a step with gradients, from the tensors themselves."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 0.01, dtype=parameter.grad_dtype or parameter.dtype)
    optimizer.step()
    named = [(name, value) for state in optimizer.state.values() for name, value in state.items()]
    sizes = {
        "parameters": sum(p.nbytes for p in model.parameters()),
        "buffers": sum(b.nbytes for b in model.buffers()),
        "gradients": sum(p.grad.nbytes for p in model.parameters() if p.grad is not None),
        "optimizer state": sum(v.nbytes for name, v in named if isinstance(v, torch.Tensor) and name not in MASTERS),
        "master copies": sum(v.nbytes for name, v in named if name in MASTERS),
    }
    return {kind: size for kind, size in sizes.items() if size}


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_those_after_a_step(name):
    model = Tied()
    before = copy.deepcopy(model.state_dict())
    told = lb.estimate(model, optimizer=name)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert told.by_kind == held(model, find_optimizer(name).make(trained(model)))
    assert told.total_bytes == sum(told.by_kind.values())
    assert told.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("master", ["fp32", "residual", "stochastic"])
@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "muon8bit"])
def test_working_copies_and_masters(name, master):
    model = Tied()
    told = lb.estimate(model, optimizer=name, precision="bf16", master=master)
    lb.train.mixed_(model, "bf16", working_copies=True)
    family, bits = find_optimizer(name).family, 8 if "8" in name else 32
    optimizer = OPTIMIZERS[f"{family}{bits}bit"].make(trained(model), master=master)
    assert told.by_kind == held(model, optimizer)
    assert ("master copies" in told.by_kind) == (master != "stochastic")


def test_a_model_in_16_bits_recipes_and_functions():
    short = Tied().bfloat16()
    assert lb.estimate(short).by_kind == held(short, torch.optim.AdamW(trained(short), fused=True))
    half = Tied().bfloat16()
    told = lb.estimate(half, optimizer="adamw8bit", master="residual")
    assert told.by_kind == held(half, lb.optim.AdamW8bit(trained(half), master="residual"))
    model = Tied()
    own = lb.estimate(model, optimizer=torch.optim.Adagrad, recipe="fp8")
    lb.train.prepare_(model, "fp8")
    assert own.by_kind == held(model, torch.optim.Adagrad(trained(model)))
    assert "optimizer state" not in lb.estimate(Tied(), optimizer=None).by_kind


def test_groups_with_their_own_settings():
    def grouped(parameters):
        first, *rest = parameters
        return lb.optim.AdamW([{"params": [first], "bits": 32}, {"params": rest}], bits=8)

    model = Tied()
    assert lb.estimate(model, optimizer=grouped).by_kind == held(model, grouped(trained(model)))


def test_seven_billion_parameters_without_a_model():
    """The textbook's sum: 4, 4 and 8 bytes per parameter."""
    told = lb.estimate(parameters=7e9)
    assert told.by_kind == {"parameters": 28 * 10**9, "gradients": 28 * 10**9, "optimizer state": 56 * 10**9}
    assert told.total_bytes == 112 * 10**9 and told.parameters == 7 * 10**9
    assert told.fits("112GB") and not told.fits("111GB") and not told.fits(10**9)
    text = str(told)
    assert "not included: activations" in text and "104.31 GiB" in text and "16.00" in text
    short = lb.estimate(parameters=7e9, optimizer="adamw8bit", precision="bf16", master="residual")
    assert [short.by_kind[kind] for kind in ("parameters", "gradients", "master copies")] == [
        14 * 10**9, 14 * 10**9, 7 * 10**9
    ]  # fmt: skip
    assert 2 * 7e9 < short.by_kind["optimizer state"] < 2.1 * 7e9
    full = lb.estimate(parameters=7e9, precision="bf16", master="fp32")
    assert full.total_bytes == 112 * 10**9


def test_a_number_of_parameters_is_a_matrix_of_as_many():
    matrix = nn.Linear(4096, 3, bias=False)
    for name in ("adamw8bit", "adamw4bit", "lion8bit", "adafactor32bit"):
        kinds = lb.estimate(parameters=3 * 4096, optimizer=name).by_kind
        real = held(matrix, find_optimizer(name).make(matrix.parameters()))
        assert real["optimizer state"] - kinds["optimizer state"] == 4  # the number of steps
    assert lb.estimate(parameters=10).by_kind["parameters"] == 40


def test_a_model_on_meta_has_the_sum_of_a_real_one():
    with torch.device("meta"):
        model = Tied()
    assert lb.estimate(model, optimizer="adamw8bit").by_kind == lb.estimate(Tied(), optimizer="adamw8bit").by_kind


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: lb.estimate(), "expected a model or parameters=.*got neither"),
        (lambda: lb.estimate(nn.Linear(2, 2), parameters=7e9), "got both; leave one out"),
        (lambda: lb.estimate(None, torch.ones(2), parameters=7e9), "parameters= has no forward to run on a batch"),
        (lambda: lb.estimate(nn.Linear(2, 2), checkpoint="block"), "checkpoint changes only a step.*pass a batch"),
        (lambda: lb.estimate(parameters=7e9, micro_batches=2), "micro_batches changes only.*a model and a batch"),
        (lambda: lb.estimate(parameters=7.5), "a positive number of elements such as 7e9, got 7.5"),
        (lambda: lb.estimate(parameters=float("inf")), "got inf"),
        (lambda: lb.estimate(parameters="7B"), "got '7B'"),
        (lambda: lb.estimate(parameters=7e9, master="fp32"), "pass precision='bf16'"),
        (lambda: lb.estimate(parameters=7e9, precision="bf16", master="fp64"), "master must be one of"),
        (lambda: lb.estimate(nn.Linear(2, 2), optimizer=torch.optim.SGD, master="fp32"), "an optimizer by name"),
        (lambda: lb.estimate(nn.Linear(2, 2), optimizer=torch.optim.LBFGS), "LBFGS needs values or a closure"),
        (lambda: lb.estimate(parameters=7e9, optimizer="adamv"), "unknown optimizer 'adamv'"),
        (lambda: lb.estimate(nn.Linear(2, 2)).fits("24"), "no unit"),
    ],
)  # fmt: skip
def test_mistakes_are_told(call, words):
    with pytest.raises(ValueError, match=words):
        call()
    with pytest.raises(TypeError, match=r"must be an nn\.Module"):
        lb.estimate("model")


def test_masters_in_the_estimate_of_a_step_are_those_without_a_batch():
    model, x = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), torch.randn(4, 64)
    options = {"optimizer": "adamw8bit", "precision": "bf16", "master": "residual"}
    step = lb.estimate(model, x, lambda output, _: output.square().mean(), **options)
    static = lb.estimate(model, **options)
    for kind in ("optimizer state", "master copies", "parameters"):
        assert step.by_kind[kind] == static.by_kind[kind]
    assert step.fits(step.peak_bytes) and not step.fits(step.peak_bytes - 1)
