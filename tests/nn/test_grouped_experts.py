"""Experts by grouped products, as on CUDA devices, in Triton's interpreter: against one expert after the other."""

from __future__ import annotations

import copy
import gc
import io

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")
import lowbit as lb
from lowbit.backends import triton
from lowbit.memory.inference import estimate_generation
from lowbit.nn import QuantExperts, QuantLinear, experts
from lowbit.nn.experts import stack_experts_
from lowbit.nn.linear import PARTS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECIPES = (
    "int8-weight-only", "int4-weight-only:group128", "nf4", "fp8-weight-only", "mxfp4-weight-only", "int8", "w4a8",
    "mxfp8", "nvfp4-weight-only", "int8:hadamard",
)  # fmt: skip
HIDDEN, INNER, EXPERTS = 72, 40, 4
ROUTES = {
    "uneven, with padding": torch.tensor([[0, 1], [1, 0], [3, 4], [4, 4], [0, 1], [0, 3], [1, 0]]),
    "one has all": torch.full((5, 1), 2),
    "one token": torch.tensor([[3, 1, 0]]),
    "all are padding": torch.full((2, 2), EXPERTS),
}


@pytest.fixture(autouse=True)
def stacked_here(monkeypatch):
    monkeypatch.setattr(experts, "_STACKED_ON", (DEVICE,))


class Like(nn.Module):
    """What QuantExperts asks of the module that it is made of."""

    has_gate = True

    def __init__(self):
        super().__init__()
        self.act_fn = nn.SiLU()

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up


def made(recipe: str = "int8-weight-only", bias: bool = False, cls: type = Like) -> QuantExperts:
    torch.manual_seed(0)
    found = lb.recipe(recipe)

    def layer(rows: int, cols: int) -> QuantLinear:
        trained = nn.Parameter(torch.randn(rows), requires_grad=False) if bias else None
        plain = torch.randn(rows, cols)
        weight = plain if found.rotation is None else lb.hadamard(plain, found.rotation)
        return QuantLinear(lb.quantize(weight, found.weight), trained, found)

    gate_up = [layer(2 * INNER if cls.has_gate else INNER, HIDDEN) for _ in range(EXPERTS)]
    return QuantExperts(cls(), gate_up, [layer(HIDDEN, INNER) for _ in range(EXPERTS)]).to(DEVICE)


def by_loop(module: QuantExperts, *inputs: torch.Tensor) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "_STACKED_ON", ())
        return module(*inputs)


def inputs(route: torch.Tensor, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    x, weights = torch.randn(len(route), HIDDEN, generator=generator), torch.rand(*route.shape, generator=generator)
    return x.to(DEVICE, dtype), route.to(DEVICE), weights.to(DEVICE, dtype)


def is_stacked(module: QuantExperts) -> bool:
    """Whether each part of the experts' weights is one tensor."""
    return all(
        len({layer._parameters[name].untyped_storage().data_ptr() for layer in layers}) == 1
        for layers in (module.gate_up, module.down)
        for name in PARTS
        if layers[0]._parameters[name] is not None
    )


@pytest.fixture
def at_once(monkeypatch):
    """Counts the calls that grouped products serve."""
    calls, own = [], QuantExperts._at_once
    monkeypatch.setattr(QuantExperts, "_at_once", lambda self, *args: calls.append(1) or own(self, *args))
    return calls


@pytest.mark.thinned(9)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("recipe", RECIPES)
@torch.no_grad()
def test_all_at_once_is_one_after_the_other(recipe, route, at_once):
    module = made(recipe, bias="nvfp4" in recipe or recipe == "int8")
    assert is_stacked(module)
    given = inputs(ROUTES[route])
    with lb.use_backend("triton"):
        y = module(*given)
    expected = by_loop(module, *given)
    assert at_once and y.dtype == expected.dtype
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("route", ["uneven, with padding", "one token"])
@torch.no_grad()
def test_integers_have_the_bits_of_one_after_the_other(route, at_once):
    """Of products alone: a token's experts are added in another order."""
    module, (x, index, _) = made("int8"), inputs(ROUTES[route])
    for place in range(index.shape[1]):
        with lb.use_backend("triton"):
            y = module(x, index[:, place, None], torch.ones_like(x[:, :1]))
        assert torch.equal(y, by_loop(module, x, index[:, place, None], torch.ones_like(x[:, :1])))
    assert len(at_once) == index.shape[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_and_weights_of_fp32(dtype, at_once):
    module = made("int4-weight-only:group128")
    x, index, weights = inputs(ROUTES["uneven, with padding"], dtype)
    for w in (weights, weights.float()):
        with lb.use_backend("triton"):
            y = module(x, index, w)
        expected = by_loop(module, x, index, w)
        assert y.dtype == dtype
        torch.testing.assert_close(y.float(), expected.float(), rtol=0.02, atol=0.02 * float(expected.abs().max()))
    assert len(at_once) == 2


class NoReading(TorchDispatchMode):
    """Raises where a value of a tensor is read by the host, or a shape depends on one."""

    READS = (
        torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten._unique2,
        torch.ops.aten.masked_select,
    )  # fmt: skip

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in self.READS, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", ["int8-weight-only", "int8", "mxfp8"])
@torch.no_grad()
def test_no_value_is_read_by_the_host(recipe):
    module, given = made(recipe, bias=True), inputs(ROUTES["uneven, with padding"])
    with lb.use_backend("triton"), NoReading():
        module(*given)
    with pytest.raises(AssertionError, match=r"unique|nonzero|scalar"), NoReading():
        by_loop(module, *given)


@torch.no_grad()
def test_a_weight_of_padding_counts_for_nothing():
    module = made()
    x, index, weights = inputs(ROUTES["uneven, with padding"])
    weights = weights.masked_fill(index == EXPERTS, torch.nan)
    with lb.use_backend("triton"):
        y = module(x, index, weights)
    assert bool(y.isfinite().all())
    torch.testing.assert_close(y, by_loop(module, x, index, weights), rtol=1e-5, atol=1e-4)


@torch.no_grad()
def test_experts_without_a_gate(at_once):
    class Ungated(Like):
        has_gate = False

    module, given = made(cls=Ungated), inputs(ROUTES["uneven, with padding"])
    with lb.use_backend("triton"):
        torch.testing.assert_close(module(*given), by_loop(module, *given), rtol=1e-5, atol=1e-4)
    assert at_once


# -- where one expert runs after the other -----------------------------------------------------------------------------
def hooked(module):
    module.down[1].register_forward_hook(lambda layer, args, y: None)


def of_its_own_forward(module):
    module.gate_up[0].forward = module.gate_up[0].forward


def of_another_scheme(module):
    module.down[2] = QuantLinear(lb.quantize(torch.randn(HIDDEN, INNER), "int4:row"), None, module.recipe).to(DEVICE)


def apart(module):
    scale = module.down[2].scale
    scale.data = scale.data.clone()


@pytest.mark.parametrize("change", [hooked, of_its_own_forward, of_another_scheme, apart])
@torch.no_grad()
def test_layers_that_differ_run_one_after_the_other(change, at_once):
    module, given = made(), inputs(ROUTES["one token"])
    change(module)
    with lb.use_backend("triton"):
        torch.testing.assert_close(module(*given), by_loop(module, *given), rtol=1e-5, atol=1e-4)
    assert not at_once


def test_gradients_come_of_one_after_the_other(at_once):
    module, (x, index, weights) = made(), inputs(ROUTES["uneven, with padding"])
    x.requires_grad_()
    module(x, index, weights).sum().backward()
    assert x.grad is not None and not at_once
    with lb.use_backend("triton"):
        module(x.detach(), index, weights)
    assert at_once


@pytest.mark.parametrize("part", ["bias", "activation"])
def test_trained_parameters_get_their_gradients(part, at_once):
    module, given = made(bias=True), inputs(ROUTES["one token"])
    module.act_fn = nn.PReLU().to(DEVICE)
    trained = module.act_fn.weight if part == "activation" else module.down[0].bias
    module.act_fn.weight.requires_grad_(part == "activation")
    trained.requires_grad_()
    module(*given).sum().backward()
    assert trained.grad is not None and not at_once


@pytest.mark.parametrize("recipe", ["fp8-tensor", "fp8"])
@torch.no_grad()
def test_scales_of_inputs_that_span_rows(recipe, at_once):
    found = lb.recipe(recipe)
    module, given = made(recipe), inputs(ROUTES["one token"])
    with lb.use_backend("triton"):
        module(*given)
    assert bool(at_once) == (found.input is None or experts.has_rows_of_its_own(found.input))


@torch.no_grad()
def test_other_backends_run_one_after_the_other(at_once):
    module, given = made(), inputs(ROUTES["one token"])
    with lb.use_backend("reference"):
        module(*given)
    assert not at_once


# -- stacks ------------------------------------------------------------------------------------------------------------
@torch.no_grad()
def test_stacks_are_of_the_layers_own_tensors_and_survive_what_modules_do():
    module, given = made("int4-weight-only:group128"), inputs(ROUTES["one token"])
    before = {name: value.clone() for name, value in module.state_dict().items()}
    parameters = dict(module.named_parameters())
    module.double().bfloat16().float()
    assert is_stacked(module) and all(module.get_parameter(name) is p for name, p in parameters.items())
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    other = made("int4-weight-only:group128")
    for parameter in other.parameters():
        parameter.zero_()
    other.load_state_dict(torch.load(io.BytesIO(buffer.getvalue())))
    for one in (copy.deepcopy(module), other):
        assert is_stacked(one)
        assert all(torch.equal(value, before[name]) for name, value in one.state_dict().items())
        with lb.use_backend("triton"):
            assert torch.equal(one(*given), module(*given))


@torch.no_grad()
def test_stacks_are_streamed_and_come_back(tmp_path, at_once):
    """Experts of 4 KiB and more, which leave their stack and return to one."""
    module, given = made("int8-weight-only"), inputs(ROUTES["one token"])
    model = nn.Sequential(module)
    expected = by_loop(module, *given)
    report = lb.memory.stream_blocks_(model, tmp_path, [module])
    assert not is_stacked(module) and report
    with lb.use_backend("triton"):
        torch.testing.assert_close(module(*given), expected, rtol=1e-5, atol=1e-4)
        assert not at_once
        lb.memory.unstream_(model)
        assert is_stacked(module)
        torch.testing.assert_close(module(*given), expected, rtol=1e-5, atol=1e-4)
    assert at_once


@torch.no_grad()
def test_stack_experts_stacks_what_was_replaced():
    module = made()
    for layer in module.down:
        layer.codes = nn.Parameter(layer.codes.clone(), requires_grad=False)
    assert not is_stacked(module)
    stack_experts_(nn.ModuleDict({"experts": module}))
    assert is_stacked(module)


def test_inference_mode(at_once):
    """Tensors that are made in it cannot be replaced, and stay where they are."""
    module, given = made(), inputs(ROUTES["one token"])
    with torch.inference_mode(), lb.use_backend("triton"):
        module.stack_()
        y = module(*given)
        assert at_once
        other = made()
        assert not is_stacked(other)
        torch.testing.assert_close(other(*given), y, rtol=1e-5, atol=1e-4)
    assert len(at_once) == 1


def test_tied_experts_stay_tied():
    module = made()
    module.down[1].share_weight(module.down[0])
    module.stack_()
    assert module.down[1].codes is module.down[0].codes
    assert torch.equal(module.down[1].codes, module.down[0].codes)


class Sparse(nn.Module):
    """A language model of one mixture, whose router sends tokens where it likes."""

    def __init__(self, experts: QuantExperts) -> None:
        super().__init__()
        self.embed, self.router, self.experts = nn.Embedding(32, HIDDEN), nn.Linear(HIDDEN, EXPERTS), experts

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens).flatten(0, 1)
        weights, index = self.router(x).softmax(-1).topk(2)
        return self.experts(x, index, weights)


@pytest.fixture
def collected(monkeypatch):
    """The interpreter keeps what a kernel was started with in cycles of references, until they are collected."""
    start = triton.start
    monkeypatch.setattr(
        triton, "start", lambda launches, device: (start(launches, device), launches.clear(), gc.collect())
    )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["int8-weight-only", "nf4"])
def test_an_estimate_of_generation_counts_the_rows_of_all_experts(recipe, at_once, collected):
    """Of the loop, in which an expert has its rows alone, less would be said."""
    model, tokens = Sparse(made(recipe)).to(DEVICE).eval(), torch.zeros(1, 512, dtype=torch.long, device=DEVICE)
    with lb.use_backend("triton"), torch.no_grad():
        whole = estimate_generation(model, 513, 1, lambda model, tokens, cache: model(tokens), lambda model: ())
        model(tokens)
        held = lb.memory.profile(model)
        with held:
            model(tokens)
    assert len(at_once) == 4  # of both forwards of the estimate
    assert held.peak_bytes - held.by_kind.get("other", 0) == pytest.approx(whole.peak_bytes, rel=0.005)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "_STACKED_ON", ())
        loop = estimate_generation(model, 513, 1, lambda model, tokens, cache: model(tokens), lambda model: ())
    assert loop.peak_bytes < whole.peak_bytes
