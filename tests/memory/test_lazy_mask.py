"""Packed rows in models of transformers: no mask, and the results and gradients of their eager attention."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.tiled import lazy_mask
from lowbit.tiled.documents import documents_of
from lowbit.tiled.lazy_mask import LazyMask
from lowbit.tiled.model_attention import _attend, attends_without_scores

transformers = pytest.importorskip("transformers", minversion="5")
masking = pytest.importorskip("transformers.masking_utils")

SHAPE = {"vocab_size": 128, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 96}  # fmt: skip
WINDOWED = {**SHAPE, "head_dim": 12, "sliding_window": 9}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE, head_dim=12)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**WINDOWED)),
    "gemma2, soft cap": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**WINDOWED, attn_logit_softcapping=0.5)
    ),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**WINDOWED, layer_types=["sliding_attention", "full_attention"])
    ),
}  # fmt: skip
#: Models whose masks are of another kind, or that change the mask they get.
DENSE = {
    "chunks": lambda: transformers.Llama4ForCausalLM(
        transformers.Llama4TextConfig(
            **SHAPE, head_dim=12, intermediate_size_mlp=96, num_local_experts=2, attention_chunk_size=8
        )
    ),
    "changes masks": lambda: transformers.DogeForCausalLM(transformers.DogeConfig(**SHAPE)),
}


def packed(*rows: list[int], seed: int = 0) -> dict[str, Tensor]:
    """A batch of rows of documents with the given lengths."""
    places = torch.stack([torch.cat([torch.arange(size) for size in row]) for row in rows])
    ids = torch.randint(1, 128, places.shape, generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids, "position_ids": places}


BATCH = packed([15, 24, 1], [7, 33])


def made(make) -> nn.Module:
    torch.manual_seed(0)
    model = make().double().eval()
    model.config.use_cache = False
    model.set_attn_implementation("eager")
    return model


def trained(model: nn.Module) -> tuple[Tensor, list[Tensor | None]]:
    """A loss in fp64 and its gradients."""
    logits = model(input_ids=BATCH["input_ids"], position_ids=BATCH["position_ids"]).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), BATCH["labels"].flatten().roll(-1))
    model.zero_grad()
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


@pytest.fixture
def never_dense(monkeypatch):
    """No values of a mask are computed."""
    assert lazy_mask._is_as_known(masking)

    def refuse(mask: LazyMask) -> Tensor:
        raise AssertionError("the values of a mask were computed")

    monkeypatch.setattr(LazyMask, "dense", refuse)


def same(model: nn.Module, expected: tuple[Tensor, list[Tensor | None]]) -> None:
    loss, gradients = trained(model)
    torch.testing.assert_close(loss, expected[0], rtol=1e-6, atol=0)  # their softmax is in fp32
    for mine, theirs in zip(gradients, expected[1], strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_of_packed_rows_without_a_mask(name, never_dense):
    model = made(MODELS[name])
    expected = trained(model)
    lb.memory.attention_(model)
    same(model, expected)


@pytest.mark.parametrize("name", DENSE)
def test_other_masks_are_computed(name):
    model = made(DENSE[name])
    expected = trained(model)
    lb.memory.attention_(model)
    same(model, expected)


@pytest.mark.parametrize("way", [
    "block", "save_matmuls", "reentrant", "offload", pytest.param("compiled", marks=pytest.mark.slow)
])  # fmt: skip
def test_packed_rows_combine_with(way):
    model = made(MODELS["gemma3"])
    lb.memory.attention_(model)
    expected = trained(model)
    if way == "reentrant":
        model.train().gradient_checkpointing_enable({"use_reentrant": True})
    elif way == "offload":
        with lb.memory.offload_activations():
            return same(model, expected)
    elif way == "compiled":
        model = torch.compile(model, backend="eager")
    else:
        lb.memory.checkpoint_(model, way)
    same(model, expected)


@pytest.mark.parametrize("window", [None, 3])
def test_a_lazy_mask_has_the_values_of_transformers_and_is_a_mask_to_every_operation(window):
    ids = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 1, 2, 2, 2, 2]])
    places = torch.tensor([[0, 1, 2, 3, 0, 1], [0, 0, 0, 1, 2, 3]])
    inner = masking.causal_mask_function if window is None else masking.sliding_window_causal_mask_function(window)
    options = {
        "batch_size": 2, "q_length": 6, "kv_length": 6,
        "mask_function": masking.and_masks(
            masking.remap_positions_for_packed_sequence(inner, places), masking.packed_sequence_mask_function(ids)
        ),
    }  # fmt: skip
    mask, dense = lazy_mask.lazy_mask(masking, options), masking.sdpa_mask(**options, allow_is_causal_skip=False)
    assert mask.shape == dense.shape and mask.dtype == torch.bool and mask.is_contiguous()
    assert isinstance(mask.detach(), LazyMask)
    scores = torch.randn(2, 3, 6, 6)
    assert torch.equal(scores.masked_fill(~mask, -1), scores.masked_fill(~dense, -1))
    assert torch.equal(mask[:, :, 1:3, :2], dense[:, :, 1:3, :2]) and torch.equal(mask & dense, dense)
    for change in (
        {"kv_length": 7}, {"q_offset": 1}, {"attention_mask": torch.ones(2, 6)}, {"use_vmap": True},
        {"mask_function": masking.and_masks(options["mask_function"], lambda b, h, q, k: k >= 0)},
        {"mask_function": masking.or_masks(options["mask_function"], masking.causal_mask_function)},
        {"mask_function": masking.packed_sequence_mask_function(ids)},
    ):  # fmt: skip
        assert lazy_mask.lazy_mask(masking, options | change) is None


@pytest.mark.parametrize("option", ["s_aux", "position_bias"])
def test_sinks_and_position_biases_get_the_values(option):
    documents = documents_of(torch.tensor([[0, 0, 0, 1, 1], [0, 0, 1, 1, 1]]))
    mask = LazyMask.of(documents, 2, 2)
    q, k, v = (torch.randn(2, 4, 5, 8) for _ in range(3))
    options = {option: torch.randn(4) if option == "s_aux" else torch.randn(1, 4, 5, 5)}
    out, expected = (_attend(nn.Module(), q, k, v, given, **options)[0] for given in (mask, mask.dense()))
    assert torch.equal(out, expected)


def test_memory_is_linear_and_an_estimate_is_what_a_step_takes(never_dense):
    model = MODELS["llama"]().train()
    model.config.use_cache = False
    batch, longer = packed([500] * 4 + [48]), packed([500] * 8 + [96])
    with_mask = lb.estimate(model, longer, optimizer=None).peak_bytes
    lb.memory.attention_(model)
    estimated = lb.estimate(model, longer, optimizer=None).peak_bytes
    assert with_mask - estimated > 4 * 4096**2
    assert estimated < 2.1 * lb.estimate(model, batch, optimizer=None).peak_bytes
    found = lb.memory.profile(model, longer, lambda batch: model(**batch).loss.backward())
    assert estimated == pytest.approx(found.peak_bytes - found.by_kind.get("other", 0), rel=0.02)


def test_plans_know_which_rows_need_a_mask():
    model = MODELS["llama"]()
    model.config.use_cache = False
    plain = {name: BATCH[name] for name in ("input_ids", "labels")}
    assert attends_without_scores(model, BATCH) and not attends_without_scores(model, plain)
    changed = copy.deepcopy(model)
    lb.memory.attention_(changed)
    assert not attends_without_scores(changed, BATCH)
