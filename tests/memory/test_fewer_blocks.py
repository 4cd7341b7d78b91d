"""An estimate from four of many alike blocks equals the estimate in which every block runs, op by op."""

from __future__ import annotations

import math

import pytest
import torch
import transformers as hf
from torch import nn

import lowbit as lb
from lowbit.memory import fewer_blocks
from lowbit.memory.alike import runs_of
from lowbit.plan import DEVICES
from lowbit.plan.fitting.predict import Predictor
from lowbit.plan.settings import TrainingSettings
from lowbit.plan.subject import Subject

IDS = torch.randint(0, 100, (4, 16))
BATCH = {"input_ids": IDS, "labels": IDS}


def cross_entropy(output, batch):
    return nn.functional.cross_entropy(output.flatten(0, 1), batch.flatten())


def decoder(depth=7, **settings):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = hf.LlamaConfig(**sizes, num_hidden_layers=depth, vocab_size=100, **settings)
    return hf.LlamaForCausalLM(config).train()


class Stack(nn.Module):
    """Blocks with a residual stream that the model itself adds to; ``how`` says what else the forward does."""

    def __init__(self, how="plain", depth=8):
        super().__init__()
        self.how = how
        self.embed, self.head = nn.Embedding(100, 32), nn.Linear(32, 100)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 2, 48, batch_first=True) for _ in range(depth)
        )  # fmt: skip
        if how == "one is wider":
            self.blocks[depth // 2] = nn.TransformerEncoderLayer(32, 2, 96, batch_first=True)
        if how == "every third is wider":
            for number in range(2, depth, 3):
                self.blocks[number] = nn.TransformerEncoderLayer(32, 2, 96, batch_first=True)

    def forward(self, ids):
        hidden, outputs = self.embed(ids), []
        for number in range(len(self.blocks)):
            if self.how == "skips" and number >= len(self.blocks) // 2:
                hidden = hidden + outputs[len(self.blocks) - 1 - number]
            hidden = hidden + self.blocks[number](hidden)
            outputs.append(hidden)
        if self.how == "all outputs":
            hidden = torch.stack(outputs).mean(0)
        if self.how == "every output has a loss":
            return sum(self.head(output) for output in outputs)
        return self.head(hidden)


def compared(model, batch, monkeypatch, **settings):
    """The estimate, and the one in which every block runs."""
    estimate = lb.estimate(model, batch, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(fewer_blocks.Fewer, "of", lambda *_: None)
        full = lb.estimate(model, batch, **settings)
    return estimate, full


def holdings(estimate):
    """Size, kind, layer and times of each storage that is alive in the step, counted from its first op."""
    first = len(estimate._ops) - len(estimate.ops)
    return sorted(
        (h.bytes, h.kind, h.layer, max(h.born - first, -1), h.died - first)
        for h in estimate._holdings if h.died >= first
    )  # fmt: skip


def check(estimate, full):
    assert estimate.ops == full.ops
    assert holdings(estimate) == holdings(full)
    assert estimate.timeline == full.timeline and estimate.by_layer == full.by_layer
    assert len(estimate.op_seconds) == len(full.op_seconds) and all(
        map(math.isclose, estimate.op_seconds, full.op_seconds)
    )


@pytest.fixture
def left_out(monkeypatch):
    """The estimates that were made with fewer blocks to the end."""
    done, extend = [], fewer_blocks.Fewer.extend

    def counted(self, *args):
        since = extend(self, *args)
        done.append(len(self._cuts))
        return since

    monkeypatch.setattr(fewer_blocks.Fewer, "extend", counted)
    return done


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer": None},
        {"optimizer": "adamw8bit"},
        {"micro_batches": 2},
        {"checkpoint": "block"},
        {"checkpoint": "save_matmuls"},
        {"precision": "bf16", "master": "residual", "optimizer": "adamw8bit"},
        {"recipe": "fp8", "checkpoint": "mlp"},
    ],
    ids=str,
)
def test_a_decoder_in_each_setting(settings, monkeypatch, left_out):
    check(*compared(decoder(), BATCH, monkeypatch, **settings))
    assert left_out == [1]


FAMILIES = {
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=7, n_head=2, vocab_size=100)),
    "local and global attention in turn": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=10, num_attention_heads=2, num_key_value_heads=1,
            head_dim=16, vocab_size=100, layer_types=["sliding_attention", "full_attention"] * 5,
        )
    ),
    "two stacks": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(
            d_model=32, d_ff=48, num_layers=8, num_heads=2, d_kv=16, vocab_size=100, decoder_start_token_id=0,
        )
    ),
    "experts": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=7, num_attention_heads=2, num_key_value_heads=1,
            vocab_size=100, num_local_experts=2,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name, monkeypatch, left_out):
    check(*compared(FAMILIES[name]().train(), BATCH, monkeypatch))
    assert len(left_out) == 1


@pytest.mark.parametrize("how", ["plain", "one is wider", "every third is wider"])
def test_hand_written_stacks(how, monkeypatch, left_out):
    depth = {"plain": 8, "one is wider": 14, "every third is wider": 18}[how]
    check(*compared(Stack(how, depth), IDS, monkeypatch, loss=cross_entropy))
    assert left_out == [{"plain": 1, "one is wider": 2, "every third is wider": 1}[how]]


@pytest.mark.parametrize("how", ["skips", "all outputs", "every output has a loss"])
def test_blocks_whose_outputs_are_read_later_all_run(how, monkeypatch, left_out):
    check(*compared(Stack(how), IDS, monkeypatch, loss=cross_entropy))
    assert not left_out


def test_logits_of_all_routers_are_read_by_the_loss(monkeypatch, left_out):
    model = FAMILIES["experts"]().train()
    model.config.output_router_logits = True
    check(*compared(model, BATCH, monkeypatch))
    assert not left_out


def test_an_optimizer_in_backward_needs_every_block(monkeypatch, left_out):
    model = decoder()

    def hooked(copied):
        for parameter in copied.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    check(*compared(model, BATCH, monkeypatch, prepare=hooked, optimizer=None))
    assert not left_out


def test_the_model_keeps_its_blocks():
    model = decoder()
    lb.estimate(model, BATCH)
    assert list(model.model.layers._modules) == [str(number) for number in range(7)]
    assert "_get_abs_string_index" not in vars(model.model.layers)


def test_a_forward_that_fails_fails_with_its_own_error():
    class Fails(Stack):
        def forward(self, ids):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        lb.estimate(Fails(), IDS, loss=cross_entropy)


def periods(model):
    return [[list(period) for period in run.periods] for run in runs_of(model)]


def test_runs_end_where_blocks_differ():
    model = decoder(12)
    assert [len(run) for run in periods(model)] == [12]
    model.model.layers[5].self_attn.scaling *= 2
    assert [[run[0], run[-1]] for run in periods(model)] == [[["0"], ["4"]], [["6"], ["11"]]]
    model.model.layers[8].mlp.gate_proj.weight.requires_grad_(False)
    assert [[run[0], run[-1]] for run in periods(model)] == [[["0"], ["4"]]]


def test_few_blocks_and_shared_weights_are_no_run():
    assert not periods(decoder(4))
    model = decoder(8)
    model.model.layers[6].mlp.gate_proj.weight = model.model.layers[2].mlp.gate_proj.weight
    assert not periods(model)


def test_values_of_whole_number_buffers_count():
    model = Stack(depth=8)
    for number, block in enumerate(model.blocks):
        block.register_buffer("window", torch.tensor([4 if number < 6 else 8]))
    assert [len(run) for run in periods(model)] == [6]


PLANNED = [
    {}, {"precision": "bf16"}, {"recipe": "fp8", "precision": "bf16"}, {"adapters": 4},
    {"adapters": 4, "base": "int8-weight-only"}, {"adapters": 4, "base": "nf4", "checkpoint": "block"},
    {"checkpoint": "block"}, {"fused_loss": True, "attention": True},
]  # fmt: skip


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("name", "fields", "count"),
    [
        *((name, fields, 1) for name in ("llama", "stack", "every third is wider") for fields in PLANNED),
        ("llama", PLANNED[0], 2), ("stack", PLANNED[5], 2),
    ],
    ids=str,
)  # fmt: skip
def test_a_plan_estimates_a_copy_without_the_blocks(name, fields, count, left_out):
    if name != "llama" and "fused_loss" in fields:
        fields = {"attention": True}
    model = decoder(depth=12) if name == "llama" else Stack("plain" if name == "stack" else name, depth=15)
    target = DEVICES["h100"] if count == 1 else None  # whose ops need not be timed
    subject = Subject(model, BATCH if name == "llama" else IDS, None if name == "llama" else cross_entropy, 4, target)
    predictor = Predictor(subject)
    settings = TrainingSettings(**fields)
    if "checkpoint" in fields:
        settings = TrainingSettings(**{**fields, "checkpoint": ("block",) * len(predictor.blocks)})
    estimate = predictor._estimate(settings, count)
    assert left_out and predictor._hidden is not None
    predictor._hidden = None
    check(estimate, predictor._estimate(settings, count))


@pytest.mark.parametrize("how", ["skips", "all outputs", "every output has a loss"])
def test_a_plan_estimates_every_block_if_they_differ(how):
    loss = (lambda y, batch: y.square().mean()) if how == "every output has a loss" else cross_entropy
    predictor = Predictor(Subject(Stack(how, depth=12), IDS, loss))
    estimate = predictor._estimate(TrainingSettings(), 1)
    assert predictor._hidden is None
    check(estimate, predictor._estimate(TrainingSettings(), 1))


@pytest.mark.parametrize(
    ("checkpoint", "hidden"),
    [
        (("keep", *("block",) * 10, "mlp"), 6),
        (("block",) * 7 + ("keep",) * 5, 3 + 1),
        (("block",) * 4 + ("keep",) * 4 + ("mlp",) * 4, 0),
        (("keep", "block") * 6, 0),
        ("sqrt", 0),
    ],
    ids=str,
)
def test_blocks_of_equal_options_stand_for_each_other(checkpoint, hidden, left_out):
    predictor = Predictor(Subject(decoder(depth=12), BATCH, target=DEVICES["h100"]))
    settings = TrainingSettings(checkpoint=checkpoint)
    blocks = predictor._need_not_run(settings)
    assert hidden == (0 if blocks is None else len(blocks.paths))
    estimate = predictor._estimate(settings, 1)
    assert blocks is None or left_out == [len(blocks.cuts)]
    predictor._hidden = None
    check(estimate, predictor._estimate(settings, 1))


@pytest.mark.parametrize("name", ["llama", "every third is wider"])
@pytest.mark.parametrize("fields", [{}, {"bits": 8}, {"adapters": 4, "base": "nf4"}, {"gpus": 2, "strategy": "zero3"}])
def test_the_step_over_a_copy_without_blocks_is_that_over_all(name, fields):
    model = decoder(depth=24) if name == "llama" else Stack(name, depth=24)
    subject = Subject(
        model, BATCH if name == "llama" else IDS, None if name == "llama" else cross_entropy, 4, DEVICES["h100"]
    )
    predictor, settings = Predictor(subject), TrainingSettings(**fields)
    step = predictor._step(settings)
    every = Predictor(subject)
    every._hidden = None
    expected = every._step(settings)
    assert step._replace(seconds=0.0) == expected._replace(seconds=0.0)
    assert math.isclose(step.seconds, expected.seconds, rel_tol=1e-9)
