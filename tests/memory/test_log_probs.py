"""Log-probabilities and entropies from tiles equal those of all logits, and so do their gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lowbit.memory import allocated_peak, linear_cross_entropy, linear_log_probs


def operands(rows=37, features=12, classes=101, dtype=torch.float64, bias=True, scale=1.0):
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return (scale * torch.randn(*shape, generator=generator)).to(dtype).requires_grad_()

    targets = torch.randint(classes, (rows,), generator=generator)
    targets[::5] = -100
    return numbers(rows, features), numbers(classes, features), numbers(classes) if bias else None, targets


def from_logits(hidden, weight, bias, targets, temperature=1.0, softcap=None):
    logits = nn.functional.linear(hidden, weight, bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_probs = torch.log_softmax(logits / temperature, -1)
    counted = targets != -100
    chosen = log_probs.gather(-1, torch.where(counted, targets, 0).unsqueeze(-1)).squeeze(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return torch.where(counted, chosen, 0), torch.where(counted, entropy, 0)


@pytest.mark.parametrize("chunk", [None, 64, 1000])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, {"softcap": 3.0}, {"softcap": 5.0, "temperature": 2.0}])
@pytest.mark.parametrize("bias", [True, False])
def test_results_and_gradients_are_those_of_all_logits(settings, chunk, bias):
    hidden, weight, offset, targets = operands(bias=bias)
    inputs = [hidden, weight, *([offset] if bias else [])]
    expected = from_logits(hidden, weight, offset, targets, **settings)
    results = linear_log_probs(hidden, weight, targets, offset, chunk=chunk, **settings)
    weights = torch.randn(2, len(targets), dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def gradients(log_probs, entropy):
        return torch.autograd.grad((weights[0] * log_probs + weights[1] * entropy).sum(), inputs)

    torch.testing.assert_close(results.log_probs, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(results.entropy, expected[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(*results), gradients(*expected), rtol=1e-10, atol=1e-11)


def test_ignored_targets_give_zeros_and_no_gradient():
    hidden, weight, bias, targets = operands()
    results = linear_log_probs(hidden, weight, targets, bias)
    ignored = targets == -100
    assert not results.log_probs[ignored].any() and not results.entropy[ignored].any()
    (gradient,) = torch.autograd.grad(results.log_probs.sum() + results.entropy.sum(), hidden)
    assert not gradient[ignored].any() and gradient[~ignored].any()


def test_without_entropy_it_is_the_negative_loss():
    hidden, weight, bias, targets = operands(dtype=torch.float32)
    log_probs, entropy = linear_log_probs(hidden, weight, targets, bias, entropy=False)
    losses = linear_cross_entropy(hidden, weight, targets, bias, reduction="none")
    assert entropy is None and torch.equal(log_probs, -losses)


def test_impossible_classes_have_no_entropy():
    """A bias of minus infinity masks a class, as constrained decoding does."""
    hidden, weight, bias, targets = operands()
    bias = bias.detach().clone()
    bias[50:] = -math.inf
    targets = torch.where(targets >= 50, 3, targets)
    results = linear_log_probs(hidden, weight, targets, bias, chunk=256)
    expected = linear_log_probs(hidden, weight[:50], targets, bias[:50])
    for result, part in zip(results, expected, strict=True):
        torch.testing.assert_close(result, part, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(results.entropy.sum() + results.log_probs.sum(), hidden)
    (of_part,) = torch.autograd.grad(expected.entropy.sum() + expected.log_probs.sum(), hidden)
    torch.testing.assert_close(gradient, of_part, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_logits_stay_accurate(dtype):
    hidden, weight, _, targets = operands(dtype=dtype, bias=False, scale=6)
    results = linear_log_probs(hidden, weight, targets, chunk=512)
    exact = from_logits(hidden.double(), weight.double(), None, targets)
    assert results.log_probs.dtype == results.entropy.dtype == torch.float32
    for result, expected in zip(results, exact, strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=2e-4)


def test_shapes_are_those_of_the_targets():
    hidden, weight, bias, targets = operands(rows=36)
    flat = linear_log_probs(hidden, weight, targets, bias)
    results = linear_log_probs(hidden.view(4, 9, -1), weight, targets.view(4, 9), bias)
    assert all(torch.equal(a, b.view(4, 9)) for a, b in zip(results, flat, strict=True))


def test_no_logits_are_allocated():
    hidden, weight, _, targets = operands(rows=512, features=16, classes=20000, dtype=torch.float32, bias=False)
    logits = 4 * 512 * 20000

    def step():
        results = linear_log_probs(hidden, weight, targets, chunk=1 << 16)
        (results.log_probs.sum() + results.entropy.sum()).backward()

    step()
    assert allocated_peak(step) < logits / 4


def test_autocast_casts_the_operands():
    hidden, weight, bias, targets = operands(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        results = linear_log_probs(hidden, weight, targets, bias)
    expected = linear_log_probs(hidden.bfloat16(), weight.bfloat16(), targets, bias.bfloat16())
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"temperature": 0.0}, ValueError, "linear_log_probs: temperature is positive"),
        ({"temperature": math.nan}, ValueError, "temperature is positive"),
        ({"chunk": 0}, ValueError, "chunk is positive"),
        ({"targets": torch.full((37,), 101)}, IndexError, "linear_log_probs: targets are classes from 0 to 100"),
        ({"targets": torch.zeros(36, dtype=torch.int64)}, ValueError, "a target for each row"),
    ],
)
def test_errors_name_the_function(change, error, words):
    hidden, weight, bias, targets = operands()
    given = {"targets": targets, **change}
    with pytest.raises(error, match=words):
        linear_log_probs(hidden, weight, bias=bias, **given)


def test_gradients_of_gradients_are_refused():
    hidden, weight, bias, targets = operands()
    results = linear_log_probs(hidden, weight, targets, bias)
    with pytest.raises(RuntimeError, match=r"memory\.linear_log_probs has no gradients of gradients"):
        torch.autograd.grad(results.log_probs.sum(), hidden, create_graph=True)
