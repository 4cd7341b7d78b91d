"""linear: one op from float input to float output, with the bits of quantize and scaled_mm and scaled_mm's bound."""

from __future__ import annotations

import functools

import pytest
import torch
from support.bits import assert_same_bits, describe
from support.mm_oracle import Wanted, check
from support.samples import samples
from support.variants import ALL, NATIVE, Kernel, Variant, kernels, params, rounding
from torch import Tensor

import lowbit as lb
from lowbit.functional import linear
from lowbit.op_calls import call as run_op
from lowbit.ops import OPS
from lowbit.ops.linear import Linear, quantized
from lowbit.ops.matmul import ScaledMM
from lowbit.tensor import prepack
from lowbit.testing.inputs import random_matrix
from lowbit.testing.linear import make_call

SPEC = OPS["linear"]
everywhere = pytest.mark.parametrize("variant", ALL)
native = pytest.mark.parametrize("variant", NATIVE)
REFERENCE = Kernel("linear", next(i for i in lb.impls("linear") if i.name == "reference"), Variant("reference"))


def moved(call: Linear, device: str) -> Linear:
    return Linear(*(v.to(device) if isinstance(v, Tensor) else v for v in call))


@functools.cache
def product(index: int) -> ScaledMM:
    """The product that the sample with that index is."""
    return quantized(samples(SPEC.name)[index])


#: What products give that every kernel is given.
worked_out = functools.cache(Wanted)


@pytest.mark.parametrize(
    ("every", "interpreted"), [pytest.param(7, 93, id="some"), pytest.param(2, 31, id="all", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kernel", params([REFERENCE, *kernels("linear"), *rounding("linear")]))
def test_every_kernel_is_within_the_bound_of_the_product(kernel: Kernel, every: int, interpreted: int):
    served, reasons = 0, set()
    for index in range(0, len(samples(SPEC.name)), interpreted if kernel.variant.interpreted else every):
        call = samples(SPEC.name)[index]
        on_device = moved(call, kernel.variant.device)
        outs = kernel.run(on_device)
        if outs is None:
            reasons.add(kernel.impl.supports(on_device))
            continue
        served += 1
        assert outs[0].shape == (*call.x.shape[:-1], call.weight.shape[0])
        y = outs[0].reshape(-1, outs[0].shape[-1])
        check(y, product(index), kernel.impl.numerics, str(kernel), worked_out)
    assert all(isinstance(reason, str) and reason for reason in reasons), "a refusal without a reason"
    assert served, f"{kernel} refuses every sample: {reasons}"


@pytest.mark.parametrize(
    ("every", "interpreted"), [pytest.param(11, 201, id="some"), pytest.param(5, 67, id="all", marks=pytest.mark.slow)]
)
@everywhere
def test_the_bits_are_those_of_quantize_and_scaled_mm(variant: Variant, every: int, interpreted: int):
    served = 0
    for call in samples(SPEC.name)[:: interpreted if variant.interpreted else every]:
        if variant.refuses("linear", call.x, weight_of(call), call.bias, call.input_scheme, call.out_dtype):
            continue
        served += 1
        with variant.use():
            y = linear(call.x, weight_of(call), call.bias, call.input_scheme, call.out_dtype)
            a = call.x if call.input_scheme is None else lb.quantize(call.x, call.input_scheme)
            two = lb.scaled_mm(a, weight_of(call), call.bias, call.out_dtype)
        assert_same_bits(y, two, f"{variant}: {describe(call)}")
    assert served


def weight_of(call: Linear) -> lb.Quantized:
    return lb.Quantized(
        call.weight, call.scale, call.zero_point, call.global_scale, lb.scheme(call.scheme),
        torch.Size((call.weight.shape[0], call.x.shape[-1])), torch.float32,
    )  # fmt: skip


@pytest.mark.thinned(3)
@native
@pytest.mark.parametrize("input", ["int8:row", "fp8_e4m3:block32x32", "uint8:tensor:affine", "nvfp4", "mxfp8:T"])
def test_rows_beyond_one_piece(variant: Variant, input: str):
    """Codes are made some rows at a time, where blocks allow."""
    x, w = random_matrix(2100, 9000, seed=1), lb.quantize(random_matrix(3, 9000, seed=2), "int8:row")
    with variant.use():
        y = linear(x, w, None, input)
        assert_same_bits(y, lb.scaled_mm(lb.quantize(x, input), w, out_dtype=torch.float32), input)


@everywhere
@pytest.mark.parametrize("shape", [(0, 7), (3, 0), (2, 0, 7), (7,), (2, 3, 7)])
def test_any_rank_and_nothing_at_all(variant: Variant, shape: tuple[int, ...]):
    x, w = torch.randn(shape), lb.quantize(torch.randn(5, shape[-1]), "int8:row")
    bias = torch.arange(5.0)
    with variant.use():
        y = linear(x, w, bias, "int8:row")
    assert y.shape == (*shape[:-1], 5)
    if shape[-1] == 0:
        assert_same_bits(y, bias.expand(y.shape).contiguous())


@native
def test_strides_of_x(variant: Variant):
    w = lb.quantize(random_matrix(5, 40, seed=1), "fp8_e4m3:row")
    wide = random_matrix(6, 80, seed=2)
    for x in (wide[:, :40], wide[:, ::2], wide[::2, 40:], wide.t()[:40, :6].t(), wide.view(2, 3, 80)[:, :, 40:]):
        for input in (None, "fp8_e4m3:row"):
            with variant.use():
                assert_same_bits(linear(x, w, None, input), linear(x.contiguous(), w, None, input), str(x.stride()))


def test_out_is_filled():
    x, w = torch.randn(2, 3, 40), lb.quantize(torch.randn(5, 40), "int8:row")
    out = torch.empty(2, 3, 5)
    assert linear(x, w, None, "int8:row", out=out) is out
    assert_same_bits(out, linear(x, w, None, "int8:row"))
    with pytest.raises(ValueError, match=r"linear: out must be of shape \[2, 3, 5\], got \[6, 5\]"):
        linear(x, w, None, "int8:row", out=torch.empty(6, 5))
    with pytest.raises(RuntimeError, match="linear: out= does not support automatic differentiation"):
        linear(x.requires_grad_(), w, None, "int8:row", out=out)


def test_the_gradient_passes_straight_through():
    x = torch.randn(2, 3, 40, requires_grad=True)
    bias = torch.randn(5, requires_grad=True)
    w = lb.quantize(torch.randn(5, 40), "int4:group8")
    grad = torch.randn(2, 3, 5)
    linear(x, w, bias, "int8:row").backward(grad)
    torch.testing.assert_close(x.grad, grad @ w.dequantize())
    torch.testing.assert_close(bias.grad, grad.sum((0, 1)))
    call = make_call(torch.randn(3, 8), torch.randn(5, 8), None, "int8:row")
    with pytest.raises(RuntimeError, match="scale requires grad"):
        torch.ops.lowbit.linear(*call._replace(scale=call.scale.clone().requires_grad_()))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"weight": torch.zeros(5, 9, dtype=torch.uint8)},
            ValueError,
            "must end in the same K",
        ),
        ({"weight": torch.zeros(5, 8)}, TypeError, "weight must be uint8 codes"),
        ({"x": torch.zeros(3, 8, dtype=torch.float64)}, TypeError, "x must be float32, bfloat16 or float16"),
        ({"scale": torch.ones(5)}, ValueError, r"keeps the scales of a \[5, 8\] matrix"),
        ({"bias": torch.zeros(4)}, ValueError, r"bias must be \[5\], got \[4\]"),
        ({"out_dtype": torch.float64}, ValueError, "out_dtype must be a 16- or 32-bit float"),
        ({"input_scheme": "int9:row"}, ValueError, "int9"),
    ],
)
def test_what_does_not_fit_is_refused(change, error, message):
    call = make_call(torch.randn(3, 8), torch.randn(5, 8), "int8:row", "int8:row")
    with pytest.raises(error, match=message):
        run_op("linear", *call._replace(**change))


#: Weights and inputs whose products are of integers: int8 by int8, w4a8, zero points, groups of either and of both.
INTEGERS = [
    ("int8:row", "int8:row"), ("int4:row", "int8:row"), ("int4:group32", "int8:row"), ("int4:group128", "int8:row"),
    ("int8:group32", "int8:row"), ("int8:row", "int8:group128"), ("int4:group128", "int8:group128"),
    ("int4:group64", "int8:group128"), ("uint4:group32:affine", "int8:row"), ("uint8:row:affine", "uint8:row:affine"),
    ("int4:group128", "uint8:row:affine"), ("int4:group9", "int8:row"), ("int8:group640", "int8:row"),
    ("int4:group32:bf16", "int8:group16:e8m0"), ("int8:mx", "int8:row"),
]  # fmt: skip


def by_definition(call: Linear) -> Tensor:
    """What section 9 defines, in every bit, from operands decoded by exact rationals."""
    wanted = Wanted(quantized(call))
    assert wanted.integers
    return wanted.bits


@pytest.mark.thinned(3)
@native
@pytest.mark.parametrize("cols", [128, 130, 1408])
@pytest.mark.parametrize(("scheme", "input"), INTEGERS)
def test_rows_of_integer_products_do_not_depend_on_anything_else(variant: Variant, scheme: str, input: str, cols: int):
    """Not on how many there are, nor on the weight's layout; and they are those that section 9 defines."""
    call = make_call(random_matrix(40, cols, seed=1), random_matrix(37, cols, seed=2), input, scheme)
    call = call._replace(out_dtype=torch.float32)
    weight, wanted = weight_of(call), by_definition(call)
    packed = prepack.prepack(weight, lb.scheme(input))
    for rows in range(1, 41):
        with variant.use():
            x = call.x[:rows]
            assert_same_bits(linear(x, weight, None, input), wanted[:rows], f"{rows} rows")
            y = torch.ops.lowbit.linear_packed(x, packed, 37)
            assert_same_bits(y, wanted[:rows], f"{rows} rows, packed")


# -- scales that are given, and results in codes -----------------------------------------------------------------------
@native
@pytest.mark.parametrize("input", ["int8:tensor", "uint8:tensor:affine", "int8:col", "fp8_e4m3:tensor:bf16"])
@pytest.mark.parametrize("scheme", ["int8:row", "int4:group32", "nf4"])
def test_a_static_input_is_quantized_by_the_scale_that_is_given(variant: Variant, scheme: str, input: str):
    """The codes are those of quantize with that scale, computed one by one by the oracle of quantize_static."""
    x, w = random_matrix(21, 96, seed=1), lb.quantize(random_matrix(37, 96, seed=2), scheme)
    seen = lb.quantize(random_matrix(21, 96, seed=3), input)
    given = {"input_scale": seen.scale, "input_zero_point": seen.zero_point}
    with variant.use():
        y = linear(x, w, None, input, torch.float32, **given)
        codes = lb.quantize(x, input, scale=seen.scale, zero_point=seen.zero_point)
        assert_same_bits(y, lb.scaled_mm(codes, w, out_dtype=torch.float32))
    if scheme != "nf4" and input in ("int8:tensor", "uint8:tensor:affine"):  # sums of integers, exact
        with lb.use_backend("reference"):
            assert_same_bits(y, linear(x, w, None, input, torch.float32, **given), "the reference")
    with variant.use():
        assert not torch.equal(y, linear(x, w, None, input, torch.float32))
    if scheme == "int8:row" and input == "int8:tensor":
        rounded = (x.double() / seen.scale.double()).round().clamp(-127, 127)
        exact = (rounded @ w.codes.view(torch.int8).double().T).float() * (seen.scale * w.scale.T)
        assert_same_bits(y, exact)


@native
@pytest.mark.parametrize(
    "out_scheme", ["int8:tensor", "uint8:tensor:affine", "int4:row", "int8:group7", "fp8_e4m3:tensor"]
)
@pytest.mark.parametrize("input", [None, "int8:row", "int8:group32"])
def test_a_result_in_codes_is_that_of_quantize(variant: Variant, input: str | None, out_scheme: str):
    x, w = random_matrix(21, 96, seed=1), lb.quantize(random_matrix(37, 96, seed=2), "int8:row")
    bias = random_matrix(1, 37, seed=4)[0]
    with variant.use():
        y = linear(x, w, bias, input, torch.float32)
        made = lb.quantize(y, out_scheme)
        found = linear(
            x, w, bias, input, out_scheme=out_scheme, out_scale=made.scale, out_zero_point=made.zero_point,
        )  # fmt: skip
        again = lb.quantize(y, out_scheme, scale=made.scale, zero_point=made.zero_point)
        assert_same_bits(found.codes, again.codes)
        assert (found.scheme, found.shape, found.dtype) == (again.scheme, y.shape, torch.float32)
        assert_same_bits(linear(x, w, bias, input, out_scheme=out_scheme).codes, made.codes)
    if input is not None:
        with lb.use_backend("reference"):
            given = {"out_scale": made.scale, "out_zero_point": made.zero_point}
            assert_same_bits(found.codes, linear(x, w, bias, input, out_scheme=out_scheme, **given).codes)


@native
def test_results_in_codes_of_more_rows_than_a_piece(variant: Variant):
    x, w = random_matrix(5000, 16, seed=1), lb.quantize(random_matrix(1500, 16, seed=2), "int8:row")
    with variant.use():
        for input, scheme in (("int8:row", "int8:row"), (None, "int8:tensor"), ("int8:tensor", "int4:block64x4")):
            y = linear(x, w, None, input, torch.float32)
            made = lb.quantize(y, scheme)
            found = linear(x, w, None, input, out_scheme=scheme, out_scale=made.scale)
            assert_same_bits(found.codes, lb.quantize(y, scheme, scale=made.scale).codes, scheme)


def test_a_chain_of_layers_in_integers():
    """A layer whose result is in codes feeds one that takes them, without floats between."""
    x = random_matrix(9, 64, seed=1)
    first, second = (lb.quantize(random_matrix(48 + i, n, seed=2 + i), "int8:row") for i, n in ((0, 64), (1, 48)))
    scale = linear(x, first, None, "int8:row").abs().max() / 127
    middle = linear(x, first, None, "int8:row", out_scheme="int8:tensor", out_scale=scale)
    y = lb.scaled_mm(middle, second, out_dtype=torch.float32)
    floats = linear(x, first, None, "int8:row")
    assert_same_bits(y, linear(floats, second, None, "int8:tensor", input_scale=scale))


@pytest.mark.parametrize(
    "given, message",
    [
        ({"input_scale": 1.0}, "input_scale needs a scheme; pass input_scheme too"),
        ({"out_scale": 1.0}, "out_scale and out_zero_point need an out_scheme"),
        ({"input_scheme": "int8:row", "input_scale": torch.ones(3)}, r"scale must have shape \[2, 1\], got \[3\]"),
        ({"out_scheme": "int8:tensor", "out": torch.zeros(2, 5)}, "out= cannot be combined with out_scheme="),
        ({"out_scheme": "nvfp4", "out_scale": 1.0}, "needs its global_scale"),
        ({"input_scheme": "int8:tensor", "input_zero_point": 3}, "a zero_point needs its scale"),
    ],
)
def test_scales_that_do_not_fit_are_refused(given, message):
    w = lb.quantize(torch.randn(5, 8), "int8:row")
    with pytest.raises(ValueError, match=message):
        linear(torch.randn(2, 8), w, **given)
    with pytest.raises(RuntimeError, match="a quantized result has no gradient"):
        linear(torch.randn(2, 8, requires_grad=True), w, None, "int8:row", out_scheme="int8:tensor", out_scale=1.0)
