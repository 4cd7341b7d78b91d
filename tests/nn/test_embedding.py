"""Lookup from quantized tables: the bits of the decoded table, one table for an embedding and a tied head, files."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.convert import model_bytes
from lowbit.nn import QuantEmbedding

RECIPES = [
    "int8", "int8-weight-only", "int4-weight-only:group32", "uint4-weight-only:group32", "nf4", "fp8-weight-only",
    "mxfp4-weight-only", "nvfp4-weight-only", "nvfp4-weight-only", "int3-weight-only:group32", "fp8-tensor",
    "int4-weight-only:group32:hadamard", "fp8_e4m3-weight-only:tensor",
]  # fmt: skip


class Tied(nn.Module):
    """A language model whose output layer has the embedding's weight."""

    def __init__(self, words: int = 50, width: int = 72) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(words, width, padding_idx=0)
        self.mlp = nn.Linear(width, width)
        self.lm_head = nn.Linear(width, words, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(torch.tanh(self.mlp(self.embed_tokens(ids))))


def both(recipe: str) -> dict[str, str]:
    return {"*": "int8", "embed_tokens": recipe, "lm_head": recipe}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_the_bits_of_the_decoded_table(recipe, dtype):
    model = nn.Sequential(nn.Embedding(37, 70)).to(dtype)
    exact = model[0].weight.detach().clone()
    lb.quantize_(model, {"0": recipe}, method="nearest")
    layer = model[0]
    assert type(layer) is QuantEmbedding
    rotation = lb.recipe(recipe).rotation
    made = exact.float() if rotation is None else lb.hadamard(exact.float(), rotation)
    table = lb.quantize(made if rotation else exact, lb.recipe(recipe).weight)
    assert torch.equal(layer.weight.codes, table.codes)
    decoded = table.dequantize(torch.float32 if rotation else dtype)
    decoded = decoded if rotation is None else lb.hadamard(decoded, rotation).to(dtype)
    for ids in (torch.arange(37), torch.randint(37, (3, 4, 5)), torch.tensor(36), torch.zeros(2, 0, dtype=torch.int64)):
        y = layer(ids)
        assert y.dtype == dtype and torch.equal(y, decoded[ids])
        assert torch.equal(layer(ids.int()), y)
    lb.dequantize_(model)
    assert type(model[0]) is nn.Embedding and torch.equal(model[0].weight, decoded)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("recipe", ["int8", "int4-weight-only:group32", "nvfp4-weight-only"])
def test_a_tied_head_has_the_same_bytes(recipe, backend, tmp_path):
    model = Tied()
    plain = copy.deepcopy(model)
    lb.quantize_(model, both(recipe))
    ids = torch.randint(50, (2, 9))
    assert model.embed_tokens.linear.codes is model.lm_head.codes
    one = copy.deepcopy(plain)
    lb.quantize_(one, {"mlp": "int8", "lm_head": recipe})
    table = model_bytes(nn.ModuleList([plain.embed_tokens]))
    assert model_bytes(model) == model_bytes(one) - table
    y = model(ids)
    hand = torch.tanh(model.mlp(model.embed_tokens.weight.dequantize()[ids]))
    assert torch.equal(y, model.lm_head(hand))

    again = copy.deepcopy(model)
    assert again.embed_tokens.linear.codes is again.lm_head.codes and torch.equal(again(ids), y)
    lb.save_model(model, tmp_path / "saved")
    loaded = lb.load_model(tmp_path / "saved", copy.deepcopy(plain))
    assert torch.equal(loaded(ids), y)
    assert model_bytes(loaded) == model_bytes(model)
    assert torch.equal(torch.compile(model, backend=backend, fullgraph=True)(ids), y) or recipe != "int8"
    assert torch.equal(torch.export.export(model.embed_tokens, (ids,)).module()(ids), model.embed_tokens(ids))
    lb.prepack_(model)
    assert torch.equal(model(ids), y)
    lb.unprepack_(model)
    lb.dequantize_(model)
    assert model.embed_tokens.weight is model.lm_head.weight


def test_embeddings_are_quantized_only_where_a_recipe_names_them():
    for recipe in ("int8", {"*": "int8"}):
        model = Tied()
        lb.quantize_(model, recipe)
        assert type(model.embed_tokens) is nn.Embedding
    model = Tied()
    lb.quantize_(model, {"*embed*": "int8-weight-only"})
    assert type(model.embed_tokens) is QuantEmbedding and type(model.lm_head) is nn.Linear


def test_what_is_refused():
    layer = nn.Sequential(nn.Embedding(10, 128))
    for recipe in ("fp8-block",):
        with pytest.raises(ValueError, match="expected a scheme in which each row of an embedding has its own scales"):
            lb.quantize_(copy.deepcopy(layer), {"0": recipe})
    with pytest.raises(ValueError, match="an embedding is quantized by rounding alone"):
        lb.qat.prepare_(copy.deepcopy(layer), {"0": "int8"})
    report = lb.quantize_(nn.Sequential(nn.Embedding(10, 16, max_norm=1.0), nn.Linear(16, 16)), {"*": "int8"})
    assert [row.name for row in report.layers] == ["1"]
    lb.quantize_(layer, {"0": "int8"})
    for wrong in (10, -1):
        with pytest.raises(IndexError):
            layer(torch.tensor([wrong]))
    with pytest.raises(TypeError, match=r"ids must be integers, got torch.float32"):
        layer(torch.zeros(2))
