"""Feed-forward parts in tiles of tokens: gradients, memory, and modules that cannot be tiled."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers as hf
from torch import nn

import lowbit as lb

IDS = torch.randint(0, 90, (3, 21), generator=torch.Generator().manual_seed(0))


def llama():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=90))


def neox():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**sizes, vocab_size=90))


def t5():
    sizes = {"d_model": 16, "d_ff": 24, "num_layers": 2, "num_heads": 2, "d_kv": 8, "vocab_size": 90}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0))


class Encoder(nn.Module):
    """torch's own layers: their feed-forward part is a method."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(90, 16), nn.Linear(16, 90)
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, input_ids, labels):
        logits = self.head(self.encoder(self.embed(input_ids)))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Hand(nn.Module):
    """A hand-written block whose part takes its tensor by name."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(90, 16), nn.Linear(16, 90)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"attn": nn.MultiheadAttention(16, 2, batch_first=True), "ffn": Ffn()}) for _ in range(2)
        )

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block["attn"](x, x, x, need_weights=False)[0]
            x = x + block["ffn"](tokens=x)
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


class Ffn(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, tokens):
        return self.down(nn.functional.gelu(self.up(tokens)))


MODELS = {
    "llama": (llama, 2),
    "neox": (neox, 2),
    "t5": (t5, 4),
    "torch's layers": (Encoder, 2),
    "hand-written": (Hand, 2),
}


def step(model):
    loss = model(input_ids=IDS, labels=IDS)["loss"]
    return loss, torch.autograd.grad(loss, list(model.parameters()))


def built(make):
    torch.manual_seed(0)
    return make().double().train()


@pytest.mark.parametrize("rows", [1, 5, 62])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_stay(name, rows):
    make, count = MODELS[name]
    model = built(make)
    expected = step(model)
    report = lb.memory.tile_(model, rows)
    assert len(report.layers) == count
    torch.testing.assert_close(step(model), expected, rtol=1e-9, atol=1e-12)
    assert len(lb.memory.untile_(model).layers) == count
    assert all(map(torch.equal, step(model)[1], expected[1])) and "Tiled" not in repr(model)


@pytest.mark.parametrize("name", MODELS)
def test_no_more_tokens_than_rows_change_no_bit(name):
    model = built(MODELS[name][0])
    expected = step(model)
    lb.memory.tile_(model, IDS.numel())
    assert all(map(torch.equal, step(model)[1], expected[1]))


def test_evaluation_runs_in_tiles_too():
    model = built(llama).eval()
    expected = model(input_ids=IDS).logits
    lb.memory.tile_(model, 4)
    lengths = []
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda m, args, out: lengths.append(out.shape[-2]))
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=IDS).logits, expected, rtol=1e-9, atol=1e-12)
    assert max(lengths) == 8 and lengths.count(4) >= 15  # 8 tokens in the check of the first call


@pytest.mark.parametrize("name", MODELS)
def test_copies_and_pickles_stay_tiled(name):
    model = built(MODELS[name][0])
    expected = step(model)
    lb.memory.tile_(model, 5)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(step(other), expected, rtol=1e-9, atol=1e-12)
        assert len(lb.memory.untile_(other).layers) == MODELS[name][1]


def test_it_goes_together_with_checkpoints_and_recipes():
    model = built(llama).float()
    expected = step(model)
    lb.memory.tile_(model, 8)
    lb.memory.checkpoint_(model, "block")
    torch.testing.assert_close(step(model), expected, rtol=1e-4, atol=1e-5)
    lb.memory.uncheckpoint_(model)
    lb.train.prepare_(model, "fp8")
    other = built(llama).float()
    lb.train.prepare_(other, "fp8")
    torch.testing.assert_close(step(model)[0], step(other)[0], rtol=1e-4, atol=1e-4)


def test_memory_is_that_of_one_tile_and_estimates_know_it():
    torch.manual_seed(0)
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.ModuleDict({"mlp": Wide()}) for _ in range(1))})
    x = torch.randn(1, 2048, 16, requires_grad=True)

    def run():
        torch.autograd.grad(model["blocks"][0]["mlp"](x).sum(), x)

    run()
    plain = lb.memory.allocated_peak(run)
    lb.memory.tile_(model, 128, [model["blocks"][0]["mlp"]])
    run()
    assert lb.memory.allocated_peak(run) < plain / 5


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 512), nn.Linear(512, 16)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


def test_an_estimate_of_tiles_is_what_a_step_allocates():
    model = built(llama).float()
    batch = {"input_ids": torch.randint(0, 90, (1, 512)), "labels": torch.randint(0, 90, (1, 512))}
    plain = lb.estimate(model, batch, optimizer=None).peak_bytes
    estimate = lb.estimate(model, batch, optimizer=None, prepare=lambda copied: lb.memory.tile_(copied, 64))
    lb.memory.tile_(model, 64)

    def run():
        model(**batch).loss.backward()
        model.zero_grad()

    run()
    held = lb.memory.allocated_peak(run) + sum(p.nbytes for p in model.parameters())
    held += sum(tensor.nbytes for tensor in batch.values())
    assert estimate.peak_bytes < plain
    states = 2 * 8 * torch.get_rng_state().nbytes  # each tile keeps the random state, which no op allocates
    assert estimate.peak_bytes == pytest.approx(held - states, rel=0.001)


class Shift(nn.Module):
    """A feed-forward part that mixes each token with the one before, as RWKV's does."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x):
        return self.down(self.up(x + nn.functional.pad(x, (0, 0, 1, -1))).relu())


class Pair(Ffn):
    def forward(self, tokens):
        return super().forward(tokens), None


@pytest.mark.parametrize(
    ("part", "words"), [(Shift, "depends on other tokens"), (Pair, r"expected a result \[\.\.\., features\]")]
)
def test_parts_that_cannot_be_tiled_are_refused_at_the_first_call(part, words):
    model = built(Hand)
    for block in model.blocks:
        block["ffn"] = part().double()
    lb.memory.tile_(model, 4, [block["ffn"] for block in model.blocks])
    with pytest.raises(ValueError, match=rf"memory\.tile_: 'blocks\.0\.ffn': .*{words}.*modules="):
        model.blocks[0]["ffn"](torch.randn(1, 9, 16, dtype=torch.float64))


def test_errors():
    model = built(llama)
    for rows in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="rows is a number of tokens from 1"):
            lb.memory.tile_(model, rows)
    lb.memory.tile_(model, 4, [model.model.layers[0].self_attn])
    with pytest.raises(ValueError, match=r"expected one tensor .* as its argument"):
        model(input_ids=IDS)
    with pytest.raises(ValueError, match="feed-forward"):
        lb.memory.tile_(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 4)


def test_a_plan_may_require_tiles():
    model = built(llama).float()
    batch = {"input_ids": torch.randint(0, 90, (1, 4000)), "labels": torch.randint(0, 90, (1, 4000))}
    plain = ["fp32", "own attention", "own loss", "adamw", "everything kept"]
    plan = lb.fit(model, batch, "100%", require=["tiled feed-forward", *plain], exclude=["disk", "micro-batches"])
    run = plan.apply_(model)
    assert plan.settings.tiles == 2048 and "tiled feed-forward" in str(plan)
    assert run.step(batch) > 0 and len(lb.memory.untile_(model).layers) == 2
