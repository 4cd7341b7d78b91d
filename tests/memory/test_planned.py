"""Checkpoints for a budget: the choice is the best one, and the real step keeps the budget."""

from __future__ import annotations

import copy
import gc
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.memory import checkpoint_, plan_checkpoints, profile, uncheckpoint_, usual_loss
from lowbit.plan.checkpoints import Option, best

CONFIG = GPTConfig(vocab=256, layers=2, heads=2, dim=128, hidden=256)


def peak(options, outside):
    """The most that is held, by adding up moment by moment."""
    kept, most = 0, outside[0]
    for place, option in enumerate(options):
        most = max(most, kept + option.inside)
        kept += option.saved
        most = max(most, kept + outside[place + 1])
    return most


blocks = st.lists(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 80), st.integers(0, 20)), min_size=1, max_size=3),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(blocks, st.integers(0, 60), st.integers(0, 300))
def test_the_choice_is_that_of_trying_all(drawn, other, budget):
    options = [[Option(str(i), *row[:2], float(row[2])) for i, row in enumerate(block)] for block in drawn]
    outside = [other] * (len(options) + 1)
    tried = [
        (sum(o.seconds for o in choice), [o.name for o in choice])
        for choice in itertools.product(*options)
        if peak(choice, outside) <= budget
    ]
    names = best(options, outside, budget)
    if not tried:
        assert names is None
        return
    chosen = [next(o for o in block if o.name == name) for block, name in zip(options, names, strict=True)]
    assert peak(chosen, outside) <= budget
    assert sum(o.seconds for o in chosen) == min(tried)[0]


def test_within_two_percent_of_trying_all_for_sixteen_blocks():
    """Sizes of real models, where bytes are rounded; two options each, so that all 65,536 choices can be tried."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda low, high: int(torch.randint(low, high, (), generator=generator))
    options = []
    for _ in range(16):
        kept, cost = draw(10**8, 10**9), draw(1, 100) / 1e3
        options.append([Option("keep", kept, kept + 10**8, 0.0), Option("block", kept // 20, kept + 10**8, cost)])
    outside = [10**9] * 17
    whole = peak([block[0] for block in options], outside)
    for share in (0.9, 0.7, 0.5, 0.35):
        budget = int(share * whole)
        least = min(
            (
                sum(o.seconds for o in choice)
                for choice in itertools.product(*options)
                if peak(choice, outside) <= budget
            ),
            default=math.inf,
        )
        names = best(options, outside, budget)
        chosen = [next(o for o in block if o.name == name) for block, name in zip(options, names, strict=True)]
        assert peak(chosen, outside) <= budget
        assert sum(o.seconds for o in chosen) <= 1.02 * least


def outcome(model, batch):
    model.zero_grad()
    loss = usual_loss(model(batch), batch)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.slow
def test_budgets_of_a_real_model_are_kept_and_no_bit_changes():
    model, batch = GPT(CONFIG), torch.randint(256, (8, 64))
    want = outcome(copy.deepcopy(model), batch)

    def step(given):
        outcome(model, given)
        model.zero_grad()

    before = 1 << 62
    for share in ("85%", "65%"):
        plan = plan_checkpoints(model, batch, share, optimizer=None)
        checkpoint_(model, plan)
        gc.collect()
        found = profile(model, batch, step)
        held = found.peak_bytes - found.by_kind.get("other", 0)
        assert held <= 1.01 * plan.budget and held == pytest.approx(plan.peak_bytes, rel=0.01)
        assert held < before
        before = held
        assert all(map(torch.equal, outcome(model, batch), want))
        assert set(plan.options) == {f"blocks.{i}" for i in range(2)}
        assert plan.why("blocks.0").startswith("blocks.0: ") and "budget" in str(plan)
    uncheckpoint_(model)


def test_a_plan_is_a_policy(steady_times):
    model, batch = GPT(CONFIG), torch.randint(256, (8, 64))
    assert len(checkpoint_(model, plan_checkpoints(model, batch, "75%", optimizer=None)).converted) >= 2
    uncheckpoint_(model)
    assert checkpoint_(model, plan_checkpoints(model, batch, "8GB", optimizer=None)).converted == ()


def test_what_cannot_be_planned_says_so():
    model, batch = GPT(CONFIG), torch.randint(256, (2, 16))
    with pytest.raises(ValueError, match="the smallest peak is"):
        plan_checkpoints(model, batch, "1MB")
    with pytest.raises(ValueError, match="no ModuleList or Sequential"):
        plan_checkpoints(nn.Linear(4, 4), torch.randn(2, 4), "80%")
    with pytest.raises(ValueError, match="is no size"):
        plan_checkpoints(model, batch, "lots")
