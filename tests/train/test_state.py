"""What training remembers: a model's state, stochastic rounding, delayed scales."""

from __future__ import annotations

import copy
import io
from dataclasses import replace

import pytest
import torch
from support import oracles
from support.bits import same_bits
from support.layers import training_layer
from support.stateful import DELAYED, STOCHASTIC, Model, cast
from torch import Tensor, nn

import lowbit as lb
from lowbit.train import State, TrainLinear

STATEFUL = pytest.mark.parametrize("recipe", [STOCHASTIC, DELAYED], ids=str)


class Run:
    """A seeded training, whose inputs grow, so that delayed scales differ from current ones."""

    def __init__(self, recipe: lb.Recipe, recompute: bool = False) -> None:
        torch.manual_seed(1)
        self.model, self.recompute = Model(recipe), recompute
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state = lb.train.state(self.model)
        self.state.attach(self.optimizer)

    def steps(self, count: int) -> Run:
        for _ in range(count):
            x = torch.randn(5, 33, generator=torch.Generator().manual_seed(self.state.step)) * 2**self.state.step
            self.optimizer.zero_grad()
            self.model(x, self.recompute).square().mean().backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        return self

    def weights(self) -> list[Tensor]:
        return list(self.model.state_dict().values())


@STATEFUL
def test_two_runs_and_recomputation_give_the_same_bits(recipe):
    first = Run(recipe).steps(4)
    assert all(map(same_bits, first.weights(), Run(recipe).steps(4).weights()))
    assert all(map(same_bits, first.weights(), Run(recipe, recompute=True).steps(4).weights()))
    assert first.state.step == 4


@STATEFUL
def test_a_run_resumes_in_the_same_bits(recipe):
    whole, half = Run(recipe).steps(4), Run(recipe).steps(2)
    file = io.BytesIO()
    torch.save(half.model.state_dict(), file)
    file.seek(0)
    resumed = Run(recipe).steps(1)
    resumed.model.load_state_dict(torch.load(file, weights_only=True))
    assert all(map(same_bits, resumed.steps(2).weights(), whole.weights()))


@STATEFUL
def test_copies_share_no_state_and_layers_share_one(recipe):
    run = Run(recipe).steps(1)
    twin = copy.deepcopy(run.model)
    own = lb.train.state(twin)
    assert own is not run.state and twin.up.state is twin.down.state is own
    own.advance()
    assert (own.step, run.state.step) == (2, 1)
    assert lb.train.state(nn.Sequential(run.model)) is run.state


def test_bits_of_stochastic_rounding_come_from_seed_step_path_and_role():
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(33, 5))
    lb.train.prepare_(layer, STOCHASTIC)
    x, g = torch.randn(4, 33), torch.randn(4, 5)
    state = lb.train.state(layer)
    state.seed, state.step = 7, 3
    state.set_replica(2)

    def gradients() -> tuple[Tensor, Tensor]:
        inputs = x.clone().requires_grad_()
        made = torch.autograd.grad(layer(inputs), (inputs, layer[0].weight), g)
        return made[0], made[1]

    def coded(t: Tensor, scheme: str, role: str) -> lb.Quantized:
        seed = oracles.training_seed(7, micro_batch=1, replica=2)
        return lb.quantize(t, scheme, rounding=lb.Rounding(seed, 3, f"0/{role}"))

    for_x = lb.scaled_mm(
        coded(g, "fp8_e5m2:tensor", "grad_input.a"),
        lb.quantize(layer[0].weight, "fp8_e4m3:tensor").t(), out_dtype=torch.float32,
    )  # fmt: skip
    for_w = lb.scaled_mm(
        coded(g, "fp8_e5m2:tensor", "grad_weight.a").t(),
        coded(x, "fp8_e4m3:tensor", "grad_weight.b").t(), out_dtype=torch.float32,
    )  # fmt: skip
    state.set_micro_batch(0)  # the next forward is the second
    assert all(map(same_bits, gradients(), (for_x, for_w)))
    state.set_micro_batch(0)
    before = gradients()
    state.advance()
    state.next_micro_batch()
    assert not any(map(torch.equal, gradients(), before))


def test_delayed_scales_are_of_the_largest_magnitude_of_the_last_steps():
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    lb.train.prepare_(model, DELAYED)
    state, view = lb.train.state(model), lambda: model[0]._view(torch.device("cpu"))
    seen = [3.0, 5.0, 1.0, 0.5, 0.25]
    expected = [3.0, 3.0, 5.0, 5.0, 5.0]  # the first of itself; then of the 3 steps before
    for amax, wanted in zip(seen, expected, strict=True):
        x = torch.tensor([[amax, -amax / 2]])
        for _ in range(2):  # recording twice is recording once
            q = view().quantize(x, DELAYED.output.a, "output.a")
        assert q.scale.item() == torch.tensor(wanted).div(448).item()
        state.advance()
    assert state.histories["0/output.a"].tolist() == [0.25, 0.5, 1.0]
    assert view().quantize(torch.tensor([[torch.inf, 1.0]]), DELAYED.output.a, "output.a").dequantize().isnan().all()
    assert view().quantize(torch.zeros(0, 4), DELAYED.output.a, "output.a").shape == (0, 4)
    # A tensor that is not finite, an empty one, and evaluation are not remembered.
    with torch.no_grad():
        view().quantize(torch.tensor([[99.0]]), DELAYED.output.a, "output.a")
    state.advance()
    assert state.histories["0/output.a"].tolist() == [0.25, 0.5, 1.0]


def test_fp8_delayed_is_fp8_tensor_with_scales_of_earlier_steps():
    """In the first step there are none; in the second, four times the magnitudes saturate."""
    layers = [training_layer(33, 5, name) for name in ("fp8-tensor", "fp8-delayed")]
    layers[1].load_state_dict(layers[0].state_dict())
    x, g = torch.randn(4, 33), torch.randn(4, 5)

    def products(layer: TrainLinear, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        y = layer(x)
        return [y, *torch.autograd.grad(y, (x, layer.weight), g)]

    assert all(map(same_bits, *[products(layer, x) for layer in layers]))
    for layer in layers:
        lb.train.state(layer).advance()
    state = lb.train.state(layers[1])
    assert list(state.histories) == ["/output.a", "/output.b", "/grad_input.a"]
    largest = torch.stack([t.detach().abs().max() for t in (x, layers[1].weight, g)])
    assert state.amax.shape == (3, 1024) and same_bits(state.amax[:, 0].contiguous(), largest)
    y = lb.quantize(4 * x, "fp8_e4m3:tensor", x.abs().max() / 448)
    w = lb.quantize(layers[1].weight.detach(), "fp8_e4m3:tensor")
    expected = lb.scaled_mm(y, w, layers[1].bias.detach(), out_dtype=torch.float32)
    assert same_bits(products(layers[1], 4 * x)[0].detach(), expected)


def test_states_that_do_not_fit_are_refused():
    longer = replace(DELAYED, output=lb.Gemm(*[cast("fp8_e4m3", scale="delayed", history=5)] * 2))
    with pytest.raises(RuntimeError, match=r"size mismatch for up\.lowbit_state\.amax"):
        Run(DELAYED).model.load_state_dict(Run(longer).model.state_dict())
    moved = Run({"*": "fp8", "up": DELAYED}).model.state_dict()
    model = Run({"*": "fp8", "down": DELAYED}).model
    moved = {name.replace("up.lowbit", "down.lowbit"): value for name, value in moved.items()}
    for assign in (False, True):
        with pytest.raises(
            RuntimeError, match=r"down\.lowbit_state\.amax: .* not match at down/output\.a, down/output\.b, "
        ):
            model.load_state_dict(moved, assign=assign)
    with pytest.raises(ValueError, match="an integer of 64 bits"):
        State(1 << 64)
    with pytest.raises(ValueError, match="has no TrainLinear layers"):
        lb.train.state(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="2 parts of the model were prepared one by one"):
        lb.train.state(nn.Sequential(Model(DELAYED), Model(STOCHASTIC)))


def test_a_layer_built_by_hand_gets_its_state_from_the_model():
    model, x = nn.Sequential(TrainLinear(33, 5, recipe=STOCHASTIC)), torch.randn(4, 33)
    with pytest.raises(RuntimeError, match=r"no training state; call lowbit.train.state\(model\) once"):
        model(x)
    assert lb.train.state(model) is model[0].state and model[0].path == "0"
    model(x).sum().backward()


def test_the_optimizer_attached_last_is_followed_alone():
    model = Model(DELAYED)
    state, first = lb.train.state(model), torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    second = accelerator.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    state.attach(first)
    state.attach(first)
    first.step()
    assert state.step == 1
    state.attach(second)
    first.step()
    assert state.step == 1
    second.step()
    assert state.step == 2
    twin = copy.deepcopy(model)
    lb.train.state(twin).attach(torch.optim.SGD(twin.parameters(), lr=0.1))
    second.step()
    assert state.step == 3


def test_parts_that_need_no_state_have_no_say_in_it():
    model = nn.Sequential(Model(DELAYED), Model("fp8"))
    assert lb.train.state(model) is model[0].up.state


def test_another_layer_takes_the_state_of_one_that_was_replaced():
    model = Model(DELAYED)
    state = lb.train.state(model)
    model.up = nn.Linear(33, 48)
    assert lb.train.state(model) is state is model.down.lowbit_state
    assert lb.train.state(model.down) is state and len(model._forward_pre_hooks) == 1
    assert lb.train.state(Model(DELAYED).down) is not state


# -- as a module -------------------------------------------------------------------------------------------------------
def test_a_model_has_one_copy_of_its_state_and_only_where_it_needs_one():
    names = {recipe: list(Model(recipe).state_dict()) for recipe in ("fp8", STOCHASTIC, DELAYED)}
    plain = ["up.weight", "up.bias", "down.weight"]
    assert names["fp8"] == plain
    assert [name for name in names[STOCHASTIC] if name not in plain] == ["up.lowbit_state.rng"]
    delayed = [f"up.lowbit_state.{name}" for name in ("rng", "amax", "streams")]
    assert [name for name in names[DELAYED] if name not in plain] == delayed
    assert Model({"*": DELAYED, "up": "fp8"}).down._modules.keys() == {"lowbit_state"}
    single = TrainLinear(4, 4, recipe=DELAYED)
    assert lb.train.state(single) is single.lowbit_state and single(torch.randn(2, 4)).shape == (2, 4)
    assert len(nn.Sequential(Model(DELAYED))) == 1  # containers that call their children get none more


@STATEFUL
def test_a_checkpoint_without_a_state_loads_and_leaves_it(recipe):
    run = Run(recipe).steps(2)
    before = [value.clone() for value in run.state.buffers()]
    plain = nn.Module()
    plain.up, plain.down = nn.Linear(33, 48), nn.Linear(48, 33, bias=False)
    run.model.load_state_dict(plain.state_dict())
    assert run.state.step == 2 and all(map(same_bits, run.state.buffers(), before))
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"up.lowbit_state.rng"'):
        plain.load_state_dict(run.model.state_dict())
    lb.train.convert_(run.model)
    plain.load_state_dict(run.model.state_dict())
    assert not run.model._forward_pre_hooks and len(list(run.model.modules())) == 3
    run.model(torch.randn(2, 33))


def test_casting_and_emptying_the_model_leave_its_state():
    run = Run(DELAYED).steps(2)
    before = {name: value.clone() for name, value in run.state.state_dict().items()}
    run.model.bfloat16().half().double().float()
    assert all(same_bits(value, before[name]) for name, value in run.state.state_dict().items())
    run.model.to_empty(device="cpu")
    assert all(same_bits(value, before[name]) for name, value in run.state.state_dict().items())
    with torch.device("meta"):
        model = Model(DELAYED)
    state = lb.train.state(model)
    state.seed = 5
    model.to_empty(device="cpu")
    assert state.seed == 5 and state.amax.device.type == state.pending.device.type == "cpu" and not state.amax.any()


@STATEFUL
def test_a_pickled_model_goes_on_as_itself(recipe):
    run, twin = Run(recipe).steps(2), Run(recipe)
    file = io.BytesIO()
    torch.save(run.model, file)
    file.seek(0)
    twin.model = torch.load(file, weights_only=False)
    twin.state = lb.train.state(twin.model)
    twin.optimizer = torch.optim.SGD(twin.model.parameters(), lr=0.1)
    twin.state.attach(twin.optimizer)
    assert twin.state is not run.state and twin.model.down.state is twin.model.up.lowbit_state is twin.state
    assert all(map(same_bits, run.steps(2).weights(), twin.steps(2).weights()))


def test_prepare_takes_recipes_by_layer():
    model = Model({"*": "fp8", "down": "mxfp8"})
    assert (model.up.recipe.name, model.down.recipe.name) == ("fp8", "mxfp8")
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    report = lb.train.prepare_(plain, {"*": "fp8", "1": None})
    assert report.converted == ("0",) and report.skipped == ("1",) and type(plain[1]) is nn.Linear
    other = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"the pattern '\*.down' matches no layer; names are such as '0'"):
        lb.train.prepare_(other, {"*": "fp8", "*.down": None})
    with pytest.raises(ValueError, match="'int8-group' is for inference only"):
        lb.train.prepare_(other, {"*": "int8-group"})
    assert type(other[0]) is nn.Linear
