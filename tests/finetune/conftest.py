"""A tiny Hugging Face model with a tokenizer, and a text of which only some tokens are trained on."""

import json

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5")
tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    """A Hugging Face model with a byte-level tokenizer, and a text next to it."""
    path = tmp_path_factory.mktemp("model")
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({letter: i for i, letter in enumerate(["<e>", *alphabet])}, [])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>").save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    rows = [{"prompt": f"{a} plus {b} is ", "completion": f"{a + b}."} for a in range(12) for b in range(12)]
    (path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return path
