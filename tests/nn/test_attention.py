"""QuantMultiheadAttention against nn.MultiheadAttention on the decoded weights: results, and what both refuse."""

from __future__ import annotations

import copy

import pytest
import torch
from support.models import decoded_
from torch import nn

import lowbit as lb
from lowbit.models.names import matches
from lowbit.nn import QuantMultiheadAttention


def attention(**options) -> tuple[nn.Module, nn.Module]:
    model = nn.Sequential(nn.MultiheadAttention(16, 4, **options))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.3)
    oracle = decoded_(copy.deepcopy(model))
    lb.quantize_(model, "int8-weight-only")
    assert type(model[0]) is QuantMultiheadAttention
    return model[0], oracle[0]


@pytest.mark.parametrize("mode", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize(
    "options",
    [{}, {"batch_first": True}, {"bias": False}, {"kdim": 6, "vdim": 10}, {"add_bias_kv": True, "add_zero_attn": True}],
    ids=str,
)
def test_attention(options, mode):
    made, oracle = (m.train(mode) for m in attention(**options))
    B, T, S = 3, 5, 7
    query, key, value = torch.randn(B, T, 16), torch.randn(B, S, made.kdim), torch.randn(B, S, made.vdim)
    if not made.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    hidden = torch.arange(S) >= torch.tensor([7, 5, 3])[:, None]
    causal = torch.ones(T, S, dtype=torch.bool).triu(1)
    masks = [
        {}, {"key_padding_mask": hidden}, {"attn_mask": causal}, {"attn_mask": causal, "is_causal": True},
        {"attn_mask": causal, "key_padding_mask": hidden}, {"attn_mask": torch.randn(T, S)},
        {"attn_mask": torch.randn(B * 4, T, S), "key_padding_mask": torch.randn(B, S)},
    ]  # fmt: skip
    if made.bias_k is not None:
        # torch takes the hint for the mask here, and so hides the added positions; without weights only.
        masks = [mask for mask in masks if "is_causal" not in mask]
    for mask in masks:
        for weights in ({"need_weights": False}, {"need_weights": True}, {"average_attn_weights": False}):
            y, w = made(query, key, value, **mask, **weights)
            expected, expected_w = oracle(query, key, value, **mask, **weights)
            torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
            assert (w is None) == (expected_w is None)
            if w is not None:
                torch.testing.assert_close(w, expected_w, rtol=1e-4, atol=1e-5)
    one = (query[0], key[0], value[0]) if made.batch_first else (query[:, 0], key[:, 0], value[:, 0])
    for mask in ({}, {"key_padding_mask": hidden[1], "attn_mask": causal}):
        for a, b in zip(made(*one, **mask), oracle(*one, **mask), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_attention_refuses_what_it_cannot_do():
    made, _ = attention()
    x = torch.randn(3, 2, 16)
    with pytest.raises(ValueError, match="give the mask too"):
        made(x, x, x, is_causal=True)
    nested = torch.nested.nested_tensor([torch.randn(2, 16), torch.randn(3, 16)])
    with pytest.raises(TypeError, match="nested"):
        made(nested, nested, nested)


@pytest.mark.parametrize("skip", [(), ("self_attn",), ("linear*",)], ids=str)
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_transformer_encoder_never_takes_the_fused_kernel(skip):
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    oracle = copy.deepcopy(model)
    for name, module in oracle.named_modules():
        if not any(matches(pattern, name, module) for pattern in skip) and not name.endswith("out_proj"):
            if isinstance(module, nn.Linear):
                decoded_(module)
            elif isinstance(module, nn.MultiheadAttention):
                decoded_(module)
    report = lb.quantize_(model, "int8-weight-only", skip=skip)
    assert len(report.converted) == 6 - 2 * len(skip) * (2 if skip == ("linear*",) else 1)
    x, hidden = torch.randn(3, 6, 16), torch.arange(6) >= torch.tensor([6, 4, 1])[:, None]
    shown = ~hidden[..., None]
    with torch.no_grad():
        for mask in ({}, {"src_key_padding_mask": hidden}):
            y, expected = model(x, **mask), oracle(x, **mask)
            keep = shown if mask else torch.ones_like(shown)
            torch.testing.assert_close(y * keep, expected * keep, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch_first", ""])
@pytest.mark.parametrize("sizes", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)], ids=str)
def test_empty_batches_and_lengths(sizes, batch_first):
    made, oracle = attention(batch_first=batch_first)
    B, T, S = sizes
    query, key = torch.randn(B, T, 16), torch.randn(B, S, 16)
    query, key = (query, key) if batch_first else (query.transpose(0, 1), key.transpose(0, 1))
    masks = {"key_padding_mask": torch.zeros(B, S), "attn_mask": torch.zeros(B * 4, T, S)}
    for mask in ({}, masks):
        y, w = made(query, key, key, **mask)
        expected, expected_w = oracle(query, key, key, **mask)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
        assert w.shape == expected_w.shape
        assert made(query, key, key, need_weights=False, **mask)[0].shape == expected.shape


BOOL = {"dtype": torch.bool}
B, T, S = 3, 5, 7


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch_first", ""])
@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        ({"key_padding_mask": torch.zeros(B, S, dtype=torch.uint8)}, TypeError, "must be bool.*uint8; if its ones"),
        ({"key_padding_mask": torch.zeros(B, S, dtype=torch.long)}, TypeError, "must be bool.*int64"),
        ({"key_padding_mask": torch.zeros(S, B, **BOOL)}, ValueError, r"\[batch, keys\] = \[3, 7\], got \[7, 3\]"),
        ({"key_padding_mask": torch.zeros(1, S, **BOOL)}, ValueError, r"got \[1, 7\]; masks are not broadcast"),
        ({"key_padding_mask": torch.zeros(S, **BOOL)}, ValueError, r"got \[7\]"),
        ({"attn_mask": torch.zeros(T, S, dtype=torch.int32)}, TypeError, "attn_mask must be bool.*int32"),
        ({"attn_mask": torch.zeros(B, T, S)}, ValueError, r"\[5, 7\] or \[batch \* heads, .* = \[12, 5, 7\], got \[3,"),
        ({"attn_mask": torch.zeros(S, T)}, ValueError, r"got \[7, 5\]"),
        ({"attn_mask": torch.zeros(1, S)}, ValueError, r"got \[1, 7\]"),
        ({"attn_mask": torch.zeros(T, 1)}, ValueError, r"got \[5, 1\]"),
        ({"attn_mask": torch.zeros(S)}, ValueError, r"got \[7\]"),
        ({"attn_mask": torch.zeros(1, T, S)}, ValueError, r"got \[1, 5, 7\]"),
        ({"attn_mask": torch.zeros(B, 4, T, S)}, ValueError, r"got \[3, 4, 5, 7\]"),
    ],
    ids=lambda v: ",".join(f"{k}{list(t.shape)}" for k, t in v.items()) if isinstance(v, dict) else None,
)
def test_masks_that_torch_refuses_are_refused(mask, error, message, batch_first):
    made, oracle = attention(batch_first=batch_first)
    query, key = (x if batch_first else x.transpose(0, 1) for x in (torch.randn(B, T, 16), torch.randn(B, S, 16)))
    for need_weights in (True, False):
        with pytest.raises((AssertionError, RuntimeError)):
            oracle(query, key, key, need_weights=need_weights, **mask)
        with pytest.raises(error, match=message):
            made(query, key, key, need_weights=need_weights, **mask)


@pytest.mark.parametrize(
    "mask", [{"key_padding_mask": (1, S)}, {"attn_mask": (12, T, S)}, {"attn_mask": (T,)}], ids=str
)
def test_masks_of_one_sequence(mask):
    made, oracle = attention()
    query, key = torch.randn(T, 16), torch.randn(S, 16)
    masks = {name: torch.zeros(shape) for name, shape in mask.items()}
    with pytest.raises((AssertionError, RuntimeError)):
        oracle(query, key, key, **masks)
    with pytest.raises(ValueError, match=r"must have shape \[(keys|queries, keys)\] = .* masks are not broadcast"):
        made(query, key, key, **masks)
    each_head = torch.randn(4, T, S)
    for a, b in zip(
        made(query, key, key, attn_mask=each_head), oracle(query, key, key, attn_mask=each_head), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("query", "key", "value", "message"),
    [
        ((1, T, 16), (B, S, 16), (B, S, 16), "axis 0, the batch .*got query .1, 5, 16.*expand them"),
        ((B, T, 16), (1, S, 16), (1, S, 16), "axis 0, the batch"),
        ((B, T, 16), (B, S, 16), (B, T, 16), "same positions"),
        ((T, 16), (S, 16), (T, 16), "same positions; got"),
        ((B, T, 16), (S, 16), (S, 16), "all 2-D .one sequence.; got"),
        ((2, B, T, 16), (2, B, S, 16), (2, B, S, 16), "must be all 3-D"),
        ((16,), (16,), (16,), "must be all 3-D"),
        ((B, T, 8), (B, S, 16), (B, S, 16), "the widths 16, 16, 16; got query .3, 5, 8."),
    ],
    ids=str,
)
def test_inputs_that_torch_refuses_are_refused(query, key, value, message):
    made, oracle = attention(batch_first=True)
    given = [torch.randn(shape) for shape in (query, key, value)]
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        oracle(*given)
    with pytest.raises(ValueError, match=message):
        made(*given)


def test_checks_compile_for_any_batch():
    made, _ = attention(batch_first=True)
    compiled = torch.compile(made, backend="eager", fullgraph=True, dynamic=True)
    for batch in (2, 5):
        x, mask = torch.randn(batch, T, 16), torch.arange(T) >= torch.full((batch, 1), 3)
        torch.testing.assert_close(compiled(x, x, x, key_padding_mask=mask)[0], made(x, x, x, key_padding_mask=mask)[0])
