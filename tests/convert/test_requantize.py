"""fuse_requantize_: static layers hand on codes, and no bit of what the model computes changes."""

import copy
import math
from collections import OrderedDict
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.variants import Kernel, kernels, params
from torch import Tensor, nn

import lowbit as lb
from lowbit import reference
from lowbit.testing import conv, linear
from lowbit.testing.conv import GEOMETRIES
from lowbit.testing.inputs import random_matrix


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


class Residual(nn.Module):
    """Two convolutions and a shortcut, as ResNets have them; the sum is of floats."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels + 3, 3, padding=1)
        self.second = nn.Conv2d(channels + 3, channels, 3, padding=(1, 2), stride=(1, 1), dilation=(1, 2))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return F.relu(x + self.second(self.relu(self.first(x))))


def calibrated(model: nn.Module, x: torch.Tensor, recipe: str = "int8-static", method: str = "minmax") -> nn.Module:
    lb.quantize_(model, recipe, lb.calibrate(model.eval(), recipe, [x], ("nearest", method), skip=()), skip=())
    return model


def convolutional() -> nn.Module:
    layers = [
        ("stem", nn.Conv2d(3, 8, 3, stride=2, padding=1, padding_mode="reflect")), ("act", nn.ReLU()),
        ("depthwise", nn.Conv2d(8, 8, 3, groups=8, padding=1)), ("drop", nn.Dropout(0.3)),
        ("pointwise", nn.Conv2d(8, 6, 1)), ("residual", Residual(6)), ("pool", nn.AdaptiveAvgPool2d(2)),
        ("flat", nn.Flatten()), ("hidden", nn.Linear(24, 17)), ("more", nn.ReLU()), ("head", nn.Linear(17, 5)),
    ]  # fmt: skip
    return nn.Sequential(OrderedDict(layers))


SIGNED = {
    "stem": ("depthwise",), "depthwise": ("pointwise",), "residual.first": ("residual.second",), "hidden": ("head",),
}  # fmt: skip
AFFINE = {"depthwise": ("pointwise",)}


def takers(report: lb.Report) -> dict[str, tuple[str, ...]]:
    """Which layers take the codes of which."""
    return {row.name: row.consumers for row in report.layers}


@pytest.mark.parametrize(("recipe", "expected"), [("int8-static", SIGNED), ("int8-static-affine", AFFINE)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_joined_network_has_the_bits_of_the_plain_one(recipe, expected, layout):
    torch.manual_seed(0)
    x = torch.randn(3, 3, 11, 9).to(memory_format=layout)
    model = calibrated(convolutional(), x, recipe)
    joined = copy.deepcopy(model)
    assert takers(lb.fuse_requantize_(joined)) == expected
    given = {}
    for name in (name for names in expected.values() for name in names):
        joined.get_submodule(name).register_forward_pre_hook(lambda m, args, n=name: given.update({n: args[0].dtype}))
    for batch in (x, x[:1] * 3, torch.zeros_like(x)):
        assert torch.equal(joined(batch), model(batch))
    assert set(given.values()) == {torch.int8 if recipe == "int8-static" else torch.uint8}
    for backend in ("reference", "cpu_patches"):
        with lb.use_backend(backend) if backend == "reference" else lb.use_backend("cpu"):
            assert torch.equal(joined(x), model(x))
    again = copy.deepcopy(joined)
    assert again.hidden.consumers in ((), (again.head,)) and torch.equal(again(x), model(x))
    assert joined.state_dict().keys() == model.state_dict().keys()


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 33), st.integers(1, 40), st.integers(1, 40), st.integers(1, 7),
    st.sampled_from([torch.float32, torch.bfloat16]), st.booleans(),
)  # fmt: skip
def test_linear_layers_of_any_shape(first, middle, last, rows, dtype, relu):
    x = torch.randn(2, rows, first, dtype=dtype)
    between = [nn.ReLU()] if relu else [nn.Identity()]
    plain = nn.Sequential(nn.Linear(first, middle), *between, nn.Linear(middle, last, bias=False)).to(dtype)
    model = calibrated(plain, x)
    joined = copy.deepcopy(model)
    assert takers(lb.fuse_requantize_(joined)) == {"0": ("2",)}
    assert torch.equal(joined(x), model(x)) and joined(x).dtype == dtype
    assert torch.equal(joined(x[:0]), model(x[:0]))


def test_gradients_pass_through_floats():
    x = torch.randn(6, 8)
    model = calibrated(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), x)
    joined = copy.deepcopy(model)
    lb.fuse_requantize_(joined)
    grads = []
    with torch.enable_grad():
        for one in (model, joined):
            given = x.clone().requires_grad_()
            one(given).square().sum().backward()
            grads.append((given.grad, one[0].bias.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True)) and bool(grads[0][0].any())


class Shared(nn.Module):
    """What one layer computes goes to several, and elsewhere."""

    def __init__(self, elsewhere: bool) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.elsewhere = elsewhere

    def forward(self, x):
        y = self.first(x)
        z = self.left(y) + self.right(torch.relu(y).reshape(-1, 8))
        return (z, y) if self.elsewhere else z


def test_who_else_takes_a_result():
    x = torch.randn(5, 8)
    model = calibrated(Shared(False), x)
    assert takers(lb.fuse_requantize_(model)) == {}, "the two have scales of their own"
    model.right.load_state_dict({**model.right.state_dict(), "input_scale": model.left.input_scale})
    before = model(x)
    assert takers(lb.fuse_requantize_(model)) == {"first": ("left", "right")}
    assert torch.equal(model(x), before)
    other = calibrated(Shared(True), x)
    other.right.load_state_dict({**other.right.state_dict(), "input_scale": other.left.input_scale})
    assert takers(lb.fuse_requantize_(other)) == {}


def test_layers_called_twice_and_dynamic_ones_are_left():
    x = torch.randn(4, 8)
    layer = nn.Linear(8, 8)
    twice = calibrated(nn.Sequential(layer, nn.Linear(8, 8), layer), x)
    expected = twice(x)
    assert takers(lb.fuse_requantize_(twice)) == {"1": ("0",)} and torch.equal(twice(x), expected)
    dynamic = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    lb.quantize_(dynamic, "int8", skip=())
    assert takers(lb.fuse_requantize_(dynamic)) == {}


def test_it_can_be_taken_back_and_leaves_files_as_they_are(tmp_path):
    x = torch.randn(4, 8)
    model = calibrated(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), x)
    expected = model(x)
    report = lb.fuse_requantize_(model)
    assert "fuse_requantize_: 1 layer joined" in str(report) and "codes go to" in str(report)
    lb.save_model(model, tmp_path / "saved")
    loaded = lb.load_model(tmp_path / "saved", nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)))
    assert torch.equal(loaded(x), expected) and not loaded[0].consumers
    other = copy.deepcopy(model)
    assert lb.unfuse_requantize_(other).converted == ("0",) and lb.unfuse_requantize_(other).converted == ()
    assert not other[0].consumers and torch.equal(other(x), expected)
    lb.dequantize_(model)
    assert model(x).dtype == torch.float32 and type(model[0]) is nn.Linear


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else x


def test_a_model_that_cannot_be_traced_is_left(tmp_path):
    x = torch.ones(2, 4)
    model = calibrated(Untraceable(), x)
    expected = model(x)
    with pytest.raises(ValueError, match=r"torch\.fx cannot trace Untraceable .* call it on a part"):
        lb.fuse_requantize_(model)
    assert torch.equal(model(x), expected)


def coded_calls(op: str):
    """Calls on floats with a given scale, and the same on the codes of these floats; with results in codes too."""
    for index, (case, input) in enumerate(
        product(GEOMETRIES if op == "conv" else ((2, 5, 33), (1, 64), (17, 40)), ("int8", "uint8", "fp8_e4m3"))
    ):
        input += ":tensor:affine" if input == "uint8" else ":tensor"
        if op == "conv":
            call = conv.random_call(case, input, "int8:row", "cpu", index)
        else:
            x, w = random_matrix(math.prod(case[:-1]), case[-1], seed=index), random_matrix(7, case[-1], seed=index + 9)
            call = linear.make_call(x.reshape(case), w, input, "int8:row", out_dtype=torch.float32)
        scheme = lb.scheme(input)
        codes, scale, zero = reference.quantize(call.x.flatten(0, -2), scheme, None, None)
        zero = zero if scheme.affine else None
        out = {"out_scheme": input, "out_scale": scale, "out_zero_point": zero} if index % 2 else {}
        call = call._replace(input_scale=scale, input_zero_point=zero, **out)
        yield call, call._replace(x=codes.reshape(call.x.shape))


@pytest.mark.parametrize("kernel", params([kernel for op in ("linear", "conv") for kernel in kernels(op)]))
def test_every_kernel_has_the_same_bits_for_floats_and_their_codes(kernel: Kernel):
    served = 0
    for call, coded in list(coded_calls(kernel.op))[:: 5 if kernel.variant.interpreted else 1]:
        on_device = [type(c)(*(v.to(kernel.variant.device) if isinstance(v, Tensor) else v for v in c))
                     for c in (call, coded)]  # fmt: skip
        expected, found = map(kernel.run, on_device)
        assert (expected is None) == (found is None)
        if found is not None:
            served += 1
            assert torch.equal(found[0], expected[0]), call.input_scheme
    assert served, f"{kernel} refuses every call"


@pytest.mark.parametrize("op", ["linear", "conv"])
def test_codes_need_their_scheme_and_scale(op):
    weight = lb.quantize(torch.randn(4, 8), "int8:row")
    codes = torch.zeros(2, 3, 3, 8, dtype=torch.uint8)
    more = () if op == "linear" else ((1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1)
    given = (weight.codes, "int8:row", weight.scale, None, None, None, *more)
    for input in (None, "int8:tensor"):
        with pytest.raises((ValueError, RuntimeError), match=r"x is uint8 and so holds codes"):
            getattr(torch.ops.lowbit, op)(codes, *given, input, torch.float32)
