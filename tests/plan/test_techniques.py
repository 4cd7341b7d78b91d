"""The table of techniques: what follows from its rows, and that plans of small models are those that were recorded."""

from __future__ import annotations

from dataclasses import fields, replace
from math import isfinite

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowbit as lb
from lowbit.checkpointing.block_table import KEEP, blocks_of, options_of
from lowbit.checkpointing.policies import POLICIES
from lowbit.combinations import COMBINATIONS
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.memory.footprint import Footprints
from lowbit.optim.names import FAMILIES
from lowbit.plan import TECHNIQUES
from lowbit.plan.checklist import ADVISED
from lowbit.plan.fitting.adapt import fallback
from lowbit.plan.fitting.choices import described, name_in, words
from lowbit.plan.settings import ARITHMETIC, TrainingSettings
from lowbit.plan.subject import Subject
from lowbit.plan.techniques import AS_LOADED, FALLBACKS, MICRO_BATCHES, PLANNED, conflict, technique_of, techniques

TOKENS = torch.randint(512, (8, 64), generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
CLASSES = torch.randint(10, (64,), generator=torch.Generator().manual_seed(2))


def gpt():
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab=512, layers=3, heads=2, dim=96, hidden=256))


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 10))


def normed():
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()) for _ in range(3))
    return nn.Sequential(*blocks, nn.Linear(32, 10))


def entropy(output, batch):
    return F.cross_entropy(output, batch[1])


def test_names_and_fields_are_clear():
    names, settings = [one.name for one in techniques()], {one.name for one in fields(TrainingSettings)}
    assert len(names) == len(set(names)) and all(one.about for one in techniques())
    for dimension, row in TECHNIQUES.items():
        assert not row[0].changes and technique_of(dimension, TrainingSettings()) is row[0]
        changes = {name for technique in row for name in technique.changes}
        assert changes <= set(ARITHMETIC) or changes.isdisjoint(ARITHMETIC), "searches take a dimension as a whole"
        for technique in row:
            assert settings >= {*technique.changes, *technique.needs} and COMBINATIONS.keys() >= set(
                technique.conflicts
            )


def test_settings_are_described_by_the_technique_that_they_have():
    for dimension, row in TECHNIQUES.items():
        for technique in row:
            has = replace(
                TrainingSettings(gpus=2 if dimension == "strategy" else 1), **technique.needs, **technique.changes
            )
            assert technique.is_on(has)
            if technique.name not in (AS_LOADED, PLANNED):
                assert described(has)[dimension].name == technique.name
            if technique.changes and dimension != MICRO_BATCHES:
                assert name_in(has, technique) in words(has).split(", ")
            assert conflict(has) is None or technique.name == "stochastic" or "base" in technique.changes


def test_a_policy_of_one_block_is_a_technique_and_an_option_of_plans():
    model = gpt()
    options = options_of(model, blocks_of(model))
    assert options == [KEEP, *(name for name, row in POLICIES.items() if row.block is not None)]
    names, advised = {one.name for one in TECHNIQUES["checkpoint"]}, {one.name for one in ADVISED}
    assert names >= set(options) - {KEEP} and advised >= set(options) - {KEEP}
    ranked = [one.name for dimension, one in FALLBACKS if dimension == "checkpoint"]
    known = [name for name, row in POLICIES.items() if row.fallback is not None]
    assert ranked == sorted(known, key=lambda name: POLICIES[name].fallback)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("row", FAMILIES, ids=lambda row: row.family)
def test_a_plan_uses_a_required_optimizer_and_holds_its_states(row):
    name, options = f"{row.family}8bit", {"exclude": ("disk",), "progress": False}
    plan = lb.fit(classifier(), (ROWS, CLASSES), "100%", entropy, require=("fp32", "everything kept", name), **options)
    assert plan.settings == TrainingSettings(optimizer=row.family, bits=8)
    model = classifier()
    run = plan.apply_(model, lr=1e-3)
    assert type(run.optimizer) is type(row.make(classifier().parameters()))
    assert run.optimizer.param_groups[0]["bits"] != "fp32"
    before, loss = model[0].weight.detach().clone(), run.step((ROWS, CLASSES))
    assert isfinite(loss) and not torch.equal(before, model[0].weight)


def test_fallbacks_take_less_each_time():
    subject, settings, taken = Subject(gpt(), TOKENS[:1]), TrainingSettings(), []
    while (after := fallback(settings, subject)) is not None:
        taken.append(
            next(one.name for one in techniques() if one.changes and one.is_on(after) and not one.is_on(settings))
        )
        settings = after
    assert taken == ["attention", "save_matmuls", "sqrt", "block", "activations on disk", "disk"]
    assert fallback(TrainingSettings(checkpoint="mlp"), subject) == TrainingSettings(checkpoint="block")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "batch", "loss", "share", "expected", "peak"),
    [
        (gpt, TOKENS, None, 60, {"precision": "bf16", "bits": 8, "micro_batches": 2}, 9100924),
        (gpt, TOKENS, None, 20,
         {"precision": "bf16", "bits": 8, "micro_batches": 8, "checkpoint": ("mlp", KEEP, KEEP)}, 4556700),
        (classifier, (ROWS, CLASSES), entropy, 60, {"precision": "bf16", "bits": 8}, 195172),
        (normed, (ROWS, CLASSES), entropy, 80,
         {"precision": "bf16", "master": "stochastic"}, 90832),
    ],
)  # fmt: skip
def test_plans_are_those_that_were_recorded(monkeypatch, make, batch, loss, share, expected, peak):
    """Of constant times, and of the table of scratch memory in place of this machine's, so that only code matters."""
    monkeypatch.setattr(Footprints, "of", lambda self, calls, run=True: {})
    plan = lb.fit(make(), batch, f"{share}%", loss, exclude=("disk",), progress=False)
    assert plan.settings == TrainingSettings(**expected) and plan.peak_bytes == pytest.approx(peak, rel=0.01)
