"""Public ops are what runs and what modes see; on the CPU, C++ serves most calls, and errors keep their type."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from support.bits import assert_same_bits
from support.samples import samples
from support.watching import WatchDispatch
from torch import Tensor

import lowbit as lb
from lowbit.backends import dispatch, native, registry, steps
from lowbit.ops import OPS

compiled = pytest.mark.skipif(native.loading_error() is not None, reason="no native library")
ENTRIES = set() if native.loading_error() is not None else set(torch.ops.lowbit_native.entries())


class Sub(Tensor):
    pass


@pytest.fixture
def chosen(monkeypatch):
    """The ops for which Python chooses a kernel; C++ serves all others."""
    asked = []
    select = registry.select

    def noting(op, device, call, empty):
        asked.append(op)
        return select(op, device, call, empty)

    monkeypatch.setattr(dispatch.registry, "select", noting)
    return asked


def each_call():
    x, w = torch.randn(3, 40), torch.randn(5, 40)
    q = lb.quantize(w, "int8:row")
    codes = lb.encode(x, "fp8_e4m3")
    yield "encode", lambda: lb.encode(x, "fp8_e4m3")
    yield "encode_out", lambda: lb.encode(x, "fp8_e4m3", out=torch.empty(3, 40, dtype=torch.uint8))
    yield "decode", lambda: lb.decode(codes, "fp8_e4m3")
    yield "decode_out", lambda: lb.decode(codes, "fp8_e4m3", out=torch.empty(3, 40))
    yield "quantize", lambda: lb.quantize(x, "uint4:group8:affine")
    yield "quantize_static", lambda: lb.quantize(x, "int8:tensor", scale=0.1)
    yield "dequantize", lambda: q.dequantize()
    yield "dequantize_out", lambda: q.dequantize(out=torch.empty(5, 40))
    yield "fake_quantize", lambda: lb.fake_quantize(x, "int8:row")
    yield "scaled_mm", lambda: lb.scaled_mm(lb.quantize(x, "int8:row"), q)
    yield "scaled_mm", lambda: lb.scaled_mm(x, q)
    yield "linear", lambda: lb.functional.linear(x, q, None, "int8:row")
    yield "linear", lambda: lb.functional.linear(x, q)


@compiled
@pytest.mark.parametrize("name, run", list(each_call()), ids=lambda v: v if isinstance(v, str) else "")
def test_a_call_whose_names_are_known_is_served_by_cpp(chosen, name, run):
    run()
    chosen.clear()
    run()
    assert chosen == [] and name in ENTRIES


@compiled
def test_entries_are_the_ops_of_the_table():
    known = {name for op in OPS for name in (op, f"{op}_out")}
    assert known | {steps.NAME} >= ENTRIES


def test_modes_see_the_public_ops():
    with WatchDispatch() as watch:
        lb.scaled_mm(torch.randn(3, 40), lb.quantize(torch.randn(5, 40), "int8:row"))
    assert [name for name in watch.seen if name.startswith("lowbit")] == [
        "lowbit.quantize.default",
        "lowbit.scaled_mm.default",
    ]


def test_profilers_see_the_public_ops():
    q = lb.quantize(torch.randn(5, 40), "int8:row")
    with torch.profiler.profile() as profile:
        q.dequantize()
    assert any(event.key == "lowbit::dequantize" for event in profile.key_averages())


def test_meta_tensors_and_subclasses():
    assert lb.encode(torch.empty(4, device="meta"), "fp8_e4m3").is_meta
    x = torch.randn(4)
    assert_same_bits(lb.encode(x.as_subclass(Sub), "fp8_e4m3").as_subclass(Tensor), lb.encode(x, "fp8_e4m3"))


def test_a_tensor_whose_bits_await_a_sign_is_not_taken_as_it_lies():
    z = torch.randn(4, 40, dtype=torch.complex64)
    lazy = torch.imag(z.conj())
    assert lazy.is_neg()
    assert_same_bits(lb.encode(lazy, "fp8_e4m3"), lb.encode(-z.imag.contiguous(), "fp8_e4m3"))


@compiled
def test_cpp_and_python_give_the_same_bits(chosen):
    x = torch.randn(7, 130)
    for scheme in ("fp8_e4m3:row", "uint4:group32:affine", "nvfp4", "int8:tensor:bf16"):
        lb.quantize(x, scheme)
        chosen.clear()
        q = lb.quantize(x, scheme)
        assert chosen == ["global_scale"] * bool(q.scheme.global_scale)
        with lb.use_backend("cpu"):
            through_python = lb.quantize(x, scheme)
        assert "quantize" in chosen
        for name, part in q.parts.items():
            assert_same_bits(part, through_python.parts[name], f"{scheme} {name}")


@pytest.mark.thinned(3)
@compiled
@pytest.mark.parametrize("op", sorted(ENTRIES & set(OPS)))
def test_an_entry_gives_the_bits_of_its_kernel(op):
    """On the samples of the op, in any rank and stride: what C++ allocates and fills is what ``use_backend`` gives."""
    step = {"fake_quantize": 5, "quantize": 5, "quantize_static": 5, "dequantize": 5}.get(op, 3)
    for call in samples(op)[::step]:
        with lb.use_backend("cpu"):
            expected = getattr(torch.ops.lowbit, op)(*call)
        for _ in range(2):
            found = getattr(torch.ops.lowbit, op)(*call)
            pairs = [(found, expected)] if isinstance(found, Tensor) else zip(found, expected, strict=True)
            for got, want in pairs:
                assert_same_bits(got, want, f"{op} {call[1:]}"[:200])


@pytest.mark.thinned(4)
@compiled
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("op", sorted(ENTRIES & set(OPS)))
def test_no_entry_throws_on_a_valid_call(op, part):
    """What it throws goes to Python, which then computes: right, but slow, and unseen unless it is counted."""
    before = torch.ops.lowbit_native.swallowed()
    for call in samples(op)[part::4]:
        outs = getattr(torch.ops.lowbit, op)(*call)
        if f"{op}_out" in ENTRIES:
            outs = (outs,) if isinstance(outs, Tensor) else outs
            filled = dict(zip(OPS[op].returns, [torch.empty_like(out) for out in outs], strict=True))
            getattr(torch.ops.lowbit, f"{op}_out")(*call, **filled)
        assert torch.ops.lowbit_native.swallowed() == before, f"{op} {call[1:]}"[:300]


@compiled
def test_an_error_of_an_entry_that_python_does_not_share_is_counted(monkeypatch):
    spec, before = OPS["decode"], torch.ops.lowbit_native.swallowed()
    served = registry.Impl("decode", "none", ("cpu",), lambda outs, call: None)
    with pytest.raises((TypeError, ValueError, RuntimeError), match="must be uint8 codes"):
        torch.ops.lowbit.decode(torch.zeros(3, dtype=torch.int8), "fp8_e4m3")
    assert torch.ops.lowbit_native.swallowed() == before
    check = spec.check
    monkeypatch.setattr(dispatch.registry, "select", lambda *args, **kwargs: served)
    object.__setattr__(spec, "check", lambda call: None)
    try:
        torch.ops.lowbit.decode(torch.zeros(3, dtype=torch.int8), "fp8_e4m3")
    finally:
        object.__setattr__(spec, "check", check)
    assert torch.ops.lowbit_native.swallowed() == before + 1


_OUT_OF_MEMORY = """
import resource, sys, torch, lowbit as lb
torch.set_num_threads(int(sys.argv[1]))
x, weight, out = torch.randn(300, 1 << 15), lb.quantize(torch.randn(64, 1 << 15), "int4:group32"), torch.zeros(300, 64)
lb.functional.linear(x[:1], weight, None, "int8:row", out=out[:1])
limits = resource.getrlimit(resource.RLIMIT_DATA)
resource.setrlimit(resource.RLIMIT_DATA, (1 << 20, limits[1]))
try:
    lb.functional.linear(x, weight, None, "int8:row", out=out)
except MemoryError:
    resource.setrlimit(resource.RLIMIT_DATA, limits)
    lb.functional.linear(x, weight, None, "int8:row", out=out)
    print("refused, then served")
"""


@pytest.mark.slow
@compiled
@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process as Linux does")
@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_kernel_without_memory_says_so_and_is_not_replaced(threads):
    command = [sys.executable, "-c", _OUT_OF_MEMORY, threads]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "refused, then served", done.stdout + done.stderr


def test_a_forced_backend_is_asked_and_left():
    x = torch.randn(5, 35)
    fast = lb.quantize(x, "mxfp4")
    with lb.use_backend("reference"):
        assert lb.explain("quantize", x, "mxfp4").chosen.backend == "reference"
        assert_same_bits(lb.quantize(x, "mxfp4").codes, fast.codes)
    assert lb.explain("quantize", x, "mxfp4").chosen.backend in ("cpu", "reference")


def test_errors_keep_their_type_and_text():
    x = torch.ones(3, dtype=torch.float64)
    for _ in range(2):
        with pytest.raises(TypeError, match="must be float32, bfloat16 or float16") as raised:
            lb.encode(x, "fp8_e4m3")
        # Of an op that is called by itself the type is torch's choice; the text is ours.
        with pytest.raises((TypeError, ValueError, RuntimeError), match="must be float32, bfloat16 or float16"):
            torch.ops.lowbit.encode(x, "fp8_e4m3")
    assert raised.value.__cause__ is None
    with lb.use_backend("reference"), pytest.raises(ValueError, match="unknown format"):
        lb.encode(torch.ones(3), "fp9")


def test_an_error_of_another_call_is_not_raised_again():
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        torch.ops.lowbit.encode(torch.ones(3, dtype=torch.float64), "fp8_e4m3")
    with pytest.raises(RuntimeError, match="out requires grad"):
        lb.decode(torch.zeros(3, dtype=torch.uint8), "fp8_e4m3", out=torch.ones(3, requires_grad=True))
    assert lb.encode(torch.ones(3), "fp8_e4m3").tolist() == [56, 56, 56]


def test_memory_does_not_grow_with_calls():
    """Strings and optional tensors cross the stable ABI at each call."""
    import resource

    x, q = torch.randn(2, 64), lb.quantize(torch.randn(4, 64), "int4:group32")
    run = lambda: lb.functional.linear(x, q, None, "int8:row")
    for _ in range(2000):
        run()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(60000):
        run()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1024  # KiB; a string leaked a call: 4000


def test_out_raises_the_version_of_what_it_fills():
    x = torch.randn(3, 40, requires_grad=True)
    y = torch.zeros(3, 40)
    z = (x * y).sum()
    lb.decode(lb.encode(x.detach(), "fp8_e4m3"), "fp8_e4m3", out=y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()
