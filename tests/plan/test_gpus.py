"""``lb.fit(gpus=N)``: a process holds what the plan says, more processes hold less each, and ``apply_`` shards."""

from __future__ import annotations

import ctypes
import gc
import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import run_processes
from torch import nn

import lowbit as lb
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.memory.rss import peak_bytes, reset_peak, resident_bytes
from lowbit.memory.timing import Timings
from lowbit.plan import TrainingPlan
from lowbit.plan.fitting.choices import words
from lowbit.plan.fitting.link import bandwidth_of, exchange_seconds
from lowbit.plan.fitting.predict import Predictor
from lowbit.plan.fitting.run import Run
from lowbit.plan.settings import TrainingSettings
from lowbit.plan.subject import Subject

CONFIG = GPTConfig(vocab=2048, layers=4, heads=4, dim=256, hidden=704)
TINY = GPTConfig(vocab=64, layers=3, heads=2, dim=32, hidden=64)
BATCH = torch.randint(2048, (4, 64), generator=torch.Generator().manual_seed(0))
SHARDING = ("ddp", "zero1", "zero2", "zero3", "zero2-replicated")
PLAIN = ("fp32", "adamw", "everything kept", "memory", "activations in memory")

#: What is measured.
MEASURED = (
    *(TrainingSettings(gpus=2, strategy=strategy) for strategy in SHARDING),
    TrainingSettings(gpus=2, strategy="ddp", precision="bf16"),
    TrainingSettings(gpus=2, strategy="zero1", precision="bf16"),
    TrainingSettings(gpus=2, strategy="zero2-replicated", precision="bf16"),
    TrainingSettings(gpus=2, strategy="zero2-replicated", checkpoint="block", micro_batches=2),
    TrainingSettings(gpus=2, strategy="zero2", checkpoint="block"),
    TrainingSettings(gpus=2, strategy="zero3", checkpoint="block", micro_batches=2),
)


def meet(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/meet", rank=rank, world_size=2)


# -- bytes ------------------------------------------------------------------------------------------------------------
def _held(settings: TrainingSettings, config: GPTConfig) -> int:
    """The most that the process holds in the third step: in the second, buckets are made anew, and not yet written."""
    run = Run(GPT(config), settings, None, None, {"lr": 1e-3})
    for _ in range(3):
        gc.collect()
        reset_peak()
        run.step(BATCH % config.vocab)
    return peak_bytes()


def _measure(rank: int, path: str) -> None:
    meet(rank, path)
    libc = ctypes.CDLL(None)
    for option, value in ((-3, 1 << 16), (-1, 1 << 16), (-8, 1)):  # memory goes back to the system as it is freed
        libc.mallopt(option, value)
    for settings in (MEASURED[len(SHARDING)], MEASURED[-1]):  # what libraries load and keep
        _held(settings, CONFIG)
    found = []
    for settings in MEASURED:
        gc.collect()
        before = resident_bytes()
        found.append(_held(settings, CONFIG) - before)
    if rank == 0:
        Path(path, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_process_holds_what_is_predicted(tmp_path: Path):
    run_processes(_measure, (str(tmp_path),))
    predictor = Predictor(Subject(GPT(CONFIG), BATCH))
    for settings, held in zip(MEASURED, json.loads((tmp_path / "found.json").read_text()), strict=True):
        whole, quick = predictor.whole(settings).peak_bytes, predictor.predicted(settings).peak_bytes
        print(f"{words(settings)}: {whole / 1e6:.1f} MB predicted, {held / 1e6:.1f} held, {whole / held - 1:+.1%}")
        assert whole == pytest.approx(held, rel=0.05), words(settings)
        assert quick == pytest.approx(whole, rel=0.03), words(settings)


@pytest.mark.slow
def test_more_processes_hold_less_each_and_a_way_that_shares_more_too():
    predictor = Predictor(Subject(GPT(TINY), BATCH % 64))
    for strategy in SHARDING:
        peaks = [predictor.whole(TrainingSettings(gpus=gpus, strategy=strategy)).peak_bytes for gpus in (2, 8, 64)]
        assert peaks == sorted(peaks, reverse=True) and (strategy == "ddp") == (peaks[0] == peaks[-1])
    groups = [TrainingSettings(gpus=8, strategy="hsdp", group_size=size) for size in (8, 2)]
    whole, pairs = (predictor.whole(one).peak_bytes for one in groups)
    assert whole == predictor.whole(TrainingSettings(gpus=8, strategy="zero3")).peak_bytes < pairs
    assert pairs == predictor.whole(TrainingSettings(gpus=2, strategy="zero3")).peak_bytes


# -- time -------------------------------------------------------------------------------------------------------------
def test_exchanges_take_their_bytes_and_overlap_with_backward():
    for strategy, seconds, after in (
        ("ddp", 1.0, 0),
        ("zero1", 1.0, 0.5),
        ("zero2-replicated", 0.5, 0.5),
        ("zero2", 1.0, 0),
        ("zero3", 1.5, 0),
    ):
        settings = TrainingSettings(gpus=2, strategy=strategy)
        assert exchange_seconds(settings, 10**9, 10**9, 0.0, 1e9, overlaps=False) == pytest.approx(seconds + after)
        parts = TrainingSettings(gpus=2, strategy=strategy, micro_batches=2)
        assert exchange_seconds(parts, 10**9, 10**9, 0.0, 1e9, overlaps=False) == pytest.approx(2 * seconds + after)
    ddp = TrainingSettings(gpus=2)
    assert exchange_seconds(ddp, 10**9, 10**9, 0.3, 1e9, overlaps=False) == pytest.approx(0.8), "backward is two thirds"
    assert exchange_seconds(ddp, 10**9, 10**9, 3.0, 1e9, overlaps=False) == 0
    assert exchange_seconds(TrainingSettings(), 10**9, 10**9, 0.0, 1e9, overlaps=False) == 0
    zero3 = TrainingSettings(gpus=2, strategy="zero3")
    assert exchange_seconds(zero3, 10**9, 10**9, 0.3, 1e9, overlaps=True) == pytest.approx(1.2)
    groups = TrainingSettings(gpus=4, strategy="hsdp", group_size=2)
    assert exchange_seconds(groups, 10**9, 10**9, 0.0, 1e9, overlaps=False) == pytest.approx(1.5 + 0.5)


def test_a_link_is_what_is_said():
    cpu = torch.device("cpu")
    assert bandwidth_of("25GB/s", cpu) == bandwidth_of(25e9, cpu) == 25e9 and bandwidth_of(None, cpu) == 1.25e9
    for link in ("fast", 0, "0GB/s", -1.0):
        with pytest.raises(ValueError, match="such as '25GB/s'"):
            bandwidth_of(link, cpu)


# -- plans ------------------------------------------------------------------------------------------------------------
def test_a_plan_says_what_each_way_takes_and_is_kept(tmp_path: Path):
    model, batch = GPT(TINY), BATCH % 64
    ddp = Predictor(Subject(model, batch)).whole(TrainingSettings(gpus=8)).peak_bytes
    plan = lb.fit(model, batch, ddp - 1, gpus=8, require=PLAIN, link="1GB/s")
    strategy = plan.settings.strategy
    assert plan.settings.gpus == 8 and strategy != "ddp" and plan.peak_bytes < ddp and plan.chosen in plan.strategies
    assert [one.settings.strategy for one in plan.strategies] == list(SHARDING)
    text = str(plan)
    assert (
        "on each of 8 processes" in text
        and all(strategy in text for strategy in SHARDING)
        and f"{strategy} (chosen)" in text
    )
    again = TrainingPlan.load(plan.save(tmp_path / "plan.json"))
    assert again.as_dict() == plan.as_dict() and str(again) == str(plan) and again.settings == plan.settings
    with pytest.raises(ValueError, match=r"torchrun --nproc-per-node 8.*gpus=1"):
        again.apply_(model)


@pytest.mark.slow
def test_where_nothing_fits_a_plan_says_how_many_processes_would_do():
    model, batch = GPT(CONFIG), BATCH
    least = (
        Predictor(Subject(model, batch))
        .predicted(TrainingSettings(gpus=8, strategy="zero3", checkpoint="block"))
        .peak_bytes
    )
    with pytest.raises(ValueError, match="train on 8 processes: gpus=8, which fits with block, zero3"):
        lb.fit(model, batch, least, gpus=2, require=("fp32", "adamw", "block"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 0}, "gpus must be a number of processes from 1, got 0"),
        ({"gpus": 2, "require": ("hsdp",)}, "'hsdp' needs group_size="),
        ({"require": ("zero3",)}, "'zero3' needs gpus=2 or more"),
        ({"gpus": 8, "group_size": 3}, "group_size must be a divisor of gpus=8, got 3"),
        ({"link": "1GB/s"}, "link and group_size need several processes"),
        ({"gpus": 2, "link": "fast"}, "such as '25GB/s', got 'fast'"),
        ({"gpus": 2, "require": ("dp",)}, "no choice is called 'dp'"),
    ],
)
def test_arguments_that_do_not_go_together(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        lb.fit(GPT(TINY), BATCH % 64, "1GiB", **options)


# -- training ---------------------------------------------------------------------------------------------------------
def _losses(keep: tuple[str, ...], gpus: int, batch: torch.Tensor) -> tuple[TrainingPlan, list[float]]:
    torch.manual_seed(0)
    model = GPT(TINY)
    plan = lb.fit(model, batch, "1GiB", gpus=gpus, require=keep, exclude=("fp8",))
    run = plan.apply_(model, lr=1e-2)
    assert isinstance(run.model, nn.Module)
    return plan, [run.step(batch) for _ in range(3)]


def _plan_slowly(rank: int, path: str) -> None:
    timeout = timedelta(seconds=2)
    dist.init_process_group("gloo", init_method=f"file://{path}/meet", rank=rank, world_size=2, timeout=timeout)

    def make() -> TrainingPlan:
        time.sleep(4)
        raise ValueError("no choice fits")

    with pytest.raises(ValueError, match="no choice fits"):
        TrainingPlan.broadcast(make, None)
    dist.destroy_process_group()


def test_a_plan_may_take_longer_than_a_collective(tmp_path: Path):
    run_processes(_plan_slowly, (str(tmp_path),))


def _train(rank: int, path: str) -> None:
    meet(rank, path)
    Timings.seconds = lambda self, call: None  # type: ignore[method-assign]  # no op is run to be timed
    batch = BATCH % 64
    found = {}
    for strategy, precision in (*((strategy, "fp32") for strategy in SHARDING), ("ddp", "bf16"), ("zero3", "bf16")):
        plan, found[strategy, precision] = _losses((precision, *PLAIN[1:], strategy), 2, batch)
        assert plan.settings.strategy == strategy
    for (strategy, precision), losses in found.items():
        near = 1e-5 if precision == "fp32" else 1e-3
        assert losses == pytest.approx(found["ddp", precision], rel=near), f"{strategy} {precision}"
    plan.save(f"{path}/{rank}.json")
    assert bandwidth_of(None, torch.device("cpu")) != 1.25e9, "it is measured"
    with pytest.raises(ValueError, match="no choice fits"):  # in both, where one alone plans
        lb.fit(GPT(TINY), batch, 1000, gpus=2, require=PLAIN)
    with pytest.raises(ValueError, match="the plan is for 4 processes, but 2 run"):
        lb.fit(GPT(TINY), batch, "1GiB", gpus=4, require=PLAIN).apply_(GPT(TINY))
    dist.destroy_process_group()


@pytest.mark.slow
def test_each_way_trains_as_the_others_and_all_processes_have_one_plan(tmp_path: Path):
    run_processes(_train, (str(tmp_path),))
    assert (tmp_path / "0.json").read_text() == (tmp_path / "1.json").read_text()
    _, alone = _losses(PLAIN, 1, BATCH % 64)
    assert alone[-1] < alone[0]
