"""Native calls by pointers alone, and layers whose kernel keeps the weight: what they see change, and who sees them."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial

import pytest
import torch
from bits import assert_same_bits, same_bits
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from variants import serving
from watching import WatchDispatch, WatchFunctions

import lowbit as lb
from lowbit.backends import native, native_ops
from lowbit.nn import QuantLinear
from lowbit.ops import OPS

pytestmark = pytest.mark.skipif(native.loading_error() is not None, reason="the compiled extension is not built")


def layer(recipe: str | lb.Recipe, inputs: int, outputs: int, bias: bool = True) -> QuantLinear:
    model = nn.Sequential(nn.Linear(inputs, outputs, bias))
    lb.quantize_(model, recipe)
    return model[0]


def warm(recipe: str | lb.Recipe, x: Tensor, outputs: int = 6, bias: bool = True) -> QuantLinear:
    """A layer whose next call on the like of ``x`` goes to a kernel that keeps its weight."""
    made = layer(recipe, x.shape[-1], outputs, bias)
    with torch.no_grad():
        made(x)
        assert straight(made, x) is not None
    return made


def straight(made: QuantLinear, x: Tensor) -> Tensor | None:
    """What that kernel answers; None where it leaves the call to others."""
    return made._bound[0].again(x)


def fresh(made: QuantLinear, x: Tensor) -> Tensor:
    """What a layer answers that keeps nothing yet."""
    return lb.functional.linear(x, made.weight, made.bias, made.recipe.input)


# -- pointers ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", sorted(native_ops.PREPARE))
def test_pointers_and_tensors_give_the_same_bits(op):
    spec = OPS[op]
    (impl,) = (row for row in lb.impls(op, "cpu") if row.name == "cpu")
    for call in list(spec.samples("cpu"))[::3]:
        if impl.supports(call) is not None or call[0].numel() == 0:
            continue
        runs = []
        for run in (impl.run, impl.bind(call)):
            outs = tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in spec.outputs(call))
            if any(out.numel() for out in outs):
                run(outs, call)
            runs.append(outs)
        for name, one, other in zip(spec.returns, *runs, strict=True):
            assert_same_bits(other, one, f"{op} {name} {call[1:]}")


def test_a_plan_serves_every_call_with_its_metadata():
    first, second = torch.randn(5, 40), torch.randn(5, 40)
    call = OPS["encode"].args(first, "fp8_e4m3")
    run = native_ops.PREPARE["encode"](call)
    for x in (first, second):
        out = torch.empty(5, 40, dtype=torch.uint8)
        run((out,), call._replace(x=x))
        assert_same_bits(out, lb.encode(x, "fp8_e4m3"))


def test_what_fails_in_native_code_raises():
    call = OPS["encode"].args(torch.randn(5, 40), "fp8_e4m3")
    run = native_ops.PREPARE["encode"](call)
    nowhere = torch.empty(0)
    assert nowhere.data_ptr() == 0
    with pytest.raises(RuntimeError, match="no memory of its own"):
        run((torch.empty(5, 40, dtype=torch.uint8),), call._replace(x=nowhere))


def test_an_output_that_backward_needs_cannot_be_overwritten_unseen():
    x = torch.randn(4, 8, requires_grad=True)
    values = torch.randn(4, 8)
    y = (x * values).sum()
    lb.decode(lb.encode(values, "fp8_e4m3"), "fp8_e4m3", out=values)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


# -- a kernel that keeps the weight ------------------------------------------------------------------------------------
@pytest.mark.parametrize("recipe", ["int8", "int8-weight-only", "int4-weight-only:group32", "nf4", "nvfp4", "w4a8"])
@pytest.mark.parametrize("shape", [(40,), (3, 40), (2, 1, 40), (1, 3, 0, 40)], ids=str)
def test_it_answers_what_the_op_does(recipe, shape):
    made = layer(recipe, 40, 6)
    with torch.no_grad():
        for x in (torch.randn(shape), torch.randn(shape), torch.randn(shape).bfloat16()):
            assert same_bits(made(x), fresh(made, x))
            again = straight(made, x)
            assert (again is None) == (x.numel() == 0)
            assert again is None or same_bits(again, fresh(made, x))


def test_it_leaves_inputs_of_another_kind_to_others():
    x = torch.randn(4, 40)
    made = warm("int8", x)
    others = [x[:2], x.bfloat16(), x[None], torch.randn(4, 80)[:, ::2], torch.randn(40, 4).t(), x[:0]]
    with torch.no_grad():
        for other in others:
            assert straight(made, other) is None
            assert same_bits(made(other), fresh(made, other))
            made(x)
        assert straight(made, x.to("meta")) is None
        with pytest.raises(ValueError, match="must end in the same K"):
            made(torch.randn(4, 39))
        with pytest.raises(TypeError, match="must be float32, bfloat16 or float16"):
            made(x.double())
        lazy = torch.imag(torch.randn(4, 40, dtype=torch.complex64).conj())
        made(lazy)
        assert lazy.is_neg() and same_bits(made(lazy), fresh(made, lazy.clone()))


def swapped(made: QuantLinear, name: str, value: Tensor) -> None:
    getattr(made, name).data = value


def replaced(name: str, made: QuantLinear) -> None:
    other = layer(made.recipe, 40, 6)
    setattr(made, name, getattr(other, name))


CHANGES = {
    "bias of another dtype": lambda m: swapped(m, "bias", torch.randn(6).bfloat16()),
    "bias of other strides": lambda m: swapped(m, "bias", torch.randn(12)[::2]),
    "bias in other memory": lambda m: swapped(m, "bias", torch.randn(6)),
    "another bias": lambda m: setattr(m, "bias", nn.Parameter(torch.randn(6))),
    "no bias": lambda m: setattr(m, "bias", None),
    "scale in other memory": lambda m: swapped(m, "scale", m.scale.data.clone().sub_(1 << 23)),
    "codes in other memory": lambda m: swapped(m, "codes", m.codes.data.flip(0).contiguous()),
    "codes written": lambda m: m.codes.data.zero_(),
    "zero points in other memory": lambda m: swapped(m, "zero_point", m.zero_point.data + 1),
    "codes shown": lambda m: m.state_dict(),
    **{f"another {name}": partial(replaced, name) for name in ("codes", "scale", "zero_point")},
    "another layer's weight": lambda m: m.share_weight(layer(m.recipe, 40, 6)),
    "cast": lambda m: m.bfloat16(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("input", [None, "int8:row"])
def test_it_sees_the_parameters_change(change, input):
    x = torch.randn(2, 40)
    made = warm(lb.Recipe("mine", "uint4:group8:affine", input), x)
    with torch.no_grad():
        CHANGES[change](made)
        assert same_bits(made(x), fresh(made, x))
        assert same_bits(made(x), fresh(made, x))


def test_it_sees_the_outer_scale_change():
    x = torch.randn(2, 40)
    made = warm("nvfp4", x)
    with torch.no_grad():
        swapped(made, "outer_scale", made.outer_scale.data.clone().add_(1 << 23))
        assert same_bits(made(x), fresh(made, x))
        made.outer_scale = nn.Parameter(made.outer_scale + (1 << 23), requires_grad=False)
        assert same_bits(made(x), fresh(made, x))


@pytest.mark.parametrize(
    "other", [torch.randn(6).bfloat16(), torch.randn(12)[::2], -torch.randn(6)], ids=["dtype", "strides", "memory"]
)
def test_it_sees_a_bias_change_that_is_no_parameter(other):
    made, x, bias = layer("int8-weight-only", 40, 6), torch.randn(3, 40), torch.randn(6)
    with torch.no_grad():
        for _ in range(3):
            torch.func.functional_call(made, {"bias": bias}, (x,))
        bias.data = other
        y = torch.func.functional_call(made, {"bias": bias}, (x,))
        assert same_bits(y, lb.functional.linear(x, made.weight, other))
        bias.data = torch.randn(3)
        with pytest.raises(ValueError, match=r"bias must be \[6\], got \[3\]"):
            torch.func.functional_call(made, {"bias": bias}, (x,))


def test_a_weight_that_is_replaced_while_a_kernel_is_made_is_seen(monkeypatch):
    made, other, x = layer("int8-weight-only", 40, 6), layer("int8-weight-only", 40, 6), torch.randn(3, 40)
    settle = QuantLinear._settle

    def replacing(self):
        weight = settle(self)
        monkeypatch.undo()
        self.share_weight(other)
        return weight

    monkeypatch.setattr(QuantLinear, "_settle", replacing)
    with torch.no_grad():
        made(x)
        assert same_bits(made(x), fresh(made, x)) and same_bits(made.weight.codes, other.weight.codes)


def test_swapping_memory_does_not_slow_later_calls():
    x = torch.randn(3, 40)
    made = warm("int8-weight-only", x)
    with torch.no_grad():
        for name in ("bias", "scale", "codes"):
            swapped(made, name, getattr(made, name).data.clone())
            made(x)
            assert straight(made, x) is not None


def test_threads_call_while_the_layout_changes():
    inputs = [torch.randn(rows, 64) for rows in (1, 2, 3)]
    made = warm("int8", inputs[0], 96)
    expected = [fresh(made, x) for x in inputs]
    wrong: list[int] = []
    stop = threading.Event()

    def call(index: int) -> None:
        with torch.no_grad():
            while not stop.is_set():
                if not same_bits(made(inputs[index]), expected[index]):
                    wrong.append(index)

    callers = [threading.Thread(target=call, args=(index,)) for index in range(3)]
    for thread in callers:
        thread.start()
    for _ in range(200):
        made.state_dict()
    stop.set()
    for thread in callers:
        thread.join()
    assert not wrong


def test_it_goes_with_its_layer():
    made = warm("int8", torch.randn(3, 40))
    kept = weakref.ref(made._bound[0]._last[-1])
    bias = weakref.ref(made.bias)
    del made
    gc.collect()
    assert kept() is None and bias() is None


def test_a_layer_that_its_parameter_leads_to_can_be_collected():
    for tie in (lambda m: setattr(m.bias, "owner", m), lambda m: m.bias.register_hook(lambda grad, m=m: None)):
        made, x = layer("int8", 40, 6), torch.randn(3, 40)
        tie(made)
        with torch.no_grad():
            made(x)
            assert same_bits(made(x), fresh(made, x))
        gone = weakref.ref(made)
        del made
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize("what", ["plan", "kernel"])
def test_what_native_code_keeps_is_freed_once(what, monkeypatch):
    freed: list[int] = []
    functions = native_ops._functions()
    counted = functions._replace(
        forget=lambda number: (freed.append(number), functions.forget(number)),
        release=lambda number: (freed.append(number), functions.release(number)),
    )
    monkeypatch.setattr(native_ops, "_functions", lambda: counted)
    if what == "plan":
        run = native_ops.PREPARE["encode"](OPS["encode"].args(torch.randn(5, 40), "fp8_e4m3"))
        assert freed == []
        del run
        assert len(freed) == 1
    else:
        made = warm("int8", torch.randn(1, 40))
        before = len(freed)
        del made
        gc.collect()
        assert len(freed) > before and len(set(freed)) == len(freed)


# -- who sees the calls of such a layer --------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", [WatchDispatch, WatchFunctions])
def test_modes_see_the_public_op(mode):
    x = torch.randn(3, 40)
    made = warm("int8", x)
    with torch.no_grad(), mode() as watch:
        y = made(x)
    seen = [name for name in watch.seen if "lowbit" in name]
    assert seen == ["lowbit.linear" if mode is WatchFunctions else "lowbit.linear.default"]
    assert same_bits(y, fresh(made, x))


def test_profilers_see_the_public_op():
    x = torch.randn(3, 40)
    made = warm("int8", x)
    with torch.no_grad(), torch.profiler.profile() as profile:
        made(x)
    assert [e.key for e in profile.key_averages() if "lowbit" in e.key] == ["lowbit::linear"]


def test_a_tracer_does_not_record_what_is_freed_meanwhile():
    x = torch.randn(3, 40)
    made = warm("int8-weight-only", x)

    def call(x: Tensor) -> Tensor:
        y = made(x)
        made.bfloat16()
        gc.collect()
        return y

    with torch.no_grad():
        graph = make_fx(call)(x)
    assert "lowbit_native" not in graph.code and "lowbit.linear" in graph.code


def test_a_subclass_goes_its_own_way():
    x = torch.randn(3, 40)
    made = warm("int8", x)
    with torch.no_grad():
        assert straight(made, nn.Parameter(x)) is None
        assert same_bits(made(nn.Parameter(x)), fresh(made, x))


def test_transforms_and_tracers_see_it():
    x, more = torch.randn(3, 40), torch.randn(5, 3, 40)
    made = warm("int8", x)
    with torch.no_grad():
        assert same_bits(torch.func.vmap(made)(more), torch.stack([fresh(made, m) for m in more]))
        traced = torch.jit.trace(made, x, check_trace=False)
        assert same_bits(traced(more[0]), fresh(made, more[0]))
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            made(forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.parametrize("recipe", ["int8", "int8-weight-only"])
def test_grad_mode_autocast_and_inference_mode_hold(recipe):
    x = torch.randn(3, 40)
    made = warm(recipe, x)
    assert made(x).requires_grad and made(x.clone().requires_grad_()).requires_grad
    with torch.no_grad():
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                assert made(x).dtype == made(x).dtype == torch.bfloat16
            assert made(x).dtype == made(x).dtype == torch.float32
            assert same_bits(made(x), fresh(made, x))
    with torch.inference_mode():
        assert made(x).is_inference()


def test_the_backend_asked_for_serves():
    x = torch.randn(3, 40)
    made = warm("int8-weight-only", x)
    with torch.no_grad(), lb.use_backend("reference"), serving() as served:
        made(x)
    assert served["linear"] == "reference"
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if before != "medium" else "highest")
    try:
        with torch.no_grad():
            assert straight(made, x) is None
    finally:
        torch.set_float32_matmul_precision(before)
