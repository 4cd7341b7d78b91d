"""Mixtures of transformers whose experts are stacked weights: against its own forward on decoded weights, and files."""

from __future__ import annotations

import copy

import pytest
import torch

import lowbit as lb
from lowbit.nn import QuantExperts, QuantLinear

transformers = pytest.importorskip("transformers", minversion="5")

SHAPE = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
MODELS = {
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen3": (
        "Qwen3Moe", {"num_experts": 5, "moe_intermediate_size": 48, "num_experts_per_tok": 2, "head_dim": 16}
    ),
    "deepseek": (
        "DeepseekV3",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 2, "topk_group": 1,
         "first_k_dense_replace": 0, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
         "qk_rope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4},
    ),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "swiglu_limit": 0.05}),
    "qwen3-next": (
        "Qwen3Next",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16,
         "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 16, "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
    ),
}  # fmt: skip
IDS = torch.arange(3, 21).reshape(2, 9)
each = pytest.mark.parametrize("name", MODELS)


def made(name: str):
    torch.manual_seed(0)
    kind, more = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**SHAPE | more)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for layer in model.model.layers:
        for parameter in layer.mlp.experts.parameters():  # biases are not left at zero
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@each
@pytest.mark.parametrize("recipe", ["int4-weight-only:group32", "nvfp4-weight-only", "fp8-weight-only"])
@torch.no_grad()
def test_experts_compute_what_decoded_weights_do(name, recipe):
    model = made(name)
    plain = copy.deepcopy(model)
    report = lb.quantize_(model, recipe, method="nearest")
    experts = model.model.layers[0].mlp.experts
    assert type(experts) is QuantExperts and not any("experts" in left for left in report.left)
    was = plain.model.layers[0].mlp.experts
    for expert, layer in enumerate(experts.gate_up):
        matrix = was.gate_up_proj[expert].t() if was.is_transposed else was.gate_up_proj[expert]
        assert torch.equal(layer.codes, lb.quantize(matrix, layer.scheme).codes)
    decoded = copy.deepcopy(model)
    lb.dequantize_(decoded)
    back = decoded.model.layers[0].mlp.experts
    assert type(back) is type(was)
    for (key, value), (name, before) in zip(back.state_dict().items(), was.state_dict().items(), strict=True):
        assert key == name and value.shape == before.shape and value.is_contiguous()
        assert torch.equal(value, before) if "bias" in key else bool((value - before).norm() < before.norm() / 8)
    torch.testing.assert_close(model(IDS).logits, decoded(IDS).logits, rtol=1e-4, atol=1e-5)


@each
@torch.no_grad()
def test_each_expert_has_the_bits_of_layers_of_its_own(name):
    experts = made(name).model.layers[0].mlp.experts
    recipe = lb.recipe("int8")

    def layer(part: str, expert: int) -> QuantLinear:
        matrix, bias = getattr(experts, part)[expert], getattr(experts, f"{part}_bias", None)
        matrix = matrix.t() if experts.is_transposed else matrix
        return QuantLinear(
            lb.quantize(matrix, recipe.weight), None if bias is None else torch.nn.Parameter(bias[expert]), recipe
        )

    x, index, weights = (
        torch.randn(6, 64),
        torch.tensor([[0, 1], [1, 0], [2, 3], [3, 1], [2, 0], [0, 3]]),
        torch.rand(6, 2),
    )
    expected = torch.zeros_like(x)
    for expert in range(4):
        token, place = torch.where(index == expert)
        y = layer("down_proj", expert)(experts._apply_gate(layer("gate_up_proj", expert)(x[token])))
        expected.index_add_(0, token, y * weights[token, place, None])
    plain = experts(x, index, weights)
    holder = torch.nn.ModuleDict({"experts": experts})
    lb.quantize_(holder, "int8")
    assert torch.equal(holder["experts"](x, index, weights), expected)
    assert bool((expected - plain).norm() < 0.05 * plain.norm())


@pytest.mark.filterwarnings("ignore:quantize_ converted")
def test_experts_without_a_gate_and_with_a_norm():
    from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

    def experts(cls, **more):
        torch.manual_seed(0)
        config = transformers.PretrainedConfig(
            n_routed_experts=3, num_local_experts=3, num_experts=3, hidden_size=64, moe_intermediate_size=96,
            moe_latent_size=None, moe_hidden_size=96, intermediate_size=96, mlp_hidden_act="relu2", hidden_act="silu",
            experts_implementation="eager", **more,
        )  # fmt: skip
        made = cls(config)
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        return torch.nn.ModuleDict({"experts": made, "other": torch.nn.Linear(64, 64)})

    model = experts(NemotronHExperts)
    x, index, weights = torch.randn(5, 64), torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]]), torch.rand(5, 2)
    with torch.no_grad():
        plain = model["experts"](x, index, weights)
        assert "experts" in lb.quantize_(model, "int8-weight-only").converted
        torch.testing.assert_close(model["experts"](x, index, weights), plain, rtol=0.05, atol=0.05)
        lb.dequantize_(model)
        assert [name for name, _ in model["experts"].named_parameters()] == ["up_proj", "down_proj"]
    report = lb.quantize_(experts(MuseSparkExperts, post_norm_eps=1e-6), "int8-weight-only")
    assert "normalizes what each expert computes" in report.left["experts"]


@torch.no_grad()
def test_tokens_go_to_their_experts():
    """Index E is padding; an expert that no token has is not called; weights are those of the place."""
    model = made("mixtral")
    plain = copy.deepcopy(model).model.layers[0].mlp.experts.double()
    lb.quantize_(model, "int8-weight-only")
    experts = model.model.layers[0].mlp.experts
    for stack, layers in ((plain.gate_up_proj, experts.gate_up), (plain.down_proj, experts.down)):
        stack.copy_(torch.stack([layer.weight.dequantize().double() for layer in layers]))
    experts.down[3].forward = None  # not called
    x, weights = torch.randn(7, 64), torch.rand(7, 2)
    index = torch.tensor([[0, 1], [1, 0], [2, 4], [4, 4], [2, 0], [0, 2], [1, 2]])
    expected = torch.zeros(7, 64, dtype=torch.float64)
    for token in range(7):
        for place in range(2):
            if (expert := int(index[token, place])) < 4:
                gate, up = (plain.gate_up_proj[expert] @ x[token].double()).chunk(2)
                y = plain.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)
                expected[token] += y * weights[token, place]
    torch.testing.assert_close(experts(x, index, weights).double(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(experts(x[:0], index[:0], weights[:0]), x[:0])


@each
def test_files_packing_and_training(name, tmp_path):
    from lowbit.integrations.transformers import LowbitConfig

    plain, model = made(name), made(name)
    lb.quantize_(model, "int8")
    with torch.no_grad():
        y = model(IDS).logits
        lb.save_model(model, tmp_path / "lowbit")
        assert torch.equal(lb.load_model(tmp_path / "lowbit")(IDS).logits, y)
        model.save_pretrained(tmp_path / "hf")
        assert torch.equal(type(plain).from_pretrained(tmp_path / "hf")(IDS).logits, y)
        plain.save_pretrained(tmp_path / "plain")
        loaded = type(plain).from_pretrained(tmp_path / "plain", quantization_config=LowbitConfig("int8"))
        assert torch.equal(loaded(IDS).logits, y) and type(loaded.model.layers[1].mlp.experts) is QuantExperts
        if name == "gpt-oss":  # whose files have the stacks, under the names of the model
            lb.quantize_files(tmp_path / "plain", "int8", tmp_path / "files", "nearest")
            assert torch.equal(lb.load_model(tmp_path / "files")(IDS).logits, y)
        lb.prepack_(model)
        assert torch.equal(model(IDS).logits, y)
    lb.qat.prepare_(plain, "int8")
    plain(IDS, labels=IDS).loss.backward()
    with torch.no_grad():
        prepared = plain.eval()(IDS).logits
        lb.qat.convert_(plain)
        assert torch.equal(plain(IDS).logits, prepared) and torch.equal(prepared, y)


def test_calibration_of_experts_that_no_token_reaches():
    model = made("qwen3")
    gate = model.model.layers[0].mlp.gate
    gate.weight.data.zero_()
    gate.weight.data[:2] = 1.0  # ties: only some experts are chosen
    with pytest.warns(UserWarning) as caught:
        found = lb.calibrate(model, "int4-weight-only:group32", [IDS], "gptq")
    told = [str(one.message) for one in caught if "no batch reaches" in str(one.message)]
    first = [message for message in told if "layers in model.layers.0.mlp.experts, such as" in message]
    assert len(first) == 1 and len(told) <= len(model.model.layers), "one for each layer, not for each matrix"
    assert int(first[0].split("reaches ")[1].split()[0]) >= 2, "which says of how many matrices"
    lb.quantize_(model, "int4-weight-only:group32", found)
    assert all(type(layer) is QuantLinear for layer in model.model.layers[0].mlp.experts.down)
    assert bool(model(IDS).logits.isfinite().all())


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name, recipe", [("mixtral", "int8"), ("qwen3", "nf4"), ("gpt-oss", "int8")])
@torch.no_grad()
def test_export_and_compile_without_a_break(name, recipe):
    model = made(name)
    lb.quantize_(model, recipe)
    model.config.use_cache = False
    model.model.layers = model.model.layers[:1]
    eager = model(IDS).logits
    exported = torch.export.export(model, (IDS,), strict=False).module()
    torch.testing.assert_close(exported(IDS).logits, eager, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(IDS).logits, eager, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_compiled_experts_leave_out_what_no_token_chooses():
    """Index E is padding there as well, and an expert that overflows for a token that it is not for changes nothing."""
    model = made("mixtral")
    lb.quantize_(model, "int8-weight-only")
    experts = model.model.layers[0].mlp.experts
    experts.down[3].scale.fill_(torch.tensor(3e38).view(torch.int32))
    x, weights = torch.randn(3, 64), torch.rand(3, 2)
    index = torch.tensor([[0, 1], [4, 4], [2, 4]])
    torch._dynamo.reset()
    compiled = torch.compile(experts, fullgraph=True, backend="eager")(x, index, weights)
    assert bool(compiled.isfinite().all()) and not bool(compiled[1].any())
    torch.testing.assert_close(compiled, experts(x, index, weights), rtol=1e-5, atol=1e-6)
