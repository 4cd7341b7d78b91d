"""One choice for each group within a budget: the best of all, by trying all."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowbit.plan.bits import Option, allocate

OPTIONS = st.builds(Option, st.integers(0, 12), st.sampled_from([0.0, 1e-9, 0.1, 1.0, 2.5, 3.0, 1e6]) | st.floats(0, 9))


@given(st.lists(st.lists(OPTIONS, min_size=1, max_size=4), min_size=1, max_size=5), st.floats(0, 1.2))
def test_the_choice_is_the_best_of_all(groups, part):
    least = sum(min(option.cost for option in options) for options in groups)
    budget = least + int(part * sum(max(option.cost for option in options) for options in groups))
    chosen = allocate(groups, budget)
    own = [options[index] for options, index in zip(groups, chosen, strict=True)]
    assert sum(option.cost for option in own) <= budget
    fitting = (row for row in itertools.product(*groups) if sum(option.cost for option in row) <= budget)
    best = min(math.fsum(option.loss for option in row) for row in fitting)
    assert math.fsum(option.loss for option in own) <= best * (1 + 1e-12)
    with pytest.raises(ValueError, match="the cheapest choice costs"):
        allocate(groups, least - 1)


def test_a_large_problem_is_solved_and_is_as_good_as_its_relaxation_allows():
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 40, (400,), generator=generator).tolist()
    spread = torch.randn(400, 5, generator=generator).exp().tolist()
    bits = (2, 3, 4, 5, 8)
    groups = [
        [Option(size * b, size * 4.0**-b * s) for b, s in zip(bits, row, strict=True)]
        for size, row in zip(sizes, spread, strict=True)
    ]
    budget = int(4.5 * sum(sizes))
    loss = sum(options[i].loss for options, i in zip(groups, allocate(groups, budget), strict=True))
    # Weak duality: no choice within the budget loses less than this, whatever the price.
    bound = max(
        sum(min(o.loss + price * o.cost for o in options) for options in groups) - price * budget
        for price in torch.logspace(-6, 0, 200).tolist()
    )
    assert bound <= loss * (1 + 1e-9) and loss < bound * 1.02
