"""What kernels are said to allocate on GPUs, beside what the allocator sees of them in Triton's interpreter."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from support.bits import describe
from support.samples import samples
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")
import lowbit as lb
from lowbit.backends import delegated, registry, scratch, triton
from lowbit.memory.scratch import SCRATCH, scratch_bytes
from lowbit.ops import OPS
from lowbit.testing.matmul import make_call

pytestmark = pytest.mark.skipif(not triton.INTERPRETED, reason="Triton's kernels are not interpreted here")

HOLDING = (
    "scaled_mm", "linear", "scaled_grouped_mm", "conv", "quantize_global", "quantize_both", "hadamard",
    "rms_norm_backward",
)  # fmt: skip
#: Of which samples are many and slow to interpret.
EVERY = {"scaled_mm": 401, "linear": 401, "scaled_grouped_mm": 97, "conv": 149, "rms_norm_backward": 3}


@pytest.fixture(scope="module")
def frozen():
    """What is there by now is not looked through again, in other tests either."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def collected(frozen, monkeypatch):
    """The interpreter keeps what a kernel was started with in cycles of references, until they are collected."""
    start = triton.start
    monkeypatch.setattr(triton, "start", lambda launches, device: (start(launches, device), gc.collect()))
    gc.collect()


def events(nodes: Any) -> Iterator[tuple[int, int]]:
    """When torch's allocator gave and took memory, and how much."""
    for node in nodes:
        if node.tag == torch._C._profiler._EventType.Allocation:
            yield node.start_time_ns, node.extra_fields.alloc_size
        yield from events(node.children)


def held(impl: registry.Impl, call: Any, outs: tuple[Tensor, ...]) -> int:
    """Bytes that the allocator has given at the most while a kernel runs."""
    impl.run(outs, call)  # tables that are made once
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        impl.run(outs, call)
    tree = profiler.profiler.kineto_results.experimental_event_tree()
    return max(accumulate((size for _, size in sorted(events(tree))), initial=0))


def outputs(op: str, call: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty(shape, dtype=dtype) for shape, dtype in OPS[op].outputs(call))


def said(impl: registry.Impl, call: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(scratch, "select", lambda *args, **kwargs: impl)
    return scratch.allocated(impl.op, call, call[0].device)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("op", HOLDING)
def test_samples_hold_what_is_said(op, monkeypatch):
    """A call that is replayed holds all that it ever allocates. Where patches are laid out, ops of torch on tensors
    without data hold somewhat less than those that compute.
    """
    held_any = 0
    impls = [impl for impl in lb.impls(op, "cpu") if impl.backend == "triton"]
    for call in samples(op)[5 :: EVERY.get(op, 37)]:
        impl = next((impl for impl in impls if impl.supports(call) is None), None)
        if impl is not None:
            measured, found = held(impl, call, outputs(op, call)), said(impl, call, monkeypatch)
            least = 0.8 * measured if impl.name == "triton" and op == "conv" else measured
            assert least <= found <= 2 * measured + 512, (describe(call), measured, found)
            held_any += measured > 0
    assert held_any or op == "hadamard"


def test_decoded_operands_and_sums_are_counted(monkeypatch):
    """Of calls whose shapes say what is held."""
    mm = {impl.name: impl for impl in delegated.IMPLS if impl.op == "scaled_mm"}
    call = make_call(torch.ones(64, 64), torch.ones(32, 64), "nvfp4", "nvfp4")
    sums, decoded = 4 * 64 * 32, 2 * (64 + 32) * 64
    assert sums + decoded <= said(mm["delegated_bf16"], call, monkeypatch) <= sums + decoded + 4096
    few = make_call(torch.ones(1, 4096), torch.ones(64, 4096), None, "int4:group128")
    own = next(impl for impl in lb.impls("scaled_mm", "cpu") if impl.name == "triton")
    (made, *_), out = triton.products().scaled_mm(few, torch.empty(1, 64)), torch.empty(1, 64)
    assert said(own, few, monkeypatch) == made.arguments["sums_ptr"].nbytes > 4 * out.nbytes


@pytest.mark.parametrize(("name", "a", "b"), [
    ("delegated_bf16", "mxfp8", "mxfp8"), ("delegated_rounded", "nf4:row", "nf4"),
    ("delegated_int8", "int8:row", "int8:row"), ("delegated_fp8", "fp8_e4m3:row", "fp8_e4m3:row"),
    ("delegated_fp8_blocks", "fp8_e4m3:group128", "fp8_e4m3:block128x128"),
])  # fmt: skip
def test_products_of_torch_hold_their_sums_and_the_same_at_each_asking(monkeypatch, name, a, b):
    found = next(impl for impl in delegated.IMPLS if (impl.op, impl.name) == ("scaled_mm", name))
    call = make_call(torch.ones(64, 256), torch.ones(128, 256), a, b)
    asked = [said(found, call, monkeypatch)]
    scratch._allocated.cache_clear()
    asked.append(said(found, call, monkeypatch))
    assert asked[0] == asked[1] >= 4 * 64 * 128


def test_estimates_ask_of_fake_tensors(monkeypatch):
    """Where torch has no CUDA, of Triton's kernels, which decode the left operand alone."""
    call = make_call(torch.ones(64, 64), torch.ones(32, 64), "nvfp4", "nvfp4")
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = [torch.empty_like(v, device="cuda") if isinstance(v, Tensor) else v for v in call]
        assert "lowbit.scaled_mm.default" in SCRATCH["cuda"]
        assert scratch_bytes("lowbit.scaled_mm.default", tuple(given), None) == 2 * 64 * 64
        found = next(impl for impl in delegated.IMPLS if (impl.op, impl.name) == ("scaled_mm", "delegated_bf16"))
        monkeypatch.setattr(scratch, "select", lambda *args, **kwargs: found)
        assert scratch_bytes("lowbit.scaled_mm.default", tuple(given), None) > 2 * (64 + 32) * 64
