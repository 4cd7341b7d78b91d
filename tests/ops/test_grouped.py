"""scaled_grouped_mm: every kernel against scaled_mm of each expert, and what the op refuses."""

from __future__ import annotations

import pytest
import torch
from support.bits import assert_same_bits, describe
from support.samples import samples
from support.variants import kernels, params
from torch.utils._python_dispatch import TorchDispatchMode

import lowbit as lb
from lowbit.ops import OPS, Numerics
from lowbit.ops.grouped import ScaledGroupedMM, product
from lowbit.testing.grouped import make_grouped
from lowbit.testing.inputs import random_matrix

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPEC = OPS["scaled_grouped_mm"]
ROUTES = {"uneven": ([3, 0, 17, 5], 4), "one has all": ([0, 40, 0], 0), "one row": ([0, 1], 0), "none": ([0, 0], 3)}
NUMERICS = Numerics("fp32", "fp32")
WEIGHTS = ("int8:row", "int4:group128", "nf4:group64", "fp8_e4m3:row", "mxfp4", "nvfp4", "uint4:group64:affine")


def matrix(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    return random_matrix(rows, cols, DEVICE, seed)


def exact(call: ScaledGroupedMM) -> torch.Tensor:
    """What the reference's scaled_mm makes of each expert's rows; zeros behind them."""
    y, begin = torch.zeros(SPEC.outputs(call)[0][0], dtype=call.out_dtype, device=call.a.device), 0
    for expert, end in enumerate(call.offsets.tolist()):
        if end > begin:
            with lb.use_backend("reference"):
                y[begin:end] = torch.ops.lowbit.scaled_mm(*product(call, expert, slice(begin, end)))
        begin = end
    return y


def near(y: torch.Tensor, expected: torch.Tensor, tolerance: torch.Tensor) -> bool:
    """Whether both may be within the tolerance of the exact product."""
    same = (y == expected) | (y.isnan() & expected.isnan())
    return bool((same | ((y.double() - expected.double()).abs() <= 2 * tolerance)).all())


@pytest.mark.slow
@pytest.mark.parametrize("kernel", params(kernels("scaled_grouped_mm")))
def test_every_kernel_multiplies_for_each_expert(kernel):
    served = 0
    for call in samples("scaled_grouped_mm")[:: 5 if kernel.variant.interpreted else 1]:
        there = ScaledGroupedMM(*(v.to(kernel.variant.device) if isinstance(v, torch.Tensor) else v for v in call))
        got = kernel.run(there)
        if got is not None:
            served += 1
            y, tolerance = got[0].cpu(), SPEC.tolerance(call, kernel.impl.numerics)
            assert near(y, exact(call), tolerance), describe(call)
            assert not y[call.offsets[-1] :].view(torch.uint8).any()
    assert served


@pytest.mark.thinned(3)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_kernels_have_the_bits_of_one_product_after_the_other(weight, route):
    """Sums of small whole numbers by scales that are powers of two, which no order of summing rounds."""
    counts, rest = ROUTES[route]
    generator = torch.Generator().manual_seed(3)
    a = torch.randint(-4, 5, (sum(counts) + rest, 150), generator=generator).float().to(DEVICE)
    call = make_grouped(a, [matrix(37, 150, e) for e in range(len(counts))], counts, None, weight)
    fields = {"b_scale": torch.ones_like(call.b_scale)} if call.b_scale.is_floating_point() else {}
    if weight.startswith("nf4"):
        call = call._replace(a=a.sign())
    call = call._replace(**fields, bias=torch.randn(len(counts), 37, device=DEVICE), out_dtype=torch.float32)
    tolerance = SPEC.tolerance(call, NUMERICS)
    with lb.use_backend("triton"):
        y = torch.ops.lowbit.scaled_grouped_mm(*call)
    assert near(y, exact(call), tolerance)
    if weight in ("int8:row", "int4:group128", "mxfp4", "uint4:group64:affine"):
        assert_same_bits(y, exact(call), weight)


@pytest.mark.parametrize(
    ("a", "b"), [("int8:row", "int8:row"), ("int8:row", "int4:group32"), ("int8:group32", "int8:group32")]
)
@pytest.mark.parametrize("route", ROUTES)
def test_integers_have_the_same_bits(a, b, route):
    counts, rest = ROUTES[route]
    x = matrix(sum(counts) + rest, 150, 1)
    call = make_grouped(x, [matrix(37, 150, e) for e in range(len(counts))], counts, a, b)
    with lb.use_backend("triton"):
        assert_same_bits(torch.ops.lowbit.scaled_grouped_mm(*call), exact(call), f"{a} x {b}")


@pytest.mark.parametrize("rows", [1, 9])
def test_depth_that_programs_share(rows):
    """Few rows of a long K are split among programs, whose sums are added by expert."""
    x = matrix(rows, 4096, 1).bfloat16()
    call = make_grouped(x, [matrix(40, 4096, e) for e in range(3)], [0, 1, 0], None, "int4:group128")
    call = call._replace(bias=torch.randn(3, 40, device=DEVICE), out_dtype=torch.float32)
    with lb.use_backend("triton"):
        y = torch.ops.lowbit.scaled_grouped_mm(*call)
    assert near(y, exact(call), SPEC.tolerance(call, NUMERICS))
    assert not y[1:].any()


class NoReading(TorchDispatchMode):
    """Raises where a value of a tensor is read by the host, or a shape depends on one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in (
            torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten._unique2,
            torch.ops.aten.masked_select,
        ), func  # fmt: skip
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("weight", [*WEIGHTS, "int8:row by int8:row"])
def test_no_value_is_read_by_the_host(weight):
    weight, _, a = weight.partition(" by ")
    call = make_grouped(matrix(6, 64), [matrix(8, 64, 1)] * 2, [2, 3], a or None, weight)
    impl = next(impl for impl in lb.impls("scaled_grouped_mm", DEVICE) if impl.name == "triton")
    with NoReading():  # it sees nothing below an op, so that the kernel is called itself
        impl.run((torch.empty(6, 8, dtype=torch.bfloat16, device=DEVICE),), call)
    reading = next(impl for impl in lb.impls("scaled_grouped_mm", DEVICE) if impl.name == "reference")
    with NoReading(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        reading.run((torch.empty(6, 8, dtype=torch.bfloat16, device=DEVICE),), call)


def call_of(**more) -> ScaledGroupedMM:
    call = make_grouped(matrix(6, 64), [matrix(8, 64, 1)] * 2, [2, 3], None, "int8:row")
    return call._replace(**more)


def on_device(value):
    return value.to(DEVICE) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"b": torch.zeros(8, 64, dtype=torch.uint8)}, "with at least one expert"),
        ({"b": torch.zeros(0, 8, 64, dtype=torch.uint8)}, "with at least one expert"),
        ({"offsets": torch.tensor([2, 5])}, r"offsets must be int32 \[2\], got torch.int64"),
        ({"offsets": torch.tensor([2], dtype=torch.int32)}, r"offsets must be int32 \[2\]"),
        ({"bias": torch.zeros(8)}, "bias must have a part for each of 2 experts"),
        ({"b_scale": torch.ones(1, 8, 1)}, "b_scale must have a part for each of 2 experts"),
        ({"cols": 63}, "with K = 63"),
        ({"a": torch.zeros(6, 64, dtype=torch.uint8), "a_scheme": "int8:tensor", "a_scale": torch.ones(1, 1)},
         "scales of a must belong to single rows"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(more, says):
    with pytest.raises(ValueError, match=says):
        torch.ops.lowbit.scaled_grouped_mm(*call_of(**{k: on_device(v) for k, v in more.items()}))


def test_weights_that_are_no_codes_are_refused():
    with pytest.raises(TypeError, match="b must be uint8 codes"):
        torch.ops.lowbit.scaled_grouped_mm(*call_of(b=torch.zeros(2, 8, 64, device=DEVICE)))


def test_ends_beyond_the_rows_are_their_end():
    with lb.use_backend("triton"):
        y = torch.ops.lowbit.scaled_grouped_mm(*call_of(offsets=on_device(torch.tensor([2, 99], dtype=torch.int32))))
    ends = call_of(offsets=on_device(torch.tensor([2, 6], dtype=torch.int32)))
    assert near(y, exact(ends), SPEC.tolerance(ends, NUMERICS))
