"""Quantizers for the exporters of transformers and for torchao's PT2E, next to ``quantize_``."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowbit as lb
from lowbit.interop.graphs.modules import layer_names, with_layers

pytestmark = pytest.mark.filterwarnings("ignore")


class Tied(nn.Module):
    """A layer that is used twice, attention, a convolution, and a head that shares the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 32)
        self.twice = nn.Linear(32, 32)
        self.conv = nn.Conv1d(32, 32, 3, padding="same", groups=2)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.head = nn.Linear(32, 20, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.twice(self.twice(self.table(ids)))
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.block(x))


def stack():
    torch.manual_seed(0)
    layers = [nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 16)]
    return nn.Sequential(*layers).eval()


def traced(model, x):
    return torch.export.export(model, (x,)).module()


@torch.no_grad()
def test_layers_of_a_program_are_modules_again():
    torch.manual_seed(0)
    model, ids = Tied().eval(), torch.randint(20, (2, 5))
    program = with_layers(traced(model, ids))
    assert torch.equal(program(ids), traced(model, ids)(ids))
    found = {name: type(module) for name, module in program.named_modules() if name in layer_names(traced(model, ids))}
    assert found == {
        "table": nn.Embedding, "twice": nn.Linear, "conv": nn.Conv1d, "head": nn.Linear,
        "block.self_attn.in_proj": nn.Linear, "block.self_attn.out_proj": nn.Linear, "block.linear1": nn.Linear,
        "block.linear2": nn.Linear,
    }  # fmt: skip
    assert program.head.weight is program.table.weight
    lb.quantize_(program, "int8", method="nearest")
    other = copy.deepcopy(model)
    lb.quantize_(other, "int8", method="nearest")
    torch.testing.assert_close(program(ids), other(ids), rtol=0, atol=1e-6)


@pytest.mark.parametrize("geometry", [
    (nn.Conv2d(4, 6, 3, stride=2, padding=1), (1, 4, 9, 8)),
    (nn.Conv2d(4, 8, (3, 5), dilation=(1, 2), groups=4, bias=False), (2, 4, 12, 12)),
    (nn.Conv3d(2, 4, 3, padding="same"), (1, 2, 5, 6, 7)), (nn.Conv1d(3, 5, 4), (2, 3, 11)),
])  # fmt: skip
@torch.no_grad()
def test_geometry_of_convolutions(geometry):
    conv, shape = geometry
    model, x = nn.Sequential(conv, nn.ReLU()).eval(), torch.randn(shape)
    program = with_layers(traced(model, x))
    assert type(program.get_submodule("0")) is type(conv)
    assert torch.equal(program(x), model(x))


class Shared(nn.Module):
    """One weight in several calls: as embedding and head, with and without bias, and with two strides."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.weight, self.bias = nn.Parameter(torch.randn(16, 16, 3)), nn.Parameter(torch.randn(16))
        self.lora = nn.Linear(16, 16)

    def forward(self, ids):
        x = self.table(ids)
        x = x + self.lora(x)
        y = F.conv1d(x.transpose(1, 2), self.weight, self.bias, padding=1)
        y = F.conv1d(y, self.weight, stride=2).transpose(1, 2)
        return F.linear(y, self.table.weight), F.linear(x, self.lora.weight)


@torch.no_grad()
def test_one_weight_in_calls_of_several_kinds():
    torch.manual_seed(0)
    model, ids = Shared().eval(), torch.randint(20, (2, 9))
    program = with_layers(traced(model, ids))
    assert all(map(torch.equal, program(ids), model(ids)))
    alone, x = nn.Linear(8, 4).eval(), torch.randn(3, 8)
    assert torch.equal(with_layers(traced(alone, x))(x), alone(x))


@pytest.mark.parametrize("name", ["int8-static", "int8-static-affine", "int8-weight-only"])
@torch.no_grad()
def test_pt2e_has_the_numbers_of_quantize_(name):
    pytest.importorskip("torchao")
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    from lowbit.integrations.pt2e import Quantizer

    model, x = stack(), torch.randn(32, 64)
    prepared = prepare_pt2e(traced(model, x), Quantizer(name))
    prepared(x)
    converted = convert_pt2e(prepared)
    static = lb.recipe(name).static
    calibration = lb.calibrate(model, name, [x], method="nearest", progress=False) if static else None
    lb.quantize_(model, name, calibration, method=None if static else "nearest")
    expected = model(x)
    assert (converted(x) - expected).abs().max() <= 1e-6 * expected.abs().max()


@torch.no_grad()
def test_pt2e_leaves_what_quantize_leaves():
    pytest.importorskip("torchao")
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

    from lowbit.integrations.pt2e import Quantizer

    model, ids = Tied().eval(), torch.randint(20, (2, 5))
    program = traced(model, ids)
    prepare_pt2e(program, Quantizer("int8-static", skip=("lm_head", "conv")))
    names = {name for name, nodes in layer_names(traced(model, ids)).items() if name not in ("table", "head", "conv")}
    assert len(names) == 5
    report = lb.quantize_(model, "int8", method="nearest", skip=("lm_head", "conv"))
    assert len({row.name for row in report.layers}) == 4  # attention is one layer there, and two in the program
    for name in ("nf4", "int8", "int8-weight-only:tensor", "int8-weight-only:row:fp16", "int8-weight-only:row:full",
                 "int8-weight-only:hadamard"):  # fmt: skip
        with pytest.raises(ValueError, match=r"PT2E: recipe '.*' is not expressible"):
            Quantizer(name)
    with pytest.raises(ValueError, match="PT2E: embedding 'table'"):
        prepare_pt2e(traced(Tied().eval(), ids), Quantizer({"*": "int8-weight-only", "table": "int8-weight-only"}))


@pytest.mark.slow
@pytest.mark.parametrize("format", ["onnx", "openvino", "dynamo"])
@pytest.mark.parametrize("name", ["int8-static", "int4-weight-only:group32"])
@torch.no_grad()
def test_exporters_of_transformers(format, name, tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5.24")
    pytest.importorskip({"dynamo": "torch"}.get(format, format))
    from transformers import exporters

    from lowbit.integrations.exporters import Quantizer

    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                                     intermediate_size=128)  # fmt: skip
    model = transformers.BertModel(config).eval()
    batch = {"input_ids": torch.randint(100, (2, 9)), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    classes = {"onnx": "Onnx", "openvino": "OpenVINO", "dynamo": "Dynamo"}
    exporter, options = (getattr(exporters, classes[format] + word) for word in ("Exporter", "Config"))
    exported = exporter().export(model, dict(batch), options(quantizer=Quantizer(name, [batch])))
    if format == "openvino":
        lb.interop.openvino.compress(exported.program)
        exported.to(config=lb.interop.openvino.EXACT)
        if name == "int4-weight-only:group32":
            constants = [node for node in exported.program.get_ordered_ops() if node.get_type_name() == "Constant"]
            types = [node.get_output_element_type(0).get_type_name() for node in constants]
            assert types.count("i4") == 2 * 6 + 1
    plain = model(**batch).last_hidden_state
    program = with_layers(torch.export.export(model, (), dict(batch)).module())
    lb.quantize_(program, name, lb.calibrate(program, name, [batch], method="nearest", progress=False))
    expected = program(**batch).last_hidden_state
    found = exported(**batch).last_hidden_state
    if format != "openvino" or name != "int8-static":  # OpenVINO's integer products saturate on some CPUs
        assert (found - expected).norm() <= 0.02 * (plain - expected).norm()
    lb.quantize_(model, "int8")
    with pytest.raises(ValueError, match=r"quantized already.*lowbit.interop.exportable"):
        exporter().export(model, dict(batch), options(quantizer=Quantizer(name, [batch])))
