"""Adapters as techniques of plans: memory, base codes, files of peft, and errors."""

from __future__ import annotations

import copy
import gc
import json

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.integrations.peft import from_pretrained
from lowbit.memory import profile
from lowbit.nn.attention import SplitMultiheadAttention, split_attention_
from lowbit.plan import TrainingPlan
from lowbit.plan.adapters import adapters_in
from lowbit.plan.fitting import Run
from lowbit.plan.fitting.predict import Predictor
from lowbit.plan.settings import TrainingSettings
from lowbit.plan.subject import Subject

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

ROWS = torch.randint(512, (4, 64), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": ROWS, "labels": ROWS}

#: One technique per dimension, so that a plan takes few estimates.
ONE_EACH = ("fp32", "own attention", "own loss", "adamw", "everything kept", "memory", "activations in memory",
            "weights in memory", "whole batch")  # fmt: skip


def llama(**changes) -> nn.Module:
    torch.manual_seed(0)
    config = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6,
              "num_attention_heads": 4, "num_key_value_heads": 2} | changes  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).train()


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab=512, layers=3, heads=2, dim=64, hidden=128))


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(512, 64), nn.TransformerEncoder(layer, 2), nn.Linear(64, 512))


def of_encoder(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch.flatten())


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    config = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}  # fmt: skip
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**config)).train()


SUBJECTS = {"llama": (llama, BATCH, None), "gpt": (gpt, ROWS, None), "encoder": (encoder, ROWS, of_encoder)}


def held(run, batch) -> int:
    run.step(batch)
    gc.collect()
    usage = profile(run.model, batch, run.step)
    return usage.peak_bytes - usage.by_kind.get("other", 0)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize(
    "changes",
    [{}, {"base": "int8-weight-only"}, {"base": "nf4", "checkpoint": "block"}, {"precision": "bf16", "bits": 8},
     {"recipe": "fp8", "precision": "bf16"}, {"base": "nvfp4-weight-only", "precision": "bf16", "micro_batches": 2},
     {"base": "int4-weight-only:group32", "offload_states": True}],
    ids=str,
)  # fmt: skip
def test_a_step_holds_what_is_predicted(name, changes, tmp_path):
    make, batch, loss = SUBJECTS[name]
    settings = TrainingSettings(adapters=8, **changes)
    predicted = Predictor(Subject(make(), batch, loss, 8)).whole(settings).peak_bytes
    measured = held(Run(make(), settings, loss, tmp_path, {}), batch)
    assert 0.98 * measured <= predicted <= 1.02 * measured


@pytest.mark.parametrize("changes", [{"base": "nf4"}, {"base": "int8-weight-only", "checkpoint": "block"}], ids=str)
def test_a_mixture_on_a_quantized_base_holds_at_most_what_is_predicted(changes, tmp_path):
    """Tokens choose experts as they like; the prediction gives one of them all tokens."""
    settings = TrainingSettings(adapters=8, **changes)
    predicted = Predictor(Subject(mixtral(), BATCH, None, 8)).whole(settings).peak_bytes
    measured = held(Run(mixtral(), settings, None, tmp_path, {}), BATCH)
    assert 0.98 * measured <= predicted <= 1.1 * measured


@pytest.mark.parametrize("name", SUBJECTS)
def test_only_adapters_are_trained_and_the_base_keeps_its_bits(name, tmp_path):
    make, batch, loss = SUBJECTS[name]
    model = make()
    run = Run(model, TrainingSettings(adapters=4), loss, tmp_path, {"lr": 1e-2})
    trained = {path for path, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all("lora_" in path for path in trained)
    losses = [run.step(batch) for _ in range(8)]
    assert losses[-1] < losses[0] - 0.02
    plain = make()
    if name == "encoder":
        split_attention_(plain)
    expected = dict(plain.named_parameters())
    for path, value in model.named_parameters():
        if "lora_" not in path:
            assert torch.equal(value, expected[path.replace(".base_layer", "")])


def test_adapters_are_on_all_layers_but_the_head():
    for make, count in ((llama, 6 * 7), (gpt, 3 * 4), (encoder, 2 * 6)):
        model = make()
        Run(model, TrainingSettings(adapters=4), of_encoder, None, {})
        layers = [path for path, one in model.named_modules() if isinstance(one, peft.tuners.lora.LoraLayer)]
        assert len(layers) == count, layers
        assert not any("head" in path or path == "2" for path in layers)


def test_a_quantized_base_has_the_codes_of_quantize(tmp_path):
    run = Run(llama(), TrainingSettings(adapters=4, base="int8-weight-only"), None, tmp_path, {})
    alone = llama()
    lb.quantize_(alone, "int8-weight-only")
    expected, codes = alone.state_dict(), run.model.state_dict()
    before = {name: value.clone() for name, value in codes.items() if isinstance(value, torch.Tensor)}
    for name, value in expected.items():
        inner = name if name in codes else ".base_layer.".join(name.rsplit(".", 1))
        assert torch.equal(value, codes[inner]) if isinstance(value, torch.Tensor) else value == codes[inner]
    run.step(BATCH)
    changed = {name for name, value in before.items() if not torch.equal(value, run.model.state_dict()[name])}
    assert changed and all("lora_" in name for name in changed)


def test_layers_that_are_frozen_already_may_be_quantized(tmp_path):
    model = llama()
    for path, parameter in model.named_parameters():
        parameter.requires_grad_("layers.5" in path)
    plan = lb.fit(model, BATCH, "100%", require=("int8 base", *ONE_EACH))
    plan.apply_(model, directory=tmp_path).step(BATCH)
    quantized = {path for path, one in model.named_modules() if isinstance(one, lb.nn.QuantLinear)}
    assert len(quantized) == 5 * 7 and not any("layers.5" in path for path in quantized)


def test_a_plan_shows_full_training_and_is_saved(tmp_path):
    model = llama()
    config = peft.LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj", "v_proj"], use_dora=True)
    plan = lb.fit(model, BATCH, "100%", adapters=config, require=("nf4 base", *ONE_EACH))
    text = str(plan)
    assert "adapters of rank 8" in text and "frozen linear layers in nf4" in text
    assert plan.peak_bytes < 0.75 * plan.beside["training"].peak_bytes
    assert plan.beside["training"].settings.base is None
    plan.save(tmp_path / "plan.json")
    loaded = TrainingPlan.load(tmp_path / "plan.json")
    assert loaded.settings == plan.settings and json.loads(loaded.settings.adapters)["use_dora"]
    run = loaded.apply_(model, directory=tmp_path)
    run.step(BATCH)
    lora = [path for path, one in run.model.named_modules() if isinstance(one, peft.tuners.lora.LoraLayer)]
    assert len(lora) == 2 * 6


def test_adapters_are_chosen_only_if_asked_for():
    plan = lb.fit(gpt(), ROWS, "100%", require=ONE_EACH)
    assert plan.settings.adapters is None and plan.settings.base is None
    assert lb.fit(gpt(), ROWS, "100%", require=("adapters", "plain base", *ONE_EACH)).settings.adapters == 16


def test_files_of_adapters_load_in_peft(tmp_path):
    run = Run(llama(), TrainingSettings(adapters=4), None, tmp_path, {"lr": 1e-2})
    for _ in range(3):
        run.step(BATCH)
    run.save_adapters(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter").eval()
    expected = run.model.eval()(**BATCH).logits
    assert torch.equal(loaded(**BATCH).logits, expected)
    merged = loaded.merge_and_unload()(**BATCH).logits
    assert (merged - expected).norm() < 1e-5 * expected.norm()


class Written(nn.Module):
    """Attention without layers of its own, and a head called head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(512, 64), nn.Linear(64, 512)
        self.attention = nn.ModuleList(nn.MultiheadAttention(64, 4, batch_first=True) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.attention:
            x = x + layer(x, x, x, need_weights=False)[0]
        return self.head(x)


@pytest.mark.parametrize("base", [None, "nf4", "int8-weight-only"])
def test_adapters_of_attention_by_hand_load_with_all_projections(base, tmp_path):
    torch.manual_seed(0)
    model, plain = Written(), Written()
    plain.load_state_dict(model.state_dict())
    run = Run(model, TrainingSettings(adapters=4, base=base), of_encoder, tmp_path, {"lr": 1e-2})
    layers = {path for path, one in model.named_modules() if isinstance(one, peft.tuners.lora.LoraLayer)}
    assert layers == {f"attention.{i}.{name}_proj" for i in range(2) for name in ("q", "k", "v", "out")}
    for _ in range(3):
        run.step(ROWS)
    with pytest.warns(UserWarning, match=r"load them with lowbit\.integrations\.peft\.from_pretrained"):
        run.save_adapters(tmp_path / "adapter")
    if base is not None:
        lb.quantize_(plain, base)
    loaded = from_pretrained(plain, tmp_path / "adapter").eval()
    assert torch.equal(loaded(ROWS), model.eval()(ROWS))


def test_errors_say_what_to_do(tmp_path):
    with pytest.raises(TypeError, match=r"a rank such as 16, or a peft\.LoraConfig, got 'lora'"):
        lb.fit(gpt(), ROWS, "100%", adapters="lora")
    with pytest.raises(ValueError, match="at least 1, got 0"):
        lb.fit(gpt(), ROWS, "100%", adapters=0)
    with pytest.raises(ValueError, match="no linear layer is frozen; pass adapters="):
        lb.fit(gpt(), ROWS, "100%", require=("int8 base",))
    with pytest.raises(ValueError, match="already has adapters"):
        adapted = peft.get_peft_model(llama(), peft.LoraConfig(target_modules="all-linear"))
        lb.fit(adapted, BATCH, "100%", adapters=8)
    with pytest.raises(ValueError, match="no adapters of the plan"):
        Run(gpt(), TrainingSettings(), None, tmp_path, {}).save_adapters(tmp_path / "adapter")
    with pytest.raises(TypeError, match="cannot store this LoraConfig"):
        adapters_in(peft.LoraConfig(eva_config=peft.EvaConfig(), init_lora_weights="eva"), "fit")


def test_split_attention_computes_what_torch_does():
    torch.manual_seed(0)
    for options in ({}, {"bias": False}, {"kdim": 16, "vdim": 24}, {"add_bias_kv": True, "add_zero_attn": True}):
        layer = nn.MultiheadAttention(32, 4, batch_first=True, **options)
        inputs = [torch.randn(2, 5, width) for width in (32, layer.kdim, layer.vdim)]
        for got, expected in zip(SplitMultiheadAttention.of(layer)(*inputs), layer(*inputs), strict=True):
            assert torch.allclose(got, expected, atol=1e-6)


def test_estimating_does_not_change_the_model():
    model = llama()
    before = copy.deepcopy(model.state_dict())
    Predictor(Subject(model, BATCH, None, 4)).whole(TrainingSettings(adapters=4, base="nf4"))
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
