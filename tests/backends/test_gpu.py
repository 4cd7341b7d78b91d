"""What only a GPU can show; skips without one. The CUDA and Triton kernels also run in every test of the op tables.

Bit equality with the CPU on all 16-bit patterns and on many fp32 patterns, large ragged tensors under every scheme,
products within their bound, side streams, opcheck and torch.compile.

Triton compiles a kernel for nearly every sample: LOWBIT_GPU_SAMPLES=0.1 takes a seeded tenth of them, but for the CUDA
backend, which compiles nothing.
"""

from __future__ import annotations

import math
import os
import random
from typing import Any

import pytest
import torch
from support.bits import assert_same_bits, describe
from support.mm_oracle import check
from support.samples import checked_samples, samples
from torch import Tensor

import lowbit as lb
from lowbit import scaling
from lowbit.backends import registry
from lowbit.formats import Format
from lowbit.ops import OPS, matmul
from lowbit.testing import SAMPLES
from lowbit.testing.inputs import element_formats, random_matrix, schemes
from lowbit.testing.matmul import make_call

# bench/gpu_session.sh sets the variable, and its rehearsal without a GPU collects the tests.
if not torch.cuda.is_available() and "LOWBIT_GPU_SAMPLES" not in os.environ:
    pytest.skip("needs a GPU", allow_module_level=True)
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

#: Backends with kernels for a GPU; one that is absent there skips with its own reason.
BACKENDS = ("cuda", "triton", "reference")
#: Tests of samples are cut into so many, for as many workers.
PARTS = 8


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if name in registry.absent():
        pytest.skip(f"{name}: {registry.absent()[name]}")
    return name


def moved(call: Any, device: str) -> Any:
    return type(call)(*(v.to(device) if isinstance(v, Tensor) else v for v in call))


def run(op: str, call: Any) -> tuple[Tensor, ...]:
    outs = getattr(torch.ops.lowbit, op)(*call)
    return outs if isinstance(outs, tuple) else (outs,)


def compare(op: str, call: Any, backend: str, what: str) -> None:
    """The op on the GPU, on that backend, against the CPU; ``call`` holds CPU tensors."""
    with lb.use_backend(backend):
        actual = run(op, moved(call, "cuda"))
    for index, (a, e) in enumerate(zip(actual, run(op, call), strict=True)):
        assert_same_bits(a.cpu(), e, f"{backend} {what} output {index}")


# -- codecs ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("format", element_formats(), ids=str)
def test_encode_of_all_16_bit_patterns(backend: str, format: Format) -> None:
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        x = patterns.view(dtype).reshape(64, 1024)
        for saturate in (True, False):
            call = OPS["encode"].args(x, format.name, saturate=saturate)
            compare("encode", call, backend, f"{format} {dtype} saturate={saturate}")


@pytest.mark.parametrize("format", element_formats(), ids=str)
def test_encode_of_many_fp32_patterns(backend: str, format: Format) -> None:
    count = 1 << (18 if backend == "reference" else 22)
    bits = torch.randint(-(1 << 31), 1 << 31, (count,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    x = bits.view(torch.float32).reshape(-1, 512)
    for rounding in ("nearest", *(("stochastic",) if format.kind != "codebook" else ())):
        compare(
            "encode",
            OPS["encode"].args(x, format.name, rounding, rng=torch.tensor([11, 0])),
            backend,
            f"{format} {rounding}",
        )


def drawn(calls: Any, backend: str, seed: object) -> list[Any]:
    """The calls, or the share of them that LOWBIT_GPU_SAMPLES asks for; the same ones in every run."""
    calls = list(calls)
    share = float(os.environ.get("LOWBIT_GPU_SAMPLES", 1))
    if share == 1 or backend == "cuda":
        return calls
    return random.Random(str(seed)).sample(calls, math.ceil(share * len(calls)))


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("op", [op for op in OPS if OPS[op].tolerance is None])
def test_samples(backend: str, op: str, part: int) -> None:
    """Every sample of every op that kernels agree on in every bit."""
    rows = [impl for impl in lb.impls(op, "cuda") if impl.backend == backend]
    if not rows:
        pytest.skip(f"{backend} has no kernel for {op}")
    for call in drawn(samples(op)[part::PARTS], backend, (op, part)):
        if any(impl.supports(moved(call, "cuda")) is None for impl in rows):
            compare(op, call, backend, f"{op} {describe(call)}")


# -- schemes ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scheme", schemes(), ids=str)
def test_large_ragged(backend: str, scheme: scaling.Scheme) -> None:
    """Large enough for every path: teams of threads, whole blocks of them, and two passes."""
    if backend == "reference":
        pytest.skip("the reference is what the others are held to")
    for index, (rows, cols) in enumerate([(517, 1031), (3, 40_003), (4099, 37)]):
        x = random_matrix(rows, cols, seed=index, extremes=index != 1).to(
            (torch.float32, torch.bfloat16, torch.float16)[index]
        )
        global_scale = run("global_scale", OPS["global_scale"].args(x, scheme.name))[0] if scheme.global_scale else None
        rounding = "nearest" if scheme.format.kind == "codebook" or index == 0 else "stochastic"
        more = {
            "rounding": rounding,
            "rng": torch.tensor([5, 2]),
            "stream": 3,
            "offset": 1 << 33,
            "pitch": 50_000,
        }
        what = f"{scheme} [{rows}, {cols}] {rounding}"
        compare("quantize", OPS["quantize"].args(x, scheme.name, global_scale, **more), backend, what)
        compare(
            "fake_quantize", OPS["fake_quantize"].args(x, scheme.name, global_scale=global_scale, **more), backend, what
        )
        codes, scale, zero = run("quantize", OPS["quantize"].args(x, scheme.name, global_scale))
        zero = zero if scheme.affine else None
        call = OPS["dequantize"].args(codes, scheme.name, cols, scale, zero, global_scale, x.dtype)
        compare("dequantize", call, backend, what)
        call = OPS["quantize_static"].args(x * 3, scheme.name, scale, zero, global_scale, **more)
        compare("quantize_static", call, backend, f"{what} static")


@pytest.mark.parametrize("scheme", ["fp8_e4m3:tensor", "int8:row", "mxfp4", "nvfp4", "uint4:group128:affine"])
def test_rows_and_columns_with_strides(backend: str, scheme: str) -> None:
    x = random_matrix(300, 520, "cuda", extremes=True)
    with lb.use_backend(backend):
        for view in (x.t(), x[:, 3:515], x[::2, ::2], x.reshape(30, 10, 520)):
            same = [lb.quantize(v, scheme).dequantize() for v in (view, view.contiguous())]
            assert_same_bits(*same, f"{backend} {scheme} strides {view.stride()}")


# -- matrix product --------------------------------------------------------------------------------------------------
def error_of(impl: registry.Impl, call: matmul.ScaledMM) -> None:
    """Runs one kernel and holds it to the bound that its numerics promise."""
    out = torch.full((call.a.shape[0], call.b.shape[0]), torch.nan, dtype=call.out_dtype, device="cuda")
    impl.run((out,), call)
    check(out, moved(call, "cpu"), impl.numerics, impl.name)


@pytest.mark.parametrize("part", range(PARTS))
def test_scaled_mm_samples(part: int) -> None:
    served = 0
    for call in drawn(list(SAMPLES["scaled_mm"]("cuda"))[part::PARTS], "triton", part):
        for impl in lb.impls("scaled_mm", "cuda"):
            if impl.supports(call) is None:
                error_of(impl, call)
                served += impl.backend != "reference"
    assert served


PAIRS = [
    ("fp8_e4m3:row", "fp8_e4m3:row"), ("fp8_e5m2:tensor", "fp8_e4m3:tensor"), ("int8:row", "int8:row"),
    ("fp8_e4m3:group128", "fp8_e4m3:block128x128"), ("mxfp8", "mxfp4"), ("nvfp4", "nvfp4"),
    ("int8:row", "int4:group128"),
    *((dtype, weight) for dtype in (torch.bfloat16, torch.float16, torch.float32) for weight in (
        "int4:group128", "uint4:group128:affine", "mxfp4", "nvfp4", "nf4", "fp8_e4m3:row", "fp8_e5m2:group64",
        "int8:row",
    )),
]  # fmt: skip


@pytest.mark.parametrize("a_scheme,b_scheme", PAIRS, ids=str)
def test_scaled_mm_of_many_tiles(a_scheme: str | torch.dtype, b_scheme: str) -> None:
    for m, n, k in ((515, 389, 1024), (1000, 130, 777), (5, 4096, 512)):
        a, b = random_matrix(m, k, "cuda", seed=1), random_matrix(n, k, "cuda", seed=2)
        a, left = (a, a_scheme) if isinstance(a_scheme, str) else (a.to(a_scheme), None)
        call = make_call(a, b, left, b_scheme, bias=random_matrix(1, n, "cuda")[0], out_dtype=torch.float32)
        for impl in lb.impls("scaled_mm", "cuda"):
            if impl.supports(call) is None and (impl.name != "reference" or m < 10):
                error_of(impl, call)


# -- torch -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", list(OPS))
def test_opcheck(op: str) -> None:
    for call in checked_samples(op, 2):
        torch.library.opcheck(getattr(torch.ops.lowbit, op).default, tuple(moved(call, "cuda")))


def test_experts_in_a_captured_graph() -> None:
    """Another route and other tokens than those that were captured, against one expert after the other."""
    from lowbit.nn import QuantExperts, QuantLinear, experts

    class Like(torch.nn.Module):
        has_gate = False
        act_fn = torch.nn.ReLU()

    recipe = lb.recipe("int4-weight-only:group128")

    def layer(rows: int, cols: int) -> QuantLinear:
        return QuantLinear(lb.quantize(torch.randn(rows, cols), recipe.weight), None, recipe)

    layers = [layer(512, 256) for _ in range(8)], [layer(256, 512) for _ in range(8)]
    module = QuantExperts(Like(), *layers).cuda()
    x, weights = torch.randn(40, 256, device="cuda").bfloat16(), torch.rand(40, 2, device="cuda").bfloat16()
    index = torch.randint(9, (40, 2), device="cuda")
    with torch.no_grad():
        module(x, index, weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = module(x, index, weights)
        x.copy_(torch.randn_like(x))
        index.copy_(torch.randint(9, (40, 2)))
        graph.replay()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(experts, "_STACKED_ON", ())
            expected = module(x, index, weights)
    torch.testing.assert_close(y.float(), expected.float(), rtol=0.03, atol=0.03 * float(expected.abs().max()))


def test_compile_without_a_graph_break(backend: str) -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        a, b = lb.quantize(x, "fp8_e4m3:row"), lb.quantize(w, "fp8_e4m3:row")
        return lb.scaled_mm(a, b, out_dtype=torch.float32) + lb.fake_quantize(x, "int8:row").sum()

    x, w = random_matrix(64, 128, "cuda"), random_matrix(32, 128, "cuda", seed=1)
    with lb.use_backend(backend):
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(x, w)
        assert_same_bits(compiled, step(x, w), backend)


def test_side_streams(backend: str) -> None:
    """Kernels run on torch's current stream: work queued there before is seen."""
    stream = torch.cuda.Stream()
    x = random_matrix(2048, 2048, "cuda")
    expected = lb.fake_quantize(x * 3, "mxfp8")
    with lb.use_backend(backend), torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        for _ in range(20):
            y = x.clone()
        y.mul_(3)
        out = lb.fake_quantize(y, "mxfp8")
    stream.synchronize()
    assert_same_bits(out, expected, backend)
