"""Every optimizer loads its own state bit for bit, and the state of torch's optimizer of its name converted."""

from __future__ import annotations

import io
import math
import warnings

import pytest
import torch
from support.bits import assert_same_bits

import lowbit as lb

SHAPES = [(), (1,), (0,), (7,), (4096,), (4097,), (64, 65), (96, 80), (0, 8), (16, 8, 3, 3), (32, 8, 17)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPTIMIZERS = {
    "AdamW": (lb.optim.AdamW, {}),
    "Lion": (lb.optim.Lion, {}),
    "SGD": (lb.optim.SGD, {}),
    "SGD with momentum": (lb.optim.SGD, {"momentum": 0.9}),
    "Adafactor": (lb.optim.Adafactor, {}),
    "Adafactor with momentum": (lb.optim.Adafactor, {"beta1": 0.9}),
    "Muon": (lb.optim.Muon, {"ns_steps": 1}),
    "Muon of stacks": (lb.optim.Muon, {"ns_steps": 1, "batch_dims": 1}),
    "Muon without matrices": (lb.optim.Muon, {"muon": False}),
    "GaLore": (lb.optim.GaLore, {"rank": 52, "refresh": 2}),
    "Apollo": (lb.optim.Apollo, {"rank": 52, "refresh": 2}),
    "APOLLO-mini of stacks": (lb.optim.Apollo, {"rank": 1, "batch_dims": 1}),
}
#: torch's optimizers, the options of both, and the shapes that torch's takes.
TORCHS = {
    "AdamW": ({}, SHAPES),
    "SGD": ({"momentum": 0.9}, SHAPES),
    "Adafactor": ({}, [shape for shape in SHAPES if math.prod(shape)]),
    "Muon": ({}, [(64, 65), (96, 80)]),
}


def parameters(dtype, shapes=SHAPES):
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def step(optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    optimizer.step()


def through_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_same_states(mine, theirs):
    mine, theirs = mine.state_dict()["state"], theirs.state_dict()["state"]
    assert mine.keys() == theirs.keys()
    for index in mine:
        assert list(mine[index]) == list(theirs[index])
        for name, value in mine[index].items():
            assert_same_bits(theirs[index][name], value, f"{name} of {SHAPES[index]}")


@pytest.mark.thinned(7)
@pytest.mark.filterwarnings("ignore:.*half of its last place")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [row.name for row in lb.optim.STATES.values()])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_own_state_comes_back_bit_for_bit(name, bits, dtype):
    make, options = OPTIMIZERS[name]
    for master in (None, "fp32") + (("residual", "stochastic") if dtype != torch.float16 else ()):
        settings = {"lr": 1e-2, **options, "bits": bits, "master": master}
        params = parameters(dtype)
        optimizer = make(params, **settings)
        step(optimizer, 0), step(optimizer, 1)
        copies = [torch.nn.Parameter(param.detach().clone()) for param in params]
        resumed = make(copies, **settings)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            resumed.load_state_dict(through_file(optimizer.state_dict()))
        assert_same_states(optimizer, resumed)
        step(optimizer, 2), step(resumed, 2)
        assert_same_states(optimizer, resumed)
        for param, copy in zip(params, copies, strict=True):
            assert_same_bits(copy.detach(), param.detach(), f"{list(param.shape)}")


def in_fp32(state):
    states = {i: {k: v.float() for k, v in s.items()} for i, s in state["state"].items()}
    return {"state": states, "param_groups": state["param_groups"]}


@pytest.mark.thinned(5)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("bits", [32, 16, 8, 4])
@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.filterwarnings("ignore:.*load_state_dict")
def test_torchs_state_is_converted(name, bits, dtype):
    """A state in 16 bits loads as the same numbers in fp32 do; a model in fp64 hands its state to one in fp32."""
    options, shapes = TORCHS[name]
    theirs = getattr(torch.optim, name)(parameters(dtype, shapes), lr=1e-3, **options)
    step(theirs, 0), step(theirs, 1)
    state = theirs.state_dict()
    for master in (None, "fp32"):
        made = []
        for given in (through_file(state), in_fp32(state)):
            params = parameters(torch.float32 if dtype == torch.float64 else dtype, shapes)
            optimizer = getattr(lb.optim, name)(params, bits=bits, master=master, **options)
            optimizer.load_state_dict(given)
            made.append(optimizer)
        assert_same_states(*made)
        for index, state_of in enumerate(made[0].state_dict()["state"].values()):
            for moment in ("exp_avg", "momentum_buffer"):
                if bits == 32 and moment in state_of:
                    assert_same_bits(state_of[moment].reshape(shapes[index]), state["state"][index][moment].float())
            if bits == 32 and "exp_avg_sq_root" in state_of:
                roots = state["state"][index]["exp_avg_sq"].float().sqrt()
                assert_same_bits(state_of["exp_avg_sq_root"].reshape(shapes[index]), roots)
        step(made[0], 2), step(made[1], 2)
        assert_same_states(*made)
        assert all(param.isfinite().all() for group in made[0].param_groups for param in group["params"])


@pytest.mark.parametrize("shape", [(6, 4, 3, 5), (3, 7, 2), (4, 1, 3, 3), (5, 1, 1, 1)])
def test_adafactors_second_moment_of_many_axes_is_converted_both_ways(shape):
    """torch factors the last two axes, this package ``[D0, rest]``: what one stands for is factored anew, in fp64."""
    theirs, mine = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    before, after = torch.optim.Adafactor([theirs]), lb.optim.Adafactor([mine])
    for seed in range(3):
        step(before, seed)
    with pytest.warns(UserWarning, match="row_var is averaged over the axes"):
        after.load_state_dict(before.state_dict())
    row, col = (before.state[theirs][name].double() for name in ("row_var", "col_var"))
    square = (row @ col / row.mean(-2, keepdim=True)).flatten(1)
    torch.testing.assert_close(after.state[mine]["row_var"][:, 0], square.mean(1).float())
    torch.testing.assert_close(after.state[mine]["col_var"][0], square.mean(0).float())

    again = torch.optim.Adafactor([theirs])
    again.load_state_dict(after.torch_state_dict())
    row, col = (after.state[mine][name].double() for name in ("row_var", "col_var"))
    square = (row @ col / row.mean()).view(shape)
    torch.testing.assert_close(again.state[theirs]["row_var"], square.mean(-1, keepdim=True).float())
    torch.testing.assert_close(again.state[theirs]["col_var"], square.mean(-2, keepdim=True).float())
    step(again, 3)
    assert theirs.isfinite().all()


def test_a_momentum_that_has_not_begun_is_none():
    """Older releases of torch save ``momentum_buffer: None`` of a parameter that has not stepped with momentum."""
    param = torch.nn.Parameter(torch.ones(4))
    theirs = torch.optim.SGD([param], momentum=0.9)
    state = theirs.state_dict()
    state["state"] = {0: {"momentum_buffer": None}}
    mine = lb.optim.SGD([param], momentum=0.9)
    mine.load_state_dict(state)
    assert not mine.state
    step(mine, 0)


@pytest.mark.parametrize("count", [math.nan, math.inf, -1.0, 0.5, [1.0, 2.0], "3"])
@pytest.mark.parametrize("name", ["AdamW", "SGD with momentum", "Adafactor", "Muon", "Lion"])
def test_a_count_of_steps_that_is_none_is_refused(name, count):
    make, options = OPTIMIZERS[name]
    params = parameters(torch.float32, [(4, 4)])
    optimizer = make([("decoder.weight", params[0])], **options)
    step(optimizer, 0)
    state = optimizer.state_dict()
    before = {k: v.clone() for k, v in state["state"][0].items()}
    for given in (count, count if isinstance(count, str) else torch.tensor(count)):
        broken = {**state, "state": {0: {**state["state"][0], "step": given}}}
        with pytest.raises(ValueError, match=r"step of decoder\.weight: expected a whole number of at least 0, got"):
            optimizer.load_state_dict(broken)
    after = optimizer.state_dict()["state"][0]
    assert all(after[name] is not None and torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("AdamW", "lr", math.nan),
        ("AdamW", "betas", (0.9, math.nan)),
        ("Lion", "weight_decay", -1.0),
        ("SGD with momentum", "momentum", math.inf),
        ("SGD with momentum", "dampening", math.nan),
        ("Adafactor", "eps", (math.nan, 1e-3)),
        ("Muon", "ns_coefficients", (1.0, math.nan, 1.0)),
        ("Muon", "ns_coefficients", (1.0, 1.0)),
    ],
)
def test_settings_in_a_state_are_checked(name, setting, value):
    make, options = OPTIMIZERS[name]
    optimizer = make(parameters(torch.float32, [(4, 4)]), **options)
    step(optimizer, 0)
    state = optimizer.state_dict()
    state["param_groups"] = [{**group, setting: value} for group in state["param_groups"]]
    with pytest.raises(ValueError, match=setting):
        optimizer.load_state_dict(state)
    step(optimizer, 1)
