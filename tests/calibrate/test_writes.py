"""Calibration of models that write to their tensors in place, and of those that pick the rows of a layer."""

from __future__ import annotations

import copy
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowbit as lb
from lowbit.calibrate import METHODS as TABLE
from lowbit.calibrate.methods import signround

RECIPE = "int4-weight-only:group32"
SHORT_SIGNROUND = TABLE["signround"]._replace(tune=partial(signround.tune, iterations=20))
METHODS = (None, "gptq", "guided-gptq", "ls-gptq", "search", SHORT_SIGNROUND, ("smoothquant", "gptq"))


class Block(nn.Module):
    """A residual block, written in place or not; ``how`` names what is written to."""

    def __init__(self, how: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.LayerNorm(32)
        self.up, self.gate, self.down = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)
        self.how = how

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        h = self.norm(x)
        up = self.up(h)
        if self.how == "inputs":
            h.mul_(scale)
        else:
            h = h * scale
        y = self.down(F.silu(self.gate(h)) * up)
        if self.how == "arguments":
            y = y * scale.mul_(0.9)
        if self.how == "hidden":
            x += y
            return x
        return x + y


class Stack(nn.Module):
    """``how``: "plain", or what is written to."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(Block(how, seed) for seed in range(3))
        torch.manual_seed(7)
        self.head = nn.Linear(32, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        scale = torch.full((32,), 0.7)
        if self.how == "batches":
            x.mul_(0.5)
        else:
            x = x * 0.5
        for block in self.blocks:
            x = block(x, scale)
            if self.how == "between":
                x.mul_(1.1)
            else:
                x = x * 1.1 if self.how == "between, plain" else x
        return self.head(x)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, 24, 32, generator=generator) for _ in range(2)]


def same(a: lb.Calibration, b: lb.Calibration) -> None:
    assert a.rows.keys() == b.rows.keys()
    for name, weight in a.weights.items():
        assert a.rows[name].method == b.rows[name].method, name
        assert all(torch.equal(part, b.weights[name].parts[what]) for what, part in weight.parts.items()), name
    for name, (scales, _) in a.inputs.items():
        assert torch.equal(scales.scale, b.inputs[name][0].scale), name


@cache
def of_plain(method: Any) -> lb.Calibration:
    return lb.calibrate(Stack("plain"), RECIPE, batches(), method, skip=())


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: getattr(method, "name", str(method)))
@pytest.mark.parametrize("how", ["hidden", "inputs", "batches"])
def test_blocks_written_in_place_get_the_codes_of_those_that_are_not(how, method):
    given, expected = batches(), of_plain(method)
    made = lb.calibrate(Stack(how), RECIPE, given, method, skip=())
    same(expected, made)
    assert all(torch.equal(a, b) for a, b in zip(given, batches(), strict=True)), "batches stay as they are"


@pytest.mark.parametrize("how", ["hidden", "inputs", "batches"])
def test_static_scales_of_inputs_too(how):
    same(*(lb.calibrate(Stack(h), "int8-static", batches(), skip=()) for h in ("plain", how)))


@pytest.mark.parametrize("method", [None, "gptq"])
def test_what_happens_between_blocks_is_not_lost(method):
    same(*(lb.calibrate(Stack(h), RECIPE, batches(), method, skip=()) for h in ("between, plain", "between")))


class Unlisted(nn.Module):
    """A Stack without a list of blocks to be found."""

    def __init__(self, model: Stack) -> None:
        super().__init__()
        self.first, self.second, self.third = model.blocks
        self.head = model.head

    def forward(self, x: Tensor) -> Tensor:
        x, scale = x * 0.5, torch.full((32,), 0.7)
        return self.head(self.third(self.second(self.first(x, scale), scale), scale))


def test_an_argument_that_each_block_writes_to_goes_from_block_to_block():
    model = Stack("arguments")
    listed, whole = (lb.calibrate(m, RECIPE, batches(), "gptq", skip=()) for m in (model, Unlisted(model)))
    for mine, theirs in zip(listed.weights.values(), whole.weights.values(), strict=True):
        assert torch.equal(mine.codes, theirs.codes)


def test_calibration_changes_no_buffer_of_the_model():
    model = Stack("plain")
    lb.calibrate(model, RECIPE, batches(), skip=())
    assert float(model.calls) == 0


class Carrying(nn.Module):
    """Blocks that hand on a second tensor: the same for all of them, or what each adds to."""

    def __init__(self, adds: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Carry(adds) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        carried = None
        for block in self.blocks:
            x, carried = block(x, carried)
        return x


class Carry(nn.Module):
    def __init__(self, adds: bool) -> None:
        super().__init__()
        self.linear, self.adds = nn.Linear(32, 32), adds

    def forward(self, x: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor]:
        if carried is None:
            carried = x.square()
        y = self.linear(x + 0.1 * carried)
        return y, carried + y if self.adds else carried


class Unrolled(nn.Module):
    """The same layers with the same values, without a list of blocks to be found."""

    def __init__(self, model: Carrying) -> None:
        super().__init__()
        self.first, self.second, self.third = model.blocks

    def forward(self, x: Tensor) -> Tensor:
        x, carried = self.first(x, None)
        x, carried = self.second(x, carried)
        return self.third(x, carried)[0]


def test_a_tensor_that_each_block_adds_to_goes_from_block_to_block():
    model = Carrying(adds=True)
    whole = lb.calibrate(Unrolled(model), RECIPE, batches(), "gptq", skip=())
    found = lb.calibrate(model, RECIPE, batches(), "gptq", skip=())
    for mine, theirs in zip(found.weights.values(), whole.weights.values(), strict=True):
        assert torch.equal(mine.codes, theirs.codes)


def test_a_tensor_that_is_the_same_for_all_blocks_leaves_them_a_chain():
    model = Carrying(adds=False)
    whole = lb.calibrate(Unrolled(model), RECIPE, batches(), "gptq", skip=())
    found = lb.calibrate(model, RECIPE, batches(), "gptq", skip=())
    layers = list(zip(found.weights.values(), whole.weights.values(), strict=True))
    assert torch.equal(layers[0][0].codes, layers[0][1].codes)
    assert not torch.equal(layers[2][0].codes, layers[2][1].codes), "it is measured behind quantized blocks"


# -- rows that the model picks ----------------------------------------------------------------------------------------
class Experts(nn.Module):
    """A mixture that sends each token to one of two layers, or with ``capacity`` so many tokens to each."""

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__()
        self.before, self.router = nn.Linear(32, 32), nn.Linear(32, 2)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.capacity = capacity

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x + self.before(x)).flatten(0, 1)
        scores = self.router(8 * tokens)
        result = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            chosen = scores.argmax(-1) == index
            if self.capacity is not None:
                chosen = scores[:, index].topk(self.capacity).indices
            result[chosen] = expert(tokens[chosen])
        return result.unflatten(0, x.shape[:2])


class Mixture(nn.Module):
    def __init__(self, capacity: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Experts(capacity) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("capacity", [None, 48])
@pytest.mark.parametrize("method", [None, "ls-gptq"])
def test_importances_are_never_those_of_other_tokens(method, capacity):
    """An expert's codes are those of gptq behind the same layers, which looks at no token of another run."""
    model = Mixture(capacity)
    found = lb.calibrate(model, RECIPE, batches(), method, skip=())
    assert {found.rows[f"blocks.{b}.experts.{e}"].method for b in range(3) for e in range(2)} == {"gptq"}
    assert {found.rows[f"blocks.{b}.before"].method for b in range(3)} == {method or "guided-gptq"}
    quantized = copy.deepcopy(model)
    lb.quantize_(quantized, RECIPE, found, skip=())
    seen: list[Tensor] = []
    handle = quantized.blocks[2].experts[1].register_forward_hook(lambda layer, args, y: seen.append(args[0]))
    for batch in batches():
        quantized(batch)
    handle.remove()
    alone = nn.Sequential(copy.deepcopy(model.blocks[2].experts[1]))
    again = lb.calibrate(alone, RECIPE, seen, "gptq", skip=())
    assert torch.equal(again.weights["0"].codes, found.weights["blocks.2.experts.1"].codes)


@pytest.mark.thinned(6)
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe", "DeepseekV3"])
@pytest.mark.parametrize("method", [None, "ls-gptq"])
def test_mixtures_of_transformers(kind, method):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=32, intermediate_size=48, moe_intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=64, num_local_experts=4, num_experts=4, n_routed_experts=4,
        num_experts_per_tok=2, first_k_dense_replace=1, n_group=1, topk_group=1, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
    )  # fmt: skip
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p *= 8 if p.dim() > 1 else 1
    tokens = [torch.randint(64, (2, 17)) for _ in range(3)]
    found = lb.calibrate(model, RECIPE, tokens, method)
    lb.quantize_(model, RECIPE, found)
    with torch.no_grad():
        assert bool(model(tokens[0]).logits.isfinite().all())


def test_padding_moves_no_importance():
    from lowbit.calibrate.importance import weigh
    from lowbit.calibrate.recording import observed, observed_layers
    from lowbit.recipes import layer_recipes

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.layer = nn.Embedding(16, 32), nn.Linear(32, 24)

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return self.layer(self.table(input_ids))

    ids = torch.randint(16, (3, 9))
    padded = F.pad(ids, (0, 5), value=1)
    mask = F.pad(torch.ones_like(ids), (0, 5))
    rows = []
    for batch in ({"input_ids": ids}, {"input_ids": padded, "attention_mask": mask}):
        work = observed(Encoder(), layer_recipes(RECIPE), ())
        weigh(work, observed_layers(work), [batch], None)
        importance = observed_layers(work)[0].importance[0][0]
        rows.append(importance[:, :9] / importance[:, :9].mean())
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-6, atol=0)
