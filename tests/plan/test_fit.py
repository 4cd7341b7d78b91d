"""``lb.fit``: a plan's peak is what training holds, its steps are those of a loop by hand, less memory costs time."""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowbit as lb
from lowbit.bench import loss_tables
from lowbit.checkpointing.block_table import BlockTable
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.memory import profile
from lowbit.models.wrap import wrapper_of, wrappers
from lowbit.offload.streaming import Streamed
from lowbit.plan import TECHNIQUES, Device, TrainingPlan
from lowbit.plan.fitting import Run
from lowbit.plan.fitting.choices import NOISE
from lowbit.plan.fitting.line import Line
from lowbit.plan.fitting.predict import Predictor
from lowbit.plan.fitting.search import fits
from lowbit.plan.settings import TrainingSettings
from lowbit.plan.subject import Subject
from lowbit.plan.techniques import BASES, STRATEGY, techniques

CONFIG = GPTConfig(vocab=1024, layers=2, heads=2, dim=96, hidden=256)
BATCH = torch.randint(1024, (8, 128), generator=torch.Generator().manual_seed(0))
NAMES = [technique.name for technique in techniques()]


@pytest.fixture(scope="module")
def plans():
    """By budget, as shares of plain training, falling."""
    shares = (100, 45, 20)
    left_out = ("attention", "save_matmuls", "sqrt", "mlp", "fp8", "fp8-compressed", "fused loss", "stochastic")
    found = fits(GPT(CONFIG), BATCH, [f"{share}%" for share in shares], exclude=left_out)
    return dict(zip(shares, found, strict=True))


def measured(run, batch):
    gc.collect()
    found = profile(run.model, batch, run.step)
    return found.peak_bytes - found.by_kind.get("other", 0)


# -- bytes ------------------------------------------------------------------------------------------------------------
@pytest.mark.thinned(3)
@pytest.mark.parametrize("share", [20, 45, 100])
def test_a_step_holds_what_the_plan_says_and_no_more_than_the_budget(plans, tmp_path, share):
    plan = plans[share]
    held = measured(plan.apply_(GPT(CONFIG), directory=tmp_path), BATCH)
    assert held <= plan.budget
    late = 0.05 if plan.settings.offload_activations else 0  # the last write may be done by then
    assert plan.peak_bytes * (0.96 - late) <= held <= plan.peak_bytes * 1.01


def test_small_states_are_held_although_states_are_offloaded(tmp_path):
    torch.manual_seed(0)
    layers = [layer for _ in range(24) for layer in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(64, 1024))
    batch, loss = torch.randn(32, 64), lambda output, batch: output.square().mean()
    settings = TrainingSettings(bits=4, offload_states=True)
    predicted = Predictor(Subject(model, batch, loss)).whole(settings)
    run = Run(model, settings, loss, tmp_path, {})
    for _ in range(2):
        run.step(batch)
    small = sum(t.nbytes for s in run.optimizer.state.values() for t in s.values() if t.nbytes < 4096)
    held = measured(run, batch)
    assert small > 0.05 * held and 0.99 * held <= predicted.peak_bytes <= 1.02 * held


def test_less_memory_takes_no_less_time(plans):
    for more, less in itertools.pairwise(plans.values()):
        assert less.budget < more.budget and less.peak_bytes <= less.budget and less.seconds >= more.seconds
        assert less.settings != more.settings


def test_nothing_on_the_frontier_is_smaller_and_faster_than_another(plans):
    for plan in plans.values():
        sizes = [one.peak_bytes for one in plan.frontier]
        times = [one.seconds for one in plan.frontier]
        assert sizes == sorted(sizes) and times == sorted(times, reverse=True) and len(sizes) > 3
        # A choice that is not plain has to be worth half a percent.
        fitting = [one.seconds for one in plan.frontier if one.peak_bytes <= plan.budget]
        assert plan.seconds <= 1.03 * min(fitting)


def test_what_cannot_fit_says_the_least_that_would():
    with pytest.raises(ValueError, match="no choice fits") as error:
        names = ("fp32", "adamw", "own loss", "block", "memory", "activations in memory")
        lb.fit(GPT(CONFIG), BATCH, 100_000, require=names)
    assert "with block, 8 micro-batches. Ask" in str(error.value)
    assert "gpus" not in str(error.value) and "processes" not in str(error.value), "nobody asked for several"


def test_a_row_of_a_smaller_part_takes_no_less_time():
    """Times are on the line through half a batch and one row, and at least in proportion to half of it."""

    def table(rows, seconds):
        zeros = np.zeros(2)
        return BlockTable(zeros + rows, zeros, np.zeros(3), zeros + seconds / 4, seconds, 10.0 + rows)

    for one, expected in ((0.3, {3: 0.5, 2: 0.4, 1: 0.3}), (0.01, {3: 0.45, 2: 0.3, 1: 0.15})):
        line = Line(8, table(8, 2.0), table(4, 0.5), table(4, 0.6), one / 0.6)
        assert line.at(1).seconds == 2.0 and line.at(2).seconds == 0.6
        for count, rows in ((3, 3), (4, 2), (8, 1)):
            part = line.at(count)
            assert part.seconds == pytest.approx(expected[rows])
            assert part.recomputation[0] == pytest.approx(part.seconds / 4)
            assert part.peak == 10.0 + rows and part.kept[0] == rows, "bytes are on the line"


def test_parts_of_few_rows_are_not_taken_for_as_fast_as_large_ones():
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    predictor = Predictor(Subject(model, torch.randn(1024, 64), lambda output, batch: output.square().mean()))
    few, many = (predictor.predicted(TrainingSettings(micro_batches=count)) for count in (4, 1024))
    assert many.seconds > 3 * few.seconds and many.peak_bytes < few.peak_bytes
    assert many.seconds == pytest.approx(predictor.whole(many.settings).seconds, rel=0.2)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    "settings",
    [
        TrainingSettings(micro_batches=8),
        TrainingSettings(micro_batches=4, checkpoint="block", offload_activations=True),
    ],
)
def test_sums_of_tables_are_near_the_whole_step(settings):
    predictor = Predictor(Subject(GPT(CONFIG), BATCH))
    quick, whole = predictor.predicted(settings), predictor.whole(settings)
    assert quick.seconds == pytest.approx(whole.seconds, rel=0.1) and quick.peak_bytes == pytest.approx(
        whole.peak_bytes, rel=0.03
    )


# -- models of transformers -------------------------------------------------------------------------------------------
@pytest.fixture
def llama():
    transformers = pytest.importorskip("transformers", minversion="5")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=6144, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        tie_word_embeddings=True, attn_implementation="eager",
    )  # fmt: skip
    ids = torch.randint(6144, (1, 768), generator=torch.Generator().manual_seed(0))
    return transformers.LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids}


@pytest.mark.slow
def test_logits_and_scores_go_where_the_budget_asks_for_it(llama, tmp_path):
    model, batch = llama
    plain = copy.deepcopy(model)(**batch).loss.item()
    names = ("fp32", "everything kept", "memory", "activations in memory", "adamw")
    plan = lb.fit(model, batch, "45%", require=names)
    assert plan.settings == TrainingSettings(fused_loss=True, attention=True)
    assert model.config._attn_implementation == "eager" and not wrappers(model)
    shown = str(plan)
    assert "fused loss" in shown and "attention without scores" in shown
    run = plan.apply_(model, directory=tmp_path)
    assert run.step(batch) == pytest.approx(plain, rel=1e-5)
    held = measured(run, batch)
    assert plan.peak_bytes * 0.97 <= held <= plan.peak_bytes * 1.01 and held <= plan.budget


@pytest.mark.parametrize(
    "settings",
    [TrainingSettings(micro_batches=2), TrainingSettings(micro_batches=2, fused_loss=True)],
    ids=["own", "fused"],
)
def test_parts_are_weighed_by_their_labels(llama, tmp_path, settings):
    model, batch = llama
    labels = batch["input_ids"].reshape(4, -1).clone()
    labels[0], labels[1, :100] = -100, -100
    batch = {"input_ids": batch["input_ids"].reshape(4, -1), "labels": labels}
    expected = model(**batch).loss.item()
    run = Run(copy.deepcopy(model), settings, None, tmp_path, {})
    assert run.step(batch) == pytest.approx(expected, rel=1e-6)


def test_a_model_that_writes_into_results_of_products_keeps_them():
    """GPT-OSS, with attention sinks and eager attention."""
    transformers = pytest.importorskip("transformers", minversion="5")
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=160, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=6,
    )  # fmt: skip
    model, ids = transformers.GptOssForCausalLM(config).train(), BATCH[:3, :20] % 160
    predictor = Predictor(Subject(model, {"input_ids": ids, "labels": ids}))
    assert predictor.applies("save_matmuls") and "save_matmuls" in predictor.options


@pytest.mark.filterwarnings("ignore:fit. LlamaForCausalLM is in evaluation mode")
def test_a_choice_that_does_nothing_here_is_refused_where_it_is_asked_for(llama):
    model, batch = llama
    for other, given, loss in (
        (GPT(CONFIG), BATCH, lambda output, batch: output.square().mean()),
        (model, batch, lambda output, batch: output.loss),
        (model, {"input_ids": batch["input_ids"]}, None),
        (model.eval(), batch, None),
    ):
        with pytest.raises(
            ValueError, match=r"'fused loss' does nothing for this \w+, its batch and its loss; leave it out"
        ):
            lb.fit(other, given, "100%", loss, require=("fused loss",))
    model.train().set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="'attention without scores' does nothing"):
        lb.fit(model, batch, "100%", require=("attention without scores",))


# -- weights elsewhere ------------------------------------------------------------------------------------------------
WIDE = GPTConfig(vocab=256, layers=6, heads=2, dim=256, hidden=768)


@pytest.mark.slow
def test_weights_go_to_disk_where_nothing_else_fits(tmp_path, monkeypatch):
    for module in ("lowbit.optim.offload", "lowbit.plan.fitting.predict"):
        monkeypatch.setattr(f"{module}.CHUNK_BYTES", 1 << 20)  # so that a few parameters of a small model step together
    torch.manual_seed(0)
    model, batch = GPT(WIDE), BATCH[:2, :32] % 256
    weights = sum(p.nbytes for p in model.parameters())
    budget = int(0.8 * weights)
    names = ("fp32", "adamw", "everything kept", "activations in memory")
    with pytest.raises(ValueError, match="no choice fits"):
        lb.fit(model, batch, budget, require=names, exclude=("weights on disk",))
    plan = lb.fit(model, batch, budget, require=names)
    assert plan.settings == TrainingSettings(
        offload_states=True, offload_weights=True, micro_batches=plan.settings.micro_batches
    )
    assert (
        "weights on disk" in str(plan)
        and TrainingPlan.load(plan.save(tmp_path / "plan.json")).settings == plan.settings
    )

    plain = lb.fit(
        model, batch, "100%", require=("fp32", "adamw", "everything kept", "memory", "activations in memory")
    )
    runs = [one.apply_(copy.deepcopy(model), directory=tmp_path, lr=1e-3) for one in (plain, plan)]
    runs[0].settings = dataclasses.replace(runs[0].settings, micro_batches=plan.settings.micro_batches)
    losses = [[run.step(batch) for _ in range(3)] for run in runs]
    assert losses[0] == losses[1], "no bit changes"
    assert all(map(torch.equal, *(run.model.state_dict().values() for run in runs)))

    outside = [p for name, p in runs[1].model.named_parameters() if "blocks" not in name or p.nbytes < 4096]
    small = [t for s in runs[1].optimizer.state.values() for t in s.values() if t.nbytes < 4096]
    held = lb.memory.allocated_peak(lambda: runs[1].step(batch)) + sum(t.nbytes for t in (*outside, *small, batch))
    two_blocks = 2 * (weights - sum(p.nbytes for p in outside)) / WIDE.layers
    assert held <= plan.peak_bytes <= 1.1 * held + two_blocks and plan.peak_bytes <= budget


def test_as_many_blocks_stay_in_memory_as_the_budget_allows(tmp_path):
    names = ("fp32", "adamw", "everything kept", "activations in memory", "disk", "weights on disk", "whole batch")
    batch = BATCH[:2, :32] % 256
    with torch.device("meta"):
        model = GPT(WIDE)
    device = Device("small", 1 << 30, 1e11, {"fp32": 1e13}, host=1e9)
    plans = [lb.fit(model, batch, share, require=names, device=device) for share in ("25%", "40%", "60%")]
    counts = [plan.settings.resident for plan in plans]
    assert 0 <= counts[0] < counts[1] < counts[2] < WIDE.layers
    assert all(plan.peak_bytes <= plan.budget for plan in plans)
    assert plans[0].seconds > plans[1].seconds > plans[2].seconds
    assert f"weights on disk, {counts[2]} blocks in memory" in str(plans[2])
    assert TrainingPlan.load(plans[2].save(tmp_path / "plan.json")) == plans[2]

    torch.manual_seed(0)
    real = GPT(WIDE)
    same = copy.deepcopy(real)
    run = plans[2].apply_(real, directory=tmp_path, lr=1e-3)
    streamed = [wrapper_of(block, Streamed) is not None for block in real.blocks]
    assert streamed == [False] * counts[2] + [True] * (WIDE.layers - counts[2])
    plain = Run(same, TrainingSettings(), None, tmp_path, {"lr": 1e-3})
    assert [run.step(batch) for _ in range(2)] == [plain.step(batch) for _ in range(2)]


def test_weights_elsewhere_need_states_elsewhere():
    with pytest.raises(ValueError, match=r"do not go together: 'weights on disk' needs 'disk'"):
        lb.fit(GPT(CONFIG), BATCH, "100%", require=("weights on disk", "memory"))
    with pytest.raises(ValueError, match="'weights on disk' does nothing for this Sequential"):
        lb.fit(nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8), "100%", require=("weights on disk",))


# -- training ---------------------------------------------------------------------------------------------------------
def test_a_plan_of_nothing_is_plain_training():
    plain = ("fp32", "adamw", "everything kept", "memory", "activations in memory")
    plan = lb.fit(GPT(CONFIG), BATCH, "100%", require=plain)
    torch.manual_seed(0)
    model = GPT(CONFIG)
    run, other = plan.apply_(copy.deepcopy(model), lr=1e-3, weight_decay=0.1), model
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3, weight_decay=0.1)
    for _ in range(3):
        loss = F.cross_entropy(other(BATCH)[:, :-1].flatten(0, 1), BATCH[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert run.step(BATCH) == loss.item()
    assert all(map(torch.equal, run.model.parameters(), other.parameters()))


@pytest.mark.slow
def test_parts_and_checkpoints_leave_the_losses_what_they_are(tmp_path):
    torch.manual_seed(0)
    model = GPT(CONFIG)
    settings = ("fp32", "adamw")
    losses = []
    for share, keep in ((100, ("everything kept",)), (25, ("block", "disk"))):
        plan = lb.fit(model, BATCH, f"{share}%", require=(*settings, *keep))
        run = plan.apply_(copy.deepcopy(model), directory=tmp_path, lr=1e-3)
        assert (run.settings.micro_batches > 1) == (share < 100)
        losses.append([run.step(BATCH) for _ in range(3)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_loss_of_ones_own_and_dictionaries():
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
    batch = {"input": torch.randn(32, 64)}

    def loss(output, batch):
        return (output - batch["input"][:, :8]).square().mean()

    run = lb.fit(model, batch, "100%", loss, exclude=("bf16",)).apply_(model, lr=1e-2)
    first = run.step(batch)
    for _ in range(20):
        last = run.step(batch)
    assert last < 0.8 * first


@pytest.mark.slow
def test_stochastic_rounding_holds_no_masters_and_learns():
    keep = ("bf16", "adamw8bit", "everything kept", "memory", "activations in memory")
    residual, stochastic = (
        lb.fit(GPT(CONFIG), BATCH, "100%", require=(*keep, master)) for master in ("residual", "stochastic")
    )
    run = stochastic.apply_(GPT(CONFIG), lr=3e-3)
    stored = sum(p.numel() for p in run.model.parameters() if p.dtype == torch.bfloat16)
    assert residual.peak_bytes - stochastic.peak_bytes == pytest.approx(stored, rel=0.02), "a byte a weight"
    losses = [run.step(BATCH) for _ in range(8)]
    assert losses[-1] < losses[0] - 0.3
    assert {name for state in run.optimizer.state.values() for name in state}.isdisjoint({"master"})


# -- what a caller asks for -------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_what_is_kept_and_left_out():
    plan = lb.fit(GPT(CONFIG), BATCH, "60%", require=("fp8", "block"), exclude=("disk", "adamw", "adamw4bit"))
    chosen = plan.settings
    assert (chosen.recipe, chosen.checkpoint, chosen.bits, chosen.offload_states) == ("fp8", "block", 8, False)
    with pytest.raises(ValueError, match="did you mean adamw8bit"):
        lb.fit(GPT(CONFIG), BATCH, "60%", require=("adam8bit",))
    with pytest.raises(ValueError, match="no choice for the states"):
        lb.fit(GPT(CONFIG), BATCH, "60%", exclude=("disk", "memory"))
    with pytest.raises(ValueError, match="stochastic rounding is for weights in bf16; require 'bf16'"):
        lb.fit(GPT(CONFIG), BATCH, "60%", require=("fp32", "stochastic"))
    with pytest.raises(ValueError, match="fit: budget is bytes, a size"):
        lb.fit(GPT(CONFIG), BATCH, 0)


def test_a_plan_that_was_saved_is_the_same_plan(plans, tmp_path):
    for plan in plans.values():
        again = TrainingPlan.load(plan.save(tmp_path / "plan.json"))
        assert again == plan and again != plans[45 if plan is plans[20] else 20]
        assert again.as_dict() == plan.as_dict() and again.table() == plan.table()
        assert again.settings == plan.settings
    (tmp_path / "plan.json").write_text('{"budget": 1}')
    with pytest.raises(ValueError, match="plan again"):
        TrainingPlan.load(tmp_path / "plan.json")


def test_a_plan_in_words_names_each_choice(plans):
    text = str(plans[20])
    assert all(dimension in text for dimension in TECHNIQUES if dimension != STRATEGY)
    assert sum(name in text for name in NAMES) >= len(TECHNIQUES) - 1
    assert "(chosen)" in plans[20].table()


#: The run that each recorded loss is of.
RECORDED = {
    "fp8": "fp8",
    "fp8-compressed": "fp8, compressed activations",
    "fp8-tensor": "fp8-tensor",
    "fp8-block": "fp8-block",
    "mxfp8": "mxfp8",
    "int8-stochastic": "int8-stochastic",
    "nvfp4": "nvfp4",
    "adamw8bit": "AdamW, 8 bits",
    "adamw4bit": "AdamW, 4 bits",
    "lion8bit": "Lion, 8 bits",
    "lion4bit": "Lion, 4 bits",
    "galore8bit": "GaLore, rank 32, int4 projection, 8 bits",
    "apollo8bit": "APOLLO, rank 32, 8 bits",
    "apollomini8bit": "APOLLO-mini, 8 bits",
    "stochastic": "AdamW, 8 bits, bf16 weights, stochastic",
}


def test_the_losses_of_choices_are_those_that_are_recorded():
    changes = loss_tables.recipe_changes() | loss_tables.optimizer_changes()
    for name, recipe, loss in BASES:
        assert loss == round(100 * loss_tables.base_changes()[recipe], 2), name
    for choice in techniques():
        if "base" in choice.changes:
            continue
        recorded = changes[RECORDED[choice.name]].mean if choice.name in RECORDED else 0.0
        assert choice.loss == pytest.approx(round(recorded, 2), abs=1e-9), choice.name
    assert NOISE == round(abs(changes["fp32"].mean), 2)


def test_a_model_without_parameters_is_refused():
    with pytest.raises(ValueError, match="no parameter of Sequential requires a gradient"):
        lb.fit(torch.nn.Sequential(), torch.zeros(2, 3), "50%")


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_models_are_planned_and_trained(kind):
    """Their kernels' workspace is not made up to time them: with one that forward has not written they crash."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.head = kind(16, 32, num_layers=2, batch_first=True), nn.Linear(32, 4)

        def forward(self, x):
            return self.head(self.inside(x)[0])

    model, x = Recurrent(), torch.randn(8, 12, 16)
    left_out = ("disk", "fp8", "fp8-compressed")
    run = lb.fit(model, x, "100%", lambda output, batch: output.square().mean(), exclude=left_out).apply_(model)
    losses = [run.step(x) for _ in range(3)]
    assert losses[2] < losses[0]


def test_choices_that_find_nothing_to_change_are_not_tried():
    """A model in bf16 has no matrix in fp32, whose working copy bf16 would be."""
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).bfloat16(), torch.randn(8, 16).bfloat16()
    plan = lb.fit(model, x, "200%", lambda output, batch: output.square().mean(), exclude=("disk",))
    assert plan.settings.precision is None
    assert plan.apply_(model).step(x) > 0
