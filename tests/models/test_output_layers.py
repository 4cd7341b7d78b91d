"""Output layers are found by their role in the model, and stay in high precision whatever their names."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.models import find_output_layers

WORDS, WIDTH = 96, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(x, x, x, need_weights=False)[0]
        return x + self.ff(x)


def handwritten(head: str, depth: int = 2, first: bool = False) -> nn.Module:
    """The transformer of tutorials; ``first``: its output layer is registered before its blocks."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
            if first:
                setattr(self, head, nn.Linear(WIDTH, WORDS))
            self.blocks = nn.ModuleList(Block() for _ in range(depth))
            self.norm = nn.LayerNorm(WIDTH)
            if not first:
                setattr(self, head, nn.Linear(WIDTH, WORDS))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
            for block in self.blocks:
                x = block(x)
            return getattr(self, head)(self.norm(x))

    return Model()


class Generator(nn.Module):
    """The annotated transformer's output layer, a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WORDS)


def named(**children: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, child in children.items():
        model.add_module(name, child)
    return model


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 64), 2)


def blocks() -> nn.Module:
    return nn.ModuleList(Block() for _ in range(2))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "vocabulary": (lambda: handwritten("output"), ("output",)),
    "registered first": (lambda: handwritten("fc", first=True), ("fc",)),
    "one block": (lambda: handwritten("head", depth=1), ("head",)),
    "nested": (
        lambda: named(emb=nn.Embedding(WORDS, WIDTH), net=nn.Transformer(WIDTH, 4, 2, 2, 64), generator=Generator()),
        ("generator.proj",),
    ),
    "recurrent": (
        lambda: named(emb=nn.Embedding(WORDS, WIDTH), rnn=nn.LSTM(WIDTH, 64), decoder=nn.Linear(64, WORDS)),
        ("decoder",),
    ),
    "several heads of a vocabulary": (
        lambda: named(
            emb=nn.Embedding(WORDS, WIDTH), blocks=blocks(), heads=nn.ModuleList(nn.Linear(WIDTH, WORDS) for _ in "ab")
        ),
        ("heads.0", "heads.1"),
    ),
    "a vocabulary as wide as the model": (
        lambda: named(
            emb=nn.Embedding(WIDTH, WIDTH),
            mlp=nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()),
            out=nn.Linear(WIDTH, WIDTH),
        ),
        ("out",),
    ),
    "an input projection as wide as the positions are many": (
        lambda: named(
            into=nn.Linear(80, WIDTH), positions=nn.Embedding(WIDTH, WIDTH), blocks=blocks(), norm=nn.LayerNorm(WIDTH)
        ),
        (),
    ),
    "an output as wide as the positions are many": (
        lambda: named(
            into=nn.Linear(80, WIDTH),
            positions=nn.Embedding(WIDTH, WIDTH),
            blocks=blocks(),
            out=nn.Linear(64, WIDTH),
            norm=nn.LayerNorm(WIDTH),
        ),
        ("out",),
    ),
    "classifier": (lambda: named(patch=nn.Conv2d(3, WIDTH, 4), encoder=encoder(), fc=nn.Linear(WIDTH, 10)), ("fc",)),
    "classifier of two layers": (
        lambda: named(
            encoder=encoder(), mlp_head=nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, 10))
        ),
        ("mlp_head.2",),
    ),
    "a chain of layers": (
        lambda: named(encoder=encoder(), pre=nn.Linear(WIDTH, 64), post=nn.Linear(64, 10)),
        ("post",),
    ),
    "two tasks": (
        lambda: named(blocks=blocks(), policy=nn.Linear(WIDTH, 7), value=nn.Linear(WIDTH, 1), norm=nn.LayerNorm(1)),
        ("policy", "value"),
    ),
    "two towers": (
        lambda: named(blocks=blocks(), visual=nn.Linear(WIDTH, 24), textual=nn.Linear(24, 24)),
        ("visual", "textual"),
    ),
    "Sequential": (lambda: nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)), ("3",)),
    "a convolutional network": (
        lambda: named(
            blocks=nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()) for _ in range(3))), fc=nn.Linear(8, 10)
        ),
        (),
    ),
    "a stack of Linears": (lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 8)), ()),
    "blocks alone": (lambda: nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.SiLU()) for _ in range(3))), ()),
    "encoder alone": (encoder, ()),
}


@pytest.mark.parametrize("name", CASES)
def test_roles(name: str) -> None:
    make, expected = CASES[name]
    model = make()
    layers = find_output_layers(model)
    assert tuple(layers) == expected
    assert all(model.get_submodule(path) is layer for path, layer in layers.items())


@pytest.mark.parametrize("prepare", [lb.quantize_, lb.qat.prepare_, lb.train.prepare_])
def test_every_conversion_leaves_the_output_layer(prepare: Callable[..., lb.Report]) -> None:
    """The report says so, ``skip=()`` and a recipe for its name convert it, and its bits stay those of the model."""
    model = handwritten("output")
    before = model.output
    report = prepare(model, "int8")
    assert model.output is before and type(before) is nn.Linear
    assert "output layer stays in high precision" in report.left["output"] and "'*output'" in report.left["output"]
    assert "output" in prepare(handwritten("output"), "int8", skip=()).converted
    named = prepare(handwritten("output"), {"*": "int8", "output": "int8"})
    assert "output" in named.converted


def test_a_layer_without_another_is_converted() -> None:
    """The decoder of a recurrent language model is its only layer of a supported class."""
    model = named(emb=nn.Embedding(WORDS, WIDTH), rnn=nn.LSTM(WIDTH, 64), decoder=nn.Linear(64, WORDS))
    assert lb.quantize_(model, "int8").converted == ("decoder",)


def test_a_plain_stack_is_converted() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 8))
    assert lb.quantize_(model, "int8").converted == ("0", "2")


def test_lazy_layers_have_no_role() -> None:
    model = named(emb=nn.Embedding(WORDS, WIDTH), blocks=blocks(), head=nn.LazyLinear(WORDS))
    assert find_output_layers(model) == {}
