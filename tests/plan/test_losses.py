"""What choices count for: a gain as zero, few bits as no less than more, and what a caller has measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.plan import TECHNIQUES, TrainingPlan
from lowbit.plan.fitting.choices import NOISE, described, loss_words, most_of, quality_of
from lowbit.plan.settings import TrainingSettings
from lowbit.plan.techniques import techniques

ROWS = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


def model():
    return nn.Sequential(nn.Linear(16, 512), nn.GELU(), nn.Linear(512, 16))


def squares(output, batch):
    return output.float().square().mean()


def planned(budget, **options):
    return lb.fit(model(), ROWS, budget, squares, exclude=("disk", "micro-batches"), progress=False, **options)


def test_a_gain_counts_as_zero_and_fewer_bits_as_no_less_than_more():
    for technique in techniques():
        assert technique.counted >= max(technique.loss, 0)
    by_bits = [described(TrainingSettings(bits=bits))["optimizer"].counted for bits in (32, 8, 4)]
    assert by_bits == sorted(by_bits)
    assert quality_of(TrainingSettings(bits=4, precision="bf16")) == pytest.approx(by_bits[2]) and by_bits[2] > 0


def test_4_bits_are_taken_only_if_8_do_not_fit():
    names = ("bf16", "residual", "everything kept", "memory", "adamw8bit", "adamw4bit")
    eight, four = (planned("400%", require=(*names[:4], f"adamw{bits}bit")) for bits in (8, 4))
    assert four.peak_bytes < eight.peak_bytes
    assert planned(eight.peak_bytes, require=names).settings.bits == 8
    assert planned(eight.peak_bytes - 1, require=names).settings.bits == 4


def test_losses_of_a_caller_replace_the_records(tmp_path):
    assert most_of((), 0.3, {"bf16": 0.02}).lost(TrainingSettings(precision="bf16")) == 2.0
    plan = planned("100%", losses={"bf16": 0.02})
    assert plan.settings.precision is None  # nor fp8, whose other ops are in bf16
    given = {one.name: one.with_losses({"bf16": 0.02, "fp8": 0.03}).counted for one in TECHNIQUES["precision"]}
    assert given["fp32"] == 0 and given["bf16"] == given["mxfp8"] == 2 and given["fp8"] == given["fp8-compressed"] == 3
    asked = planned("100%", require=("bf16",), losses={"bf16": 0.02, "adamw8bit": -0.5})
    assert asked.settings.precision == "bf16" and "2.00% more (given)" in str(asked) and "given: bf16" in str(asked)
    loaded = TrainingPlan.load(asked.save(tmp_path / "plan.json"))
    assert loaded.losses == asked.losses == {"bf16": 0.02, "adamw8bit": -0.5} and str(loaded) == str(asked)


def test_the_table_says_whose_loss_was_recorded():
    text = str(planned("100%", require=("fp32",)))
    assert (
        "a prior, recorded: language model cross-entropy of the demo's GPT of 1.1M parameters, mean over 2 seeds"
        in text
    )
    assert f"fp32 is {NOISE}% from bf16 there, by noise; losses= replaces it" in text


def test_changes_within_noise_are_named_so():
    by_name = {one.name: one for row in TECHNIQUES.values() for one in row}
    assert loss_words(by_name["adamw4bit"]) == "no measurable change"
    assert loss_words(by_name["fp8"]) == "0.12% more, within noise"
    assert loss_words(by_name["mxfp8"]) == "0.57% more"
    assert loss_words(by_name["fp32"]) == ""
    assert (
        loss_words(by_name["adamw4bit"].with_losses({"adamw4bit": -0.02}), {"adamw4bit": -0.02}) == "2.00% less (given)"
    )
    text = str(planned("100%", require=("fp32", "adamw4bit")))
    assert "no measurable change" in next(line for line in text.splitlines() if "adamw4bit" in line)


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ({"bf17": 0.1}, "losses has no choice 'bf17', did you mean|losses has no choice 'bf17'"),
        ({"bf16": "much"}, "relative changes of the loss by choice, such as 0.02 for 2% more, got 'much' for 'bf16'"),
        ({"bf16": float("nan")}, "got nan for 'bf16'"),
    ],
)
def test_losses_that_say_nothing_are_refused(losses, message):
    with pytest.raises(ValueError, match=message):
        planned("100%", losses=losses)


def test_a_model_in_bf16_trains_as_loaded():
    half, rows = model().bfloat16(), ROWS.bfloat16()
    plan = lb.fit(
        half, rows, "300%", squares, require=("as loaded", "adamw"), exclude=("disk", "micro-batches"), progress=False
    )
    assert (
        plan.settings.bf16_params
        and "as loaded" in str(plan)
        and "fp32" not in str(plan).split("which means")[1].split()[1]
    )
    with pytest.raises(ValueError, match=r"'fp32' needs a model in fp32.*require 'as loaded', or call model.float\(\)"):
        lb.fit(half, rows, "300%", squares, require=("fp32",))
    assert (
        planned("100%", require=("fp32", "adamw")).settings == planned("100%", require=("as loaded", "adamw")).settings
    )
