"""Preference losses: their formulas in plain Python, their limits, and their memory with a large vocabulary."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lowbit as lb
from lowbit.train import dpo_loss, group_advantages, grpo_loss, kto_loss, orpo_loss

LOG_PROBS = st.lists(st.floats(-30, -1e-3), min_size=4, max_size=4)


def tensor(values, **options):
    return torch.tensor(values, dtype=torch.float64, **options)


def log_sigmoid(x):
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


@given(pair=st.lists(LOG_PROBS, min_size=1, max_size=5), beta=st.floats(0.01, 2), smoothing=st.sampled_from([0.0, 0.1]))
def test_dpo(pair, beta, smoothing):
    margins = [(c - r) - (rc - rr) for c, r, rc, rr in pair]
    columns = tensor(pair).t()
    expected = statistics.fmean(
        -(1 - smoothing) * log_sigmoid(beta * m) - smoothing * log_sigmoid(-beta * m) for m in margins
    )
    assert dpo_loss(*columns, beta=beta, label_smoothing=smoothing).item() == pytest.approx(expected, rel=1e-9)
    hinge = statistics.fmean(max(0.0, 1 - beta * m) for m in margins)
    assert dpo_loss(*columns, beta=beta, kind="hinge").item() == pytest.approx(hinge, rel=1e-9, abs=1e-12)
    ipo = statistics.fmean((m - 1 / (2 * beta)) ** 2 for m in margins)
    assert dpo_loss(*columns, beta=beta, kind="ipo").item() == pytest.approx(ipo, rel=1e-9, abs=1e-12)


def test_dpo_of_the_reference_itself_is_log_2_and_prefers_the_chosen():
    chosen, rejected = tensor([-3.0, -7.0], requires_grad=True), tensor([-2.0, -9.0], requires_grad=True)
    loss = dpo_loss(chosen, rejected, chosen.detach(), rejected.detach())
    assert loss.item() == pytest.approx(math.log(2))
    loss.backward()
    assert torch.equal(chosen.grad, -rejected.grad) and torch.allclose(chosen.grad, tensor([-0.025, -0.025]))


@given(rows=st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0), st.booleans()), min_size=1, max_size=6))
def test_kto(rows):
    log_probs, reference, desirable = zip(*rows, strict=True)
    anchor = 0.4

    def value(x):
        return 1 / (1 + math.exp(-x))

    expected = statistics.fmean(
        1.5 * value(-0.1 * (p - r - anchor)) if good else 0.5 * value(0.1 * (p - r - anchor)) for p, r, good in rows
    )
    options = {"desirable_weight": 1.5, "undesirable_weight": 0.5, "divergence": tensor(anchor)}
    loss = kto_loss(tensor(log_probs), tensor(reference), torch.tensor(desirable), **options)
    assert loss.item() == pytest.approx(expected, rel=1e-9)


def test_kto_clamps_the_divergence_and_gives_it_no_gradient():
    log_probs, divergence = tensor([-3.0, -2.0], requires_grad=True), tensor(-1.0, requires_grad=True)
    good = torch.tensor([True, False])
    loss = kto_loss(log_probs, tensor([-4.0, -1.0]), good, divergence=divergence)
    assert loss == kto_loss(log_probs, tensor([-4.0, -1.0]), good)
    loss.backward()
    assert divergence.grad is None and log_probs.grad[0] < 0 < log_probs.grad[1]


@given(pairs=st.lists(st.tuples(st.floats(-20, -1e-6), st.floats(-20, -1e-6)), min_size=1, max_size=5))
def test_orpo(pairs):
    def log_odds(x):
        return x - math.log(-math.expm1(x))

    expected = statistics.fmean(-c - 0.2 * log_sigmoid(log_odds(c) - log_odds(r)) for c, r in pairs)
    chosen, rejected = tensor(pairs).t().clone().requires_grad_().unbind()
    loss = orpo_loss(chosen, rejected, beta=0.2)
    assert loss.item() == pytest.approx(expected, rel=1e-7)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, (chosen, rejected)))


PER = ["sequence", "token", 7]


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("reference", [False, True])
def test_grpo(per, reference):
    generator = torch.Generator().manual_seed(0)
    shape = (6, 5)
    new, old, ref = (-torch.rand(shape, generator=generator, dtype=torch.float64) * 3 for _ in range(3))
    advantages = torch.randn(6, generator=generator, dtype=torch.float64)
    mask = torch.arange(5) < torch.tensor([5, 1, 3, 2, 4, 0]).unsqueeze(1)
    rows = []
    for i in range(6):
        tokens = []
        for t in range(int(mask[i].sum())):
            ratio, a = math.exp(new[i, t] - old[i, t]), float(advantages[i])
            token = -min(ratio * a, min(max(ratio, 0.8), 1.28) * a)
            if reference:
                difference = float(ref[i, t] - new[i, t])
                token += 0.04 * (math.exp(difference) - difference - 1)
            tokens.append(token)
        rows.append(tokens)
    total, count = sum(map(sum, rows)), sum(map(len, rows))
    means = [sum(row) / len(row) if row else 0.0 for row in rows]
    expected = {"sequence": statistics.fmean(means), "token": total / count, 7: total / (6 * 7)}[per]
    loss = grpo_loss(
        new, advantages, mask, old=old, reference=ref if reference else None, clip_high=0.28, per=per
    )  # fmt: skip
    assert loss.item() == pytest.approx(expected, rel=1e-9)


def test_grpo_before_an_update_has_the_policy_gradient():
    log_probs = tensor([[-1.0, -2.0], [-3.0, -4.0]], requires_grad=True)
    mask = torch.tensor([[True, True], [True, False]])
    grpo_loss(log_probs, tensor([1.0, -2.0]), mask).backward()
    assert torch.equal(log_probs.grad, tensor([[-0.25, -0.25], [1.0, 0.0]]))


def test_advantages_are_of_groups():
    rewards = tensor([1.0, 3.0, 0.0, 0.0, 5.0, 1.0])
    deviation = math.sqrt(2)
    expected = [
        -1 / (deviation + 1e-4),
        1 / (deviation + 1e-4),
        0,
        0,
        2 / (4 / deviation + 1e-4),
        -2 / (4 / deviation + 1e-4),
    ]
    assert torch.allclose(group_advantages(rewards, 2), tensor(expected))
    assert torch.equal(group_advantages(rewards, 2, scaled=False), tensor([-1.0, 1.0, 0.0, 0.0, 2.0, -2.0]))


ERRORS = {
    "dpo_loss: expected equal shapes": lambda one, two: dpo_loss(one, one, one, two),
    "dpo_loss: kind is one of": lambda one, two: dpo_loss(one, one, one, one, kind="sigmod"),
    "dpo_loss: label_smoothing": lambda one, two: dpo_loss(one, one, one, one, label_smoothing=0.6),
    "dpo_loss: beta is positive": lambda one, two: dpo_loss(one, one, one, one, beta=0),
    "kto_loss: desirable is bool": lambda one, two: kto_loss(one, one, one),
    "orpo_loss: expected equal shapes": lambda one, two: orpo_loss(one, two),
    "grpo_loss: mask is bool": lambda one, two: grpo_loss(one[None], one[:1], one[None]),
    "grpo_loss: expected log_probs": lambda one, two: grpo_loss(one, one, one > 0),
    "grpo_loss: per is": lambda one, two: grpo_loss(one[None], one[:1], one[None] > 0, per="tokens"),
    "group_advantages: expected a multiple": lambda one, two: group_advantages(one, 2),
}


@pytest.mark.parametrize("words", ERRORS)
def test_errors(words):
    with pytest.raises((ValueError, TypeError), match=f"train.{words}"):
        ERRORS[words](torch.zeros(3), torch.zeros(2))


def test_dpo_on_hidden_states_has_the_gradients_of_logits_in_a_fraction_of_the_memory():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator) for shape in ((4, 64, 16), (8000, 16)))
    labels = torch.randint(8000, (4, 64), generator=generator)
    labels[:, :10] = -100
    reference = torch.randn(4, generator=generator) - 500

    def plain():
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        log_probs = nn.functional.linear(h, w).log_softmax(-1)
        chosen = log_probs.gather(2, labels.clamp_min(0).unsqueeze(2)).squeeze(2)
        sums = torch.where(labels == -100, 0, chosen).sum(1)
        dpo_loss(*sums.view(2, 2), *reference.view(2, 2)).backward()
        return h.grad, w.grad

    def tiled():
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        sums = lb.memory.linear_log_probs(h, w, labels, entropy=False, chunk=1 << 14).log_probs.sum(1)
        dpo_loss(*sums.view(2, 2), *reference.view(2, 2)).backward()
        return h.grad, w.grad

    torch.testing.assert_close(tiled(), plain(), rtol=1e-4, atol=1e-6)
    assert lb.memory.allocated_peak(tiled) < lb.memory.allocated_peak(plain) / 6
