"""Convolutions whose kernels read patches from images: bits, bounds, addresses, launches, and what they refuse."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from support.bits import assert_same_bits
from support.variants import serving
from torch import Tensor, nn

pytest.importorskip("triton")
from support.interpreter import within_arguments

import lowbit as lb
from lowbit.backends import composed, registry
from lowbit.kernels import convolutions, spec
from lowbit.ops import OPS
from lowbit.ops.conv import Conv, columns
from lowbit.testing.conv import GEOMETRIES, Geometry, plain, random_call

pytestmark = pytest.mark.slow
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPEC = OPS["conv"]
IMPLICIT, LAID_OUT, REFERENCE = (
    next(impl for impl in lb.impls("conv", DEVICE) if impl.name == name)
    for name in ("triton_implicit", "triton", "reference")
)

#: Besides those of lowbit.testing: several tiles down and across, the last of each ragged, in groups too; one pixel;
#: channels that no tile holds; depthwise ones with one and with several channels of the result for one.
RAGGED = (
    *GEOMETRIES, plain((1, 13, 11, 20), 70, 3), plain((2, 9, 8, 24), 66, 3, stride=2, groups=2),
    plain((1, 1, 1, 7), 3, 3), plain((2, 7, 5, 70), 140, 3, groups=70), plain((1, 3, 4, 5, 18), 18, 3, groups=18),
    Geometry((1, 150, 3), 33, (7,), (1,), (6, 0), (1,)),
    Geometry((1, 4, 4, 2), 40, (2, 2), (1, 1), (3, 0, 0, 3), (1, 1), 2),
)  # fmt: skip
INTEGERS = (
    ("int8:tensor", "int8:row"), ("int8:row", "int8:row"), ("uint8:tensor:affine", "int8:row"),
    ("int8:tensor:affine", "uint4:row:affine"), ("int8:row:bf16", "int8:tensor"), ("int4:row", "int4:group8"),
    ("uint8:tensor:affine", "int8:block4x16"), ("int8:tensor:e8m0", "uint8:group16:affine"),
)  # fmt: skip
FLOATS = (
    (None, "int8:row"), (None, "int4:group8"), (None, "fp8_e4m3:row"), (None, "nvfp4"), (None, "nf4"),
    (None, "uint4:group16:affine"), ("fp8_e4m3:tensor", "fp8_e4m3:row"), ("fp8_e4m3:row", "fp8_e4m3:row"),
    ("fp8_e5m2:row", "int8:row"), ("int8:tensor", "fp8_e4m3:tensor"), ("uint8:tensor:affine", "mxfp4"),
    ("int8:row", "nf4:row"),
)  # fmt: skip


def moved(call: Conv) -> Conv:
    return Conv(*(v.to(DEVICE) if isinstance(v, Tensor) else v for v in call))


def run(call: Conv, impl=IMPLICIT) -> Tensor:
    """The result of one implementation, whatever was in memory before."""
    assert (reason := impl.supports(call)) is None, reason
    SPEC.check(call)
    ((shape, dtype),) = SPEC.outputs(call)
    out = torch.full(shape, 77, device=call.x.device).to(dtype)
    impl.run((out,), call)
    return out


def near(call: Conv, y: Tensor) -> bool:
    """Whether ``y`` and the reference's result may be within the tolerance of the exact one."""
    expected, tolerance = run(call, REFERENCE), SPEC.tolerance(call, IMPLICIT.numerics)
    same = (y == expected) | (y.isnan() & expected.isnan())
    return bool((same | ((y.double() - expected.double()).abs() <= 2 * tolerance)).all())


# -- bits --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("input", "weight"), INTEGERS)
def test_integers_have_the_bits_of_the_reference(input, weight):
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for index, geometry in enumerate(RAGGED):
        call = moved(random_call(geometry, input, weight, "cpu", index, index % 2 == 0, dtypes[index % 3]))
        if IMPLICIT.supports(call) is None:
            assert_same_bits(run(call), run(call, REFERENCE), f"{geometry}")
        else:  # blocks of which neither divides the other, in short patches
            assert weight == "int8:block4x16" or "group" in weight, IMPLICIT.supports(call)


@pytest.mark.parametrize(("input", "weight"), FLOATS)
def test_floats_are_within_the_bound_of_the_reference(input, weight):
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    for index, geometry in enumerate(RAGGED):
        call = moved(random_call(geometry, input, weight, "cpu", index, index % 2 == 0, dtypes[index % 3]))
        assert near(call, run(call)), f"{geometry}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("geometry", RAGGED, ids=str)
def test_whole_numbers_give_torchs_convolution(geometry, dtype):
    """Floats by codes where no order of summing rounds, against fp64."""
    g = torch.Generator().manual_seed(1)
    x = torch.randint(-8, 9, geometry.x, generator=g)
    depth = geometry.x[-1] // geometry.groups * torch.Size(geometry.kernel_size).numel()
    weight = torch.randint(-7, 8, (geometry.out, depth), generator=g)
    scale = torch.randint(-3, 3, (geometry.out, 1), generator=g).double().exp2().float()
    call = Conv(
        x.to(dtype), weight.to(torch.int8).view(torch.uint8), "int8:row", scale, None, None, None, *geometry[2:],
        out_dtype=torch.float32,
    )  # fmt: skip
    pads = [size for axis in reversed(range(len(geometry.stride))) for size in geometry.padding[2 * axis :][:2]]
    filters = (weight * scale.double()).unflatten(1, (*geometry.kernel_size, -1)).movedim(-1, 1)
    expected = (F.conv1d, F.conv2d, F.conv3d)[len(geometry.stride) - 1](
        F.pad(x.double().movedim(-1, 1), pads), filters, None, geometry.stride, 0, geometry.dilation, geometry.groups
    )
    assert_same_bits(run(moved(call)).cpu() + 0.0, expected.movedim(1, -1).float() + 0.0)


def test_depth_is_shared_where_patches_are_few():
    for dtype, weight in product((torch.bfloat16, torch.float32), ("int4:group32", "fp8_e4m3:row")):
        call = moved(random_call(plain((1, 2, 3, 300), 9, 3), None, weight, out_dtype=dtype, bias=True))
        names = [one.kernel.__name__ for one in convolutions.convolve(call, torch.empty(1, 2, 3, 9, dtype=dtype))]
        assert names == ["conv_weight_only", "add_shares"] and near(call, run(call))


@pytest.mark.parametrize("input", [None, "int8:tensor", "int8:row", "fp8_e4m3:row"])
@pytest.mark.parametrize("groups", [1, 6])
def test_inf_and_nan_are_where_the_reference_has_them(input, groups):
    call = moved(random_call(plain((1, 6, 7, 6), 12, 3, groups=groups), input, "int8:row"))
    call.x[0, 1, 2, 3], call.x[0, 4, 5, 1] = torch.inf, torch.nan
    y, expected = run(call), run(call, REFERENCE)
    assert torch.equal(y.isnan(), expected.isnan()) and torch.equal(y.isinf(), expected.isinf())


def test_codes_come_and_go():
    """Given codes as ``x``, with scales that are given, and a result in codes."""
    for geometry in (RAGGED[1], RAGGED[2], RAGGED[8]):
        call = random_call(geometry, "uint8:tensor:affine", "int8:row", bias=True)
        scale, zero = torch.full((1, 1), 0.05), torch.full((1, 1), 93, dtype=torch.uint8)
        call = moved(call._replace(input_scale=scale, input_zero_point=zero))
        expected = run(call, REFERENCE)
        assert_same_bits(run(call), expected)
        codes = torch.ops.lowbit.quantize_static(call.x.flatten(0, -2), call.input_scheme, scale, zero)
        coded = call._replace(x=codes.view(call.x.shape))
        assert_same_bits(run(coded), expected)
        out = {"out_scheme": "uint8:tensor:affine", "out_scale": scale * 40, "out_zero_point": zero}
        assert torch.equal(run(coded._replace(**out)), run(coded._replace(**out), REFERENCE))


def test_images_of_any_strides_and_scales_as_layers_keep_them():
    call = moved(random_call(RAGGED[7], "int8:row", "int8:row"))
    turned = call._replace(x=call.x.movedim(-1, 1).contiguous().movedim(1, -1), scale=call.scale.view(torch.int32))
    assert not turned.x.is_contiguous()
    assert_same_bits(run(turned), run(call))


# -- memory ------------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter sees addresses")
@pytest.mark.parametrize(("input", "weight"), [*INTEGERS[:4], *FLOATS[1:3], *FLOATS[6:8]])
def test_no_address_is_outside_of_the_arguments(input, weight):
    for index, geometry in enumerate(RAGGED):
        call = random_call(geometry, input, weight, "cpu", index, bias=True)
        with within_arguments():
            run(call)


@pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter sees addresses")
def test_the_check_of_addresses_finds_one_that_is_outside(monkeypatch):
    call = random_call(RAGGED[0], None, "int8:row")
    found = convolutions._arguments

    def less_padding(*args):
        made = found(*args)
        return made | {"WINDOW": (*made["WINDOW"][:4], (False,) * 3)}

    monkeypatch.setattr(convolutions, "_arguments", less_padding)
    with within_arguments(), pytest.raises(Exception, match="belongs to no argument"):
        run(call)


# -- launches ----------------------------------------------------------------------------------------------------------
def launched(call: Conv) -> list[str]:
    coded, launches = convolutions.quantized(call)
    ((shape, dtype),) = SPEC.outputs(call)
    launches += convolutions.convolve(coded, torch.empty(shape, dtype=dtype, device=call.x.device))
    return [one.kernel.__name__ for one in launches]


LARGE, LARGE_DEPTHWISE = plain((64, 56, 56, 64), 64, 3), plain((64, 56, 56, 144), 144, 3, groups=144)


@pytest.mark.parametrize(
    ("geometry", "input", "weight", "static", "names"),
    [
        (LARGE, None, "int4:group64", False, ["conv_weight_only"]),
        (LARGE, "int8:row", "int8:row", False, ["patch_scales", "conv_integers"]),
        (LARGE, "int8:tensor", "int8:row", True, ["quantize", "conv_integers"]),
        (LARGE, "int8:tensor", "int8:row", False, ["reduce_extremes", "finish_scales", "quantize", "conv_integers"]),
        (LARGE_DEPTHWISE, None, "int8:row", False, ["depthwise"]),
        (LARGE_DEPTHWISE, "int8:row", "int8:row", False, ["depthwise"]),
        (LARGE_DEPTHWISE, "int8:tensor", "int8:row", True, ["quantize", "depthwise"]),
    ],
)
def test_launches_do_not_grow_with_images(monkeypatch, geometry, input, weight, static, names):
    monkeypatch.setattr(spec, "TARGET", spec.Target(1 << 14, 1 << 12))
    call = random_call(geometry._replace(x=(1, 1, 1, geometry.x[-1])), input, weight, out_dtype=torch.bfloat16)
    call = call._replace(x=torch.empty(geometry.x, dtype=torch.bfloat16))
    if static:
        call = call._replace(input_scale=torch.ones(1, 1))
    call = Conv(*(v.to("meta") if isinstance(v, Tensor) else v for v in call))
    assert launched(call) == names
    laid_out = -(-call.x[..., 0].numel() // composed._rows_at_a_time(call)) * call.groups
    assert laid_out > 6


def test_patches_in_one_launch_are_not_laid_out_in_memory():
    """What is allocated is smaller than the input."""
    call = random_call(LARGE._replace(x=(1, 1, 1, 64)), "int8:row", "int8:row")
    call = Conv(*(v.to("meta") if isinstance(v, Tensor) else v for v in call))
    call = call._replace(x=torch.empty(LARGE.x, device="meta"))
    arguments = convolutions._patches(call)
    held = sum(t.numel() for one in arguments.launches for t in one.arguments.values() if isinstance(t, Tensor))
    assert held - call.x.numel() == call.x[..., 0].numel() and columns(call) == 576


# -- choice ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("input", "weight", "reason"),
    [
        ("nvfp4", "int8:row", "inputs without global scales"),
        ("int4:tensor", "int8:row", "codes of 8 bits where one scale spans the input"),
        ("int8:group16", "int8:row", "one scale a patch and no zero points, or one for all"),
        ("uint8:row:affine", "int8:row", "one scale a patch and no zero points, or one for all"),
        ("nf4:row", "int8:row", "one scale a patch and no zero points, or one for all"),
    ],
)
def test_what_is_left_to_products_of_patches(input, weight, reason):
    call = moved(random_call(GEOMETRIES[0], input, weight))
    assert reason in IMPLICIT.supports(call)
    with lb.use_backend("triton"):
        assert registry.select("conv", DEVICE, call, empty=False) is LAID_OUT


def test_sums_that_int32_does_not_hold_are_refused():
    call = random_call(plain((1, 1, 1, 4), 4, 3), "uint8:tensor:affine", "int8:row")
    wide = call._replace(x=torch.empty(1, 1, 1, 8000), weight=torch.empty(4, 72000, dtype=torch.uint8))
    assert "int32 holds at most 65793 products" in IMPLICIT.supports(wide)


@torch.no_grad()
@pytest.mark.parametrize("recipe", ["int8", "int8-weight-only", "int8-static"])
def test_layers_run_on_it(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(6, 9, 3, padding=1), nn.ReLU(), nn.Conv2d(9, 9, 3, groups=9)).to(DEVICE)
    x = torch.randn(2, 6, 7, 5, device=DEVICE)
    recipes = {"0": recipe, "2": recipe}
    lb.quantize_(model, recipes, lb.calibrate(model, recipes, [x], "nearest") if recipe == "int8-static" else None)
    with lb.use_backend("triton"), serving() as served:
        y = model(x)
    assert served["conv"] == IMPLICIT.name
    with lb.use_backend("reference"):
        expected = model(x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
