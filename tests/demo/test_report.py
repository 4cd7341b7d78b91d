"""What the demo's report claims, against which baseline, and the precision that a processor is given by default."""

from __future__ import annotations

import math
import platform
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowbit.demo import explain, report
from lowbit.demo.experiment import Measurement
from lowbit.demo.loop import History, TrainConfig
from lowbit.machine import float_precision


def ran(precision: str, *losses: float, outside: str = "bf16") -> Any:
    """A run as the report sees it, with those held-out losses."""
    held_out = [(10 * step, loss) for step, loss in enumerate(losses, 1)]
    return SimpleNamespace(
        plan=None, config=TrainConfig(precision=precision, outside=outside), history=History([], held_out)
    )


def measured(recipe: str, perplexity: float) -> Measurement:
    return Measurement(recipe, 0, 0, math.log(perplexity), 1.0, "")


def held(precision: str, step: int, **changes: Any) -> explain.Held:
    """What a run holds, all of it in its step."""
    return explain.Held(TrainConfig(precision=precision, **changes), 0, 0, step, 0, 0)


@pytest.mark.parametrize(("checkpointing", "allowed"), [(False, 75), (True, 95)])
def test_the_peak_of_a_step_is_compared_with_the_same_optimizer_and_checkpointing(checkpointing, allowed):
    changes = {"checkpointing": checkpointing}
    memory = [held("bf16", 100, **changes), held("fp8", 10, **changes)]
    for peak in (allowed, allowed + 1):
        codes = held("fp8", peak, compress_activations=True, **changes)
        eight = held("fp8", 10, compress_activations=True, optimizer="adamw8bit", **changes)
        (claim,) = report.claims([ran("bf16", 2.0)], [measured("bf16", 3.0)], [*memory, codes, eight])
        assert claim.name == "fp8 training, peak step memory relative to bf16"
        assert claim.measured == pytest.approx(peak / 100 - 1) and claim.holds == (peak == allowed)


def test_rows_of_memory_change_one_thing_each():
    bf16 = TrainConfig(batch=2, seed=3)
    fp8 = replace(bf16, precision="fp8", compress_activations=True, optimizer="adamw8bit")
    mxfp8 = replace(bf16, precision="mxfp8")
    codes, products = replace(fp8, optimizer="adamw"), replace(bf16, precision="fp8")
    assert explain.one_by_one([bf16, fp8, mxfp8]) == [bf16, products, codes, fp8, mxfp8]
    eight = replace(bf16, optimizer="adamw8bit")
    assert explain.one_by_one([fp8, bf16]) == [fp8, replace(fp8, precision="bf16"), eight, bf16]


def test_training_is_held_to_the_last_loss_of_the_first_run():
    runs = [ran("bf16", 9.0, 2.0), ran("fp8", 1.0, 2.019), ran("mxfp8", 1.0, 2.021), ran("fp32", 5.0, 1.9)]
    first, second, third = report.claims(runs, [measured("bf16", 3.0)], [held("bf16", 100)])
    assert [c.holds for c in (first, second, third)] == [True, False, True]
    assert first.name == "fp8 training, held-out loss relative to bf16" and first.allowed == report.LOSS_TARGET == 0.01
    assert first.measured == pytest.approx(0.0095) and third.measured == pytest.approx(-0.05)


@pytest.mark.parametrize(("outside", "perplexity"), [("bf16", 10.0), ("fp32", 20.0)])
def test_recipes_are_held_to_the_model_in_the_precision_that_they_have_outside(outside, perplexity):
    rows = [measured("fp32", 20.0), measured("bf16", 10.0), measured("int8", perplexity * 1.004),
            measured("nf4", perplexity * 2), measured("int4-weight-only:group32", perplexity * 1.06)]  # fmt: skip
    assert report.baseline(rows, outside).perplexity == pytest.approx(perplexity)
    int8, int4 = report.claims([ran(outside, 2.0, outside=outside)], rows, [held(outside, 100)])
    assert int8.name == f"int8, perplexity relative to {outside}"
    assert (int8.measured, int8.allowed, int8.holds) == (0.004, 0.005, True)
    assert (int4.measured, int4.allowed, int4.holds) == (0.06, 0.05, False)


def test_bounds_of_claims_are_written_without_signs():
    bounds = {-0.25: "at least 25.0% less", 0.01: "at most 1.0% more", 0.0: "no more"}
    assert {allowed: report.Claim("", 0.0, allowed).bound for allowed in bounds} == bounds


def test_a_claim_at_its_limit_holds_and_one_that_is_no_number_does_not():
    assert report.Claim("", 0.01, 0.01).holds and not report.Claim("", math.nan, 0.01).holds
    runs = [ran("bf16", 2.0), ran("fp8", math.nan)]
    (claim,) = report.claims(runs, [measured("bf16", 3.0)], [held("bf16", 100)])
    assert not claim.holds
    assert math.copysign(1, report.change(measured("int8", 3.0 - 1e-7), measured("bf16", 3.0))) == 1, "no -0.00%"


@pytest.mark.parametrize(
    ("capabilities", "wanted"),
    [
        ({"architecture": "x86_64", "avx2": True, "avx512_bf16": True, "amx_bf16": False}, "bf16"),
        ({"architecture": "x86_64", "avx2": True, "avx512_bf16": False, "amx_bf16": True}, "bf16"),
        ({"architecture": "aarch64", "bf16": True}, "bf16"),
        ({"architecture": "x86_64", "avx2": True, "avx512_bf16": False, "amx_bf16": False}, "fp32"),
        ({}, "fp32"),
    ],
)  # fmt: skip
def test_floats_are_bf16_only_where_the_processor_multiplies_them(monkeypatch, capabilities, wanted):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert float_precision() == wanted


@pytest.mark.parametrize(
    ("machine", "avx512", "mkldnn", "wanted"),
    [
        ("x86_64", True, True, "bf16"),
        ("x86_64", False, True, "fp32"),
        ("aarch64", False, True, "bf16"),
        ("arm64", True, False, "fp32"),
    ],
)
def test_an_older_torch_is_asked_what_it_knows(monkeypatch, machine, avx512, mkldnn, wanted):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512, raising=False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: mkldnn, raising=False)
    assert float_precision() == wanted
