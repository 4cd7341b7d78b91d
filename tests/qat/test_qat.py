"""Quantization-aware training: forward is the deployed layer in every bit, gradients are the papers' formulas."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from support.layers import DYNAMIC, STATIC
from torch import Tensor, nn

import lowbit as lb
from lowbit.datafree.scales import search
from lowbit.qat.learned import Learned, gradient_scale

ROTATED = tuple(f"{name}:hadamard" for name in ("int8", "fp8", "int4-weight-only:group32", "nvfp4", "mxfp4", "w4a8"))
WEIGHTS = ("int4:group32", "int2:group16", "uint4:group32:affine", "fp4_e2m1:group16", "mxfp4", "nvfp4")


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 24)).eval()


def seen(model: nn.Module, x: Tensor) -> nn.Module:
    """After a batch in training mode, which static input scales are made of."""
    with torch.no_grad():
        model.train()(x)
    return model.eval()


# -- what is trained is what is deployed ------------------------------------------------------------------------------
@pytest.mark.parametrize("learn_scale", [False, True])
@pytest.mark.parametrize("recipe", [*DYNAMIC, *STATIC, *ROTATED])
def test_the_prepared_model_computes_the_bits_of_the_converted_one(recipe, learn_scale):
    x = torch.randn(17, 40)
    prepared = net()
    lb.qat.prepare_(prepared, recipe, learn_scale=learn_scale)
    seen(prepared, x)
    with torch.no_grad():  # as after some training
        for name, p in prepared.named_parameters():
            p += 0.05 * torch.randn_like(p) * (1.0 if name.endswith("point") else p.abs().mean())
    in_training = prepared.train()(x).detach() if "static" not in recipe else prepared(x).detach()
    evaluated = prepared.eval()(x).detach()
    codes = [layer.quantized_weight for layer in (prepared[0], prepared[2])]
    deployed = copy.deepcopy(prepared)
    lb.qat.convert_(deployed)
    with torch.no_grad():
        assert torch.equal(evaluated, deployed(x))
        assert torch.equal(in_training, evaluated)
    for layer, q in zip((deployed[0], deployed[2]), codes, strict=True):
        assert all(torch.equal(part, layer.weight.parts[name]) for name, part in q.parts.items())
    if not learn_scale and "static" not in recipe:
        plain = net()
        plain.load_state_dict(prepared.state_dict())
        lb.quantize_(plain, recipe, method="nearest")
        with torch.no_grad():
            assert torch.equal(plain(x), evaluated)


@pytest.mark.parametrize("learn_scale", [False, True])
@pytest.mark.parametrize("recipe", ROTATED)
def test_gradients_go_through_the_hadamard_transform(recipe, learn_scale):
    plain = lb.recipe(recipe.removesuffix(":hadamard"))
    block = lb.recipe(recipe).rotation
    rotated, by_hand = nn.Sequential(nn.Linear(64, 24)), nn.Sequential(nn.Linear(64, 24))
    by_hand.load_state_dict(rotated.state_dict())
    by_hand[0].weight.data = lb.hadamard(by_hand[0].weight.data, block)
    lb.qat.prepare_(rotated, recipe, learn_scale=learn_scale)
    lb.qat.prepare_(by_hand, plain, learn_scale=learn_scale)
    x, other = (torch.randn(9, 64).requires_grad_() for _ in range(2))
    other.data = lb.hadamard(x.detach(), block)
    y, same = rotated(x), by_hand(other)
    assert torch.equal(y, same)
    grad = torch.randn_like(y)
    y.backward(grad)
    same.backward(grad)
    torch.testing.assert_close(x.grad, lb.hadamard(other.grad, block), rtol=1e-5, atol=1e-5)
    for name, p in by_hand.named_parameters():
        expected = lb.hadamard(p.grad, block) if name == "0.weight" else p.grad
        torch.testing.assert_close(rotated.get_parameter(name).grad, expected, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_and_in_autocast(dtype):
    x = torch.randn(5, 40)
    model = net().to(dtype)
    lb.qat.prepare_(model, "w4a8")
    y = model(x.to(dtype))
    y.float().square().mean().backward()
    assert y.dtype == model[0].weight.grad.dtype == dtype
    wide = net()
    lb.qat.prepare_(wide, "int8")
    with torch.autocast("cpu", dtype):
        assert wide(x).dtype == dtype
    deployed = copy.deepcopy(wide)
    lb.qat.convert_(deployed)
    with torch.autocast("cpu", dtype), torch.no_grad():
        assert torch.equal(deployed(x), wide(x))


# -- gradients --------------------------------------------------------------------------------------------------------
def formulas(x: Tensor, scheme: str, scale: Tensor, zero: Tensor | None, grad: Tensor) -> tuple[Tensor, ...]:
    """LSQ and LSQ+ in float64, on the values that the codes stand for: of x, of scales, of zero points."""
    format = lb.scheme(scheme).format
    rows, cols = x.shape
    width = cols // scale.shape[1]
    step = scale.double().repeat_interleave(width, 1)
    offset = torch.zeros_like(step) if zero is None else zero.double().repeat_interleave(width, 1)
    v = x.double() / step
    if format.kind == "integer":
        rounded = v.round() + offset
        inside = (rounded >= format.qmin) & (rounded <= format.qmax)
        level = rounded.clamp(format.qmin, format.qmax) - offset
    else:
        values = torch.tensor(sorted({one for one in format.table if math.isfinite(one)}), dtype=torch.float64)
        level = values[(v[..., None] - values).abs().argmin(-1)]
        inside = v.abs() <= float(values[-1])
    of_scale = grad.double() * torch.where(inside, level - v, level)
    of_zero = torch.where(inside, 0.0, -step * grad.double())
    of_scale, of_zero = (t.view(rows, -1, width).sum(2) for t in (of_scale, of_zero))
    return torch.where(inside, grad.double(), 0.0), of_scale, of_zero


@pytest.mark.parametrize(
    "scheme", ["int4:group16", "int3:group16", "uint4:group16:affine", "fp4_e2m1:group16", "nf4:group16"]
)
@given(seed=st.integers(0, 30))
def test_gradients_of_a_weight_and_its_learned_scales_are_the_formulas(scheme, seed):
    torch.manual_seed(seed)
    weight, x = torch.randn(6, 48), torch.randn(9, 48)
    layer = nn.Sequential(nn.Linear(48, 6, bias=False))
    layer[0].weight.data = weight.clone()
    lb.qat.prepare_(layer, lb.Recipe(lb.Gemm(None, scheme)), learn_scale=True)
    fake = layer[0]
    with torch.no_grad():  # so that some numbers are out of range
        fake.weight_scale *= 0.6
    grad = torch.randn(9, 6)
    (layer(x) * grad).sum().backward()
    above = grad.double().t() @ x.double()  # of the decoded weight
    of_x, of_scale, of_zero = formulas(weight, scheme, fake.weight_scale.detach(), fake.weight_zero_point, above)
    torch.testing.assert_close(fake.weight.grad.double(), of_x, rtol=1e-4, atol=1e-4)
    format = lb.scheme(scheme).format
    largest = 15 if "affine" in scheme else {"int4": 7, "int3": 3, "fp4_e2m1": 6, "nf4": 1}[format.name]
    factor = 1 / math.sqrt(16 * largest)
    assert gradient_scale(lb.scheme(scheme), 6, 48) == pytest.approx(factor)
    torch.testing.assert_close(fake.weight_scale.grad.double(), of_scale * factor, rtol=1e-3, atol=1e-4)
    if "affine" in scheme:
        torch.testing.assert_close(fake.weight_zero_point.grad.double(), of_zero * factor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("recipe", STATIC)
def test_gradients_of_static_input_scales_are_the_formulas(recipe):
    x = torch.randn(12, 40)
    layer = nn.Sequential(nn.Linear(40, 6, bias=False))
    lb.qat.prepare_(layer, recipe, learn_scale=True, observe=1)
    seen(layer, x).train()
    fake = layer[0]
    with torch.no_grad():
        fake.input_scale *= 0.5  # half of the range: the rest is out of it
    given, grad = (2 * x).requires_grad_(), torch.randn(12, 6)
    (layer(given) * grad).sum().backward()
    above = grad.double() @ fake.quantized_weight.dequantize(torch.float32).double()
    scales = fake.input_scales
    scheme = fake.recipe.input.name
    rows = [
        formulas(given.detach()[i : i + 1], scheme, scales.scale, scales.zero_point, above[i : i + 1])
        for i in range(12)
    ]
    of_x, of_scale, of_zero = (torch.cat([row[k] for row in rows]) for k in range(3))
    if "fp8" not in recipe:
        torch.testing.assert_close(given.grad.double(), of_x, rtol=1e-4, atol=1e-5)
    assert float((of_x == 0).double().mean()) > 0.01
    factor = gradient_scale(lb.scheme(scheme), 1, 40)
    torch.testing.assert_close(
        fake.input_scale.grad.double(), of_scale.sum()[None, None] * factor, rtol=1e-3, atol=1e-3
    )
    if scales.zero_point is not None:
        torch.testing.assert_close(
            fake.input_zero_point.grad.double(), of_zero.sum()[None, None] * factor, rtol=1e-3, atol=1e-3
        )


def test_powers_of_two_and_scales_in_fp8_learn_by_their_chain_rule():
    weight = torch.randn(8, 32)
    for name in ("mxfp4", "nvfp4"):
        scheme = lb.scheme(name)
        start = search(weight, scheme)
        learned = Learned.of(start, scheme)
        stored = learned.scales(scheme)
        assert torch.equal(stored.scale, start.scale)  # there and back
        grad = torch.randn(stored.scale.shape)
        of_scale, _ = learned.gradients(scheme, grad, 0.5)
        value = torch.exp2(stored.scale.float() - 127) if name == "mxfp4" else None
        expected = grad * (value * math.log(2) if value is not None else stored.global_scale) * 0.5
        torch.testing.assert_close(of_scale, expected)


# -- training ---------------------------------------------------------------------------------------------------------
@pytest.mark.thinned(5)
@pytest.mark.parametrize("learn_scale", [False, True])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_training_recovers_what_rounding_lost(weight, learn_scale):
    torch.manual_seed(1)
    teacher, x = net(), torch.randn(256, 40)
    recipe = lb.Recipe(lb.Gemm(None, weight))
    with torch.no_grad():
        target = teacher(x)

    def loss(model):
        return F.mse_loss(model(x), target)

    rounded = copy.deepcopy(teacher)
    lb.quantize_(rounded, recipe, method="nearest")
    student = copy.deepcopy(teacher).train()
    lb.qat.prepare_(student, recipe, learn_scale=learn_scale)
    optimizer = torch.optim.Adam(student.parameters())
    for step in range(100):
        optimizer.param_groups[0]["lr"] = 2e-4 * (1 - step / 100)
        optimizer.zero_grad()
        loss(student).backward()
        optimizer.step()
    lb.qat.convert_(student)
    with torch.no_grad():
        assert float(loss(student)) < 0.8 * float(loss(rounded))


def test_a_state_goes_on_where_it_was(tmp_path):
    x = torch.randn(8, 40)
    first, second = net(), net()
    lb.qat.prepare_(first, "int8-static-affine", learn_scale=True, observe=2)
    lb.qat.prepare_(second, "int8-static-affine", learn_scale=True, observe=2)
    seen(first, x)
    second.load_state_dict(first.state_dict())
    for model in (first, second):
        seen(model, 3 * x)  # the second observation, which is the last
        seen(model, 100 * x)
    assert torch.equal(first[0].input_scale, second[0].input_scale)
    assert torch.equal(first(x), second(x))
    with pytest.raises(ValueError, match=r"is prepared for QAT; call lowbit\.qat\.convert_"):
        lb.save_model(first, tmp_path)
    lb.qat.convert_(first)
    lb.save_model(first, tmp_path)
    with torch.no_grad():
        assert torch.equal(lb.load_model(tmp_path, net())(x), first(x))


def test_observers_average_and_are_frozen():
    model, x = nn.Sequential(nn.Linear(4, 2)), torch.ones(1, 4)
    lb.qat.prepare_(model, "int8-static")
    with pytest.raises(RuntimeError, match="has seen no finite input"):
        model.eval()(x)
    with pytest.raises(RuntimeError, match="freeze_observers_: 0 has seen no finite input"):
        lb.qat.freeze_observers_(model)
    with pytest.raises(RuntimeError, match=r"layer '0': .*has seen no finite input"):
        lb.qat.convert_(model)
    for value in (1.0, 3.0):
        seen(model, value * x)
    expected = 1 + 0.01 * (3 - 1)
    torch.testing.assert_close(model[0].input_scales.scale, torch.full((1, 1), expected / 127))
    assert lb.qat.freeze_observers_(model).converted == ("0",)
    seen(model, 100 * x)
    torch.testing.assert_close(model[0].input_scales.scale, torch.full((1, 1), expected / 127))


# -- graphs ------------------------------------------------------------------------------------------------------------
@pytest.mark.thinned(4)
@pytest.mark.parametrize("learn_scale", [False, True])
@pytest.mark.parametrize("recipe", [*STATIC, "int8", "w4a8", "nvfp4", "mxfp4", "int4-weight-only:group32:hadamard"])
def test_exported_models_compute_the_same_bits(recipe, learn_scale):
    model, x = net(), torch.randn(8, 40)
    lb.qat.prepare_(model, recipe, learn_scale=learn_scale)
    seen(model, x)
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: batch},)).module()
    for rows in (2, 8, 17):
        x = 3 * torch.randn(rows, 40)
        assert torch.equal(exported(x), model(x))


@pytest.mark.parametrize("strict", [False, True])
def test_exported_convolutions_compute_the_same_bits(strict):
    model, x = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1)), torch.randn(2, 4, 6, 6)
    lb.qat.prepare_(model, "int8-static", skip=())
    seen(model, x)
    assert torch.equal(torch.export.export(model, (x,), strict=strict).module()(x), model(x))


@pytest.mark.thinned(7)
@pytest.mark.parametrize("learn_scale", [False, True])
@pytest.mark.parametrize("observe", [None, 2])
@pytest.mark.parametrize("recipe", STATIC)
def test_one_graph_serves_all_steps_of_training_with_observers(recipe, observe, learn_scale):
    eager = net().train()
    lb.qat.prepare_(eager, recipe, learn_scale=learn_scale, observe=observe)
    traced = copy.deepcopy(eager)
    compiled = torch.compile(traced, backend="aot_eager", fullgraph=True)
    forwards = ((eager, eager), (traced, compiled))
    optimizers = {model: torch.optim.SGD(model.parameters(), lr=1e-2) for model, _ in forwards}
    for step in range(4):
        x = (step + 1) * torch.randn(8, 40)
        for model, forward in forwards:
            optimizers[model].zero_grad()
            forward(x).square().mean().backward()
            optimizers[model].step()
    states = [model.state_dict() for model in (eager, traced)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert int(traced[0].observations_left) == (-1 if observe is None else 0)


def test_a_training_graph_that_is_exported_observes():
    model, x = net().train(), torch.randn(8, 40)
    lb.qat.prepare_(model, "int8-static", observe=2)
    exported = torch.export.export(model, (x,), strict=True).module()
    for _ in range(3):
        x = 2 * x
        assert torch.equal(exported(x), model(x))
    assert torch.equal(exported.state_dict()["0.input_scale"], model[0].input_scale)


@pytest.mark.parametrize("capture", ["export", "compile"])
def test_a_graph_of_a_model_that_has_seen_nothing_says_so_when_it_runs(capture):
    model, x = net(), torch.randn(8, 40)
    lb.qat.prepare_(model, "int8-static")
    if capture == "export":
        graph = torch.export.export(model, (x,)).module()
    else:
        graph = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="has seen no finite input"):
        graph(x)


@pytest.mark.parametrize("learn_scale", [False, True])
@pytest.mark.parametrize("recipe", ["int8-static", "int8-static-affine"])
def test_a_layer_that_is_called_twice_before_backward(recipe, learn_scale):
    """Each call's gradients are those of the scales that it was computed with, though the second call moves them."""
    model, xs = net().train(), [torch.randn(8, 40), 3 * torch.randn(8, 40)]
    lb.qat.prepare_(model, recipe, learn_scale=learn_scale)
    alone = []
    for index, x in enumerate(xs):
        copied = copy.deepcopy(model)
        for before in xs[:index]:
            copied(before)
        copied(x).square().sum().backward()
        alone.append([p.grad for p in copied.parameters()])
    sum(model(x).square().sum() for x in xs).backward()
    for p, *parts in zip(model.parameters(), *alone, strict=True):
        torch.testing.assert_close(p.grad, sum(parts), rtol=1e-5, atol=1e-5)


def test_batchnorm_is_frozen_in_training_mode():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    x = torch.randn(32, 4)
    model.train()(x)
    before = copy.deepcopy(model[1].state_dict())
    assert lb.qat.freeze_batchnorm_(model).converted == ("1",)
    y = model.train()(x)
    assert all(torch.equal(value, before[name]) for name, value in model[1].state_dict().items())
    assert torch.equal(y, model.eval()(x))
    with pytest.raises(ValueError, match="no BatchNorm"):
        lb.qat.freeze_batchnorm_(nn.Linear(2, 2))


def test_convolutions_attention_and_tied_layers():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.attention = nn.Conv2d(3, 8, 3), nn.MultiheadAttention(8, 2, batch_first=True)
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x).flatten(2).transpose(1, 2)
            return self.b(self.a(self.attention(y, y, y, need_weights=False)[0]))

    model, x = Mixed(), torch.randn(2, 3, 6, 6)
    lb.qat.prepare_(model, "int8", learn_scale=True)
    model.train()(x).square().mean().backward()
    assert model.a.weight is model.b.weight
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    model.eval()
    expected = model(x).detach()
    lb.qat.convert_(model)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    assert model.a.codes is model.b.codes


def test_what_is_refused():
    model = net()
    with pytest.raises(ValueError, match="no"):
        lb.qat.convert_(model)
    lb.qat.prepare_(model, "int8")
    with pytest.raises(ValueError, match="trained to be quantized"):
        lb.qat.prepare_(model, "int8")
    with pytest.raises(ValueError, match="trained to be quantized"):
        lb.quantize_(model, "int8")
    with pytest.raises(ValueError, match="in_features=40"):
        model(torch.randn(3, 41))
    with pytest.raises(ValueError, match="observe counts batches"):
        lb.qat.prepare_(net(), "int8-static", observe=0)
    broken = net()
    broken[0].weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN or Inf"):
        lb.qat.prepare_(broken, "int8")
    assert type(broken[2]) is nn.Linear


# -- distillation -----------------------------------------------------------------------------------------------------
@given(rows=st.integers(1, 40), classes=st.integers(2, 50), temperature=st.sampled_from([0.5, 1.0, 4.0]))
def test_the_loss_of_distillation_is_torchs(rows, classes, temperature):
    student = torch.randn(rows, classes, requires_grad=True)
    teacher = 3 * torch.randn(rows, classes)
    plain = student.detach().double().requires_grad_()
    expected = temperature**2 * F.kl_div(
        (plain / temperature).log_softmax(-1), (teacher.double() / temperature).log_softmax(-1),
        log_target=True, reduction="batchmean",
    )  # fmt: skip
    expected.backward()
    made = lb.qat.distillation_loss(student, teacher, temperature)
    (3 * made).backward()
    torch.testing.assert_close(made.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(student.grad.double(), 3 * plain.grad, rtol=1e-4, atol=1e-6)


def test_distillation_refuses_what_is_no_pair():
    x = torch.randn(3, 5)
    for student, teacher, temperature, error in (
        (x, x[:2], 1.0, "same shape"), (x, x, 0.0, "positive and finite"),
        (x, x.clone().requires_grad_(), 1.0, "teacher gets no gradient"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=error):
            lb.qat.distillation_loss(student, teacher, temperature)
    excluded = x.clone()
    excluded[:, 0] = -torch.inf
    assert math.isfinite(float(lb.qat.distillation_loss(x, excluded)))


# -- checkpoints ------------------------------------------------------------------------------------------------------
def trained(recipe: str, learn_scale: bool) -> nn.Module:
    """A prepared network as after some training."""
    model = net()
    lb.qat.prepare_(model, recipe, learn_scale=learn_scale)
    seen(model, torch.randn(9, 40))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p += 0.05 * torch.randn_like(p) * (1.0 if name.endswith("point") else p.abs().mean())
    return model


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("learn_scale", [False, True])
@pytest.mark.parametrize("recipe", ["int4-weight-only:group8", "int8-static", "nvfp4"])
def test_a_checkpoint_has_the_learned_scales(tmp_path, recipe, learn_scale, shards):
    model = trained(recipe, learn_scale)
    state = model.state_dict()
    if shards:
        files = {"a.safetensors": list(state)[::2], "b.safetensors": list(state)[1::2]}
        for file, names in files.items():
            save_file({name: state[name] for name in names}, tmp_path / file)
        index = {"weight_map": {name: file for file, names in files.items() for name in names}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file(state, tmp_path / "model.safetensors")
    x = torch.randn(9, 40)
    for checkpoint in (tmp_path, str(tmp_path), state):
        again = net()
        lb.qat.prepare_(again, recipe, learn_scale=learn_scale)
        assert lb.qat.load_(again, checkpoint).done == "loaded"
        assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())
        lb.qat.convert_(again)
        with torch.no_grad():
            assert torch.equal(again(x), model(x))


def test_a_checkpoint_that_does_not_fit_is_refused_and_the_model_untouched():
    state = trained("int4-weight-only:group8", True).state_dict()
    plain = trained("int4-weight-only:group8", False).state_dict()
    other = {**state, "0.weight_scale": state["0.weight_scale"][:, :1], "3.weight": torch.zeros(1)}
    for learn_scale, checkpoint, message in (
        (False, state, r"2 unknown \(\['0.weight_scale', '2.weight_scale'\]"),
        (True, plain, r"2 missing \(\['0.weight_scale', '2.weight_scale'\]"),
        (True, other, r"unknown \(\['3.weight'\]\); 1 of another shape \(\['0.weight_scale'\]"),
    ):
        model = net()
        lb.qat.prepare_(model, "int4-weight-only:group8", learn_scale=learn_scale)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match=message):
            lb.qat.load_(model, checkpoint)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match=r"not prepared; call lowbit.qat.prepare_"):
        lb.qat.load_(net(), state)
    with pytest.raises(FileNotFoundError, match=r"model.safetensors does not exist"):
        lb.qat.load_(model, "nowhere")


def test_names_that_share_a_parameter_need_be_there_once():
    model = net()
    model.append(nn.Linear(24, 64, bias=False))
    model.append(nn.Linear(64, 24, bias=False))
    model[4] = model[3]
    lb.qat.prepare_(model, "int8", learn_scale=True)
    state = {name: value + 1 for name, value in model.state_dict().items() if not name.startswith("4.")}
    lb.qat.load_(model, state)
    assert model[4].weight is model[3].weight and torch.equal(model[4].weight, state["3.weight"])
