"""sensitivity: scores against gradients and sums of our own, shared choices, and the recipes that fit a budget."""

from __future__ import annotations

import copy
import itertools
import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowbit as lb


class Language(nn.Module):
    """A language model whose layers share inputs: q, k and v; gate and up."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=i > 1) for i in range(4))
        self.gate, self.up, self.down = nn.Linear(width, 64), nn.Linear(width, 64), nn.Linear(64, width)
        self.lm_head = nn.Linear(width, 20)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> SimpleNamespace:
        x = self.embed(input_ids)
        h = F.layer_norm(x, x.shape[-1:])
        scores = self.q(h) @ self.k(h).transpose(1, 2)
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -1e9)
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask[:, None] == 0, -1e9)
        x = x + self.o(scores.softmax(-1) @ self.v(h))
        h = F.layer_norm(x, x.shape[-1:])
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return SimpleNamespace(logits=self.lm_head(x))


LAYERS = ("q", "k", "v", "o", "gate", "up", "down")
RECIPES = ("int4-weight-only:group32", "int8", "nvfp4")


def expected(model: nn.Module, batches: list[Tensor], recipe: str) -> dict[str, tuple[float, ...]]:
    """Loss and the SQNR of weight, input and output of each layer, by hooks and autograd of our own."""
    sums = {name: torch.zeros(5, dtype=torch.float64) for name in LAYERS}
    for tokens in batches:
        seen: dict[str, tuple[Tensor, Tensor]] = {}

        def keep(name: str, x: Tensor, y: Tensor, seen: dict = seen) -> None:
            y.retain_grad()
            seen[name] = x.detach(), y

        hooks = [
            getattr(model, name).register_forward_hook(lambda m, x, y, name=name: keep(name, x[0], y))
            for name in LAYERS
        ]
        logits = model(tokens).logits
        losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="sum")
        losses.backward()
        for hook in hooks:
            hook.remove()
        for name, (x, y) in seen.items():
            layer, found = getattr(model, name), lb.recipe(recipe)
            weight = lb.quantize(layer.weight.detach(), found.weight).dequantize(torch.float32).double()
            rounded = x.double() if found.input is None else lb.fake_quantize(x, found.input).double()
            plain = x.double() @ layer.weight.double().T
            wrong = rounded @ weight.T - plain
            sums[name] += torch.stack(
                [
                    (wrong * y.grad.double()).square().sum(),
                    x.double().square().sum(), (rounded - x).square().sum(),
                    plain.square().sum(), wrong.square().sum(),
                ]
            ).detach()  # fmt: skip
    found = {}
    for name, (loss, x, dx, y, dy) in ((name, total.tolist()) for name, total in sums.items()):
        weight = getattr(model, name).weight.detach()
        q = lb.quantize(weight, lb.recipe(recipe).weight).dequantize(torch.float32)
        dw = float((q.double() - weight.double()).square().sum())
        signal = float(weight.double().square().sum())
        found[name] = loss, *(10 * math.log10(a / b) if b else math.inf for a, b in ((signal, dw), (x, dx), (y, dy)))
    return found


def test_scores_are_those_of_the_definition():
    model = Language()
    batches = [torch.randint(20, (2, 9 + i)) for i in range(3)]
    found = lb.sensitivity(model, RECIPES, batches, method="nearest")
    assert found.by == "loss" and all(p.grad is None and p.requires_grad for p in model.parameters())
    for recipe in RECIPES:
        for name, values in expected(model, batches, recipe).items():
            score = found.scores[name][recipe]
            assert (score.loss, score.weight, score.input, score.output) == pytest.approx(values, rel=1e-3)


class Bare(Language):
    """Answers with the logits alone."""

    def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        logits: Tensor = super().forward(input_ids).logits
        return logits


class Decoder(Language):
    """Is given as many ids that its logits are not of."""

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> SimpleNamespace:  # type: ignore[override]
        return super().forward(decoder_input_ids)


class Silent(Bare):
    def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids).detach()


def test_the_loss_is_that_of_calibrate():
    model, tokens = Language(), torch.randint(20, (2, 9))
    found = lb.sensitivity(model, RECIPES, [tokens])
    for other, batch in (
        (Bare(), tokens),
        (Decoder(), {"input_ids": torch.zeros_like(tokens), "decoder_input_ids": tokens}),
    ):
        other.load_state_dict(model.state_dict())
        assert lb.sensitivity(other, RECIPES, [batch]).scores == found.scores
    assert found.by == "loss"
    assert lb.sensitivity(Silent(), RECIPES, [tokens]).by == "output"


@pytest.mark.parametrize(
    "recipe", ["int8", "int8-weight-only", "fp8-tensor", "int8:tensor", "uint4-weight-only:group32"]
)
def test_a_convolution_is_scored_by_what_its_quantized_layer_answers(recipe):
    """Each layer is quantized alone, and its outputs are compared with those of the plain one."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, groups=8),
        nn.Conv2d(8, 6, 1, bias=False),
    ).eval()  # fmt: skip
    batches = [torch.randn(2, 3, 9, 9), torch.randn(1, 3, 7, 7)]
    found = lb.sensitivity(model, [recipe, None], batches, skip=())
    assert found.by == "output" and set(found.scores) == {
        row.name for row in lb.quantize_(copy.deepcopy(model), recipe, skip=()).layers
    }
    for name, scores in found.scores.items():
        wrong = whole = 0.0
        quantized = nn.Sequential(copy.deepcopy(model[int(name)]))
        lb.quantize_(quantized, recipe, skip=())
        for x in batches:
            with torch.no_grad():
                for layer in model[: int(name)]:
                    x = layer(x)
                y, got = model[int(name)](x), quantized(x)
            bias = 0 if model[int(name)].bias is None else model[int(name)].bias.detach()[:, None, None]
            wrong += float((got.double() - y.double()).square().sum())
            whole += float((y - bias).double().square().sum())
        assert scores[recipe].loss == pytest.approx(wrong / whole, rel=1e-3) and scores["float"].loss == 0
    assert found.choose(bits=32) == dict.fromkeys(found.scores)


@pytest.mark.parametrize("recipes", [("int8", "int8-weight-only"), ("int8-weight-only", "int8")])
def test_layers_that_only_some_recipes_quantize_are_left_out_by_name(recipes):
    """A depthwise convolution has no product in int8 that is worth it, unless it is named."""
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 4, 1))
    with pytest.warns(UserWarning, match="leaves out 1 layers that not all of the recipes quantize, such as 0"):
        found = lb.sensitivity(model, recipes, [torch.randn(2, 8, 6, 6)], skip=())
    assert list(found.scores) == ["1"]


def test_a_convolution_counts_in_the_loss():
    model = nn.Sequential(nn.Conv1d(4, 6, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3))
    x = torch.randn(8, 4, 5)
    found = lb.sensitivity(model, ["int8"], [x], skip=(), loss=lambda y, batch: y.square().sum())
    y = model[0](x)
    y.retain_grad()
    model[1:](y).square().sum().backward()
    layer = nn.Sequential(copy.deepcopy(model[0]))
    lb.quantize_(layer, "int8", skip=())
    expected = ((layer(x) - y) * y.grad).double().square().sum().item()
    assert found.by == "loss" and found.scores["0"]["int8"].loss == pytest.approx(expected, rel=1e-2)


def test_layers_that_are_given_one_tensor_share_a_choice():
    model = Language()
    found = lb.sensitivity(model, RECIPES, [torch.randint(20, (2, 8))])
    assert found.groups == (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
    model.down.weight = nn.Parameter(torch.randn(32, 64))
    model.o.weight = model.q.weight
    tied = lb.sensitivity(model, RECIPES, [torch.randint(20, (2, 8))])
    assert tied.groups == (("q", "k", "v", "o"), ("gate", "up"), ("down",))
    chosen = tied.choose(bits=6)
    assert tied.bits(chosen) <= 6 and tied.size(chosen) == lb.quantize_(model, chosen).bytes_after


def test_layers_share_no_choice_where_one_batch_tells_them_apart():
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor, apart: bool) -> Tensor:
            return self.a(x) + self.b(x * 2 if apart else x)

    x = torch.randn(4, 16)
    assert lb.sensitivity(Branching(), ["int8"], [(x, False), (x, False)]).groups == (("a", "b"),)
    assert lb.sensitivity(Branching(), ["int8"], [(x, False), (x, True)]).groups == (("a",), ("b",))


@pytest.mark.parametrize("budget", [{"bits": 5.0}, {"bits": 6.3}, {"size": 12_000}, {"bits": 99.0}])
def test_the_plan_is_the_best_that_fits_and_quantizes_to_the_size_it_says(budget):
    model = Language()
    recipes = (*RECIPES, None)
    found = lb.sensitivity(model, recipes, [torch.randint(20, (2, 16)) for _ in range(2)])
    chosen = found.choose(**budget)
    fits = (
        (lambda one: found.bits(one) <= budget["bits"]) if "bits" in budget else lambda one: found.size(one) <= 12_000
    )
    values = [None if r is None else lb.recipe(r) for r in recipes]
    plans = [
        {name: one for group, one in zip(found.groups, row, strict=True) for name in group}
        for row in itertools.product(values, repeat=len(found.groups))
    ]
    assert fits(chosen)
    assert found.loss(chosen) == pytest.approx(min(found.loss(one) for one in plans if fits(one)), rel=1e-9)
    if budget == {"bits": 99.0}:
        assert set(chosen.values()) == {None}
        return
    report = lb.quantize_(model, chosen)
    assert report.bytes_after == found.size(chosen)
    if None not in chosen.values():
        assert report.bits == pytest.approx(found.bits(chosen))


def test_a_layer_whose_name_ends_anothers_keeps_its_own_recipe():
    model = nn.Sequential(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), nn.Linear(32, 32))
    found = lb.sensitivity(model, ["int4-weight-only:group32", "int8-weight-only"], [torch.randn(8, 32)], skip=())
    for bits in (5.0, 6.5, 8.0, 9.0):
        chosen = found.choose(bits=bits)
        assert list(chosen) == ["1", "0.0", "0.1"]
        report = lb.quantize_(copy.deepcopy(model), chosen, skip=())
        assert {layer.name: layer.recipe for layer in report.layers} == {n: r.name for n, r in chosen.items()}


def test_padding_counts_for_nothing():
    model = Language()
    tokens = torch.randint(20, (1, 8))
    padded = {
        "input_ids": torch.cat([tokens, torch.randint(20, (1, 5))], 1),
        "attention_mask": torch.cat([torch.ones(1, 8), torch.zeros(1, 5)], 1).long(),
    }
    plain, masked = (lb.sensitivity(model, ["int8"], [batch]) for batch in (tokens, padded))
    for name in LAYERS:
        a, b = plain.scores[name]["int8"], masked.scores[name]["int8"]
        assert (a.loss, a.input, a.output) == pytest.approx((b.loss, b.input, b.output), rel=1e-4)


@pytest.mark.parametrize("recipes", ["int8", {"*": "int8"}, lb.recipe("int8")])
def test_one_recipe_is_no_choice(recipes):
    with pytest.raises(TypeError, match=r"expected a list of recipes to choose from.*got a"):
        lb.sensitivity(nn.Sequential(nn.Linear(4, 4)), recipes, [torch.randn(2, 4)])


def test_without_a_loss_the_errors_of_outputs_count_and_a_loss_can_be_given():
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 8))
    batches = [torch.randn(16, 32)]
    found = lb.sensitivity(model, ["int4-weight-only:group32"], batches, skip=())
    assert found.by == "output"
    for name in ("0", "2"):
        score = found.scores[name]["int4-weight-only:group32"]
        assert score.loss == pytest.approx(10 ** (-score.output / 10))
    given_ = lb.sensitivity(
        model, ["int4-weight-only:group32"], batches, skip=(), method="nearest",
        loss=lambda output, batch: output.square().sum(),
    )  # fmt: skip
    x, w = batches[0].double(), model[2].weight.detach()
    h = model[1](model[0](batches[0])).detach().double()
    wrong = h @ (lb.quantize(w, "int4:group32").dequantize(torch.float32).double() - w).T
    grad = 2 * model(batches[0]).detach().double()
    score = given_.scores["2"]["int4-weight-only:group32"].loss
    assert (
        given_.by == "loss"
        and x.shape[0] == 16
        and score == pytest.approx(float((grad * wrong).square().sum()), rel=1e-3)
    )


def test_what_it_refuses_and_warns_of():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    x = torch.randn(4, 16)
    for recipes, batches, more, match in (
        ([], [x], {}, "expected recipes to choose from"),
        ([None], [x], {}, "expected recipes to choose from"),
        (["int8"], [], {}, "expected batches"),
        (["int8-static"], [x], {}, "static"),
        (["int8"], [x], {"method": "gptq"}, "a data-free method"),
        (["int8"], [x], {"method": "signed"}, None),
        (["nf4"], [x], {"method": "hqq"}, "layer '0': method 'hqq' does not support this weight"),
        (["int8"], [x], {"loss": lambda y, batch: y.sum() * math.nan}, "the loss is nan"),
    ):
        if match is None:
            lb.sensitivity(model, recipes, batches, skip=(), **more)
            continue
        with pytest.raises(ValueError, match=match):
            lb.sensitivity(model, recipes, batches, skip=(), **more)
    found = lb.sensitivity(model, ["int8", "nf4"], [x], skip=())
    for wrong in ({}, {"bits": 4.0, "size": 100}, {"bits": math.inf}, {"bits": math.nan}, {"size": math.inf}):
        with pytest.raises(ValueError, match=r"expected bits per weight, such as bits=4\.5, or the size"):
            found.choose(**wrong)
    with pytest.raises(ValueError, match=r"the smallest choice needs .* bits per weight"):
        found.choose(bits=1.0)

    class Experts(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[0](x)

    with pytest.warns(UserWarning, match="no batch reaches 1 layers, such as 1"):
        lb.sensitivity(Experts(nn.Linear(16, 16), nn.Linear(16, 16)), ["int8"], [x])


@pytest.mark.parametrize("measure", [
    lambda model, batches: lb.sensitivity(model, ["int8"], batches),
    lambda model, batches: lb.calibrate(model, "int8", batches, "gptq"),
], ids=["sensitivity", "calibrate"])  # fmt: skip
def test_what_is_no_list_of_batches_is_told_in_words(measure):
    model, tokens = Language(), torch.randint(20, (1, 8))
    for one in (tokens, {"input_ids": tokens}):
        with pytest.raises(
            TypeError, match=r"batches: expected several of them, got one (Tensor|dict); write \[batch\]"
        ):
            measure(model, one)
    for lists in ([[1, 2, 3], [4, 5]], [[[1, 2, 3]]], [{"input_ids": [[1, 2, 3]]}]):
        with pytest.raises(
            TypeError, match=r"numbers in lists are no batch; make a tensor of them.*return_tensors='pt'"
        ):
            measure(model, lists)
    measure(model, iter([(tokens,), [tokens, None], {"input_ids": tokens}]))


def test_it_prints_is_json_and_is_drawn(tmp_path, monkeypatch):
    found = lb.sensitivity(Language(), [*RECIPES, None], [torch.randint(20, (2, 8))])
    rows = json.loads(json.dumps(found.to_dict(), allow_nan=False))["scores"]
    assert len(rows) == 7 * 4 and {row["recipe"] for row in rows} == {*RECIPES, "float"}
    lines = str(found).splitlines()
    assert len(lines) == 1 + 7 * 4 and "nvfp4" in str(found)
    assert len({len(line) for line in lines}) == 1, "the columns end together"
    pytest.importorskip("matplotlib")
    found.plot(tmp_path / "s.png")
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        found.plot(tmp_path / "s.png")


def test_the_layers_that_lose_the_most_stand_by_themselves():
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    with torch.no_grad():
        model[2].weight[:, 0] = 100  # an outlier in each row
    found = lb.sensitivity(model, ["int8-weight-only", "int4-weight-only"], [torch.randn(64, 32)], skip=())
    assert len(str(found).splitlines()) == 1 + 2 and "*" in str(found)
    lines = found.table(every_layer=True).splitlines()
    assert len(lines) == 1 + 4 * 2 and [line.split()[0] for line in lines[1:5]] == ["0", "1", "2", "3"]
    worst = found.worst(2)
    losses = [found.scores[name]["int4-weight-only"].loss for name in "0123"]
    assert [score.loss for score in worst] == sorted(losses)[:1:-1] and len(found.worst()) == 4
    assert {score.recipe for score in worst} == {"int4-weight-only"}
