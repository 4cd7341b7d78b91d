"""Products of codes that tensor cores multiply as they are, interpreted, against exact products."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from support.interpreter import within_arguments
from support.mm_oracle import check

pytest.importorskip("triton")
from hypothesis import given
from hypothesis import strategies as st
from triton.runtime import interpreter

import lowbit as lb
from lowbit.backends import registry, triton
from lowbit.kernels import scaled_products, start
from lowbit.ops import OPS, Numerics, grouped
from lowbit.ops.grouped import has_rows_of_its_own
from lowbit.testing.grouped import make_grouped
from lowbit.testing.inputs import random_matrix
from lowbit.testing.matmul import make_call

pytestmark = [
    pytest.mark.skipif(not triton.INTERPRETED, reason="Triton's kernels are not interpreted here"),
    pytest.mark.skipif(
        not hasattr(interpreter, "_dot_scaled_scale_to_f32"), reason="this Triton does not interpret dot_scaled"
    ),
]

#: One of each way: scales of 32 and 16, blocks of several of these and of several rows, whole rows, mixed formats, FP6.
PAIRS = [
    ("mxfp8", "mxfp8:ceil"), ("mxfp4", "mxfp4"), ("mxfp4", "mxfp8"), ("mxfp6", "mxfp6"),
    ("fp6_e3m2:group32:e8m0", "mxfp4"), ("fp8_e5m2:group64:e8m0", "fp4_e2m1:block32x32:e8m0"),
    ("nvfp4:global_row", "nvfp4"), ("nvfp4", "fp4_e2m1:block16x16:e4m3"), ("nvfp4", "nvfp4:global_row"),
    ("fp8_e4m3:row", "fp8_e4m3:row"), ("fp8_e5m2:row", "fp8_e4m3:tensor"),
    ("fp8_e4m3:row:e8m0", "fp8_e4m3:block128x128:e8m0"), ("fp4_e2m1:row:e8m0", "mxfp4"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def as_hardware_multiplies(monkeypatch):
    """The interpreter takes E4M3 scales for E8M0, where hardware reads the lower 7 bits as E4M3 (PTX ISA, ue4m3), and
    multiplies NaN codes of FP8 as numbers.
    """
    widen, table = interpreter._dot_scaled_scale_to_f32, torch.arange(128, dtype=torch.uint8)
    values = table.view(torch.float8_e4m3fn).float().numpy()

    def scales(scale, compute_type):
        return widen(scale, compute_type) if scale.dtype.is_int() else values[scale.data.view(np.uint8) & 127]

    def dot(a, b, total, precision, imprecise):
        left, right = (interpreter._mxfp_value_handle_to_float32(x) for x in (a, b))
        return interpreter.TensorHandle(left @ right + total.data, total.dtype.scalar)

    monkeypatch.setattr(interpreter, "_dot_scaled_scale_to_f32", scales)
    monkeypatch.setattr(interpreter.interpreter_builder, "create_dot", dot)


def product(call, what=""):
    assert scaled_products.supports(call) is None
    out = torch.empty(call.a.shape[0], call.b.shape[0], dtype=call.out_dtype)
    with within_arguments():
        start.run(scaled_products.scaled_mm(call, out))
    check(out, call, Numerics("fp8", "fp32"), what or f"{call.a_scheme} x {call.b_scheme}")
    return out


def random_call(m, n, k, a, b, **more):
    return make_call(random_matrix(m, k, "cpu", seed=m), random_matrix(n, k, "cpu", seed=n), a, b, **more)


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_products_are_within_the_bound_of_fp32(a, b):
    bias = random_matrix(1, 35, "cpu", seed=3)[0]
    product(random_call(1, 35, 300, a, b, bias=bias))
    product(random_call(17, 35, 97, a, b, bias=bias.bfloat16(), out_dtype=torch.float32))


@given(
    st.sampled_from(PAIRS), st.integers(1, 40), st.integers(1, 40), st.integers(1, 200),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)  # fmt: skip
def test_products_of_any_shape(pair, m, n, k, dtype):
    product(random_call(m, n, k, *pair, out_dtype=dtype))


@pytest.mark.parametrize(("a", "b"), PAIRS[:10])
def test_any_codes_and_scales(a, b):
    """Every byte as a code and as an E4M3 scale: infinities, NaN, negative scales; E8M0 as far as sums are finite."""
    call = random_call(8, 8, 256, a, b, out_dtype=torch.float32)
    random = torch.Generator().manual_seed(0)
    some = {}
    for name in ("a", "b", "a_scale", "b_scale"):
        given = getattr(call, name)
        if given.dtype == torch.uint8:
            some[name] = torch.randint(256, given.shape, generator=random, dtype=torch.uint8)
            if name.endswith("scale") and call.a_global_scale is None:
                some[name] = torch.where(some[name] < 250, 100 + some[name] % 50, 255)
    product(call._replace(**some))


@pytest.mark.parametrize("which", ["a", "b"])
def test_a_negative_scale_of_fp4_turns_its_codes(which):
    call = random_call(4, 6, 64, "nvfp4:global_row", "nvfp4", out_dtype=torch.float32)
    scale = getattr(call, f"{which}_scale").clone()
    scale[1, 2] |= 0x80
    before, after = product(call), product(call._replace(**{f"{which}_scale": scale}))
    changed = (before != after).any(1 if which == "a" else 0)
    assert changed.nonzero().flatten().tolist() == [1]


def test_codes_may_have_strides_and_sums_several_programs(monkeypatch):
    call = random_call(3, 20, 2048, "nvfp4", "nvfp4", out_dtype=torch.float32)
    turned = call._replace(a=call.a.t().contiguous().t(), b=call.b.repeat_interleave(2, 0)[::2])
    launches = scaled_products.scaled_mm(turned, torch.empty(3, 20))
    assert [one.kernel.__name__ for one in launches] == ["scaled", "add_shares"] and launches[0].grid[1] > 1
    assert torch.equal(product(turned), product(call))


OF_ROWS = [(a, b) for a, b in PAIRS if has_rows_of_its_own(lb.scheme(a))]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("depth", [96, 2048])
@pytest.mark.parametrize(("a", "b"), OF_ROWS)
def test_experts_are_multiplied_as_codes(a, b, depth):
    """Each expert's rows as by its own product, zeros in those of none; several programs a tile where K is long."""
    counts, rest = ((3, 0, 17, 5), 4) if depth == 96 else ((0, 2), 1)
    rows = random_matrix(sum(counts) + rest, depth, "cpu", seed=1)
    matrices = [random_matrix(20, depth, "cpu", seed=9 + expert) for expert in range(len(counts))]
    bias = random_matrix(len(counts), 20, "cpu", seed=7)
    call = make_grouped(rows, matrices, counts, a, b, bias=bias, out_dtype=torch.float32)
    out = torch.full((len(rows), 20), 77.0)
    launches = scaled_products.scaled_grouped_mm(call, out)
    names = ["grouped_scaled", *(["grouped_add_shares"] if depth == 2048 else [])]
    assert [one.kernel.__name__ for one in launches] == names
    with within_arguments():
        start.run(launches)
    for expert, span in enumerate(grouped.spans(call)):
        check(out[span], grouped.product(call, expert, span), Numerics("fp8", "fp32"), f"{a} x {b}, expert {expert}")
    assert not out[sum(counts) :].any()


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        ("mxfp8", "nvfp4", "scales of both operands must be of one kind"),
        ("fp8_e4m3:row", "mxfp8", "scales of both operands must be of one kind"),
        ("int8:row", "int8:row", "it multiplies codes of fp8_e4m3, .* and a is int8:row"),
        ("fp8_e4m3:group128", "fp8_e4m3:group128", "hardware applies E8M0 scales to 32"),
        ("fp4_e2m1:group24:e8m0", "mxfp4", "hardware applies E8M0 scales to 32"),
        ("fp8_e4m3:group16:e4m3", "nvfp4", "E4M3 ones to 16 of FP4"),
        (None, "mxfp8", "and a is torch.float32"),
    ],
)
def test_what_hardware_does_not_take_is_refused(a, b, reason):
    call = make_call(torch.ones(2, 512), torch.ones(3, 512), a, b)
    assert re.search(reason, scaled_products.supports(call))


@pytest.mark.parametrize(
    ("capability", "precision", "names"),
    [((9, 0), "highest", ()), ((10, 0), "highest", ("triton_codes",)), ((10, 3), "medium", ("triton_codes",)),
     ((12, 0), "highest", ()), ((12, 0), "medium", ("triton_codes_medium",)), ((11, 0), "medium", ())],
)  # fmt: skip
def test_devices_whose_sums_are_short_wait_for_medium_precision(monkeypatch, capability, precision, names):
    monkeypatch.setattr(triton, "capability", lambda device: capability)
    monkeypatch.setattr(registry, "matmul_precision", lambda: precision)
    monkeypatch.setattr(triton, "matmul_precision", lambda: precision)
    call, mixed = (random_call(2, 3, 64, a, "mxfp8") for a in ("mxfp8", "mxfp4"))
    rows = [impl for impl in triton.IMPLS if impl.op == "scaled_mm" and impl.name.startswith("triton_codes")]
    assert tuple(impl.name for impl in rows if impl.supports(call) is None) == names
    of_experts = [i for i in triton.IMPLS if i.op == "scaled_grouped_mm" and i.name.startswith("triton_codes")]
    experts = make_grouped(torch.ones(3, 64), [torch.ones(4, 64)] * 2, (1, 2), "mxfp8", "mxfp8")
    assert tuple(impl.name for impl in of_experts if impl.supports(experts) is None) == names
    assert tuple(impl.name for impl in rows if impl.supports(mixed) is None) == names * (capability[0] == 10)


def test_layers_are_made_of_it(monkeypatch):
    monkeypatch.setattr(triton, "capability", lambda device: (10, 0))
    linear = next(impl for impl in triton.IMPLS if impl.op == "linear" and impl.name == "triton_codes")
    weight = lb.quantize(random_matrix(32, 64, "cpu"), "mxfp8")
    x = random_matrix(24, 64, "cpu", seed=1)
    asked = OPS["linear"].args(x, weight.codes, "mxfp8", weight.scale, input_scheme="mxfp8", out_dtype=torch.float32)
    assert linear.supports(asked) is None
    out = torch.empty(24, 32)
    linear.run((out,), asked)
    torch.testing.assert_close(out, torch.ops.lowbit.linear(*asked), rtol=1e-5, atol=1e-5)
