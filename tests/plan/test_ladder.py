"""The ladder: its sum is what torch holds, its limit is real, and rungs of one arithmetic have the same losses."""

import json
import re
import sys
import tempfile
from dataclasses import asdict, replace

import pytest
import torch
from torch.nn import functional

import lowbit as lb
from lowbit.memory.rss import peak_bytes, reset_peak
from lowbit.memory.shortage import ran_out
from lowbit.plan.ladder import RUNGS, Climb, Rung, Shape, TrainingSettings, ascent, climb, report, rungs_of
from lowbit.plan.ladder.ascent import largest
from lowbit.plan.ladder.cell import Cell, Result, _Position, _train, measure, run
from lowbit.plan.ladder.limits import LIMITS
from lowbit.plan.ladder.shape import Transformer, batch_of, first_above, textbook

linux = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is enforced on Linux")
SMALL = Shape(2, batch=4, context=32, vocab=256)
MIB = 2**20


def loss_of(model, batch):
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


# -- the shape --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [Shape(2), Shape(4)], ids=str)
def test_the_textbook_sum_is_what_torch_holds(shape):
    """Parameters, gradients and states in every byte; what backward keeps within 1%, for statistics of norms and
    attention, which the textbook leaves out.
    """
    model, batch, sums = Transformer(shape), batch_of(shape, "cpu"), textbook(shape)
    optimizer = torch.optim.AdamW(model.parameters())
    kept = lb.memory.saved_bytes(lambda: loss_of(model, batch), model)
    assert kept == pytest.approx(sums["activations"], rel=0.01)
    loss_of(model, batch).backward()
    optimizer.step()
    states = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert sums["parameters"] == 4 * shape.parameters == sum(p.nbytes for p in model.parameters())
    assert sums["gradients"] == sum(p.grad.nbytes for p in model.parameters())
    assert sums["states"] == sum(state.nbytes for state in states)


def test_no_token_sees_a_later_one():
    model, (tokens, _) = Transformer(SMALL).eval(), batch_of(SMALL, "cpu")
    other = tokens.clone()
    other[:, 20:] = 0
    with torch.no_grad():
        assert torch.equal(model(tokens)[:, :20], model(other)[:, :20])
        assert not torch.equal(model(tokens)[:, 20:], model(other)[:, 20:])


@pytest.mark.parametrize("mib", [40, 300, 2048, 16384])
def test_the_first_shape_exceeds_the_budget_and_the_one_before_does_not(mib):
    shape = first_above(mib * MIB)
    assert (
        sum(textbook(shape).values()) >= 1.5 * mib * MIB > sum(textbook(replace(shape, size=shape.size - 1)).values())
    )
    assert sum(textbook(shape).values()) < 2.5 * mib * MIB


def test_a_budget_below_the_family_is_refused():
    with pytest.raises(ValueError, match="the need of its smallest transformer"):
        first_above(MIB)


# -- the limit --------------------------------------------------------------------------------------------------------
@linux
def test_an_allocation_beyond_the_limit_fails_and_one_within_it_does_not():
    with LIMITS["cpu"].within(64 * MIB):
        assert torch.ones(32 * MIB, dtype=torch.uint8).max() == 1
        with pytest.raises(RuntimeError) as stop:
            torch.ones(128 * MIB, dtype=torch.uint8)
        assert ran_out(stop.value)
    assert torch.ones(128 * MIB, dtype=torch.uint8).max() == 1, "the limit is lifted"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
            True,
        ),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("could not create a primitive"), True),
        (RuntimeError("could not create a primitive descriptor for the LSTM forward propagation primitive"), False),
        (RuntimeError("can't start new thread"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("can't allocate memory"), False),
    ],
    ids=repr,
)
def test_running_out_is_told_apart_from_mistakes(error, expected):
    assert ran_out(error) == expected


@linux
def test_what_is_held_grows_by_what_is_written():
    limit = LIMITS["cpu"]
    before = limit.held()
    held = torch.ones(64 * MIB, dtype=torch.uint8)
    assert limit.held() - before == pytest.approx(held.nbytes, rel=0.05)


# -- a cell -----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@linux
def test_the_peak_of_a_process_is_that_of_torchs_allocator_and_a_limit_below_it_ends_the_run():
    """Two counts that share no code: resident pages of a process, and the profiler's events."""
    cell = Cell(replace(SMALL, size=4, batch=8, context=64), TrainingSettings(), None, steps=2)

    def two_steps():
        for _ in _train(cell, _Position(), ""):
            pass

    allocated, free = lb.memory.allocated_peak(two_steps), measure(cell)
    assert free.fits and free.peak == pytest.approx(allocated, abs=4 * MIB)
    below = measure(replace(cell, budget=free.peak // 2))
    assert not below.fits and below.ran_out.startswith("forward, blocks.") and below.losses == ()
    assert below.peak <= free.peak // 2 + 4 * MIB


@pytest.mark.slow
@linux
def test_two_processes_train_what_does_not_fit_one():
    cell = Cell(Shape(6, batch=4, context=64, vocab=256), TrainingSettings(checkpoint="block"), 80 * MIB, steps=2)
    alone = measure(cell)
    assert not alone.fits and alone.ran_out == "step"
    both = measure(replace(cell, settings=replace(cell.settings, gpus=2, strategy="zero3")))
    assert both.fits and both.losses[1] < both.losses[0]
    neither = measure(replace(cell, settings=replace(cell.settings, gpus=2, strategy="zero3"), budget=30 * MIB))
    assert not neither.fits, "a process that runs out ends the others"


def test_rungs_of_several_processes_double_their_number():
    assert rungs_of(1) is RUNGS
    strategies = [(rung.changes.get("gpus"), rung.changes.get("strategy")) for rung in rungs_of(4)]
    assert strategies == [(None, None), (None, None), (2, "zero1"), (2, "zero2"), (2, "zero3"), (4, "zero3")]
    with pytest.raises(ValueError, match="whose means are exact, got 3"):
        rungs_of(3)


@pytest.mark.parametrize(
    ("does", "message"),
    [
        ("echo no such recipe >&2; exit 3", "exit code 3, not because of its limit; its output: no such recipe"),
        ("kill -9 $$", "by SIGKILL, as the system ends processes if memory runs out, not because of its limit"),
        ("echo '{\"step\": 1}'", "exit code 0, not because of its limit; its output: none"),
    ],
)
def test_a_process_that_fails_otherwise_is_an_error_with_its_own_words(tmp_path, monkeypatch, does, message):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{does}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(RuntimeError, match=re.escape(message)):
        measure(Cell(SMALL, TrainingSettings(), None))


def test_a_mistake_within_a_limit_is_no_event(tmp_path):
    with pytest.raises(ValueError, match="'fp7'"):
        run(Cell(SMALL, TrainingSettings(recipe="fp7"), None, steps=2), str(tmp_path))


def losses(settings, steps=3):
    with tempfile.TemporaryDirectory() as directory:
        return tuple(_train(Cell(SMALL, settings, None, steps), _Position(), directory))


def test_plain_steps_are_those_of_a_loop_of_torch():
    torch.manual_seed(0)
    model, batch = Transformer(SMALL), batch_of(SMALL, "cpu")
    optimizer, expected = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(3):
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses(TrainingSettings()) == tuple(expected)


@pytest.mark.parametrize("rung", [rung for rung in RUNGS if rung.losses == "equal"], ids=lambda r: r.name)
@pytest.mark.parametrize(
    "below", [TrainingSettings(), TrainingSettings(precision="bf16", bits=8)], ids=["fp32", "bf16"]
)
def test_rungs_of_one_arithmetic_have_equal_losses(rung, below):
    assert losses(rung.on(below)) == losses(below)


def test_micro_batches_sum_to_the_batch():
    """In another order of sums, of 128 terms in fp32: the losses differ by less than 128 half units of fp32."""
    whole, parts = losses(TrainingSettings()), losses(TrainingSettings(micro_batches=4))
    assert parts[0] == pytest.approx(whole[0], rel=128 * 2.0**-24)
    assert parts == pytest.approx(whole, rel=ascent._CLOSE)


@pytest.mark.slow
def test_every_rung_trains():
    settings = TrainingSettings()
    for rung in RUNGS:
        settings = rung.on(settings)
        found = losses(settings, 5)
        assert found[-1] < found[0] - 0.2, rung.name


# -- the climb --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("most", [0, 1, 2, 7, 16, 17, 18, 30])
@pytest.mark.parametrize("guess", [1, 8, 16, 18])
def test_the_largest_is_found_from_any_guess(most, guess):
    tried, calls = {16: most >= 16}, []

    def fits(size):
        calls.append(size)
        tried[size] = size <= most
        return tried[size]

    assert largest(fits, tried, guess, 12) == most
    assert len(set(calls)) == len(calls) and 16 not in calls


def test_no_more_sizes_are_tried_than_allowed():
    tried = {16: False}
    assert largest(lambda size: tried.setdefault(size, size <= 3), tried, 15, 2) == 0
    assert sorted(tried) == [14, 15, 16] or len(tried) == 3


@pytest.fixture
def counted(monkeypatch):
    """Cells are computed by a rule in place of a process: what is held is a part of the textbook's sum."""
    calls = []

    def fake(cell):
        calls.append(cell)
        part = (0.4 if cell.settings.checkpoint else 1) * (0.995 if cell.settings.activation_codes else 1)
        part *= 0.5 if cell.settings.bits == 8 else 1
        peak = int(part * sum(textbook(cell.shape).values()))
        if cell.budget is not None and peak > cell.budget:
            return Result(0, cell.budget, None, (), "forward, blocks.1")
        loss = 7.0 + (cell.settings.bits == 8)
        return Result(0, peak, 0.5, (loss,) * cell.steps)

    monkeypatch.setattr(ascent, "measure", fake)
    return calls


RULED = (
    Rung("plain", {}, "all in fp32"),
    Rung("checkpointing", {"checkpoint": "block"}, "", "equal"),
    Rung("codes", {"activation_codes": True}, "", "equal"),
    Rung("8 bits", {"bits": 8}, "", "equal"),
)


def test_rungs_add_up_and_one_without_gain_is_left_out(counted):
    climbed = climb(Climb(100 * MIB, steps=2), RULED)
    plain, checkpointing, codes, short = climbed.rows
    assert [row.limited.fits for row in climbed.rows] == [False, True, True, True]
    assert plain.whole.fits and plain.whole.peak > 100 * MIB
    assert [row.kept for row in climbed.rows] == [True, True, False, True]
    assert short.settings == TrainingSettings(checkpoint="block", bits=8)
    assert [row.alike for row in climbed.rows] == [None, True, True, False], "a loss that moved is seen"
    for row, part in ((plain, 1), (checkpointing, 0.4), (short, 0.2)):
        held = [part * sum(textbook(replace(row.largest, size=row.largest.size + more)).values()) for more in (0, 1)]
        assert held[0] <= 100 * MIB < held[1] and row.beyond == row.largest.size + 1
    assert codes.largest is None


def test_finished_cells_are_read_again_and_others_are_not(counted, tmp_path):
    asked = Climb(100 * MIB, steps=2, directory=tmp_path)
    first, count = climb(asked, RULED), len(counted)
    assert climb(asked, RULED).rows == first.rows and len(counted) == count
    next((tmp_path / "cells").glob("8-bits-*")).unlink()
    assert climb(asked, RULED).rows == first.rows and len(counted) == count + 1
    climb(replace(asked, steps=3, search=0), RULED)
    assert len(counted) > count + 1, "cells of other steps are other cells"


def test_the_report_has_a_row_a_rung_and_says_what_went_wrong(counted, tmp_path):
    climbed = climb(Climb(100 * MIB, steps=2), RULED)
    text = report.write(tmp_path, climbed, "lowbit fit").read_text()
    rows = [
        line for line in text.splitlines() if line.startswith(("| plain", "| checkpointing", "| codes", "| 8 bits"))
    ]
    assert [row.split(" | ")[3] for row in rows] == ["no", "yes", "yes", "yes"]
    assert "NOT EQUAL" in rows[3] and "| equal |" in rows[1]
    assert "plain: all in fp32. Under the limit memory runs out in forward, blocks.1." in text
    data = json.loads((tmp_path / "ladder.json").read_text())
    assert data["rungs"][3]["settings"] == asdict(TrainingSettings(checkpoint="block", bits=8))
    assert data["rungs"][1]["largest"]["parameters"] == climbed.rows[1].largest.parameters


@linux
def test_reset_peak_starts_from_what_is_held():
    """What ``LIMITS`` counts with: a peak that is over does not count."""
    torch.ones(64 * MIB, dtype=torch.uint8)
    if not reset_peak():
        pytest.skip("the system cannot reset a peak")
    assert peak_bytes() - LIMITS["cpu"].held() < 16 * MIB
