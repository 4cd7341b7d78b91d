"""The ops as torch ops: opcheck, torch.compile, fakes, schemas; and selection: explain, impls, use_backend."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from support.bits import assert_same_bits
from support.samples import checked_samples
from support.variants import ALL, Variant, not_2_10
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import lowbit as lb
from lowbit import backends
from lowbit.backends import registry
from lowbit.op_calls import OVERLOADS
from lowbit.ops import OPS
from lowbit.testing.inputs import random_matrix

everywhere = pytest.mark.parametrize("variant", ALL)
PRODUCTS = ("scaled_mm", "scaled_grouped_mm", "linear", "linear_packed", "conv")


# -- opcheck -----------------------------------------------------------------------------------------------------------
def differentiable(op: str, call: Any) -> Any:
    """Float inputs that have a gradient ask for it, so that opcheck sees the backward too."""
    fields = {"fake_quantize": ("x",), "scaled_mm": ("a", "bias"), "linear": ("x", "bias")}.get(op, ())
    changed = {
        name: value.detach().clone().requires_grad_()
        for name in fields
        if isinstance(value := getattr(call, name), Tensor) and value.is_floating_point()
    }
    return call._replace(**changed)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("op", OPS)
def test_opcheck(op):
    for call in checked_samples(op, 4):
        torch.library.opcheck(getattr(torch.ops.lowbit, op).default, tuple(differentiable(op, call)))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("op", OPS)
def test_opcheck_of_the_out_form(op):
    spec = OPS[op]
    for call in checked_samples(op, 2):
        outs = [torch.zeros(shape, dtype=dtype) for shape, dtype in spec.outputs(call)]
        kwargs = dict(zip(spec.returns, outs, strict=True))
        torch.library.opcheck(getattr(torch.ops.lowbit, f"{op}_out").default, tuple(call), kwargs)


@pytest.mark.parametrize("op", OPS)
def test_fakes_agree_with_what_runs(op):
    """Shape, dtype, strides and device on meta-like fakes equal the real results, for every sample of a small walk."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    for call in checked_samples(op, 25):
        real = getattr(torch.ops.lowbit, op)(*call)
        mode = FakeTensorMode()
        fake_call = [mode.from_tensor(v) if isinstance(v, Tensor) else v for v in call]
        with mode:
            fake = getattr(torch.ops.lowbit, op)(*fake_call)
        pairs = zip([real], [fake], strict=True) if isinstance(real, Tensor) else zip(real, fake, strict=True)
        for r, f in pairs:
            assert (r.shape, r.dtype, r.stride(), r.device) == (f.shape, f.dtype, f.stride(), f.device)


@pytest.mark.parametrize("op", OPS)
def test_an_op_never_returns_its_input(op):
    for call in checked_samples(op, 6):
        results = getattr(torch.ops.lowbit, op)(*call)
        inputs = {v.untyped_storage().data_ptr() for v in call if isinstance(v, Tensor) and v.numel()}
        for result in [results] if isinstance(results, Tensor) else results:
            assert not result.numel() or result.untyped_storage().data_ptr() not in inputs


def test_the_table_and_torch_agree_on_schemas():
    for op, spec in OPS.items():
        packet = getattr(torch.ops.lowbit, op)
        names = [a.name for a in packet.default._schema.arguments]
        assert names == list(spec.args._fields)
        out = getattr(torch.ops.lowbit, f"{op}_out").default._schema
        assert not out.returns and [a.name for a in out.arguments if a.alias_info] == list(spec.returns)


def test_costs_are_positive():
    for op, spec in OPS.items():
        for call in checked_samples(op, 5):
            cost = spec.cost(call)
            assert cost.bytes > 0 and (cost.flops > 0) == (op in PRODUCTS)


# -- torch.compile -----------------------------------------------------------------------------------------------------
W = torch.Generator().manual_seed(5)
FUNCTIONS = {
    "encode": lambda x: lb.encode(x, "fp8_e4m3"),
    "encode_stochastic": lambda x: lb.encode(x, "fp8_e5m2", rounding=lb.Rounding(seed=3, step=1)),
    "decode": lambda x: lb.decode(lb.encode(x, "fp6_e2m3"), "fp6_e2m3", torch.bfloat16),
    "pack": lambda x: lb.unpack(lb.pack(lb.encode(x, "fp4_e2m1"), 4), 4, x.shape),
    "quantize": lambda x: lb.quantize(x, "mxfp4:ceil").codes,
    "quantize_two_level": lambda x: lb.quantize(x, "nvfp4").dequantize(),
    "quantize_affine": lambda x: lb.quantize(x, "uint4:group32:affine").dequantize(),
    "quantize_static": lambda x: lb.quantize(x, "int8:row", scale=torch.full((x.shape[0], 1), 0.05)).codes,
    "fake_quantize": lambda x: lb.fake_quantize(x, "int8:row"),
    "transpose": lambda x: lb.quantize(x, "int4:group8").t().dequantize(),
    "scaled_mm": lambda x: lb.scaled_mm(
        lb.quantize(x, "int8:row"), lb.quantize(x, "int8:row"), out_dtype=torch.float32
    ),
    "scaled_mm_out_scheme": lambda x: lb.scaled_mm(x, lb.quantize(x, "nf4"), out_scheme="fp8_e4m3:row").dequantize(),
}


@pytest.mark.thinned(5)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_functions_give_the_same_bits(name, backend):
    x = random_matrix(16, 96, seed=1)
    compiled = torch.compile(FUNCTIONS[name], backend=backend, fullgraph=True)
    assert_same_bits(compiled(x), FUNCTIONS[name](x), f"{name} with {backend}")


@not_2_10("dynamo fails on its own guard for a key that the compiled function adds to a dict")
def test_names_first_met_while_compiling():
    """Caches of names must not change under the compiler's guards."""
    x = random_matrix(8, 44, seed=1)
    function = lambda x: (
        lb.quantize(x, "e3m1b2:group11:bf16").t().dequantize() + lb.decode(lb.encode(x, "e2m3b2"), "e2m3b2").t()
    )
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    first = compiled(x)
    assert_same_bits(first, function(x))
    assert_same_bits(compiled(x), first)


def test_compiled_gradients():

    def loss(x: Tensor, q: lb.Quantized) -> Tensor:
        return lb.scaled_mm(lb.fake_quantize(x, "fp8_e4m3:row"), q, out_dtype=torch.float32)

    q = lb.quantize(torch.randn(5, 32), "int8:row")
    grads = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        x = random_matrix(4, 32, seed=3).requires_grad_()
        function(x, q).backward(torch.ones(4, 5))
        grads.append(x.grad)
    assert_same_bits(grads[1], grads[0])


def test_dynamic_shapes_compile_once():
    counter = CompileCounter()
    f = torch.compile(lambda x: lb.fake_quantize(x, "mxfp8"), backend=counter, fullgraph=True, dynamic=True)
    for rows, cols in ((4, 64), (8, 96), (16, 33)):
        x = torch.randn(rows, cols)
        assert_same_bits(f(x), lb.fake_quantize(x, "mxfp8"))
    assert counter.frame_count == 1


def test_export():
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return lb.scaled_mm(lb.quantize(x, "int8:row"), lb.quantize(x, "int4:group8"), out_dtype=torch.float32)

    x = random_matrix(6, 40, seed=2)
    program = torch.export.export(Model(), (x,))
    assert_same_bits(program.module()(x), Model()(x))


def lowbit_models() -> dict[str, torch.nn.Module]:
    models = {name: torch.nn.Sequential(torch.nn.Linear(32, 8)).eval() for name in ("int8", "nvfp4", "qat", "train")}
    for recipe in ("int8", "nvfp4"):
        lb.quantize_(models[recipe], recipe, skip=())
    lb.qat.prepare_(models["qat"], "int8", skip=())
    lb.train.prepare_(models["train"], "fp8", skip=())
    return models


@pytest.mark.parametrize("name", ["int8", "nvfp4", "qat", "train"])
def test_traces_for_onnx_are_refused_with_what_to_do(monkeypatch, name):
    model, x = lowbit_models()[name], torch.randn(4, 32)
    with monkeypatch.context() as patch:
        patch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
        with pytest.raises(
            RuntimeError, match=r"lowbit\.\w+: expected a model of torch's own ops.*lowbit\.dequantize_"
        ):
            torch.export.export(model, (x,))
    torch.export.export(model, (x,))


def test_onnx_export_names_the_remedy_and_the_remedy_works(tmp_path):
    pytest.importorskip("onnxscript")
    model, x = lowbit_models()["int8"], torch.randn(4, 32)
    with pytest.raises(Exception, match=r"lowbit\.linear: expected a model of torch's own ops.*lowbit\.dequantize_"):
        torch.onnx.export(model, (x,), tmp_path / "model.onnx", dynamo=True)
    lb.dequantize_(model)
    torch.onnx.export(model, (x,), tmp_path / "model.onnx", dynamo=True)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), model(x).detach())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", ["int8", "nvfp4"])
def test_traced_export_to_onnx_names_the_remedy_and_the_remedy_works(tmp_path, name):
    model, x = lowbit_models()[name], torch.randn(4, 32)
    with pytest.raises(RuntimeError, match=r"^lowbit\.\w+: expected a model of torch's own ops.*lowbit\.dequantize_"):
        torch.onnx.export(model, (x,), tmp_path / "model.onnx", dynamo=False)
    lb.dequantize_(model)
    torch.onnx.export(model, (x,), tmp_path / "model.onnx", dynamo=False)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), model(x).detach())


def test_every_op_is_refused_by_the_traced_export():
    names = torch.onnx._internal.torchscript_exporter.registration.registry._registry
    assert {f"lowbit::{name}" for name in OVERLOADS} <= set(names)


# -- gradients of fake_quantize ----------------------------------------------------------------------------------------
def test_straight_through_masks():
    x = torch.tensor([[-1e4, -448.1, -448.0, -3.0, 0.0, 447.0, 449.0, 460.0]], requires_grad=True)
    lb.fake_quantize(x, "fp8_e4m3:tensor", scale=1.0).sum().backward()
    assert x.grad.tolist() == [[0, 0, 1, 1, 1, 1, 0, 0]]
    y = torch.tensor([[-128.6, -128.5, -128.0, 127.4, 127.5, 128.0]], requires_grad=True)
    lb.fake_quantize(y, "int8:tensor", scale=1.0).sum().backward()
    assert y.grad.tolist() == [[0, 1, 1, 1, 0, 0]]
    z = torch.tensor([[-3.6, -3.4, 0.0, 12.4, 12.6]], requires_grad=True)
    lb.fake_quantize(z, "uint4:tensor:affine", scale=1.0, zero_point=3).sum().backward()
    assert z.grad.tolist() == [[0, 1, 1, 1, 0]]


def test_the_gradient_out_of_range_is_zero_whatever_came():
    x = torch.tensor([[1.0, 200.0, -200.0, 300.0, torch.nan, 2.0]], requires_grad=True)
    grad = torch.tensor([[torch.inf, torch.inf, -1.0, torch.nan, 1.0, -0.0]])
    lb.fake_quantize(x, "int8:row", scale=1.0).backward(grad)
    assert_same_bits(x.grad, torch.tensor([[torch.inf, 0.0, 0.0, 0.0, 0.0, -0.0]]))


def test_the_gradient_of_a_given_scale_is_that_of_lsq():
    x = torch.tensor([[0.3, -2.7, 5.0, -9.0]])
    scale = torch.tensor([[1.0]], requires_grad=True)
    lb.fake_quantize(x, "int4:tensor", scale=scale).sum().backward()
    expected = (0 - 0.3) + (-3 + 2.7) + (5 - 5) + -8  # round(v) - v inside, the bound outside
    assert torch.allclose(scale.grad, torch.tensor([[expected]]))


@everywhere
def test_dynamic_scales_are_constants_in_backward(variant: Variant):
    x = random_matrix(4, 40, seed=3).to(variant.device).requires_grad_()
    if variant.refuses("fake_quantize", x, "int8:row"):
        pytest.skip("not served")
    y = lb.fake_quantize(x, "int8:row")
    y.backward(torch.full_like(y, 2.0))
    assert set(x.grad.unique().tolist()) == {2.0}


# -- selection ---------------------------------------------------------------------------------------------------------
def test_explain_says_what_would_run_and_computes_nothing():
    x = torch.randn(4, 64)
    answer = lb.explain("quantize", x, "int8:row")
    assert answer.chosen is lb.impls("quantize", "cpu")[len(answer.refused)]
    assert (answer.op, answer.device) == ("quantize", "cpu")
    text = str(answer)
    assert text.startswith(f"quantize on cpu: {answer.chosen.name} would run")
    for name in registry.absent():
        assert f"absent: {name}" in text
    for op, arguments in {
        "encode": (x, "fp8_e4m3"),
        "decode": (torch.zeros(3, dtype=torch.uint8), "fp8_e4m3"),
        "dequantize": (lb.quantize(x, "nvfp4"),),
        "fake_quantize": (x, "nvfp4"),
        "scaled_mm": (x, lb.quantize(x, "int4:group32")),
        "pack": (torch.zeros(3, 4, dtype=torch.uint8), 4),
        "unpack": (torch.zeros(3, 2, dtype=torch.uint8), 4, (3, 4)),
    }.items():
        assert lb.explain(op, *arguments).chosen is not None
    with pytest.raises(ValueError, match="explain: unknown op 'matmul'; expected one of encode"):
        lb.explain("matmul", x, x)
    with pytest.raises(ValueError, match="unknown format"):
        lb.explain("encode", x, "fp9")


def test_impls_are_listed_best_first():
    with pytest.raises(ValueError, match="unknown op 'matmul'; expected one of encode"):
        lb.impls("matmul")
    for op in OPS:
        rows = lb.impls(op, "cpu")
        assert list(rows) == sorted(rows, key=lambda row: registry.place(row, "cpu"))
        assert "reference" in [r.name for r in rows]
    assert lb.impls("encode", device="tpu") == ()


@everywhere
def test_use_backend_runs_that_backend_and_no_other(variant: Variant):
    x = torch.randn(4, 64, device=variant.device)
    with variant.use():
        answer = lb.explain("quantize", x, "int8:row")
    assert answer.chosen.backend == variant.backend
    assert all(impl.backend == variant.backend for impl in answer.behind)


def test_use_backend_never_falls_back(monkeypatch):
    monkeypatch.setattr(registry, "ORDER", (*registry.ORDER, "stubborn"))
    with (
        pytest.raises(lb.BackendError, match=r"backend 'gpu' is not available: known backends: .*reference"),
        lb.use_backend("gpu"),
    ):
        pass
    refusing = registry.Impl("encode", "stubborn", ("cpu",), lambda outs, call: None, lambda call: "it never wants to")
    before = list(registry._table["encode", "cpu"])
    registry.add((refusing,))
    try:
        with lb.use_backend("stubborn"), pytest.raises(lb.BackendError) as caught:
            lb.encode(torch.ones(3), "fp8_e4m3")
        assert "backend 'stubborn' cannot run lowbit.encode on cpu" in str(caught.value)
        assert "stubborn: it never wants to" in str(caught.value)
        with (
            lb.use_backend("stubborn"),
            pytest.raises(lb.BackendError, match="it has no kernel for this op on this device"),
        ):
            lb.quantize(torch.ones(3), "int8:row")
        with lb.use_backend("stubborn"):
            assert lb.explain("encode", torch.ones(3), "fp8_e4m3").chosen is None
    finally:
        registry._table["encode", "cpu"][:] = before


def test_use_backend_nests_and_is_given_back():
    with lb.use_backend("reference"):
        assert registry.forced() == "reference"
        with lb.use_backend(None):
            assert registry.forced() is None
        assert registry.forced() == "reference"
    assert registry.forced() is None
    with pytest.raises(ZeroDivisionError), lb.use_backend("reference"):
        raise ZeroDivisionError
    assert registry.forced() is None


def test_an_implementation_of_an_unknown_op_or_without_a_place_is_refused():
    with pytest.raises(ValueError, match="is for unknown op 'matmul'"):
        registry.add((registry.Impl("matmul", "x", ("cpu",), lambda outs, call: None),))
    with pytest.raises(ValueError, match="'x' of 'encode' is not in ORDER"):
        registry.add((registry.Impl("encode", "x", ("cpu",), lambda outs, call: None),))


def test_meta_tensors_give_shapes():
    x = torch.empty(6, 70, device="meta")
    q = lb.quantize(x, "uint4:group32:affine")
    assert (tuple(q.codes.shape), tuple(q.scale.shape), q.zero_point.dtype) == ((6, 35), (6, 3), torch.uint8)
    assert q.dequantize().shape == x.shape and q.device.type == "meta"
    y = lb.scaled_mm(lb.quantize(x, "mxfp8"), lb.quantize(x, "nf4"))
    assert tuple(y.shape) == (6, 6) and y.device.type == "meta"


def test_mixed_devices_are_refused():
    x = torch.randn(4, 8)
    scale = torch.ones(4, 1, device="meta")
    with pytest.raises(ValueError, match="all tensors must be on one device, got x on cpu, scale on meta"):
        torch.ops.lowbit.quantize_static(x, "int8:row", scale)


def test_every_backend_module_is_listed():
    """A module with kernels that the package does not load would be dead, and nothing would say so."""
    folder = Path(lb.__file__).parent / "backends"
    with_kernels = {f.stem for f in folder.glob("*.py") if re.search(r"^def unavailable", f.read_text(), re.MULTILINE)}
    assert with_kernels == set(backends.BACKENDS)


@pytest.mark.parametrize("scheme", ["int8:row", "fp8_e4m3:tensor"])
def test_explain_of_given_scales(scheme):
    x = torch.randn(4, 32)
    scale = lb.quantize(x, scheme).scale
    assert lb.explain("quantize", x, scheme, scale=scale).op == "quantize_static"
    assert lb.explain("quantize", x, scheme, scale).op == "quantize_static"
    assert lb.explain("quantize", x, scheme, None).op == "quantize"


def test_explain_of_scales_below_a_global_one_as_on_a_gpu(monkeypatch):
    import_module("lowbit.functional.quantizers")
    monkeypatch.setattr(sys.modules["lowbit.functional.quantizers"], "by_kernel", lambda x: True)
    x = torch.randn(4, 32)
    assert lb.explain("quantize", x, "nvfp4:global_row").op == "quantize_global"
    q, scheme = lb.quantize(x, "nvfp4:global_row"), lb.scheme("nvfp4:global_row")
    monkeypatch.undo()
    expected = lb.quantize(x, scheme)
    assert all(torch.equal(q.parts[name], part) for name, part in expected.parts.items())


def test_explain_knows_every_op_that_has_a_public_function():
    inner = {
        "global_scale", "block_range", "quantize_static", "fake_quantize_backward", "linear_packed", "conv",
        "square_sums", "scaled_grouped_mm", "hadamard", "transpose", "quantize_both",
        "quantize_global", "rms_norm_backward", "swiglu_backward",
    }  # fmt: skip
    with pytest.raises(ValueError, match="unknown op 'global_scale'; expected one of") as caught:
        lb.explain("global_scale")
    assert set(str(caught.value).split("one of ")[1].split(", ")) == set(OPS) - inner


def test_compiled_stochastic_rounding_draws_a_seed_a_call_and_follows_a_tensor_of_steps():
    x, counter = torch.rand(64), CompileCounter()
    drawn = torch.compile(lambda x: lb.encode(x, "fp4_e2m1", "stochastic"), backend=counter, fullgraph=True)
    assert not torch.equal(drawn(x), drawn(x))
    stepped = torch.compile(lambda x, rng: lb.encode(x, "fp4_e2m1", lb.Rounding(rng)), backend=counter, fullgraph=True)
    for step in range(4):
        assert torch.equal(stepped(x, torch.tensor([9, step])), lb.encode(x, "fp4_e2m1", lb.Rounding(9, step)))
    assert counter.frame_count == 2


def test_empty_calls_are_served_whatever_backend_is_asked_for():
    for backend in (None, *{i.backend for i in lb.impls("quantize")}):
        with lb.use_backend(backend):
            assert lb.quantize(torch.randn(0, 32), "int8:row").dequantize().shape == (0, 32)
            assert lb.explain("quantize", torch.randn(0, 32), "int8:row").chosen.name == "reference"
