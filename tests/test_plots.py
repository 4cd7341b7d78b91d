"""Plots can be read: text of 8 points and more, a legend for each line, titles in words, the worst of many layers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.plan.bits import Score, Sensitivity
from lowbit.train.watch_plot import drawn
from lowbit.train.watch_rows import Row

figures = pytest.importorskip("matplotlib.figure")
text = pytest.importorskip("matplotlib.text")
ROLES = [f"{product}.{side}" for product in ("output", "grad_input", "grad_weight") for side in "ab"]


def seen(layers, roles=ROLES, steps=(0, 100, 200)):
    """Rows in which the last layers of each role lose most."""
    return [
        Row(
            step=step, layer=layer, role=role, cast="fp8", elements=1, nonfinite=0, amax=1.0, overflow=0.0,
            underflow=number / 1000, saturated=0.0, sqnr=math.inf if number == 0 else 40.0 - number,
        )
        for step, role, (number, layer) in itertools.product(steps, roles, enumerate(layers))
    ]  # fmt: skip


@pytest.fixture
def saved(monkeypatch):
    """The figures that are saved, which are laid out and not written."""
    found = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda self, *_, **__: found.append(self))
    return found


def legible(figure) -> set[str]:
    """What is written on a figure, of which nothing is small, outside of it, or a line without a legend."""
    figure.draw_without_rendering()
    inches = figure.get_size_inches()
    assert inches[0] <= 9, "wider than a page, so that text would shrink"
    shown = [one for one in figure.findobj(text.Text) if one.get_visible() and one.get_text().strip()]
    assert min(one.get_fontsize() for one in shown) >= 8
    for one in shown:
        box = one.get_window_extent()
        ends = (-1, inches[0] * figure.dpi + 1)  # ticks beyond the axes are not drawn
        assert not any(box.x0 < end < box.x1 for end in ends), one.get_text()
    keys = [key for legend in figure.findobj(type(figure.legend([]))) for key in legend.legend_handles]
    named = {_style(key) for key in keys if hasattr(key, "get_linestyle") and hasattr(key, "get_marker")}
    for axes in figure.axes:
        assert {_style(line) for line in axes.lines} <= named, axes.get_title()
    return {one.get_text() for one in shown}


def _style(line) -> tuple:
    return line.get_color(), line.get_linestyle(), line.get_marker()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("layers", [1, 3, 40])
def test_watched_operands_have_titles_in_words_and_the_worst_layers_are_shown(layers):
    names = [f"model.layers.{number}.self_attn.projection_of_queries" for number in range(layers)]
    words = legible(drawn(seen(names)))
    assert "Gradient of the output\nin the matmul for the input's gradient (grad_input.a)" in words
    assert "Input of the layer\nin the matmul for the weight's gradient (grad_weight.b)" in words
    assert not words & set(ROLES)
    if layers == 40:
        assert {"Became zero (underflow)\nthe 10 worst of 40 layers", "37 other layers"} <= words
        assert "39.self_a…jection_of_queries" in words
        assert any("layers are named without 'model.layers.'" in one for one in words)
        assert not any(one.startswith("29.") for one in words)
    else:
        assert "Became zero (underflow)\nall layers" in words


def test_layers_are_in_the_model_s_order_in_every_heat_map():
    """Backward meets layers the other way round."""
    forward = seen(["a.x", "a.y"], roles=["output.a"])
    backward = seen(["a.y", "a.x"], roles=["grad_input.a"])
    figure = drawn(forward + backward)
    heats = [axes for axes in figure.axes if axes.get_title("left").startswith("Became zero")]
    assert [[tick.get_text() for tick in axes.get_yticklabels()] for axes in heats] == [["x", "y"]] * 2


def test_figures_that_are_not_finite_are_no_obstacle():
    rows = [Row(**{**vars(row), "sqnr": value}) for row in seen(["a"], ["output.a"]) for value in (math.nan, math.inf)]
    assert "training step" in legible(drawn(rows))


def trained(model, batch):
    model(batch).square().mean().backward()


def test_a_profile_names_its_phases_and_its_peak(saved, tmp_path):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)))
    lb.memory.checkpoint_(model)
    estimate = lb.estimate(model, torch.randn(8, 16), lambda y, x: y.square().mean())
    estimate.plot(tmp_path / "estimate.png")
    with lb.memory.profile(model) as profile:
        trained(model, torch.randn(8, 16))
    profile.plot(tmp_path / "profile.png")
    for figure in saved:
        words = legible(figure)
        assert {"forward", "recomputation", "backward", "parameters", "activations"} <= words
        assert any(one.startswith("peak, ") for one in words) and "memory held, MiB" in words
        assert not any("(outside)" in one for one in words)
    assert "step" in legible(saved[0])


@pytest.mark.parametrize("layers", [5, 90])
def test_sensitivities_name_their_layers(saved, tmp_path, layers):
    def score(number):
        return Score(f"layers.{number}", "int8", 10, 10, float(number + 1), 20.0, 20.0, 20.0)

    scores = {f"layers.{number}": {"int8": score(number)} for number in range(layers)}
    Sensitivity(scores, (), {"int8": lb.recipe("int8")}, "loss", 0).plot(tmp_path / "s.png")
    words = legible(saved[0])
    title = "Loss of each layer with each recipe, "
    assert title + ("all layers" if layers == 5 else "the 40 worst of 90 layers") in words
    assert ("layers.0" in words) == (layers == 5) and f"layers.{layers - 1}" in words
