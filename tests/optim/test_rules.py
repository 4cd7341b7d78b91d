"""Every optimizer against the papers' formulas in float64, and against torch's own in fp32."""

from __future__ import annotations

import math

import pytest
import torch
from support.bits import same_bits
from torch import Tensor

import lowbit as lb
from lowbit.optim.states import Storage, Stored, find

SHAPES = [(1,), (64, 80), (37, 151), (8, 16, 7, 7), (5000,)]
BITS = [row.name for row in lb.optim.STATES.values()]


def made(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    generator = torch.Generator().manual_seed(math.prod(shape))
    return torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))


def gradient(param: Tensor, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(param.shape, generator=generator).to(param.dtype) * (1 + step)


def numbers(optimizer: lb.optim.Optimizer, param: Tensor) -> dict[str, Tensor]:
    """The states of a parameter as fp32 numbers."""
    state = optimizer.state[param]
    kept = {id(p): k for _, p, k in optimizer.stored_states()}[id(param)]
    return {name: Stored(k, state[name], state.get(f"{name}_scale")).numbers() for name, k in kept.items()}


# -- the formulas, in float64 ------------------------------------------------------------------------------------------
def adamw(p, g, before, t, lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1):
    m = betas[0] * before["exp_avg"] + (1 - betas[0]) * g
    v = betas[1] * before["exp_avg_sq_root"] ** 2 + (1 - betas[1]) * g**2
    move = (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
    return p * (1 - lr * weight_decay) - lr * move, {"exp_avg": m, "exp_avg_sq_root": v.sqrt()}


def lion(p, g, before, t, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1):
    m = before["exp_avg"]
    sign = (betas[0] * m + (1 - betas[0]) * g).sign()
    return p - lr * (sign + weight_decay * p), {"exp_avg": betas[1] * m + (1 - betas[1]) * g}


def sgd(p, g, before, t, lr=0.01, momentum=0.9, dampening=0.1, weight_decay=0.1):
    g = g + weight_decay * p
    m = g if t == 1 else momentum * before["momentum_buffer"] + (1 - dampening) * g
    return p - lr * m, {"momentum_buffer": m}


def nesterov(p, g, before, t, lr=0.01, momentum=0.9, weight_decay=0.1):
    g = g + weight_decay * p
    m = g if t == 1 else momentum * before["momentum_buffer"] + g
    return p - lr * (g + momentum * m), {"momentum_buffer": m}


def plain(p, g, before, t, lr=0.01, weight_decay=0.1):
    return p - lr * (g + weight_decay * p), {}


RULES = {
    "adamw": (lb.optim.AdamW, adamw, {"betas": (0.9, 0.99), "weight_decay": 0.1}),
    "lion": (lb.optim.Lion, lion, {"betas": (0.9, 0.99), "weight_decay": 0.1}),
    "momentum": (lb.optim.SGD, sgd, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "nesterov": (lb.optim.SGD, nesterov, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "sgd": (lb.optim.SGD, plain, {"weight_decay": 0.1}),
}


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rule", RULES)
def test_a_step_is_the_papers(rule, bits):
    """From the states as they are kept: the parameter to fp32's rounding, the states to their format's."""
    cls, formula, options = RULES[rule]
    for shape in SHAPES:
        param = made(shape)
        optimizer = cls([param], lr=0.01, bits=bits, rounding="nearest", **options)
        before = {}
        for step in (1, 2, 3):
            p, g = param.detach().double(), gradient(param, step)
            kept = before or {n: torch.zeros(shape, dtype=torch.float64) for n in formula(p, p, _zeros(shape), 1)[1]}
            expected, states = formula(p, g.double(), kept, step)
            param.grad = g
            optimizer.step()
            torch.testing.assert_close(param.detach().double(), expected, rtol=2e-6, atol=2e-7)
            after = numbers(optimizer, param)
            for name, exact in states.items():
                kind = Storage.of(find(bits), shape, not name.endswith("_root"))
                if kind.dtype is not None:
                    tolerance = 2e-6 if kind.dtype == torch.float32 else 2**-8
                    torch.testing.assert_close(after[name].double(), exact, rtol=tolerance, atol=1e-6)
                else:
                    q = lb.quantize(exact.float().reshape(-1), kind.kind).dequantize().reshape(shape)
                    near = torch.isclose(after[name], q, rtol=1e-6, atol=0)
                    assert near.float().mean() > 0.99, (name, kind)  # ties may fall to the other side, one scale too
            before = {name: x.double() for name, x in after.items()}


def _zeros(shape):
    class Zeros(dict):
        def __missing__(self, key):
            return torch.zeros(shape, dtype=torch.float64)

    return Zeros()


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (lb.optim.AdamW, torch.optim.AdamW, {"weight_decay": 0.1}),
        (lb.optim.SGD, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
        (lb.optim.SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (lb.optim.SGD, torch.optim.SGD, {}),
    ],
)
@pytest.mark.parametrize("maximize", [False, True])
def test_32_bits_follow_torch(ours, theirs, options, maximize):
    params = [made(shape) for shape in SHAPES]
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    a = ours(params, lr=0.01, bits=32, maximize=maximize, **options)
    b = theirs(others, lr=0.01, maximize=maximize, **options)
    for step in range(1, 20):
        for p, q in zip(params, others, strict=True):
            p.grad = gradient(p, step % 5)
            q.grad = p.grad.clone()
        a.step(), b.step()
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", BITS)
def test_a_convolution_keeps_what_its_numbers_cost(bits):
    """A tensor of any shape has the states of the same numbers in a row."""
    conv, flat = made((32, 16, 3, 3)), made((32 * 16 * 9,))
    flat.data.copy_(conv.detach().flatten())
    ends = []
    for param in (conv, flat):
        optimizer = lb.optim.AdamW([param], bits=bits)
        for step in (1, 2):
            param.grad = gradient(flat, step).view_as(param)
            optimizer.step()
        ends.append((param.detach().flatten(), [v.flatten() for v in optimizer.state[param].values()]))
    assert same_bits(ends[0][0], ends[1][0])
    assert all(same_bits(a, b) for a, b in zip(ends[0][1], ends[1][1], strict=True))


@pytest.mark.parametrize("bits", BITS)
def test_a_strided_parameter_steps_as_its_copy_does(bits):
    numbers = torch.randn(16, 32, 6, 6)
    ends = []
    for layout in (torch.contiguous_format, torch.channels_last):
        param = torch.nn.Parameter(numbers.clone().to(memory_format=layout))
        optimizer = lb.optim.AdamW([param], bits=bits, weight_decay=0.1)
        for step in (1, 2):
            param.grad = gradient(param, step).to(memory_format=layout)
            optimizer.step()
        ends.append(param.detach().contiguous())
    assert same_bits(*ends)


def test_small_tensors_step_together_as_they_do_alone():
    shapes = [(3,), (1,), (17, 5), (4095,), ()]
    ends = []
    for alone in (False, True):
        params = [made(shape) for shape in shapes]
        groups = [[p] for p in params] if alone else [params]
        optimizers = [lb.optim.AdamW(group) for group in groups]
        for step in (1, 2):
            for p in params:
                p.grad = gradient(p, step)
            for optimizer in optimizers:
                optimizer.step()
        ends.append([p.detach() for p in params])
    assert all(same_bits(a, b) for a, b in zip(*ends, strict=True))


# -- weights of 16 bits ------------------------------------------------------------------------------------------------
def test_masters_keep_what_bf16_cuts_off():
    """A hundred steps, each much less than bf16's last place: with a master they add up, without they are lost."""
    ends = {}
    for master in (None, "fp32", "residual", "stochastic"):
        param = torch.nn.Parameter(torch.ones(128, 64, dtype=torch.bfloat16))
        optimizer = lb.optim.SGD([param], lr=1e-4, master=master)
        param.grad = torch.ones_like(param)
        for _ in range(100):
            optimizer.step()
        ends[master] = param.detach().float().mean().item()
    assert ends[None] == 1.0
    assert ends["fp32"] == pytest.approx(0.99, abs=2**-9)
    assert ends["residual"] == pytest.approx(0.99, abs=2**-9)
    assert ends["stochastic"] == pytest.approx(0.99, abs=1e-3)


def test_fp32_master_follows_fp32_training():
    exact = made((64, 80))
    short = torch.nn.Parameter(exact.detach().bfloat16())
    exact.data.copy_(short.detach())
    a, b = (lb.optim.AdamW([p], bits=32, master=m) for p, m in ((exact, None), (short, "fp32")))
    for step in range(1, 10):
        short.grad = gradient(short, step)
        exact.grad = short.grad.float()
        a.step(), b.step()
    assert same_bits(b.state[short]["master"], exact.detach())
    assert same_bits(short.detach(), exact.detach().bfloat16())


def test_what_else_changes_a_parameter_reaches_its_master():
    param = torch.nn.Parameter(torch.ones(64, 80, dtype=torch.bfloat16))
    optimizer = lb.optim.SGD([param], lr=1e-4, master="fp32")
    param.grad = torch.ones_like(param)
    optimizer.step()
    param.data[:32] = 3.0  # which torch does not count as a change
    optimizer.step()
    master = optimizer.state[param]["master"]
    assert master[:32].eq(torch.tensor(3.0) - torch.tensor(1e-4)).all()
    assert torch.allclose(master[32:], torch.tensor(1 - 2e-4))


@pytest.mark.parametrize("seed", [0, 1])
def test_random_bits_are_those_of_the_seed(seed):
    def end(seed: int) -> Tensor:
        param = made((64, 80), torch.bfloat16)
        optimizer = lb.optim.AdamW([param], master="stochastic", seed=seed)
        for step in (1, 2, 3):
            param.grad = gradient(param, step)
            optimizer.step()
        return param.detach()

    assert same_bits(end(seed), end(seed))
    assert not same_bits(end(seed), end(seed + 1))
