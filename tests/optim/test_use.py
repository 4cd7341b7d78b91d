"""What people do with optimizers: groups, schedulers, clipping, closures, scalers, copies; and what is refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from support.bits import same_bits
from torch import nn

import lowbit as lb

CLASSES = [lb.optim.AdamW, lb.optim.AdamW8bit, lb.optim.Lion, lb.optim.SGD]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(80, 96), nn.Tanh(), nn.Linear(96, 64))


def loss(model: nn.Module, step: int = 0) -> torch.Tensor:
    x = torch.randn(8, 80, generator=torch.Generator().manual_seed(step))
    return model(x).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss(model, step).backward()
        optimizer.step()


def bits_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def test_groups_have_their_own_settings():
    model = network()
    first, last = model[0], model[2]
    optimizer = lb.optim.AdamW(
        [
            {"params": first.parameters(), "bits": 32, "weight_decay": 0.0},
            {"params": last.parameters(), "lr": 0.0},
        ],
        lr=1e-2,
    )
    before = bits_of(last)
    train(model, optimizer, range(3))
    assert optimizer.state[first.weight]["exp_avg"].dtype == torch.float32
    assert optimizer.state[last.weight]["exp_avg"].dtype == torch.uint8
    assert all(same_bits(a, b) for a, b in zip(before, bits_of(last), strict=True))


def test_a_group_that_is_added_later_trains():
    model = network()
    optimizer = lb.optim.AdamW(model[0].parameters())
    train(model, optimizer, range(2))
    optimizer.add_param_group({"params": list(model[2].parameters()), "bits": "bf16"})
    before = bits_of(model[2])
    train(model, optimizer, range(2, 4))
    assert not any(same_bits(a, b) for a, b in zip(before, bits_of(model[2]), strict=True))
    assert optimizer.state[model[2].weight]["exp_avg"].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="bits must be 32, 16, 8, 4"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "bits": 7})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=10, cycle_momentum=False),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 1e-3, 1e-2, cycle_momentum="momentum" in o.defaults),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [3]
        ),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    ],
)
def test_schedulers_reach_the_step(make):
    """Beside torch's fp32 optimizer under the same scheduler."""
    models = [network(), network()]
    optimizers = [
        lb.optim.SGD(models[0].parameters(), lr=1e-2, momentum=0.9, bits=32),
        torch.optim.SGD(models[1].parameters(), lr=1e-2, momentum=0.9),
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        scheduler = make(optimizer)
        for step in range(8):
            train(model, optimizer, range(step, step + 1))
            plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(1.0) if plateau else scheduler.step()
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_clipping_and_closures():
    model, other = network(), network()
    a = lb.optim.AdamW(model.parameters(), bits=32, lr=torch.tensor(1e-2))
    b = torch.optim.AdamW(other.parameters(), lr=1e-2)

    def closure(model, optimizer):
        def run():
            optimizer.zero_grad()
            value = loss(model) * 100
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            return value

        return run

    for _ in range(3):
        ours, theirs = a.step(closure(model, a)), b.step(closure(other, b))
        torch.testing.assert_close(ours, theirs)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_grad_scaler_unscales_and_skips():
    model, same = network(), network()
    optimizer, plain = lb.optim.AdamW(model.parameters()), lb.optim.AdamW(same.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        train(same, plain, range(step, step + 1))
    assert all(same_bits(a, b) for a, b in zip(bits_of(model), bits_of(same), strict=True))  # powers of two
    before, states = bits_of(model), copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    scaler.scale(loss(model) * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(same_bits(a, b) for a, b in zip(before, bits_of(model), strict=True))
    assert scaler.get_scale() == 2.0**9
    assert all(
        same_bits(states["state"][i][k], v) for i, s in optimizer.state_dict()["state"].items() for k, v in s.items()
    )


def test_tied_weights_step_once():
    model = nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 80))
    model[1].weight = model[0].weight
    optimizer = lb.optim.SGD(model.parameters(), lr=0.1, bits=32)
    x = torch.randn(4, 80)
    model(x).sum().backward()
    expected = model[0].weight.detach() - 0.1 * model[0].weight.grad
    optimizer.step()
    torch.testing.assert_close(model[0].weight.detach(), expected)
    assert len(optimizer.state) == 3


def test_what_has_no_gradient_or_no_elements_stays():
    still, empty, moving = (nn.Parameter(torch.ones(n)) for n in (5, 0, 5))
    optimizer = lb.optim.AdamW([still, empty, moving])
    empty.grad, moving.grad = torch.ones(0), torch.ones(5)
    optimizer.step()
    assert still not in optimizer.state
    assert still.eq(1).all()
    assert moving.lt(1).all()
    optimizer.zero_grad()
    assert moving.grad is None


def test_gradients_that_do_not_fit_are_refused_before_anything_moves():
    first, sparse = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(4, 5))
    optimizer = lb.optim.AdamW([("first", first), ("table", sparse)])
    first.grad = torch.ones(5)
    sparse.grad = torch.ones(4, 5).to_sparse()
    with pytest.raises(RuntimeError, match=r"gradient of table is sparse.*sparse=False"):
        optimizer.step()
    assert first.eq(1).all()
    assert not optimizer.state


@pytest.mark.parametrize(
    ("params", "options", "error", "said"),
    [
        ([torch.ones(3, dtype=torch.complex64)], {}, TypeError, "view_as_real"),
        ([torch.ones(3, dtype=torch.float64)], {}, TypeError, "float32, bfloat16 or float16"),
        ([torch.ones(3)], {"lr": -1.0}, ValueError, "lr must be a number at least 0"),
        ([torch.ones(3)], {"lr": "1e-3"}, ValueError, "lr must be a number at least 0"),
        ([torch.ones(3)], {"betas": (0.9, 1.0)}, ValueError, "betas must be two numbers, each at least 0 and less"),
        ([torch.ones(3)], {"betas": (0.9,)}, ValueError, "betas must be two numbers"),
        ([torch.ones(3)], {"seed": None}, ValueError, "seed must be a 64-bit integer"),
        ([torch.ones(3)], {"bits": "fp9"}, ValueError, "fp8"),
        ([torch.ones(3)], {"master": "bf16"}, ValueError, "'fp32', 'residual', 'stochastic'"),
        ([torch.ones(3)], {"rounding": "up"}, ValueError, "None, 'stochastic', 'nearest'"),
        ([torch.ones(3, dtype=torch.float16)], {"master": "residual"}, ValueError, "use 'fp32'"),
    ],
)
def test_bad_settings_say_what_to_do(params, options, error, said):
    with pytest.raises(error, match=said):
        lb.optim.AdamW([nn.Parameter(p) for p in params], **options)


def test_nesterov_needs_momentum():
    with pytest.raises(ValueError, match="nesterov needs momentum above 0"):
        lb.optim.SGD([nn.Parameter(torch.ones(3))], nesterov=True)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_go_on_in_every_bit(cls, clone):
    model = network()
    optimizer = cls(model.parameters(), lr=1e-2)
    train(model, optimizer, range(3))
    other, copied = clone((model, optimizer))
    train(model, optimizer, range(3, 6))
    train(other, copied, range(3, 6))
    assert all(same_bits(a, b) for a, b in zip(bits_of(model), bits_of(other), strict=True))


def test_settings_that_states_are_kept_by_stay():
    """Also in a copy, and after a state is loaded: codes would be read as what they are not."""
    model = network()
    optimizer = lb.optim.AdamW(model.parameters())
    train(model, optimizer, range(1))
    optimizer.load_state_dict(optimizer.state_dict())
    for which in (optimizer, copy.deepcopy(optimizer)):
        for name, value in (("bits", "dynamic8"), ("master", "residual")):
            before = which.param_groups[0][name]
            which.param_groups[0][name] = value
            for p in which.param_groups[0]["params"]:
                p.grad = torch.ones_like(p)
            with pytest.raises(ValueError, match="load this one's state_dict, which converts"):
                which.step()
            which.param_groups[0][name] = before
        which.step()


def test_a_width_in_the_name_is_the_width():
    with pytest.raises(ValueError, match=r"AdamW8bit has bits=8, got bits=32; use AdamW\(\.\.\., bits=32\)"):
        lb.optim.AdamW8bit([nn.Parameter(torch.ones(3))], bits=32)


def test_parameters_without_names_are_told_apart():
    params = [nn.Parameter(torch.ones(64, 80)) for _ in range(2)]
    optimizer = lb.optim.AdamW([{"params": [p]} for p in params])
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert list(lb.optim.saturation(optimizer)) == [f"parameter 0 of group {i} [64, 80]" for i in (0, 1)]


# -- warnings ----------------------------------------------------------------------------------------------------------
def test_warns_once_of_a_parameter_that_does_not_move():
    param = nn.Parameter(torch.ones(64, 80, dtype=torch.bfloat16))
    optimizer = lb.optim.AdamW([("weight", param)], lr=1e-5)
    param.grad = torch.randn_like(param)
    with pytest.warns(UserWarning, match=r"changed 0 of 5120 sampled elements of weight.*master='residual'") as told:
        for _ in range(12):
            optimizer.step()
    assert len(told) == 1


def test_small_parameters_are_watched_too():
    params = [("scale", nn.Parameter(torch.ones(100, dtype=torch.bfloat16)))]
    optimizer = lb.optim.AdamW(params, lr=1e-5)
    params[0][1].grad = torch.ones(100, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="changed 0 of 100 sampled elements of scale"):
        optimizer.step()


def test_names_small_parameters_whose_gradient_is_not_finite():
    params = [(name, nn.Parameter(torch.ones(10))) for name in "abc"]
    optimizer = lb.optim.AdamW(params)
    for _, p in params:
        p.grad = torch.ones(10)
    params[1][1].grad[3] = float("inf")
    with pytest.warns(UserWarning, match="the gradient of b is Inf or NaN") as told:
        optimizer.step()
    assert len(told) == 1


@pytest.mark.parametrize("bits", [32, 8])
def test_names_the_parameter_whose_gradient_is_not_finite(bits):
    good, bad = nn.Parameter(torch.ones(64, 80)), nn.Parameter(torch.ones(64, 80))
    optimizer = lb.optim.AdamW([("good", good), ("bad", bad)], bits=bits)
    good.grad, bad.grad = torch.ones_like(good), torch.ones_like(bad)
    bad.grad[3, 4] = float("nan")
    with pytest.warns(UserWarning, match="the gradient of bad is Inf or NaN at step 1"):
        optimizer.step()


def test_counts_codes_at_the_end_of_their_range():
    even, spread = nn.Parameter(torch.ones(64, 128)), nn.Parameter(torch.ones(64, 128))
    optimizer = lb.optim.AdamW([("even", even), ("spread", spread)], bits=4)
    even.grad = torch.ones_like(even)
    spread.grad = torch.logspace(-6, 0, 128).expand(64, 128).contiguous()
    optimizer.step()
    shares = lb.optim.saturation(optimizer)
    assert shares["even"] == {"exp_avg": 1.0, "exp_avg_sq_root": 1.0}
    assert shares["spread"]["exp_avg"] < 0.1


# -- parameters that another library replaces in the groups --------------------------------------------------------
def test_parameters_put_in_the_place_of_others_keep_their_random_bits():
    found = []
    for replaces in (False, True):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(64, 64)) for _ in range(3)]
        optimizer = lb.optim.AdamW8bit([{"params": params[:1]}, {"params": params[1:]}], lr=1e-2)
        if replaces:
            for group in optimizer.param_groups:
                group["params"] = [nn.Parameter(param.detach().clone()) for param in group["params"]]
            params = [param for group in optimizer.param_groups for param in group["params"]]
        for _ in range(3):
            for param in reversed(params):
                param.grad = param.detach().sin()
            optimizer.step()
        found.append([*params, *(value for param in params for value in optimizer.state[param].values())])
    assert all(map(same_bits, *found))


def test_states_of_replaced_parameters_are_not_left_behind():
    param = nn.Parameter(torch.randn(64, 64))
    optimizer = lb.optim.AdamW8bit([param], lr=1e-2)
    param.grad = torch.ones_like(param)
    optimizer.step()
    new = nn.Parameter(param.detach().clone())
    new.grad = torch.ones_like(new)
    optimizer.param_groups[0]["params"] = [new]
    with pytest.raises(ValueError, match=r"have stepped \(1\) are no longer .* be lost; call Accelerator"):
        optimizer.step()
    optimizer.param_groups[0]["params"] = [param, new]
    with pytest.raises(ValueError, match=r"with 1 parameters, got 2; call add_param_group"):
        optimizer.step()
