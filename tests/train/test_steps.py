"""Which optimizer moves a model's training state, where nothing is said about it: that of its first trained layer."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable

import pytest
import torch
from support.bits import same_bits
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import lowbit as lb
from lowbit.train import TrainLinear

DELAYED = lb.Cast("fp8_e4m3:tensor", scale="delayed", history=3)
DRAWN = lb.Gemm(lb.Cast("fp8_e5m2:tensor", scale="delayed", rounding="stochastic", history=3), "reuse")
RECIPE = lb.Recipe(lb.Gemm(DELAYED, DELAYED), DRAWN, DRAWN, name="both")


def prepared() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.SiLU(), nn.Linear(12, 8))
    lb.train.prepare_(model, RECIPE, skip=())
    return model


def sgd(*parts: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.1)


def step_of(model: nn.Module) -> int:
    return lb.train.state(model).step


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for number in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(number)) * 2**number).square().mean().backward()
        optimizer.step()


# -- which one ---------------------------------------------------------------------------------------------------------
def test_preparing_alone_gives_the_bits_of_an_attached_optimizer():
    def trained(attach: bool) -> list[Tensor]:
        model = prepared()
        optimizer = sgd(model)
        if attach:
            lb.train.state(model).attach(optimizer)
        train(model, optimizer, 4)
        assert step_of(model) == 4
        return list(model.state_dict().values())

    assert all(map(same_bits, trained(False), trained(True)))


def test_of_two_optimizers_the_one_with_the_first_layer_moves_it():
    model = prepared()
    first, second = sgd(model[0]), sgd(model[2])
    second.step()
    assert step_of(model) == 0
    first.step()
    second.step()
    assert step_of(model) == 1


def test_an_optimizer_of_other_parameters_moves_nothing():
    model = prepared()
    torch.optim.SGD([nn.Parameter(model[0].weight.detach().clone())], lr=0.1).step()
    sgd(nn.Linear(3, 3)).step()
    assert step_of(model) == 0


class Container(torch.optim.Optimizer):
    """An optimizer made of others, as torchtitan's: a step of it is one of each."""

    def __init__(self, *inner: torch.optim.Optimizer) -> None:
        super().__init__([p for one in inner for group in one.param_groups for p in group["params"]], {})
        self.inner = inner

    def step(self) -> None:
        for one in self.inner:
            one.step()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("compiled", [False, True])
def test_an_optimizer_made_of_others_takes_one_step(compiled):
    model, counter = prepared(), CompileCounterWithBackend("aot_eager")
    optimizer = Container(sgd(model[0]), sgd(model[2]))
    forward = torch.compile(model, backend=counter, fullgraph=True) if compiled else model
    for number in range(3):
        forward(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        assert step_of(model) == number + 1
    assert counter.frame_count == compiled


def test_an_optimizer_that_takes_over_is_followed():
    model = prepared()
    first, second = sgd(model), sgd(model)
    train(model, first, 2)
    train(model, second, 2)
    second.step()  # two steps of one optimizer are two, also without a forward
    assert step_of(model) == 5


def test_generator_and_discriminator_follow_their_own():
    generator, discriminator = prepared(), prepared()
    makes, judges = sgd(generator), sgd(discriminator)
    for number in range(3):
        judges.zero_grad()
        discriminator(generator(torch.randn(4, 8)).detach()).mean().backward()
        judges.step()
        makes.zero_grad()
        discriminator(generator(torch.randn(4, 8))).mean().backward()
        makes.step()
        assert (step_of(generator), step_of(discriminator)) == (number + 1, number + 1)


def test_a_frozen_layer_is_passed_over():
    model = prepared()
    model[0].requires_grad_(False)
    optimizer = sgd(model[2])
    train(model, optimizer, 2)
    assert step_of(model) == 2
    model[0].requires_grad_(True)  # now the first layer trains, by no optimizer
    optimizer.step()
    assert step_of(model) == 2
    optimizer.add_param_group({"params": [model[0].weight]})
    optimizer.step()
    assert step_of(model) == 3


def test_a_weight_that_is_computed_is_passed_over():
    model = prepared()
    parametrize.register_parametrization(model[0], "weight", nn.Identity())
    train(model, sgd(model[2]), 2)
    assert step_of(model) == 2
    parametrize.register_parametrization(model[2], "weight", nn.Identity())
    train(model, sgd(model), 2)
    assert step_of(model) == 4


def test_under_lora_the_adapters_optimizer_moves_it():
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(prepared(), peft.LoraConfig(target_modules=["0", "2"], r=2))
    assert not any(layer.weight.requires_grad for layer in adapted.modules() if isinstance(layer, TrainLinear))
    train(adapted, torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad]), 2)
    assert step_of(adapted) == 2


@pytest.mark.parametrize("where", ["first", "second"])
def test_an_optimizer_for_each_parameter_in_the_backward_pass(where):
    """It moves once a backward pass, at its end: layers that are still to come are of the same step."""

    def gradients(inside: bool) -> list[Tensor]:
        model = prepared()
        if where == "second":  # the layer that the state follows is not the last one of the backward pass
            model[0].weight.requires_grad_(False)
        state, seen = lb.train.state(model), []
        for param in (p for p in model.parameters() if p.requires_grad):
            own = torch.optim.SGD([param], lr=0.1)

            def update(param: Tensor, own: torch.optim.Optimizer = own) -> None:
                seen.append(param.grad.clone())
                assert not inside or state.step == number
                own.step()
                own.zero_grad()

            if inside:
                param.register_post_accumulate_grad_hook(update)
        follow = sgd(model)
        for number in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number)) * 4**number
            checkpoint(model, x, use_reentrant=False).square().mean().backward()
            if not inside:
                seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
                follow.step()
                follow.zero_grad()
            assert state.step == number + 1
        return sorted(seen, key=lambda grad: (grad.shape, grad.flatten()[0].item()))

    assert all(map(same_bits, gradients(True), gradients(False)))


def test_steps_in_the_backward_pass_count_as_step_is_called():
    model = prepared()
    optimizer = lb.optim.in_backward_(model, lb.optim.SGD, lr=0.1)
    for number in range(2):
        model(torch.randn(4, 8)).square().mean().backward()
        assert step_of(model) == number
        optimizer.step()
        assert step_of(model) == number + 1


# -- what is said goes first -------------------------------------------------------------------------------------------
def test_an_attached_optimizer_goes_first_and_removing_it_ends_all():
    model = prepared()
    first, second = sgd(model), sgd(model)
    handle = lb.train.state(model).attach(second)
    first.step()
    assert step_of(model) == 0
    second.step()
    assert step_of(model) == 1
    handle.remove()
    first.step()
    second.step()
    assert step_of(model) == 1


def test_who_advances_by_hand_moves_it_alone():
    model = prepared()
    state, optimizer = lb.train.state(model), sgd(model)
    for number in range(3):
        train(model, optimizer)
        state.advance()
        assert state.step == number + 1
    optimizer.step()
    assert state.step == 3


def test_a_step_that_a_scaler_skips_does_not_count():
    model = prepared()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=4.0)
    for x, steps in ((torch.full((4, 8), torch.inf), 0), (torch.randn(4, 8), 1)):
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert step_of(model) == steps


def test_a_compiled_step_counts():
    model = prepared()
    optimizer = sgd(model)
    step = torch.compile(lambda: optimizer.step(), backend="aot_eager")
    for number in range(2):
        model(torch.randn(4, 8)).sum().backward()
        step()
        assert step_of(model) == number + 1


# -- copies, and what is left behind -----------------------------------------------------------------------------------
def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_follows_its_own_optimizer(copied: Callable[[nn.Module], nn.Module]):
    model = prepared()
    lb.train.state(model).attach(sgd(model))
    twin = copied(model)
    sgd(twin).step()
    assert (step_of(model), step_of(twin)) == (0, 1)
    layer = copied(twin[2])  # of a part: it has a state of its own, and takes no other layer with it
    sgd(layer).step()
    assert (step_of(twin), step_of(layer)) == (1, 2)


class Adapted(nn.Module):
    """Prepared layers that are frozen, and a scale that trains beside them, as adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8)), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.scale


@pytest.mark.thinned(3)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_whose_layers_are_frozen_follows_the_adapters(copied: Callable[[nn.Module], nn.Module], compiled: bool):
    model = Adapted()
    lb.train.prepare_(model, RECIPE, skip=())
    model.body.requires_grad_(False)
    twin = copied(model)
    run = torch.compile(twin, backend="aot_eager", fullgraph=True) if compiled else twin
    optimizer = torch.optim.SGD([twin.scale], lr=0.1)
    for number in range(2):
        run(torch.randn(4, 8, requires_grad=True)).sum().backward()
        optimizer.step()
        assert (step_of(model), step_of(twin)) == (0, number + 1)


def test_nothing_is_kept_alive():
    model = prepared()
    train(model, sgd(model))
    gone = [weakref.ref(one) for one in (model, *model, lb.train.state(model), model[0].weight)]
    del model
    gc.collect()
    assert not any(one() is not None for one in gone)
    sgd(nn.Linear(3, 3)).step()


def test_a_plain_model_again_is_followed_no_longer():
    model = prepared()
    state = weakref.ref(lb.train.state(model))
    lb.train.convert_(model)
    gc.collect()
    sgd(model).step()
    assert state() is None


def test_a_step_after_convert_finds_plain_layers():
    """Somebody may hold the State of a model that has been converted back."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    lb.train.prepare_(model, "fp8", skip=())
    held, optimizer = lb.train.state(model), torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(4, 8)).sum().backward()
    lb.train.convert_(model)
    optimizer.step()
    assert held.step == 1
