"""TrainMultiheadAttention: the bits of four TrainLinears around one attention, and what training code does with it."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from support.bits import assert_same_bits, same_bits
from support.layers import TRAINING
from support.stateful import DELAYED, STOCHASTIC
from torch import Tensor, nn
from torch.nn.utils import parametrize

import lowbit as lb
from lowbit.nn.attention import MultiheadForward
from lowbit.train import TrainLinear, TrainMultiheadAttention, gemms

WIDTH, HEADS, LENGTH, BATCH = 32, 4, 6, 3
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
HIDDEN = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu_(1)
PADDED = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
PADDED[1, 4:] = True

LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False, "batch_first": True},
    "other widths": {"kdim": 16, "vdim": 48},
    "other widths, no bias": {"kdim": 16, "vdim": 48, "bias": False},
    "learned key": {"add_bias_kv": True, "batch_first": True},
    "zero key": {"add_zero_attn": True},
}
CALLS: dict[str, dict[str, Any]] = {
    "no mask": {},
    "weights": {"need_weights": True},
    "weights of heads": {"need_weights": True, "average_attn_weights": False},
    "causal": {"attn_mask": HIDDEN, "is_causal": True},
    "padding": {"key_padding_mask": PADDED},
    "both": {"attn_mask": torch.zeros(LENGTH, LENGTH).masked_fill(HIDDEN, -torch.inf), "key_padding_mask": PADDED},
}


class Separate(MultiheadForward, nn.Module):
    """The same attention around four layers with weights of their own."""

    def __init__(self, like: nn.MultiheadAttention, recipe: str | lb.Recipe) -> None:
        super().__init__()
        for name in ("embed_dim", "num_heads", "head_dim", "kdim", "vdim", "dropout", "batch_first", "add_zero_attn"):
            setattr(self, name, getattr(like, name))
        packed = like.in_proj_weight
        weights = (like.q_proj_weight, like.k_proj_weight, like.v_proj_weight) if packed is None else packed.chunk(3)
        biases = [None] * 3 if like.in_proj_bias is None else like.in_proj_bias.chunk(3)
        self.q_proj, self.k_proj, self.v_proj = (
            linear(weight, bias, recipe) for weight, bias in zip(weights, biases, strict=True)
        )
        self.out_proj = linear(like.out_proj.weight, like.out_proj.bias, recipe)
        self.bias_k, self.bias_v = copy.deepcopy(like.bias_k), copy.deepcopy(like.bias_v)

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_proj(query), self.k_proj(key), self.v_proj(value)

    def project_back(self, y_BTE: Tensor) -> Tensor:
        return self.out_proj(y_BTE)

    def gradients(self) -> dict[str, Tensor]:
        """By the names of the one layer."""
        parts = [self.q_proj, self.k_proj, self.v_proj]
        found = {
            "out_proj.weight": self.out_proj.weight.grad,
            **{f"{name}_weight": part.weight.grad for name, part in zip(PROJECTIONS, parts, strict=True)},
        }
        if (self.kdim, self.vdim) == (self.embed_dim,) * 2:
            found["in_proj_weight"] = torch.cat([part.weight.grad for part in parts])
        if self.out_proj.bias is not None:
            found["out_proj.bias"] = self.out_proj.bias.grad
            found["in_proj_bias"] = torch.cat([part.bias.grad for part in parts])
        if self.bias_k is not None:
            found |= {"bias_k": self.bias_k.grad, "bias_v": self.bias_v.grad}
        return found


def linear(weight: Tensor, bias: Tensor | None, recipe: str | lb.Recipe) -> TrainLinear:
    layer = TrainLinear(weight.shape[1], weight.shape[0], bias is not None, recipe=recipe)
    layer.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone())
    return layer


def layer_of(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(WIDTH, HEADS, **options)
    if layer.in_proj_bias is not None:
        nn.init.normal_(layer.in_proj_bias)
    return layer


def inputs_of(layer: nn.MultiheadAttention, cross: bool) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    shape = (BATCH, LENGTH) if layer.batch_first else (LENGTH, BATCH)
    query = torch.randn(*shape, WIDTH, generator=draw)
    if layer._qkv_same_embed_dim and not cross:
        return [query] * 3
    return [query, *(torch.randn(*shape, width, generator=draw) for width in (layer.kdim, layer.vdim))]


def trained(model: nn.Module, inputs: list[Tensor], **call: Any) -> list[Tensor]:
    """The results of one forward of a step, and the gradients of its inputs; those of parameters are in ``grad``."""
    lb.train.state(model).set_micro_batch(-1)
    model.zero_grad()
    leaves = {id(x): x.clone().requires_grad_() for x in inputs}
    y, weights = model[0](*(leaves[id(x)] for x in inputs), **{"need_weights": False, **call})
    loss = (y * torch.linspace(-1, 2, y.numel()).view_as(y)).sum()
    (loss if weights is None else loss + (weights * weights).sum()).backward()
    return [y.detach(), *([] if weights is None else [weights.detach()]), *(leaf.grad for leaf in leaves.values())]


def prepared(layer: nn.Module, recipe: Any = "fp8", **options: Any) -> nn.Sequential:
    model = nn.Sequential(layer)
    lb.train.prepare_(model, recipe, skip=(), **options)
    return model


def assert_as_separate(
    layer: nn.MultiheadAttention, recipe: str | lb.Recipe, inputs: list[Tensor], **call: Any
) -> None:
    oracle = nn.Sequential(Separate(layer, recipe))
    expected = trained(oracle, inputs, **call)
    model = prepared(layer, recipe)
    assert all(map(same_bits, trained(model, inputs, **call), expected))
    gradients = oracle[0].gradients()
    for name, parameter in layer.named_parameters():
        assert_same_bits(parameter.grad, gradients[name], name)


# -- the bits of separate layers --------------------------------------------------------------------------------------
@pytest.mark.thinned(5)
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("options", LAYERS)
@pytest.mark.parametrize("recipe", [*TRAINING, STOCHASTIC, DELAYED], ids=str)
def test_results_and_gradients_are_those_of_four_layers(recipe, options, cross):
    layer = layer_of(**LAYERS[options])
    assert_as_separate(layer, recipe, inputs_of(layer, cross))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("options", LAYERS)
def test_masks_and_weights(options, call):
    layer = layer_of(**LAYERS[options])
    assert_as_separate(layer, "fp8", inputs_of(layer, True), **CALLS[call])


def test_one_sequence_without_a_batch():
    layer = layer_of()
    assert_as_separate(layer, "fp8", [torch.randn(LENGTH, WIDTH)] * 3, attn_mask=HIDDEN)


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_it_is_near_torchs(precision):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, 0.0, batch_first=True)
    plain, x = copy.deepcopy(layer), torch.randn(BATCH, LENGTH, WIDTH)
    report = lb.train.prepare_(layer, "fp8")
    assert report.converted == ("self_attn", "linear1", "linear2") and not report.left
    row = report.layers[0]
    assert (row.kind, row.recipe, row.weights, row.bits) == ("MultiheadAttention", "fp8", 4 * WIDTH * WIDTH, 32.0)
    for model in (layer, plain) if precision else ():
        lb.train.mixed_(model, precision)
    found, exact = (torch.autograd.grad(loss_of(m(x)), list(m.parameters())) for m in (layer, plain))
    for mine, other in zip(found, exact, strict=True):
        assert mine.dtype == other.dtype and (mine - other).norm() <= 0.2 * other.norm() + 1e-4


@pytest.mark.parametrize("weights", [False, True])
def test_dtypes_are_those_of_autocast(weights):
    layer, x = layer_of(batch_first=True), torch.randn(BATCH, LENGTH, WIDTH)
    results = []
    for model in (layer, prepared(copy.deepcopy(layer))[0]):
        with torch.autocast("cpu", torch.bfloat16):
            results.append([t if t is None else t.dtype for t in model(x, x, x, need_weights=weights)])
    assert results[0] == results[1]


# -- what surrounds it ------------------------------------------------------------------------------------------------
class Net(nn.Module):
    """An encoder and a decoder, so attention of a sequence to itself and to another."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.both = nn.Transformer(WIDTH, HEADS, 2, 2, 64, dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.both(x, x.flip(1), tgt_mask=HIDDEN, tgt_is_causal=True)
        return y


def loss_of(y: Tensor) -> Tensor:
    """Of the output of a norm, whose squares alone have a constant mean."""
    return (y * torch.linspace(-1, 2, WIDTH)).square().mean()


def outcome(model: nn.Module, steps: int = 2) -> list[Tensor]:
    torch.manual_seed(5)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(steps):
        x = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = loss_of(model(x))
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def net(recipe: Any = "fp8", dropout: float = 0.0) -> Net:
    torch.manual_seed(0)
    model = Net(dropout)
    lb.train.prepare_(model, recipe)
    return model


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for number, (mine, other) in enumerate(zip(found, expected, strict=True)):
        assert_same_bits(mine, other, str(number))


def test_every_layer_of_a_transformer_is_one_row():
    torch.manual_seed(0)
    model = Net()
    names, state = [type(m) for m in model.modules()], {name: t.clone() for name, t in model.state_dict().items()}
    report = lb.train.prepare_(model, "fp8")
    attention = [n for n, m in model.named_modules() if isinstance(m, TrainMultiheadAttention)]
    assert len(attention) == 6 and set(attention) < set(report.converted) and not report.left
    assert len(report.converted) == 6 + 8
    assert [row.name for row in lb.train.convert_(model).layers] == list(report.converted)
    assert [type(m) for m in model.modules()] == names
    assert all(same_bits(state[name], t) for name, t in model.state_dict().items())


@pytest.mark.thinned(2)
@pytest.mark.parametrize("recipe", ["nvfp4-eden", STOCHASTIC, "fp8", DELAYED], ids=str)
def test_copies_and_pickles_train_as_the_model(recipe):
    model = net(recipe)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    assert list(model.state_dict()) == list(copies[0].state_dict())
    expected = outcome(model)
    for other in copies:
        assert lb.train.state(other) is not lb.train.state(model)
        assert_same(outcome(other), expected)


def test_names_are_those_of_torch_and_states_are_loaded():
    plain, model = Net(), net()
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    model.load_state_dict(plain.state_dict())
    assert all(map(same_bits, model.parameters(), plain.parameters()))
    stateful = [name for name in net(DELAYED).state_dict() if name not in plain.state_dict()]
    assert all(".lowbit_state." in name for name in stateful) and len(stateful) == 3


@pytest.mark.parametrize("recipe", ["fp8", DELAYED], ids=str)
def test_an_optimizer_that_exists_goes_on(recipe):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lb.train.prepare_(model, recipe)
    loss_of(model(torch.randn(BATCH, LENGTH, WIDTH))).backward()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    before = [p.detach().clone() for p in matrices]
    optimizer.step()
    assert not any(map(torch.equal, before, matrices))
    assert lb.train.state(model).step == 1


@pytest.mark.thinned(4)
@pytest.mark.parametrize("policy", ["attention", "mlp", "block", "save_matmuls"])
@pytest.mark.parametrize("recipe", ["fp8", STOCHASTIC, DELAYED], ids=str)
def test_checkpoints_change_no_bit(recipe, policy):
    expected = outcome(net(recipe, dropout=0.25))
    model = net(recipe, dropout=0.25)
    lb.memory.checkpoint_(model, policy)
    assert_same(outcome(model), expected)
    before = Net(0.25)
    before.load_state_dict(net().state_dict())
    lb.memory.checkpoint_(before, policy)
    lb.train.prepare_(before, recipe)
    assert_same(outcome(before), expected)


@pytest.mark.parametrize("first", ["attention_", "prepare_"])
def test_attention_without_scores(first):
    torch.manual_seed(0)
    plain = Net()
    kinds = [type(m) for m in plain.modules()]
    model = copy.deepcopy(plain)
    calls = {"attention_": lb.memory.attention_, "prepare_": lb.train.prepare_}
    for name in sorted(calls, key=lambda name: name != first):
        assert len(calls[name](model).layers) in (6, 14)
    layer = model.both.encoder.layers[0].self_attn
    assert type(layer) is TrainMultiheadAttention and layer.attend is not None
    for mine, other in zip(outcome(model, 1), outcome(net(), 1), strict=True):
        assert (mine - other).norm() <= 0.1 * other.norm() + 1e-4  # another order of sums, which moves codes
    again = copy.deepcopy(model)
    lb.train.convert_(again)
    assert type(again.both.encoder.layers[0].self_attn).__name__ == "ScorelessMultiheadAttention"
    lb.memory.unattention_(again)
    assert [type(m) for m in again.modules()] == kinds
    lb.memory.unattention_(model)
    assert layer.attend is None and type(layer) is TrainMultiheadAttention
    lb.train.convert_(model)
    assert [type(m) for m in model.modules()] == kinds


def test_mixed_precision_with_working_copies():
    model = net()
    lb.train.mixed_(model, "bf16", working_copies=True)
    layer = model.both.decoder.layers[0].multihead_attn
    assert layer.in_proj_weight.dtype == torch.bfloat16 and layer.in_proj_bias.dtype == torch.float32
    optimizer = lb.optim.AdamW(model.parameters(), lr=1e-3, master="fp32")
    x, losses = torch.randn(BATCH, LENGTH, WIDTH), []
    for _ in range(4):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and layer.in_proj_weight.dtype == torch.bfloat16
    lb.train.unmixed_(model, optimizer)
    assert layer.in_proj_weight.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8", STOCHASTIC, DELAYED], ids=str)
@pytest.mark.parametrize("layer", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_compiled_it_computes_the_same(layer, recipe):
    model = layer(WIDTH, HEADS, 64, 0.0, batch_first=True)
    lb.train.prepare_(model, recipe)
    x, state = torch.randn(BATCH, LENGTH, WIDTH), lb.train.state(model)
    inputs = (x,) if layer is nn.TransformerEncoderLayer else (x, x.flip(1))
    results = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        state.set_micro_batch(-1)
        results.append(torch.autograd.grad(loss_of(run(*inputs)), list(model.parameters())))
    assert all(map(same_bits, *results))


def test_codes_of_a_weight_serve_all_micro_batches(monkeypatch):
    made: list[tuple[int, ...]] = []
    encode = gemms.WeightOperands.of

    def noted(weight: Tensor, *args: Any) -> gemms.WeightOperands:
        made.append(tuple(weight.shape))
        return encode(weight, *args)

    monkeypatch.setattr(gemms.WeightOperands, "of", noted)
    for options in ({"batch_first": True}, {"kdim": 16, "vdim": 48, "batch_first": True}):
        layer = layer_of(**options)
        again, model = prepared(copy.deepcopy(layer), reuse_weights=False), prepared(layer)
        seen: list[list[Tensor]] = []
        for net_ in (model, again):
            optimizer, grads, counts = torch.optim.SGD(net_.parameters(), lr=0.1), [], []
            for _ in range(3):
                made.clear()
                for _ in range(3):
                    y, _ = net_[0](*inputs_of(layer, True))
                    y.square().mean().backward()
                counts.append(len(made))
                grads += [p.grad.clone() for p in net_.parameters()]
                optimizer.step()
                optimizer.zero_grad()
            seen.append(grads)
            assert counts == ([12, 4, 4] if net_ is model else [12, 12, 12])
        assert_same(*seen)
        assert all(shape[0] == WIDTH for shape in made)


def test_watched_and_searched():
    model = net()
    with lb.train.watch(model, every=1) as watched:
        loss_of(model(torch.randn(BATCH, LENGTH, WIDTH))).backward()
    layers = {row.layer for row in watched.rows}
    path = "both.decoder.layers.1.multihead_attn"
    assert {f"{path}.{part}" for part in (*PROJECTIONS, "out_proj")} <= layers
    layer = model.get_submodule(path)
    step = lambda: loss_of(model(torch.randn(BATCH, LENGTH, WIDTH)))
    assert lb.train.find_nonfinite(model, step) is None
    with torch.no_grad():
        layer.in_proj_weight[0, 0] = torch.inf
    found = lb.train.find_nonfinite(model, step)
    assert (found.path, found.role) == (path, "in_proj_weight")
    with torch.no_grad():
        layer.in_proj_weight[0, 0] = 0
    handle = layer.in_proj_weight.register_hook(lambda grad: grad * torch.nan)
    found = lb.train.find_nonfinite(model, step)
    assert (found.path, found.role) == (path, "grad_in_proj_weight")
    handle.remove()


def test_it_is_freed_without_the_collector():
    model = net(DELAYED)
    outcome(model, 1)
    gc.collect()
    gc.disable()
    try:
        gone = [weakref.ref(model), weakref.ref(model.both.encoder.layers[0].self_attn.q_proj)]
        del model
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()


# -- which layers -----------------------------------------------------------------------------------------------------
def test_recipes_by_name_and_first_and_last_blocks():
    model = Net()
    report = lb.train.prepare_(model, {"*": None, "*.self_attn": "fp8", "*.linear1": "mxfp8"})
    recipes = {row.name.rsplit(".", 1)[1]: row.recipe for row in report.layers}
    assert recipes == {"self_attn": "fp8", "linear1": "mxfp8"} and len(report.layers) == 6 + 2
    blocks = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 64), 6, enable_nested_tensor=False)
    report = lb.train.prepare_(blocks, "nvfp4")
    assert {name.split(".")[1] for name in report.converted} == {"1", "2", "3", "4"}
    assert "keep_blocks" in report.left["layers.5.self_attn"]
    one = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 64), 3, enable_nested_tensor=False)
    assert lb.train.prepare_(one, {"*": None, "layers.0.self_attn": "nvfp4"}).converted == ("layers.0.self_attn",)


@pytest.mark.parametrize("pattern", ["*.out_proj", "*.self_attn.out_proj"])
def test_a_projection_alone_has_no_recipe(pattern):
    model = Net()
    with pytest.raises(ValueError, match=r"a part of the MultiheadAttention 'both.*self_attn', which is one layer"):
        lb.train.prepare_(model, {"*": "fp8", pattern: None})
    assert not any(isinstance(m, TrainLinear) for m in model.modules())


class Own(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_layers_that_stay_have_a_reason():
    model = nn.ModuleDict({"own": Own(8, 2), "set": nn.MultiheadAttention(8, 2), "plain": nn.MultiheadAttention(8, 2)})
    parametrize.register_parametrization(model["set"], "in_proj_weight", nn.Identity())
    report = lb.train.prepare_(model, "fp8")
    assert report.converted == ("plain",) and set(report.left) == {"own", "set"}
    assert "replaces forward" in report.left["own"] and "is computed" in report.left["set"]
    with pytest.raises(ValueError, match=r"is being trained in low precision \(recipe fp8\)"):
        lb.train.prepare_(model, "fp8")
    with pytest.raises(ValueError, match=r"is being trained in low precision"):
        lb.quantize_(model, "int8")


def test_it_can_be_built_by_hand_and_of_a_subclass():
    layer = TrainMultiheadAttention(WIDTH, HEADS, batch_first=True, recipe="int8")
    x = torch.randn(BATCH, LENGTH, WIDTH)
    layer(x, x, x)[0].sum().backward()
    assert layer.in_proj_weight.grad is not None and "recipe=int8" in repr(layer)
    model = nn.Sequential(type("Mine", (nn.MultiheadAttention,), {})(WIDTH, HEADS))
    lb.train.prepare_(model)
    lb.train.convert_(model)
    assert type(model[0]).__name__ == "Mine"


def test_fused_kernels_are_off_while_it_trains():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 64, 0.0, batch_first=True), 2).eval()
    x = torch.randn(BATCH, LENGTH, WIDTH)
    with torch.no_grad():
        plain = encoder(x, src_key_padding_mask=PADDED)
        lb.train.prepare_(encoder, {"*.self_attn": "fp8"})
        low = encoder(x, src_key_padding_mask=PADDED)
    with_gradients = encoder(x, src_key_padding_mask=PADDED)
    assert same_bits(low, with_gradients.detach()) and not torch.equal(low, plain)
    lb.train.convert_(encoder)
    with torch.no_grad():
        assert torch.equal(encoder(x, src_key_padding_mask=PADDED), plain)


def test_compressed_activations_skip_what_has_codes():
    model = net()
    report = lb.train.compress_activations_(model)
    assert not any("_proj" in row.name or "lowbit_state" in row.name for row in report.layers)
    expected = outcome(net(), 1)
    assert same_bits(outcome(model, 1)[0], expected[0])
