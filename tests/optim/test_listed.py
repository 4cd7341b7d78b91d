"""Many parameters in one op (``optimizer_steps_``): every bit is that of a step for each, whatever is in the list."""

from __future__ import annotations

import warnings
import weakref

import pytest
import torch
from support.bits import assert_same_bits
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowbit as lb
from lowbit.backends import steps
from lowbit.ops.steps import OptimizerSteps, each

pytestmark = pytest.mark.skipif(not steps.is_native(), reason="the native library is not built")

#: A number, few elements, rows that nothing divides, whole blocks, several pieces, and what two threads share.
SHAPES = ((), (1,), (7,), (63, 66), (64, 64), (5, 3, 16, 31), (3, 2050), (300, 256))
BITS = [row.name for row in lb.optim.STATES.values()]
OPTIMIZERS = {
    "adamw": lb.optim.AdamW,
    "lion": lb.optim.Lion,
    "sgd": lb.optim.SGD,
    "momentum": lambda params, **options: lb.optim.SGD(params, momentum=0.9, **options),
    "muon": lambda params, **options: lb.optim.Muon([p for p in params if p.dim() < 2], **options),
}
WEIGHTS = [
    (torch.float32, None), (torch.bfloat16, None), (torch.float16, None), (torch.bfloat16, "stochastic"),
    (torch.bfloat16, "fp32"), (torch.float16, "fp32"), (torch.bfloat16, "residual"),
]  # fmt: skip


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def give_gradients(params: list[nn.Parameter], step: int, without: tuple[int, ...] = ()) -> None:
    generator = torch.Generator().manual_seed(step)
    for place, param in enumerate(params):
        made = torch.randn(param.shape, generator=generator).to(param.dtype)
        if place % 2 and param.dim() == 2:  # as a transposed matrix has it
            made = made.t().contiguous().t()
        param.grad = None if place in without else made


def one_by_one(optimizer: lb.optim.Optimizer, monkeypatch: pytest.MonkeyPatch) -> lb.optim.Optimizer:
    """The optimizer with a step of ``optimizer_step`` for each parameter."""
    monkeypatch.setattr(optimizer, "_is_listed", lambda layout, param: False)
    monkeypatch.setattr(optimizer, "_is_small", lambda work: False)
    return optimizer


def assert_same(a: lb.optim.Optimizer, b: lb.optim.Optimizer, what: str) -> None:
    pairs = zip(a.param_groups[0]["params"], b.param_groups[0]["params"], strict=True)
    for place, (one, other) in enumerate(pairs):
        assert_same_bits(one.detach(), other.detach(), f"{what}, parameter {place}")
        assert a.state[one].keys() == b.state[other].keys()
        for name, value in a.state[one].items():
            assert_same_bits(value, b.state[other][name], f"{what}, {name} of {place}")


class Seen(TorchDispatchMode):
    """The names of ops."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


# -- bits --------------------------------------------------------------------------------------------------------------
@pytest.mark.thinned(5)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_of_a_step_for_each(name, bits, monkeypatch):
    before = torch.get_num_threads()
    try:
        for place, (dtype, master) in enumerate(WEIGHTS):
            torch.set_num_threads(1 + place % 2)
            many, single = (
                OPTIMIZERS[name](parameters(dtype), bits=bits, master=master, seed=3, weight_decay=0.1)
                for _ in range(2)
            )  # fmt: skip
            one_by_one(single, monkeypatch)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # bf16 that does not move
                for step in (1, 2):
                    for optimizer in (many, single):
                        give_gradients(optimizer.param_groups[0]["params"], step)
                        optimizer.step()
            assert_same(many, single, f"{name}, {bits}, {dtype}, {master}")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bits", [8, 32])
def test_what_changes_between_steps_is_seen(bits, monkeypatch):
    """Parameters' data, missing gradients, settings of the group, states that are replaced or loaded."""
    many, single = (lb.optim.AdamW(parameters(), bits=bits, seed=5) for _ in range(2))
    one_by_one(single, monkeypatch)
    for step in range(1, 9):
        for optimizer in (many, single):
            params, group = optimizer.param_groups[0]["params"], optimizer.param_groups[0]
            give_gradients(params, step, without=(1, 4) if step == 2 else ())
            if step == 3:
                params[3].data = params[3].detach() * 2
            if step == 4:
                group["betas"], group["lr"] = (0.5, 0.6), 0.5
            if step == 5:
                group["rounding"] = "nearest"
            if step == 6:
                optimizer.state[params[4]]["exp_avg"] = optimizer.state[params[4]]["exp_avg"].clone()
                params[5].grad = params[5].grad.to(memory_format=torch.channels_last)
            if step == 7:
                optimizer.load_state_dict(optimizer.state_dict())
                group = optimizer.param_groups[0]
                group["maximize"] = True
            optimizer.step()
        assert_same(many, single, f"step {step}")


def test_parameters_and_counters_that_change_between_steps_are_seen(monkeypatch):
    """More parameters, others in place of some, another layout and dtype of one, counts of steps that differ."""
    many, single = (lb.optim.AdamW8bit(parameters(), seed=5, master="fp32") for _ in range(2))
    one_by_one(single, monkeypatch)
    for step in range(1, 8):
        for optimizer in (many, single):
            group = optimizer.param_groups[0]
            params = group["params"]
            if step == 2:
                optimizer.add_param_group({"params": parameters(torch.bfloat16), "lr": 0.1})
            if step == 3:
                params[4].data = params[4].detach().t()
            if step == 4:
                optimizer.state[params[3]]["step"].fill_(1000)
                optimizer.state[params[4]]["step"] = torch.tensor(7.0)
            if step == 5:
                params[2].requires_grad_(False)
            if step == 6:
                optimizer.state.pop(params[7])
            if step == 7:
                params.reverse()
            for group in optimizer.param_groups:
                give_gradients(group["params"], step, without=(2,) if step in (5, 6) else ())
            optimizer.step()
        assert_same(many, single, f"step {step}")


def test_the_dtype_of_a_parameter_that_has_stepped_stays():
    optimizer = lb.optim.AdamW8bit(parameters())
    params = optimizer.param_groups[0]["params"]
    for step in (1, 2):
        give_gradients(params, step)
        optimizer.step()
    params[3].grad, params[3].data = None, params[3].detach().bfloat16()
    give_gradients(params, 3)
    before = [param.detach().clone() for param in params]
    with pytest.raises(ValueError, match="has stepped with rule, bits, master and dtype"):
        optimizer.step()
    for param, old in zip(params, before, strict=True):
        assert_same_bits(param.detach(), old, "nothing has changed")


def test_memory_of_what_is_replaced_is_freed_at_once():
    """What is known of parameters from step to step holds neither their numbers, nor gradients, nor states."""
    optimizer = lb.optim.AdamW8bit(parameters())
    params = optimizer.param_groups[0]["params"]
    give_gradients(params, 1)
    optimizer.step()
    param = params[4]
    kept = [weakref.ref(x.untyped_storage()) for x in (param, param.grad, optimizer.state[param]["exp_avg"])]
    assert all(storage() is not None for storage in kept)
    param.data, param.grad = torch.zeros_like(param), None
    optimizer.state[param]["exp_avg"] = optimizer.state[param]["exp_avg"].clone()
    assert [storage() for storage in kept] == [None] * 3


def test_parameters_that_share_memory_step_in_turns(monkeypatch):
    made = []
    for way in ("listed", "single"):
        flat = torch.arange(9000.0) / 9000
        params = [nn.Parameter(flat[:6000].view(60, 100)), nn.Parameter(flat[3000:].view(60, 100))]
        optimizer = lb.optim.AdamW8bit(params)
        if way == "single":
            one_by_one(optimizer, monkeypatch)
        for step in (1, 2):
            give_gradients(params, step)
            optimizer.step()
        made.append(flat)
    assert_same_bits(*made)


# -- one op ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("bits", "calls"), [(8, 2), (4, 3), (32, 1)])
def test_one_op_for_all_parameters_that_are_kept_alike(bits, calls):
    """Those of few elements are kept in fp32, and odd ones in 8 bits where codes of 4 come in pairs."""
    params = [nn.Parameter(torch.randn(shape)) for shape in (*SHAPES, (65, 65), *([(70, 70)] * 20))]
    optimizer = lb.optim.AdamW(params, bits=bits)
    give_gradients(params, 1)
    optimizer.step()
    with Seen() as seen:
        optimizer.step()
    assert seen.names.count("lowbit::optimizer_steps_") == calls
    assert not [name for name in seen.names if name.startswith("lowbit::optimizer_step_out")]


def test_an_autograd_graph_sees_that_parameters_have_stepped():
    params = [nn.Parameter(torch.randn(80, 80)) for _ in range(3)]
    optimizer = lb.optim.AdamW8bit(params)
    give_gradients(params, 1)
    loss = (params[2] ** 2).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- what is not served, and what is wrong ----------------------------------------------------------------------------
def test_another_backend_has_the_same_bits(monkeypatch):
    many, single = (lb.optim.AdamW8bit(parameters()[2:5]) for _ in range(2))
    one_by_one(single, monkeypatch)
    for optimizer in (many, single):
        give_gradients(optimizer.param_groups[0]["params"], 1)
    with lb.use_backend("reference"):
        many.step()
    single.step()
    assert_same(many, single, "reference")


def test_an_error_is_that_of_the_step_of_one(monkeypatch):
    texts = []
    for way in ("listed", "single"):
        params = parameters()
        optimizer = lb.optim.AdamW8bit(params)
        if way == "single":
            one_by_one(optimizer, monkeypatch)
        give_gradients(params, 1)
        optimizer.step()
        optimizer.state[params[4]]["exp_avg_scale"] = torch.zeros(3)
        with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
            optimizer.step()
        texts.append((type(caught.value), str(caught.value)))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("place", [2, 4, 7])
def test_a_gradient_that_is_not_finite_is_told_of_its_parameter(place):
    params = parameters()
    optimizer = lb.optim.AdamW8bit([(f"p{i}", param) for i, param in enumerate(params)])
    for step in (1, 2):
        give_gradients(params, step)
        params[place].grad[(0,) * params[place].dim()] = torch.inf if step == 2 else 1.0
        if step == 1:
            optimizer.step()
    with pytest.warns(UserWarning, match=f"gradient of p{place} is Inf or NaN at step 2"):
        optimizer.step()


def _call(params: list[Tensor], look: int = 0) -> OptimizerSteps:
    count = len(params)
    zeros = [torch.zeros_like(p) for p in params]
    places = [number for p in params for number in (p.numel(), 0, 0, p.numel())]
    return OptimizerSteps(
        params, [torch.ones_like(p) for p in params], [], zeros, [], [torch.zeros_like(p) for p in params], [], places,
        "adamw", (1.0, 0.1, 0.9, 0.1, 1.0, 1e-8, 0.1), "fp32", "fp32", "nearest", "nearest", None, look,
    ) if count else None  # fmt: skip


def test_the_op_on_fake_tensors_checks_and_makes_the_answer():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        call = _call([torch.zeros(40), torch.zeros(3, 5)])
        assert torch.ops.lowbit.optimizer_steps_(*call).shape == (2,)
        with pytest.raises(TypeError, match="param must be float32"):
            torch.ops.lowbit.optimizer_steps_(*call._replace(params=[p.double() for p in call.params]))


def test_the_answer_looks_at_few_floats_alone():
    call = _call([torch.zeros(40), torch.zeros(3000)], look=100)
    for grad in call.grads:
        grad[0] = torch.nan
    assert torch.ops.lowbit.optimizer_steps_(*call).tolist() == [0, 1]
    with lb.use_backend("reference"):
        assert torch.ops.lowbit.optimizer_steps_(*call).tolist() == [0, 1]


def test_each_is_the_step_of_one_tensor():
    first, second = each(_call([torch.zeros(40), torch.zeros(3, 5)]))
    assert (first.param.shape, second.param.shape) == ((1, 40), (1, 15))
    assert (second.rule, second.offset, second.pitch) == ("adamw", 0, 15)
