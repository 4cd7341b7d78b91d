"""Panels, the second layout of a weight's codes: an index formula, round trips, and layers that hide them."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from bits import assert_same_bits
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from variants import ALL, Variant, forced_isa, isas

import lowbit as lb
from lowbit.backends import cpu_mm, native
from lowbit.formats import FORMATS, Format
from lowbit.functional import linear, panels_serve
from lowbit.nn import QuantLinear
from lowbit.ops.linear import make_call
from lowbit.ops.samples import random_matrix
from lowbit.panels import from_panels, panels_shape, to_panels

FITTING = [f for f in FORMATS.values() if f.bits in (4, 8) and f.kind != "exponent"]


# -- the layout --------------------------------------------------------------------------------------------------------
def by_formula(codes: np.ndarray, format: Format) -> np.ndarray:
    """Panels of codes ``[N, K]``, one a byte: where each code goes, taken alone."""
    rows, cols = codes.shape
    out = np.zeros((-(-rows // 32), -(-cols * format.bits // 32), 32, 4), np.uint8)
    if format.kind == "integer" and format.signed:
        codes = codes ^ (1 << (format.bits - 1))
    for n in range(rows):
        for k in range(cols):
            dword, within = divmod(k, 32 // format.bits)
            out[n // 32, dword, n % 32, within % 4] |= codes[n, k] << (4 * (within // 4))
    return out.reshape(*out.shape[:2], 32, 4)


@given(st.sampled_from(FITTING), st.integers(0, 70), st.integers(0, 37), st.integers(0, 2**31 - 1))
def test_panels_are_those_of_the_formula_and_turn_back(format, rows, cols, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << format.bits, (rows, cols), dtype=torch.uint8, generator=generator)
    stored = lb.pack(codes, format.bits)
    panels = to_panels(stored, format, cols)
    assert tuple(panels.shape) == panels_shape(rows, cols, format.bits)
    np.testing.assert_array_equal(panels.numpy(), by_formula(codes.numpy(), format))
    again = from_panels(panels, format, rows, cols)
    assert again.is_contiguous()
    assert_same_bits(again, stored)
    assert to_panels(stored.to("meta"), format, cols).shape == panels.shape


def test_strides_do_not_matter_and_padding_bits_are_dropped():
    codes = torch.randint(0, 256, (9, 70), dtype=torch.uint8)
    assert_same_bits(to_panels(codes.t(), FORMATS["int8"], 9), to_panels(codes.t().contiguous(), FORMATS["int8"], 9))
    odd = torch.full((3, 2), 0xFF, dtype=torch.uint8)
    back = from_panels(to_panels(odd, FORMATS["int4"], 3), FORMATS["int4"], 3, 3)
    assert back.tolist() == [[0xFF, 0x0F]] * 3


# -- the same Quantized ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["int8:row", "int4:group32", "uint4:group32:affine", "nf4:dq", "nvfp4"])
def test_a_quantized_in_panels_is_the_same_number(name):
    q = lb.quantize(random_matrix(37, 70, seed=1).bfloat16(), name)
    packed = q.in_panels()
    assert (q.layout, packed.layout, packed.in_panels() is packed) == ("rows", "panels", True)
    assert packed.stored.dim() == 4 and repr(packed) == repr(q) and packed.nbytes == q.nbytes
    assert (packed.shape, packed.device, packed.dtype, packed.scheme) == (q.shape, q.device, q.dtype, q.scheme)
    tree, *rows = (
        pytree.tree_map(torch.clone, packed), packed.map(torch.clone), packed.cpu(), copy.deepcopy(packed),
        pickle.loads(pickle.dumps(packed)),
    )  # fmt: skip
    assert tree.layout == "panels" and all(again.layout == "rows" for again in rows)
    for again in (packed, tree, *rows):
        assert list(again.parts) == list(q.parts)
        for part, value in q.parts.items():
            assert_same_bits(again.parts[part], value, part)
    assert_same_bits(packed.dequantize(), q.dequantize())
    assert_same_bits(packed.t().dequantize(), q.t().dequantize())
    x = random_matrix(3, 70, seed=2)
    assert_same_bits(lb.scaled_mm(x, packed), lb.scaled_mm(x, q))


def test_what_has_no_panels():
    with pytest.raises(ValueError, match="panels hold codes of 8 or 4 bits, not of 6"):
        lb.quantize(torch.randn(3, 32), "mxfp6").in_panels()
    cube = lb.quantize(torch.randn(2, 3, 4), "int8:row")
    assert cube.layout == "rows"
    with pytest.raises(ValueError, match=r"in_panels\(\) needs a matrix, got shape \[2, 3, 4\]"):
        cube.in_panels()


@pytest.mark.parametrize("variant", ALL)
@pytest.mark.parametrize("input", [None, "int8:row"])
def test_linear_reads_panels(variant: Variant, input: str | None):
    x = random_matrix(5, 96, seed=1).to(variant.device).requires_grad_()
    q = lb.quantize(random_matrix(37, 96, seed=2).to(variant.device), "int4:group32")
    if variant.refuses("linear", x, q, None, input):
        pytest.skip("not served")
    grads = []
    with variant.use():
        for weight in (q, q.in_panels()):
            y = linear(x, weight, None, input)
            assert_same_bits(y, linear(x, q, None, input))
            grads += torch.autograd.grad(y.square().sum(), x)
    assert_same_bits(grads[0], grads[1])


@pytest.mark.parametrize(
    ("scheme", "shape", "message"),
    [
        (
            "int8:tensor",
            (1, 2, 32, 4),
            "panels, of codes of 8 or 4 bits with scales of their own for each row, and int",
        ),
        ("fp6_e2m3:row", (1, 2, 32, 4), r"and fp6_e2m3:row has others; give its codes as rows \[out features, 6\]"),
        ("int8:row", (1, 3, 32, 4), r"panels of a \[5, 8\] weight .* are \[1, 2, 32, 4\] bytes, got \[1, 3, 32, 4\]"),
        ("int8:row", (5, 8), None),
    ],
)
def test_what_does_not_fit_is_refused(scheme, shape, message):
    call = make_call(torch.randn(3, 8), torch.randn(5, 8), None, scheme)
    call = call._replace(weight=torch.zeros(shape, dtype=torch.uint8))
    if message is None:
        torch.ops.lowbit.linear(*call)
        return
    with pytest.raises(ValueError, match=message):
        torch.ops.lowbit.linear(*call)


# -- which weights -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize(
    ("weight", "input", "cols", "serve"),
    [
        ("int8:row", "int8:row", 33, True), ("int4:group32", "int8:row", 64, True),
        ("uint4:group32:affine", "uint8:tensor:affine", 64, True), ("int4:group32", "int8:row", 48, False),
        ("int8:group7", "int8:row", 70, False), ("int8:row", None, 64, False), ("int8:col", "int8:row", 64, False),
        ("int8:row", "fp8_e4m3:row", 64, False), ("fp8_e4m3:row", "int8:row", 64, False),
        ("mxfp6", "int8:row", 64, False), ("int4:row", "int8:group12", 72, False),
        ("int4:row", "int8:group16", 64, True),
    ],
)  # fmt: skip
def test_which_weights_are_packed(isa, weight, input, cols, serve):
    q = lb.quantize(torch.randn(5, cols), weight)
    scheme = None if input is None else lb.scheme(input)
    with forced_isa(isa):
        vnni = isa == "avx512" and "avx512_vnni" in native.features() and "amx_int8" not in native.features()
        words = isa == "avx2" and (q.scheme.format.bits == 8 or (scheme is not None and not scheme.affine))
        assert panels_serve(q, scheme) == (serve and (vnni or words))
        assert not panels_serve(q.to("meta"), scheme)
    with lb.use_backend("reference"):
        assert panels_serve(q, scheme) is None


@pytest.mark.parametrize(("recipe", "serve"), [("int8", True), ("w4a8", True), ("int4-weight-only", False)])
def test_which_layers_are_packed(recipe, serve):
    made = nn.Sequential(nn.Linear(128, 32))
    lb.quantize_(made, recipe)
    with torch.no_grad():
        made(torch.randn(3, 128))
    panels = serve and panels_serve(lb.quantize(torch.randn(32, 128), "int8:row"), lb.scheme("int8:row"))
    assert made[0].weight.layout == ("panels" if panels else "rows")


def test_fields_are_those_of_rows():
    q = lb.quantize(torch.randn(5, 64), "int4:group32")
    assert [f.name for f in dataclasses.fields(q)][:2] == ["codes", "scale"]
    for held in (q, q.in_panels()):
        doubled = dataclasses.replace(held, scale=held.scale * 2)
        assert_same_bits(doubled.codes, q.codes)
        assert_same_bits(doubled.dequantize(), q.dequantize() * 2)
        with pytest.raises(dataclasses.FrozenInstanceError):
            held.scale = q.scale


def test_another_last_axis_is_refused():
    """Panels pad K to dwords, which then would not tell."""
    q = lb.quantize(torch.randn(5, 64), "int8:row")
    for weight in (q, q.in_panels()):
        with pytest.raises(ValueError, match="must end in the same K"):
            linear(torch.randn(2, 61), weight, None, "int8:row")
    made = nn.Sequential(nn.Linear(128, 32))
    lb.quantize_(made, "int8")
    for _ in range(2):
        with torch.no_grad(), pytest.raises(ValueError, match="must end in the same K"):
            made(torch.randn(3, 127))


def test_results_are_not_written_to_a_copy():
    q = lb.quantize(torch.randn(5, 64), "int8:row").in_panels()
    with pytest.raises(ValueError, match="codes in rows"):
        lb.quantize(torch.randn(5, 64), "int8:row", out=q)
    moment = lb.quantize(torch.zeros(5, 256), "fp8_e4m3:group256").in_panels()
    param = torch.randn(5, 256)
    with pytest.raises(ValueError, match="codes in rows"):
        lb.adamw_(param, torch.randn(5, 256), moment, moment, step=1)


def test_a_layer_chooses_its_layout_once_nothing_decides_on_its_calls():
    made = layer()
    x = torch.randn(3, 128)
    with torch.no_grad():
        with lb.use_backend("reference"):
            wanted = made(x)
        assert made.weight.layout == "rows"
        assert_same_bits(made(x), wanted)
        assert made.weight.layout == "panels"


def test_a_layer_of_inference_tensors_stays_in_rows():
    with torch.inference_mode():
        made = nn.Sequential(nn.Linear(128, 32))
        lb.quantize_(made, "int8")
        made(torch.randn(3, 128))
        assert made[0].weight.layout == "rows"
        made.state_dict()


# -- layers ------------------------------------------------------------------------------------------------------------
RECIPES = ("int8", "w4a8", "int4-weight-only:group32", "nf4")


@pytest.fixture(autouse=True)
def _packing(request, monkeypatch):
    """Every kind of panels, on every processor."""
    if "which" not in request.node.name:
        monkeypatch.setattr(cpu_mm, "reads_panels", lambda w, input, cols: w.block[0] == 1 and w.format.bits in (4, 8))


def layer(recipe: str = "int8", inputs: int = 128, outputs: int = 37) -> QuantLinear:
    torch.manual_seed(inputs + outputs)
    model = nn.Sequential(nn.Linear(inputs, outputs))
    lb.quantize_(model, recipe)
    return model[0]


@torch.no_grad()
def packed(made: QuantLinear) -> QuantLinear:
    made(torch.randn(2, made.in_features))
    assert made.weight.layout == "panels" and made.codes.dim() == 4
    return made


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_packs_once_and_nobody_sees_it(recipe, mode):
    made, x = layer(recipe), torch.randn(3, 128)
    codes, before = made.codes, made(x).detach()
    rows, size, text = codes.detach().clone(), made.weight.nbytes, repr(made)
    assert codes.dim() == 2, "grad mode leaves the layer as it is"
    with mode():
        assert_same_bits(made(x), before)
        panels = codes.data_ptr()
        assert_same_bits(made(x), before)
    assert made.codes is codes and codes.data_ptr() == panels and codes.dim() == 4
    assert sum(p.untyped_storage().nbytes() for name, p in made.named_parameters() if name == "codes") == codes.numel()
    assert made.weight.stored.data_ptr() == panels, "no second copy"
    assert_same_bits(made.weight.codes, rows)
    assert (made.weight.nbytes, repr(made)) == (size, text)
    assert_same_bits(made(x).detach(), before)


def test_a_layer_stays_as_it_is_where_its_parameters_are_not_its_own(monkeypatch):
    x = torch.randn(2, 128)
    shared, hooked, gathered = layer(), layer(), layer()
    shared.share_memory()
    hooked.forward = hooked.forward
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: made is gathered)
    for made in (shared, hooked, gathered):
        with torch.no_grad():
            made(x)
        assert made.weight.layout == "rows" and made.codes.dim() == 2
    made = layer()
    with torch.no_grad(), lb.use_backend("reference"):
        made(x)
    assert made.weight.layout == "rows"


@pytest.mark.parametrize("keep_vars", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_state_is_plain(recipe, keep_vars):
    made = layer(recipe)
    plain = {name: value.clone() for name, value in made.state_dict(prefix="a.").items()}
    state = packed(made).state_dict(prefix="a.", keep_vars=keep_vars)
    assert list(state) == list(plain)
    for name, value in plain.items():
        assert_same_bits(state[name].detach(), value, name)
    assert isinstance(state["a.codes"], nn.Parameter) == keep_vars
    packed(made)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_packed_layers_load_plain_state(recipe, assign):
    source, target, x = layer(recipe, outputs=37), packed(layer(recipe, outputs=37)), torch.randn(3, 128)
    with torch.no_grad():
        source.codes.copy_(source.codes.flip(0))
        expected = source(x)
        assert not torch.equal(target(x), expected)
        target.load_state_dict(source.state_dict(), assign=assign)
        assert_same_bits(target(x), expected)
    packed(target)
    with pytest.raises(RuntimeError, match="size mismatch for codes"):
        target.load_state_dict(layer(recipe, outputs=38).state_dict())
    with torch.no_grad():
        assert_same_bits(target(x), expected)


def test_tied_layers_stay_tied(tmp_path):
    first = layer()
    second = QuantLinear(first.weight, None, first.recipe)
    second.share_weight(first)
    pair, x = nn.Sequential(first, nn.Linear(37, 128), second), torch.randn(3, 128)
    with torch.no_grad():
        before, both = second(x), (first(x), second(x))
    assert first.codes is second.codes and first.codes.dim() == 4
    assert second.weight.layout == "panels"
    assert_same_bits(both[1], before)
    for again in (copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))):
        assert again[0].codes is again[2].codes and again[0].codes.dim() == 2
        with torch.no_grad():
            assert_same_bits(again[2](x), before)
    packed(first)
    lb.save_model(pair, tmp_path / "pair")
    packed(second)
    other = lb.load_model(tmp_path / "pair", copy.deepcopy(pair))
    assert other[0].codes is other[2].codes
    with torch.no_grad():
        assert_same_bits(other[2](x), before)
    loaded = packed(first)
    lb.load_model(tmp_path / "pair", pair)
    with torch.no_grad():
        assert_same_bits(loaded(x), both[0])
        assert_same_bits(second(x), before)


@pytest.mark.parametrize("change", [lambda m: m.half(), lambda m: m.to("meta"), lambda m: m.to_empty(device="cpu"),
                                    lambda m: m.share_memory()])  # fmt: skip
def test_moves_and_casts_see_rows(change):
    made = packed(layer())
    change(made)
    assert made.codes.shape == (37, 128)
    if made.codes.is_meta:
        assert made(torch.empty(2, 128, device="meta")).shape == (2, 37)


def test_parameters_given_from_outside_are_used():
    made, other, x = packed(layer()), layer(outputs=37), torch.randn(3, 128)
    with torch.no_grad():
        other.codes.copy_(other.codes.flip(0))
        given = {name: value.clone() for name, value in other.state_dict().items() if name != "_extra_state"}
        expected = other(x)
        assert_same_bits(torch.func.functional_call(made, given, (x,)), expected)
        assert given["codes"].dim() == 2, "a tensor of somebody else's"
        made.codes = nn.Parameter(given["codes"], requires_grad=False)
        made.bias = other.bias
        assert_same_bits(made(x), expected)
        made.codes.data = made.codes.data.clone()
        assert_same_bits(packed(made)(x), expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_through_a_packed_layer(recipe):
    grads, x = [], torch.randn(3, 128, requires_grad=True)
    made = layer(recipe)
    early = made(x)
    for run in (made, packed(made), torch.compile(made, backend="aot_eager", fullgraph=True)):
        torch._dynamo.reset()
        made.bias.grad = None
        grads.append((*torch.autograd.grad(run(x).square().sum(), (x, made.bias)),))
    grads.append((*torch.autograd.grad(early.square().sum(), (x, made.bias)),))
    assert made.weight.layout == "panels"
    for again in grads[1:]:
        assert_same_bits(again[0], grads[0][0])
        assert_same_bits(again[1], grads[0][1])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_before_and_after(backend):
    torch._dynamo.reset()
    made, x = layer("w4a8"), torch.randn(3, 128)
    compiled = torch.compile(made, backend=backend, fullgraph=True)
    with torch.no_grad():
        before = compiled(x)
        packed(made)
        assert_same_bits(compiled(x), before)
        made.state_dict()
        assert_same_bits(compiled(x), before)


def test_export_of_a_packed_layer():
    made, x = packed(layer("w4a8")), torch.randn(3, 128)
    for rows in (False, True):
        if rows:
            made.state_dict()
        program = torch.export.export(made, (x,))
        assert_same_bits(program.module()(x), made(x).detach())


def test_threads_may_call_a_layer_first_all_at_once():
    x = torch.randn(2, 512)
    for _ in range(5):
        made = layer("int8", 512, 300)
        expected = made(x).detach()

        def call(_: int, made: QuantLinear = made) -> Tensor:
            with torch.no_grad():
                return made(x)

        with ThreadPoolExecutor(8) as pool:
            for y in pool.map(call, range(64)):
                assert_same_bits(y, expected)
        assert made.weight.layout == "panels"
