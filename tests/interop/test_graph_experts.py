"""Mixtures of experts in graphs: QMoE in ONNX files, run by ONNX Runtime, next to lowbit's own results."""

import copy

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.interop import exportable
from lowbit.interop.graphs.weights import integers
from lowbit.interop.onnx.experts import Blocks, Rows
from lowbit.nn import QuantExperts
from lowbit.tensor.packing import unpack

transformers = pytest.importorskip("transformers", minversion="5")

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {"hidden_size": 64, "intermediate_size": 96}
SHAPE = {
    "vocab_size": 100, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1,
    "eos_token_id": 2, **SIZES,
}  # fmt: skip
MODELS = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {
        "num_experts": 5, "moe_intermediate_size": 48, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 32
    },
    "Qwen3Moe": {"num_experts": 5, "moe_intermediate_size": 48, "num_experts_per_tok": 2, "head_dim": 16},
    "Olmoe": {"num_experts": 6, "num_experts_per_tok": 3, "pad_token_id": 0},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "swiglu_limit": 0.5},
    "DeepseekV3": {  # a sigmoid router with groups and a factor
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 0, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4,
    },
}  # fmt: skip
#: Recipes of QMoE, with the largest difference relative to the largest output.
WRITTEN = {
    "int4-weight-only:group32": 2e-6, "int4-weight-only:row": 2e-6, "int3-weight-only:group64": 2e-6,
    "int4-weight-only:group32:affine": 2e-6, "int4-weight-only:group64:affine": 2e-6, "uint4-weight-only:group48": 2e-6,
    "int8-weight-only": 2e-6, "int6-weight-only:row": 2e-6, "w4a8": 0.05,
}  # fmt: skip
#: Recipes that QMoE cannot express, and those whose inputs it would round to 8 bits.
OTHERS = ("nf4", "int2-weight-only:group32", "int8-weight-only:group32", "int8", "fp8-weight-only")


class Mixtures(nn.Module):
    """Experts side by side."""

    def __init__(self, experts):
        super().__init__()
        self.experts = nn.ModuleList(experts)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)

    def forward(self, x, index, weights):
        return [experts(x, index, weights) for experts in self.experts]


def experts_of(family, count=4, **options):
    """A module of experts of transformers."""
    counts = dict.fromkeys(("num_local_experts", "num_experts"), count)
    config = getattr(transformers, f"{family}Config")(**SIZES, **counts, **options)
    model = getattr(transformers, f"{family}ForCausalLM")
    module = __import__(model.__module__, fromlist=["_"])
    return getattr(module, f"{family}Experts")(config)


def mixtures(recipes, *families):
    """Experts of each family in each recipe, quantized."""
    torch.manual_seed(0)
    names = [(family, name) for family in families for name in recipes]
    model = Mixtures(experts_of(family, **options(family)) for family, _ in names).eval()
    rows = {f"experts.{index}": name for index, (_, name) in enumerate(names)}
    lb.quantize_(model, rows, method="nearest", skip=())
    assert all(type(experts) is QuantExperts for experts in model.experts)
    return model, names


def options(family):
    return {"GptOss": {"swiglu_limit": 0.5}, "Qwen3Moe": {"moe_intermediate_size": 64}}.get(family, {})


def routed(tokens, count=4):
    """Tokens, with padding, an expert that is chosen twice, and weights whose sum is not one."""
    x = torch.randn(tokens, SIZES["hidden_size"])
    index, weights = torch.rand(tokens, count).argsort(-1)[:, :3], torch.rand(tokens, 3)
    index[-1, 0] = count
    index[0, 0] = index[0, 1]
    weights[tokens // 2, 1] = 0
    return x, index, weights


def session(path):
    onnxruntime = pytest.importorskip("onnxruntime")
    made = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(*inputs):
        names = [entry.name for entry in made.get_inputs()]
        return [torch.from_numpy(y) for y in made.run(None, dict(zip(names, (x.numpy() for x in inputs), strict=True)))]

    return run


def operators(path):
    return [node.op_type for node in pytest.importorskip("onnx").load(path).graph.node]


def error(found, expected):
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(("recipes", "families"), [
    (["int4-weight-only:group32"], ["Mixtral"]),
    pytest.param([*WRITTEN], ["Mixtral", "GptOss", "Qwen3Moe"], marks=pytest.mark.slow),
])  # fmt: skip
@torch.no_grad()
def test_recipes_in_onnx_runtime(recipes, families, tmp_path):
    pytest.importorskip("onnxscript")
    model, names = mixtures(recipes, *families)
    report = lb.export(model, "onnx", tmp_path / "m.onnx", batch=routed(5))
    assert operators(tmp_path / "m.onnx").count("QMoE") == len(names)
    assert [note for note in report.notes if "token" in note] == []
    assert sum("QMoE quantizes inputs" in note for note in report.notes) == ("w4a8" in recipes)
    run = session(tmp_path / "m.onnx")
    for batch in (routed(5), routed(1), routed(40)):
        for name, found, expected in zip(names, run(*batch), model(*batch), strict=True):
            assert error(found, expected) <= WRITTEN[name[1]], name


@pytest.mark.slow
@torch.no_grad()
def test_other_recipes_compute_all_experts(tmp_path):
    pytest.importorskip("onnxscript")
    model, names = mixtures(OTHERS, "Qwen3Moe")
    report = lb.export(model, "onnx", tmp_path / "m.onnx", batch=routed(5))
    assert "QMoE" not in operators(tmp_path / "m.onnx")
    notes = [note for note in report.notes if "every token" in note]
    assert notes == [
        f"in experts.* each expert computes every token: QMoE has no recipe {lb.recipe(name).name!r}"
        for _, name in names
    ]
    x, index, weights = routed(7)
    index = index.clamp(max=3)
    for name, found, expected in zip(
        names, session(tmp_path / "m.onnx")(x, index, weights), model(x, index, weights), strict=True
    ):
        assert error(found, expected) <= 2e-6, name


def note(model, format="onnx"):
    """The note of a model with one mixture."""
    with exportable(model, format) as notes:
        kinds = [type(experts).__name__ for experts in model.experts]
    assert kinds == ["QuantExperts" if notes else "Blocks"]
    return notes


@torch.no_grad()
def test_experts_that_only_their_own_layers_compute():
    model, _ = mixtures(["int4-weight-only:group32"], "Mixtral")
    assert note(model) == ()
    for format in ("openvino", "torch"):
        expected = f"in experts.0 each expert computes every token: {format!r} has no operator for experts"
        assert [line.replace("*", "0") for line in note(model, format)] == [expected]
    hooked = copy.deepcopy(model)
    hooked.experts[0].down[1].register_forward_hook(lambda layer, inputs, y: 2 * y)
    assert "or have hooks" in note(hooked)[0]
    other = copy.deepcopy(model)
    other.experts[0].act_fn = nn.GELU()
    assert "no SwiGLU" in note(other)[0]
    narrow = Mixtures([experts_of("Qwen3Moe", moe_intermediate_size=24)])
    lb.quantize_(narrow, "int4-weight-only:group32", skip=())
    assert "no blocks of 16 columns or more divide its 64 and 24 columns" in note(narrow)[0]
    lb.prepack_(model)
    assert note(model) == ()


@pytest.mark.parametrize("family", ["Mixtral", "GptOss"])
@torch.no_grad()
def test_codes_are_unchanged(family):
    four, _ = mixtures(["int4-weight-only:group32"], family)
    eight, _ = mixtures(["int8-weight-only"], family)
    for (experts,), make, bits in ((four.experts, Blocks, 4), (eight.experts, Rows, 8)):
        parts = make(experts)._buffers
        for expert in range(4):
            gate_up, down = (
                unpack(parts[f"{name}_codes"][expert], bits, size).to(torch.int16) - (1 << bits - 1)
                for name, size in (("gate", 64), ("down", 96))
            )
            assert torch.equal(down, integers(experts.down[expert].weight))
            stored = integers(experts.gate_up[expert].weight)
            if family == "GptOss":
                assert torch.equal(gate_up, stored)
            else:
                assert torch.equal(torch.cat([gate_up[::2], gate_up[1::2]]), stored)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "recipe"),
    [*((family, "int4-weight-only:group32") for family in MODELS), ("Mixtral", "int8-weight-only")],
)
@torch.no_grad()
def test_models(family, recipe, tmp_path):
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SHAPE | MODELS[family])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for layer in model.model.layers:
        for parameter in layer.mlp.experts.parameters():
            nn.init.normal_(parameter, std=0.1)
    lb.quantize_(model, recipe, method="nearest")
    ids = torch.randint(3, 100, (2, 8))
    lb.export(model, "onnx", tmp_path / "m.onnx", batch={"input_ids": ids})
    assert operators(tmp_path / "m.onnx").count("QMoE") == 1
    run = session(tmp_path / "m.onnx")
    for tokens in (ids, torch.randint(3, 100, (3, 13)), torch.randint(3, 100, (1, 1))):
        assert error(run(tokens)[0], model(tokens).logits) <= 5e-6
