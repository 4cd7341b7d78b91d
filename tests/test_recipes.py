"""Recipes that are made by hand; those of the table are tested with the layers."""

from __future__ import annotations

import pytest
from torch import nn

import lowbit as lb


def test_recipes_take_schemes_by_name():
    mine = lb.Recipe("mine", "int4:group32", "int8:row", about="4-bit")
    assert mine == lb.Recipe("mine", lb.scheme("int4:group32"), lb.scheme("int8:row"), about="4-bit")
    assert mine.weight is lb.scheme("int4:group32") and hash(mine) and "mine" in repr(mine)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    assert lb.quantize_(model, mine).recipe == "mine" and model[0].recipe.weight == lb.scheme("int4:group32")
    for wrong, error, message in [
        (("mine", "int4:groop32"), ValueError, "groop32"),
        (("mine", None), TypeError, "a scheme is named by a string, got NoneType"),
        ((3, "int8"), TypeError, "a recipe's name must be a string, got int"),
        (("mine", "int8:row", None, "fp8"), TypeError, "training must be a Training or None, got str"),
    ]:
        with pytest.raises(error, match=message):
            lb.Recipe(*wrong)
