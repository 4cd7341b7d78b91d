"""QuantLinear: its product against fp64, its gradient, its bits under casts, autocast, compile, export and sharding."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.bits import same_bits
from support.layers import DYNAMIC, bound, exact
from support.variants import not_2_10, serving
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lowbit as lb
from lowbit.nn import QuantLinear

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def layer(recipe: str, inputs: int, outputs: int, bias: bool = True, dtype: torch.dtype = torch.float32) -> QuantLinear:
    model = nn.Sequential(nn.Linear(inputs, outputs, bias, dtype=dtype))
    lb.quantize_(model, recipe)
    return model[0]


def encoded(x: torch.Tensor, made: QuantLinear):
    return x if made.recipe.input is None else lb.quantize(x, made.recipe.input)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("recipe", DYNAMIC)
def test_forward_is_the_product_of_what_was_encoded(recipe, dtype):
    made = layer(recipe, 130, 19, dtype=dtype)
    x = torch.randn(7, 130, dtype=dtype)
    y = made(x)
    a = encoded(x, made)
    assert y.dtype == dtype
    assert bool(
        ((y.double() - exact(a, made.weight, made.bias)).abs() <= bound(a, made.weight, made.bias, dtype)).all()
    )
    assert same_bits(y, lb.scaled_mm(a, made.weight, made.bias, out_dtype=dtype))


@given(
    recipe=st.sampled_from(sorted(DYNAMIC)),
    inputs=st.sampled_from([1, 17, 33, 128]),
    outputs=st.integers(1, 9),
    shape=st.sampled_from([(), (0,), (1,), (5,), (2, 3), (2, 0, 3), (1, 2, 1)]),
    bias=st.booleans(),
    dtype=st.sampled_from(FLOATS),
)
def test_any_shape(recipe, inputs, outputs, shape, bias, dtype):
    torch.manual_seed(inputs * 100 + outputs)
    made = layer(recipe, inputs, outputs, bias, dtype)
    x = torch.randn(*shape, inputs, dtype=dtype)
    y = made(x)
    assert y.shape == (*shape, outputs) and y.dtype == dtype
    flat = x.reshape(-1, inputs)
    assert same_bits(y.reshape(-1, outputs), made(flat))
    if flat.numel():
        a = encoded(flat, made)
        assert bool(((y.reshape(-1, outputs).double() - exact(a, made.weight, made.bias)).abs()
                     <= bound(a, made.weight, made.bias, dtype)).all())  # fmt: skip


def test_strides_do_not_matter():
    made = layer("int8", 33, 5)
    x = torch.randn(33, 4).t()
    assert same_bits(made(x), made(x.contiguous()))


@pytest.mark.parametrize("cast", ["bfloat16", "half", "double"])
@pytest.mark.parametrize("recipe", [*DYNAMIC, "affine", "bf16-scales", "fp16-scales", "nf4-e4m3"])
def test_casting_the_model_changes_no_bit_of_codes_or_scales(recipe, cast):
    schemes = {
        "affine": "uint4:group32:affine", "bf16-scales": "int8:row:bf16", "fp16-scales": "int4:group32:fp16",
        "nf4-e4m3": "nf4:e4m3",
    }  # fmt: skip
    chosen = lb.Recipe(lb.Gemm(None, schemes[recipe]), name=recipe) if recipe in schemes else recipe
    model = nn.Sequential(nn.Linear(70, 9), nn.LayerNorm(9))
    lb.quantize_(model, chosen)
    before = copy.deepcopy(model[0].weight)
    state = {name: value.clone() for name, value in model[0].state_dict().items() if name != "bias"}
    getattr(model, cast)()
    dtype = {"half": torch.float16, "double": torch.float64}.get(cast, torch.bfloat16)
    after = model[0].weight
    assert after.dtype == dtype and model[0].bias.dtype == dtype and model[1].weight.dtype == dtype
    assert all(same_bits(part, after.parts[name]) for name, part in before.parts.items())
    assert all(same_bits(value, model[0].state_dict()[name]) for name, value in state.items())
    assert same_bits(before.dequantize(torch.float32), after.dequantize(torch.float32))
    assert not any(p.is_floating_point() for name, p in model[0].named_parameters() if name != "bias")


def test_a_state_says_its_scheme():
    made, other = (layer(lb.Recipe(lb.Gemm(None, "nf4:group64:e4m3")), 70, 9) for _ in range(2))
    state = made.state_dict()
    assert bytes(state["_extra_state"].tolist()) == b"nf4:e4m3"
    for name, fits in (("nf4:e4m3", True), ("nf4", False), ("no scheme", False)):
        state["_extra_state"] = torch.tensor(list(name.encode()), dtype=torch.uint8)
        if fits:
            other.load_state_dict(state)
            assert same_bits(other.weight.dequantize(), made.weight.dequantize())
        else:
            with pytest.raises(RuntimeError, match="the state has a weight in scheme"):
                other.load_state_dict(state)


def test_weight_answers_what_model_code_asks():
    made = layer("int4-weight-only", 100, 6, dtype=torch.bfloat16)
    assert (made.in_features, made.out_features) == (100, 6)
    assert made.weight.shape == (6, 100) and made.weight.ndim == 2
    assert made.weight.dtype == torch.bfloat16 and made.weight.device.type == "cpu"
    assert made.bias.dtype == torch.bfloat16 and made.bias.requires_grad
    assert not any(p.requires_grad for name, p in made.named_parameters() if name != "bias")
    assert "recipe=int4-weight-only, weight=int4:group128, input=float" in repr(made)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("recipe", DYNAMIC)
def test_the_gradient_passes_straight_through(recipe, dtype):
    made = layer(recipe, 33, 17, dtype=dtype)
    x = torch.randn(2, 3, 33, dtype=dtype, requires_grad=True)
    y = made(x)
    with torch.no_grad():
        assert same_bits(y, made(x))
    g = torch.randn_like(y)
    y.backward(g)
    expected = g @ made.weight.dequantize(dtype)
    assert x.grad.dtype == dtype
    # The matrix product of both is torch's own, on the same numbers; only the order of a sum may differ.
    torch.testing.assert_close(x.grad, expected, rtol=2 * torch.finfo(dtype).eps, atol=64 * torch.finfo(dtype).eps)
    torch.testing.assert_close(made.bias.grad, g.sum((0, 1)), rtol=4 * torch.finfo(dtype).eps, atol=1e-2)
    assert made.codes.grad is None


def test_an_adapter_learns_around_a_quantized_layer():
    made = layer("int8", 16, 8)
    made.requires_grad_(False)
    down, up = nn.Linear(16, 2, bias=False), nn.Linear(2, 8, bias=False)
    x = torch.randn(5, 16)
    first = torch.zeros(5, 16, requires_grad=True)
    y = made(x + first) + up(down(x + first))
    y.sum().backward()
    assert first.grad.abs().sum() > 0 and down.weight.grad.abs().sum() > 0 and made.bias.grad is None


@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_average_of_the_floating_point_parameters_keeps_the_bits_of_the_others(use_buffers):
    ema = get_ema_multi_avg_fn(0.9)
    model = nn.Sequential(layer("nvfp4", 40, 33), nn.Linear(33, 5))
    averaged = AveragedModel(
        model, multi_avg_fn=lambda a, b, n: ema(a, b, n) if a[0].is_floating_point() else None, use_buffers=use_buffers
    )
    first = model[1].weight.detach().clone()
    for _ in range(3):
        averaged.update_parameters(model)
        with torch.no_grad():
            model[1].weight.add_(1.0)
    for name, part in model[0].weight.parts.items():
        assert same_bits(averaged.module[0].weight.parts[name], part)
    torch.testing.assert_close(averaged.module[1].weight.detach(), first + 0.1 * 0.9 + 0.2)


def test_dynamic_layers_save_no_activation():
    made = layer("int8", 64, 8)
    made.bias.requires_grad_(False)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.numel() * t.element_size()) or t, lambda t: t
    ):
        made(torch.randn(1000, 64, requires_grad=True))
    assert sum(saved) == made.weight.nbytes


def test_backward_runs_where_forward_ran():
    made = layer("int8", 16, 8)
    x = torch.randn(5, 16, requires_grad=True)
    with lb.use_backend("reference"):
        y = made(x)
    with serving() as served:
        y.sum().backward()
    assert served == {"dequantize": "reference"}


@pytest.mark.parametrize("recipe", ["int8", "int4-weight-only", "fp8", "nvfp4"])
@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
def test_autocast(recipe, grad):
    made = layer(recipe, 33, 6)
    x = torch.randn(4, 33, requires_grad=grad)
    with torch.autocast("cpu", torch.bfloat16):
        y = made(x)
    assert y.dtype == torch.bfloat16
    a = x.detach().bfloat16() if made.recipe.input is None else encoded(x.detach(), made)
    assert same_bits(y.detach(), lb.scaled_mm(a, made.weight, made.bias.detach(), out_dtype=torch.bfloat16))
    if grad:
        y.sum().backward()
        assert x.grad.dtype == torch.float32
    with torch.autocast("cpu", enabled=False):
        assert made(x).dtype == torch.float32


def test_other_inputs_are_refused():
    made = layer("int8", 33, 6)
    with pytest.raises(TypeError, match="float64"):
        made(torch.randn(2, 33, dtype=torch.float64))
    with pytest.raises(ValueError, match="same K"):
        made(torch.randn(2, 32))


@pytest.mark.parametrize("recipe", DYNAMIC)
def test_copies_and_state(recipe):
    made = layer(recipe, 33, 6)
    x = torch.randn(2, 33)
    other = layer(recipe, 33, 6)
    assert not same_bits(other(x), made(x))
    other.load_state_dict(made.state_dict())
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), other):
        assert same_bits(again(x), made(x))


@pytest.mark.parametrize(
    ("saved", "other"),
    [("int8:row", "fp8_e4m3:row"), ("int8:row:bf16", "int8:row"), ("fp8_e4m3:row", "fp8_e5m2:row"),
     ("int4:group32:bf16", "int4:group32:fp16")],
)  # fmt: skip
def test_codes_of_another_scheme_are_refused(saved, other):
    source, target = (layer(lb.Recipe(lb.Gemm(None, name), name="mine"), 33, 6) for name in (saved, other))
    before = copy.deepcopy(target)
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=f"a weight in scheme '{saved}', and this layer one in '{other}'"):
            target.load_state_dict(source.state_dict(), strict=strict)
    assert same_bits(target.weight.dequantize(), before.weight.dequantize()) and same_bits(target.bias, before.bias)


def test_scales_that_were_cast_are_refused():
    made = layer("int8", 33, 6)
    state = {name: value.float() if name == "scale" else value for name, value in made.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"scale: the state has dtype torch.float32, and this layer torch.int32"):
        made.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Missing.*_extra_state"):
        made.load_state_dict({name: v for name, v in made.state_dict().items() if name != "_extra_state"})


@pytest.mark.parametrize("recipe", ["int8", "int4-weight-only", "nvfp4"])
def test_the_meta_device(recipe):
    y = layer(recipe, 33, 6).to("meta")(torch.empty(2, 3, 33, dtype=torch.bfloat16, device="meta"))
    assert y.is_meta and y.shape == (2, 3, 6) and y.dtype == torch.bfloat16


class Model(nn.Module):
    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(33), nn.Linear(33, 48), nn.Linear(48, 33)
        lb.quantize_(self, recipe)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


@pytest.mark.thinned(4)
@pytest.mark.parametrize("recipe", ["int8", "int4-weight-only", "mxfp8", "nvfp4"])
def test_compile_without_graph_breaks(recipe):
    model = Model(recipe)
    x = torch.randn(2, 3, 33)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert same_bits(compiled(x), model(x))
    one = torch.compile(model.up, backend="aot_eager", fullgraph=True)
    assert same_bits(one(x), model.up(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert same_bits(one(x), model.up(x))
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    compiled(a).square().sum().backward()
    model(b).square().sum().backward()
    assert same_bits(a.grad, b.grad)


def test_inductor():
    model, x = Model("int8"), torch.randn(2, 3, 33)
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        # Inductor changes bits of the norm and the activation, which may move a code by one step of 1/127 of a row.
        torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0.05)
        lone = torch.compile(model.up, fullgraph=True)
        assert same_bits(lone(x), model.up(x))


@pytest.mark.parametrize("recipe", ["int8", "nf4", "nvfp4"])
def test_export(recipe):
    model, x = Model(recipe), torch.randn(4, 3, 33)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    assert same_bits(program.module()(x), model(x))
    more = torch.randn(7, 3, 33)
    assert same_bits(program.module()(more), model(more))


# -- what a layer keeps from one call to the next ----------------------------------------------------------------------
def moved_scale(made: QuantLinear) -> None:
    made.scale.data = made.scale.data.clone().add_(1 << 23)  # twice as large: the next exponent


def assigned(made: QuantLinear) -> None:
    state = {name: value.clone() for name, value in made.state_dict().items()}
    state["scale"] += 1 << 23
    made.load_state_dict(state, assign=True)


def written(made: QuantLinear) -> None:
    made.scale.data.add_(1 << 23)


@pytest.mark.parametrize("change", [moved_scale, assigned, written])
def test_a_layer_sees_its_parameters_change(change):
    made, x = layer("int8", 40, 6, bias=False), torch.randn(3, 40)
    with torch.no_grad():
        before = made(x)
        assert torch.equal(made(x), before)
        change(made)
        assert torch.equal(made(x), 2 * before)


def test_a_layer_sees_its_bias_and_its_dtype_change():
    made, x = layer("int8", 40, 6), torch.randn(3, 40)
    with torch.no_grad():
        made(x)
        before = made(x)
        made.bias = nn.Parameter(made.bias + 1)
        torch.testing.assert_close(made(x), before + 1)
        made.bias.data = made.bias.data.to(torch.bfloat16) - 1
        assert same_bits(made(x), lb.functional.linear(x, made.weight, made.bias, made.recipe.input))
        made.bias = None
        without = made(x)
        made.bfloat16()
        assert made.weight.dtype == torch.bfloat16 and made(x.bfloat16()).dtype == torch.bfloat16
        assert torch.equal(made(x), without)


def test_a_layer_that_was_called_differentiates_and_changes_backend():
    made, x = layer("int8", 40, 6), torch.randn(3, 40)
    with torch.no_grad():
        made(x)
        made(x)
    made(x).sum().backward()
    torch.testing.assert_close(made.bias.grad, torch.full((6,), 3.0))
    x.requires_grad_()
    made(x).sum().backward()
    torch.testing.assert_close(x.grad, made.weight.dequantize().sum(0).expand(3, 40))
    with torch.no_grad(), lb.use_backend("reference"), serving() as served:
        made(x)
    assert served["linear"] == "reference"


FSDP = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
import lowbit as lb

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2], RANK=sys.argv[1], WORLD_SIZE="2")
torch.set_num_threads(1)
dist.init_process_group("gloo")
for recipe in ("int8", "int4-weight-only:group32", "nvfp4", "fp8-block", "fp8-tensor"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 7), nn.GELU(), nn.Linear(7, 3))
    lb.quantize_(model, recipe)
    x = torch.randn(5, 40).bfloat16()
    whole = {n: p.detach().clone() for n, p in model.named_parameters()}
    import copy
    expected = copy.deepcopy(model).bfloat16()(x)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for part in (model[0], model[2], model):
        fully_shard(part, mp_policy=policy)
    assert model[0].codes.to_local().shape[0] in (3, 4)
    assert torch.equal(model(x), expected), recipe
    with torch.no_grad():
        assert torch.equal(model(x), expected), recipe
    for n, p in model.named_parameters():
        assert torch.equal(p.full_tensor(), whole[n]), (recipe, n)
    g = x.clone().requires_grad_()
    model(g).sum().backward()
    assert g.grad.abs().sum() > 0
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@not_2_10("FSDP2 makes shards of integer parameters require grad, which raises")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_fsdp2_shards_rows_and_keeps_bits():
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen([sys.executable, "-c", FSDP, str(rank), port], stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    for rank in ranks:
        _, error = rank.communicate(timeout=120)
        assert rank.returncode == 0, error


# -- widths that bytes of codes do not tell ----------------------------------------------------------------------------
@pytest.mark.parametrize("recipe", ["nf4", "int4-weight-only", "w4a8", "mxfp6", "int8"])
def test_an_input_of_another_width_is_refused(recipe):
    model = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 4))
    lb.quantize_(model, recipe, skip=())
    with pytest.raises(ValueError, match=r"in_features=64; got an input \[2, 63\]"):
        model(torch.randn(2, 63))


@pytest.mark.parametrize("recipe", ["nf4", "int8"])
def test_a_state_of_another_width_is_refused(recipe, tmp_path):
    def made(width):
        model = nn.Sequential(nn.Linear(width, 4, bias=False))
        lb.quantize_(model, recipe, skip=())
        return model

    with pytest.raises(RuntimeError, match="63"):
        made(64).load_state_dict(made(63).state_dict())
    for saved, other in ((63, 64), (64, 63)):
        lb.save_model(made(saved), tmp_path / str(saved))
        with pytest.raises(ValueError, match=str(saved)):
            lb.load_model(tmp_path / str(saved), nn.Sequential(nn.Linear(other, 4, bias=False)))
        assert (
            lb.load_model(tmp_path / str(saved), nn.Sequential(nn.Linear(saved, 4, bias=False)))[0].in_features == saved
        )
