"""``lowbit generate``: text and speed of a saved language model, next to ``generate`` of transformers."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch

import lowbit as lb
from lowbit.interop import export

transformers = pytest.importorskip("transformers", minversion="5")
tokenizers = pytest.importorskip("tokenizers")

PROMPT = "the other path"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Directories of one model: ``llama``, ``chat`` with a chat template, and ``int8``, which lowbit saved."""
    root = tmp_path_factory.mktemp("generate")
    alphabet = ["<e>", *"abcdefghijklmnopqrstuvwxyz[]", "\u0120", "th"]  # whose texts are the same piece by piece
    vocabulary = {text: index for index, text in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[("t", "h")]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(alphabet), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>")
    for name in ("llama", "int8", "chat"):
        if name == "chat":
            words.chat_template = (
                "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
                "{% if add_generation_prompt %}[assistant]{% endif %}"
            )
        words.save_pretrained(root / name)
        if name != "int8":
            model.save_pretrained(root / name)
    lb.quantize_(model, "int8")
    lb.save_model(model, root / "int8")
    return root


def expected(model, tokenizer, text: str, count: int = 12, **options) -> str:
    asked = tokenizer(text, return_tensors="pt")
    made = model.eval().generate(**asked, max_new_tokens=count, do_sample=False, **options)
    return tokenizer.decode(made[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)


def told(run, *arguments: str) -> dict:
    return json.loads(run("generate", *arguments, "--tokens", "12", "--json"))


def test_text_is_that_of_transformers_and_the_speed_counts_its_tokens(root, run):
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "llama")
    wanted = expected(transformers.AutoModelForCausalLM.from_pretrained(root / "llama"), tokenizer, PROMPT)
    printed = run("generate", str(root / "llama"), PROMPT, "--tokens", "12")
    assert printed == wanted + "\n"
    record = told(run, str(root / "llama"), PROMPT)
    assert record["text"] == wanted and record["prompt"] == len(PROMPT) - PROMPT.count("th") and record["tokens"] == 12
    assert record["tokens_per_second"] == pytest.approx(11 / record["token_seconds"])


def test_quantized_directories_recipes_and_files_of_others(root, run, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "llama")
    wanted = expected(lb.load_model(root / "int8"), tokenizer, PROMPT)
    assert told(run, str(root / "int8"), PROMPT)["text"] == wanted
    assert told(run, str(root / "llama"), PROMPT, "--recipe", "int8")["text"] == wanted
    pytest.importorskip("gguf")
    model = transformers.LlamaForCausalLM.from_pretrained(root / "llama").eval()
    lb.quantize_(model, "q8_0")
    export(model, "gguf", tmp_path / "model.gguf", root / "llama")
    there = lb.interop.load_model(tmp_path / "model.gguf").eval()
    assert told(run, str(tmp_path / "model.gguf"), PROMPT, "--plain")["text"] == expected(there, tokenizer, PROMPT)


def test_the_chat_template_is_used_unless_plain(root, run):
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "chat")
    model = transformers.AutoModelForCausalLM.from_pretrained(root / "chat")
    text = f"[system]short[user]{PROMPT}[assistant]"
    assert told(run, str(root / "chat"), PROMPT, "--system", "short")["text"] == expected(model, tokenizer, text)
    assert told(run, str(root / "chat"), PROMPT, "--plain")["text"] == expected(model, tokenizer, PROMPT)


def test_seeds_choose_the_sample(root, run):
    texts = [
        told(run, str(root / "llama"), PROMPT, "--temperature", "2", "--seed", seed)["text"] for seed in ("1", "1", "2")
    ]
    assert texts[0] == texts[1] != texts[2]


def test_the_prompt_comes_from_standard_input(root, run, monkeypatch):
    wanted = told(run, str(root / "llama"), PROMPT)["text"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    assert told(run, str(root / "llama"))["text"] == wanted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama", ""], "there is no prompt"),
        (["llama", "x", "--system", "short"], "the tokenizer has none"),
        (["chat", "x", "--system", "short", "--plain"], "leave out --plain, or --system"),
        (["int8", "x", "--recipe", "int8"], "already quantized (int8)"),
        (["llama", "x", "--recipe", "int9"], "unknown recipe 'int9'"),
    ],
)
def test_mistakes_say_what_to_do(root, run, arguments, message):
    assert message in run("generate", str(root / arguments[0]), *arguments[1:], code=1)


def test_other_models_are_refused(run, tmp_path):
    bert = transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    transformers.BertModel(bert).save_pretrained(tmp_path)
    assert "BertModel, which has no generate()" in run("generate", str(tmp_path), "x", code=1)
