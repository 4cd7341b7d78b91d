"""The ladder of estimated peaks: each rung is the estimate of its settings, on top of the rungs that help."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.plan.ladder import RUNGS, Rung, estimate_ladder
from lowbit.plan.settings import prepare_model_
from lowbit.plan.subject import Subject

SOME = tuple(rung for rung in RUNGS if rung.name in ("fp32", "block", "adamw8bit", "micro-batches"))


def gpt():
    torch.manual_seed(0)
    return Subject(GPT(GPTConfig(vocab=64, layers=2, heads=2, dim=64, hidden=128)), torch.randint(64, (4, 32)))


@pytest.mark.slow
def test_rungs_are_estimates_of_their_settings_and_nothing_changes():
    subject = gpt()
    before = {name: value.clone() for name, value in subject.model.state_dict().items()}
    ladder = estimate_ladder(subject, "60%", SOME)
    assert [row.rung for row in ladder.rows] == list(SOME)
    plain, block, short = (row.prediction for row in ladder.rows[:3])
    assert plain.peak_bytes == pytest.approx(lb.estimate(subject.model, subject.batch).peak_bytes, rel=0.01)
    told = lb.estimate(subject.model, subject.batch, checkpoint="block", optimizer="adamw8bit").peak_bytes
    assert short.settings.checkpoint == "block" and short.settings.bits == 8
    assert short.peak_bytes == pytest.approx(told, rel=0.01)
    assert block.peak_bytes < plain.peak_bytes and all(row.prediction.seconds > 0 for row in ladder.rows)
    assert ladder.budget == int(0.6 * plain.peak_bytes)
    assert all(torch.equal(value, before[name]) for name, value in subject.model.state_dict().items())
    head, rows = ladder.table()
    assert head[-1] == "fits" and rows[0][2] == "100%" and rows[0][-1] == "no"
    assert json.loads(json.dumps(ladder.as_dict()))["rungs"][1]["name"] == "block"


def test_a_rung_that_does_not_help_or_apply_is_left_out_with_a_reason():
    """One row cannot be split, and a Linear layer has no blocks and saves nothing that 8 bits would lower."""
    subject = Subject(nn.Linear(8, 8), torch.zeros(1, 512, 8), lambda output, batch: output.sum())
    ladder = estimate_ladder(subject, None, SOME)
    reasons = {row.rung.name: row.reason for row in ladder.rows}
    assert "no ModuleList" in reasons["block"] and reasons["micro-batches"] == "the batch cannot be split"
    assert reasons["adamw8bit"].startswith("it does not lower the peak here")
    assert [row.kept for row in ladder.rows] == [True, False, False, False]
    assert "fits" not in str(ladder) and any("Left out: " in line for line in ladder.remarks())


def test_settings_of_a_rung_that_is_left_out_are_not_in_the_next():
    subject = Subject(nn.Sequential(nn.Linear(64, 64), nn.GELU()), torch.zeros(64, 64), lambda out, _: out.sum())
    same = Rung(
        "same", {"offload_activations": True, "offload_states": True}, "states alone would help", why_not=lambda _: "no"
    )
    ladder = estimate_ladder(subject, None, (SOME[0], same, SOME[2]))
    assert ladder.rows[1].reason == "no" and not ladder.rows[2].prediction.settings.offload_states


@pytest.mark.slow
def test_a_model_in_bf16_has_bf16_in_its_first_rung():
    subject = gpt()
    subject.model.bfloat16()
    first = estimate_ladder(subject, None, SOME[:1]).rows[0].prediction
    assert first.settings.bf16_params and first.settings.loaded == "bf16"
    prepare_model_(subject.model, first.settings)  # nothing to prepare
    assert next(subject.model.parameters()).dtype == torch.bfloat16
