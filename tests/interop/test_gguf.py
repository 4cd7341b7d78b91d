"""GGUF files: block types, models of each architecture, tokenizers, damaged files; llama.cpp and gguf are oracles."""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.llama_cpp import embedding, log_probabilities
from torch import nn

import lowbit as lb
from lowbit.convert.engine import quantized_layers
from lowbit.interop import FORMATS
from lowbit.interop.gguf import ARCHITECTURES, BLOCK_TYPES, tokenizer
from lowbit.interop.gguf.blocks import from_blocks, to_blocks
from lowbit.interop.gguf.header import Header
from lowbit.recipes import RECIPES

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers", minversion="5")

SIZES = {
    "vocab_size": 320, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
EXPERTS = {"head_dim": 64, "moe_intermediate_size": 256, "norm_topk_prob": True}
IDS = [3, 17, 200, 45, 99, 12, 7, 64, 250, 31]


QUANTIZED = ["llama", "qwen3", "gemma3", "phi3", "gpt2", "mixtral, all experts", "qwen3, all experts"]
WEIGHT_ONLY = [name for name, row in RECIPES.items() if row.input is None and not FORMATS["gguf"].refuses(row)]


def _causal(name: str, **more: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        config = getattr(transformers, f"{name}Config" if name != "Gemma3" else "Gemma3TextConfig")(**SIZES | more)
        return getattr(transformers, f"{name}ForCausalLM")(config)

    return make


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=320, n_positions=256, n_embd=256, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": _causal("Llama"),
    "llama tied, with biases": _causal("Llama", tie_word_embeddings=True, attention_bias=True),
    "llama 3.1": _causal("Llama", rope_parameters=LLAMA3),
    "mistral": _causal("Mistral", sliding_window=None, head_dim=32),
    "qwen2": _causal("Qwen2"),
    "qwen3": _causal("Qwen3", head_dim=128),
    "gemma3": _causal("Gemma3", num_hidden_layers=6, head_dim=64, query_pre_attn_scalar=64, sliding_window=64),
    "phi3": _causal("Phi3", pad_token_id=0, eos_token_id=0, bos_token_id=0),
    "gpt2": _gpt2,
    "mixtral": _causal("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen3 with experts": _causal("Qwen3Moe", num_experts=4, num_experts_per_tok=2, **EXPERTS),
    # Rounding changes no choice of experts if all are chosen.
    "mixtral, all experts": _causal("Mixtral", num_local_experts=4, num_experts_per_tok=4),
    "qwen3, all experts": _causal("Qwen3Moe", num_experts=4, num_experts_per_tok=4, **EXPERTS),
}


def model_of(name: str) -> nn.Module:
    """A model whose vectors are not constant, and whose logits differ by token."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter)) if parameter.ndim == 1 else parameter.mul_(3)
    return model


@torch.no_grad()
def next_token(model: nn.Module) -> torch.Tensor:
    return model(torch.tensor([IDS])).logits[0, -1].log_softmax(-1)


# -- block types -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", BLOCK_TYPES)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**20))
def test_blocks_decode_to_the_same_bits_in_gguf_and_keep_their_codes(name: str, rows: int, blocks: int, seed: int):
    row, kind = BLOCK_TYPES[name], getattr(gguf.GGMLQuantizationType, name)
    assert (row.size, row.nbytes) == gguf.GGML_QUANT_SIZES[kind]
    x = torch.randn(rows, blocks * row.size, generator=torch.Generator().manual_seed(seed))
    q = lb.quantize(x * 10.0 ** torch.arange(rows)[:, None], row.scheme)
    raw = to_blocks(q)
    decoded = torch.from_numpy(gguf.dequantize(raw.numpy(), kind))
    scale = q.global_scale if row.scheme.global_scale == "tensor" else None
    if scale is None:
        assert torch.equal(decoded, q.dequantize(torch.float32))
    else:  # two factors in another order
        torch.testing.assert_close(decoded * scale, q.dequantize(torch.float32), rtol=1.2e-7, atol=0)
    back = from_blocks(row, raw, x.shape[1], torch.float32, scale)
    assert back.scheme == q.scheme and all(torch.equal(back.parts[part], value) for part, value in q.parts.items())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_written_or_refused_with_one_that_works(recipe: str):
    refusal = FORMATS["gguf"].refuses(RECIPES[recipe])
    if refusal is not None:
        assert refusal.why and FORMATS["gguf"].refuses(lb.recipe(refusal.nearest)) is None


# -- models ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", MODELS)
def test_a_float_model_comes_back_with_the_same_bits(name: str, words: Any, tmp_path):
    model = model_of(name)
    lb.export(model, "gguf", tmp_path / "model.gguf", words)
    back = lb.load_model(tmp_path / "model.gguf", prepack=True)  # it has nothing to pack
    assert (name == "mistral") == (type(back) is not type(model))  # it is a Llama there
    assert torch.equal(next_token(back), next_token(model))


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3 with experts"])
@pytest.mark.parametrize("recipe", ["q4_0", "q4_1", "q5_0", "q8_0", "mxfp4-weight-only", "nvfp4-weight-only", "q4_k"])
def test_a_quantized_model_comes_back_with_its_codes(name: str, recipe: str, tmp_path):
    model = model_of(name)
    if recipe.startswith("nvfp4") and not ARCHITECTURES[model.config.model_type].scales:
        pytest.skip("llama.cpp does not run it")
    lb.quantize_(model, recipe)
    lb.export(model, "gguf", tmp_path / "model.gguf")
    state, back = model.state_dict(), lb.load_model(tmp_path / "model.gguf")
    assert {layer.recipe for layer in quantized_layers(back).values()} == {lb.recipe(recipe)}
    assert back.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in back.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_the_same(name: str, words: Any, tmp_path):
    pytest.importorskip("xllamacpp")
    model, path = model_of(name), tmp_path / "model.gguf"
    lb.export(model, "gguf", path, words)
    expected = next_token(model)
    result = log_probabilities(path, IDS, 320)
    assert len(result) >= 256
    assert max(abs(value - float(expected[number])) for number, value in result.items()) < 0.01  # its cache is fp16


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "gemma3", "phi3", "gpt2", "mixtral, all experts", "qwen3, all experts"]
)
@pytest.mark.parametrize("recipe", WEIGHT_ONLY)
def test_llama_cpp_runs_quantized_models_as_their_values(name: str, recipe: str, words: Any, tmp_path):
    """Next to a file of the same values in fp32; inside, llama.cpp rounds inputs to 8 bits."""
    pytest.importorskip("xllamacpp")
    model = model_of(name)
    lb.quantize_(model, recipe, skip=() if name == "llama" else ("lm_head",))
    if recipe == "nvfp4-weight-only" and not ARCHITECTURES[model.config.model_type].scales:
        with pytest.raises(ValueError, match=r"does not multiply.*mxfp4-weight-only"):
            lb.export(model, "gguf", tmp_path / "quantized.gguf", words)
        return
    lb.export(model, "gguf", tmp_path / "quantized.gguf", words)
    plain = copy.deepcopy(model)
    lb.dequantize_(plain)
    lb.export(plain, "gguf", tmp_path / "plain.gguf", words)
    result, expected = (log_probabilities(tmp_path / f"{kind}.gguf", IDS, 320) for kind in ("quantized", "plain"))
    differences = [abs(result[number] - expected[number]) for number in result.keys() & expected.keys()]
    assert len(differences) >= 256 and max(differences) < 0.4 and sum(differences) / len(differences) < 0.08


@pytest.mark.slow
def test_llama_cpp_computes_the_embeddings_of_bert(tmp_path):
    pytest.importorskip("xllamacpp")
    tokenizers = pytest.importorskip("tokenizers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256
    )
    model = transformers.BertModel(config).eval()
    texts = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh", *(f"##{letter}" for letter in "abcdefgh")]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordPiece(vocab={text: index for index, text in enumerate(texts)}, unk_token="[UNK]")
    )
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    lb.quantize_(model, "q8_0")
    lb.export(model, "gguf", tmp_path / "bert.gguf", words)
    with torch.no_grad():
        expected = nn.functional.normalize(model(torch.tensor([[2, 5, 15, 7, 3]])).last_hidden_state[0].mean(0), dim=0)
    result = torch.tensor(embedding(tmp_path / "bert.gguf", [2, 5, 15, 7, 3]))
    assert float(result @ expected) > 0.999


def test_a_model_in_mixed_precision_is_written_with_its_weights(tmp_path):
    model = model_of("qwen3")
    lb.export(model, "gguf", tmp_path / "plain.gguf")
    lb.train.mixed_(model, "bf16")
    lb.export(model, "gguf", tmp_path / "mixed.gguf")
    assert (tmp_path / "mixed.gguf").read_bytes() == (tmp_path / "plain.gguf").read_bytes()


# -- errors ------------------------------------------------------------------------------------------------------------
def test_models_that_the_format_cannot_express_are_refused(words: Any, tmp_path):
    path = tmp_path / "model.gguf"
    with pytest.raises(ValueError, match="transformers"):
        lb.export(nn.Sequential(nn.Linear(8, 8)), "gguf", path)
    model = model_of("llama")
    with pytest.raises(ValueError, match=r"unknown format 'ggml'.*gguf"):
        lb.export(model, "ggml", path)
    lb.quantize_(model, "nf4")
    with pytest.raises(ValueError, match=r"q_proj.*nf4.*no block type.*'q4_0'"):
        lb.export(model, "gguf", path)
    narrow = _causal("Llama", hidden_size=192, num_attention_heads=3, num_key_value_heads=3)()
    lb.quantize_(narrow, "q4_k")
    with pytest.raises(ValueError, match=r"192 columns.*multiples of 256.*'q8_0'"):
        lb.export(narrow, "gguf", path)
    with pytest.raises(ValueError, match="128 rows"):
        lb.export(_causal("Llama", vocab_size=128)(), "gguf", path, words)
    linear = transformers.OPTForCausalLM(transformers.OPTConfig(hidden_size=24, ffn_dim=24, num_hidden_layers=1))
    with pytest.raises(ValueError, match=r"'opt'.*register_architecture"):
        lb.export(linear, "gguf", path)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def file_bytes(words: Any, tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "model.gguf"
    model = _causal("Llama", hidden_size=32, intermediate_size=32, num_attention_heads=1, num_key_value_heads=1)()
    lb.quantize_(model, "q4_0")
    lb.export(model, "gguf", path, words)
    return path.read_bytes()


@given(st.data())
def test_a_damaged_file_raises_an_error_with_its_name(file_bytes: bytes, tmp_path_factory, data: st.DataObject):
    path = tmp_path_factory.mktemp("damaged") / "damaged.gguf"
    header = file_bytes.index(b"blk.0.attn_q") + 400
    damaged = bytearray(file_bytes)
    if data.draw(st.booleans()):
        damaged = damaged[: data.draw(st.integers(0, len(damaged) - 1))]
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            damaged[data.draw(st.integers(0, header))] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged)
    try:
        lb.load_model(path)
    except (ValueError, FileNotFoundError) as error:
        assert "damaged.gguf" in str(error)


# -- tokenizers --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text", ["the year 2026", "déjà vu\n\n  x = 1\t", "日本語 🙂"])
def test_a_tokenizer_comes_back(words: Any, text: str, tmp_path):
    lb.export(model_of("llama"), "gguf", tmp_path / "model.gguf", words)
    back = tokenizer(tmp_path / "model.gguf")
    assert back(text)["input_ids"] == words(text)["input_ids"] and back.decode(back(text)["input_ids"]) == text


@pytest.mark.parametrize("text", ["Bad cab, 2026!", "déjà abba", "日 a"])
def test_a_word_piece_tokenizer_comes_back(text: str, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    texts = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcde,!2", *(f"##{letter}" for letter in "abcde026")]
    vocabulary = {text: index for index, text in enumerate(texts)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    backend.normalizer = tokenizers.normalizers.BertNormalizer()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    lb.export(transformers.BertModel(config), "gguf", tmp_path / "bert.gguf", words)
    back = tokenizer(tmp_path / "bert.gguf")
    assert back(text)["input_ids"] == words(text)["input_ids"] and back.pad_token_id == 0


def test_rotary_frequencies_of_a_bf16_model_stay_in_fp32(tmp_path):
    model = model_of("llama").bfloat16()
    expected = transformers.LlamaForCausalLM(model.config).model.rotary_emb.inv_freq
    lb.export(model, "gguf", tmp_path / "model.gguf")
    back = lb.load_model(tmp_path / "model.gguf")
    assert back.config.dtype == back.lm_head.weight.dtype == torch.bfloat16
    assert back.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(back.model.rotary_emb.inv_freq, expected)


# -- models that llama.cpp would compute otherwise ---------------------------------------------------------------------
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_causal("Llama", hidden_act="gelu"), "hidden_act is 'gelu'"),
        (_causal("Mistral", sliding_window=64), "sliding_window is 64"),
        (_causal("Qwen3Moe", num_experts=4, num_experts_per_tok=2, **EXPERTS | {"norm_topk_prob": False}), "norm_topk"),
        (_causal("Gemma3", num_hidden_layers=6, head_dim=64, query_pre_attn_scalar=168), "computes with 64"),
        (_causal("Phi3", pad_token_id=0, rope_parameters={"rope_theta": 1e4, "rope_type": "default",
                                                         "partial_rotary_factor": 0.5}), "partial_rotary_factor 0.5"),
        (lambda: transformers.LlamaModel(transformers.LlamaConfig(**SIZES)), "a LlamaModel"),
    ],
)  # fmt: skip
def test_models_that_llama_cpp_would_compute_otherwise_are_refused(make, reason, tmp_path):
    with pytest.raises(ValueError, match=reason):
        lb.export(make(), "gguf", tmp_path / "model.gguf")


def test_experts_in_nvfp4_whose_matmul_would_need_two_scales_are_decoded(tmp_path):
    model, path = model_of("mixtral"), tmp_path / "model.gguf"
    lb.quantize_(model, "nvfp4-weight-only")
    lb.export(model, "gguf", path)
    stored = Header(path).tensors["blk.0.ffn_up_exps.scale"]
    with path.open("r+b") as file:
        file.seek(stored.start)
        scales = struct.unpack("<4f", file.read(16))
        file.seek(stored.start)
        file.write(struct.pack("<4f", *(2 * scale for scale in scales)))
    back = lb.load_model(path)
    decoded, kept = (back.get_submodule(f"model.layers.{index}.mlp.experts") for index in (0, 1))
    assert "" in quantized_layers(kept) and not quantized_layers(decoded)
    lb.dequantize_(model)
    expected = model.get_submodule("model.layers.0.mlp.experts")
    gate, up = expected.gate_up_proj.detach().chunk(2, 1)
    assert torch.equal(decoded.gate_up_proj, torch.cat((gate, 2 * up), 1))
    assert torch.equal(decoded.down_proj, expected.down_proj)


def test_added_tokens_without_a_row_are_left_out_and_special_tokens_come_from_the_config(words: Any, tmp_path):
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(words.backend_tokenizer.to_str())
    backend.add_tokens([f"<image{index}>" for index in range(100)])
    lb.export(_causal("Llama", eos_token_id=7, bos_token_id=5)(), "gguf", tmp_path / "model.gguf", backend)
    back = tokenizer(tmp_path / "model.gguf")
    assert len(back) == 320 and (back.eos_token_id, back.bos_token_id) == (7, 5)
