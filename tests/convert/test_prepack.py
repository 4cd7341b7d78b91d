"""The packed layout: an inverse in every bit, the bits of plain layers, and what packed models can and cannot do."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bits import assert_same_bits
from torch import nn

import lowbit as lb
from lowbit.convert.prepack import no_gain_by_packing
from lowbit.nn import QuantLinear
from lowbit.nn.packed import PackedLinear
from lowbit.tensor import prepack

RECIPES = ("int8", "w4a8")
#: Whether prepack_ packs anything on this processor; the layers themselves work on every one.
GAIN = no_gain_by_packing(lb.scheme("int8:row"), lb.scheme("int8:row"), 128)
packs = pytest.mark.skipif(GAIN is not None, reason=str(GAIN))
GROUPED = lb.Recipe(lb.Gemm("int8:row", "uint4:group32:affine"), name="grouped")


def layer(recipe, k: int, n: int = 40, seed: int = 0) -> QuantLinear:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(k, n))
    lb.quantize_(model, recipe, skip=())
    return model[0]


def packed(recipe, k: int, n: int = 40, seed: int = 0) -> PackedLinear:
    plain = layer(recipe, k, n, seed)
    return PackedLinear(plain.weight, plain.bias, plain.recipe)


def mlp(recipe="int8") -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 33, bias=False))
    lb.quantize_(model, recipe, skip=())
    return model


# -- the layout --------------------------------------------------------------------------------------------------------
@settings(max_examples=60, deadline=None)
@given(
    scheme=st.sampled_from(["int8:row", "int4:row", "int4:group7", "uint8:row:affine", "uint4:group16:affine:bf16"]),
    rows=st.integers(1, 70),
    cols=st.integers(1, 70),
    seed=st.integers(0, 99),
)
def test_unpack_is_the_inverse_in_every_bit(scheme, rows, cols, seed):
    torch.manual_seed(seed)
    q = lb.quantize(torch.randn(rows, cols), scheme)
    back = prepack.unpack(prepack.prepack(q, lb.scheme("int8:row")))
    assert (back.scheme, back.shape, back.dtype) == (q.scheme, q.shape, q.dtype)
    for name, part in q.parts.items():
        assert_same_bits(back.parts[name], part, name)


def test_where_each_code_lies():
    """Byte ``i`` of dword ``d`` of a row is code ``4d + i``, with the sign bit of int8 flipped."""
    torch.manual_seed(0)
    q = lb.quantize(torch.randn(37, 21), "int8:row")
    buffer = prepack.prepack(q, lb.scheme("int8:row"))
    at = prepack.header_of(buffer)[prepack.Word.CODES]
    panels = buffer[at : at + 2 * 6 * 32 * 4].reshape(2, 6, 32, 4)
    for row, col in ((0, 0), (36, 20), (31, 7), (32, 4)):
        assert panels[row // 32, col // 4, row % 32, col % 4] == q.codes[row, col] ^ 0x80
    assert not panels[1, :, 5:].any() and not panels[:, 5, :, 1:].any()


@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b.clone().fill_(7), lambda b: b.float()])
def test_other_bytes_are_refused(change):
    buffer = packed("int8", 64).packed
    with pytest.raises(ValueError, match=r"packed weight|vector from prepack"):
        prepack.unpack(change(buffer))
    with pytest.raises((ValueError, TypeError, RuntimeError), match="packed"):
        torch.ops.lowbit.linear_packed(torch.randn(1, 64), change(buffer), 40)


@pytest.mark.parametrize("scheme, why", [("nf4", "integer"), ("fp8_e4m3:row", "integer"), ("int8:block8x8", "shares")])
def test_schemes_without_a_packed_layout_say_why(scheme, why):
    assert why in prepack.refusal(lb.scheme(scheme), lb.scheme("int8:row"))
    with pytest.raises(ValueError, match=why):
        prepack.prepack(lb.quantize(torch.randn(8, 128), scheme), lb.scheme("int8:row"))


# -- no bit depends on layout, mode or batch ---------------------------------------------------------------------------
def every_way(plain: QuantLinear, x: torch.Tensor):
    """The results of one layer on ``x`` in every mode and layout, by name."""
    made = PackedLinear(plain.weight, plain.bias, plain.recipe)
    again = made.unpacked()
    loaded = copy.deepcopy(plain)
    loaded.load_state_dict(made.state_dict())
    layers = {"plain": plain, "packed": made, "unpacked": again, "saved and loaded": loaded}
    for name, one in layers.items():
        yield f"{name}, grad", one(x).detach()
        yield f"{name}, x requires grad", one(x.clone().requires_grad_()).detach()
        with torch.no_grad():
            yield f"{name}, no grad", one(x)
        with torch.inference_mode():
            yield f"{name}, inference mode", one(x).clone()


@pytest.mark.parametrize("recipe", [*RECIPES, GROUPED, "int8-group"], ids=str)
@pytest.mark.parametrize("k", [64, 300, 1030])
def test_no_bit_depends_on_layout_mode_or_batch(recipe, k):
    plain = layer(recipe, k)
    x = torch.randn(40, k) * torch.logspace(-3, 3, 40)[:, None]
    whole = plain(x).detach()
    for m in range(1, 41):
        ways = every_way(plain, x[:m]) if m in (1, 2, 5, 13, 16, 17, 33, 40) else [("plain", plain(x[:m]).detach())]
        for name, y in ways:
            assert_same_bits(y, whole[:m], f"{name}, M = {m}")


@pytest.mark.parametrize("recipe", [*RECIPES, GROUPED], ids=str)
@pytest.mark.parametrize("way", ["plain", "packed"])
def test_compiled_cold_and_warm(recipe, way):
    plain = layer(recipe, 300)
    x, one = torch.randn(5, 300), plain if way == "plain" else PackedLinear(plain.weight, plain.bias, plain.recipe)
    compiled = torch.compile(one, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        cold = compiled(x)
        assert_same_bits(cold, plain(x))
        assert_same_bits(compiled(x), cold)


# -- packed models -----------------------------------------------------------------------------------------------------
@packs
@pytest.mark.parametrize("recipe", RECIPES)
def test_prepack_and_unpack_keep_every_bit(recipe):
    model, x = mlp(recipe), torch.randn(9, 128)
    y, state = model(x), {name: value.clone() for name, value in model.state_dict().items()}
    report = lb.prepack_(model)
    assert report.converted == ("0", "2") and not report.left
    assert all(type(model[i]) is PackedLinear for i in (0, 2))
    assert_same_bits(model(x), y)
    assert list(model.state_dict()) == list(state)
    for name, value in model.state_dict().items():
        assert_same_bits(value, state[name], name)
    again = lb.prepack_(model)
    assert not again.layers and set(again.left.values()) == {"packed already"}
    lb.unprepack_(model)
    assert all(type(model[i]) is QuantLinear for i in (0, 2))
    assert_same_bits(model(x), y)


@packs
def test_what_stays_plain_has_its_reason():
    model = mlp({"0": "int8", "2": "nf4"})
    report = lb.prepack_(model)
    assert report.converted == ("0",) and "integer weights" in report.left["2"]
    none = mlp("nf4")
    assert not lb.prepack_(none).layers and type(none[0]) is QuantLinear
    assert lb.unprepack_(none).left == {"0": "not packed", "2": "not packed"}
    with pytest.raises(ValueError, match="found nothing to convert"):
        lb.prepack_(nn.Sequential(nn.Linear(4, 4)))


@packs
def test_layers_inside_others_and_shared_ones():
    torch.manual_seed(0)
    model = nn.Sequential(nn.MultiheadAttention(36, 2), nn.Conv2d(3, 8, 3), nn.Linear(36, 36))
    model.again = model[2]
    lb.quantize_(model, "int8", skip=())
    x = torch.randn(2, 5, 36)
    y = model[0](x, x, x)[0]
    report = lb.prepack_(model)
    assert model.again is model[2] and type(model.again) is type(model[0].out_proj) is PackedLinear
    assert type(model[1].linear) is QuantLinear and "convolution" in report.left["1"]
    assert_same_bits(model[0](x, x, x)[0], y)
    lb.unprepack_(model)
    assert type(model.again) is type(model[0].out_proj) is QuantLinear and model.again is model[2]


@packs
def test_layers_with_one_weight_share_the_packed_one_and_share_again():
    model = mlp()
    model.append(QuantLinear(model[0].weight, None, model[0].recipe))
    model[3].share_weight(model[0])
    lb.prepack_(model)
    assert model[3].packed.data_ptr() == model[0].packed.data_ptr() and model[3].bias is None
    lb.unprepack_(model)
    assert model[3].codes is model[0].codes


@packs
def test_copies_pickles_and_files_leave_the_model_as_it_is(tmp_path):
    model, x = mlp("w4a8"), torch.randn(3, 128)
    y = model(x)
    lb.prepack_(model)
    buffers = [model[i].packed for i in (0, 2)]
    before = [b.clone() for b in buffers]
    twin, thawed = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    torch.save(model.state_dict(), tmp_path / "state.pt")
    lb.save_model(model, tmp_path / "saved")
    assert all(model[i].packed is b for i, b in zip((0, 2), buffers, strict=True))
    for b, was in zip(buffers, before, strict=True):
        assert_same_bits(b, was)
    plain = mlp("w4a8")
    plain.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    torch.manual_seed(3)
    fresh = nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 33, bias=False))
    for other in (twin, thawed, plain, lb.load_model(tmp_path / "saved", fresh)):
        assert_same_bits(other(x), y)
    assert type(twin[0]) is type(thawed[0]) is PackedLinear and type(fresh[0]) is QuantLinear
    assert twin[0].packed.data_ptr() != model[0].packed.data_ptr()


def test_a_packed_layer_loads_a_plain_state_and_refuses_another():
    one, other = packed("w4a8", 96, seed=1), layer("w4a8", 96, seed=2)
    x = torch.randn(4, 96)
    old = one.packed
    one.load_state_dict(other.state_dict())
    assert_same_bits(one(x), other(x))
    assert one.packed is not old  # what other layers or threads hold stays as it was
    for wrong in (layer("int8", 96), layer("w4a8", 96, n=41)):
        with pytest.raises(RuntimeError, match=r"w4a8|int4|shape"):
            one.load_state_dict(wrong.state_dict())
    assert_same_bits(one(x), other(x))


def test_a_backward_pass_and_a_move_are_refused_with_the_remedy():
    one = packed("int8", 64)
    y = one(torch.randn(3, 64, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"no backward pass; call lowbit.unprepack_\(model\)"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match=r"cannot move to meta; call lowbit.unprepack_\(model\) first"):
        nn.Sequential(one).to("meta")
    with lb.use_backend("reference"), torch.no_grad():
        x = torch.randn(3, 64)
        expected = one.unpacked()(x)
        assert_same_bits(one(x), expected)


@packs
def test_biases_require_grad_again_once_they_are_unpacked():
    model = mlp()
    bias = model[0].bias
    lb.prepack_(model)
    assert model[0].bias is bias and not bias.requires_grad
    assert not model(torch.randn(2, 128)).requires_grad
    lb.unprepack_(model)
    assert model[0].bias is bias and bias.requires_grad


def test_compiled_in_grad_mode():
    one, x = packed("int8", 64), torch.randn(3, 64)
    compiled = torch.compile(one, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(x).detach(), one(x).detach())


def test_casts_reach_the_bias_and_the_dtype_of_the_weight():
    one = packed("int8", 64)
    x, before = torch.randn(3, 64), one.packed.clone()
    one.bfloat16()
    assert one.bias.dtype == one.weight.dtype == torch.bfloat16 and one(x.bfloat16()).dtype == torch.bfloat16
    assert_same_bits(one.packed, before)
    with torch.autocast("cpu", torch.bfloat16):
        assert one(x).dtype == torch.bfloat16


@packs
def test_export_threads_and_averages():
    model, x = mlp(), torch.randn(5, 128)
    lb.prepack_(model)
    with torch.no_grad():
        y = model(x)
        assert_same_bits(torch.export.export(model, (x,)).module()(x), y)
        averaged = torch.optim.swa_utils.AveragedModel(model)
        for _ in range(3):
            averaged.update_parameters(model)
        assert_same_bits(averaged(x), y)
    found = []

    def work():
        with torch.no_grad():
            found.extend(torch.equal(model(x), y) for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        model.state_dict(), copy.deepcopy(model)
    for thread in threads:
        thread.join()
    assert len(found) == 200 and all(found)


# -- few rows ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("input", ["int8:row", "int8:group32", "int8:group64", "uint8:row:affine"])
@pytest.mark.parametrize(
    "weight",
    ["int8:row", "int8:group32", "int8:group600", "int4:row", "int4:group32", "int4:group32:fp16", "int4:group64:bf16",
     "int4:group1024", "int4:group24", "uint4:group32:affine", "uint8:row:affine", "int4:group128"],
)  # fmt: skip
def test_few_rows_have_the_bits_of_plain_weights(weight, input):
    """Every number of rows that the kernel for few rows takes, and some more; ragged panels, blocks and dwords."""
    torch.manual_seed(0)
    for n, k in ((33, 1100), (64, 96), (5, 37), (100, 1)):
        q = lb.quantize(torch.randn(n, k), weight)
        buffer, bias = prepack.prepack(q, lb.scheme(input)), torch.randn(n)
        x = torch.randn(18, k)
        parts = (q.codes, weight, q.scale, q.zero_point, q.global_scale, bias, input, torch.float32)
        wanted = torch.ops.lowbit.linear(x, *parts)
        for rows in (1, 2, 3, 4, 5, 8, 9, 16, 17):
            got = torch.ops.lowbit.linear_packed(x[:rows], buffer, n, bias, torch.float32)
            assert_same_bits(got, wanted[:rows], f"{n} x {k}, {rows} rows")
        half = x[:3].bfloat16()
        assert_same_bits(
            torch.ops.lowbit.linear_packed(half, buffer, n, bias, None),
            torch.ops.lowbit.linear(half, *parts[:-1], torch.bfloat16), "bf16"
        )  # fmt: skip


@packs
def test_packed_weights_lie_side_by_side_and_shared_ones_once():
    model = mlp()
    model.append(copy.deepcopy(model[0]))
    model[-1].share_weight(model[0])
    wanted = [layer.weight for layer in (model[0], model[2])]
    lb.prepack_(model)
    first, second, again = model[0].packed, model[2].packed, model[-1].packed
    assert again.data_ptr() == first.data_ptr()
    assert second.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    assert second.data_ptr() == first.data_ptr() + -(-first.nbytes // 64) * 64
    for layer, weight in zip((model[0], model[2]), wanted, strict=True):
        assert_same_bits(layer.weight.codes, weight.codes)
        assert_same_bits(copy.deepcopy(layer).weight.scale, weight.scale)
