"""scaled_mm: a pairwise covering array against fp64 within the op's own bound; integers exact in every bit.

The oracle decodes with exact rationals and multiplies in fp64. The full product of schemes: ``make exhaustive``.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from bits import assert_same_bits, describe
from covering import pairwise
from torch import Tensor
from variants import ALL, NATIVE, Kernel, Variant, kernels, params, threads

import lowbit as lb
from lowbit.ops import OPS, Numerics
from lowbit.ops.matmul import ScaledMM, is_exact, make_call, sides
from lowbit.ops.samples import element_formats, random_matrix
from lowbit.scaling import Scheme

SPEC = OPS["scaled_mm"]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
everywhere = pytest.mark.parametrize("variant", ALL)


# -- the oracle --------------------------------------------------------------------------------------------------------
def decoded(call: ScaledMM, which: int) -> np.ndarray:
    """An operand in fp64, exact: (value - zero point) * scale, neither rounded."""
    side = sides(call)[which]
    if side.scheme is None:
        return side.data.cpu().double().numpy()
    s = lb.scheme(side.scheme)
    units = units_of(side, s, call.cols)
    return units * spread(scales(s, side), s, units.shape)


def units_of(side: Any, s: Scheme, cols: int) -> np.ndarray:
    """Code values less zero points, fp64."""
    bits = s.format.bits
    rows = np.ascontiguousarray(side.data.cpu().numpy())
    stream = np.unpackbits(rows, axis=1, bitorder="little")[:, : cols * bits].reshape(rows.shape[0], cols, bits)
    codes = (stream * (1 << np.arange(bits))).sum(-1).astype(np.int64)
    table = np.array([float(oracles.value_of(s.format, code)) for code in range(1 << bits)])
    values = table[codes]
    if side.zero_point is not None:
        values = values - spread(side.zero_point.cpu().double().numpy(), s, values.shape)
    return values


def scales(s: Scheme, side: Any) -> np.ndarray:
    outer = None if side.outer_scale is None else oracles.Fraction(float(side.outer_scale))
    stored = side.scale.cpu().contiguous()
    view = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[stored.element_size()]
    patterns = stored.view(view).long() & ((1 << 8 * stored.element_size()) - 1)
    flat = [float(oracles.scale_of(int(p), s, outer)) for p in patterns.flatten()]
    return np.array(flat).reshape(tuple(stored.shape))


def spread(blocks: np.ndarray, s: Scheme, shape: tuple[int, ...]) -> np.ndarray:
    r, c = s.block_of(*shape)
    return np.repeat(np.repeat(blocks, r, 0)[: shape[0]], c, 1)[:, : shape[1]]


def exact(call: ScaledMM) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        y = decoded(call, 0) @ decoded(call, 1).T
    return y if call.bias is None else y + call.bias.cpu().double().numpy()


def integer_product(call: ScaledMM) -> Tensor:
    """Section 9 for integers, in the order of its words: exact sum, fp32, times fp32(scale * scale), bias, cast."""
    a, b = (units_of(side, lb.scheme(side.scheme), call.cols) for side in sides(call))
    total = (a.astype(np.int64) @ b.astype(np.int64).T).astype(np.float32)
    row = [
        np.float32(spread(scales(lb.scheme(s.scheme), s), lb.scheme(s.scheme), (s.data.shape[0], 1)))
        for s in sides(call)
    ]
    y = torch.from_numpy(total * (row[0] * row[1].T))
    if call.bias is not None:
        y = y + call.bias.cpu().float()
    return y.to(call.out_dtype)


def check(y: Tensor, call: ScaledMM, numerics: Numerics, what: str) -> None:
    """``y`` within the op's derived bound of the exact product, and in every bit where integers promise that."""
    what = f"{what}: {describe(call)}"
    assert y.dtype == call.out_dtype and tuple(y.shape) == (call.a.shape[0], call.b.shape[0]), what
    if is_exact(call):
        assert_same_bits(y.cpu(), integer_product(call), what)
        return
    wanted, got = exact(call), y.cpu().double().numpy()
    bound = SPEC.tolerance(call, numerics).numpy() + 2.0**-45 * np.abs(wanted)
    assert np.array_equal(np.isnan(wanted), np.isnan(got)), f"{what}: NaN in other places"
    largest = torch.finfo(call.out_dtype).max
    overflow = np.isinf(got) & (np.abs(wanted) + bound > largest) & (np.sign(got) == np.sign(wanted))
    with np.errstate(invalid="ignore"):
        right = (np.abs(got - wanted) <= bound) | overflow | np.isnan(wanted)
    worst = np.argmax(~right)
    assert right.all(), (
        f"{what}: {np.sum(~right)} outside the bound; the first: {got.flat[worst]}, exact {wanted.flat[worst]}, "
        f"off by {abs(got.flat[worst] - wanted.flat[worst]):.3g}, "
        f"bound {np.broadcast_to(bound, got.shape).flat[worst]:.3g}"
    )


# -- a pairwise covering array -----------------------------------------------------------------------------------------
FORMATS = ["float32", "bfloat16", "float16", *(f.name for f in element_formats())]
SCALINGS = ["tensor", "row", "col", "group32", "group7", "block4x8", "mx", "mx:ceil:T", "nvfp4", "row:bf16",
            "tensor:e8m0",
            "row:affine", "tensor:affine", "group32:affine", "block64x1:dq"]  # fmt: skip
FACTORS: dict[str, list[Any]] = {
    "a_format": FORMATS,
    "a_scaling": SCALINGS,
    "b_format": FORMATS,
    "b_scaling": SCALINGS,
    "shape": [(1, 17, 96), (5, 3, 33), (16, 40, 64), (33, 1, 130), (2, 65, 257), (1, 1, 1)],
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
                if text is not None:
                    lb.scheme(text)
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
    formats = [None, *(f.name for f in element_formats())]
    assert met == {(a, b) for a in formats for b in formats}
    assert 200 < len(calls) < 600


def moved(call: ScaledMM, device: str) -> ScaledMM:
    return call if device == "cpu" else ScaledMM(*(v.to(device) if isinstance(v, Tensor) else v for v in call))


def check_kernel(kernel: Kernel, calls: list[ScaledMM]) -> None:
    served, reasons = 0, set()
    for call in calls:
        on_device = moved(call, kernel.variant.device)
        outs = kernel.run(on_device)
        if outs is None:
            reasons.add(kernel.impl.supports(on_device))
            continue
        served += 1
        check(outs[0], call, kernel.impl.numerics, str(kernel))
    assert all(isinstance(reason, str) and reason for reason in reasons), "a refusal without a reason"
    assert served, f"{kernel} refuses every call: {reasons}"


REFERENCE = Kernel(
    "scaled_mm", next(i for i in lb.impls("scaled_mm", "cpu") if i.name == "reference"), Variant("reference")
)
KERNELS = params([REFERENCE, *kernels("scaled_mm")])


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_pair_of_schemes_shapes_and_dtypes(kernel: Kernel):
    check_kernel(kernel, covering()[:: 9 if kernel.variant.interpreted else 1])


@functools.cache
def samples() -> list[ScaledMM]:
    return list(SPEC.samples("cpu"))[::4]


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_samples_of_the_op(kernel: Kernel):
    check_kernel(kernel, samples()[:: 12 if kernel.variant.interpreted else 1])


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


# -- threads -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("variant", NATIVE)
@pytest.mark.parametrize("shape", [(1, 300, 256), (70, 90, 130), (200, 20, 65)], ids=str)
def test_same_bits_for_any_number_of_threads(variant: Variant, shape):
    m, n, k = shape
    a, b = random_matrix(m, k, seed=1), random_matrix(n, k, seed=2)
    pairs = [
        ("int8:row", "int8:row"), (None, "int4:group128"), ("fp8_e4m3:row", "fp8_e4m3:row"), ("mxfp4", "mxfp4"),
        (None, "nf4"), ("nvfp4", "nvfp4"), ("fp8_e4m3:group128", "fp8_e4m3:block128x128"), (None, None),
    ]  # fmt: skip
    for left, right in pairs:
        call = make_call(a, b, left, right, out_dtype=torch.float32)
        results = []
        for count in (1, 2, 3):
            with variant.use(), threads(count):
                results.append(torch.ops.lowbit.scaled_mm(**call._asdict()))
        for other in results[1:]:
            assert_same_bits(other, results[0], f"{left} x {right}")
        check(results[0], call, Numerics(), f"{variant} {left} x {right}")


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


# -- the public function -----------------------------------------------------------------------------------------------
@everywhere
def test_leading_axes_and_transposed_operands(variant: Variant):
    x, w = torch.randn(2, 3, 64, device=variant.device), torch.randn(10, 64, device=variant.device)
    if variant.refuses("scaled_mm", lb.quantize(x, "int8:row"), lb.quantize(w, "int8:row")):
        pytest.skip("not served")
    with variant.use():
        y = lb.scaled_mm(lb.quantize(x, "int8:row"), lb.quantize(w, "int8:row"))
        flat = lb.scaled_mm(lb.quantize(x.reshape(6, 64), "int8:row"), lb.quantize(w, "int8:row"))
        turned = lb.scaled_mm(lb.quantize(x, "int8:row"), lb.quantize(w.t(), "int8:col").t())
    assert y.shape == (2, 3, 10) and y.dtype == torch.bfloat16
    assert_same_bits(y.reshape(6, 10), flat)
    assert_same_bits(turned, y)


@pytest.mark.parametrize("out", ["fp8_e4m3:row", "int8:tensor", "nvfp4", "uint4:group32:affine"])
def test_an_output_scheme_is_quantize_of_the_fp32_result(out):
    a, b = lb.quantize(torch.randn(6, 40), "int8:row"), lb.quantize(torch.randn(33, 40), "int4:group8")
    y = lb.scaled_mm(a, b, bias=torch.ones(33), out_dtype=torch.float32)
    wanted, got = lb.quantize(y, out), lb.scaled_mm(a, b, bias=torch.ones(33), out_scheme=out)
    for part in wanted.parts:
        assert_same_bits(got.parts[part], wanted.parts[part], part)
    again = lb.quantize(torch.zeros(6, 33), out)
    assert lb.scaled_mm(a, b, bias=torch.ones(33), out_scheme=out, out=again) is again
    assert_same_bits(again.codes, wanted.codes)


def test_an_output_scale():
    a, b = lb.quantize(torch.randn(6, 40), "fp8_e4m3:row"), lb.quantize(torch.randn(33, 40), "fp8_e4m3:row")
    y = lb.scaled_mm(a, b, out_dtype=torch.float32)
    got = lb.scaled_mm(a, b, out_scheme="fp8_e4m3:tensor", out_scale=0.25)
    assert got.scale.tolist() == [[0.25]]
    assert_same_bits(got.codes, lb.encode(y / 0.25, "fp8_e4m3"))


@pytest.mark.parametrize("shape", [(0, 5, 8), (4, 0, 8), (4, 5, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("name", ["int8:row", "mxfp4", "fp8_e4m3:block128x128", "uint4:group32:affine", "nvfp4", None])
def test_empty_products(name, shape):
    m, n, k = shape
    a, b, bias = torch.randn(m, k), torch.randn(n, k), torch.randn(n)
    left, right = (lb.quantize(a, name), lb.quantize(b, name)) if name else (a, b)
    assert_same_bits(lb.scaled_mm(left, right, out_dtype=torch.float32), torch.zeros(m, n))
    assert_same_bits(lb.scaled_mm(left, right, bias, torch.float32), bias.expand(m, n) if k == 0 else torch.zeros(m, n))


def test_out_is_filled_and_returned():
    a, b = lb.quantize(torch.randn(6, 40), "int8:row"), lb.quantize(torch.randn(33, 40), "int8:row")
    out = torch.empty(6, 33)
    assert lb.scaled_mm(a, b, out_dtype=torch.float32, out=out) is out
    assert_same_bits(out, lb.scaled_mm(a, b, out_dtype=torch.float32))
    strided = torch.empty(33, 6).t()
    assert lb.scaled_mm(a, b, out_dtype=torch.float32, out=strided) is strided
    assert_same_bits(strided, out)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(b=torch.randn(33)), ValueError, r"b must be a matrix \[N, K\], got shape \[33\]"),
        (dict(b=torch.randn(40, 33)), ValueError, r"must end in the same K; b is \[N, K\]"),
        (dict(bias=torch.randn(6)), ValueError, r"bias must be \[33\], got \[6\]"),
        (dict(bias=torch.ones(33, dtype=torch.int32)), TypeError, "bias must be float32, bfloat16 or float16"),
        (dict(out_dtype=torch.float64), ValueError, "out_dtype must be a 16- or 32-bit float"),
        (dict(out=torch.empty(33, 6)), ValueError, "must be"),
        (dict(out=torch.empty(6, 33, dtype=torch.float32)), ValueError, "out must be torch.bfloat16"),
    ],
)
def test_errors(change, error, message):
    arguments = dict(a=lb.quantize(torch.randn(6, 40), "int8:row"), b=torch.randn(33, 40))
    with pytest.raises(error, match=message):
        lb.scaled_mm(**{**arguments, **change})


# -- gradients ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["int8:row", "int4:group32", "fp8_e4m3:block128x128", "nf4", "nvfp4", "uint4:group32:affine"]
)
def test_gradient_of_a_float_operand(name, dtype):
    """d/dx of x @ w.T is grad @ decoded w; within the bound of a product in the gradient's dtype."""
    x = torch.randn(2, 5, 64, dtype=dtype, requires_grad=True)
    bias = torch.randn(9, dtype=dtype, requires_grad=True)
    q = lb.quantize(torch.randn(9, 64), name)
    y = lb.scaled_mm(x, q, bias=bias, out_dtype=dtype)
    grad = torch.randn_like(y)
    y.backward(grad)
    wanted = grad.double() @ q.dequantize(torch.float32).double()
    size = grad.double().abs() @ q.dequantize(torch.float32).double().abs()
    unit = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}[dtype]
    assert ((x.grad.double() - wanted).abs() <= size * unit * (2 if dtype == torch.bfloat16 else 16)).all()
    assert torch.allclose(bias.grad.double(), grad.double().sum((0, 1)), rtol=8 * unit, atol=16 * unit)
    assert x.grad.dtype == dtype and bias.grad.dtype == dtype


def test_gradients_of_two_float_operands():
    a, b = torch.randn(4, 16, requires_grad=True), torch.randn(5, 16, requires_grad=True)
    lb.scaled_mm(a, b, out_dtype=torch.float32).square().sum().backward()
    c, d = a.detach().double().requires_grad_(), b.detach().double().requires_grad_()
    (c @ d.T).square().sum().backward()
    assert torch.allclose(a.grad.double(), c.grad, rtol=1e-5, atol=1e-5)
    assert torch.allclose(b.grad.double(), d.grad, rtol=1e-5, atol=1e-5)


def test_a_gradient_runs_on_the_backend_of_its_forward():
    x = torch.randn(4, 16, requires_grad=True)
    q = lb.quantize(torch.randn(5, 16), "int8:row")
    with lb.use_backend("reference"):
        y = lb.scaled_mm(x, q, out_dtype=torch.float32)
        z = lb.fake_quantize(x, "int8:row")
    (y.sum() + z.sum()).backward()
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("compiled", [False, True])
def test_gradient_with_every_argument_at_its_default(compiled):
    """torch drops trailing defaults from what autograd sees: no bias and bf16 out is the most common call."""
    w = lb.quantize(torch.linspace(-1, 2, 240).reshape(6, 40), "int8:row")
    run = torch.compile(lb.scaled_mm, backend="aot_eager", fullgraph=True) if compiled else lb.scaled_mm
    a = random_matrix(3, 40, seed=2).requires_grad_()
    run(a, w).float().sum().backward()
    assert torch.allclose(a.grad, w.dequantize().sum(0).expand(3, 40), rtol=2e-2, atol=5e-2)


def test_a_frozen_weight_keeps_no_activation():
    w = lb.quantize(random_matrix(6, 40, seed=1), "int4:group32")
    a = random_matrix(3, 40, seed=2).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        lb.scaled_mm(a, w)
    assert a.shape not in [t.shape for t in kept]


def test_out_of_every_layout_is_filled():
    a, w = torch.randn(2, 5, 16), lb.quantize(torch.randn(3, 16), "int8:row")
    out = torch.full((5, 2, 3), 7.0, dtype=torch.bfloat16).transpose(0, 1)
    assert lb.scaled_mm(a, w, out=out) is out
    assert_same_bits(out.contiguous(), lb.scaled_mm(a, w))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda a, w: {"out": torch.empty(3, 2, 4, dtype=torch.bfloat16)}, ValueError, "out must be of shape"),
        (lambda a, w: {"out": lb.quantize(torch.randn(2, 3, 4), "int8:row")}, TypeError, "out must be a Tensor"),
        (lambda a, w: {"out": torch.empty(2, 3, 4), "out_scheme": "int8:row"}, TypeError, "out must be a Quantized"),
        (lambda a, w: {"out": torch.empty(2, 3, 4, dtype=torch.bfloat16), "bias": torch.randn(4, requires_grad=True)},
         RuntimeError, "automatic differentiation"),
    ],
)  # fmt: skip
def test_out_that_cannot_be_filled(make, error, message):
    a, w = torch.randn(2, 3, 16), lb.quantize(torch.randn(4, 16), "int8:row")
    with pytest.raises(error, match=message):
        lb.scaled_mm(a, w, **make(a, w))


def test_an_output_scale_without_its_scheme_is_refused():
    with pytest.raises(ValueError, match="out_scale is the scale of an out_scheme"):
        lb.scaled_mm(torch.randn(2, 16), torch.randn(4, 16), out_scale=1.0)


@everywhere
def test_a_product_over_no_elements_is_the_bias_on_every_backend(variant: Variant):
    a, b, bias = (torch.ones(shape, device=variant.device) for shape in ((2, 0), (3, 0), (3,)))
    with variant.use():
        assert lb.explain("scaled_mm", a, b).chosen.name == "reference"
        assert_same_bits(lb.scaled_mm(a, b, bias, torch.float32), torch.ones(2, 3, device=variant.device))
