"""torch.export of models that are trained for quantization: the program computes the bits of the eager model."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

import lowbit as lb


class Embedded(nn.Module):
    """Token ids, a tied output layer without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(50, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.middle(self.embed(ids)).relu())
        return logits


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(32, 4, batch_first=True), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.attention(x, x, x, need_weights=False)[0])
        return y


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.Flatten(),
        nn.Linear(72, 5),
    )  # fmt: skip


def encoder() -> nn.TransformerEncoder:
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 1, enable_nested_tensor=False
    )


MODELS = {
    "embedding": (Embedded, lambda: torch.randint(50, (2, 8))),
    "convolutions": (convolutions, lambda: torch.randn(2, 3, 8, 8)),
    "attention": (Attention, lambda: torch.randn(2, 8, 32)),
    "encoder": (encoder, lambda: torch.randn(2, 8, 32)),
}


def prepared(model: nn.Module, x: Tensor, recipe: str) -> nn.Module:
    """The model after one batch of training, which static scales are computed from."""
    lb.qat.prepare_(model, recipe, learn_scale=True, skip=())
    with torch.no_grad():
        model.train()(x)
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["int8-static", "int8", "int8-weight-only"])
@pytest.mark.parametrize("name", MODELS)
def test_the_exported_program_computes_the_bits_of_the_model(name, recipe):
    make, data = MODELS[name]
    torch.manual_seed(0)
    x, other = data(), data()
    model = prepared(make(), x, recipe)
    deployed = copy.deepcopy(model)
    lb.qat.convert_(deployed)
    for each in (model, deployed):
        exported = torch.export.export(each, (x,)).module()
        assert torch.equal(exported(other), model(other))


@pytest.mark.parametrize("recipe", ["int8-static-affine", "mxfp8"])
def test_a_program_of_core_operators_that_is_saved_computes_the_same_bits(recipe):
    """Decompositions remove ``detach``, and the parameters of the loaded program require gradients."""
    torch.manual_seed(0)
    x = torch.randn(4, 32)
    model = prepared(nn.Sequential(nn.Linear(32, 24)), x, recipe)
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (x,)).run_decompositions(), file)
    file.seek(0)
    exported = torch.export.load(file).module()
    assert any(p.requires_grad for p in exported.parameters())
    assert torch.equal(exported(x), model(x))
