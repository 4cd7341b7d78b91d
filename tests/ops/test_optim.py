"""One step of AdamW on quantized moments: against NumPy and ml_dtypes in every bit, and against torch's own optimizer.

Every kernel against the reference, on any number of threads: test_kernels.py. Source: docs/numerics.md section 11.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from support.bits import assert_same_bits
from support.variants import ALL

import lowbit as lb
from lowbit.ops.optim import STATE_SCHEME, adamw_factors

everywhere = pytest.mark.parametrize("variant", [p for p in ALL if not p.values[0].interpreted])


def moments(param: torch.Tensor, scheme: str = STATE_SCHEME) -> tuple[lb.Quantized, lb.Quantized]:
    return lb.quantize(torch.zeros_like(param), scheme), lb.quantize(torch.zeros_like(param), scheme)


# -- an oracle that shares no code -------------------------------------------------------------------------------------
class Oracle:
    """E4M3 moments in blocks of 256 along rows, rounded by ml_dtypes; every operation one of NumPy's, in float32."""

    def __init__(self, param: np.ndarray):
        rows, cols = param.shape
        self.param = param.copy()
        self.codes = [np.zeros(param.shape, np.uint8) for _ in range(2)]
        self.scales = [np.ones((rows, -(-cols // 256)), np.float32) for _ in range(2)]

    def step(self, grad: np.ndarray, step: int, lr: float, beta1: float, beta2: float, eps: float, decay: float):
        f = np.float32
        m, r = (
            codes.view(ml_dtypes.float8_e4m3fn).astype(f) * self._spread(scales)
            for codes, scales in zip(self.codes, self.scales, strict=True)
        )
        m = m + (grad - m) * f(1 - beta1)
        r = np.sqrt((r * r) * f(beta2) + (grad * grad) * f(1 - beta2))
        bottom = r * f((1 - beta2**step) ** -0.5) + f(eps)
        self.param = self.param * f(1 - lr * decay) - (m / bottom) * f(lr / (1 - beta1**step))
        for i, moment in enumerate((m, r)):
            for b in range(self.scales[i].shape[1]):
                at = np.s_[:, 256 * b : 256 * (b + 1)]
                amax = np.abs(moment[at]).max(1, keepdims=True)
                scale = np.where(amax > 0, np.maximum(amax / f(448), f(2.0**-126)), f(1))
                self.scales[i][:, b : b + 1] = scale
                self.codes[i][at] = (moment[at] / scale).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)

    def _spread(self, scales: np.ndarray) -> np.ndarray:
        return np.repeat(scales, 256, 1)[:, : self.param.shape[1]]


@everywhere
def test_steps_equal_an_oracle_in_every_bit(variant):
    generator = torch.Generator().manual_seed(1)
    param = torch.randn(5, 700, generator=generator)
    oracle = Oracle(param.numpy())
    with variant.use():
        param = param.to(variant.device)
        avg, rms = moments(param)
        for step in range(1, 7):
            size = torch.exp(3 * torch.randn(5, 700, generator=generator))
            grad = torch.randn(5, 700, generator=generator) * size * (torch.arange(700) % 11 > 0)
            lb.adamw_(param, grad.to(variant.device), avg, rms, step=step, lr=0.01, betas=(0.8, 0.99), weight_decay=0.1)
            oracle.step(grad.numpy(), step, 0.01, 0.8, 0.99, 1e-8, 0.1)
            assert_same_bits(param.cpu(), oracle.param, f"param after step {step}")
            for name, moment, codes, scales in zip(
                ("avg", "rms"), (avg, rms), oracle.codes, oracle.scales, strict=True
            ):
                assert_same_bits(moment.codes.cpu(), codes, f"{name} after step {step}")
                assert_same_bits(moment.scale.cpu(), scales, f"scales of {name} after step {step}")


# -- against torch.optim.AdamW -----------------------------------------------------------------------------------------
def test_the_first_step_is_that_of_torch():
    """Moments begin at zero, so nothing has been rounded to 8 bits yet; torch multiplies in another order."""
    param = torch.randn(64, 300)
    other = param.clone().requires_grad_()
    other.grad = torch.randn_like(param)
    torch.optim.AdamW([other], lr=0.02, betas=(0.85, 0.95), eps=1e-6, weight_decay=0.3).step()
    lb.adamw_(param, other.grad, *moments(param), step=1, lr=0.02, betas=(0.85, 0.95), eps=1e-6, weight_decay=0.3)
    torch.testing.assert_close(param, other.detach(), rtol=2e-6, atol=2e-7)


def updates(steps: int, rounding: str, fade: float = 1.0) -> float:
    """How far the sum of updates lies from that of fp32 moments, relatively, after gradients of very unequal size."""
    generator = torch.Generator().manual_seed(3)
    count = 64 * 256
    mean = torch.randn(1, count, generator=generator) * torch.exp(1.5 * torch.randn(1, count, generator=generator))
    noise = 10 * torch.exp(1.5 * torch.randn(1, count, generator=generator))
    ours, theirs = torch.zeros(1, count), torch.zeros(1, count, requires_grad=True)
    optimizer = torch.optim.AdamW([theirs], lr=1e-3, weight_decay=0.0)
    avg, rms = moments(ours)
    for step in range(1, steps + 1):
        grad = (mean + noise * torch.randn(1, count, generator=generator)) * 1e-3
        grad[:, ::7] *= fade if step > 50 else 1.0  # some elements of every block, so that its scale stays
        theirs.grad = grad
        optimizer.step()
        word = lb.Rounding(5) if rounding == "stochastic" else rounding
        lb.adamw_(ours, grad, avg, rms, step=step, weight_decay=0.0, rounding=word)
    return float((ours - theirs.detach()).norm() / theirs.detach().norm())


def test_updates_stay_close_to_those_of_fp32_moments():
    assert updates(30, "nearest") < 0.12
    assert updates(30, "stochastic") < 0.1


def test_stochastic_rounding_keeps_slow_moments_moving():
    """Gradients that fade to a twentieth: rounded to nearest, a moment that changes by 0.1% a step stands still."""
    nearest, stochastic = updates(300, "nearest", fade=0.05), updates(300, "stochastic", fade=0.05)
    assert stochastic < 0.6 * nearest, (nearest, stochastic)


def test_it_trains_as_well_as_fp32_moments_do():
    torch.manual_seed(0)
    x = torch.randn(512, 32)
    y = torch.tanh(x @ torch.randn(32, 8))

    def train(quantized: bool) -> float:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        state = {p: moments(p.detach()) for p in model.parameters()}
        for step in range(1, 201):
            loss = torch.nn.functional.mse_loss(model(x), y)
            model.zero_grad()
            loss.backward()
            if not quantized:
                optimizer.step()
            for p in model.parameters() if quantized else ():
                assert p.grad is not None
                lb.adamw_(p, p.grad, *state[p], step=step, lr=1e-2)
        return loss.item()

    assert train(True) < 1.05 * train(False) + 1e-4


# -- what it is given --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_are_rounded_once(dtype):
    param = torch.randn(3, 300).to(dtype)
    wide, grad = param.float(), torch.randn(3, 300).to(dtype)
    first, second = moments(param), moments(wide)
    lb.adamw_(param, grad, *first, step=1, lr=0.1)
    lb.adamw_(wide, grad.float(), *second, step=1, lr=0.1)
    assert_same_bits(param, wide.to(dtype))
    assert_same_bits(first[0].codes, second[0].codes)


def test_a_strided_parameter_a_scalar_and_a_parameter_that_requires_grad():
    base = torch.randn(40, 6)
    turned, straight = base.clone().t(), base.t().contiguous()
    grad = torch.randn(6, 40)
    lb.adamw_(turned, grad, *moments(straight), step=2)
    lb.adamw_(straight, grad, *moments(straight), step=2)
    assert_same_bits(turned.contiguous(), straight)
    scalar = torch.tensor(0.5, requires_grad=True)
    version = scalar._version
    lb.adamw_(scalar, torch.tensor(2.0), *moments(scalar.detach()), step=1, lr=0.25, weight_decay=0.0)
    assert scalar.item() == 0.25 and scalar.requires_grad and scalar._version > version


def test_damage_stays_in_its_element_and_in_its_block():
    param, grad = torch.ones(2, 512), torch.ones(2, 512)
    grad[1, 300] = torch.nan
    avg, rms = moments(param)
    lb.adamw_(param, grad, avg, rms, step=1)
    assert param.isnan().nonzero().tolist() == [[1, 300]]
    for moment in (avg, rms):
        broken = moment.dequantize().isnan()
        assert broken[1, 256:].all() and broken.sum() == 256


def test_what_does_not_fit_is_refused():
    param, grad = torch.randn(4, 64), torch.randn(4, 64)
    avg, rms = moments(param)

    def refused(error, words, *args, **more):
        with pytest.raises(error, match=words):
            lb.adamw_(*args, **{"step": 1, **more})

    refused(ValueError, "step counts from 1, got 0", param, grad, avg, rms, step=0)
    refused(ValueError, "lr must be 0 or more", param, grad, avg, rms, lr=-1.0)
    refused(ValueError, "eps must be 0 or more, got nan", param, grad, avg, rms, eps=float("nan"))
    refused(ValueError, r"betas must be in \[0, 1\)", param, grad, avg, rms, betas=(0.9, 1.0))
    refused(TypeError, "exp_avg must be a Quantized, got Tensor; start with", param, grad, grad, rms)
    refused(
        ValueError, r"exp_avg_sq_root is \[4, 32\], param is \[4, 64\]", param, grad, avg, moments(param[:, :32])[0]
    )
    refused(ValueError, r"grad is \[4, 32\]", param, grad[:, :32], avg, rms)
    refused(TypeError, "param must be float32, bfloat16 or float16", param.double(), grad, avg, rms)
    for scheme, why in (
        ("int8:row", "at most 2048"),
        ("uint8:group64:affine", "zero points"),
        ("nvfp4", "global scale"),
        ("int8:group16:full", "signed scales"),
    ):
        refused(ValueError, why, param, grad, avg, lb.quantize(param, scheme))
    odd = lb.quantize(param, "fp8_e4m3:group2047")
    refused(ValueError, "meet after .* elements", param, grad, avg, odd)
    lb.adamw_(param.clone(), grad, odd, odd.map(torch.clone), step=1)
    refused(ValueError, "new_first shares memory with second", param, grad, avg, avg)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_large_step_in_place_equals_the_reference_whatever_the_strides(dtype):
    """Rows of two runs and a rest, some of which begin a thread's share; a part of a wider matrix, or by themselves."""
    wide, grad = torch.randn(40, 4400).to(dtype), torch.randn(40, 4352).to(dtype)
    for param in (wide[:, :4352], wide[:, :4352].clone(), wide[:3, :700].clone()):
        slope = grad[: param.shape[0], : param.shape[1]]
        state = [q.map(torch.clone) for q in (lb.quantize(slope, STATE_SCHEME), lb.quantize(slope.abs(), STATE_SCHEME))]
        wanted, kept = param.clone(), [q.map(torch.clone) for q in state]
        with lb.use_backend("reference"):
            lb.adamw_(wanted, slope, *kept, step=3, lr=0.1)
        lb.adamw_(param, slope, *state, step=3, lr=0.1)
        assert_same_bits(param, wanted)
        for moment, other in zip(state, kept, strict=True):
            for name in moment.parts:
                assert_same_bits(moment.parts[name], other.parts[name], name)


def test_a_step_size_may_be_a_tensor_in_one_call_and_a_number_in_the_next():
    param, grad = torch.randn(3, 77), torch.randn(3, 77)
    made = []
    for lr in (torch.tensor(0.1), 0.1):
        copy, state = param.clone(), moments(param)
        lb.adamw_(copy, grad, *state, step=1, lr=lr)
        made.append(copy)
    assert_same_bits(*made)


def test_outputs_may_be_the_inputs_that_they_replace_and_no_others():
    param, grad = torch.randn(4, 64), torch.randn(4, 64)
    avg, rms = moments(param)
    state = (avg.codes, avg.scale, rms.codes, rms.scale)
    names = ("new_first", "new_first_scale", "new_second", "new_second_scale")
    none = torch.empty(0, dtype=torch.uint8)
    outs = dict(zip(names, state, strict=True)) | {"new_master": none}
    rule = ("adamw", adamw_factors(1, 1e-3, 0.9, 0.999, 1e-8, 0.01))
    expected = torch.ops.lowbit.optimizer_step(param, grad, None, *state, *rule)
    with pytest.raises(ValueError, match="new_param shares memory with grad"):
        torch.ops.lowbit.optimizer_step_out(param, grad, None, *state, *rule, new_param=grad, **outs)
    with pytest.raises(ValueError, match="new_param shares memory with param"):
        torch.ops.lowbit.optimizer_step_out(
            param[:2], grad[:2], None, *(t[:2] for t in state), *rule, new_param=param[1:3],
            **{n: t[:2].clone() for n, t in outs.items()},
        )  # fmt: skip
    torch.ops.lowbit.optimizer_step_out(param, grad, None, *state, *rule, new_param=param, **outs)
    for made, kept in zip(expected, (param, none, *state), strict=True):
        assert_same_bits(kept, made)
