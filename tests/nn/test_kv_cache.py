"""Keys and values that are quantized as they are appended: the same codes however they come, and generation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lowbit as lb
from lowbit.demo.gpt import GPT, GPTConfig, KVCache, QuantizedKVCache, generate
from lowbit.nn.kv_cache import QuantizedRows

SCHEMES = ["int8:row", "int8:group32", "int4:group32", "uint4:group32:affine", "fp8_e4m3:row", "nf4", "mxfp4"]
each = pytest.mark.parametrize("scheme", SCHEMES)


@given(
    st.sampled_from(SCHEMES), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 70),
    st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_rows_are_those_of_one_quantization_however_they_come(scheme, lengths, width, dtype):
    x = torch.randn(2, 3, sum(lengths), width).to(dtype)
    rows, start = QuantizedRows(scheme), 0
    for length in lengths:
        rows.append(x[:, :, start : start + length])
        start += length
        assert rows.length == start
        expected = torch.stack([lb.quantize(one, scheme).dequantize() for one in x[:, :, :start].unbind(0)])
        assert rows.read().dtype == dtype and torch.equal(rows.read(), expected)
    least = sum(part.nbytes for part in lb.quantize(x, scheme).parts.values())
    assert least <= rows.nbytes <= 1.25 * least
    rows.select(torch.tensor([1, 0, 1]))
    assert torch.equal(rows.read(), expected[[1, 0, 1]])
    rows.crop(lengths[0])
    assert rows.length == lengths[0] and torch.equal(rows.read(), expected[[1, 0, 1], :, : lengths[0]])


def test_rows_that_come_one_by_one_are_seldom_copied():
    rows, places = QuantizedRows("int8:row"), set()
    for _ in range(600):
        rows.append(torch.randn(1, 2, 1, 8))
        places.add(rows._buffers["codes"].shape[0])
    assert rows.length == 600 and len(places) < 40, "each row was copied once for each that came later"


@pytest.mark.parametrize("scheme", [*SCHEMES, "nvfp4:global_row"])
def test_no_rows_are_rows_too(scheme):
    x = torch.randn(2, 3, 5, 40)
    rows = QuantizedRows(scheme)
    assert rows.shape == (0, 0) and rows.nbytes == 0
    with pytest.raises(RuntimeError, match="nothing was appended yet"):
        rows.read()
    for some in (x[:, :, :0], x, x[:, :, :0]):
        rows.append(some)
        assert rows.shape == rows.read().shape == (2, 3, rows.length, 40)
    assert torch.equal(rows.read(), lb.quantize(x, scheme).dequantize())
    rows.crop(0)
    assert rows.read().shape == (2, 3, 0, 40)
    for empty in ((0, 3, 5, 40), (0, 3, 0, 40), (2, 0, 5, 40)):
        rows = QuantizedRows(scheme)
        rows.append(torch.empty(empty))
        assert rows.read().shape == empty


@each
def test_rows_of_another_shape_are_refused(scheme):
    x = torch.randn(2, 3, 5, 40)
    rows = QuantizedRows(scheme)
    rows.append(x)
    before = rows.read()
    for other in ((2, 3, 1, 39), (2, 3, 1, 41), (1, 3, 1, 40), (2, 6, 1, 40), (6, 1, 40)):
        with pytest.raises(ValueError, match=r"expected rows like the existing \[2, 3, 5, 40\] except for S, got"):
            rows.append(torch.randn(other))
    with pytest.raises(ValueError, match=r"expected rows \[..., T, D\], got \[40\]"):
        QuantizedRows(scheme).append(torch.randn(40))
    assert torch.equal(rows.read(), before)


def test_schemes_whose_rows_share_scales_are_refused():
    for scheme in ("int8:tensor", "fp8_e4m3:block128x128", "nvfp4"):
        with pytest.raises(ValueError, match="expected a scheme in which each row has its own scales"):
            QuantizedRows(scheme)
    assert QuantizedRows("nvfp4:global_row").length == 0


@each
def test_the_demos_gpt_attends_to_what_is_stored(scheme):
    """The oracle: a plain cache whose new keys and values are rounded before they are stored."""
    config = GPTConfig(vocab=64, context=32, layers=2, heads=2, dim=64, hidden=64)
    model, tokens = GPT(config).eval(), torch.randint(64, (2, 20))

    class Rounded(KVCache):
        def extend(self, layer, k, v):
            k, v = (lb.quantize(one.contiguous(), scheme).dequantize() for one in (k, v))
            return super().extend(layer, k, v)

    one, other = QuantizedKVCache(config, scheme), Rounded(config, 2, dtype=torch.float32)
    for start, stop in ((0, 7), (7, 8), (8, 9), (9, 20)):
        with torch.no_grad():
            assert torch.equal(model(tokens[:, start:stop], one), model(tokens[:, start:stop], other))


def test_generation_with_a_fine_cache_is_that_without():
    model = GPT(GPTConfig(vocab=64, context=32, layers=2, heads=2, dim=64, hidden=64)).eval()
    prompt = torch.randint(64, (2, 5))
    plain = list(generate(model, prompt, 12, temperature=0))
    assert all(map(torch.equal, plain, generate(model, prompt, 12, temperature=0, kv_cache="int8:group32")))


# -- transformers -----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def llama():
    transformers = pytest.importorskip("transformers", minversion="5")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@each
@torch.no_grad()
def test_models_of_transformers(llama, scheme):
    from transformers import DynamicCache

    from lowbit.integrations.kv_cache import quantized_cache

    ids = torch.randint(3, 100, (2, 12))
    plain, cache, steps = DynamicCache(), quantized_cache(llama, scheme), quantized_cache(llama.config, scheme)
    llama(ids, past_key_values=plain)
    whole = llama(ids, past_key_values=cache).logits
    for i in range(12):
        last = llama(ids[:, i : i + 1], past_key_values=steps).logits
    assert cache.get_seq_length() == steps.get_seq_length() == 12
    first = plain.layers[0]  # the first layer's keys do not depend on what was rounded before
    assert torch.equal(cache.layers[0].keys.read(), lb.quantize(first.keys.contiguous(), scheme).dequantize())
    assert torch.equal(cache.layers[0].values.read(), lb.quantize(first.values.contiguous(), scheme).dequantize())
    torch.testing.assert_close(whole[:, -1:], last, rtol=1e-3, atol=1e-3)
    cache.crop(-4)
    assert cache.get_seq_length() == 8
    again = llama(ids[:, 8:], past_key_values=cache).logits
    torch.testing.assert_close(again, whole[:, 8:], rtol=1e-3, atol=1e-3)


def test_generation_greedy_and_by_beams(llama):
    from lowbit.integrations.kv_cache import quantized_cache

    ids = torch.randint(3, 100, (2, 6))
    for more in ({}, {"num_beams": 3}):
        options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids), **more}
        plain = llama.generate(ids, **options)
        found = llama.generate(ids, past_key_values=quantized_cache(llama, "int8:group32"), **options)
        assert torch.equal(plain, found)


#: Encoder-decoder models: a class, its config, and what the encoder is given.
PAIRS = {
    "whisper": (
        "Whisper",
        {
            "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2,
            "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8,
            "max_source_positions": 20, "max_target_positions": 32, "bos_token_id": 1, "eos_token_id": 2,
            "decoder_start_token_id": 3, "init_std": 0.3,
        },
        torch.linspace(-3, 3, 2 * 8 * 40).reshape(2, 8, 40).sin(),
    ),
    "t5": (
        "T5",
        {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2, "initializer_factor": 3.0,
         "decoder_start_token_id": 0},
        torch.arange(3, 17).reshape(2, 7),
    ),
}  # fmt: skip


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("scheme", ["int8:row", "nf4"])
@pytest.mark.parametrize("name", PAIRS)
def test_encoder_decoder_models(name, scheme, beams):
    """The oracle: transformers' own cache, given keys and values that are rounded before they are stored."""
    transformers = pytest.importorskip("transformers", minversion="5")
    from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache

    from lowbit.integrations.kv_cache import quantized_cache

    class Rounded(DynamicLayer):
        def update(self, keys, values, *args, **kwargs):
            return super().update(*(lb.quantize(one, scheme).dequantize() for one in (keys, values)), *args, **kwargs)

    kind, config, given = PAIRS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(vocab_size=100, pad_token_id=0, **config)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    options = {"max_new_tokens": 10, "do_sample": False, "num_beams": beams, "repetition_penalty": 3.0}
    rounded = EncoderDecoderCache(*(Cache(layer_class_to_replicate=Rounded) for _ in range(2)))
    expected = model.generate(given, past_key_values=rounded, **options)
    cache = quantized_cache(model, scheme)
    assert torch.equal(model.generate(given, past_key_values=cache, **options), expected)
    assert len(expected.unique()) > 2, "a model that always says the same shows nothing"
    for own, other in ((cache.self_attention_cache, rounded.self_attention_cache),
                       (cache.cross_attention_cache, rounded.cross_attention_cache)):  # fmt: skip
        for layer, plain in zip(own.layers, other.layers, strict=True):
            assert all(map(torch.equal, (rows.read() for rows in layer.rows), (plain.keys, plain.values)))


@torch.no_grad()
def test_a_decoder_that_is_given_an_encoders_states():
    transformers = pytest.importorskip("transformers", minversion="5")
    from lowbit.integrations.kv_cache import quantized_cache

    config = transformers.WhisperConfig(vocab_size=100, pad_token_id=0, **PAIRS["whisper"][1])
    torch.manual_seed(0)
    model = transformers.WhisperForCausalLM(config).eval()
    ids, states = torch.arange(3, 11)[None], torch.randn(1, 20, 32)
    whole = model(ids, encoder_outputs=(states,)).logits
    cache = quantized_cache(model, "int8:group32")
    steps = [
        model(ids[:, i : i + 1], encoder_outputs=(states,), past_key_values=cache, use_cache=True).logits
        for i in range(8)
    ]
    assert (torch.cat(steps, 1) - whole).norm() < 0.02 * whole.norm()
    assert cache.cross_attention_cache.get_seq_length() == 20


def test_models_with_other_layers_are_refused(llama):
    import copy

    from lowbit.integrations.kv_cache import quantized_cache

    config = copy.deepcopy(llama.config)
    config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="layers with sliding_attention"):
        quantized_cache(config)
