"""conv: the exact convolution of integers, the bound of a product for all else, and gradients."""

from __future__ import annotations

import functools
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.bits import assert_same_bits, describe
from support.mm_oracle import Wanted, check
from support.samples import samples
from support.variants import NATIVE, Kernel, Variant, kernels, params, threads
from torch import Tensor

import lowbit as lb
from lowbit import scaling
from lowbit.ops import OPS
from lowbit.ops.conv import Conv, Window
from lowbit.ops.matmul import ScaledMM
from lowbit.testing.conv import GEOMETRIES, Geometry, plain, random_call

SPEC = OPS["conv"]
REFERENCE = Kernel("conv", next(i for i in lb.impls("conv") if i.name == "reference"), Variant("reference"))
TORCH = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def run(call: Conv) -> Tensor:
    return torch.ops.lowbit.conv(*call)


def torch_conv(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """torch's, of ``x [N, *S, C]`` and ``weight [O, taps * C / groups]``."""
    pads = [size for axis in reversed(range(len(geometry.kernel_size))) for size in geometry.padding[2 * axis :][:2]]
    filters = weight.reshape(geometry.out, *geometry.kernel_size, -1).movedim(-1, 1)
    y = TORCH[len(geometry.kernel_size)](
        F.pad(x.movedim(-1, 1), pads), filters, None, geometry.stride, 0, geometry.dilation, geometry.groups
    )
    return y.movedim(1, -1)


# -- integers: every bit -----------------------------------------------------------------------------------------------
@functools.cache
def exact_case(geometry: Geometry, affine: bool, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Conv, Tensor]:
    """A call with given scales on numbers that these represent, and its result by integers in fp64."""
    g = torch.Generator().manual_seed(seed)
    axes = len(geometry.kernel_size)
    cols = geometry.x[-1] // geometry.groups * torch.Size(geometry.kernel_size).numel()
    weight = torch.randint(-127, 128, (geometry.out, cols), generator=g)
    low, high, zero = (0, 256, 93) if affine else (-127, 128, 0)
    x = torch.randint(low, high, geometry.x, generator=g) - zero
    x_scale = torch.rand(1, 1, generator=g).exp2() / 64  # x = code * scale comes back as its code
    w_scale = torch.rand(geometry.out, 1, generator=g) / 32
    bias = torch.randn(geometry.out, generator=g)
    sums = torch_conv(x.double(), weight.double(), geometry)
    assert sums.abs().max() < 2**24  # exact in fp32
    expected = (sums.float() * (x_scale * w_scale.view(-1)) + bias).to(dtype)
    call = Conv(
        x * x_scale.view(1), weight.to(torch.int8).view(torch.uint8), "int8:row", w_scale, None, None, bias,
        geometry.kernel_size, geometry.stride, geometry.padding, geometry.dilation, geometry.groups,
        "uint8:tensor:affine" if affine else "int8:tensor", dtype, x_scale,
        torch.full((1, 1), zero, dtype=torch.uint8) if affine else None,
    )  # fmt: skip
    assert len(call.x.shape) == axes + 2
    return call, expected


#: Besides those of lowbit.testing: odd sizes, several outputs a channel, kernels as large as the image, strides beyond
#: the kernel, many channels, and so many rows that they are taken in blocks.
MORE = (
    plain((1, 7, 9, 3), 16, 7, stride=2), plain((2, 5, 5, 6), 12, 3, groups=6), plain((1, 3, 3, 40), 33, 3),
    Geometry((1, 3, 3, 5), 4, (3, 3), (1, 1), (0, 0, 0, 0), (1, 1)), plain((1, 9, 9, 4), 3, 1, stride=4),
    Geometry((2, 13, 6), 6, (5,), (3,), (4, 1), (2,), 6), Geometry((1, 4, 5, 6, 4), 8, (2, 2, 3), (2, 1, 1),
    (1, 1, 0, 0, 2, 1), (1, 1, 2), 2), plain((1, 5, 4, 3, 6), 6, 3, groups=6), plain((1, 23, 24, 32), 40, 3),
    plain((1, 15, 16, 70), 70, 5, stride=2, groups=70), plain((1, 6, 6, 96), 96, 3, groups=32),
)  # fmt: skip


@pytest.mark.parametrize("kernel", params([REFERENCE, *kernels("conv")]))
def test_integers_are_exact(kernel: Kernel):
    chosen = (*GEOMETRIES, *MORE)[:: 9 if kernel.variant.interpreted else 1]
    for index, (geometry, affine) in enumerate(product(chosen, (False, True))):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[index % 3]
        call, expected = exact_case(geometry, affine, index, dtype)
        outs = kernel.run(call)
        if outs is None:
            assert affine and not kernel.variant.native, kernel.impl.supports(call)
            continue
        assert_same_bits(outs[0], expected, f"{kernel}: {geometry}")


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    axes = draw(st.integers(1, 3))
    each = range(axes)
    kernel, stride, dilation = (tuple(draw(st.integers(1, 3)) for _ in each) for _ in range(3))
    padding = tuple(draw(st.integers(0, 2)) for _ in range(2 * axes))
    least = [
        max(d * (k - 1) + 1 - sum(padding[2 * i :][:2]), 1)
        for i, (k, d) in enumerate(zip(kernel, dilation, strict=True))
    ]
    sizes = tuple(draw(st.integers(low, low + 4)) for low in least)
    groups = draw(st.integers(1, 4))
    x = (draw(st.integers(1, 2)), *sizes, groups * draw(st.integers(1, 5)))
    return Geometry(x, groups * draw(st.integers(1, 4)), kernel, stride, padding, dilation, groups)


@given(geometries(), st.booleans())
def test_any_geometry(geometry: Geometry, affine: bool):
    call, expected = exact_case(geometry, affine, seed=3)
    assert_same_bits(run(call), expected, str(geometry))


@pytest.mark.parametrize("affine", [False, True])
def test_a_scale_made_of_x_is_that_of_its_pixels_and_zero(affine: bool):
    call, _ = exact_case(GEOMETRIES[1], affine, 5)
    call = call._replace(x=call.x.abs() + 1, input_scale=None, input_zero_point=None)
    flat = torch.cat([call.x.reshape(-1, 1), torch.zeros(1, 1)])
    q = lb.quantize(flat, call.input_scheme)
    assert_same_bits(run(call), run(call._replace(input_scale=q.scale, input_zero_point=q.zero_point)))


@pytest.mark.parametrize("variant", NATIVE)
def test_a_result_in_codes_is_that_of_quantize(variant: Variant):
    for geometry in (GEOMETRIES[0], GEOMETRIES[2], GEOMETRIES[4]):
        call, y = exact_case(geometry, True, 2)
        scale, zero = torch.full((1, 1), 3.7), torch.full((1, 1), 7, dtype=torch.uint8)
        expected = torch.ops.lowbit.quantize_static(y.flatten(0, -2), "uint8:tensor:affine", scale, zero)
        with variant.use():
            codes = run(call._replace(out_scheme="uint8:tensor:affine", out_scale=scale, out_zero_point=zero))
        assert codes.shape == y.shape and torch.equal(codes.flatten(0, -2), expected)


# -- all other schemes: the bound of a product -------------------------------------------------------------------------
def patch_rows(call: Conv, group: int) -> Tensor:
    """A group's patches, pixel by pixel."""
    channels = call.x.shape[-1] // call.groups
    part = slice(group * channels, (group + 1) * channels)
    outs = SPEC.outputs(call)[0][0][1:-1]
    rows = []
    for image, *place in product(range(call.x.shape[0]), *map(range, outs)):
        taps = []
        for tap in product(*map(range, call.kernel_size)):
            at = [
                p * s + t * d - before
                for p, s, t, d, before in zip(place, call.stride, tap, call.dilation, call.padding[::2], strict=True)
            ]
            inside = all(0 <= a < size for a, size in zip(at, call.x.shape[1:-1], strict=True))
            taps.append(call.x[(image, *at)][part] if inside else call.x.new_zeros(channels))
        rows.append(torch.cat(taps))
    return torch.stack(rows)


@functools.cache
def product_of(index: int, group: int) -> ScaledMM:
    """The product that a group of that sample is, its patches quantized as the op's text says."""
    call = samples("conv")[index]
    rows, each = patch_rows(call, group), call.weight.shape[0] // call.groups
    part = slice(group * each, (group + 1) * each)
    weight = lb.Quantized(
        call.weight, call.scale, call.zero_point, call.global_scale, scaling.scheme(call.scheme),
        torch.Size((call.weight.shape[0], rows.shape[1])), torch.float32,
    )  # fmt: skip
    decoded = weight.dequantize(torch.float32)[part]
    bias = None if call.bias is None else call.bias[part]
    codes, scales = call.weight[part], (call.scale[part], call.zero_point, call.global_scale)
    if call.scheme != "int8:row":  # of other weights what they decode to
        codes, scales = decoded, (None, None, None)
    b_scheme = call.scheme if call.scheme == "int8:row" else None
    if call.input_scheme is None:
        return ScaledMM(rows, codes, rows.shape[1], None, b_scheme, None, None, None, *scales, bias, call.out_dtype)
    scheme = scaling.scheme(call.input_scheme)
    if scheme.block == (None, None):
        pixels = lb.quantize(torch.cat([call.x.reshape(-1, 1), call.x.new_zeros(1, 1)]), call.input_scheme)
        a = lb.quantize(rows, call.input_scheme, pixels.scale, pixels.zero_point)
    else:
        global_scale = None
        if scheme.global_scale == "tensor":
            global_scale = torch.ops.lowbit.global_scale(call.x.reshape(-1, call.x.shape[-1]), call.input_scheme)
        a = lb.quantize(rows, call.input_scheme, global_scale=global_scale)
    return ScaledMM(
        a.codes, codes, rows.shape[1], call.input_scheme, b_scheme, a.scale, a.zero_point, a.global_scale, *scales,
        bias, call.out_dtype,
    )  # fmt: skip


#: What products give that every kernel is given.
worked_out = functools.cache(Wanted)


@pytest.mark.parametrize(
    ("every", "interpreted"), [pytest.param(17, 123, id="some"), pytest.param(5, 41, id="all", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kernel", params([REFERENCE, *kernels("conv")]))
def test_every_kernel_is_within_the_bound_of_the_product(kernel: Kernel, every: int, interpreted: int):
    served, reasons = 0, set()
    for index in range(0, len(samples("conv")), interpreted if kernel.variant.interpreted else every):
        call = samples("conv")[index]
        outs = kernel.run(Conv(*(v.to(kernel.variant.device) if isinstance(v, Tensor) else v for v in call)))
        if outs is None:
            reasons.add(kernel.impl.supports(call))
            continue
        served += 1
        each = call.weight.shape[0] // call.groups
        for group in range(call.groups):
            y = outs[0].flatten(0, -2)[:, group * each : (group + 1) * each]
            what = f"{kernel}: {describe(call)}"
            check(y.contiguous(), product_of(index, group), kernel.impl.numerics, what, worked_out)
    assert all(isinstance(reason, str) and reason for reason in reasons), "a refusal without a reason"
    assert served, f"{kernel} refuses every sample: {reasons}"


@pytest.mark.parametrize("kernel", params(kernels("conv")))
def test_every_kernel_has_the_bits_of_the_reference_for_integers(kernel: Kernel):
    for index, geometry in enumerate(GEOMETRIES[:: 3 if kernel.variant.interpreted else 1]):
        call = random_call(geometry, "int8:row", "int8:row", seed=index, bias=True, out_dtype=torch.bfloat16)
        outs, expected = kernel.run(call), REFERENCE.run(call)
        if outs is not None and expected is not None:
            assert_same_bits(outs[0], expected[0], f"{kernel}: {geometry}")


@pytest.mark.parametrize("input", [None, "int8:tensor", "int8:row", "fp8_e4m3:tensor"])
@pytest.mark.parametrize("geometry", [plain((1, 13, 20, 24), 9, 1), plain((1, 13, 20, 24), 24, 3)], ids=str)
def test_no_bit_depends_on_the_number_of_threads(geometry: Geometry, input: str | None):
    call = random_call(geometry, input, "int8:row", bias=True)
    with threads(1):
        expected = run(call)
    for count in (2, 3):
        with threads(count):
            assert_same_bits(run(call), expected, str(count))


# -- gradients ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_the_gradient_passes_straight_through(geometry: Geometry):
    call = random_call(geometry, "int8:row", "int4:group8", bias=True)
    x, bias = call.x.clone().requires_grad_(), call.bias.clone().requires_grad_()
    grad = torch.randn(SPEC.outputs(call)[0][0])
    run(call._replace(x=x, bias=bias)).backward(grad)
    oracle = call.x.double().requires_grad_()
    cols = geometry.x[-1] // geometry.groups * torch.Size(geometry.kernel_size).numel()
    decoded = torch.ops.lowbit.dequantize(call.weight, call.scheme, cols, call.scale, None, None, torch.float32)
    torch_conv(oracle, decoded.double(), geometry).backward(grad.double())
    torch.testing.assert_close(x.grad.double(), oracle.grad, rtol=1e-4, atol=1e-4 * float(oracle.grad.abs().max()))
    torch.testing.assert_close(bias.grad, grad.flatten(0, -2).sum(0))


@given(geometries())
def test_a_window_unfolds_to_patches(geometry: Geometry):
    window = Window(*geometry[2:])
    x = torch.arange(float(torch.Size(geometry.x).numel())).reshape(geometry.x)
    call = random_call(geometry, None, "int8:row")._replace(x=x)
    rows = torch.stack([patch_rows(call, group) for group in range(geometry.groups)], 1)
    assert torch.equal(window.unfold(x).flatten(0, -3), rows)


# -- refusals ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stride": (1,)}, r"stride must be 2 numbers of at least 1 .*got \[1\]"),
        ({"padding": (0, 0, -1, 0)}, "padding must be 4 numbers of at least 0"),
        ({"groups": 3}, "4 channels, its last axis, which groups=3 must divide"),
        ({"dilation": (9, 1)}, "larger than the padded input"),
        ({"kernel_size": (2, 3)}, r"the weight in int8:row must be \[out channels, a multiple of 1; 24\]"),
        ({"input_scheme": "int8:row", "input_scale": torch.ones(1, 1)}, "use 'int8:tensor'"),
        ({"input_scheme": None, "input_scale": torch.ones(1, 1)}, "an input_scheme; give that too"),
        ({"input_zero_point": torch.zeros(1, 1, dtype=torch.uint8)}, "come with an input_scale"),
        ({"out_scheme": "int8:tensor"}, "needs a given out_scale"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], message: str):
    call = random_call(GEOMETRIES[0], "int8:tensor", "int8:row")._replace(**change)
    with pytest.raises(ValueError, match=message):
        run(call)
