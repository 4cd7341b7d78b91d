"""Reports of functions that change no weights: the activations that a step keeps, against what autograd saves."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import lowbit as lb


def squares(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


def blocks(activation: type[nn.Module] = nn.GELU) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), activation(), nn.Linear(64, 32)) for _ in range(4)))


def saved(model: nn.Module, batch: Tensor) -> int:
    """What autograd saves of a real forward, but for the batch."""
    return lb.memory.saved_bytes(lambda: squares(model(batch), batch), model) - batch.nbytes


def rows(report: lb.Report) -> list[list[str]]:
    """The cells of the printed table, its titles first."""
    lines = str(report).splitlines()
    return [
        [cell.strip() for cell in line.strip("┃│").replace("┃", "│").split("│")] for line in lines if line[0] in "┃│"
    ]


CHANGES = {
    "checkpoint_": (blocks, lb.memory.checkpoint_),
    "checkpoint_ of some": (blocks, partial(lb.memory.checkpoint_, policy=["1", "2"])),
}


@pytest.mark.parametrize("name", CHANGES)
def test_activations_before_and_after_are_what_autograd_saves(name):
    make, change = CHANGES[name]
    model, batch = make(), torch.randn(8, 32)
    before = saved(model, batch)
    report = change(model, batch=batch, loss=squares)
    after = saved(model, batch)
    assert after < before
    # A loss is a number, of which the estimate holds two: its own and that of its gradient.
    assert report.activations_before == pytest.approx(before, abs=8)
    assert report.activations_after == pytest.approx(after, abs=8)


def test_a_batch_gives_each_checkpointed_layer_its_activations():
    batch = torch.randn(8, 32)
    report = lb.memory.checkpoint_(blocks(), batch=batch, loss=squares)
    hidden, output = 4 * 8 * 64, 4 * 8 * 32
    assert {(row.activations_before, row.activations_after) for row in report.layers} == {(2 * hidden + output, output)}
    assert rows(report)[:2] == [
        ["layer", "class", "activations before", "activations after"],
        ["0", "Sequential", "5.00 KiB", "1.00 KiB"],
    ]
    first, last = str(report).splitlines()[0], str(report).splitlines()[-1]
    assert first.endswith("4 layers checkpointed, activations kept for backward: 20.01 KiB -> 4.01 KiB")
    assert last.startswith("peak of forward and backward, estimated: ")
    data = json.loads(json.dumps(report.to_dict()))
    assert (data["activations_before"], data["activations_after"]) == (20488, 4104)
    assert data["layers"][0]["activations_after"] == output


def test_attention_says_that_scores_are_gone():
    layer = nn.TransformerEncoderLayer(32, 2, 32, batch_first=True)
    report = lb.memory.attention_(layer, batch=torch.randn(2, 64, 32), loss=squares)
    scores = 4 * 2 * 2 * 64 * 64
    assert report.activations_before - report.activations_after >= scores
    assert report.peak_before > report.peak_after


def test_compressed_activations_are_kept_as_codes():
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64))
    report = lb.train.compress_activations_(model, batch=torch.randn(8, 64), loss=squares)
    inputs, statistics = 2 * 8 * 64, 2 * 8  # of the norm and of GELU; the norm's mean and scale of each row
    assert report.activations_before - report.activations_after == 4 * (inputs + statistics) - inputs * 8.25 / 8


def test_a_fused_loss_keeps_no_logits():
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=512, **size)).train()
    ids = torch.randint(0, 512, (2, 32))
    report = lb.memory.fuse_loss_(model, batch={"input_ids": ids, "labels": ids})
    assert report.activations_before - report.activations_after >= 4 * 2 * 31 * 512
    assert "activations kept for backward: " in str(report)


def test_a_plan_that_recomputes_nothing_reports_what_it_was():
    model, batch = blocks(), torch.randn(8, 32)
    plan = lb.memory.plan_checkpoints(model, batch, "100%", squares)
    report = lb.memory.checkpoint_(model, plan, batch=batch, loss=squares)
    assert report.activations_before == report.activations_after == 20488
    assert "activations kept for backward: 20.01 KiB as before" in str(report)


def test_a_model_without_an_estimate_is_changed_and_the_report_says_why_it_is_silent():
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks()

        def forward(self, x):
            return self.blocks(x) if float(x.sum().item()) > 0 else self.blocks(-x)

    model = Routed()
    report = lb.memory.checkpoint_(model, batch=torch.randn(8, 32), loss=squares)
    assert len(report.layers) == 4 and report.activations_before is None
    assert len(report.notes) == 1 and report.notes[0].startswith("activations are unknown: ValueError: estimate:")


UNWEIGHTED = {
    "checkpoint_": lambda model, path: lb.memory.checkpoint_(model),
    "uncheckpoint_": lambda model, path: (lb.memory.checkpoint_(model), lb.memory.uncheckpoint_(model))[1],
    "compress_activations_": lambda model, path: lb.train.compress_activations_(model),
    "train.convert_": lambda model, path: (lb.train.prepare_(model, "fp8"), lb.train.convert_(model))[1],
}


@pytest.mark.parametrize("name", UNWEIGHTED)
def test_bytes_of_weights_that_stay_and_empty_columns_are_not_printed(name, tmp_path):
    report = UNWEIGHTED[name](blocks(nn.ReLU), tmp_path)
    assert report.layers and rows(report)[0] == ["layer", "class"]
    assert "in all" not in str(report) and report.bytes_before == report.bytes_after


def test_a_recipe_without_a_change_of_bytes_is_printed_alone():
    assert rows(lb.train.prepare_(blocks(), "fp8"))[0] == ["layer", "class", "recipe"]


def test_streamed_blocks_report_what_stays_in_memory(tmp_path):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)))
    whole, moved, bias = 3 * 4 * (64 * 64 + 64), 3 * 4 * 64 * 64, 4 * 64
    report = lb.memory.stream_blocks_(model, tmp_path)
    assert (report.bytes_before, report.bytes_after) == (whole, whole - moved)
    assert {(row.bytes_before, row.bytes_after) for row in report.layers} == {(4 * 64 * 64 + bias, bias)}
    back = lb.memory.unstream_(model)
    assert (back.bytes_before, back.bytes_after) == (whole - moved, whole)
