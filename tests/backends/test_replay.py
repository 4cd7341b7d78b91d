"""Calls that are replayed give the bits of calls that are worked out, wherever their tensors lie."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
from support.bits import assert_same_bits, describe
from support.interpreter import within_arguments

pytest.importorskip("triton")
import lowbit as lb
from lowbit.backends import delegated, dispatch, registry, replay, triton
from lowbit.ops import OPS
from lowbit.testing import SAMPLES
from lowbit.testing.inputs import random_matrix
from lowbit.testing.matmul import make_call

pytestmark = pytest.mark.skipif(not triton.INTERPRETED, reason="Triton's kernels are not interpreted here")

IMPLS = {impl.op: impl for impl in triton.IMPLS if impl.devices == ("cpu",) and impl.name == "triton"}
REPLAYED = ("encode", "decode", "quantize", "quantize_static", "dequantize", "fake_quantize", "scaled_mm", "linear")


def empty(op, call):
    return tuple(torch.empty(shape, dtype=dtype) for shape, dtype in OPS[op].outputs(call))


def watch(impl, call):
    """The replay of a call whose tables are made."""
    impl.run(empty(impl.op, call), call)
    outs = empty(impl.op, call)
    with replay.watched(outs, call) as found:
        impl.run(outs, call)
    return found[0] if found else None


def another(call):
    """A call of the same kind: its rows in another order, elsewhere in memory."""

    def turned(x):
        moved = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
        return moved.copy_(x.flip(0) if x.dim() and x.dtype != torch.int64 else x)

    return call._make(turned(x) if isinstance(x, torch.Tensor) else x for x in call)


@pytest.mark.thinned(8)
@pytest.mark.parametrize("op", REPLAYED)
def test_a_replay_is_the_call(op):
    impl, replayed, calls = IMPLS[op], 0, list(SAMPLES[op]("cpu"))
    for call in calls[:: max(1, len(calls) // 12)]:
        if impl.supports(call) is not None or call[0].numel() == 0:
            continue
        made = watch(impl, call)
        for other in (another(call), call):
            wanted, got = empty(op, call), empty(op, call)
            impl.run(wanted, other)
            if made is not None:
                with within_arguments():
                    made(got, other)
                replayed += 1
                for a, b in zip(got, wanted, strict=True):
                    assert_same_bits(a, b, describe(other))
    assert replayed > 4


@pytest.mark.parametrize("recipe", "fp8 fp8-tensor fp8-pow2 int8 nvfp4 nf4 int4-weight-only w4a8".split())
def test_a_layer_of_every_kind_is_replayed(recipe):
    found = lb.recipe(recipe)
    weight = lb.quantize(random_matrix(48, 128, "cpu"), found.weight)
    call = OPS["linear"].args(
        random_matrix(3, 128, "cpu", seed=1).bfloat16(), weight.codes, found.weight.name, weight.scale,
        weight.zero_point, weight.global_scale, input_scheme=None if found.input is None else found.input.name,
    )  # fmt: skip
    made = watch(IMPLS["linear"], call)
    assert made is not None
    got, wanted, other = empty("linear", call), empty("linear", call), another(call)
    made(got, other)
    IMPLS["linear"].run(wanted, other)
    assert_same_bits(got[0], wanted[0], recipe)


def test_what_torch_computes_is_not_replayed(monkeypatch):
    monkeypatch.setattr(triton, "capability", lambda device: (9, 0))
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: (a.double() @ b.double()).to(torch.int32))
    impl = next(impl for impl in delegated.IMPLS if impl.name == "delegated_int8" and impl.op == "scaled_mm")
    assert watch(impl, make_call(torch.ones(24, 64), torch.ones(16, 64), "int8:row", "int8:row")) is None


def test_tensors_that_share_memory_are_not_replayed():
    call = make_call(torch.ones(4, 64), torch.ones(4, 64), "int8:row", "int8:row")
    assert watch(IMPLS["scaled_mm"], call) is not None
    assert watch(IMPLS["scaled_mm"], call._replace(b=call.a, b_scale=call.a_scale)) is None


def test_the_third_call_of_a_kind_is_the_first_that_is_replayed(monkeypatch):
    x, started = torch.ones(4, 64), []
    spec, impl = OPS["encode"], IMPLS["encode"]
    noted = registry.Impl("encode", "triton", ("cpu",), lambda *a: started.append(impl.run(*a)))
    monkeypatch.setitem(registry._table, ("encode", "cpu"), [noted])
    monkeypatch.setattr(registry, "call_key", registry.call_signature)
    monkeypatch.setattr(registry, "prepared", {})
    kernel = dispatch._new_kernel(spec)
    for count, at_most in ((1, 1), (2, 2), (3, 2), (4, 2)):
        y = x * count
        assert torch.equal(kernel(y, "fp8_e4m3"), lb.encode(y, "fp8_e4m3")) and len(started) == at_most
    odd = torch.ones(4 * 64 + 1)[1:].view(4, 64)
    assert odd.data_ptr() % 16 and torch.equal(kernel(odd, "fp8_e4m3"), lb.encode(odd, "fp8_e4m3"))
    assert len(started) == 3, "another alignment is another kind"


@pytest.mark.slow
def test_host_times_are_measured_without_a_gpu(tmp_path):
    """In a process of its own, because interpreted kernels are not compiled."""
    script = f"""
from pathlib import Path
from lowbit.bench import gpu_host
gpu_host.ROUNDS, gpu_host.CALLS = 1, 3
gpu_host.RECIPES = {{name: gpu_host.RECIPES[name] for name in ("fp8", "nvfp4")}}
print(gpu_host.run(Path({str(tmp_path)!r})).read_text())
"""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^\| `(\w+)` \| *[\d.]+ \| *[\d.]+ \|$", done.stdout, re.M) == ["fp8", "nvfp4"]
