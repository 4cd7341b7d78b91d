"""``lowbit quantize``: any directory that transformers loads, and errors that say what to do."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

import lowbit as lb


@pytest.fixture
def llama(tmp_path):
    """A directory as transformers writes it, with files of a tokenizer, and the model."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=100, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    directory = tmp_path / "llama"
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer.model", "LICENSE"):
        (directory / name).write_text(f"this is {name}")
    for name in (".hidden.json", "pytorch_model.bin", "model.safetensors.index.json", "code.py"):
        (directory / name).write_text("not to be copied")
    (directory / "model.safetensors.index.json").unlink()
    return directory, model


@pytest.mark.parametrize("dtype", ["auto", "fp32", "fp16"])
def test_quantize_takes_a_directory_of_transformers(run, llama, dtype):
    directory, model = llama
    made = json.loads(run("quantize", str(directory), "int8", "--dtype", dtype, "--json"))
    assert made["out"] == f"{directory}-int8" and len(made["converted"]) == 14 and list(made["left"]) == ["lm_head"]
    assert made["bytes"] < made["bytes_before"]
    target = Path(made["out"])
    copied = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "LICENSE"}
    (weights,) = target.glob("weights-*.safetensors")
    assert {path.name for path in target.iterdir()} == {*copied, "lowbit.json", weights.name}
    assert all((target / name).read_bytes() == (directory / name).read_bytes() for name in copied)

    kind = {"auto": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}[dtype]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(kind)
    lb.quantize_(model, "int8")
    loaded, x = lb.load_model(target), torch.arange(6)[None]
    with torch.no_grad():
        assert torch.equal(loaded(x)[0], model(x)[0])
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight and loaded.lm_head.weight.dtype == kind


def test_quantize_prints_the_report_of_the_conversion(run, llama):
    directory, model = llama
    told = run("quantize", str(directory), "int8")
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    assert str(lb.quantize_(model, "int8")) in told and f"saved in {directory}-int8; load it with" in told
    assert "already quantized" in run("quantize", f"{directory}-int8", "nf4", code=1)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda d: os.truncate(d / "model.safetensors", 100), "transformers cannot load {d}: "),
        (lambda d: (d / "model.safetensors").unlink(), "transformers cannot load {d}: OSError"),
        (lambda d: (d / "config.json").write_text("{"), "{d}/config.json is damaged: it is not JSON"),
        (lambda d: (d / "config.json").write_text("[" * 100_000), "{d}/config.json is damaged: it is nested too"),
        (lambda d: (d / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 1000000000000}'),
         "transformers cannot load {d}: ValueError: 'num_hidden_layers' is 1000000000000, and may be 2048 at most"),
        (lambda d: (d / "config.json").write_text('{"model_type": "mine"}'), "transformers cannot load {d}: "),
        (lambda d: (d / "config.json").unlink(), "{d} is not a saved model"),
    ],
)  # fmt: skip
def test_directories_that_transformers_cannot_load_are_one_message(run, llama, spoil, told):
    directory, _ = llama
    spoil(directory)
    assert told.format(d=directory) in run("quantize", str(directory), "int8", code=1)
    assert not Path(f"{directory}-int8").exists()


def test_quantize_without_transformers_says_what_to_install(run, llama, monkeypatch):
    directory, _ = llama
    monkeypatch.setitem(sys.modules, "transformers", None)
    told = run("quantize", str(directory), "int8", code=1)
    assert f"loading {directory} needs transformers: {sys.executable} -m pip install 'transformers>=4.56'" in told


def test_a_quantized_directory_is_refused_and_configs_say_the_dtype(run, llama, tmp_path):
    run("quantize", str(llama[0]), "int8", "--out", str(tmp_path / "q"))
    assert lb.load_model(tmp_path / "q").config.dtype == torch.bfloat16
    told = run("quantize", str(tmp_path / "q"), "int8", "--out", str(tmp_path / "r"), code=1)
    assert "already quantized (int8); pass the original model" in told


@pytest.mark.filterwarnings("ignore:quantize_ converted", "ignore:lm_head shared its weight")
def test_a_tied_model_that_was_quantized_and_dequantized_loads_again(llama, tmp_path):
    model, x = llama[1], torch.arange(6)[None]
    lb.quantize_(model, "nf4", skip=())
    lb.dequantize_(model)
    lb.save_model(model, tmp_path / "again")
    loaded = lb.load_model(tmp_path / "again")
    assert not loaded.config.tie_word_embeddings and model.config.tie_word_embeddings
    assert torch.equal(loaded(x).logits, model(x).logits)


def test_a_model_in_training_is_saved_as_a_plain_one_with_a_warning(llama, tmp_path):
    model = llama[1]
    lb.train.prepare_(model, "fp8")
    with pytest.warns(UserWarning, match="train in low precision, and are saved as plain ones"):
        lb.save_model(model, tmp_path / "plain")
    assert type(lb.load_model(tmp_path / "plain").model.layers[0].mlp.up_proj) is torch.nn.Linear
    with pytest.raises(ValueError, match=r"being trained in low precision .*; call lowbit\.train\.convert_"):
        lb.quantize_(model, "int8")
