"""scaled_mm: a pairwise covering array against fp64 within the op's own bound; integers exact in every bit.

The oracle decodes with exact rationals and multiplies in fp64. The full product of schemes: ``make exhaustive``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import assert_same_bits, describe
from support.covering import pairwise
from support.mm_oracle import Wanted, check
from support.samples import samples
from support.variants import ALL, NATIVE, Kernel, Variant, kernels, params, rounding
from torch import Tensor

import lowbit as lb
from lowbit.ops import OPS, Numerics
from lowbit.ops.matmul import ScaledMM
from lowbit.scaling import SCALINGS as TABLE
from lowbit.scaling import Scheme
from lowbit.testing.inputs import distinct_formats, random_matrix
from lowbit.testing.matmul import make_call

SPEC = OPS["scaled_mm"]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
everywhere = pytest.mark.parametrize("variant", ALL)


# -- a pairwise covering array -----------------------------------------------------------------------------------------
FORMATS = ["float32", "bfloat16", "float16", *(f.name for f in distinct_formats())]
OPTIONS = ["mx:ceil:T", "row:bf16", "row:fp16", "tensor:e8m0", "row:affine", "group32:affine", "block64x1:e4m3",
           "nvfp4:global_row", "group32:full"]  # fmt: skip
#: Every scaling of the table, families with blocks that vectors divide and ragged ones; and every option.
NAMED = [name for name in TABLE if not name.startswith("super")]
SCALINGS = list(dict.fromkeys([*(re.sub(r"{\w}", size, name) for name in NAMED for size in ("32", "7")), *OPTIONS]))
FACTORS: dict[str, list[Any]] = {
    "a_format": FORMATS,
    "a_scaling": SCALINGS,
    "b_format": FORMATS,
    "b_scaling": SCALINGS,
    "shape": [(1, 17, 96), (5, 3, 33), (16, 40, 64), (13, 117, 66), (33, 1, 130), (2, 65, 257), (1, 1, 1)],
    "out_dtype": FLOATS,
    "bias": [None, *FLOATS],
    "a_strided": [False, True],
    "b_strided": [False, True],
}


def scheme_text(format: str, scaling: str) -> str | None:
    return None if "float" in format and "fp" not in format else f"{format}:{scaling}"


def allowed(row: dict[str, Any]) -> bool:
    for side in "ab":
        if f"{side}_format" in row and f"{side}_scaling" in row:
            text = scheme_text(row[f"{side}_format"], row[f"{side}_scaling"])
            if text is None and row[f"{side}_scaling"] != "tensor":
                return False  # a float matrix has no scaling; one stands for all
            try:
                # tests/ops/test_minima.py compares minima and superblocks with gguf
                if text is not None and lb.scheme(text).reference_only:
                    return False
            except ValueError:
                return False
    return True


def restrided(call: ScaledMM, name: str) -> ScaledMM:
    """The same numbers, column by column in memory: what ``t()`` of 8-bit codes gives."""
    data = getattr(call, name)
    return call._replace(**{name: data.t().contiguous().t()})


@functools.cache
def covering() -> list[ScaledMM]:
    calls = []
    for index, row in enumerate(pairwise(FACTORS, allowed)):
        m, n, k = row["shape"]
        matrices, texts = [], []
        for side, size in (("a", m), ("b", n)):
            text = scheme_text(row[f"{side}_format"], row[f"{side}_scaling"])
            x = random_matrix(size, k, seed=2 * index + (side == "b"))
            matrices.append(x if text else x.to(getattr(torch, row[f"{side}_format"])))
            texts.append(text)
        bias = None if row["bias"] is None else random_matrix(1, n, seed=3)[0].to(row["bias"])
        call = make_call(*matrices, *texts, bias=bias, out_dtype=row["out_dtype"])
        for side in "ab":
            if row[f"{side}_strided"]:
                call = restrided(call, side)
        calls.append(call)
    return calls


def test_the_array_covers_every_pair():
    calls = covering()
    met = {
        (c.a_scheme and lb.scheme(c.a_scheme).format.name, c.b_scheme and lb.scheme(c.b_scheme).format.name)
        for c in calls
    }
    formats = [None, *(f.name for f in distinct_formats())]
    assert met == {(a, b) for a in formats for b in formats}
    for scheme in ([c.a_scheme for c in calls], [c.b_scheme for c in calls]):
        for scaling in SCALINGS:
            named = [f"{f}:{scaling}" for f in formats[1:] if allowed({"a_format": f, "a_scaling": scaling})]
            assert {lb.scheme(text).name for text in named} & set(scheme), scaling
    assert 200 < len(calls) < 800


def moved(call: ScaledMM, device: str) -> ScaledMM:
    return call if device == "cpu" else ScaledMM(*(v.to(device) if isinstance(v, Tensor) else v for v in call))


def check_kernel(kernel: Kernel, calls: list[ScaledMM], work_out: Callable[[ScaledMM], Wanted] = Wanted) -> None:
    served, reasons = 0, set()
    for call in calls:
        on_device = moved(call, kernel.variant.device)
        outs = kernel.run(on_device)
        if outs is None:
            reasons.add(kernel.impl.supports(on_device))
            continue
        served += 1
        check(outs[0], call, kernel.impl.numerics, str(kernel), work_out)
    assert all(isinstance(reason, str) and reason for reason in reasons), "a refusal without a reason"
    assert served, f"{kernel} refuses every call: {reasons}"


REFERENCE = Kernel(
    "scaled_mm", next(i for i in lb.impls("scaled_mm", "cpu") if i.name == "reference"), Variant("reference")
)
KERNELS = params([REFERENCE, *kernels("scaled_mm")])
OF_FLOATS = params([REFERENCE, *kernels("scaled_mm"), *rounding("scaled_mm")])


#: What calls give that every kernel is given.
worked_out = functools.cache(Wanted)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kernel", OF_FLOATS)
def test_every_pair_of_schemes_shapes_and_dtypes(kernel: Kernel):
    check_kernel(kernel, covering()[:: 7 if kernel.variant.interpreted else 1], worked_out)


def chosen() -> tuple[ScaledMM, ...]:
    return samples(SPEC.name)[::4]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kernel", OF_FLOATS)
def test_the_samples_of_the_op(kernel: Kernel):
    check_kernel(kernel, chosen()[:: 12 if kernel.variant.interpreted else 1], worked_out)


# -- the check itself --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("numerics", [Numerics(), Numerics("bf16", "fp32")], ids=str)
def test_the_bound_of_the_op_is_that_of_section_9(numerics: Numerics):
    """Which the oracle works out from its own operands: neither may be a hundredth larger than the other."""
    for call in [*covering()[::3], *chosen()[::3]]:
        wanted, stated = worked_out(call), SPEC.tolerance(call, numerics).numpy()
        if wanted.integers:
            assert not stated.any()
            continue
        derived, smallest = wanted.bound(numerics), torch.finfo(call.out_dtype).smallest_normal
        worst = np.abs(stated - derived) - 0.01 * np.minimum(stated, derived)
        assert (worst <= 2.0**-20 * smallest).all(), f"{describe(call)}: {worst.max()}"


def test_a_product_beyond_its_bound_is_refused():
    """Any element off by twice the bound, any bit of an integer product; half the bound passes."""
    refused = 0
    for call in [*covering()[::5], make_call(random_matrix(2, 33000), random_matrix(3, 33000, seed=1), None, None)]:
        wanted = Wanted(call)
        if wanted.integers:
            off = wanted.bits.clone()
            last = off[-1, -1]
            off[-1, -1] = torch.nextafter(last, torch.tensor(0.0 if last == torch.inf else torch.inf, dtype=off.dtype))
            with pytest.raises(AssertionError, match="outside the bound"):
                check(off, call, Numerics(), "a bit")
            continue
        call = call._replace(out_dtype=torch.float32)
        wanted = Wanted(call)
        exact, bound = torch.from_numpy(wanted.product), torch.from_numpy(wanted.bound(Numerics()))
        check((exact + 0.5 * bound).float(), call, Numerics(), "half")
        for sign in (-1, 1):
            off = exact.float()
            off[0, -1] = (exact + 2 * sign * bound)[0, -1]
            with pytest.raises(AssertionError, match="outside the bound"):
                check(off, call, Numerics(), "twice")
            refused += 1
        with pytest.raises(AssertionError, match="outside the bound"):
            check(torch.zeros_like(off), call, Numerics(), "zeros")
    assert refused > 50


# -- integers ----------------------------------------------------------------------------------------------------------
INTEGERS = [
    "int8:row",
    "int8:tensor",
    "int4:row",
    "int8:row:affine",
    "uint8:row:affine",
    "uint4:tensor:affine",
    "int8:tensor:e8m0",
]


def extremes(rows: int, cols: int, s: Scheme, seed: int) -> Tensor:
    """Rows of codes at the ends of the range: all qmin, all qmax, and both mixed."""
    low, high = s.format.qmin, s.format.qmax
    q = torch.full((rows, cols), low, dtype=torch.int32)
    q[1::2] = high
    mixed = torch.randint(0, 2, (rows, cols), generator=torch.Generator().manual_seed(seed)).bool()
    q[2::3] = torch.where(mixed[2::3], low, high).int()
    return lb.pack((q & ((1 << s.format.bits) - 1)).to(torch.uint8), s.format.bits)


def extreme_call(a: str, b: str, m: int, n: int, k: int, **more: Any) -> ScaledMM:
    parts: dict[str, Any] = {"cols": k, "out_dtype": torch.float32, **more}
    for side, text, rows in (("a", a, m), ("b", b, n)):
        s = lb.scheme(text)
        shape = s.scale_shape(rows, k)
        parts |= {side: extremes(rows, k, s, rows), f"{side}_scheme": text}
        scale = torch.full(shape, 127, dtype=torch.uint8) if s.scale_format.name == "e8m0" else torch.rand(shape) + 0.5
        parts[f"{side}_scale"] = scale
        if s.affine:  # zero points at both ends, so that q - zero point reaches +-255
            ends = torch.tensor([s.format.qmin, s.format.qmax])
            zero = ends[torch.arange(shape[0] * shape[1]) % 2].reshape(shape)
            parts[f"{side}_zero_point"] = zero.to(torch.int8 if s.format.signed else torch.uint8)
    return ScaledMM(**parts)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("k", [33025, 33028, 66052, 131071, 131072, 140001])
@pytest.mark.parametrize("a, b", [("int8:row", "int8:row"), ("uint8:row:affine", "uint8:row:affine"),
                                  ("int8:row:affine", "uint8:row:affine"),
                                  ("int8:row:affine", "int8:row")])  # fmt: skip
@pytest.mark.parametrize("kernel", [p for p in KERNELS if not p.marks and not p.values[0].variant.interpreted])
def test_sums_that_overflow_32_bits(kernel: Kernel, a, b, k):
    """(-128)(-128) K reaches 2**31 at K = 131,072; with zero points, 255 * 255 K does at 33,026."""
    check_kernel(kernel, [extreme_call(a, b, 3, 3, k)])


@pytest.mark.parametrize("kernel", KERNELS)
def test_extreme_codes_of_every_pair_of_integers(kernel: Kernel):
    """Pairs of products that a 16-bit accumulator would saturate."""
    calls = [
        extreme_call(a, b, 5, 7, k, bias=torch.randn(7)) for a in INTEGERS for b in INTEGERS for k in (1, 31, 128, 259)
    ]
    check_kernel(kernel, calls[:: 8 if kernel.variant.interpreted else 1])


def at_the_ends(call: ScaledMM) -> ScaledMM:
    """The call with zero points at both ends of the dtype that they are stored in, one block after another."""
    for name in ("a_zero_point", "b_zero_point"):
        zero = getattr(call, name)
        if zero is not None:
            ends = torch.tensor([torch.iinfo(zero.dtype).min, torch.iinfo(zero.dtype).max], dtype=zero.dtype)
            call = call._replace(**{name: ends[torch.arange(zero.numel()) % 2].reshape(zero.shape)})
    return call


@pytest.mark.parametrize("kernel", KERNELS)
def test_zero_points_at_the_ends_of_their_dtype(kernel: Kernel):
    """A zero point that is given may be any that its byte holds: codes of 4 bits less it then need 9 bits."""
    others = ["int8:row", "uint8:row:affine", "int4:row", "uint4:row:affine", "int4:group32:affine", "fp8_e4m3:row",
              "mxfp4", "nf4", None]  # fmt: skip
    calls = []
    for text in (
        "int4:row:affine",
        "uint4:row:affine",
        "int4:group32:affine",
        "uint4:tensor:affine",
        "int4:col:affine",
    ):
        for other in others:
            for left, right in ((text, other), (other, text)):
                m, n, k = [(1, 19, 96), (5, 7, 33), (17, 40, 130)][len(calls) % 3]
                a, b = random_matrix(m, k, seed=1), random_matrix(n, k, seed=2)
                calls.append(at_the_ends(make_call(a, b, left, right, out_dtype=torch.float32)))
    calls = calls[:: 8 if kernel.variant.interpreted else 1]
    reasons = [kernel.impl.supports(call) for call in calls]
    if all(reasons):
        pytest.skip(str(reasons[0]))
    check_kernel(kernel, calls)


# -- large products ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("variant", NATIVE)
@pytest.mark.parametrize("shape", [(1, 300, 256), (70, 90, 130), (200, 20, 65)], ids=str)
def test_large_products_are_within_their_bound(variant: Variant, shape):
    m, n, k = shape
    a, b = random_matrix(m, k, seed=1), random_matrix(n, k, seed=2)
    pairs = [
        ("int8:row", "int8:row"), (None, "int4:group128"), ("fp8_e4m3:row", "fp8_e4m3:row"), ("mxfp4", "mxfp4"),
        (None, "nf4"), ("nvfp4", "nvfp4"), ("fp8_e4m3:group128", "fp8_e4m3:block128x128"), (None, None),
    ]  # fmt: skip
    for left, right in pairs:
        call = make_call(a, b, left, right, out_dtype=torch.float32)
        with variant.use():
            check(torch.ops.lowbit.scaled_mm(**call._asdict()), call, Numerics(), f"{variant} {left} x {right}")


# -- damage ------------------------------------------------------------------------------------------------------------
@everywhere
@pytest.mark.parametrize(
    "name", ["fp8_e4m3:row", "int8:row", "mxfp4", "int4:group32", "nvfp4", "nf4", "uint8:row:affine", None]
)
def test_damage_stays_in_its_row_and_column(variant: Variant, name):
    a, b = torch.randn(5, 64), torch.randn(7, 64)
    a[2, 10], b[4, 63] = torch.nan, torch.inf
    left = lb.quantize(a, name) if name else a
    right = lb.quantize(b, name) if name else b
    if variant.device != "cpu":
        left, right = left.to(variant.device), right.to(variant.device)
    if reason := variant.refuses("scaled_mm", left, right, out_dtype=torch.float32):
        pytest.skip(reason)
    with variant.use():
        y = lb.scaled_mm(left, right, out_dtype=torch.float32).cpu()
    hit = torch.zeros(5, 7, dtype=torch.bool)
    hit[2], hit[:, 4] = True, True
    bad = y.isnan() if name else ~y.isfinite()
    assert torch.equal(bad, hit), f"{name} on {variant}: {bad.int().tolist()}"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("format", ["e3m2n", "e2m1n", "int4"])
def test_bits_that_pad_a_row_and_nan_in_narrow_formats(kernel: Kernel, format):
    """Few rows to many, an odd depth whose last byte holds any bits besides, and a NaN where the format has one."""
    if kernel.variant.interpreted:
        pytest.skip("the interpreter takes minutes")
    for rows in (1, 3, 13, 16, 20):
        call = make_call(random_matrix(rows, 97), random_matrix(9, 97, seed=1), None, f"{format}:row")
        bits, codes = lb.scheme(call.b_scheme).format.bits, call.b.clone()
        expected = kernel.run(moved(call, kernel.variant.device))
        codes[:, -1] |= 0xFF << (97 * bits % 8) & 0xFF
        got = kernel.run(moved(call._replace(b=codes), kernel.variant.device))
        assert (got is None) == (expected is None)
        if got is not None and expected is not None:
            assert_same_bits(got[0], expected[0], f"{format}, {rows} rows")
            assert got[0].isfinite().all()
            check(got[0], call, kernel.impl.numerics, str(kernel))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("format", ["e3m2n", "e2m3n", "fp8_e4m3", "e2m1n", "e1m4b-113"])
def test_nan_of_either_sign_and_the_end_of_the_range_in_whole_steps(kernel: Kernel, format):
    """Depths that kernels take in whole steps, few rows to many: a NaN reaches its column, and nothing else does."""
    if kernel.variant.interpreted:
        pytest.skip("the interpreter takes minutes")
    for rows in (1, 5, 14, 20):
        normal = torch.randn(rows + 9, 128, generator=torch.Generator().manual_seed(0))
        call = make_call(normal[:rows], normal[rows:], None, f"{format}:row")
        f = lb.scheme(call.b_scheme).format
        hit = torch.zeros(9, dtype=torch.bool)
        if f.nan != "none":
            codes = lb.unpack(call.b, f.bits, (9, 128))
            codes[3, 40], codes[6, 99] = f.nan_code, f.nan_code | 1 << (f.bits - 1)
            call, hit[[3, 6]] = call._replace(b=lb.pack(codes, f.bits)), True
        got = kernel.run(moved(call, kernel.variant.device))
        if got is not None:
            assert torch.equal(got[0].cpu().isnan(), hit.expand(rows, 9)), f"{format}, {rows} rows on {kernel}"
