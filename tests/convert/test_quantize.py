"""quantize_: what it converts, what it leaves, what it refuses, and that a refusal leaves the model as it was."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from support.bits import same_bits
from support.layers import DYNAMIC
from support.models import decoded_
from torch import nn

import lowbit as lb
from lowbit.nn import QuantConv2d, QuantLinear

TINY = torch.finfo(torch.float32).eps


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.lm_head = nn.Linear(16, 8)
        self.train_me = nn.LayerNorm(16)

    def forward(self, x):
        for layer in self.body:
            x = layer(x)
        return self.lm_head(self.train_me(x))


@pytest.mark.parametrize("recipe", DYNAMIC)
def test_every_recipe(recipe):
    model = Nested()
    before = copy.deepcopy(model)
    report = lb.quantize_(model, recipe, method="nearest")
    assert report.converted == ("body.0", "body.1") and list(report.left) == ["lm_head"] and not report.skipped
    assert report.recipe == recipe and report.bytes_after < report.bytes_before
    chosen = lb.recipe(recipe)
    for made, old in zip(model.body, before.body, strict=True):
        assert type(made) is QuantLinear and made.recipe == chosen and made.training
        q = lb.quantize(old.weight.detach(), chosen.weight)
        assert all(same_bits(part, made.weight.parts[name]) for name, part in q.parts.items())
        assert same_bits(made.bias, old.bias)
    assert type(model.lm_head) is nn.Linear
    x = torch.randn(3, 16)
    assert relative(model(x), before(x)) < (0.35 if chosen.weight.format.bits == 4 else 0.15)
    assert f"{recipe}: 2 layers converted" in str(report) and "left lm_head: an output layer stays" in str(report)


def test_group_option():
    model = Nested()
    report = lb.quantize_(model, "int4-weight-only", group=8)
    assert report.recipe == "int4-weight-only:group8"
    assert str(model.body[0].weight.scheme) == "int4:group8"


@pytest.mark.parametrize(
    ("skip", "converted"),
    [
        ((), ("body.0", "body.1", "lm_head")),
        (("body.0",), ("body.1", "lm_head")),
        (("body",), ("lm_head",)),
        (("b*.1", "lm_head"), ("body.0",)),
        (("[0]",), ("body.1", "lm_head")),
        ("body", ("lm_head",)),
        (["re:.*d"], ("body.0", "body.1")),
        (lambda module, path: module.out_features == 16, ("lm_head",)),
        (("lm_head", lambda module, path: path == "body.1"), ("body.0",)),
    ],
)
def test_skip(skip, converted):
    assert lb.quantize_(Nested(), "int8", skip=skip).converted == converted


def linear(module: nn.Module, path: str) -> bool:
    return isinstance(module, nn.Linear)


@pytest.mark.parametrize(
    ("recipe", "converted"),
    [
        ({linear: "int8"}, {"body.0": "int8", "body.1": "int8"}),
        ({linear: "int8", "lm_head": "nf4"}, {"body.0": "int8", "body.1": "int8", "lm_head": "nf4"}),
        ({"body": "int8", r"re:.*\.1": "nf4"}, {"body.0": "int8", "body.1": "nf4"}),
        ({"*": "int8", "0": None}, {"body.1": "int8"}),
        ({"lm_head": "int8", lambda module, path: path.endswith("0"): "nf4"}, {"body.0": "nf4", "lm_head": "int8"}),
        ({"lm_head": "int8", linear: None, "1": "nf4"}, {"body.1": "nf4"}),
    ],
    ids=lambda value: ", ".join(getattr(key, "__name__", key) for key in value),
)
def test_patterns_of_recipes(recipe, converted):
    report = lb.quantize_(Nested(), recipe)
    assert {layer.name: layer.recipe for layer in report.layers} == converted


@pytest.mark.parametrize("convert", [lb.quantize_, lb.train.prepare_, lb.qat.prepare_])
def test_a_function_converts_nothing_that_stays_unless_it_is_named(convert):
    report = convert(Nested(), {linear: "fp8"})
    assert report.converted == ("body.0", "body.1") and list(report.left) == ["lm_head"]


def test_parts_that_are_compiled_have_their_plain_names():
    model = Nested()
    model.body = torch.compile(model.body, backend="eager")
    report = lb.quantize_(model, {"*": "int8", "body.0": None}, skip=())
    assert report.converted == ("body._orig_mod.1", "lm_head")


def same_model(a: nn.Module, b: nn.Module) -> bool:
    kinds = [type(m) for m in a.modules()] == [type(m) for m in b.modules()]
    left, right = a.state_dict(), b.state_dict()
    return kinds and left.keys() == right.keys() and all(same_bits(left[k], right[k]) for k in left)


def broken(change) -> Nested:
    model = Nested()
    with torch.no_grad():
        change(model)
    return model


def attention() -> nn.Module:
    return nn.Sequential(nn.MultiheadAttention(8, 2))


@pytest.mark.parametrize(
    ("model", "arguments", "error", "message"),
    [
        (nn.Sequential(nn.Embedding(4, 4), nn.ReLU()), {}, ValueError, "nothing to convert.*the model has 1 Embedding"),
        (nn.Sequential(nn.ReLU()), {}, ValueError, "no layer with a weight matrix"),
        (nn.Sequential(nn.Linear(4, 4)), {"skip": ("0",)}, ValueError, r"skipped as asked: 0; pass skip=\(\)"),
        (nn.Linear(4, 4), {}, ValueError, r"the model itself is a Linear.*nn.Sequential\(model\)"),
        (Nested(), {"skip": ("boddy",)}, ValueError, r"'boddy' .*\(did you mean body\?\); names are such as 'body.0'"),
        (Nested(), {"skip": "boddy.1"}, ValueError, r"'boddy.1' matches no module \(did you mean body.1\?\)"),
        (attention(), {"skip": "out_proj"}, ValueError, "'0.out_proj', a part of the .*, which is one layer"),
        (attention(), {"recipe": {"*": "int8", "0.out_proj": None}}, ValueError, "a part of the .* '0'"),
        (Nested(), {"skip": "re:lm_(head"}, ValueError, r"'re:lm_\(head' is no regular expression"),
        (Nested(), {"skip": (nn.Linear,)}, TypeError, "got Linear; write lambda module, path: isinstance"),
        (Nested(), {"recipe": {nn.Linear: "int8"}}, TypeError, r"a pattern is a string such as .*or a function"),
        (Nested(), {"recipe": "int7"}, ValueError, "unknown recipe 'int7'"),
        (Nested(), {"calibration": [torch.zeros(2, 16)]}, TypeError, "the result of lowbit.calibrate, got list"),
        (Nested(), {"calibration": ("body.0",)}, TypeError, r"third argument is calibration.*skip=\('body.0',\)"),
        (Nested(), {"calibration": "body.0"}, TypeError, r"third argument is calibration.*skip=\('body.0',\)"),
        (Nested(), {"recipe": {"*": "int8"}, "group": 8}, ValueError, "by layer, write for instance 'nf4:group8'"),
        (Nested(), {"recipe": {"*": "int8", "bodi.*": "nf4"}}, ValueError, "'bodi.*' matches no layer.*'body.0'"),
        (Nested(), {"recipe": "mxfp8", "group": 8}, ValueError, "has scales in e8m0"),
        (broken(lambda m: m.body[1].weight[0, 0].fill_(torch.nan)), {}, ValueError, "layer 'body.1': 1 of .*NaN"),
        (broken(lambda m: m.body[0].weight[:, 2].fill_(-torch.inf)), {}, ValueError, "layer 'body.0': 16 of"),
        (broken(lambda m: m.body[1].double()), {}, TypeError, "layer 'body.1'.*float64"),
        (broken(lambda m: m.body.append(nn.Linear(4, 4, device="meta"))), {}, ValueError, "layer 'body.2'.*the meta"),
    ],
)  # fmt: skip
def test_refusals_leave_the_model_as_it_was(model, arguments, error, message):
    meta = any(p.is_meta for p in model.parameters())
    before = model.state_dict() if meta else copy.deepcopy(model)
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(error, match=f"(?s){message}"):
        lb.quantize_(model, **{"recipe": "int8", **arguments})
    assert kinds == [type(m) for m in model.modules()]
    assert meta or same_model(model, before)


def test_a_model_is_quantized_once():
    model = Nested()
    lb.quantize_(model, "int8", skip=("body.1", "lm_head"))
    with pytest.raises(ValueError, match=r"body.0 is quantized already \(recipe int8\)"):
        lb.quantize_(model, "nf4")
    report = lb.quantize_(model, "nf4", skip=("body.0", "lm_head"))  # the rest, in another recipe
    assert report.converted == ("body.1",)
    with pytest.raises(ValueError, match=r"lowbit.train.convert_\(model\) first"):
        lb.quantize_(lb_prepared(), "int8")


def test_a_layer_compiled_by_itself_is_refused():
    """What torch.compile made of it holds on to the old layer, and would never see the new one."""
    model = nn.Sequential(torch.compile(nn.Linear(4, 4), backend="eager"), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"0._orig_mod is compiled by itself.*quantize first, then compile"):
        lb.quantize_(model, "int8")
    assert type(model[1]) is nn.Linear
    assert lb.quantize_(model, "int8", skip=("0",)).converted == ("1",)
    whole = torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="eager")
    x = torch.randn(2, 4)
    before = whole(x)
    lb.quantize_(whole, "int8")
    assert not torch.equal(whole(x), before) and same_bits(whole(x), whole._orig_mod(x))


def lb_prepared() -> nn.Module:
    model = Nested()
    lb.train.prepare_(model, "fp8")
    return model


def test_tied_linears_share_one_quantized():
    model = Nested()
    model.body[1].weight = model.body[0].weight
    lb.quantize_(model, "nvfp4")
    first, second = model.body
    for name in ("codes", "scale", "global_scale"):
        assert getattr(first, name) is getattr(second, name)
    assert first.bias is not second.bias
    assert len([n for n, _ in model.named_parameters() if n.endswith("codes")]) == 1
    again = copy.deepcopy(model).bfloat16()
    assert again.body[0].codes is again.body[1].codes


def test_layers_whose_matrix_is_a_copy_keep_their_own_weights():
    """A weight of convolutions flattens into a temporary, and the next layer's temporary gets its memory."""
    model = nn.Sequential(*(nn.Conv2d(16, 16, 3) for _ in range(6)))
    model[5].weight = model[4].weight
    before = copy.deepcopy(model)
    lb.quantize_(model, "int8")
    for made, old in zip(model, before, strict=True):
        assert same_bits(
            made.weight.codes.detach(), lb.quantize(old.weight.detach().movedim(1, -1).flatten(1), "int8:row").codes
        )
    assert model[4].linear.codes is model[5].linear.codes
    assert len({id(layer.linear.codes) for layer in model}) == 5


def test_one_module_in_two_places_stays_one():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    model.alias = shared
    report = lb.quantize_(model, "int8")
    assert report.converted == ("0",)
    assert model[0] is model[2] is model.alias and type(model[0]) is QuantLinear


def test_a_tied_embedding_keeps_its_weight():
    model = nn.ModuleDict({"embed": nn.Embedding(16, 8), "head": nn.Linear(8, 16, bias=False)})
    model["head"].weight = model["embed"].weight
    model["other"] = nn.Linear(8, 32)
    kept = copy.deepcopy(model)
    report = lb.quantize_(kept, "int8")
    assert report.converted == ("other",) and "tied to the embedding embed" in report.left["head"]
    assert kept["head"].weight is kept["embed"].weight
    with pytest.warns(UserWarning, match="head shared its weight with embed, which keeps it in high precision"):
        report = lb.quantize_(model, "int8", skip=())
    assert type(model["embed"]) is nn.Embedding and type(model["head"]) is QuantLinear
    assert report.notes and report.converted == ("head", "other")


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Gained(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.gain = nn.Parameter(torch.ones(1))


class Shifted(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight + 1, bias)


class Named(nn.Linear):
    """Computes what Linear does."""

    def __init__(self, *args, tag="none"):
        super().__init__(*args)
        self.tag = tag


class NamedConv(nn.Conv2d):
    pass


def test_subclasses_that_compute_the_same_are_converted():
    model = nn.Sequential(Named(6, 6, tag="first"), nn.Unflatten(1, (6, 1, 1)), NamedConv(6, 4, 1))
    x, oracle = torch.randn(2, 6), decoded_(copy.deepcopy(model))
    assert lb.quantize_(model, "int8-weight-only").converted == ("0", "2")
    assert type(model[0]) is QuantLinear and type(model[2]) is QuantConv2d
    torch.testing.assert_close(model(x), oracle(x), rtol=1e-5, atol=1e-5)


def test_subclasses_that_compute_something_else_are_left():
    model = nn.Sequential(nn.Linear(64, 64), Doubled(4, 4), Gained(4, 4), Shifted(4, 4, 1))
    report = lb.quantize_(model, "int8")
    assert report.converted == ("0",) and list(report.left) == ["1", "2", "3"]
    assert "replaces forward of Linear" in report.left["1"]
    assert "lowbit.convert.register(Doubled, Linear)" in report.left["1"]
    assert "also holds gain" in report.left["2"] and "replaces _conv_forward of Conv2d" in report.left["3"]


def test_computed_weights_are_left_and_named():
    normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = torch.nn.utils.weight_norm(nn.Linear(4, 4))
    model = nn.Sequential(nn.Linear(64, 64), normed, old)
    report = lb.quantize_(model, "int8")
    assert report.converted == ("0",)
    assert list(report.left) == ["1", "2"]
    assert "computed" in report.left["1"] and "computed" in report.left["2"]


def test_hooks_and_mode_move_along():
    model = Nested().eval()
    seen = []
    handle = model.body[0].register_forward_hook(lambda module, args, y: seen.append(type(module)))
    model.body[1].register_forward_pre_hook(lambda module, args, kwargs: seen.append("pre"), with_kwargs=True)
    lb.quantize_(model, "int8")
    model(torch.randn(2, 16))
    assert seen == [QuantLinear, "pre"] and not model.body[0].training
    handle.remove()
    model(torch.randn(2, 16))
    assert seen == [QuantLinear, "pre", "pre"]


# -- other kinds of layers -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("padding_mode", ["zeros", "reflect"])
@pytest.mark.parametrize(
    "options", [{}, {"stride": 2, "padding": 1}, {"padding": (0, 2), "dilation": (2, 1)}, {"padding": "same"}], ids=str
)
def test_conv2d(options, padding_mode):
    model = nn.Sequential(nn.Conv2d(3, 5, (3, 2), padding_mode=padding_mode, **options))
    oracle = decoded_(copy.deepcopy(model))
    assert lb.quantize_(model, "int8-weight-only").converted == ("0",)
    assert type(model[0]) is QuantConv2d and model[0].weight.shape == (5, 18) and model[0].bias is not None
    for shape in ((2, 3, 9, 8), (3, 9, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(model(x), oracle(x), rtol=1e-5, atol=1e-5)


def test_transformers_conv1d_is_known_by_its_name():
    class Conv1D(nn.Module):  # as in transformers: weight [in, out]
        def __init__(self, nf, nx):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

        def forward(self, x):
            return x @ self.weight + self.bias

    Conv1D.__module__, Conv1D.__qualname__ = "transformers.pytorch_utils", "Conv1D"
    model = nn.Sequential(Conv1D(6, 33))
    x = torch.randn(4, 33)
    expected = x @ lb.fake_quantize(model[0].weight.detach().t().contiguous(), "int8:row").t() + model[0].bias
    lb.quantize_(model, "int8-weight-only")
    assert type(model[0]) is QuantLinear and (model[0].in_features, model[0].out_features) == (33, 6)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


class Keywords(nn.Module):
    """Calls its layers by the name that torch gives their argument."""

    def __init__(self):
        super().__init__()
        self.table, self.conv, self.fc = nn.Embedding(8, 32), nn.Conv1d(32, 32, 1), nn.Linear(32, 32)

    def forward(self, ids):
        return self.fc(input=self.conv(input=self.table(input=ids).mT).mT)


def test_layers_are_called_by_keyword():
    plain, ids = Keywords().eval(), torch.arange(6).reshape(2, 3)
    model = copy.deepcopy(plain)
    found = lb.calibrate(model, "int8-static", [ids], "nearest")
    assert set(found.rows) == {"conv", "fc"}
    lb.quantize_(model, "int8-static", found)
    torch.testing.assert_close(model(ids), plain(ids), rtol=0.1, atol=0.05)
    assert lb.correct_bias_(model, plain, [ids]).converted == ("conv", "fc")
    model = copy.deepcopy(plain)
    lb.quantize_(model, {"*": "int8-weight-only", "table": "int8-weight-only"})
    torch.testing.assert_close(model(ids), plain(ids), rtol=0.1, atol=0.05)
    model = copy.deepcopy(plain)
    lb.quantize_(model, "int4-weight-only:group32", prepack=True)
    assert model(ids).isfinite().all()
    for prepare in (lb.qat.prepare_, lb.train.prepare_):
        model = copy.deepcopy(plain)
        prepare(model, "fp8")
        model(ids).sum().backward()
        assert bool(model.fc.weight.grad.any())
