"""Times of layers: which calls are measured, and the recipes that fit a time, with clocks of our own."""

from __future__ import annotations

import copy
import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.plan import layer_times

RECIPES = ("int8", "int8-weight-only", None)


class Clock:
    """Instead of running, a quantized layer takes ``factors[recipe]`` times as long as the plain one."""

    def __init__(self, **factors: float) -> None:
        self.factors, self.runs = factors, 0

    def __call__(self, run, device, times):
        self.runs += 1
        run()
        layer = run.func
        plain = not hasattr(layer, "recipe")
        size = run.args[0].numel() * (layer.weight.shape[0] if plain else layer.out_features)
        return 1e-9 * size * (1.0 if plain else self.factors[layer.recipe.name.replace("-", "_")])


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.wide = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 64)
        self.unused = nn.Linear(16, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.wide(self.second(self.first(self.first(x)).relu()).relu())
        return y


@pytest.fixture
def clock(monkeypatch):
    made = Clock(int8=0.5, int8_weight_only=1.5)
    monkeypatch.setattr(layer_times, "fastest", made)
    return made


def found(model: nn.Module, rows: int = 4, recipes=RECIPES) -> lb.Sensitivity:
    return lb.sensitivity(model, recipes, [torch.randn(rows, 16)], skip=(), time=True)


def test_every_call_counts_and_every_kind_is_measured_once(clock):
    model = Twice()
    state, hooks = copy.deepcopy(model.state_dict()), [len(m._forward_pre_hooks) for m in model.modules()]
    with pytest.warns(UserWarning, match="no batch reaches 1 layers, such as unused"):
        times = found(model)
    one, wide = 1e-9 * 4 * 16 * 16, 1e-9 * 4 * 16 * 64
    assert times.plain_seconds == pytest.approx({"first": 2 * one, "second": one, "wide": wide, "unused": 0.0})
    for name, factor in (("int8", 0.5), ("int8-weight-only", 1.5), ("float", 1.0)):
        for layer, seconds in times.plain_seconds.items():
            assert times.scores[layer][name].seconds == pytest.approx(factor * seconds)
    assert clock.runs % 3 == 0 and clock.runs <= 2 * 3 * 31  # two kinds of calls, in three forms
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items() if name != "calls")
    assert hooks == [len(m._forward_pre_hooks) for m in model.modules()]


def test_buffers_are_restored():
    model = Twice()
    before = model.calls.clone()
    layer_times.layer_times(model, ["wide"], {"int8": lb.recipe("int8")}, torch.randn(2, 16), lambda *_: None)
    assert torch.equal(model.calls, before) and not model.wide._forward_pre_hooks


def test_a_layer_gets_a_recipe_only_if_that_is_faster():
    times = replace_times(plain=10.0, seconds={"int8": (4.0, 9.7, 12.0), "int8-weight-only": (6.0, 9.8, 11.0)})
    assert names(times.choose(time=True)) == ["int8", None, None]
    assert times.seconds(times.choose(time=True)) == pytest.approx(24.0)
    without = replace(
        times, recipes={name: recipe for name, recipe in times.recipes.items() if recipe is not None},
        scores={name: {r: s for r, s in rows.items() if r != "float"} for name, rows in times.scores.items()},
    )  # fmt: skip
    assert names(without.choose(time=True)) == ["int8", "int8", "int8-weight-only"]


def replace_times(plain: float, seconds: dict[str, tuple[float, ...]]) -> lb.Sensitivity:
    """Scores of three layers with these times."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    measured = lb.sensitivity(model, RECIPES, [torch.randn(8, 16)], skip=())
    seconds = seconds | {"float": (plain,) * 3}
    scores = {
        layer: {name: replace(score, seconds=seconds[name][k]) for name, score in rows.items()}
        for k, (layer, rows) in enumerate(measured.scores.items())
    }  # fmt: skip
    return replace(measured, scores=scores, plain_seconds=dict.fromkeys(scores, plain))


def names(chosen: dict[str, lb.Recipe | None]) -> list[str | None]:
    return [None if recipe is None else recipe.name for recipe in chosen.values()]


@pytest.mark.parametrize("limit", [0.47, "0.6x", 0.75, "1x", 2])
def test_the_choice_loses_the_least_within_the_time(limit):
    times = replace_times(plain=10.0, seconds={"int8": (4.0, 5.0, 5.1), "int8-weight-only": (6.0, 9.8, 11.0)})
    share = float(str(limit).removesuffix("x"))
    chosen = times.choose(time=limit)
    recipes = list(times.recipes.values())
    plans = [dict(zip(times.scores, row, strict=True)) for row in itertools.product(recipes, repeat=3)]
    fits = [plan for plan in plans if times.seconds(plan) <= share * 30.0]
    assert times.seconds(chosen) <= share * 30.0
    assert times.loss(chosen) == pytest.approx(min(times.loss(plan) for plan in fits))


def test_errors_and_tables(clock):
    model = nn.Sequential(nn.Linear(16, 16))
    plain = lb.sensitivity(model, RECIPES, [torch.randn(4, 16)], skip=())
    for call in (lambda: plain.choose(time=True), lambda: plain.seconds(plain.choose(bits=32))):
        with pytest.raises(ValueError, match=r"no times were measured; pass time=True to lowbit\.sensitivity"):
            call()
    times = found(model)
    for wrong in ({"time": "fast"}, {"time": False}, {"time": 0}, {"time": math.inf}, {"time": 0.5, "bits": 4.0}):
        with pytest.raises(ValueError, match="expected bits per weight"):
            times.choose(**wrong)
    with pytest.raises(ValueError, match=r"the fastest choice takes 0\.500x the time of the plain layers"):
        times.choose(time="0.4x")
    lines = str(times).splitlines()
    assert lines[0].split()[-1] == "time" and [line.split()[-1] for line in lines[1:]] == ["0.50x", "1.50x", "1.00x"]
    data = json.loads(json.dumps(times.to_dict(), allow_nan=False))
    assert data["plain_seconds"].keys() == {"0"} and all(row["seconds"] > 0 for row in data["scores"])


@pytest.mark.parametrize("make, x", [
    (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8)), (2, 3, 8, 8)),
    (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (2, 5, 16)),
], ids=["convolutions", "encoder"])  # fmt: skip
def test_layers_of_all_kinds_are_measured(make, x):
    recipe = "int8:tensor" if len(x) == 4 else "int8"
    model = make().eval()
    times = lb.sensitivity(model, [recipe, None], [torch.randn(*x)], skip=(), time=True)
    assert all(score.seconds > 0 for rows in times.scores.values() for score in rows.values())
    assert set(times.choose(time=True)) == set(times.scores) == set(times.plain_seconds)
