"""What an error offers is served: every recipe in every function, and the lists that unknown names get."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.cli.models import recipe_in

BATCHES = [torch.randn(4, 64, generator=torch.Generator().manual_seed(0))]
CALLS = {
    "quantize_": lambda model, name: lb.quantize_(model, name, skip=()),
    "calibrate": lambda model, name: lb.calibrate(model, name, BATCHES, "nearest", skip=()),
    "qat.prepare_": lambda model, name: lb.qat.prepare_(model, name, skip=()),
    "sensitivity": lambda model, name: lb.sensitivity(model, [name], BATCHES, skip=()),
    "train.prepare_": lambda model, name: lb.train.prepare_(model, name, skip=()),
}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32))


def names_in(text: str) -> list[str]:
    return [word for word in re.findall(r"[\w-]+", text) if word in lb.RECIPES]


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("name", lb.RECIPES)
def test_a_recipe_works_or_the_error_offers_what_does(what, name):
    try:
        CALLS[what](net(), name)
    except ValueError as error:
        message = str(error).replace(f"recipe {name!r}", "").replace("layer '0'", "")
        assert "scale=" not in message, "no Python of whoever writes recipes"
        for offered in names_in(message):
            CALLS[what](net(), offered)
        assert names_in(message) or re.search(r"calibrat|dynamic input scales", message)


def test_an_unknown_name_gets_the_names_by_what_they_need():
    with pytest.raises(ValueError, match="expected one of") as caught:
        lb.recipe("int9")
    at_once, with_data, training = str(caught.value).partition("expected one of ")[2].split("; ")
    assert names_in(at_once) + names_in(with_data) + names_in(training) != []
    assert sorted(names_in(at_once) + names_in(with_data) + names_in(training)) == sorted(lb.RECIPES)
    for name in names_in(at_once):
        lb.quantize_(net(), name, skip=())
    for name in names_in(with_data):
        lb.calibrate(net(), name, BATCHES, "nearest", skip=())
    assert with_data.startswith("with calibration data") and training.startswith("for train.prepare_ alone")
    for name in names_in(training):
        lb.train.prepare_(net(), name, skip=())


@pytest.mark.parametrize("name", [name for name, row in lb.RECIPES.items() if row.static])
def test_the_command_line_asks_for_a_text(name):
    with pytest.raises(ValueError, match=f"recipe '{name}' needs data.*--text FILE, or use one of int8, ") as caught:
        recipe_in(name, None)
    assert not {row.name for row in lb.RECIPES.values() if not row.dynamic} & set(
        names_in(str(caught.value).partition("or use one of")[2])
    )
    assert recipe_in(name, Path("book.txt")) == recipe_in(name, None, calibrated=True) == lb.recipe(name)


def test_a_choice_that_does_nothing_says_why():
    from lowbit.plan.subject import Subject
    from lowbit.plan.techniques import TECHNIQUES

    model = net()
    lb.quantize_(model, "nf4", skip=())
    model.append(nn.Linear(32, 32))
    fp8, adamw8bit = (
        next(technique for technique in TECHNIQUES[dimension] if technique.name == name)
        for dimension, name in (("precision", "fp8"), ("optimizer", "adamw8bit"))
    )
    reason = fp8.why_not(Subject(model, BATCHES[0]))
    assert reason is not None and "0 is quantized already (recipe nf4)" in reason and "\n" not in reason
    assert adamw8bit.why_not(Subject(model, BATCHES[0])) is None, (
        "codes are no reason against the states of what trains"
    )


def test_a_step_beside_a_checkpoint_has_its_time():
    """Plans with checkpoints time them on blocks of their own."""
    from lowbit.checkpointing.host_time import overhead

    assert overhead(False) >= 0 and overhead(True) >= 0
