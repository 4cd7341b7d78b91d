"""transformers: quantized while loading, saved by ``save_pretrained``, loaded by ``from_pretrained``; KV caches."""

from __future__ import annotations

import copy
import importlib
import json
import pickle
import subprocess
import sys
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file

import lowbit as lb
from lowbit.convert.engine import quantized_layers
from lowbit.integrations.imports import when_imported
from lowbit.serialize.huggingface import placeholders

transformers = pytest.importorskip("transformers", minversion="5")

from lowbit.integrations.transformers import LowbitConfig, LowbitHfQuantizer  # noqa: E402

TOKENS = torch.arange(12).reshape(2, 6)
PIXELS = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {"vocab_size": 100, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, **SIZES}
LLAMA = {"num_key_value_heads": 2, **TEXT}

#: A class, what its config is made of, and what it is called with.
MODELS = {
    "llama": ("Llama", "ForCausalLM", LLAMA, {"input_ids": TOKENS}),
    "tied": ("Llama", "ForCausalLM", {**LLAMA, "tie_word_embeddings": True}, {"input_ids": TOKENS}),
    "gpt2": (
        "GPT2",
        "LMHeadModel",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2},
        {"input_ids": TOKENS},
    ),
    "bert": ("Bert", "ForMaskedLM", TEXT, {"input_ids": TOKENS}),
    "t5": (
        "T5",
        "ForConditionalGeneration",
        {"vocab_size": 100, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
        {"input_ids": TOKENS, "decoder_input_ids": TOKENS},
    ),
    "vit": ("ViT", "ForImageClassification", {"image_size": 32, "patch_size": 8, **SIZES}, {"pixel_values": PIXELS}),
    "mixtral": ("Mixtral", "ForCausalLM", {"num_local_experts": 4, **LLAMA}, {"input_ids": TOKENS}),
    "qwen3-moe": (
        "Qwen3Moe",
        "ForCausalLM",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16, **LLAMA},
        {"input_ids": TOKENS},
    ),
    "nemotron-h": (
        "NemotronH",
        "ForCausalLM",
        {"layers_block_type": ["moe", "attention"], "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
         "topk_group": 1, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "head_dim": 16,
         **LLAMA},
        {"input_ids": TOKENS},
    ),
}  # fmt: skip


def class_of(name: str) -> type:
    return getattr(transformers, MODELS[name][0] + MODELS[name][1])


def build(name: str, **changes: object) -> torch.nn.Module:
    """A tiny model in eval mode; the same weights each time."""
    config = getattr(transformers, f"{MODELS[name][0]}Config")(**{**MODELS[name][2], **changes})
    torch.manual_seed(0)
    return class_of(name)(config).eval()


@torch.no_grad()
def run(model: torch.nn.Module, name: str = "llama") -> torch.Tensor:
    return model(**MODELS[name][3]).logits


@pytest.fixture
def plain(tmp_path):
    """A directory with the tiny Llama in high precision."""
    build("llama").save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


@pytest.mark.parametrize("name", MODELS)
def test_loading_quantizes_as_quantize_does_and_saving_keeps_every_bit(tmp_path, name):
    build(name).save_pretrained(tmp_path / "plain")
    cls = class_of(name)
    expected = cls.from_pretrained(tmp_path / "plain")
    lb.quantize_(expected, "int8")
    loaded = cls.from_pretrained(tmp_path / "plain", quantization_config=LowbitConfig("int8"))
    assert quantized_layers(loaded).keys() == quantized_layers(expected).keys()
    assert not any(value.is_meta for value in loaded.state_dict().values())
    for model in (loaded, expected):
        assert torch.equal(run(model, name), run(expected, name))
        model.save_pretrained(tmp_path / "saved")
        again = cls.from_pretrained(tmp_path / "saved")
        assert torch.equal(run(again, name), run(expected, name))
        state = again.state_dict()
        assert all(torch.equal(value, state[key]) for key, value in expected.state_dict().items())


@pytest.mark.filterwarnings("ignore:lm_head shared its weight")
@pytest.mark.parametrize(
    "recipe, skip, tied, dtype",
    [
        ("W4A16", None, False, torch.bfloat16),
        ("nf4", (), True, torch.float32),
        ("nf4", (), False, torch.bfloat16),
        ("nvfp4", ("q_proj",), True, torch.bfloat16),
        ({"*": "int8", "*.down_proj": None, "*.q_proj": "mxfp4"}, None, True, torch.float32),
    ],
    ids=str,
)
def test_recipes_skip_and_dtypes(tmp_path, recipe, skip, tied, dtype):
    build("llama", tie_word_embeddings=tied).save_pretrained(tmp_path / "plain")
    told = {} if skip is None else {"skip": skip}
    cls = transformers.LlamaForCausalLM
    expected = cls.from_pretrained(tmp_path / "plain", dtype=dtype)
    lb.quantize_(expected, recipe, **told)
    loaded = cls.from_pretrained(tmp_path / "plain", dtype=dtype, quantization_config=LowbitConfig(recipe, **told))
    loaded.save_pretrained(tmp_path / "saved")
    again = cls.from_pretrained(tmp_path / "saved", dtype=dtype)
    for model in (loaded, again):
        found = {key: layer.recipe for key, layer in quantized_layers(model).items()}
        assert found == {key: layer.recipe for key, layer in quantized_layers(expected).items()}
        assert torch.equal(run(model), run(expected))
    assert again.config.tie_word_embeddings == (tied and "lm_head" not in found)
    assert all(layer.weight.dtype == dtype for layer in quantized_layers(again).values())


LOAD = """
import sys
import transformers
for directory, name in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        model = getattr(transformers, name).from_pretrained(directory)
        print(*sorted({type(m).__name__ for m in model.modules() if "Quant" in type(m).__name__}))
    except RuntimeError as error:
        print(error)
"""
DIRECTORIES = {
    "int8": ("llama", "int8"),
    "embedding": ("llama", {"*": None, "*embed_tokens": "int8-weight-only"}),
    "conv1d": ("gpt2", "W4A16"),
    "experts": ("mixtral", {"*": None, "*experts": "int8"}),
    "experts without a gate": ("nemotron-h", {"*": None, "*.experts": "int8"}),
}


def loaded_in_another_process(directories: dict[str, str], first: str) -> list[str]:
    """What a process prints of each directory: its quantized classes, or transformers' error."""
    given = [text for directory, name in directories.items() for text in (directory, class_of(name).__name__)]
    done = subprocess.run([sys.executable, "-c", first + LOAD, *given], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("got lowbit" in done.stderr) == (not first)
    return done.stdout.splitlines()


@pytest.mark.slow
def test_importing_lowbit_is_enough_and_without_it_directories_are_refused(tmp_path, plain):
    directories = {}
    for directory, (name, recipe) in DIRECTORIES.items():
        model = build(name)
        lb.quantize_(model, recipe)
        model.save_pretrained(tmp_path / directory)
        directories[str(tmp_path / directory)] = name
        again, told = class_of(name).from_pretrained(tmp_path / directory, output_loading_info=True)
        assert torch.equal(run(again, name), run(model, name))
        assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    lb.quantize_files(plain, "int8", tmp_path / "files")
    again, told = class_of("llama").from_pretrained(tmp_path / "files", output_loading_info=True)
    assert torch.equal(run(again), run(lb.load_model(tmp_path / "files"))) and not told["unexpected_keys"]
    directories[str(tmp_path / "files")] = "llama"

    refused = loaded_in_another_process(directories, "")
    assert len(refused) == 6 and all("ignore_mismatched_sizes" in line for line in refused)
    loaded = loaded_in_another_process(directories, "import lowbit")
    experts = "QuantExperts QuantLinear"
    assert loaded == ["QuantLinear", "QuantEmbedding QuantLinear", "QuantLinear", experts, experts, "QuantLinear"]


def test_something_is_done_when_a_module_is_imported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    name, done = "module_that_fails_at_first", []
    when_imported(name, done.append)
    with pytest.raises(ImportError):
        importlib.import_module(name)
    (tmp_path / f"{name}.py").write_text("raise RuntimeError")
    importlib.invalidate_caches()
    with pytest.raises(RuntimeError):
        importlib.import_module(name)
    assert not done
    (tmp_path / f"{name}.py").write_text("value = 'not the same size'")
    module = importlib.import_module(name)
    assert done == [module] and module.value
    monkeypatch.delitem(sys.modules, name)
    importlib.import_module(name)
    when_imported(name, done.append)
    assert len(done) == 2, "once, and at once"


def test_a_library_that_has_changed_is_still_imported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "changed_library.py").write_text("")
    when_imported("changed_library", lambda module: module.renamed)
    with pytest.warns(UserWarning, match=r"does not know this version of changed_library \(AttributeError: .*renamed"):
        importlib.import_module("changed_library")


def test_one_loader_of_several_modules_does_what_each_asks_for(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "several.zip", "w") as archive:
        for name in ("zipped_first", "zipped_second", "zipped_third"):
            archive.writestr(f"{name}.py", "")
    monkeypatch.syspath_prepend(tmp_path / "several.zip")
    done = []
    for name in ("zipped_first", "zipped_third"):
        when_imported(name, done.append)
    modules = [importlib.import_module(name) for name in ("zipped_first", "zipped_second", "zipped_third")]
    assert done == [modules[0], modules[2]]


def test_what_was_saved_before_loads_as_it_did(tmp_path):
    """Directories had no tensors by the names of plain weights."""
    model = build("llama")
    lb.quantize_(model, "int8")
    model.save_pretrained(tmp_path)
    edit(tmp_path, lambda t: [t.pop(name) for name in placeholders(model)])
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(run(again), run(model))


def test_no_more_than_a_layer_is_held_in_full_precision(plain, monkeypatch):
    """Every weight is quantized before the next one is read."""
    import lowbit.integrations.transformers as module

    held = []
    made = module.make_all

    def watched(chosen, make):
        result = made(chosen, make)
        names = {id(m) for m in watched.model.modules() if type(m) is torch.nn.Linear}
        held.append(sum(not p.is_meta for m in watched.model.modules() if id(m) in names for p in m.parameters()))
        return result

    init = module._Loading.__init__

    def remember(self, model, *rest):
        watched.model = model
        init(self, model, *rest)

    monkeypatch.setattr(module, "make_all", watched)
    monkeypatch.setattr(module._Loading, "__init__", remember)
    transformers.LlamaForCausalLM.from_pretrained(plain, quantization_config=LowbitConfig("int8"))
    assert len(held) == 15 and max(held) <= 2  # the layer at hand, and the output layer, which stays


def test_shards_base_models_generation_copies_and_packed_models(tmp_path):
    model = build("llama")
    lb.quantize_(model, "int8")
    expected = run(model)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(run(again), expected)
    base = transformers.AutoModel.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(base(TOKENS)[0], model.model(TOKENS)[0])
    base.save_pretrained(tmp_path / "base")
    headed = transformers.LlamaForSequenceClassification.from_pretrained(tmp_path / "base")
    assert all(torch.equal(v, headed.model.state_dict()[k]) for k, v in base.state_dict().items())
    wanted = model.generate(TOKENS, max_new_tokens=5, do_sample=False)
    assert torch.equal(again.generate(TOKENS, max_new_tokens=5, do_sample=False), wanted)
    for other in (copy.deepcopy(again), pickle.loads(pickle.dumps(again))):
        assert torch.equal(run(other), expected)
    lb.prepack_(again)
    again.save_pretrained(tmp_path / "packed")
    assert torch.equal(run(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "packed")), expected)
    lb.save_model(again, tmp_path / "lowbit")
    loaded = lb.load_model(tmp_path / "lowbit")
    assert torch.equal(run(loaded), expected)
    loaded.save_pretrained(tmp_path / "both")
    assert torch.equal(run(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "both")), expected)


def test_device_map(plain):
    pytest.importorskip("accelerate")
    told = {"quantization_config": LowbitConfig("int8"), "device_map": "cpu"}
    model = transformers.LlamaForCausalLM.from_pretrained(plain, **told)
    assert torch.equal(run(model), run(transformers.LlamaForCausalLM.from_pretrained(plain, **told)))
    with pytest.raises(ValueError, match="not offloaded to a disk"):
        transformers.LlamaForCausalLM.from_pretrained(plain, **{**told, "device_map": {"": "disk"}})


def test_a_conversion_says_what_the_model_is_now(tmp_path):
    config = transformers.LlamaConfig(**LLAMA)
    model, sibling = transformers.LlamaForCausalLM(config).eval(), transformers.LlamaForCausalLM(config)
    before = run(model)
    lb.quantize_(model, "fp8")
    assert isinstance(model.hf_quantizer, LowbitHfQuantizer)
    expected = run(model)
    model.save_pretrained(tmp_path / "quantized")
    assert model.config.quantization_config.layers.keys() == quantized_layers(model).keys()
    assert not hasattr(sibling.config, "quantization_config"), "the sibling has the config that the model had"
    model.config.use_cache = False
    assert model.model.config is model.config
    model.dequantize()
    assert not hasattr(model, "hf_quantizer") and not hasattr(model.config, "quantization_config")
    assert not torch.equal(run(model), before)
    model.save_pretrained(tmp_path / "plain")
    assert torch.equal(run(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "plain")), run(model))
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "quantized")
    assert torch.equal(run(again), expected)
    assert {p.dtype for p in again.dequantize(torch.bfloat16).parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("stored", ["F32", "Q8_0"])
def test_a_model_out_of_a_gguf_file_is_saved(tmp_path, stored):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    for key, value in {
        "context_length": 64, "embedding_length": 64, "block_count": 1, "feed_forward_length": 96, "head_count": 4,
        "head_count_kv": 2, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 1e4, "vocab_size": 100,
    }.items():  # fmt: skip
        getattr(writer, f"add_{key}")(value)
    shapes = {
        "token_embd": (100, 64), "output": (100, 64), "output_norm": (64,), "blk.0.attn_norm": (64,),
        "blk.0.ffn_norm": (64,), "blk.0.attn_q": (64, 64), "blk.0.attn_k": (32, 64), "blk.0.attn_v": (32, 64),
        "blk.0.attn_output": (64, 64), "blk.0.ffn_gate": (96, 64), "blk.0.ffn_up": (96, 64), "blk.0.ffn_down": (64, 96),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for name, shape in shapes.items():
        kind = gguf.GGMLQuantizationType[stored if len(shape) == 2 else "F32"]
        value = gguf.quants.quantize(0.1 * torch.randn(shape, generator=generator).numpy(), kind)
        writer.add_tensor(f"{name}.weight", value, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    lb.quantize_(model, "int8")
    assert type(model.hf_quantizer) is LowbitHfQuantizer
    model.save_pretrained(tmp_path / "saved")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert len(quantized_layers(again)) == 7 and torch.equal(run(again), run(model))


def test_weights_that_no_checkpoint_has_are_drawn_and_then_quantized(tmp_path):
    build("llama").model.save_pretrained(tmp_path)
    cls = transformers.LlamaForSequenceClassification
    torch.manual_seed(1)
    expected = cls.from_pretrained(tmp_path)
    recipes = {"*": "int8", "score": "int8"}
    lb.quantize_(expected, recipes)
    torch.manual_seed(1)
    loaded = cls.from_pretrained(tmp_path, quantization_config=LowbitConfig(recipes))
    assert "score" in quantized_layers(loaded)
    assert all(torch.equal(v, loaded.state_dict()[k]) for k, v in expected.state_dict().items())


def test_trainer_refuses_a_model_without_adapters_however_it_was_quantized(plain, tmp_path):
    pytest.importorskip("accelerate")
    loaded = transformers.LlamaForCausalLM.from_pretrained(plain, quantization_config=LowbitConfig("int8"))
    model = build("llama")
    lb.quantize_(model, "int8")
    args = transformers.TrainingArguments(str(tmp_path / "run"), report_to=[], use_cpu=True)
    errors = []
    for quantized in (loaded, model):
        with pytest.raises(ValueError, match="fine-tuning on purely quantized models") as raised:
            transformers.Trainer(quantized, args)
        errors.append(str(raised.value))
    assert errors[0] == errors[1]
    lb.dequantize_(model)
    transformers.Trainer(model, args)
    lb.qat.prepare_(model, "int8")
    transformers.Trainer(model, args)


# -- what is refused --------------------------------------------------------------------------------------------------
@pytest.fixture
def saved(tmp_path):
    """A directory with the quantized tiny Llama."""
    model = build("llama")
    lb.quantize_(model, "int8")
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def edit(directory, change):
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


LAYER = "model.layers.1.mlp.up_proj"


def test_a_damaged_checkpoint_is_refused(saved):
    load = transformers.LlamaForCausalLM.from_pretrained
    edit(saved, lambda t: t.update({f"{LAYER}._extra_state": torch.tensor(list(b"int8:col"), dtype=torch.uint8)}))
    with pytest.raises(ValueError, match="scheme 'int8:col', and this layer one in 'int8:row'"):
        load(saved)
    edit(saved, lambda t: t.pop(f"{LAYER}._extra_state"))
    edit(saved, lambda t: t.update({f"{LAYER}.codes": t[f"{LAYER}.codes"][:, :-1].contiguous()}))
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        load(saved)
    edit(saved, lambda t: t.pop(f"{LAYER}.codes"))
    with pytest.raises(ValueError, match=rf"lacks 1 tensors of quantized layers, such as {LAYER}.codes"):
        load(saved)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda q: q.pop("layers"), "is damaged"),
        (lambda q: q["layers"][0]["recipe"]["output"].update(b="int9"), "is damaged .*int9"),
        (lambda q: q["layers"][0].update(names=["a.b"]), "it has none of the layers"),
        (lambda q: q["layers"][0]["names"].append("model.norm"), "'model.norm' is a LlamaRMSNorm"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(saved, change, message):
    file = saved / "config.json"
    config = json.loads(file.read_text())
    change(config["quantization_config"])
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        transformers.LlamaForCausalLM.from_pretrained(saved)


def test_other_doors_say_which_one_it_is(saved, run):
    with pytest.raises(ValueError, match=r"import lowbit.integrations.transformers and call from_pretrained"):
        lb.load_model(saved)
    assert "already quantized" in run("quantize", str(saved), "int8", "--out", str(saved / "out"), code=1)


def test_configs_are_checked_when_they_are_made(plain):
    with pytest.raises(ValueError, match="expected a recipe"):
        LowbitConfig()
    with pytest.raises(ValueError, match="did you mean W4A16"):
        LowbitConfig("W4A17")
    config = LowbitConfig({"*": "nf4", "lm_head": None}, skip=("q_proj",))
    assert (
        json.loads(config.to_json_string())["recipe"]
        == lb.recipes.layer_recipes({"*": "nf4", "lm_head": None}).to_dict()
    )
    names = ["q_proj", "lm_head"]
    with pytest.raises(ValueError, match=r"LowbitConfig: the function .* cannot be written to a file"):
        LowbitConfig("int8", lambda module, path: True).to_dict()
    assert LowbitConfig("int8", modules_to_not_convert=names).to_dict() == LowbitConfig("int8", names).to_dict()
    assert LowbitConfig("int8", modules_to_not_convert=None).to_dict() == LowbitConfig("int8").to_dict()
    with pytest.raises(ValueError, match="pass only one of them"):
        LowbitConfig("int8", skip=names, modules_to_not_convert=names)
    with pytest.raises(ValueError, match="skip: the pattern 'nothing' matches no module"):
        told = LowbitConfig("int8", skip=("nothing",))
        transformers.LlamaForCausalLM.from_pretrained(plain, quantization_config=told)
    model = build("llama")
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = torch.nan
    model.save_pretrained(plain)
    with pytest.raises(RuntimeError, match="conversion of the weights"):
        transformers.LlamaForCausalLM.from_pretrained(plain, quantization_config=LowbitConfig("int8"))
