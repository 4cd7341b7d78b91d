"""optimizer_step by every rule and on every weight: against NumPy, in every bit; what its samples meet; long rows.

Source: docs/numerics.md section 11.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from support.bits import assert_same_bits
from support.variants import ALL, kernels, params, threads

import lowbit as lb
from lowbit.ops import OPS
from lowbit.ops.optim import RULES, STATE_SCHEME
from lowbit.optim.states import STATES
from lowbit.testing import SAMPLES
from lowbit.testing import optim as samples

everywhere = pytest.mark.parametrize("variant", [p for p in ALL if not p.values[0].interpreted])

F = np.float32
FACTORS = {
    "adamw": (0.99, 0.1, 0.98, 0.02, 1.5, 1e-6, 3e-2),
    "lion": (0.97, 0.3, 0.05, 0.01),
    "sgd": (0.95, 0.2, 0.3),
    "momentum": (0.03, 0.9, 0.8, 0.25, 0.75, 0.1),
}


def by_numpy(rule: str, p: np.ndarray, g: np.ndarray, moments: list[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The step of a rule, every operation one of NumPy's in float32."""
    f = [F(value) for value in FACTORS[rule]]
    if rule == "sgd":
        return p * f[0] - (g + p * f[1]) * f[2], []
    m = moments[0]
    if rule == "adamw":
        m, r = m + (g - m) * f[1], np.sqrt((moments[1] * moments[1]) * f[2] + (g * g) * f[3])
        return p * f[0] - (m / (r * f[4] + f[5])) * f[6], [m, r]
    if rule == "lion":
        return p * f[0] - np.sign(m + (g - m) * f[1]) * f[3], [m + (g - m) * f[2]]
    g = g + p * f[0]
    m = m * f[1] + g * f[2]
    return p - (g * f[3] + m * f[4]) * f[5], [m]


def given(rule: str, rows: int, cols: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """A parameter, a gradient and moments, some elements of all being 0."""
    random = np.random.default_rng(seed)
    made = [random.standard_normal((rows, cols)).astype(F) for _ in range(4)]
    for x in made:
        x[:, ::7] = 0
    return made[0], made[1], [made[2], np.abs(made[3])][: len(RULES[rule].moments)]


def step(rule: str, param: torch.Tensor, grad: np.ndarray, moments: list[Any], device: str, **more: Any) -> list[Any]:
    """What the op returns for moments in fp32, or for the tensors that are given."""
    kept: list[Any] = []
    for moment in moments:
        kept += [torch.from_numpy(moment).to(device), None] if isinstance(moment, np.ndarray) else moment
    master = more.pop("master", None)
    call = OPS["optimizer_step"].args(
        param.to(device), torch.from_numpy(grad).to(device), master if master is None else master.to(device),
        *kept, *[None] * (4 - len(kept)), rule, FACTORS[rule],
        **{"first_scheme": "fp32", "second_scheme": "fp32", **more},
    )  # fmt: skip
    return [t.cpu() for t in torch.ops.lowbit.optimizer_step(*call)]


@everywhere
@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("shape", [(3, 333), (1, 1)])
def test_rules_equal_numpy_on_fp32_moments(variant, rule, shape):
    p, g, moments = given(rule, *shape)
    wanted, kept = by_numpy(rule, p, g, moments)
    with variant.use():
        made = step(rule, torch.from_numpy(p), g, moments, variant.device)
    assert_same_bits(made[0], wanted, "param")
    for got, moment in zip(made[2::2], kept, strict=False):
        assert_same_bits(got, moment, "moment")


@everywhere
@pytest.mark.parametrize("rule", ["lion", "momentum"])
def test_rules_of_one_moment_equal_numpy_on_codes(variant, rule):
    p, g, _ = given(rule, 2, 700)
    codes = np.random.default_rng(1).integers(0, 0x7E, (2, 700), dtype=np.uint8)
    scales = np.exp2(np.arange(6, dtype=F)).reshape(2, 3) / F(3)
    spread = np.repeat(scales, 256, 1)[:, :700]
    wanted, (m,) = by_numpy(rule, p, g, [codes.view(ml_dtypes.float8_e4m3fn).astype(F) * spread])
    with variant.use():
        state = [torch.from_numpy(codes).to(variant.device), torch.from_numpy(scales).to(variant.device)]
        made = step(rule, torch.from_numpy(p), g, [state], variant.device, first_scheme=STATE_SCHEME)
    assert_same_bits(made[0], wanted, "param")
    for b in range(3):
        at = np.s_[:, 256 * b : 256 * (b + 1)]
        scale = np.maximum(np.abs(m[at]).max(1, keepdims=True) / F(448), F(2.0**-126))
        assert_same_bits(made[3][:, b : b + 1], scale, "scale")
        assert_same_bits(made[2][at], (m[at] / scale).astype(ml_dtypes.float8_e4m3fn).view(np.uint8), "codes")


@everywhere
def test_a_state_of_zeros_with_scales_of_zero_is_one_of_zeros(variant):
    p, g, _ = given("adamw", 1, 600)
    wanted, _ = by_numpy("adamw", p, g, [np.zeros_like(p)] * 2)
    zeros = [torch.zeros(1, 600, dtype=torch.uint8), torch.zeros(1, 3)]
    with variant.use():
        state = [t.to(variant.device) for t in zeros]
        schemes = {"first_scheme": STATE_SCHEME, "second_scheme": STATE_SCHEME}
        made = step("adamw", torch.from_numpy(p), g, [state, state], variant.device, **schemes)
    assert_same_bits(made[0], wanted, "param")


# -- weights -----------------------------------------------------------------------------------------------------------
def at_24_bits(x: np.ndarray) -> np.ndarray:
    """fp32 numbers of 16 significant bits nearest to some, ties to even, in fp64."""
    fraction, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(np.rint(np.ldexp(fraction, 16)), exponent - 16).astype(F)


@everywhere
def test_a_residual_keeps_24_bits(variant):
    p, g, _ = given("sgd", 3, 333)
    p = at_24_bits(p)
    bits = p.view(np.int32)
    high = (bits + 0x8000) >> 16  # the nearest of 16 bits, half up in magnitude
    low = torch.from_numpy(((bits - (high << 16)) >> 8).astype(np.int8))
    param = torch.from_numpy(high.astype(np.int16)).view(torch.bfloat16)
    wanted = at_24_bits(by_numpy("sgd", p, g, [])[0])
    with variant.use():
        made, residual, *_ = step("sgd", param, g, [], variant.device, master=low)
    pattern = (made.view(torch.int16).numpy().astype(np.int32) << 16) + (residual.numpy().astype(np.int32) << 8)
    assert_same_bits(torch.from_numpy(pattern.view(F)), wanted, "weight")
    assert (made.float() - torch.from_numpy(wanted)).abs().max() <= 2**-8 * np.abs(wanted).max()


@everywhere
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_master_is_stepped_and_its_parameter_is_rounded_from_it(variant, dtype):
    p, g, moments = given("lion", 3, 333)
    param = torch.from_numpy(p).to(dtype)
    param[:, ::3] = torch.from_numpy(g[:, ::3]).to(dtype)  # written by something else: its master is of before
    weights = p.copy()
    weights[:, ::3] = param[:, ::3].float().numpy()
    weights = np.where(torch.from_numpy(p).to(dtype).float().numpy() == param.float().numpy(), p, weights)
    wanted, _ = by_numpy("lion", weights, g, moments)
    with variant.use():
        made, master, *_ = step("lion", param, g, moments, variant.device, master=torch.from_numpy(p))
    assert_same_bits(master, wanted, "master")
    assert_same_bits(made, torch.from_numpy(wanted).to(dtype), "param")


@everywhere
def test_a_parameter_rounded_at_random_is_a_neighbour_and_right_on_average(variant):
    p, g = np.ones((64, 1024), F), np.full((64, 1024), 2.0**-11, F)
    exact = float(by_numpy("sgd", p, g, [])[0][0, 0])
    with variant.use():
        random = {"param_rounding": "stochastic", "rng": torch.tensor([3, 1], device=variant.device)}
        made = step("sgd", torch.from_numpy(p).bfloat16(), g, [], variant.device, **random)[0].float()
    values = made.unique().tolist()
    assert len(values) == 2 and values[0] < exact < values[1] and values[1] - values[0] == 2.0**-8
    assert abs(made.mean().item() - exact) < 5 * 2.0**-9 / made.numel() ** 0.5


# -- damage ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kernel", params(kernels("optimizer_step")))
@pytest.mark.parametrize("name", [name for name, row in STATES.items() if row.bits in (4, 8)])
def test_blocks_of_zeros_and_of_what_is_not_finite_are_those_of_the_reference(kernel, name):
    """Of the gradient and of the state, the last block being a part of one; to nearest and at random."""
    numbers = [torch.from_numpy(x) for x in (*given("adamw", 3, 1300)[:2], given("adamw", 3, 1300, 1)[0])]
    for x in numbers[1:]:
        x[0] = 0.0
        x[1, :256] = 0.0
        x[2, 1290:] = -0.0
    numbers[1][1, 300], numbers[1][1, 700], numbers[1][2, 1285] = torch.nan, torch.inf, -torch.inf
    numbers[2][2, 600], numbers[2][2, 10] = torch.nan, -torch.inf
    numbers[1][2, 900:920] = torch.tensor([1e-45, 1e38]).repeat(10)
    schemes = (STATES[name].signed, STATES[name].root)
    reference = next(impl for impl in lb.impls("optimizer_step", "cpu") if impl.name == "reference")
    for weight, rounding in ((samples.WEIGHTS[0], "nearest"), (samples.WEIGHTS[6], "stochastic")):
        call = samples.sample("adamw", numbers, schemes, weight, torch.float32)._replace(rounding=rounding)
        wanted = tuple(torch.empty(shape, dtype=dtype) for shape, dtype in OPS["optimizer_step"].outputs(call))
        reference.run(wanted, call)
        got = kernel.run(type(call)(*(_moved(x, kernel.variant.device) for x in call)))
        for what, a, b in zip(OPS["optimizer_step"].returns, got, wanted, strict=True):
            assert_same_bits(a.cpu(), b, what)


# -- samples -----------------------------------------------------------------------------------------------------------
def test_every_two_properties_of_a_step_meet_in_a_sample():
    def weight(call: Any) -> Any:
        return call.param.dtype, None if call.master is None else call.master.dtype, call.param_rounding

    rows = [
        (
            c.rule,
            (c.first_scheme, c.second_scheme),
            weight(c),
            c.grad.dtype,
            tuple(c.param.shape),
            (c.rounding, c.pitch),
        )
        for c in SAMPLES["optimizer_step"]("cpu")
    ]
    axes = [set(column) for column in zip(*rows, strict=True)]
    sizes = (len(RULES), len(samples.SCHEMES), len(samples.WEIGHTS), 3, len(samples.SHAPES), len(samples.ROUNDED))
    assert tuple(map(len, axes)) == sizes
    for i, j in combinations(range(len(axes)), 2):
        assert len({(row[i], row[j]) for row in rows}) == sizes[i] * sizes[j], f"axes {i} and {j}"


# -- long rows ---------------------------------------------------------------------------------------------------------
LONG = [k for k in kernels("optimizer_step") if not k.variant.interpreted]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", params(LONG))
@pytest.mark.parametrize("count", [1, 3])
def test_a_long_row_is_that_of_the_reference_on_any_number_of_threads(kernel, count):
    call, wanted = _long()
    with threads(count):
        got = kernel.run(type(call)(*(_moved(x, kernel.variant.device) for x in call)))
    for name, a, b in zip(OPS["optimizer_step"].returns, got, wanted, strict=True):
        assert_same_bits(a.cpu(), b, name)


def _moved(x: Any, device: str) -> Any:
    return x.to(device) if isinstance(x, torch.Tensor) else x


@cache
def _long() -> tuple[Any, tuple[torch.Tensor, ...]]:
    """A flat parameter of 2^20 + 1 elements, and what the reference makes of it."""
    numbers = [torch.randn((1 << 20) + 1, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    call = samples.sample("adamw", numbers, (STATE_SCHEME, STATE_SCHEME), samples.WEIGHTS[6], torch.bfloat16)
    call = call._replace(rounding="stochastic")
    outs = tuple(torch.empty(shape, dtype=dtype) for shape, dtype in OPS["optimizer_step"].outputs(call))
    next(impl for impl in lb.impls("optimizer_step", "cpu") if impl.name == "reference").run(outs, call)
    return call, outs
