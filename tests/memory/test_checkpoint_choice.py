"""What policies choose of models: nothing is an error, and parts are found where they are no modules of their own."""

from __future__ import annotations

import copy

import pytest
import torch
from support.architectures import ARCHITECTURES, BLOCKS
from torch import Tensor, nn

from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.memory import checkpoint_, saved_bytes, uncheckpoint_


def chain(blocks: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(blocks)))


def outcome(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def assert_equal_with_less(model: nn.Module, policy: str, x: Tensor, least: float) -> None:
    """``policy`` changes no bit, and keeps at most this share of what is kept without."""
    plain = copy.deepcopy(model)
    kept = saved_bytes(lambda: plain(x), plain)
    checkpoint_(model, policy)
    assert saved_bytes(lambda: model(x), model) <= least * kept
    assert all(map(torch.equal, outcome(model, x), outcome(plain, x)))


# -- nothing ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("policy", "got"),
    [
        ([], "a list"), ((), "a tuple"), ({}, "a dict"), ({"0": None}, "a dict"), (iter(()), "a tuple_iterator"),
        ({"0": lambda module, path: False}, "a dict"), (lambda module, path: False, "a function"),
        ("ratio:0.1", "'ratio:0.1'"),
    ],
)  # fmt: skip
def test_a_policy_that_chooses_nothing_is_refused_and_changes_nothing(policy, got):
    model = chain()
    checkpoint_(model, "sqrt")
    with pytest.raises(
        ValueError, match=rf"modules of Sequential, got {got} that chooses none; .*uncheckpoint_\(model\)"
    ):
        checkpoint_(model, policy)
    assert len(uncheckpoint_(model).layers) == 4


@pytest.mark.parametrize("policy", [None, 3, True, b"block", {"0": 3}])
def test_what_is_no_policy_is_a_type_error(policy):
    with pytest.raises(
        TypeError, match=r"expected a policy's name, a list of modules .* got (NoneType|int|bool|bytes)"
    ):
        checkpoint_(chain(), policy)


def test_none_in_a_list_is_no_pattern():
    with pytest.raises(TypeError, match=r"a pattern is a string .* got NoneType"):
        checkpoint_(chain(), [None])


# -- feed-forward parts of torch's layers -----------------------------------------------------------------------------
class Method(nn.Module):
    """A feed-forward part with a method between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear1, self.dropout, self.linear2 = (
            nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8),
        )  # fmt: skip

    def activation(self, x: Tensor) -> Tensor:
        return x.relu()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear2(self.dropout(self.activation(self.linear1(self.norm(x)))))


def test_a_method_within_the_feed_forward_part_is_named_with_what_works():
    model = nn.Sequential(Method(), Method())
    with pytest.raises(
        ValueError, match=r"none but linear1, dropout, linear2 with a method .*block\.activation = "
    ) as error:
        checkpoint_(model, "mlp")
    assert "use 'block', or a list" in str(error.value)
    for block in model:
        block.activation = nn.ReLU()
    parts = ("linear1", "dropout", "linear2", "activation")
    assert set(checkpoint_(model, "mlp").converted) == {f"{i}.{part}" for i in range(2) for part in parts}


def test_a_feed_forward_part_of_modules_keeps_its_input_alone():
    block = nn.TransformerEncoderLayer(32, 4, 512, activation=nn.GELU(), batch_first=True)
    encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
    assert_equal_with_less(encoder, "mlp", torch.randn(2, 16, 32), 0.5)


# -- stages -----------------------------------------------------------------------------------------------------------
class Norm(nn.LayerNorm):
    """Of channels that come first."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 3, padding=1, groups=width), Norm(width)
        self.up, self.act, self.down = nn.Conv2d(width, 4 * width, 1), nn.GELU(), nn.Conv2d(4 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(self.depthwise(x)))))


WIDTHS = (8, 16, 32)


def halved(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(Norm(before), nn.Conv2d(before, after, 2, 2))


def blocks(width: int) -> nn.Sequential:
    return nn.Sequential(Block(width), Block(width))


class InTurn(nn.Module):
    """Stages and what halves the size before each in two lists, as the authors of ConvNeXt have them."""

    def __init__(self) -> None:
        super().__init__()
        stem = nn.Sequential(nn.Conv2d(3, 8, 2, 2), Norm(8))
        self.halves = nn.ModuleList([stem, halved(8, 16), halved(16, 32)])
        self.stages = nn.ModuleList(blocks(width) for width in WIDTHS)

    def forward(self, x: Tensor) -> Tensor:
        for half, stage in zip(self.halves, self.stages, strict=True):
            x = stage(half(x))
        return x


class Between(nn.Module):
    """One that halves the size between two lists of blocks, which has come first."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 2, 2)
        self.stages = nn.ModuleList(nn.ModuleList(blocks(width)) for width in WIDTHS[:2])
        self.halves = nn.ModuleList([halved(8, 16)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number, stage in enumerate(self.stages):
            x = self.halves[number - 1](x) if number else x
            for block in stage:
                x = block(x)
        return x


class Stage(nn.Module):
    """A stage with its own list of what halves the size, as transformers has it."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.halve = nn.ModuleList(halved(before, after) if before != after else ())
        self.layers = nn.ModuleList(blocks(after))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.halve, *self.layers):
            x = layer(x)
        return x


class Staged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 2, 2), Norm(8))
        self.stages = nn.ModuleList([Stage(8, 8), Stage(8, 16)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return x


class Strided(nn.Module):
    """A strided layer that is in no list, before blocks that are."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 8, 1), nn.ModuleList(blocks(8))
        self.norm, self.halve, self.second = Norm(8), nn.Conv2d(8, 16, 2, 2), nn.ModuleList(blocks(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.first:
            x = block(x)
        x = self.halve(self.norm(x))
        for block in self.second:
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: nn.Sequential(Block(3), Block(3), halved(3, 8), Block(8)), "0 1 2.0 2.1"),
        (InTurn, "stages.0.0 stages.0.1 halves.1.0 halves.1.1 stages.1.0 stages.1.1 halves.2.0 halves.2.1"),
        (Between, "stages.0.0 stages.0.1 halves.0.0 halves.0.1"),
        (Staged, "stages.0.layers.0 stages.0.layers.1 stages.1.halve.0 stages.1.halve.1"),
        (Strided, "first.0 first.1"),
    ],
)
def test_stages_that_begin_with_a_norm_and_a_strided_convolution(make, expected):
    model = make()
    assert set(checkpoint_(copy.deepcopy(model), "stages").converted) == set(expected.split())
    assert_equal_with_less(model, "stages", torch.randn(2, 3, 16, 16), 0.6)


def test_a_decoder_that_doubles_the_size_comes_after_all_stages():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.ModuleList([halved(3, 8), halved(8, 16)])
            self.up = nn.ModuleList(
                [nn.Sequential(nn.ConvTranspose2d(w, v, 2, 2), Norm(v)) for w, v in ((16, 8), (8, 3))]
            )

    assert checkpoint_(Net(), "stages").converted == ("down.0.0", "down.0.1", "down.1.0", "down.1.1")


# -- lists, patterns and names ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("blok", r"expected a policy .*got 'blok' \(did you mean block\?\)"), ("every", "expected 'every:N'"),
        ("block:2", "expected 'block'"), ("every:0", "a whole number from 1"), ("ratio:2", "a share above 0"),
        (["missing"], "no module of GPT is matched by missing"), ("stages", "found none; use 'block'"),
        ([nn.Linear(2, 2)], "no module of the model"),
    ],
)  # fmt: skip
def test_what_is_no_policy_is_refused_and_changes_nothing(policy, message):
    model, _ = ARCHITECTURES["gpt"]()
    checkpoint_(model, "sqrt")
    with pytest.raises(ValueError, match=message):
        checkpoint_(model, policy)
    assert len(uncheckpoint_(model).layers) == BLOCKS


def test_blocks_without_the_part_are_named():
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mixer = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 8))

    model = nn.Sequential(Mixer(), Mixer())
    for part in ("attention", "mlp"):
        with pytest.raises(ValueError, match=r"in the blocks \(Mixer\), found none .*'block', or a list of patterns"):
            checkpoint_(model, part)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)
    assert checkpoint_(encoder, "attention").converted == ("layers.0.self_attn", "layers.1.self_attn")
    parts = ("linear1", "dropout", "linear2")
    assert checkpoint_(encoder, "mlp").converted == tuple(f"layers.{i}.{part}" for i in (0, 1) for part in parts)


def test_a_list_of_modules_stands_for_the_modules_in_it():
    """Nobody calls a ModuleList: checkpointed itself, it would save nothing without a word."""
    for policy in (lambda model: model.blocks, lambda model: ["blocks"], lambda model: [model.blocks]):
        model = GPT(GPTConfig(vocab=32, context=8, layers=2, heads=2, dim=32, hidden=64))
        report = checkpoint_(model, policy(model))
        assert report.converted == ("blocks.0", "blocks.1")
        assert type(model.blocks[1]).__name__ == "CheckpointedBlock"


def test_a_mapping_gives_a_list_of_modules_its_policy():
    model = GPT(GPTConfig(vocab=32, context=8, layers=4, heads=2, dim=32, hidden=64))
    assert checkpoint_(model, {"blocks": "every:2"}).converted == ("blocks.0", "blocks.2")
