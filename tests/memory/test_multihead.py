"""``lb.memory.attention_`` of ``nn.MultiheadAttention`` and what torch builds of it, beside torch's softmax over all
scores in fp64.
"""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lowbit as lb
from lowbit.plan.checklist import ADVISED, NotHere, Step
from lowbit.plan.subject import Subject
from lowbit.tiled.model_attention import attends_without_scores

WIDTH, HEADS, LENGTH = 8, 4, 40
HIDDEN = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu_(1)
PADDED = torch.zeros(2, LENGTH, dtype=torch.bool)
PADDED[1, 33:] = True


def added(mask: Tensor, dtype=torch.float64) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(mask, -torch.inf)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


PER_HEAD = drawn(2 * HEADS, LENGTH, LENGTH, seed=3) > 1
PER_HEAD[:, :, 0] = False  # a row that sees nothing is NaN where torch makes weights

LAYERS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False, "batch_first": True},
    "other widths": {"kdim": 6, "vdim": 10},
    "more keys": {"add_bias_kv": True, "add_zero_attn": True},
    "learned key": {"add_bias_kv": True, "batch_first": True},
    "zero key": {"add_zero_attn": True, "batch_first": True},
}

CALLS = {
    "no mask": {},
    "bool": {"attn_mask": HIDDEN},
    "float": {"attn_mask": added(HIDDEN) + drawn(LENGTH, LENGTH)},
    "bool of heads": {"attn_mask": PER_HEAD},
    "float of heads": {"attn_mask": drawn(2 * HEADS, LENGTH, LENGTH)},
    "padding": {"key_padding_mask": PADDED},
    "float padding": {"key_padding_mask": added(PADDED) + drawn(2, LENGTH)},
    "bool and padding": {"attn_mask": HIDDEN, "key_padding_mask": PADDED},
    "float and padding": {"attn_mask": added(HIDDEN), "key_padding_mask": added(PADDED)},
    "heads and padding": {"attn_mask": PER_HEAD, "key_padding_mask": PADDED},
    "causal": {"attn_mask": HIDDEN, "is_causal": True},
    "causal and padding": {"attn_mask": HIDDEN, "key_padding_mask": PADDED, "is_causal": True},
}


def layer_of(options: dict[str, object]) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(WIDTH, HEADS, **options).double()
    if layer.in_proj_bias is not None:
        nn.init.normal_(layer.in_proj_bias)
    return layer


def inputs_of(layer: nn.MultiheadAttention) -> list[Tensor]:
    """Queries, keys and values, one tensor where they may be."""
    query = drawn(2, LENGTH, WIDTH, seed=1)
    others = (
        [query] * 2 if layer._qkv_same_embed_dim else [drawn(2, LENGTH, n, seed=n) for n in (layer.kdim, layer.vdim)]
    )
    made = [query, *others]
    return made if layer.batch_first else [x.transpose(0, 1) for x in made]


def trained(layer: nn.Module, inputs: list[Tensor], **call: object) -> list[Tensor]:
    """The result, and gradients of inputs and parameters."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    leaves = [leaves[0] if given is inputs[0] else leaf for given, leaf in zip(inputs, leaves, strict=True)]
    y = layer(*leaves, **call)[0]
    loss = (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)).sum()
    wanted = [*{id(leaf): leaf for leaf in leaves}.values(), *layer.parameters()]
    return [y.detach(), *torch.autograd.grad(loss, wanted)]


def close(found: list[Tensor], expected: list[Tensor], within: float = 1e-12) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=within, atol=within * float(theirs.detach().abs().max()))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("options", LAYERS)
def test_results_and_gradients_are_those_of_all_scores(options, call):
    layer, given = layer_of(LAYERS[options]), CALLS[call]
    if call == "causal" and "key" in options:
        pytest.skip("torch's hint hides the keys that the layer adds, and its mask does not")
    expected = trained(layer, inputs_of(layer), **given, need_weights=True)
    lb.memory.attention_(layer)
    close(trained(layer, inputs_of(layer), **given, need_weights=False), expected)


@pytest.mark.parametrize("call", CALLS)
def test_cross_attention_and_wide_heads_take_one_kernel(call):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(64, HEADS, batch_first=True).double()
    inputs = [drawn(2, LENGTH, 64, seed=seed) for seed in range(3)]
    expected = trained(layer, inputs, **CALLS[call], need_weights=True)
    lb.memory.attention_(layer)
    close(trained(layer, inputs, **CALLS[call], need_weights=False), expected)


@pytest.mark.parametrize("mask", ["attn_mask", "key_padding_mask"])
@pytest.mark.parametrize("weights", [False, True])
def test_float_masks_have_gradients(mask, weights):
    layer = layer_of({"batch_first": True})
    bias = drawn(*({"attn_mask": (LENGTH, LENGTH), "key_padding_mask": (2, LENGTH)}[mask])).requires_grad_()
    x = inputs_of(layer)
    gradient = [torch.autograd.grad(layer(*x, **{mask: bias})[0].square().sum(), bias)[0]]
    lb.memory.attention_(layer)
    close([torch.autograd.grad(layer(*x, **{mask: bias}, need_weights=weights)[0].square().sum(), bias)[0]], gradient)


def test_a_sequence_without_a_batch_and_hints_without_a_mask():
    layer = layer_of({})
    x = [drawn(LENGTH, WIDTH)] * 3
    expected = trained(layer, x, attn_mask=HIDDEN, key_padding_mask=PADDED[1])
    lb.memory.attention_(layer)
    close(trained(layer, x, attn_mask=HIDDEN, key_padding_mask=PADDED[1], need_weights=False), expected)
    with pytest.raises(ValueError, match="give the mask too"):
        layer(*x, is_causal=True, need_weights=False)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_gradients_through_weights_are_torchs(call, average, monkeypatch):
    monkeypatch.setattr(
        sys.modules["lowbit.tiled.attention_tiles"], "TILE", 7 * LENGTH * 2 * HEADS
    )  # parts of 7 queries
    layer = layer_of({"batch_first": True, "add_zero_attn": True})

    def both(layer):
        x = inputs_of(layer)[0].clone().requires_grad_()
        y, weights = layer(x, x, x, **CALLS[call], average_attn_weights=average)
        loss = y.square().sum() + (weights * torch.linspace(0, 1, weights.shape[-1], dtype=torch.float64)).sin().sum()
        return [y, weights, *torch.autograd.grad(loss, [x, *layer.parameters()])]

    expected = both(layer)
    lb.memory.attention_(layer)
    close(both(layer), expected)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_backward_keeps_no_weights_that_were_asked_for(dropout):
    layer = nn.MultiheadAttention(16, 4, dropout, batch_first=True).train()
    lb.memory.attention_(layer)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        x = torch.randn(1, 300, 16, requires_grad=True)
        y, weights = layer(x, x, x)
    assert weights.shape == (1, 300, 300) and max(kept) < 300 * 300
    y.sum().backward()
    if dropout:  # the weights that are shown are those that the output was made with
        value = torch.nn.functional.linear(x, layer.in_proj_weight[32:], layer.in_proj_bias[32:])
        _, each = layer(x, x, x, average_attn_weights=False)
        assert 0.25 < float((each == 0).double().mean()) < 0.35
        torch.manual_seed(1)
        y, each = layer(x, x, x, average_attn_weights=False)
        heads = value.unflatten(-1, (4, 4)).transpose(1, 2)
        torch.testing.assert_close(y, layer.out_proj((each @ heads).transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("average", [True, False])
def test_weights_are_torchs_where_they_are_asked_for(average):
    layer = layer_of({"batch_first": True})
    expected = layer(*inputs_of(layer), attn_mask=HIDDEN, average_attn_weights=average)
    lb.memory.attention_(layer)
    close(list(layer(*inputs_of(layer), attn_mask=HIDDEN, average_attn_weights=average)), list(expected))


def test_a_query_that_sees_no_key_gets_the_bias_of_the_projection_as_from_sdpa():
    layer = layer_of({"batch_first": True})
    mask = HIDDEN.clone()
    mask[5] = True
    nn.init.normal_(layer.out_proj.bias)
    x = inputs_of(layer)
    plain = layer(*x, attn_mask=mask, need_weights=False)[0]
    lb.memory.attention_(layer)
    y = layer(*x, attn_mask=mask, need_weights=False)[0]
    torch.testing.assert_close(y[:, 5], layer.out_proj.bias.expand(2, -1))
    torch.testing.assert_close(y, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(dtype):
    layer = layer_of({"batch_first": True})
    x = inputs_of(layer)
    expected = layer(*x, attn_mask=HIDDEN, key_padding_mask=PADDED)[0]
    lb.memory.attention_(layer)
    given = {"attn_mask": HIDDEN, "key_padding_mask": PADDED, "need_weights": False}
    low = copy.deepcopy(layer).to(dtype)(*[x[0].to(dtype)] * 3, **given)[0]
    with torch.autocast("cpu", dtype):
        cast = layer.float()(*[x[0].float()] * 3, **given)[0]
    # Each of four products in a row rounds its operands and its result to p bits: 12 errors of half a unit.
    bound = 6 * torch.finfo(dtype).eps * float(expected.detach().abs().max())
    assert low.dtype == cast.dtype == dtype
    assert max(float((y.double() - expected).detach().abs().max()) for y in (low, cast)) < bound


class Largest(TorchDispatchMode):
    """The most numbers of a storage that an op makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in given:
                self.numbers = max(self.numbers, leaf.untyped_storage().nbytes() // leaf.itemsize)
        return out


HELD = {
    "no mask": {},
    "bool": {"attn_mask": True},
    "padding": {"key_padding_mask": True},
    "both": {"attn_mask": True, "key_padding_mask": True},
    "causal": {"attn_mask": True, "is_causal": True},
    "causal and padding": {"attn_mask": True, "is_causal": True, "key_padding_mask": True},
}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("call", HELD)
def test_nothing_grows_with_the_square_of_the_length(call, dropout):
    layer = nn.MultiheadAttention(32, 4, dropout, batch_first=True).train()
    lb.memory.attention_(layer)

    def largest(length: int) -> int:
        x = torch.randn(1, length, 32, requires_grad=True)
        given = dict(HELD[call])
        if "attn_mask" in given:
            given["attn_mask"] = torch.ones(length, length, dtype=torch.bool).triu_(1)
        if "key_padding_mask" in given:
            given["key_padding_mask"] = torch.arange(length)[None] > length - 9
        with Largest() as made:
            layer(x, x, x, need_weights=False, **given)[0].sum().backward()
        return made.numbers

    assert largest(1024) <= 4 * 1024 * 32 and largest(768) <= 4 * 768 * 32


def test_dropout_drops_its_share_and_backward_drops_the_same():
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(4, 1, 0.25, bias=False, batch_first=True).double()
    with torch.no_grad():  # values pass as they are, scores are 0
        layer.in_proj_weight.zero_()
        layer.in_proj_weight[8:].copy_(torch.eye(4))
        layer.out_proj.weight.copy_(torch.eye(4))
    lb.memory.attention_(layer)
    x = drawn(1, 1200, 4)
    value = torch.ones(1, 1200, 4, dtype=torch.float64, requires_grad=True)
    y = layer(x, x, value, need_weights=False)[0]
    # A mean of n numbers that are 4/3 with chance 3/4: 6 standard deviations of sqrt(1/3n).
    assert float((y - 1).abs().max()) < 6 * (1 / 3600) ** 0.5 and float((y - 1).abs().max()) > 0
    (grad,) = torch.autograd.grad(y[..., 0].sum(), value)
    torch.testing.assert_close((grad * value).sum(), y[..., 0].sum())
    torch.manual_seed(7)
    again = layer(x, x, value, need_weights=False)[0]
    torch.manual_seed(7)
    assert torch.equal(layer(x, x, value, need_weights=False)[0], again)
    assert torch.equal(layer.eval()(x, x, value, need_weights=False)[0].std(), torch.zeros((), dtype=torch.float64))


# -- models ------------------------------------------------------------------------------------------------------------
class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, dropout, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, hidden, padding=None):
        y = self.norm1(x)
        x = x + self.attn(y, y, y, attn_mask=hidden, key_padding_mask=padding, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width=16, heads=4, layers=2, vocab=32, length=512, dropout=0.0) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Parameter(torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab)

    def forward(self, ids, padding=None):
        length = ids.shape[1]
        hidden = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
        x = self.tok(ids) + self.pos[:length]
        for block in self.blocks:
            x = block(x, hidden, padding)
        return self.head(self.norm(x))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.cls, self.pos = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.randn(1, 17, 16))
        layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        return self.head(self.encoder(x)[:, 0])


class Seq2Seq(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.tok = nn.Embedding(32, 16)
        self.net = nn.Transformer(16, 4, 2, 2, 32, 0.0, batch_first=batch_first)
        self.head = nn.Linear(16, 32)
        self.batch_first = batch_first

    def forward(self, source, target):
        hidden = self.net.generate_square_subsequent_mask(target.shape[1], dtype=self.tok.weight.dtype)
        padded = source == 0
        ids = (source, target) if self.batch_first else (source.t(), target.t())
        y = self.net(
            self.tok(ids[0]), self.tok(ids[1]), tgt_mask=hidden, src_key_padding_mask=padded,
            memory_key_padding_mask=padded, tgt_key_padding_mask=added(target == 0, self.tok.weight.dtype),
        )  # fmt: skip
        return self.head(y if self.batch_first else y.transpose(0, 1))


IDS = torch.randint(1, 32, (2, LENGTH), generator=torch.Generator().manual_seed(0))
PADDED_IDS = IDS.masked_fill(PADDED, 0)

MODELS = {
    "gpt": (GPT, (IDS,), 2),
    "gpt, padded": (GPT, (IDS, PADDED), 2),
    "vit": (ViT, (drawn(2, 3, 16, 16),), 2),
    "seq2seq": (lambda: Seq2Seq(True), (PADDED_IDS, PADDED_IDS[:, :30]), 6),
    "seq2seq, sequence first": (lambda: Seq2Seq(False), (PADDED_IDS, PADDED_IDS[:, :30]), 6),
}


def made(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return MODELS[name][0]().double(), MODELS[name][1]


def step(model: nn.Module, batch: tuple[Tensor, ...]) -> list[Tensor]:
    y = model(*batch)
    loss = F.cross_entropy(y.flatten(0, -2), torch.arange(y.flatten(0, -2).shape[0]) % y.shape[-1])
    return [y.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_before_and_go_back(name):
    model, batch = made(name)
    kept = copy.deepcopy(model)
    expected = step(model, batch)
    report = lb.memory.attention_(model)
    assert len(report.layers) == MODELS[name][2] and not lb.memory.attention_(model).layers
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in kept.named_parameters()]
    within = 1e-11  # the condition of two layers with norms beside that of one attention
    close(step(model, batch), expected, within)
    close(step(pickle.loads(pickle.dumps(copy.deepcopy(model))), batch), expected, within)
    lb.memory.unattention_(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in kept.modules()]
    assert all(torch.equal(a, b) for a, b in zip(step(model, batch), expected, strict=True))
    with pytest.raises(ValueError, match="nothing to undo"):
        lb.memory.unattention_(model)


@pytest.mark.parametrize("name", ["vit", "seq2seq"])
def test_evaluation_makes_no_scores_either_and_sees_what_is_there(name):
    model, batch = made(name)
    model.eval()
    with torch.no_grad():
        expected = model(*batch)
        lb.memory.attention_(model)
        called = []
        for layer in model.modules():
            if isinstance(layer, nn.MultiheadAttention):
                layer.register_forward_hook(lambda *_: called.append(1))
        y = model(*batch)
    seen = slice(None) if name == "vit" else (PADDED_IDS[:, :30] != 0)
    torch.testing.assert_close(y[seen], expected[seen], rtol=1e-11, atol=1e-12)
    assert len(called) == MODELS[name][2]


def test_an_encoder_gets_its_fused_kernel_and_nested_tensors_back():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
    before = encoder.use_nested_tensor, encoder.layers[0].activation_relu_or_gelu
    x, padded = torch.randn(2, LENGTH, 8), PADDED
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=padded)
        lb.memory.attention_(encoder)
        assert (encoder.use_nested_tensor, encoder.layers[0].activation_relu_or_gelu) == (False, 0)
        y = encoder(x, src_key_padding_mask=padded)
        lb.memory.unattention_(encoder)
        assert (encoder.use_nested_tensor, encoder.layers[0].activation_relu_or_gelu) == before
        torch.testing.assert_close(y[~padded], expected[~padded])
        assert torch.equal(encoder(x, src_key_padding_mask=padded), expected)


class Renamed(nn.MultiheadAttention):
    """A subclass that computes what its base does."""


class Other(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def test_subclasses_are_served_unless_they_replace_forward():
    model = nn.ModuleDict({"a": Renamed(8, 2), "b": Other(8, 2)})
    assert [row.name for row in lb.memory.attention_(model).layers] == ["a"]
    assert isinstance(model["a"], Renamed) and type(copy.deepcopy(model["a"])) is type(model["a"])
    with pytest.raises(ValueError, match=r"expected nn.MultiheadAttention with torch's own forward.*got Other"):
        lb.memory.attention_(model["b"])


def test_a_model_goes_at_once():
    model, batch = made("gpt")
    lb.memory.attention_(model)
    step(model, batch)
    gc.disable()
    try:
        gone = weakref.ref(model.blocks[0].attn)
        del model
        assert gone() is None
    finally:
        gc.enable()


# -- with the rest of the package --------------------------------------------------------------------------------------
def test_checkpoints_take_it_in_every_order_with_dropout():
    model = GPT(dropout=0.2).double()
    lb.memory.attention_(model)

    def seeded():
        torch.manual_seed(3)
        return step(model, (IDS,))

    expected = seeded()
    for policy in ("block", "attention"):
        lb.memory.checkpoint_(model, policy)
        assert all(torch.equal(a, b) for a, b in zip(seeded(), expected, strict=True))
        lb.memory.unattention_(model)
        lb.memory.attention_(model)
        assert all(torch.equal(a, b) for a, b in zip(seeded(), expected, strict=True))
        lb.memory.uncheckpoint_(model)


@pytest.mark.parametrize("first", ["attention_", "quantize_"])
def test_quantized_layers_attend_without_scores(first):
    torch.manual_seed(0)
    model, x = nn.Sequential(GPT(length=LENGTH)).eval(), (IDS, PADDED)
    plain = copy.deepcopy(model)
    lb.quantize_(plain, "int8")
    expected = plain[0](*x)
    if first == "attention_":
        lb.memory.attention_(model)
        lb.quantize_(model, "int8")
    else:
        lb.quantize_(model, "int8")
        lb.memory.attention_(model)
    assert type(model[0].blocks[0].attn) is lb.nn.QuantMultiheadAttention
    assert model[0].blocks[0].attn.attend is not None
    torch.testing.assert_close(model[0](*x), expected)
    lb.dequantize_(model)
    lb.dequantize_(plain)
    assert type(model[0].blocks[0].attn).__name__ == "ScorelessMultiheadAttention"
    torch.testing.assert_close(model[0](*x), plain[0](*x))


@pytest.mark.parametrize("prepare", [
    lambda model: lb.train.mixed_(model, "bf16"),
    lambda model: lb.train.prepare_(model, "fp8"),
    lambda model: lb.qat.prepare_(model, "int8-weight-only"),
])  # fmt: skip
def test_training_preparations_go_with_it(prepare):
    torch.manual_seed(0)
    plain = GPT(length=LENGTH).train()
    model, other = copy.deepcopy(plain), copy.deepcopy(plain)
    lb.memory.attention_(model)
    prepare(model)
    prepare(other)
    lb.memory.attention_(other)
    prepare(plain)
    y, z, expected = model(IDS, PADDED), other(IDS, PADDED), plain(IDS, PADDED)
    assert len(lb.memory.attention_(model).layers) == len(lb.memory.attention_(other).layers) == 0
    error = float((y - expected).abs().max()), float((z - expected).abs().max())
    assert max(error) < 0.05 * float(expected.detach().abs().max())


def test_estimates_know_it_and_doctor_and_fit_choose_it():
    batch = (torch.randint(32, (2, 128)),)
    model = GPT(dropout=0.1).train()

    def loss(y, batch):
        return F.cross_entropy(y.flatten(0, 1), batch[0].flatten())

    plain = lb.estimate(model, batch, loss)
    less = lb.estimate(model, batch, loss, prepare=lb.memory.attention_)
    assert plain.peak_bytes - less.peak_bytes > 2 * 2 * 4 * 128 * 128 * 4
    used = copy.deepcopy(model)
    lb.memory.attention_(used)
    assert lb.estimate(used, batch, loss).peak_bytes == less.peak_bytes

    def train(batch):
        used.zero_grad()
        loss(used(*batch), batch).backward()

    measured = lb.memory.profile(used, batch, train)
    assert measured.peak_bytes - measured.by_kind.get("other", 0) < 1.3 * less.peak_bytes


@pytest.mark.slow
def test_doctor_and_fit_choose_it_where_it_spares_scores():
    batch, model = (torch.randint(32, (2, 128)),), GPT(dropout=0.1).train()

    def loss(y, batch):
        return F.cross_entropy(y.flatten(0, 1), batch[0].flatten())

    technique = next(one for one in ADVISED if one.name == "attention without scores")
    step = Step(Subject(model, batch, loss))
    plain = step.estimated()
    saved = technique.measure(step, plain).saves
    assert saved > 2 * 2 * 4 * 128 * 128 * 4
    keep = ("fp32", "adamw", "everything kept", "memory", "activations in memory", "weights in memory", "whole batch")
    plan = lb.fit(model, batch, plain.peak_bytes - saved + (1 << 16), loss, require=keep)
    assert plan.settings.attention
    asking = nn.MultiheadAttention(8, 2, batch_first=True).train()
    assert attends_without_scores(asking, (torch.randn(1, 9, 8),) * 3)
    for other, given in ((GPT().train(), batch), (GPT(dropout=0.1).eval(), batch)):
        with pytest.raises(NotHere, match="no attention of the model allocates scores"):
            technique.measure(Step(Subject(other, given, loss)), plain)


@pytest.mark.parametrize("call", ["bool and padding"])
def test_it_compiles(call):
    layer = layer_of({"batch_first": True})
    lb.memory.attention_(layer)
    x, given = inputs_of(layer), CALLS[call]
    expected = trained(layer, x, **given, need_weights=False)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    close(trained(compiled, x, **given, need_weights=False), expected)


def test_dropout_breaks_the_graph_and_trains():
    layer = layer_of({"batch_first": True, "dropout": 0.5}).train()
    lb.memory.attention_(layer)
    compiled = torch.compile(layer, backend="aot_eager")
    y, *gradients = trained(compiled, inputs_of(layer), need_weights=False)
    assert all(bool(t.isfinite().all()) for t in (y, *gradients))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_take_torchs_kernel_as_before():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    given = torch.nested.nested_tensor([torch.randn(5, 8), torch.randn(3, 8)])
    with torch.no_grad():
        expected = encoder(given).to_padded_tensor(0)
        lb.memory.attention_(encoder)
        torch.testing.assert_close(encoder(given).to_padded_tensor(0), expected)


@pytest.mark.parametrize("adapted_first", [True, False])
def test_adapters_of_peft_go_with_it(adapted_first):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = GPT(length=LENGTH)
    if not adapted_first:
        lb.memory.attention_(model)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["attn"], init_lora_weights=False))
    if adapted_first:
        assert len(lb.memory.attention_(model).layers) == 2
    y = model(IDS, PADDED)
    y.sum().backward()
    lb.memory.unattention_(model)
    plain = model(IDS, PADDED)
    torch.testing.assert_close(y, plain)
