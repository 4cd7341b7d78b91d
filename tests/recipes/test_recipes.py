"""Recipes: what each operand of each product gets, by name, by hand, by layer and as data."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.layers import DYNAMIC, training_layer
from torch import Tensor, nn

import lowbit as lb
from lowbit.convert.select import recipe_for
from lowbit.recipes import ALIASES, RECIPES, LayerRecipes, layer_recipes, refuse_beyond

SCHEMES = ["int8:row", "fp8_e4m3:tensor", "mxfp4", "nvfp4", "uint4:group32:affine", "fp8_e5m2:col", "nf4"]

#: SHA-256 (its first half) of a layer's output, and for recipes that train of the output and both gradients.
DIGESTS = {
    "int8": ("10b79b28914c7b39", "402fd8f79697c2d9"),
    "int8-stochastic": ("10b79b28914c7b39", "0832aa6a0d391955"),
    "int8-group": ("5d2ccdf6328f522a", None),
    "int8-weight-only": ("15c192b469c6ad99", None),
    "int4-weight-only": ("502af4cc6d22ef6b", None),
    "uint4-weight-only": ("fdf6bb822c2482f9", None),
    "nf4": ("c9ca9b4b980aecbe", None),
    "fp8": ("fd3fa1c526ece078", "eeb68be232624c3d"),
    "fp8-pow2": ("0f1585201240d233", "3ecd575e924d8819"),
    "fp8-tensor": ("5156e53b1f72eb7c", "2a910106ad91c71e"),
    "fp8-block": ("1ab5da4750b0b886", "0246960ad4e8f53a"),
    "fp8-weight-only": ("a52529b064a7ae2f", None),
    "mxfp8": ("9987a2bd3dd6557a", "55d9991c19cf9766"),
    "mxfp6": ("e3ce563e4f3a41aa", None),
    "mxfp4": ("42a604d97a7f6f8e", "deb5b3511167e004"),
    "nvfp4": ("6e251b6f17e8934a", "a09c6feb981cea0f"),
    "nvfp4-eden": ("6e251b6f17e8934a", "c491b627497cdaec"),
    "mxfp4-weight-only": ("37472541bb8d2f5f", None),
    "nvfp4-weight-only": ("723f7f43f7fd52dd", None),
    "q4-0": ("eb4854cbfb819e39", None),
    "q5-0": ("aa53b958a7f2ceae", None),
    "q8-0": ("52646b18d2c33d21", None),
    "q4-1": ("7d0e6d4202a25a43", None),
    "q5-1": ("1f0c810474cd0111", None),
    "q4-k": ("5122a618b2d996af", None),
    "q5-k": ("9839c3dbc997ed31", None),
    "q6-k": ("2ae3489b74ce2e7e", None),
    "w4a8": ("ca21c0e6128ad7ac", None),
}


def numbers(*shape: int, step: int) -> Tensor:
    """Numbers of many magnitudes, the same on every machine."""
    i = torch.arange(torch.Size(shape).numel()) * step
    unit = (i * 40503 % 65536 - 32768).float() / 32768
    return (unit * torch.exp2((i * 7 % 9 - 4).float())).reshape(shape)


def digest(*tensors: Tensor) -> str:
    found = hashlib.sha256()
    for one in tensors:
        found.update(one.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


@pytest.mark.parametrize("name", DYNAMIC)
def test_every_recipe_computes_the_bits_that_are_recorded(name):
    """A change of these digests is a change of numerics, and stands in the changelog."""
    row = lb.recipe(name)
    x, w, bias, g = numbers(5, 150, step=3), numbers(37, 150, step=5), numbers(37, step=11), numbers(5, 37, step=13)
    trained = None
    with lb.use_backend("reference"):
        forward = digest(lb.functional.linear(x, lb.quantize(w, row.weight), bias, row.input))
        if row.trains:
            layer = training_layer(150, 37, row)
            layer.load_state_dict({"weight": w, "bias": bias})
            y = layer(x.requires_grad_())
            y.backward(g / 64)
            # A product of floats is torch's, whose bits are a machine's own.
            gradients = {"grad_input": x.grad, "grad_weight": layer.weight.grad}
            trained = digest(y, *(grad for role, grad in gradients.items() if getattr(row, role).a is not None))
    assert DIGESTS.get(name) == (forward, trained), (
        f"recipe {name!r} computes {(forward, trained)}, and DIGESTS has {DIGESTS.get(name)}; write it there if new"
    )


# -- made by hand ------------------------------------------------------------------------------------------------------
def test_recipes_take_schemes_by_name():
    mine = lb.Recipe(lb.Gemm("int8:row", "int4:group32"), about="4-bit", name="mine")
    assert mine == lb.Recipe(lb.Gemm(lb.Cast(lb.scheme("int8:row")), lb.scheme("int4:group32")), name="mine")
    assert mine.weight is lb.scheme("int4:group32") and mine.input is lb.scheme("int8:row") and not mine.trains
    assert hash(mine) and "mine" in repr(mine)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    assert lb.quantize_(model, mine).layers[0].recipe == "mine" and model[0].recipe.weight == lb.scheme("int4:group32")


def test_a_recipe_without_a_name_is_called_by_its_schemes():
    assert lb.Recipe(lb.Gemm(None, "int4:group32")).name == "int4:group32"
    assert str(lb.Recipe(lb.Gemm("int8:row", "int4:group32"))) == "int8:row x int4:group32"


FORWARD = lb.Gemm("fp8_e4m3:row", "fp8_e4m3:row")
BACK = lb.Gemm("fp8_e5m2:row", "fold")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: lb.Cast("int4:groop32"), ValueError, "groop32"),
        (lambda: lb.Cast(None), TypeError, "a scheme is named by a string, got NoneType"),
        (
            lambda: lb.Cast("int8:row", "up"),
            ValueError,
            "rounding must be one of 'nearest', 'stochastic', 'eden', got 'up'",
        ),
        (
            lambda: lb.Cast("int8:row", rule="best"),
            ValueError,
            "rule must be one of 'amax', 'search', 'four-over-six', got 'best'",
        ),
        (lambda: lb.Cast("fp8_e4m3:row", scale="delayed"), ValueError, r"one fp32 scale .* use fp8_e4m3:tensor"),
        (lambda: lb.Cast("fp8_e4m3:tensor", history=0), ValueError, "at least 1, got 0"),
        (lambda: lb.Cast("nvfp4", "eden"), ValueError, "'eden' and transform='random-hadamard' belong together"),
        (
            lambda: lb.Cast("nvfp4:global_row", "eden", "random-hadamard"),
            ValueError,
            "rounding='eden' needs nvfp4 or nvfp4:T .*, got nvfp4:global_row",
        ),
        (lambda: lb.Gemm("fold", "int8:row"), ValueError, "a cannot be 'fold'"),
        (lambda: lb.Gemm("int8:row", "int8:row", save="all"), ValueError, "save must be one of 'codes'"),
        (lambda: lb.Gemm("int8:row", "dequantize"), ValueError, "multiplies floats, so a must be None, got int8:row"),
        (lambda: lb.Gemm(None, "reuse", save="operand"), ValueError, "needs a Cast or scheme as b, .* got 'reuse'"),
        (lambda: lb.Recipe("int8"), TypeError, r"output must be a Gemm, got 'int8'; write for instance Recipe\(Gemm"),
        (lambda: lb.Recipe(FORWARD, name=3), TypeError, "name must be a string, got int"),
        (lambda: lb.Recipe(lb.Gemm("int8:row", None), name="x"), ValueError, "'x': output.b is the weight"),
        (lambda: lb.Recipe(lb.Gemm(None, "fold")), ValueError, "output.b is the weight, and needs a scheme"),
        (lambda: lb.Recipe(replace(FORWARD, save="high")), ValueError, "save is for backward matmuls"),
        (lambda: lb.Recipe(FORWARD, BACK), ValueError, "has both grad_input and grad_weight"),
        (lambda: lb.Recipe(lb.Gemm(None, "int8:row"), BACK, BACK), ValueError, "forward leaves float; use save='high'"),
        (lambda: lb.Recipe(FORWARD, BACK, replace(BACK, save="high")), ValueError, "b='fold', which needs the codes"),
        (lambda: lb.Recipe(FORWARD, BACK, lb.Gemm(None, None)), ValueError, "use save='high', which saves it"),
    ],
)
def test_refusals(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("cast", "message"),
    [
        (lb.Cast("int8:row", "stochastic"), r"quantize_ does not support rounding='stochastic' of output.b"),
        (
            lb.Cast("int8:tensor", scale="static"),
            "quantize_ does not support static input scales, .*lowbit.calibrate",
        ),
        (lb.Cast("int8:row", rule="search"), "does not support rule='search'"),
    ],
)
def test_what_inference_does_not_do_is_refused(cast, message):
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(ValueError, match=message):
        lb.quantize_(model, lb.Recipe(lb.Gemm(None, cast), name="mine"))
    assert type(model[0]) is nn.Linear
    if cast.rounding == "stochastic":
        refuse_beyond(lb.Recipe(lb.Gemm(None, cast)), "x", ("output.b",), rounding=("stochastic",))


# -- names -------------------------------------------------------------------------------------------------------------
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
        ("NVFP4", "nvfp4", "nvfp4:global_row"),
        ("MXFP4", "mxfp4", "mxfp4"),
        ("INT8", "int8:row", "int8:row"),
    ],
)
def test_what_the_names_of_the_field_mean(alias, weight, input):
    found = lb.recipe(alias)
    assert found.weight == lb.scheme(weight)
    assert found.input == (None if input is None else lb.scheme(input))
    assert alias.upper() in ALIASES or alias.lower() in RECIPES


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("FP8", "FP8 is static per-tensor in llm-compressor; use 'fp8-static:tensor'. 'fp8' has dynamic"),
        ("w8a16", "W8A16 has groups of 128 in compressed-tensors.*'int8-weight-only:group128' or 'int8-weight-only'"),
    ],
)
def test_foreign_names_that_would_mean_another_thing_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        lb.recipe(name)
    static = lb.recipe("fp8-static:tensor")
    assert static.static and (static.weight, static.input) == (lb.scheme("fp8_e4m3:tensor"),) * 2
    assert lb.recipe("nvfp4").input == lb.scheme("nvfp4:global_row") and not lb.recipe("fp8").static
    assert lb.recipe("int8-weight-only:group128").weight == lb.scheme("int8:group128")


def test_the_fields_names_are_aliases():
    for alias, name in ALIASES.items():
        assert lb.recipe(alias) is lb.recipe(alias.lower()) is lb.RECIPES[name]
    assert lb.recipe("INT4_Weight-Only:group32") == lb.recipe("int4-weight-only:group32")
    assert lb.recipe("W4A16:group64").weight == lb.scheme("int4:group64")


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("q4_0", "int4:group32:fp16"),
        ("q4_1", "uint4:group32:fp16:min"),
        ("q5_0", "int5:group32:fp16"),
        ("q5_1", "uint5:group32:fp16:min"),
        ("q8_0", "int8:group32:fp16"),
        ("q4_k", "q4_k"),
        ("q5_k", "q5_k"),
        ("q6_k", "q6_k"),
    ],
)
def test_ggufs_block_types_are_recipes(name, weight):
    row = lb.recipe(name)
    assert row is lb.recipe(name.upper()) is lb.recipe(name.replace("_", "-"))
    assert row.weight == lb.scheme(weight) and row.input is None and not row.trains


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("mxfp4-weight-only", "mxfp4"),
        ("mxfp4-weight-only:ceil", "mxfp4:ceil"),
        ("uint4-weight-only:group32:bf16:min", "uint4:group32:bf16:min"),
        ("INT3_weight_only:group128", "int3:group128"),
        ("fp6_e3m2-weight-only:row", "fp6_e3m2:row"),
        ("uint2-weight-only:group32:affine", "uint2:group32:affine"),
    ],
)
def test_every_scheme_has_a_recipe_of_weights_alone(name, weight):
    found = lb.recipe(name)
    assert found.weight == lb.scheme(weight) and found.input is None and not found.trains
    assert lb.recipe(found.name) == found
    with pytest.raises(ValueError, match="'int3-weight-only' has no valid weight scheme: format 'int3' without"):
        lb.recipe("int3-weight-only")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("int4", "int4-weight-only"),
        ("int4:group128", "int4-weight-only:group128"),
        ("INT4:group32", "int4-weight-only:group32"),
        ("fp8_e4m3:row", "fp8-weight-only:row"),
        ("w8a8x", "W8A8"),
        ("nvpf4", "nvfp4"),
    ],
)
def test_near_misses_name_what_was_meant(name, meant):
    with pytest.raises(
        ValueError, match=rf"unknown recipe '{name}' \(did you mean {meant}\?\); expected one of .*int8"
    ):
        lb.recipe(name)
    assert lb.recipe(meant)


def test_a_scheme_without_a_recipe_says_how_to_make_one():
    with pytest.raises(ValueError, match=r"give Recipe\(Gemm\(None, 'fp6_e3m2:row'\), name='mine'\)"):
        lb.recipe("fp6_e3m2:row")


# -- options -----------------------------------------------------------------------------------------------------------
HIGH, DECODED = lb.Gemm(None, None, save="high"), lb.Gemm(None, "dequantize")


@pytest.mark.parametrize(
    ("name", "same", "grad_input", "grad_weight"),
    [
        ("fp8:grad_weight=high", lb.recipe("fp8").with_products(grad_weight="high"), BACK, HIGH),
        (
            "FP8-TENSOR:grad-input=DEQUANTIZED", lb.recipe("fp8-tensor").with_products(grad_input="dequantized"),
            DECODED, None,
        ),
        (
            "fp8:gradients=e4m3", lb.recipe("fp8").with_gradients("fp8_e4m3"),
            lb.Gemm("fp8_e4m3:row", "fold"), lb.Gemm("fp8_e4m3:col", "fold"),
        ),
        (
            "mxfp8:grad_weight=dequantized:gradients=fp6_e3m2",
            lb.recipe("mxfp8").with_products(grad_weight="dequantized").with_gradients("fp6_e3m2"),
            lb.Gemm("fp6_e3m2:mx:ceil", "mxfp8:ceil:T", "operand"), DECODED,
        ),
        (
            "fp8:gradients=e4m3:grad_weight=high",
            lb.recipe("fp8").with_gradients("fp8_e4m3").with_products(grad_weight="high"),
            lb.Gemm("fp8_e4m3:row", "fold"), HIGH,
        ),
        ("fp8-block:grad_input=low", lb.recipe("fp8-block"), None, None),
    ],
)  # fmt: skip
def test_options_change_how_a_recipe_trains(name, same, grad_input, grad_weight):
    found, base = lb.recipe(name), lb.RECIPES[name.partition(":")[0].lower()]
    assert found == same and lb.recipe(found.name) == found and found.output == base.output
    assert found.grad_input == (grad_input or base.grad_input)
    assert found.grad_weight == (grad_weight or base.grad_weight)
    assert (found.name == base.name) == (found == base)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fp8:products=high", r"unknown option 'products'; options are output=low \| high, grad_input=low \| "),
        ("fp8:gradients=e4m3:gradients=e5m2", "has an option twice"),
        ("fp8:grad_weight=up", "grad_weight must be one of 'low', 'high', 'dequantized', got 'up'"),
        ("fp8:gradients=fp9", "unknown format 'fp9'"),
        ("fp8:grad_input=high:grad_weight=high:gradients=e4m3", "no gradient is quantized"),
        ("nf4:grad_weight=high", "'nf4' is for inference only, and with_products changes backward matmuls"),
        ("fp8:group32:gradients=e4m3", "'fp8:group32' is for inference only"),
    ],
)
def test_options_are_checked(name, message):
    with pytest.raises(ValueError, match=message):
        lb.recipe(name)


def test_another_scaling_is_for_inference():
    assert lb.recipe("fp8:group32").weight == lb.scheme("fp8_e4m3:group32") and not lb.recipe("fp8:group32").trains
    assert lb.recipe("int8", group=64).input == lb.scheme("int8:row") and not lb.recipe("int8", group=64).trains


# -- by layer ----------------------------------------------------------------------------------------------------------
BY_LAYER = {"*": "int4-weight-only", "*.down_proj": "int8", "lm_head": None}


def test_the_last_pattern_that_matches_decides():
    made, layer = layer_recipes(BY_LAYER), nn.Linear(1, 1)
    asked = ("blocks.0.up", "blocks.0.down_proj", "lm_head", "model.lm_head", "model._orig_mod.lm_head")
    found = [recipe_for(made, name, layer) for name in asked]
    assert [row and row.name for row in found] == ["int4-weight-only", "int8", None, None, None]
    assert recipe_for(layer_recipes({"a.*": "int8"}), "b", layer) is None
    assert str(made) == "*: int4-weight-only, *.down_proj: int8, lm_head: float" and str(layer_recipes("nf4")) == "nf4"
    assert made.recipes == (lb.recipe("int4-weight-only"), lb.recipe("int8")) and layer_recipes(made) is made


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, ValueError, "the mapping is empty"),
        ({3: "int8"}, TypeError, "a pattern is a string"),
        ({"*": "int9"}, ValueError, "unknown recipe 'int9'"),
        ({"*": 3}, TypeError, r"expected a recipe for '\*', or None .*got int"),
        ({nn.Linear(1, 1): "int8"}, TypeError, "got Linear; give the module's name"),
        (None, TypeError, "a recipe is a Recipe or one of .*int8"),
    ],
)
def test_plans_are_checked(given, error, message):
    with pytest.raises(error, match=message):
        layer_recipes(given)


@given(
    st.lists(st.sampled_from(["*", "a.*", "*.b", "a.b", "c"]), min_size=1, unique=True),
    st.sampled_from(["a.b", "c", "x"]),
)
def test_a_plan_is_its_last_match(patterns, name):
    names = list(RECIPES)
    mapping = {pattern: names[i] for i, pattern in enumerate(patterns)}
    wanted = [mapping[p] for p in patterns if fnmatchcase(name, p)]
    found = recipe_for(layer_recipes(mapping), name, nn.Linear(1, 1))
    assert (found.name if found else None) == (wanted[-1] if wanted else None)


def test_a_plan_with_functions_is_written_to_no_file():
    def asked(module, path):
        return True

    made = layer_recipes({"*": "int8", asked: None})
    assert str(made) == "*: int8, asked: float"
    with pytest.raises(ValueError, match="recipes by layer: the function asked cannot be written to a file"):
        made.to_dict()


# -- as data -----------------------------------------------------------------------------------------------------------
casts = st.builds(
    lb.Cast,
    st.sampled_from(SCHEMES[:-1]),
    rounding=st.sampled_from(["nearest", "stochastic"]),
    transform=st.sampled_from([None, "hadamard", "signed-hadamard"]),
    scale=st.sampled_from(["current", "static"]),
    rule=st.sampled_from(["amax", "search"]),
    history=st.integers(1, 99),
)


def alike(a: lb.Cast | None, b: lb.Cast, save: str = "codes") -> lb.Gemm:
    """Both operands of a product go through one transform."""
    return lb.Gemm(a and replace(a, transform=b.transform), b, save)


plain = casts.map(lambda cast: replace(cast, transform=None))
backward = st.one_of(
    st.builds(lb.Gemm, st.none() | plain, st.just("reuse"), save=st.sampled_from(["codes", "recompute"])),
    st.builds(alike, casts, casts, save=st.sampled_from(["codes", "recompute", "high", "operand"])),
    st.builds(lb.Gemm, st.none(), plain, save=st.sampled_from(["codes", "recompute", "high", "operand"])),
    st.builds(lb.Gemm, st.none() | plain, st.none(), save=st.just("high")),
    st.builds(lb.Gemm, st.none(), st.just("dequantize")),
)
trained = {
    "forward": st.none() | st.builds(alike, casts, casts),
    "keep_blocks": st.sampled_from([0.0, 0.25]),
    "name": st.text(),
}


made_recipes = st.one_of(
    st.builds(lb.Recipe, st.builds(alike, st.none() | casts, casts), name=st.text()),
    st.builds(lb.Recipe, st.builds(alike, casts, casts), backward, backward, **trained),
)


@given(st.dictionaries(st.text(), st.none() | made_recipes, min_size=1, max_size=3))
def test_recipes_and_plans_survive_json(by_layer):
    made = layer_recipes(by_layer)
    assert LayerRecipes.from_dict(json.loads(json.dumps(made.to_dict(), sort_keys=True))) == made


@pytest.mark.parametrize(
    "data",
    [
        3, [], {}, {"output": 3}, {"output": {"a": None}}, {"output": {"a": 3, "b": "int8:row"}},
        {"output": {"a": None, "b": "int8:rows"}}, {"output": {"a": None, "b": {"rounding": "nearest"}}},
        {"output": {"a": None, "b": {"scheme": 3}}}, {"output": {"a": None, "b": "int8:row"}, "more": 1},
        {"name": 3, "output": {"a": None, "b": "int8:row"}}, {"output": {"a": None, "b": "int8:row", "save": []}},
        {"output": {"a": None, "b": {"scheme": "int8:row", "history": "many"}}},
    ],
)  # fmt: skip
def test_damaged_data_raises_value_error(data):
    with pytest.raises(ValueError):
        lb.Recipe.from_dict(data)
    with pytest.raises(ValueError):
        LayerRecipes.from_dict({"patterns": [["*", data]]})
    with pytest.raises(ValueError, match=r"expected \{'patterns'"):
        LayerRecipes.from_dict(data)
