"""What is said where a GPU has no kernel, is too old, or captures a graph; a GPU is pretended."""

from __future__ import annotations

import pytest
import torch

import lowbit as lb
from lowbit.backends import cuda, delegated, dispatch, reference, registry, triton
from lowbit.ops import OPS
from lowbit.testing.matmul import make_call

CALL = make_call(torch.ones(4, 64), torch.ones(16, 64), "int8:row", "int8:row")


def refuses(call):
    return "no kernel here"


@pytest.fixture
def alone(monkeypatch):
    """The reference behind a kernel that serves nothing."""
    last = next(impl for impl in reference.IMPLS if impl.op == "scaled_mm")
    kernel = registry.Impl("scaled_mm", "kernel", ("cuda",), lambda outs, call: None, refuses)
    monkeypatch.setitem(registry._table, ("scaled_mm", "cuda"), [kernel, last])


def test_the_reference_on_a_gpu_is_warned_of(alone, recwarn):
    assert registry.select("scaled_mm", "cuda", CALL, empty=False).name == "reference"
    said = [str(warning.message) for warning in recwarn]
    assert len(said) == 1 and "runs on its reference on cuda" in said[0] and "kernel: no kernel here" in said[0]


def test_strict_mode_raises_instead(alone, monkeypatch):
    monkeypatch.setenv("LOWBIT_STRICT", "1")
    with pytest.raises(lb.BackendError, match="LOWBIT_STRICT=1 forbids that"):
        registry.select("scaled_mm", "cuda", CALL, empty=False)


def test_who_asks_for_the_reference_is_not_warned(alone, recwarn, monkeypatch):
    monkeypatch.setenv("LOWBIT_STRICT", "1")
    with lb.use_backend("reference"):
        registry.select("scaled_mm", "cuda", CALL, empty=False)
    registry.select("scaled_mm", "cuda", CALL, empty=True)
    assert not list(recwarn)


@pytest.mark.parametrize("backend", [triton, delegated])
def test_kernels_refuse_a_device_that_is_too_old(backend, monkeypatch):
    monkeypatch.setattr(triton, "too_old", lambda device: "it is too old")
    asked = [impl for impl in backend.IMPLS if impl.op in ("scaled_mm", "encode")]
    calls = {"scaled_mm": CALL, "encode": OPS["encode"].args(torch.ones(4, 64), "fp8_e4m3")}
    assert asked and {impl.supports(calls[impl.op]) for impl in asked} == {"it is too old"}
    assert cuda.supports_mm(CALL) == "it is too old"


def test_convolutions_read_patches_from_images_before_any_kernel_lays_them_out():
    rows = [impl for impl in (*triton.IMPLS, *delegated.IMPLS) if impl.op == "conv" and "cuda" in impl.devices]
    first, *others = sorted(rows, key=lambda impl: registry.place(impl, "cuda"))
    assert first.name == "triton_implicit" and {impl.name for impl in others} >= {"triton", "delegated_int8"}


def test_how_old_a_device_is(monkeypatch):
    monkeypatch.setattr(triton, "capability", lambda device: (7, 5))
    said = triton.too_old(torch.device("cuda", 0))
    assert said == "its kernels need compute capability 8.0, and this device has 7.5"
    assert triton.too_old(torch.device("cpu")) is None
    monkeypatch.setattr(triton, "capability", lambda device: (8, 0))
    assert triton.too_old(torch.device("cuda", 0)) is None


def test_optimizers_do_not_step_within_a_captured_graph(monkeypatch):
    weight = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = lb.optim.AdamW8bit([weight])
    weight.grad = torch.ones(4, 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="AdamW8bit cannot step while a CUDA graph is captured"):
        optimizer.step()
    assert (weight == 1).all()


def test_what_is_worked_out_for_a_kind_of_call_is_remembered(monkeypatch):
    """On meta tensors, which no kernel serves: what is remembered is put there."""
    x = torch.ones(4, 64, device="meta")
    spec, asked = OPS["encode"], []
    kernel = registry.Impl("encode", "kernel", ("meta",), lambda outs, call: None, lambda call: asked.append(call))
    monkeypatch.setitem(registry._table, ("encode", "meta"), [kernel])
    monkeypatch.setattr(registry, "prepared", {})
    for call in (spec.args(x, "fp8_e4m3"), spec.args(x + 1, "fp8_e4m3")):
        found = dispatch._prepare(spec, call)
        assert (found.impl, found.outs) == (kernel, spec.outputs(call))
    assert len(asked) == 1, "the second call looks like the first"
    others = [spec.args(x.t(), "fp8_e4m3"), spec.args(x.bfloat16(), "fp8_e4m3"), spec.args(x, "fp8_e5m2")]
    others += [spec.args(x[:2], "fp8_e4m3"), spec.args(x, "fp8_e4m3", saturate=False)]
    for count, call in enumerate(others, 2):
        dispatch._prepare(spec, call)
        assert len(asked) == count, call
    with lb.use_backend("triton"), pytest.raises(lb.BackendError):
        dispatch._prepare(spec, others[0])
