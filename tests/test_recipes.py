"""Recipes: what each operand of the three products becomes, the field's names, recipes by layer, and JSON data."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lowbit as lb
from lowbit.recipes import ALIASES, RECIPES, plan


def test_recipes_take_schemes_by_name():
    mine = lb.Recipe(lb.Gemm("int8:row", "int4:group32"), about="4-bit", name="mine")
    assert mine == lb.Recipe(lb.Gemm(lb.Cast(lb.scheme("int8:row")), lb.scheme("int4:group32")), name="mine")
    assert mine.weight is lb.scheme("int4:group32") and mine.input is lb.scheme("int8:row") and not mine.trains
    assert hash(mine) and "mine" in repr(mine)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    assert lb.quantize_(model, mine).layers[0].recipe == "mine"
    assert model[0].recipe.weight == lb.scheme("int4:group32")


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: lb.Recipe(lb.Gemm(None, "int4:groop32")), ValueError, "groop32"),
        (lambda: lb.Recipe(lb.Gemm("int8:row", None)), ValueError, "is the weight, and needs a scheme"),
        (lambda: lb.Recipe("mine", "int8:row"), TypeError, "output must be a Gemm, got 'mine'; write for instance"),
        (lambda: lb.Recipe(lb.Gemm(None, "int8:row"), name=3), TypeError, "name must be a string, got int"),
        (
            lambda: lb.Recipe(lb.Gemm("int8:row", "int8:row"), lb.Gemm("fp8_e5m2:row", "fold")),
            ValueError,
            "has both grad_input and grad_weight",
        ),
        (lambda: lb.Cast("int8:row", rounding="up"), ValueError, "up"),
    ],
)
def test_what_is_no_recipe_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_json(name):
    again = lb.Recipe.from_dict(json.loads(json.dumps(RECIPES[name].to_dict())))
    assert again == RECIPES[name] and again.name == name


@pytest.mark.parametrize(
    "alias, weight, input",
    [
        ("W8A8", "int8:row", "int8:row"),
        ("w8a8", "int8:row", "int8:row"),
        ("W4A16", "int4:group128", None),
        ("W4A16_ASYM", "uint4:group128:affine", None),
        ("FP8_DYNAMIC", "fp8_e4m3:row", "fp8_e4m3:row"),
        ("FP8_BLOCK", "fp8_e4m3:block128x128", "fp8_e4m3:group128"),
        ("NVFP4A16", "nvfp4", None),
        ("MXFP4", "mxfp4", "mxfp4"),
        ("INT8", "int8:row", "int8:row"),
    ],
)
def test_the_names_of_the_field(alias, weight, input):
    found = lb.recipe(alias)
    assert found.weight == lb.scheme(weight)
    assert found.input == (None if input is None else lb.scheme(input))
    assert alias.upper() in ALIASES or alias.lower() in RECIPES


@pytest.mark.parametrize(
    "wrong, meant",
    [("int4", "int4-weight-only"), ("int4:group128", "int4-weight-only:group128"), ("fp8-blok", "fp8-block")],
)
def test_near_misses_are_told_what_was_meant(wrong, meant):
    with pytest.raises(ValueError, match=f"did you mean .*{meant}"):
        lb.recipe(wrong)


def test_the_last_pattern_that_matches_decides():
    by_layer = plan({"*": "int4-weight-only", "*.down": "int8", "head": None})
    assert by_layer.recipe_for("a.up").name == "int4-weight-only"
    assert by_layer.recipe_for("a.down").name == "int8"
    assert by_layer.recipe_for("head") is None
    assert by_layer.unmatched(["a.up", "a.down"]) == ["head"]
    again = type(by_layer).from_dict(json.loads(json.dumps(by_layer.to_dict())))
    assert [again.recipe_for(n) for n in ("a.up", "a.down", "head")] == [
        by_layer.recipe_for(n) for n in ("a.up", "a.down", "head")
    ]


@given(
    st.lists(st.sampled_from(["*", "a.*", "*.b", "a.b", "c"]), min_size=1, unique=True),
    st.sampled_from(["a.b", "c", "x"]),
)
def test_a_plan_is_its_last_match(patterns, name):
    from fnmatch import fnmatchcase

    names = list(RECIPES)
    mapping = {pattern: names[i] for i, pattern in enumerate(patterns)}
    wanted = [mapping[p] for p in patterns if fnmatchcase(name, p)]
    found = plan(mapping).recipe_for(name)
    assert (found.name if found else None) == (wanted[-1] if wanted else None)
