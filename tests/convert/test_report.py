"""What quantize_ reports: numbers against sums of our own, the table, JSON, and the warning of a small effect."""

from __future__ import annotations

import inspect
import json
import math
import warnings
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lowbit as lb
from lowbit.report import LayerReport, Report, families


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.lm_head = nn.LayerNorm(32), nn.Linear(32, 8)


class Experts(nn.Module):
    """Matrices stacked in one parameter, as in transformers' mixtures of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(4, 64, 32))


def exact_decibel(weight: torch.Tensor, decoded: torch.Tensor) -> float:
    """The signal-to-noise ratio by exact rationals."""
    pairs = [
        (Fraction(w), Fraction(d)) for w, d in zip(weight.flatten().tolist(), decoded.flatten().tolist(), strict=True)
    ]
    noise = sum((w - d) ** 2 for w, d in pairs)
    return 10 * math.log10(sum(w * w for w, _ in pairs) / noise) if noise else math.inf


@pytest.mark.parametrize("recipe", ["int8", "int4-weight-only:group16", "nvfp4", "uint4-weight-only", "mxfp8"])
def test_numbers_of_each_layer(recipe):
    model = Model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    report = lb.quantize_(model, recipe)
    assert report.converted == ("blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down")
    for row in report.layers:
        weight, q = before[f"{row.name}.weight"], model.get_submodule(row.name).weight
        bias = before.get(f"{row.name}.bias", torch.zeros(0))
        assert (row.kind, row.recipe, row.weights) == ("Linear", recipe, weight.numel())
        held = sum(part.numel() * part.element_size() for part in q.parts.values())
        assert row.bits == 8 * held / weight.numel()
        assert row.bytes_before == 4 * (weight.numel() + bias.numel()) and row.bytes_after == held + 4 * bias.numel()
        assert row.sqnr == pytest.approx(exact_decibel(weight, q.dequantize(torch.float32)), rel=1e-6)
    assert report.bytes_before == sum(4 * p.numel() for p in before.values())
    assert report.bytes_after == sum(p.numel() * p.element_size() for p in model.parameters())
    weights = sum(row.weights for row in report.layers)
    assert report.bits == pytest.approx(sum(row.bits * row.weights for row in report.layers) / weights)


def test_a_weight_without_error_and_one_of_zeros():
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.randint(-127, 128, (16, 16)).float())
        model[0].weight[:, 0] = 127
        model[1].weight.zero_()
    report = lb.quantize_(model, "int8")
    assert [row.sqnr for row in report.layers] == [math.inf, math.inf]
    assert [row["sqnr"] for row in json.loads(json.dumps(report.to_dict(), allow_nan=False))["layers"]] == [None, None]


def test_json_data_holds_everything():
    model = Model()
    model.experts = Experts()
    with pytest.warns(UserWarning, match="experts"):
        report = lb.quantize_(model, {"*": "int8", "*.1.down": None})
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["what"] == "quantize_" and data["recipe"] == "int8"
    assert [row["name"] for row in data["layers"]] == list(report.converted)
    assert data["skipped"] == ["blocks.1.down"] and set(data["left"]) == {"lm_head", "experts"}
    assert (data["bytes_before"], data["bytes_after"]) == (report.bytes_before, report.bytes_after)
    assert data["layers"][0]["sqnr"] == report.layers[0].sqnr


def test_it_prints_as_a_table_with_a_row_for_each_layer_and_the_reasons():
    model = Model()
    model.conv = nn.ConvTranspose1d(4, 4, 1)
    text = str(lb.quantize_(model, {"*": "int8", "*.down": "nf4", "blocks.0.up": None}))
    lines = text.splitlines()
    assert lines[0].startswith("quantize_ int8 and nf4: 3 layers converted, ")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert [row[:4] for row in rows] == [
        ["blocks.0.down", "Linear", "nf4", "4.50"],
        ["blocks.1.up", "Linear", "int8", "9.00"],
        ["blocks.1.down", "Linear", "nf4", "4.50"],
    ]
    assert "skipped: blocks.0.up" in lines
    assert "left conv: the class ConvTranspose1d is not supported" in lines
    assert any(line.startswith("left lm_head: an output layer stays in high precision") for line in lines)


def test_a_report_of_nothing_has_no_table():
    model = nn.Sequential(nn.Linear(4, 4))
    lb.quantize_(model, "int8")
    assert str(lb.unprepack_(model)) == "unprepack_: 0 layers converted\nleft 0: not packed"


def test_long_models_print_a_row_for_layers_that_came_out_alike():
    report = lb.quantize_(Model(30), "int8")
    rows = [line for line in str(report).splitlines() if line.startswith("│")]
    assert len(rows) == 2 and "30 x blocks.*.up" in rows[0] and "30 x blocks.*.down" in rows[1]
    assert report.table(every_layer=True).row_count == len(report.layers) == 60


def test_names_with_brackets_print_as_they_are():
    model = nn.ModuleDict({"[red]": nn.Linear(16, 16)})
    assert "[red]" in str(lb.quantize_(model, "int8"))


@given(st.lists(st.tuples(st.sampled_from(["a.0", "a.1", "b.0.c", "b.1.c", "d"]), st.sampled_from(["x", "y"]))))
@settings(max_examples=50)
def test_families_lose_no_layer(pairs):
    layers = [LayerReport(name, "Linear", recipe, 4, 8.0, 16, 4) for name, recipe in pairs]
    grouped = families(layers)
    assert sorted(map(str, (layer for _, several in grouped for layer in several))) == sorted(map(str, layers))
    assert all(len({(one.recipe, one.kind) for one in several}) == 1 for _, several in grouped)


def test_a_report_is_no_model():
    report = lb.quantize_(Model(), "int8")
    with pytest.raises(TypeError, match=r"quantize_ changes the model in place and returns a Report, not a model"):
        report(torch.randn(2, 32))
    assert isinstance(report, Report) and "4 layers converted" in repr(report) and "\n" not in repr(report)


# -- the warning ------------------------------------------------------------------------------------------------------
def test_a_conversion_of_less_than_half_the_weights_names_what_was_left():
    model = Model()
    model.experts = Experts()
    with pytest.warns(
        UserWarning, match=r"converted 32.00 KiB of 65.00 KiB of weights; left: experts \(Experts, 32.00"
    ) as caught:
        report = lb.quantize_(model, "int8")
    assert caught[0].filename == __file__
    assert report.left["experts"].startswith("Experts holds stacked matrices (gate_up [4, 64, 32])")


def test_tokens_and_positions_are_no_weights_of_a_product():
    """The parameters of torchvision's vision transformers, and of others with windows or queries that are learned."""

    def holder(**shapes: tuple[int, ...]) -> nn.Module:
        made = nn.Sequential(nn.Linear(32, 32))
        for name, shape in shapes.items():
            made.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        return made

    model = nn.ModuleDict(
        {
            "tokens": holder(class_token=(1, 1, 32), register_tokens=(4, 32)),
            "encoder": holder(pos_embedding=(1, 17, 32)),
            "window": holder(relative_position_bias_table=(9, 4)),
            "pool": holder(query=(1, 8, 32)),
            "mixed": holder(class_token=(1, 1, 32), stack=(3, 32, 32)),
            "row": holder(proj=(1, 32)),
        }
    )
    left = lb.quantize_(model, "int8").left
    assert left == {
        "mixed": "Sequential holds stacked matrices (stack [3, 32, 32]), and its class is not supported",
        "row": "the class Sequential is not supported",
    }


@pytest.mark.parametrize(
    ("recipe", "options"),
    [("int8", {"skip": ("blocks.0", "lm_head")}), ({"*": "int8", "blocks.0*": None}, {})],
    ids=str,
)
def test_what_was_skipped_as_asked_is_no_surprise(recipe, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = nn.Module()
        model.blocks, model.big = nn.ModuleList([nn.Linear(64, 64), nn.Linear(16, 16)]), nn.Identity()
        assert lb.quantize_(model, recipe, **options).converted == ("blocks.1",)


def test_shared_weights_count_once():
    model = nn.ModuleDict(
        {"embed": nn.Embedding(16, 32), "body": nn.Linear(32, 17), "head": nn.Linear(32, 16, bias=False)}
    )
    model["head"].weight = model["embed"].weight
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert lb.quantize_(model, "int8").converted == ("body",)


def in_place() -> dict[str, inspect.Signature]:
    """The public functions that change a model in place."""
    spaces = {"": lb, "convert.": lb.convert, "memory.": lb.memory, "qat.": lb.qat, "train.": lb.train}
    names = {f"{path}{name}": getattr(space, name) for path, space in spaces.items() for name in space.__all__}
    signatures = {name: inspect.signature(f) for name, f in names.items() if name.endswith("_") and callable(f)}
    return {name: found for name, found in signatures.items() if "model" in found.parameters}


def test_every_function_that_changes_a_model_returns_a_report():
    found = in_place()
    assert {"quantize_", "fuse_requantize_", "unprepack_", "fold_", "train.convert_", "memory.checkpoint_"} <= set(
        found
    )
    assert {name for name, signature in found.items() if signature.return_annotation != "Report"} == set()


def test_functions_on_a_model_take_its_recipe_then_batches():
    looking = {"calibrate": inspect.signature(lb.calibrate), "sensitivity": inspect.signature(lb.sensitivity)}
    order = ("model", "recipe", "recipes", "batches")
    for name, signature in {**in_place(), **looking}.items():
        places = [list(signature.parameters).index(word) for word in order if word in signature.parameters]
        assert places[0] == 0 and places == sorted(places), name
        assert "skip" not in signature.parameters or signature.parameters["skip"].kind is inspect.Parameter.KEYWORD_ONLY
