"""Attention and feed-forward parts of torch's transformer layers and of blocks written by hand: which are found, and
that recomputing them changes no bit and keeps less.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowbit as lb
from lowbit.memory import checkpoint_, saved_bytes, uncheckpoint_

WIDTH, HEADS, INNER, LENGTH = 16, 2, 96, 24


# -- torch's layers ---------------------------------------------------------------------------------------------------
class Encoder(nn.Module):
    def __init__(self, activation: object, dropout: float, norm_first: bool) -> None:
        super().__init__()
        options = {"batch_first": True, "norm_first": norm_first}
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, dropout, activation, **options)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


class Decoder(nn.Module):
    def __init__(self, activation: object, dropout: float, norm_first: bool) -> None:
        super().__init__()
        options = {"batch_first": True, "norm_first": norm_first}
        layer = nn.TransformerDecoderLayer(WIDTH, HEADS, INNER, dropout, activation, **options)
        self.layers = nn.TransformerDecoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x, x.flip(1))
        return y


class Both(nn.Module):
    def __init__(self, activation: object, dropout: float, norm_first: bool) -> None:
        super().__init__()
        options = {"batch_first": True, "norm_first": norm_first}
        self.both = nn.Transformer(WIDTH, HEADS, 2, 2, INNER, dropout, activation, **options)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.both(x, x.flip(1))
        return y


TORCHS = {"encoder": Encoder, "decoder": Decoder, "transformer": Both}


# -- written by hand --------------------------------------------------------------------------------------------------
class SelfAtt(nn.Module):
    """Attention without a layer of torch in it."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y: Tensor = self.wo(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return y


class Talk(nn.Module):
    """torch's attention with a norm before it, under names that say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        y: Tensor = self.inner(x, x, x, need_weights=False)[0]
        return y


def wide() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))


class Usual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.ff = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), wide()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x, x, x)[0]
        y: Tensor = x + self.ff(x)
        return y


class Unnamed(nn.Module):
    def __init__(self, mix: nn.Module) -> None:
        super().__init__()
        self.first, self.mix, self.second, self.think = nn.LayerNorm(WIDTH), mix, nn.LayerNorm(WIDTH), wide()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.first(x))
        y: Tensor = x + self.think(self.second(x))
        return y


class Flat(nn.Module):
    """All layers in the block itself."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.w1, self.w3, self.w2 = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        x = x + self.wo(F.scaled_dot_product_attention(q, k, v))
        y: Tensor = x + self.w2(F.silu(self.w1(x)) * self.w3(x))
        return y


#: By name: the block, its attention and its feed-forward part.
BY_HAND = {
    "usual": (Usual, "attn", "ff"),
    "mix": (lambda: Unnamed(SelfAtt()), "mix", "think"),
    "talk": (lambda: Unnamed(Talk()), "mix", "think"),
}


# -- what is shared ---------------------------------------------------------------------------------------------------
def squares(output: Tensor, batch: object) -> Tensor:
    """Not of the output alone: that of a norm has a constant mean of squares."""
    return (output * torch.linspace(-1, 2, WIDTH)).square().mean()


def outcome(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    loss = squares(model(x), None)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def assert_less_in_the_same_bits(model: nn.Module, policy: str) -> None:
    x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    plain = copy.deepcopy(model)
    report = checkpoint_(model, policy, batch=x, loss=squares)
    saved = [saved_bytes(lambda net=net: net(x), net) for net in (plain, model)]
    assert saved[1] < saved[0]
    predicted = report.activations_before - report.activations_after
    assert abs(predicted - (saved[0] - saved[1])) <= x.nbytes + 8  # an input of the model may be counted, and the loss
    expected = outcome(plain, x)
    assert all(map(torch.equal, outcome(model, x), expected))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.zero_grad()
        assert all(map(torch.equal, outcome(other, x), expected))
        assert saved_bytes(lambda net=other: net(x), other) == saved[1]


@pytest.mark.thinned(8)
@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("activation", [F.relu, F.gelu, nn.GELU], ids=["relu", "gelu", "GELU"])
@pytest.mark.parametrize("policy", ["attention", "mlp"])
@pytest.mark.parametrize("kind", TORCHS)
def test_layers_of_torch(kind, policy, activation, dropout):
    torch.manual_seed(0)
    made = activation() if isinstance(activation, type) else activation
    assert_less_in_the_same_bits(TORCHS[kind](made, dropout, policy == "mlp"), policy)


@pytest.mark.parametrize("kind", TORCHS)
def test_the_parts_of_layers_of_torch(kind):
    model = TORCHS[kind](F.relu, 0.0, False)
    layers = [
        n for n, m in model.named_modules() if isinstance(m, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)
    ]
    attention = {n for n, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)}
    kinds = [type(m) for m in model.modules()]
    assert set(checkpoint_(model, "attention").converted) == attention
    parts = ("linear1", "dropout", "linear2")
    assert set(checkpoint_(model, "mlp").converted) == {f"{name}.{part}" for name in layers for part in parts}
    uncheckpoint_(model)
    assert [type(m) for m in model.modules()] == kinds
    assert all(model.get_submodule(name).activation is F.relu for name in layers)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("policy", ["attention", "mlp"])
@pytest.mark.parametrize("kind", BY_HAND)
def test_blocks_by_hand(kind, policy):
    torch.manual_seed(0)
    block, attention, mlp = BY_HAND[kind]
    model = nn.Sequential(block(), block())
    part = {"attention": attention, "mlp": mlp}[policy]
    assert checkpoint_(copy.deepcopy(model), policy).converted == (f"0.{part}", f"1.{part}")
    assert_less_in_the_same_bits(model, policy)


def test_layers_that_the_block_calls_itself_are_named():
    model = nn.Sequential(Flat(), Flat())
    for policy in ("attention", "mlp"):
        with pytest.raises(ValueError, match=r"layers that the block's own forward calls \(wq, wk, .*use 'block'"):
            checkpoint_(model, policy)
    assert_less_in_the_same_bits(model, "block")


def test_a_function_is_restored_by_another_policy():
    model = Encoder(F.relu, 0.0, False)
    for _ in range(2):
        checkpoint_(model, "mlp")
    checkpoint_(model, "attention")
    assert model.layers.layers[0].activation is F.relu


# -- the other techniques ---------------------------------------------------------------------------------------------
@pytest.mark.thinned(3)
@pytest.mark.parametrize("kind", [*TORCHS, *BY_HAND, "flat"])
def test_compressed_activations_save_less_and_keep_losses(kind):
    torch.manual_seed(0)
    blocks = {name: row[0] for name, row in BY_HAND.items()} | {"flat": Flat}
    model = TORCHS[kind](F.gelu, 0.0, False) if kind in TORCHS else nn.Sequential(blocks[kind](), blocks[kind]())
    x, plain = torch.randn(2, LENGTH, WIDTH), copy.deepcopy(model)
    report = lb.train.compress_activations_(model, batch=x, loss=squares)
    assert report.activations_after < 0.9 * report.activations_before
    found, expected = outcome(model, x), outcome(plain, x)
    assert torch.equal(found[0], expected[0])
    mine, other = (torch.cat([grad.flatten() for grad in grads[1:]]) for grads in (found, expected))
    assert (mine - other).norm() <= 0.05 * other.norm()


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("kind", [*TORCHS, *BY_HAND, "flat"])
def test_mixed_precision_is_that_of_autocast(kind, copies):
    torch.manual_seed(0)
    blocks = {name: row[0] for name, row in BY_HAND.items()} | {"flat": Flat}
    model = TORCHS[kind](F.relu, 0.0, False) if kind in TORCHS else nn.Sequential(blocks[kind](), blocks[kind]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())  # so that copies lose nothing
    x, plain = torch.randn(2, LENGTH, WIDTH), copy.deepcopy(model)
    lb.train.mixed_(model, "bf16", working_copies=copies, **({"fp32_gradients": True} if copies else {}))
    with torch.autocast("cpu", torch.bfloat16):
        y = plain(x)
    squares(y.float(), None).backward()
    assert torch.equal(model(x), y.float())
    squares(model(x), None).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    model.eval()
    with torch.no_grad():  # torch's fused kernels of encoders compute in other precisions
        torch.testing.assert_close(model(x), y.float(), rtol=0.05, atol=0.05)
    lb.train.unmixed_(model)
    assert torch.equal(model.train()(x), plain(x))
