"""Models of transformers: saved beside their own files, and loaded without a model, on meta, or without weights."""

from __future__ import annotations

import json

import pytest
import torch

import lowbit as lb
from lowbit import files
from lowbit.serialize import empty_weights, huggingface

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = torch.arange(12).reshape(2, 6)


def build(name: str) -> torch.nn.Module:
    """A tiny model of that class, in eval mode; the same weights each time."""
    sizes = {**SIZES, "vocab_size": 100, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
    config = {
        "LlamaForCausalLM": lambda: transformers.LlamaConfig(num_key_value_heads=2, tie_word_embeddings=True, **sizes),
        "BertModel": lambda: transformers.BertConfig(**sizes),
        "GPT2LMHeadModel": lambda: transformers.GPT2Config(
            n_embd=64, n_layer=2, n_head=4, vocab_size=100, n_positions=64, bos_token_id=1, eos_token_id=2
        ),
    }[name]()
    torch.manual_seed(0)
    return getattr(transformers, name)(config).eval()


@torch.no_grad()
def run(model: torch.nn.Module) -> torch.Tensor:
    return model(TOKENS)[0]


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertModel", "GPT2LMHeadModel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_quantized_model_loads_without_a_model_and_on_meta(tmp_path, name, dtype):
    model = build(name).to(dtype)
    lb.quantize_(model, "int8")
    lb.save_model(model, tmp_path)
    expected = run(model)
    with torch.device("meta"):
        meta = build(name).to(dtype)
    with empty_weights():
        empty = build(name).to(dtype)
    assert all(p.is_meta for p in empty.parameters() if p.dim() > 1)
    for other in (None, meta, empty, build(name).to(dtype)):
        loaded = lb.load_model(tmp_path, other)
        assert type(loaded) is type(model) and not loaded.training
        assert torch.equal(run(loaded), expected)
        assert not any(value.is_meta for value in (*loaded.parameters(), *loaded.buffers()))
    tied = model.get_output_embeddings()
    if tied is not None:
        assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight


def test_a_directory_keeps_the_files_that_transformers_wrote(tmp_path):
    model = build("LlamaForCausalLM")
    model.config.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    lb.quantize_(model, "nf4")
    for _ in range(2):
        lb.save_model(model, tmp_path)
        assert torch.equal(run(lb.load_model(tmp_path)), run(model))
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert len(list(tmp_path.iterdir())) == len(before) + 2


def test_a_loaded_model_generates_as_the_saved_one(tmp_path):
    model = build("LlamaForCausalLM")
    model.generation_config.max_new_tokens, model.generation_config.eos_token_id = 7, [2, 96]
    lb.quantize_(model, "int8")
    lb.save_model(model, tmp_path)
    loaded = lb.load_model(tmp_path)
    assert loaded.generation_config.eos_token_id == [2, 96]
    expected = model.generate(TOKENS, do_sample=False)
    assert torch.equal(loaded.generate(TOKENS, do_sample=False), expected) and expected.shape[1] <= 6 + 7


def test_infinity_in_a_config(tmp_path):
    """transformers writes it as an object, because JSON has no word for it."""
    pytest.importorskip("transformers", minversion="5")
    sizes = {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "num_hidden_layers": 1}
    config = transformers.Mamba2Config(vocab_size=100, bos_token_id=1, eos_token_id=2, pad_token_id=0, **sizes)
    assert config.time_step_limit[1] == float("inf")
    model = transformers.Mamba2ForCausalLM(config).eval()
    lb.quantize_(model, "int8")
    lb.save_model(model, tmp_path)
    loaded = lb.load_model(tmp_path)
    assert list(loaded.config.time_step_limit) == list(config.time_step_limit)
    assert torch.equal(run(loaded), run(model))


def test_a_directory_that_was_not_quantized_says_how(tmp_path):
    build("BertModel").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"a Hugging Face model that is not quantized; .*lowbit quantize"):
        lb.load_model(tmp_path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"architecture": "pipeline"}, "has no model 'pipeline'"),
        ({"architecture": "os"}, "has no model 'os'"),
        ({"architecture": 3}, "has no model 3"),
        ({"model_type": "mine"}, "has no model_type 'mine'"),
        ({"num_hidden_layers": 10**12}, "'num_hidden_layers' is 1000000000000, and may be 2048"),
        ({"num_hidden_layers": 2000}, "more than .* tensors, many more than the weights hold"),
        ({"max_position_embeddings": 10**12}, "'max_position_embeddings' is 1000000000000, and may be 2147483648"),
        ({"hidden_size": -1}, "cannot build 'transformers'"),
        ({"hidden_act": "boom"}, "cannot build 'transformers'"),
        ({"hidden_size": 128}, "does not fit this model:\n  shapes differ"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_strangers_description_of_a_model_is_refused(tmp_path, change, told):
    model = build("BertModel")
    lb.quantize_(model, "int8")
    lb.save_model(model, tmp_path)
    config = files.read_json(tmp_path / "lowbit.json")
    described = config["model"]["config"]
    for key, value in change.items():
        (described if key in described else described["config"])[key] = value
    files.write_json(tmp_path / "lowbit.json", config)
    with pytest.raises(ValueError, match=told) as caught:
        lb.load_model(tmp_path)
    assert str(tmp_path / "lowbit.json") in str(caught.value)


#: Parts of a config that would make transformers or timm fetch something, and what is said of each.
ELSEWHERE = [
    *(({key: "owner/repo"}, "may be one of eager, sdpa, .*choose kernels after loading") for key in (
        "attn_implementation", "_attn_implementation", "_attn_implementation_internal", "experts_implementation",
        "_experts_implementation",
    )),
    ({"_attn_implementation": "flash_attention_2"}, "need a package. Remove the entry, .*set_attn_implementation"),
    ({"_experts_implementation": "sonicmoe"}, "other kernels download code"),
    ({"attn_implementation": {"": "sdpa", "text_config": "paged|owner/repo@v1:f"}}, "may be one of eager"),
    ({"text_config": {"_attn_implementation": "owner/repo"}}, "'text_config._attn_implementation' is 'owner/repo'"),
    ({"layers": [{"attn_implementation": "owner/repo"}]}, "'layers.attn_implementation' is 'owner/repo'"),
    ({"text_config": {"auto_map": {"AutoModel": "owner/repo--m.M"}}}, "names code in other files; lowbit runs none"),
    ({"backbone": "hf-hub:owner/repo"}, "names a model in another place"),
    ({"model_args": {"checkpoint_path": "/tmp/x.pth"}}, "names a file of weights"),
    ({"configuration_files": ["config.4.0.0.json"]}, "names other configs"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "told"), ELSEWHERE, ids=[json.dumps(change) for change, _ in ELSEWHERE])
def test_a_config_that_fetches_code_is_refused_before_a_model_is_built(tmp_path, monkeypatch, change, told):
    model = build("BertModel")
    model.save_pretrained(tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    (tmp_path / "plain" / "config.json").write_text(json.dumps({**config, **change}))
    lb.quantize_(model, "int8")
    lb.save_model(model, tmp_path / "saved")
    saved = files.read_json(tmp_path / "saved" / "lowbit.json")
    saved["model"]["config"]["config"].update(change)
    files.write_json(tmp_path / "saved" / "lowbit.json", saved)

    def built(*_, **__):
        raise AssertionError("a model was built")

    monkeypatch.setattr(transformers.PreTrainedModel, "__init__", built)
    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", built)
    for load in (
        lambda: lb.load_model(tmp_path / "saved"),
        lambda: huggingface.from_directory(tmp_path / "plain"),
        lambda: lb.quantize_files(tmp_path / "plain", "int8", tmp_path / "out"),
    ):
        with pytest.raises(ValueError, match=told):
            load()


def test_code_that_a_directory_brings_never_runs(tmp_path):
    model = build("BertModel")
    model.save_pretrained(tmp_path / "plain")
    (tmp_path / "plain" / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    maps = {"AutoConfig": "mine.C", "AutoModel": "mine.M", "AutoModelForMaskedLM": "owner/repo--mine.M"}
    change = {
        "auto_map": maps,
        "trust_remote_code": True,
        "cache_implementation": "hybrid",
        "_attn_implementation": "eager",
    }
    expected = model.state_dict()
    for architectures in (["BertModel"], ["Other"]):
        (tmp_path / "plain" / "config.json").write_text(
            json.dumps({**config, **change, "architectures": architectures})
        )
        found = huggingface.from_directory(tmp_path / "plain").state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert huggingface.without_weights(tmp_path / "plain").state_dict().keys() == expected.keys()
    other = {"model_type": "mine", "architectures": ["Other"]}
    (tmp_path / "plain" / "config.json").write_text(json.dumps({**config, **change, **other}))
    with pytest.raises(ValueError, match="transformers cannot"):
        huggingface.from_directory(tmp_path / "plain")

    lb.quantize_(model, "int8")
    lb.save_model(model, tmp_path / "saved")
    saved = files.read_json(tmp_path / "saved" / "lowbit.json")
    saved["model"]["config"]["config"].update(change)
    files.write_json(tmp_path / "saved" / "lowbit.json", saved)
    again = lb.load_model(tmp_path / "saved")
    assert all(torch.equal(again.state_dict()[name], part) for name, part in model.state_dict().items())
    assert not (tmp_path / "ran").exists()


def test_a_class_of_ones_own_is_loaded_into_a_model(tmp_path):
    class Mine(transformers.BertModel):
        pass

    model = Mine(build("BertModel").config).eval()
    lb.quantize_(model, "int8")
    lb.save_model(model, tmp_path)
    with pytest.raises(ValueError, match="does not say how to build its model"):
        lb.load_model(tmp_path)
    with torch.device("meta"):
        skeleton = Mine(model.config).eval()
    with pytest.raises(ValueError, match=r"position_ids.*empty_weights"):
        lb.load_model(tmp_path, skeleton)
    with empty_weights():
        skeleton = Mine(model.config).eval()
    assert torch.equal(run(lb.load_model(tmp_path, skeleton)), run(model))


def test_without_transformers_the_error_says_what_to_install(tmp_path, monkeypatch):
    model = build("BertModel")
    lb.quantize_(model, "int8")
    lb.save_model(model, tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ImportError, match=r"a 'BertModel' needs transformers: .* -m pip install 'transformers>=4.56'"):
        lb.load_model(tmp_path)


def test_weights_are_allocated_nowhere_and_buffers_are_computed():
    with empty_weights(most=8):
        table = torch.nn.Module()
        table.register_buffer("table", torch.arange(4.0), persistent=False)
        layer = torch.nn.Linear(10**6, 10**6)
    assert layer.weight.is_meta and torch.equal(table.table, torch.arange(4.0))
    assert not torch.empty(1).is_meta and not torch.nn.Linear(2, 2).weight.is_meta
    with empty_weights(), pytest.raises(ValueError, match="more than 3 tensors"), empty_weights(most=3):
        torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
    with empty_weights():
        assert not torch.empty(1, device="cpu").is_meta
