"""Watched training: figures against casts of torch and ml_dtypes, no bit changed, and the first NaN by its name."""

from __future__ import annotations

import copy
import json
import math
import pickle

import ml_dtypes
import numpy as np
import pytest
import torch
from support.bits import same_bits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lowbit as lb
from lowbit.train import TrainLinear, find_nonfinite, watch

STOCHASTIC = lb.Recipe(
    lb.Gemm("fp8_e4m3:row", lb.Cast("fp8_e4m3:tensor", rounding="stochastic")),
    lb.Gemm(lb.Cast("fp8_e5m2:tensor", rounding="stochastic"), "reuse"),
    lb.Gemm(lb.Cast("fp8_e5m2:tensor", rounding="stochastic"), lb.Cast("fp8_e4m3:tensor", rounding="stochastic")),
    name="drawn",
)
RECIPES = pytest.mark.parametrize("recipe", ["fp8", "fp8-delayed", "mxfp8", "nvfp4", "nvfp4-eden", STOCHASTIC], ids=str)
#: How the middle of the model is run.
WAYS = pytest.mark.parametrize("way", ["plain", "checkpoint", "reentrant"])


class Norm(nn.Module):
    """Root mean square without an epsilon: a row of zeros becomes NaN."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.square().mean(-1, keepdim=True).sqrt()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = Norm(), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, recipe: lb.Recipe | str, way: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks, self.head, self.way = nn.ModuleList([Block(), Block()]), nn.Linear(32, 16), way
        lb.train.prepare_(self, f"{recipe}:keep_blocks=0" if str(recipe).startswith("nvfp4") else recipe, skip=())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.way == "plain" else checkpoint(block, x, use_reentrant=self.way == "reentrant")
        return self.head(x)


def batch(step: int, micro: int = 0) -> Tensor:
    return torch.randn(33, 32, generator=torch.Generator().manual_seed(10 * step + micro)) * 2.0**step


def trained(model: Model, steps: int = 4, micro_batches: int = 2) -> list[Tensor]:
    """Losses and gradients of every step, and the state at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []
    for step in range(steps):
        for micro in range(micro_batches):
            loss = model(batch(step, micro).requires_grad_()).square().mean()
            loss.backward()
            seen.append(loss.detach())
        seen += [param.grad.clone() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return seen + list(model.state_dict().values())


# -- no bit changes --------------------------------------------------------------------------------------------------
@pytest.mark.thinned(3)
@WAYS
@RECIPES
def test_watched_training_has_the_bits_of_training(recipe, way):
    alone = trained(Model(recipe, way))
    model = Model(recipe, way)
    with watch(model, every=2) as seen:
        watched = trained(model)
    assert len(alone) == len(watched) and all(map(same_bits, alone, watched))
    assert {row.step for row in seen.rows} == {0, 2}


@RECIPES
def test_checkpointing_changes_no_figure(recipe):
    """What a checkpoint computes once more is counted once."""
    rows = []
    for way in ("plain", "checkpoint", "reentrant"):
        model = Model(recipe, way)
        with watch(model, every=1) as seen:
            trained(model, steps=2)
        rows.append(sorted(map(repr, seen.rows)))
    assert rows[0] == rows[1] == rows[2]


@RECIPES
def test_every_cast_of_every_layer_has_a_row(recipe):
    model = Model(recipe)
    with watch(model, every=1) as seen:
        trained(model, steps=1, micro_batches=3)
    layers = {name: one for name, one in model.named_modules() if isinstance(one, TrainLinear)}
    wanted = {
        (name, role, str(how))
        for name, one in layers.items()
        for role, how in one.products.casts(one.recipe).items()
    }  # fmt: skip
    assert {(row.layer, row.role, row.cast) for row in seen.rows} == wanted and len(seen.rows) == len(wanted)
    inputs = {row.layer: row.elements for row in seen.rows if row.role == "output.a"}
    assert inputs == {name: 3 * 33 * one.in_features for name, one in layers.items()}


def test_evaluation_is_not_counted():
    model = Model("fp8", "checkpoint")
    with watch(model, every=1) as seen:
        loss = model(batch(0)).square().mean()
        with torch.no_grad():
            model(batch(1))
        loss.backward()
    alone = Model("fp8", "checkpoint")
    with watch(alone, every=1) as once:
        alone(batch(0)).square().mean().backward()
    assert list(map(repr, seen.rows)) == list(map(repr, once.rows))


def test_steps_between_and_after_a_watch_have_no_watcher():
    model = Model("fp8")
    seen = watch(model, every=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(5):
        model(batch(step))
        assert (model.head.watcher is not None) == (step % 3 == 0)
        model.head.weight.grad = torch.zeros_like(model.head.weight)
        optimizer.step()
    seen.close()
    model(batch(0))
    assert model.head.watcher is None and {row.step for row in seen.rows} == {0, 3}


# -- figures ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_watched_model_is_not_watched(copied):
    model = Model("fp8")
    with watch(model, every=1) as w:
        model(batch(0))
        twin, seen = copied(model), len(w.rows)
        twin(batch(0)).sum().backward()
        assert len(w.rows) == seen
        assert not any(layer.watcher for layer in twin.modules() if isinstance(layer, TrainLinear))
        assert all(layer.watcher for layer in model.modules() if isinstance(layer, TrainLinear))


def test_a_model_made_plain_while_it_is_watched_is_plain():
    model, never = Model("fp8"), Model("fp8")
    with watch(model, every=1) as w:
        model(batch(0)).sum().backward()
        seen = w.rows
        for one in (model, never):
            lb.train.convert_(one)
        model(batch(0))
        assert len(seen) == len(w.rows) > 0
    assert vars(model.head).keys() == vars(never.head).keys()


class Reads(TorchDispatchMode):
    """Counts the numbers that the host asks of tensors, for each of which it waits for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_steps_are_counted_without_waiting_for_a_gpu():
    model = Model("fp8-delayed")
    state, optimizer, reads = lb.train.state(model), torch.optim.SGD(model.parameters(), lr=0.1), Reads()
    with watch(model, every=1000):
        for _ in range(2):
            with reads:
                model(batch(0))
            optimizer.step()
            assert state.counted == state.step
    assert reads.count == 0
    state.step = 7
    assert state.counted == 7
    state.load_state_dict(Model("fp8-delayed").blocks[0].up.lowbit_state.state_dict(), strict=False)
    assert state.counted == state.step == 0
    optimizer.step()
    assert copy.deepcopy(state).counted == state.counted == 1


def by_rows(x: Tensor, dtype: torch.dtype, largest: float, dim: int = 1) -> Tensor:
    """``x`` in FP8 with a scale for each row (or column), decoded, by torch's casts."""
    scale = (x.abs().amax(dim, keepdim=True) / largest).clamp(min=2.0**-126)
    return (x / scale).to(dtype).double() * scale.double()


def decibels(x: Tensor, made: Tensor) -> float:
    return 10 * math.log10(float(x.double().square().sum() / (x.double() - made).square().sum()))


def rows_of(model: nn.Module, x: Tensor, g: Tensor) -> dict[str, lb.train.watch.__class__]:
    with watch(model, every=1) as seen:
        model(x).backward(g)
    return {row.role: row for row in seen.rows}


def test_figures_of_fp8_are_those_of_torchs_casts():
    layer = nn.Sequential(nn.Linear(48, 24, bias=False))
    lb.train.prepare_(layer, "fp8")
    x = torch.randn(40, 48) * 2.0 ** torch.randint(-30, 1, (40, 48))
    g = torch.randn(40, 24) * 2.0 ** torch.randint(-60, 1, (40, 24))
    x[:, 3], g[5, 2] = 0.0, 0.0
    rows = rows_of(layer, x.clone().requires_grad_(), g)
    w = layer[0].weight.detach()
    e4m3, e5m2 = (torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)
    folded = {  # the gradient is multiplied by the scales of the other operand before it is quantized
        "output.a": (x, by_rows(x, *e4m3)),
        "output.b": (w, by_rows(w, *e4m3)),
        "grad_input.a": (g * (w.abs().amax(1) / 448), None),
        "grad_weight.a": (g * (x.abs().amax(1, keepdim=True) / 448), None),
    }
    for role, (given, made) in folded.items():
        if made is None:
            made = by_rows(given, *e5m2, dim=1 if role == "grad_input.a" else 0)
        row = rows[role]
        assert row.amax == float(given.abs().max()) and row.elements == given.numel()
        assert row.underflow == float(((given != 0) & (made == 0)).double().mean())
        assert row.sqnr == pytest.approx(decibels(given, made), abs=1e-4)
        assert row.overflow == row.nonfinite == row.saturated == 0
    assert rows["output.a"].underflow > 0.1 < rows["grad_weight.a"].underflow


def test_figures_of_mxfp8_are_those_of_ml_dtypes():
    layer = nn.Sequential(nn.Linear(64, 8, bias=False))
    lb.train.prepare_(layer, "mxfp8")
    x = torch.randn(16, 64) * 2.0 ** torch.randint(-24, 1, (16, 64))
    rows = rows_of(layer, x.clone().requires_grad_(), torch.randn(16, 8))
    blocks = x.numpy().reshape(-1, 32).astype(np.float64)
    scale = 2.0 ** np.ceil(np.log2(np.abs(blocks).max(1, keepdims=True) / 448))
    made = torch.from_numpy((blocks / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale).reshape(16, 64)
    row = rows["output.a"]
    assert row.sqnr == pytest.approx(decibels(x, made), abs=1e-9)
    assert row.underflow == float(((x != 0) & (made == 0)).double().mean()) > 0


def test_saturation_of_a_delayed_scale_is_counted():
    """The history says 448, so the scale is 1: what is beyond 464, where 480 would begin, is clipped."""
    layer = nn.Sequential(nn.Linear(8, 4, bias=False))
    lb.train.prepare_(layer, "fp8-delayed")
    state = lb.train.state(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    layer(torch.full((1, 8), 448.0)).sum().backward()
    optimizer.step()
    assert state.step == 1
    x = torch.tensor([[448.0, 456.0, 463.0, 465.0, -470.0, 1e4, 2.0**-10, -(2.0**-11)]])
    made = torch.tensor([[448.0, 448.0, 448.0, 448.0, -448.0, 448.0, 0.0, -0.0]], dtype=torch.float64)
    row = rows_of(layer, x, torch.ones(1, 4))["output.a"]
    assert (row.saturated, row.underflow, row.overflow) == (3 / 8, 2 / 8, 0.0)
    assert row.sqnr == pytest.approx(decibels(x, made), abs=1e-12)


def test_what_is_not_finite_is_counted_with_its_block():
    layer = nn.Sequential(nn.Linear(8, 4, bias=False))
    lb.train.prepare_(layer, "fp8")
    x = torch.ones(4, 8)
    x[1, 2], x[3, 0], x[3, 7] = math.inf, math.nan, -math.inf
    row = rows_of(layer, x, torch.ones(4, 4))["output.a"]
    assert (row.nonfinite, row.overflow, row.amax, row.sqnr) == (3, 16 / 32, 1.0, math.inf)


@pytest.mark.parametrize(
    ("scheme", "low", "high"),
    [
        ("int8:tensor", -128.5, 127.5),
        ("int4:tensor", -8.5, 7.5),
        ("fp8_e5m2:tensor", -61440.0, 61440.0),
        ("mxfp4", -7.0, 7.0),
    ],
)
def test_saturation_begins_half_a_step_beyond_the_ends(scheme, low, high):
    from lowbit.train.watcher import _sums

    x = torch.ones(1, 32)
    x[0, :4] = torch.tensor([low * 0.999, low * 1.001, high * 0.999, high * 1.001])
    scale = torch.tensor([[127]], dtype=torch.uint8) if scheme == "mxfp4" else torch.ones(1, 1)
    assert _sums(x, lb.quantize(x, scheme, scale))[4] == 2


# -- what comes out --------------------------------------------------------------------------------------------------
def test_rows_go_to_text_json_and_image(tmp_path):
    pytest.importorskip("matplotlib")
    model = Model("fp8")
    with watch(model, every=2) as seen:
        trained(model)
    worst = seen.worst(3)
    assert [row.step for row in worst] == [2] * 3 and worst[0].sqnr == min(r.sqnr for r in seen.rows if r.step == 2)
    assert seen.worst(1, by="amax", step=0)[0].amax == max(row.amax for row in seen.rows if row.step == 0)
    lines = str(seen).splitlines()
    assert lines[0] == "step 2" and lines[2].split()[:2] == [worst[0].layer, worst[0].role]
    assert len(lines) == 2 + len(seen.rows) / 2
    seen.to_json(tmp_path / "watch.json")
    seen.plot(tmp_path / "watch.png")
    saved = json.loads((tmp_path / "watch.json").read_text())
    assert saved["every"] == 2 and len(saved["rows"]) == len(seen.rows)
    assert saved["rows"][0]["layer"] == "blocks.0.up" and (tmp_path / "watch.png").read_bytes().startswith(b"\x89PNG")
    later = watch(model)
    later.load_state_dict(seen.state_dict())
    assert later.rows == seen.rows
    later.close()


def test_what_cannot_be_watched_is_refused():
    with pytest.raises(ValueError, match=r"no TrainLinear layers; call lowbit\.train\.prepare_"):
        watch(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="every counts steps, an integer of at least 1, got 0"):
        watch(Model("fp8"), every=0)
    seen = watch(Model("fp8"))
    assert str(seen) == "no step was watched"
    with pytest.raises(ValueError, match="step 3 was not watched; expected one of none, every 100 steps"):
        seen.worst(step=3)
    with pytest.raises(ValueError, match=r"sorted by one of sqnr, underflow, .*, got 'loss'"):
        seen.worst(by="loss")
    with pytest.raises(ValueError, match="nothing to draw"):
        seen.plot("nowhere.png")


def test_compiled_code_is_not_watched_and_says_so():
    layer = nn.Sequential(nn.Linear(8, 4))
    lb.train.prepare_(layer, "fp8")
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    compiled(torch.ones(2, 8)).sum().backward()
    seen = watch(compiled, every=1)
    compiled(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="1 steps went by.*compiled code is not watched; run some steps within"):
        seen.close()
    assert not seen.rows
    with watch(compiled, every=1) as seen, torch.compiler.set_stance("force_eager"):
        compiled(torch.ones(2, 8)).sum().backward()
    assert {row.role for row in seen.rows} == {"output.a", "output.b", "grad_weight.a"}


# -- the first that is not finite ------------------------------------------------------------------------------------
def found(model: Model, x: Tensor | None = None, times: float = 1.0) -> tuple[str, str, str, int, int]:
    one = find_nonfinite(model, lambda: model(batch(0) if x is None else x).square().mean() * times)
    return (one.path, one.kind, one.role, one.nans, one.infs)


@WAYS
@pytest.mark.parametrize("recipe", ["fp8", "fp8-delayed"])
def test_a_finite_step_has_no_finding_and_leaves_no_trace(recipe, way):
    plain, searched = Model(recipe, way), Model(recipe, way)
    trained(searched, steps=1)
    trained(plain, steps=1)
    before = copy.deepcopy(searched.state_dict())
    drawn = torch.get_rng_state()
    with watch(searched, every=1) as seen:
        assert find_nonfinite(searched, lambda: searched(F.dropout(batch(0))).square().mean()) is None
    assert not seen.rows and same_bits(drawn, torch.get_rng_state())
    assert all(param.grad is None for param in searched.parameters()) and searched.head.watcher is None
    assert all(map(same_bits, before.values(), searched.state_dict().values()))
    assert all(map(same_bits, trained(plain), trained(searched)))


def test_optimizers_that_step_in_the_backward_pass_do_not():
    model = Model("fp8")
    lb.optim.in_backward_(model, lb.optim.SGD, lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    assert find_nonfinite(model, lambda: model(batch(0)).square().mean()) is None
    assert all(map(same_bits, before, model.parameters()))
    model(batch(0)).square().mean().backward()
    assert not any(map(same_bits, before, model.parameters()))


@WAYS
def test_a_weight_that_is_not_finite_is_named(way):
    model = Model("fp8", way)
    with torch.no_grad():
        model.blocks[1].up.weight[2, 3:5] = math.nan
    assert found(model) == ("blocks.1.up", "TrainLinear", "weight", 2, 0)


@WAYS
def test_an_activation_that_is_not_finite_is_named(way):
    model = Model("fp8", way)
    x = batch(0)
    x[4] = 0.0
    assert found(model, x.requires_grad_()) == ("blocks.0.norm", "Norm", "output", 32, 0)


@WAYS
def test_a_batch_that_is_not_finite_is_named(way):
    x = batch(0)
    x[4, 5], x[6, 7] = math.inf, math.nan
    assert found(Model("fp8", way), x) == ("", "Model", "input", 1, 1)


@WAYS
def test_a_loss_that_is_not_finite_is_named(way):
    assert found(Model("fp8", way), times=math.inf) == ("", "Model", "loss", 0, 1)


@WAYS
def test_a_gradient_of_the_loss_that_is_not_finite_is_named(way):
    model = Model("fp8", way)

    def step() -> None:  # the loss is 0, and its gradient 1 / 0
        (model(batch(0).requires_grad_()) * 0.0).square().sum().sqrt().backward()

    one = find_nonfinite(model, step)
    assert (one.path, one.role, one.nans) == ("head", "grad_output", 33 * 16)
    assert str(one).startswith("the gradient that reaches the output of head (TrainLinear) has 528 NaN among 528 elem")


class Steep(nn.Module):
    """Adds the square root of 0, whose gradient is Inf times 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (0 * x).abs().sqrt()


@WAYS
def test_a_gradient_that_a_module_makes_is_named(way):
    model = Model("fp8", way)
    model.blocks[1].norm = Steep()
    x = batch(0).requires_grad_()
    path, kind, role, nans, infs = found(model, x)
    assert (path, kind, role) == ("blocks.1.norm", "Steep", "grad_input") and nans + infs > 0


@WAYS
def test_an_operand_that_overflows_is_named(way):
    """Gradient and input are finite; the gradient times the input's scale is not."""
    model = Model("fp8", way)
    model.blocks[0].norm = nn.Identity()
    with torch.no_grad():
        model.blocks[0].up.weight.zero_()
        model.blocks[0].down.weight.zero_()
        model.blocks[0].down.weight[:, 0] = 1.0
    x = torch.full((33, 32), 1e30)

    def step() -> Tensor:
        return (model.blocks[0].down(F.silu(model.blocks[0].up(x))) * 1e14).sum()

    one = find_nonfinite(model, step)
    assert (one.path, one.role) == ("blocks.0.up", "grad_weight.a") and one.infs > 0
    assert "the operand grad_weight.a of blocks.0.up (TrainLinear)" in str(one)


def test_a_mask_of_minus_infinities_is_no_finding():
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return F.softmax(x + mask, -1)

    model = nn.Sequential(nn.Linear(4, 4), Masked())
    mask = torch.full((4, 4), -math.inf).triu(1)

    def step() -> Tensor:
        return model[1](model[0](torch.randn(4, 4)), mask).square().sum()

    assert find_nonfinite(model, step) is None


def test_compiled_code_is_searched_uncompiled():
    model = nn.Sequential(nn.Linear(8, 8), Norm())
    lb.train.prepare_(model, "fp8")
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.zero_()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    one = find_nonfinite(compiled, lambda: compiled(torch.ones(2, 8)).sum())
    assert (one.path, one.role, one.nans) == ("1", "output", 16)
