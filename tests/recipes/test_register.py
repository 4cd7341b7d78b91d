"""A recipe of a third party: every reader of the table knows it from then on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import lowbit as lb
from lowbit.cli import app


@pytest.fixture
def mine() -> Iterator[lb.Recipe]:
    row = lb.Recipe(lb.Gemm(None, "fp6_e2m3:group32"), name="mine-6", about="6-bit weights")
    lb.register_recipe(row)
    yield row
    del lb.RECIPES["mine-6"]


def test_a_recipe_of_a_third_party_is_known_by_name(mine):
    assert lb.recipe("MINE_6") is mine and lb.recipe("mine-6:group64").weight == lb.scheme("fp6_e2m3:group64")
    model = nn.Sequential(nn.Linear(32, 8))
    assert lb.quantize_(model, {"*": "mine-6"}).layers[0].recipe == "mine-6"
    with pytest.raises(ValueError, match=r"unknown recipe 'mine6' \(did you mean mine-6\?\); expected one of .*mine-6"):
        lb.recipe("mine6")


def test_the_command_line_knows_it(mine, tmp_path):
    listed = CliRunner().invoke(app, ["quantize", str(tmp_path)])
    assert "mine-6" in str(listed.exception)
    absent = CliRunner().invoke(app, ["quantize", str(tmp_path), "mine-6"])
    assert isinstance(absent.exception, FileNotFoundError), "the recipe is known, the model is not there"


def test_its_models_load_without_it(tmp_path):
    row = lb.Recipe(lb.Gemm(None, "fp6_e2m3:group32"), name="mine-6")
    lb.register_recipe(row)
    model = nn.Sequential(nn.Linear(32, 8))
    lb.quantize_(model, "mine-6")
    lb.save_model(model, tmp_path / "saved")
    del lb.RECIPES["mine-6"]
    found = lb.load_model(tmp_path / "saved", nn.Sequential(nn.Linear(32, 8)))
    assert found[0].recipe == row
    x = torch.randn(3, 32)
    assert torch.equal(found(x), model(x))


@pytest.mark.parametrize("name", ["int8", "fp8-static", "w4a16", "nvfp4a16", "w8a16"])
def test_a_name_that_is_taken_is_refused(name):
    with pytest.raises(ValueError, match=f"the name '{name}' is taken; choose another for the recipe"):
        lb.register_recipe(lb.Recipe(lb.Gemm(None, "int8:row"), name=name))


@pytest.mark.parametrize("name", ["", "Mine", "my_own", "mine:group32", "-mine", "mine--6", "mein-ü"])
def test_a_name_that_lookups_would_not_find_is_refused(name):
    before = dict(lb.RECIPES)
    with pytest.raises(ValueError, match=r"lower case letters and digits, with dashes between"):
        lb.register_recipe(lb.Recipe(lb.Gemm(None, "int8:row"), name=name))
    with pytest.raises(TypeError, match="expected a Recipe, got str"):
        lb.register_recipe("mine")
    assert before == lb.RECIPES
