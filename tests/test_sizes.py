"""Sizes and budgets in words: what is one, and what is refused before anything is planned."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.memory import plan_checkpoints
from lowbit.sizes import Budget, amount_changed, budget_in, bytes_in, share_changed
from lowbit.storage.targets import find_target

NO_SIZES = ("6", "60", "0", "nan", "inf", "much", "", "-1GiB", "1e3", "6 parsec", "0x10MB", "9" * 400 + "GiB", "٦GiB")
NO_BUDGETS = (*NO_SIZES, "0%", "-5%", "nan%", "%", "0GiB", "6B", "0.0001KiB", 6, 0, -1, 0.6, math.nan, True, b"6GiB")


def test_sizes_have_a_unit():
    assert bytes_in("80MB") == 80_000_000 and bytes_in("1.5 gib") == 3 << 29 and bytes_in(" 7b ") == 7
    for text in NO_SIZES:
        with pytest.raises(ValueError, match="is no size"):
            bytes_in(text)
    with pytest.raises(ValueError, match=r"'6' is no size, since it has no unit; write for instance 80MB or 1\.5GiB"):
        bytes_in("6")


def test_changes_are_written_without_signs():
    shares = {-0.46: "46% less", 0.12: "12% more", 0.004: "the same", -0.004: "the same", 0.0: "the same"}
    assert {share: share_changed(share) for share in shares} == shares
    assert share_changed(-0.004, 2) == "0.40% less" and share_changed(1.5) == "150% more"
    assert share_changed(math.nan) == "unknown" and share_changed(math.inf) == "inf% more"
    changes = {3 << 19: "1.50 MiB more", -512: "512 B less", 0: "the same"}
    assert {change: amount_changed(change) for change in changes} == changes


def test_budgets_are_sizes_or_shares():
    assert budget_in("6GiB", "fit") == Budget(6 << 30) and budget_in(1 << 20, "fit").of(7) == 1 << 20
    assert budget_in("60%", "fit").of(1000) == 600 and budget_in("0.5 %", "fit").of(1000) == 5
    for value in NO_BUDGETS:
        with pytest.raises(ValueError, match="fit: budget is bytes, a size such as '6GiB', or a share such as '60%'"):
            budget_in(value, "fit")
    with pytest.raises(ValueError, match="'60%' is no size"):
        budget_in("60%", "--size", shares=False)


class Untouchable(nn.Linear):
    """Fails where a forward is planned for, or is copied to be."""

    def forward(self, x):
        raise AssertionError("planned before the budget was read")

    def __deepcopy__(self, memo):
        raise AssertionError("copied before the budget was read")


@pytest.mark.parametrize("budget", NO_BUDGETS, ids=repr)
def test_what_is_no_budget_is_refused_before_anything_is_planned(budget, monkeypatch):
    model, x = Untouchable(4, 4), torch.ones(2, 4)
    blocks = nn.Sequential(Untouchable(4, 4), Untouchable(4, 4))
    calls = (
        lambda: lb.fit(model, x, budget, lambda output, batch: output.sum()),
        lambda: lb.fit(model, x, budget, lambda output, batch: output.sum(), gpus=4, link="1GB/s"),
        lambda: plan_checkpoints(blocks, x, budget),
    )
    for call in calls:
        with pytest.raises(ValueError, match="budget is bytes, a size such as '6GiB', or a share such as '60%'"):
            call()
    gpt = GPT(GPTConfig(vocab=64, layers=1, heads=2, dim=16, hidden=32))
    monkeypatch.setattr("lowbit.plan.serving.search.Predictor", None)
    with pytest.raises(ValueError, match="budget is bytes, a size such as '6GiB', or a share such as '60%'"):
        lb.fit_generation(gpt, None, budget, context=16)


@pytest.mark.parametrize("budget", [one for one in NO_SIZES if one != "0"])
def test_a_limit_of_a_place_has_a_unit(budget, tmp_path):
    with pytest.raises(ValueError, match=r"offload: budget is a number of bytes or a size such as '100GB'; .*no size"):
        find_target(tmp_path, budget)


@pytest.mark.parametrize("budget", ["6", "60", "0", "0%", "nan", "much", "-5%", "6B", ""])
def test_the_commands_refuse_what_is_no_budget_before_they_load_or_plan(budget, run, monkeypatch, tmp_path):
    def planned(*args, **kwargs):
        raise AssertionError("planned before the budget was read")

    for name in ("fit.find", "fit.plan_training", "fit.climb", "train.experiment.run", "quantize.sensitivity"):
        monkeypatch.setattr(f"lowbit.cli.{name}", planned, raising=False)
    said = "budget is bytes, a size such as '6GiB'"
    assert f"--memory: {said}, or a share such as '60%'" in run("fit", "demo", "--memory", budget, code=1)
    assert f"memory: {said}" in run("train", "--memory", budget, "--out", str(tmp_path / "out"), code=1)
    assert f"--memory: {said}" in run("fit", "--ladder", "--memory", budget, code=1)
    (tmp_path / "book.txt").write_text("text " * 100)
    sized = ("quantize", str(tmp_path), "--size", budget, "--text", str(tmp_path / "book.txt"))
    assert f"--size: {said}" in run(*sized, code=1)
