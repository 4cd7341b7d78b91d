"""OpenVINO models and programs of torch.export of quantized models, run by OpenVINO and torch, next to lowbit."""

import copy
import json
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.interop import exportable
from lowbit.interop.exportable import TARGETS
from lowbit.recipes import RECIPES, Cast, recipe
from tests.support.graphs import Many, Words, quantized

pytestmark = pytest.mark.filterwarnings("ignore")

#: Six bits keep sums of two products within 16 bits, where CPUs without VNNI saturate.
W6A8 = lb.Recipe(lb.Gemm(Cast("int8:tensor", scale="static"), "int6:row"), name="w6a8-static")
SYMMETRIC = lb.Recipe(lb.Gemm(Cast("uint8:tensor:affine", scale="static"), "int6:row"), name="w6a8-affine")

OTHERS = (
    "int2-weight-only:group32", "int3-weight-only:group64", "uint4-weight-only:group48", "uint8-weight-only:row:affine",
    "int4-weight-only:row", "int6-weight-only:group16", "nf4:group32", "int4-weight-only:group32:fp16",
    "uint2-weight-only:group16:affine", "int4-weight-only:group32:affine",
    "int8-weight-only:row:affine", "int8-weight-only:group32:affine", "fp8-weight-only:block32x32",
    "int4-weight-only:group24", W6A8, SYMMETRIC,
)  # fmt: skip


def written(format):
    """The recipes that a format has: the named ones, and others."""
    saturating = ("int8-static", "int8-static-affine") if format == "openvino" else ()
    named = (
        name for name, row in RECIPES.items()
        if TARGETS[format].refuses(row) is None and name not in (*saturating, "fp8-delayed")
    )  # fmt: skip
    return [*named, *OTHERS]


def net(*sizes):
    torch.manual_seed(0)
    layers = [nn.Linear(a, b, bias=index != 1) for index, (a, b) in enumerate(pairwise(sizes))]
    return nn.Sequential(layers[0], nn.GELU(), *layers[1:]).eval()


def compiled(path):
    openvino = pytest.importorskip("openvino")
    return openvino.Core().compile_model(path, "CPU", lb.interop.openvino.EXACT)


def export(model, format, directory, x):
    """The report, and a function that runs the file in the format's own program."""
    if format == "openvino":
        pytest.importorskip("openvino")
        report = lb.export(model, format, directory / "model.xml", batch=x)
        run = compiled(directory / "model.xml")

        def outputs(x):
            values = [torch.from_numpy(value) for value in run(x.numpy()).to_tuple()]
            return values[0] if len(values) == 1 else values

        return report, outputs
    report = lb.export(model, format, directory / "model.pt2", batch=x)
    return report, torch.export.load(directory / "model.pt2").module()


def close(found, expected):
    assert (found - expected).abs().max() <= 2e-6 * expected.abs().max()


@pytest.mark.parametrize("format", ["openvino", "torch"])
@torch.no_grad()
def test_recipes(format, tmp_path):
    torch.manual_seed(0)
    names = written(format)
    model = Many(nn.Linear(192, 64, bias=index % 2 == 0) for index in range(len(names))).eval()
    x, one = torch.randn(5, 192), torch.randn(1, 192) / 2  # another batch size
    quantized(model, {f"layers.{index}": name for index, name in enumerate(names)}, [x])
    report, run = export(model, format, tmp_path, x)
    assert len(report.layers) == len(names)
    for rows in (x, one):
        for name, found, expected in zip(names, run(rows), model(rows), strict=True):
            assert (found - expected).abs().max() <= 2e-6 * expected.abs().max(), name


@pytest.mark.parametrize("format", ["openvino", "torch"])
def test_refused_recipes_name_one_that_works(format):
    target = TARGETS[format]
    for row in RECIPES.values():
        refusal = target.refuses(row)
        assert refusal is None or target.refuses(recipe(refusal.nearest)) is None


@pytest.mark.parametrize(("chosen", "type_", "bits"), [
    ("int4-weight-only:group32", "int4_t", 4), ("uint4-weight-only:group32", "uint4_t", 4), ("nf4", "nfloat4", 4),
    ("int2-weight-only:group32", "uint2_t", 2), ("mxfp4-weight-only", "f4e2m1", 4), ("nvfp4-weight-only", "f4e2m1", 4),
    ("int8-weight-only", "int8_t", 8), ("q8-0", "int8_t", 8),
])  # fmt: skip
@torch.no_grad()
def test_openvino_keeps_constants_compressed(chosen, type_, bits, tmp_path):
    model, x = net(256, 512, 128), torch.randn(3, 256)
    quantized(model, chosen, [x])
    export(model, "openvino", tmp_path, x)
    weights = 256 * 512 + 512 * 128
    scales = sum(layer.weight.scale.numel() for layer in model if hasattr(layer, "recipe"))
    assert (tmp_path / "model.bin").stat().st_size <= weights * bits // 8 + 6 * scales + 4 * (512 + 128) + 4096
    nodes = compiled(tmp_path / "model.xml").get_runtime_model().get_ordered_ops()
    products = [node for node in nodes if node.get_rt_info()["layerType"].astype(str) == "FullyConnected"]
    stored = [node.input_value(1).get_element_type().get_type_name() for node in products]
    names = {"int4_t": "i4", "uint4_t": "u4", "nfloat4": "nf4", "uint2_t": "u2", "f4e2m1": "f4e2m1", "int8_t": "i8"}
    assert stored == [names[type_]] * 2
    constants = [node for node in nodes if node.get_rt_info()["layerType"].astype(str) == "Const"]
    assert not any(
        node.get_output_partial_shape(0).is_static and node.get_output_element_type(0).get_type_name() == "f32"
        and np.prod(node.get_output_shape(0)) >= weights // 8 for node in constants
    )  # fmt: skip


@pytest.mark.parametrize("chosen", [W6A8, SYMMETRIC], ids=lambda row: row.name)
@torch.no_grad()
def test_integer_products_of_openvino_are_exact(chosen, tmp_path):
    """With integer inputs and weights and scales of one, results are equal bits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 64, bias=False))
    model[0].weight.copy_(torch.randint(-31, 32, (64, 512)).float())
    model[0].weight[:, 0] = 31.0
    x = torch.randint(-127, 128, (6, 512)).float()
    x[:, 0], x[:, 1] = 127.0, -128.0 if chosen is SYMMETRIC else -127.0
    quantized(model, chosen, [x])
    report, run = export(model, "openvino", tmp_path, x)
    assert torch.equal(run(x), model(x))
    assert any("saturate" in note for note in report.notes)


#: Convolutions, and the shape of their inputs.
CONVOLUTIONS = (
    ((2, 8, 30), nn.Conv1d(8, 16, 5, stride=2, padding=2)),
    ((2, 6, 9, 11), nn.Conv2d(6, 12, 3, padding="same", groups=3)),
    ((1, 4, 10, 12), nn.Conv2d(4, 8, (3, 5), padding=(1, 2), padding_mode="reflect", bias=False)),
    ((1, 3, 5, 6, 7), nn.Conv3d(3, 6, 3, padding=1)),
)  # fmt: skip


@pytest.mark.parametrize("format", ["openvino", "torch"])
@pytest.mark.parametrize(("shape", "conv"), CONVOLUTIONS, ids=lambda value: type(value).__name__)
@torch.no_grad()
def test_convolutions(format, conv, shape, tmp_path):
    torch.manual_seed(0)
    chosen, x = (W6A8, "int8-weight-only", "fp8-weight-only"), torch.randn(shape)
    model = Many(copy.deepcopy(conv) for _ in chosen).eval()
    quantized(model, {f"layers.{index}": name for index, name in enumerate(chosen)}, [x])
    _, run = export(model, format, tmp_path, x)
    for found, expected in zip(run(x), model(x), strict=True):
        close(found, expected)


@pytest.mark.parametrize("format", ["openvino", "torch"])
@torch.no_grad()
def test_embeddings_and_attention(format, tmp_path):
    torch.manual_seed(0)
    tables = ("int8-weight-only", "int4-weight-only:group32", "uint4-weight-only:group16", "fp8-weight-only",
              "nf4:group32", "mxfp4-weight-only", "int4-weight-only:tensor")  # fmt: skip
    model, ids = Words(len(tables)).eval(), torch.randint(50, (2, 7))
    recipes = {f"tables.{index}": name for index, name in enumerate(tables)}
    lb.quantize_(model, {"*": "int4-weight-only:group32", **recipes}, skip=())
    _, run = export(model, format, tmp_path, ids)
    torch.testing.assert_close(run(ids), model(ids), rtol=1e-4, atol=1e-5)
    longer = torch.randint(50, (3, 12))
    torch.testing.assert_close(run(longer), model(longer), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_programs_of_torch_run_without_lowbit(tmp_path):
    model, x = net(64, 96, 32), torch.randn(4, 64)
    quantized(model, "int8-static", [x])
    lb.export(model, "torch", tmp_path / "model.pt2", batch=x)
    torch.save(x, tmp_path / "x.pt")
    program = (
        "import json, sys, torch; from torch.ao.quantization.fx import _decomposed\n"
        f"run = torch.export.load({str(tmp_path / 'model.pt2')!r}).module()\n"
        f"y = run(torch.load({str(tmp_path / 'x.pt')!r}))\n"
        "assert 'lowbit' not in sys.modules; print(json.dumps(y.tolist()))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    close(torch.tensor(json.loads(done.stdout)), model(x))


@torch.no_grad()
def test_the_layers_in_other_exporters(tmp_path):
    openvino = pytest.importorskip("openvino")
    model, x = net(64, 96, 32), torch.randn(4, 64)
    quantized(model, "int4-weight-only:group32", [x])
    with exportable(model, "openvino"):
        close(model(x), quantized(net(64, 96, 32), "int4-weight-only:group32", [x])(x))
        program = torch.export.export(model, (x,))
        converted = openvino.convert_model(program)
    bytewise = openvino.convert_model(program, input=[[4, 64]])
    close(torch.from_numpy(compiled(bytewise)(x.numpy())[0]), model(x))
    lb.interop.openvino.compress(converted)
    close(torch.from_numpy(compiled(converted)(x.numpy())[0]), model(x))
    types = [node.get_output_element_type(0).get_type_name() for node in converted.get_ordered_ops()
             if node.get_type_name() == "Constant"]  # fmt: skip
    assert types.count("i4") == 2
    with exportable(model, "torch"):
        program = torch.export.export(model, (x,))
    assert not any("lowbit" in str(node.target) for node in program.graph.nodes)
    assert type(model[0]).__name__ == "QuantLinear"


def test_packed_models_stay_packed(tmp_path):
    model, x = net(64, 96, 32), torch.randn(4, 64)
    quantized(model, "int8", [x])
    lb.prepack_(model)
    kinds = list(map(type, model))
    _, run = export(model, "torch", tmp_path, x)
    assert list(map(type, model)) == kinds
    close(run(x), model(x))


class Reader(nn.Module):
    """Reads attributes of its layers."""

    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv1d(4, 8, 3, stride=2, padding=1), nn.Linear(8, 8)

    def forward(self, x):
        length = x.shape[-1] // self.conv.stride[0]
        y = self.conv(x)[..., :length].transpose(1, 2)
        return self.out(y.to(self.out.weight.dtype)) * self.out.in_features


@pytest.mark.parametrize("format", ["openvino", "torch"])
@torch.no_grad()
def test_models_read_attributes_of_their_layers(format, tmp_path):
    torch.manual_seed(0)
    model, x = Reader().eval(), torch.randn(2, 4, 20)
    quantized(model, "int8-weight-only", [x])
    _, run = export(model, format, tmp_path, x)
    close(run(x), model(x))


@pytest.mark.parametrize("format", ["openvino", "torch"])
@torch.no_grad()
def test_one_example_row_is_enough(format, tmp_path):
    model, x = net(64, 96, 32), torch.randn(1, 64)
    quantized(model, "int8-weight-only", [x])
    _, run = export(model, format, tmp_path, x)
    more = torch.randn(5, 64)
    close(run(more), model(more))


@pytest.mark.parametrize("cols", [33, 100])
@pytest.mark.parametrize("format", ["openvino", "torch"])
@torch.no_grad()
def test_groups_that_do_not_divide_the_columns(format, cols, tmp_path):
    model, x = net(cols, 24, 8), torch.randn(3, cols)
    quantized(model, "int4-weight-only:group32", [x])
    _, run = export(model, format, tmp_path, x)
    close(run(x), model(x))


@torch.no_grad()
def test_compress_twice_changes_nothing(tmp_path):
    openvino = pytest.importorskip("openvino")
    model, x = net(64, 96, 32), torch.randn(4, 64)
    quantized(model, "mxfp4-weight-only", [x])
    with exportable(model, "openvino"):
        converted = openvino.convert_model(torch.export.export(model, (x,)), input=[[4, 64]])
    for _ in range(2):
        lb.interop.openvino.compress(converted)
    close(torch.from_numpy(compiled(converted)(x.numpy())[0]), model(x))


@torch.no_grad()
def test_hooks_and_modes_stay(tmp_path):
    model, x = net(64, 96, 32), torch.randn(4, 64)
    quantized(model, "int8-weight-only", [x])
    model[0].register_forward_hook(lambda module, inputs, y: 2 * y)
    model.train()
    model[1].eval()
    lb.export(model, "torch", tmp_path / "model.pt2", batch=x)
    assert model.training and model[0].training and not model[1].training
    close(torch.export.load(tmp_path / "model.pt2").module()(x), model(x))


class Fails(nn.Module):
    """Cannot be traced."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(64, 32)

    def forward(self, x):
        return self.out(x) if x.sum() > 0 else -self.out(x)


def test_a_failure_leaves_model_and_files(tmp_path):
    model = Fails()
    lb.quantize_(model, "int8", skip=())
    (tmp_path / "model.pt2").write_text("old")
    with pytest.raises(Exception, match="data-dependent"):
        lb.export(model, "torch", tmp_path / "model.pt2", batch=torch.randn(2, 64))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("model.pt2", "old")]
    assert model.training and type(model.out).__name__ == "QuantLinear"


@pytest.mark.parametrize("format", ["onnx", "openvino", "torch"])
def test_refused_models(format, tmp_path):
    alone = net(64, 64)[0]
    lb.quantize_(nested := nn.Sequential(alone), "int8", skip=())
    with pytest.raises(ValueError, match=r"export nn\.Sequential"), exportable(nested[0], format):
        pass
    with pytest.raises(ValueError, match=r"'0.weight' is torch.bfloat16.*model.float\(\)"):
        narrow = nn.Sequential(nn.Linear(64, 64, bias=False)).bfloat16()
        lb.quantize_(narrow, "int8", skip=())
        with exportable(narrow, format):
            pass
    with pytest.raises(ValueError, match="meta device"), exportable(net(64, 64).to("meta"), format):
        pass
    words = nn.Sequential(nn.Embedding(20, 64), nn.Linear(64, 64))
    lb.quantize_(words, {"*": "int8", "0": "int4-weight-only:hadamard"}, skip=())
    with pytest.raises(ValueError, match="layer '0': its weight is rotated"), exportable(words, format):
        pass


# -- transformers ------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "openvino", "torch"])
@pytest.mark.parametrize("family", ["Mixtral", "Gemma3Text"])
@torch.no_grad()
def test_causal_models(family, format, tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5")
    pytest.importorskip({"torch": "torch", "onnx": "onnxruntime", "openvino": "openvino"}[format])
    torch.manual_seed(0)
    options = {"num_local_experts": 4} if family == "Mixtral" else {"head_dim": 16} if family == "Gemma3Text" else {}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2, **options,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    lb.quantize_(model, "int4-weight-only:group32")
    ids, path = (
        torch.randint(3, 100, (2, 8)),
        tmp_path / {"torch": "m.pt2", "onnx": "m.onnx", "openvino": "m.xml"}[format],
    )
    lb.export(model, format, path, batch={"input_ids": ids})
    longer = torch.randint(3, 100, (3, 13))
    for tokens in (ids, longer):
        if format == "torch":
            found = torch.export.load(path).module()(input_ids=tokens).logits
        elif format == "openvino":
            found = torch.from_numpy(compiled(path)({"input_ids": tokens.numpy()})[0])
        else:
            import onnxruntime

            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            found = torch.from_numpy(session.run(None, {"input_ids": tokens.numpy()})[0])
        torch.testing.assert_close(found, model(tokens).logits, rtol=1e-4, atol=1e-4)


def test_bad_input(tmp_path):
    model, x = net(64, 64, 32), torch.randn(2, 64)
    with pytest.raises(ValueError, match="'openvino' needs an example batch"):
        lb.export(model, "openvino", tmp_path / "model.xml")
    with pytest.raises(ValueError, match=r"unknown format 'openvin' \(did you mean openvino\?\)"):
        exportable(model, "openvin")
    with pytest.raises(ValueError, match=r"must end in .xml"):
        lb.export(model, "openvino", tmp_path / "model.bin", batch=x)
    quantized(model, "nf4", [x])
    with pytest.raises(ValueError, match=r"layer '0'.*only lb.export writes it"), exportable(model, "openvino"):
        pass
    assert not list(tmp_path.iterdir())
