"""Runs over paired seeds: trained once, resumed bit by bit, compared by seed, with the intervals of Student's t."""

import json
import math
import signal
import statistics

import pytest
import torch

from lowbit.bench import evidence, evidence_cells, evidence_page, recorded
from lowbit.bench.evidence_cells import Cell, Round, Study, Variation
from lowbit.demo import text
from lowbit.demo.data import Corpus
from lowbit.demo.gpt import GPTConfig

TINY = Study(
    name="tiny",
    title="A tiny GPT",
    variations=(
        Variation(name="bf16", recipe="bf16"),
        Variation(name="fp8", recipe="fp8", goal=0.3),
        Variation(name="noise", recipe="bf16", noise=0.3),
        Variation(name="8 bits", recipe="bf16", settings=(("optimizer", "adamw8bit"),)),
        Variation(name="both", recipe="fp8", settings=(("optimizer", "adamw8bit"),), beside="fp8",
                  parts=("fp8", "8 bits")),
    ),
    model=GPTConfig(vocab=256, context=16, layers=1, heads=1, dim=32, hidden=32),
    steps=6,
    batch=2,
    text="tiny",
)  # fmt: skip


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path):
    rounds = (Round(TINY, (0, 1)),)
    words = [text.Document(f"{k}", tuple(f"line {k} says {j * k % 7} words" for j in range(30))) for k in range(30)]
    corpus = Corpus.build(words, 256, "numbered lines")
    monkeypatch.setattr(evidence, "_corpus", lambda name, vocab: (corpus, corpus.train[:200]))
    monkeypatch.setattr(evidence, "SCRATCH", tmp_path / "scratch")
    monkeypatch.setattr(evidence, "cells", lambda: evidence_cells.cells(rounds))
    monkeypatch.setattr(evidence_page, "cells", lambda: evidence_cells.cells(rounds))
    for name, value in (("STUDIES", (TINY,)), ("ROUNDS", rounds)):
        monkeypatch.setattr(evidence_page, name, value)


def numbers(line):
    return {key: value for key, value in line.items() if key not in ("seconds", "date", "machine")}


@pytest.mark.slow
def test_every_run_has_a_line_and_is_not_repeated(tmp_path, monkeypatch):
    page = evidence.run(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "evidence" / "tiny.jsonl").read_text().splitlines()]
    order = [(line["seed"], line["variation"]) for line in lines]
    assert order == [(seed, row.name) for seed in (0, 1) for row in TINY.variations], "all of a seed before the next"
    assert all(math.isfinite(line[what]) for line in lines for what in ("held_out", "other", "last_batches"))
    assert lines[0]["tokens"] == 6 * 2 * 16 and lines[0]["train"][-1][0] == 6
    losses = {(line["variation"], line["seed"]): line["held_out"] for line in lines}
    assert len(set(losses.values())) == len(losses)
    first = {line["variation"]: line["train"][0][1] for line in lines if line["seed"] == 0}
    assert first["noise"] == first["bf16"] == first["8 bits"], "the same weights and the same batch"
    assert not list((tmp_path / "scratch").glob("*/*")), "states of finished runs are removed"

    changes = [100 * (losses["fp8", seed] / losses["bf16", seed] - 1) for seed in (0, 1)]
    mean, error = statistics.fmean(changes), statistics.stdev(changes) / math.sqrt(2)
    row = next(line for line in page.read_text().splitlines() if line.startswith("| fp8 |"))
    assert f"{mean:+.2f} ± {error:.2f}" in row
    assert f"{mean - 12.706 * error:+.2f} to {mean + 12.706 * error:+.2f}" in row
    total = sum(
        statistics.fmean(100 * (losses[part, seed] / losses["bf16", seed] - 1) for seed in (0, 1))
        for part in ("fp8", "8 bits")
    )
    both = next(line for line in page.read_text().splitlines() if line.startswith("| both | fp8 |"))
    assert both.rstrip(" |").endswith(f"{total:+.2f}")

    monkeypatch.setattr(evidence, "train", lambda cell, _: pytest.fail(f"{cell.name} is trained again"))
    assert evidence.run(tmp_path) == page


@pytest.mark.parametrize("variation", ["noise", "both"])
def test_a_run_that_is_stopped_goes_on_bit_by_bit(variation, tmp_path, monkeypatch):
    row = next(row for row in TINY.variations if row.name == variation)
    cell = Cell(TINY, row, 1)
    whole = evidence.train(cell, tmp_path / "whole")
    take_step, steps = evidence.Trainer._train_step, []

    def stopping(trainer):
        take_step(trainer)
        steps.append(trainer.step)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(evidence.Trainer, "_train_step", stopping)
    with pytest.raises(evidence.Interrupted):
        evidence.train(cell, tmp_path / "parts")
    resumed = evidence.train(cell, tmp_path / "parts")
    assert steps == [1, 2, 3, 4, 5, 6]
    assert numbers(resumed) == numbers(whole)


def test_a_signal_ends_the_list_and_leaves_no_line(tmp_path, monkeypatch):
    def stopped(cell, scratch):
        raise evidence.Interrupted(3, tmp_path)

    monkeypatch.setattr(evidence, "train", stopped)
    assert "No run yet" in evidence.run(tmp_path).read_text()
    assert not (tmp_path / "evidence").exists()


def test_a_line_that_was_not_written_whole_is_no_run(tmp_path):
    path = tmp_path / "evidence" / "tiny.jsonl"
    evidence._append(path, {"digest": "a"})
    with path.open("a") as file:
        file.write('{"digest": "b", "held')
    evidence._append(path, {"digest": "c"})
    assert set(evidence.record(tmp_path)) == {"a", "c"}


def test_two_processes_do_not_train_one_list(tmp_path):
    with evidence._alone(evidence.SCRATCH), pytest.raises(RuntimeError, match="another process trains"):
        evidence.run(tmp_path)


def test_intervals_are_those_of_students_t():
    change = recorded.difference([(1.01, 1.0), (2.04, 2.0), (1.03, 1.0)])
    assert change.mean == pytest.approx(2.0) and change.deviation == pytest.approx(1.0)
    assert change.half_width == pytest.approx(4.303 / math.sqrt(3))
    assert recorded.difference([(1.01, 1.0)]).half_width == math.inf
    count = change.needed(1.0)
    assert recorded.student(count - 1) / math.sqrt(count) <= 1 < recorded.student(count - 2) / math.sqrt(count - 1)


def test_wide_products_are_those_of_bf16(monkeypatch):
    torch.manual_seed(0)
    a, b = torch.randn(64, 32).bfloat16(), torch.randn(32, 48).bfloat16()
    q = torch.randn(1, 2, 16, 32).bfloat16()
    attention = torch.nn.functional.scaled_dot_product_attention
    plain, plain_attended, floats = a @ b, attention(q, q, q, is_causal=True), a.float() @ b.float()
    monkeypatch.setattr(evidence, "multiplies", lambda precision: False)
    with evidence._quick_bf16():
        wide, attended = a @ b, attention(q, q, q, is_causal=True)
        assert torch.equal(a.float() @ b.float(), floats)
    assert torch.equal(wide, floats.bfloat16())
    torch.testing.assert_close(wide, plain, rtol=2**-7, atol=2**-7)  # a unit in the last place, for the order of sums
    torch.testing.assert_close(attended, plain_attended, rtol=2**-6, atol=2**-6)
    assert torch.equal(a @ b, plain), "torch's own products again"


def test_every_cell_of_the_table_can_begin(tmp_path):
    """Names of recipes, optimizers and other cells are there, and no two cells of a study are the same run."""
    for study in evidence_cells.STUDIES:
        names = [row.name for row in study.variations]
        assert len(set(names)) == len(names)
        assert len({Cell(study, row, 0).digest for row in study.variations}) == len(names)
        for row in study.variations:
            assert set(row.parts) <= set(names)
    listed = list(evidence_cells.cells())
    assert len({cell.digest for cell in listed}) == len(listed)
    beside = {row.name for study in evidence_cells.STUDIES for row in study.variations}
    assert {row.beside for study in evidence_cells.STUDIES for row in study.variations} <= beside
