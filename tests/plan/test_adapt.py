"""A run that adapts: where memory runs out nothing is lost, and another budget changes no bit that it need not."""

from __future__ import annotations

import copy
import gc
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy
import pytest
import torch
from support.bits import same_bits
from torch import nn

import lowbit as lb
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.memory import profile
from lowbit.plan import TECHNIQUES, TrainingPlan
from lowbit.plan.fitting import Run
from lowbit.plan.fitting.adapt import permits
from lowbit.plan.fitting.predict import Prediction
from lowbit.plan.settings import TrainingSettings
from lowbit.plan.techniques import FALLBACKS, LIVE

CONFIG = GPTConfig(vocab=64, layers=3, heads=2, dim=32, hidden=64)
ROWS = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(0))
DELAYED = lb.Cast("fp8_e4m3:tensor", scale="delayed", history=3)
DRAWN = lb.Gemm(lb.Cast("fp8_e5m2:tensor", scale="delayed", rounding="stochastic", history=3), "reuse")
STATEFUL = lb.Recipe(lb.Gemm(DELAYED, DELAYED), DRAWN, DRAWN, name="delayed and drawn")


class Drawing(nn.Module):
    """Blocks that draw from every source of random numbers, of which one is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.3)) for _ in range(3))
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x) * (1 + random.random() + numpy.random.random())
        return x + torch.rand(16, generator=self.generator)


def normed() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()) for _ in range(3)))


def squares(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return (output - batch[:, :16]).square().mean()


INPUTS = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
#: By name: the model, its batch and loss, the settings, and the part of the model whose calls fail.
CASES: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, object, TrainingSettings, str]] = {
    "plain": (lambda: GPT(CONFIG), ROWS, None, TrainingSettings(), "blocks.1"),
    "draws": (Drawing, INPUTS, squares, TrainingSettings(), "blocks.1"),
    "batch norm": (normed, INPUTS, squares, TrainingSettings(), "1"),
    "fp8 with a state": (lambda: GPT(CONFIG), ROWS, None, TrainingSettings(recipe=STATEFUL), "blocks.1"),
    "fp8 in bf16": (
        lambda: GPT(CONFIG), ROWS, None,
        TrainingSettings(precision="bf16", recipe="fp8", activation_codes=True, bits=8), "blocks.1",
    ),
}  # fmt: skip


def made(case: str, settings: TrainingSettings, directory: object = None) -> Run:
    make, _, loss, _, _ = CASES[case]
    seeded(0)
    return Run(make(), settings, loss, directory, {"lr": 1e-3})


def seeded(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


class NoMemory:
    """A hook that runs out of memory in the calls that are named, counted from 1."""

    error: Exception = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")

    def __init__(self, *calls: int) -> None:
        self.calls, self.count = calls, 0

    def __call__(self, *_: object) -> None:
        self.count += 1
        if self.count in self.calls:
            raise type(self.error)(*self.error.args)


def remembered(run: Run) -> list[torch.Tensor]:
    """All that training has at the moment: parameters, buffers, states, and the next random numbers."""
    states = [one for kept in run.optimizer.state.values() for one in kept.values() if isinstance(one, torch.Tensor)]
    training = [x for one in run.model.modules() if isinstance(one, lb.train.State) for x in (one.keys, one.pending)]
    generators = [one.generator.get_state() for one in run.model.modules() if isinstance(one, Drawing)]
    drawn = torch.tensor([random.getstate()[1][-1], *numpy.random.get_state()[1][:4].tolist()])
    held = [*run.model.parameters(), *run.model.buffers(), *states, *training, *generators]
    return [one.detach().clone() for one in (*held, torch.get_rng_state(), drawn)]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


# -- memory runs out in forward or backward ---------------------------------------------------------------------------
@pytest.mark.thinned(3)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("case", CASES)
def test_a_step_that_ran_out_is_the_step_of_two_parts(case, where):
    _, batch, _, settings, failing = CASES[case]
    planned = made(case, replace(settings, micro_batches=2))
    seeded(9)
    losses, expected = [planned.step(batch) for _ in range(3)], remembered(planned)

    run = made(case, settings)
    module = run.model.get_submodule(failing)
    hook = NoMemory(1)
    handle = module.register_forward_hook(hook) if where == "forward" else module.register_full_backward_hook(hook)
    seeded(9)
    with pytest.warns(UserWarning, match=f"in the {where} of micro-batch 1 of 1 .*with micro_batches=2 instead of 1"):
        found = [run.step(batch)]
    handle.remove()
    found += [run.step(batch) for _ in range(2)]
    assert run.settings == planned.settings and hook.count > 1
    assert found == losses
    assert_same(remembered(run), expected)


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 B")])
def test_each_error_of_no_memory(error):
    run, hook = made("plain", TrainingSettings()), NoMemory(1)
    hook.error = error
    run.model.blocks[1].register_forward_hook(hook)
    with pytest.warns(UserWarning, match=f"{str(error)[:20] or 'MemoryError'}.*with micro_batches=2 instead of 1"):
        run.step(ROWS)


def test_a_later_part_runs_out_in_a_later_step():
    """The parts before it have left gradients, statistics and random numbers behind."""
    run = made("draws", TrainingSettings(micro_batches=2))
    seeded(9)
    run.step(INPUTS)
    other, state = copy.deepcopy(run), (torch.get_rng_state(), random.getstate(), numpy.random.get_state())
    other.model.generator.set_state(run.model.generator.get_state())
    other.settings = replace(run.settings, micro_batches=4)
    loss, expected = other.step(INPUTS), remembered(other)
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    numpy.random.set_state(state[2])
    handle = run.model.blocks[2].register_full_backward_hook(NoMemory(2))
    with pytest.warns(UserWarning, match="backward of micro-batch 2 of 2"):
        assert run.step(INPUTS) == loss
    handle.remove()
    assert_same(remembered(run), expected)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("case", ["plain", "fp8 with a state", "fp8 in bf16"])
def test_every_row_of_the_table_in_its_order(case, tmp_path):
    """Of one row there are no parts, and what is left changes no bit."""
    _, batch, _, settings, failing = CASES[case]
    plain = made(case, settings)
    seeded(9)
    losses, expected = [plain.step(batch[:1]) for _ in range(3)], remembered(plain)

    run = made(case, settings, tmp_path)
    hook = NoMemory(*range(2, 8))
    handle = run.model.get_submodule(failing).register_forward_pre_hook(hook)
    seeded(9)
    with pytest.warns(UserWarning) as warned:
        found = [run.step(batch[:1]) for _ in range(3)]
    handle.remove()
    names = [str(one.message).rpartition("with ")[2].split("=")[0] for one in warned if "ran out" in str(one.message)]
    assert names == ["checkpoint"] * 4 + ["offload_activations", "offload_states"]
    assert run.settings == replace(settings, checkpoint="block", offload_activations=True, offload_states=True)
    assert found == losses
    assert_same(remembered(run), expected)


def test_where_nothing_is_left_all_is_as_before(tmp_path):
    run = made("draws", TrainingSettings(), tmp_path)
    seeded(9)
    run.step(INPUTS)
    before, settings = remembered(run), run.settings
    handle = run.model.blocks[2].register_full_backward_hook(NoMemory(*range(1, 99)))
    with pytest.warns(UserWarning), pytest.raises(RuntimeError) as error:
        run.step(INPUTS)
    handle.remove()
    message = "ran out in the backward of micro-batch 1 of 8 (DefaultCPUAllocator: can't allocate memory"
    assert message in str(error.value)
    assert "nothing that takes less is left after checkpoint='block' instead of None, offload_" in str(error.value)
    assert run.settings == settings and all(param.grad is None for param in run.model.parameters())
    assert_same(remembered(run), before)
    loss, other = run.step(INPUTS), made("draws", TrainingSettings())
    seeded(9)
    assert loss == [other.step(INPUTS) for _ in range(2)][1]


def test_what_a_plan_must_not_have_is_not_taken():
    """Its predictions tell: of these none recomputes all of a block, and none has anything elsewhere."""
    run = made("plain", TrainingSettings())
    run._predictions = [
        Prediction(one, 1, 1.0)
        for one in (TrainingSettings(), TrainingSettings(checkpoint="attention"), TrainingSettings(micro_batches=2))
    ]
    handle = run.model.blocks[1].register_forward_pre_hook(NoMemory(*range(1, 99)))
    with pytest.warns(UserWarning), pytest.raises(RuntimeError) as error:
        run.step(ROWS[:2])
    handle.remove()
    assert "left after checkpoint='attention' instead of None, micro_batches=2 instead of 1. Model" in str(error.value)
    run.optimizer.register_step_pre_hook(NoMemory(1))
    with pytest.raises(RuntimeError, match="its states are not to be offloaded"):
        run.step(ROWS[:2])


def test_gradients_from_before_and_errors_of_another_kind():
    run = made("batch norm", TrainingSettings())
    for param in run.model.parameters():
        param.grad = torch.full_like(param, 0.5)
    before = remembered(run)
    hook = NoMemory(1)
    run.model[0].register_forward_hook(hook)
    run.model[1].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), pytest.warns(UserWarning, match="micro_batches=2"):
        run.step(INPUTS)
    assert hook.count > 1 and run.settings == TrainingSettings()
    assert_same(remembered(run), before)
    assert all((param.grad == 0.5).all() for param in run.model.parameters())


# -- memory runs out in the optimizer's step --------------------------------------------------------------------------
def test_states_that_were_half_made_go_elsewhere(tmp_path, monkeypatch):
    plain = made("plain", TrainingSettings())
    losses, expected = [plain.step(ROWS) for _ in range(3)], remembered(plain)

    run, hook, zeros = made("plain", TrainingSettings(), tmp_path), NoMemory(6), torch.zeros_like
    monkeypatch.setattr(torch, "zeros_like", lambda *args, **more: (hook(), zeros(*args, **more))[1])
    with pytest.warns(UserWarning, match="before anything moved; its states are offloaded to"):
        found = [run.step(ROWS) for _ in range(3)]
    assert hook.count > 6 and run.settings == TrainingSettings(offload_states=True) and found == losses
    assert_same(remembered(run), expected)


@pytest.mark.parametrize("away", [False, True])
def test_a_later_step_of_the_optimizer(away, tmp_path):
    run = made("fp8 with a state", TrainingSettings(recipe=STATEFUL, bits=8, offload_states=away), tmp_path)
    plain = made("fp8 with a state", TrainingSettings(recipe=STATEFUL, bits=8))
    losses = [plain.step(ROWS) for _ in range(3)]
    found, hook = [run.step(ROWS)], NoMemory(1)
    run.optimizer.register_step_pre_hook(hook)
    if away:
        before = remembered(run)
        with pytest.raises(RuntimeError, match="its states are offloaded already"):
            run.step(ROWS)
        assert_same(remembered(run), before)
    else:
        with pytest.warns(UserWarning, match="before anything moved; its states are offloaded to"):
            found.append(run.step(ROWS))
    found += [run.step(ROWS) for _ in range(3 - len(found))]
    assert found == losses and run.settings.offload_states
    assert_same(remembered(run), remembered(plain))


@pytest.mark.parametrize("bits", [32, 8])
def test_a_step_that_moved_something_says_so(bits):
    run = made("plain", TrainingSettings(bits=bits))
    run.step(ROWS)
    run.optimizer.register_step_post_hook(NoMemory(1))
    with pytest.raises(RuntimeError, match=r"after \d+ parameters and states had moved.*load the last checkpoint"):
        run.step(ROWS)
    assert not run.settings.offload_states and all(param.grad is None for param in run.model.parameters())


# -- a real limit -----------------------------------------------------------------------------------------------------
LIMITED = """
import sys, warnings
import torch
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.memory.shortage import ran_out, reclaim
from lowbit.plan.fitting import Run
from lowbit.plan.ladder.limits import LIMITS
from lowbit.plan.settings import TrainingSettings

config = GPTConfig(vocab=512, layers=3, heads=4, dim=128, hidden=512)
rows = torch.randint(512, (8, 128), generator=torch.Generator().manual_seed(0))

def made(settings):
    torch.manual_seed(0)
    return Run(GPT(config), settings, None, sys.argv[1], {"lr": 1e-3})

made(TrainingSettings()).step(rows[:1])
reclaim()
plain = made(TrainingSettings())
with LIMITS["cpu"].within(24 << 20):
    try:
        plain._attempt(rows)
        print("fits")
    except (RuntimeError, MemoryError) as error:
        print("ran out" if ran_out(error) else error)
    del plain
    reclaim()
    run = made(TrainingSettings())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        taken = [(run.step(rows), run.settings) for _ in range(3)]
del run
planned = made(TrainingSettings())
for loss, settings in taken:
    planned._change(settings)
    print(settings.micro_batches > 1, planned.step(rows) == loss, settings)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process as Linux does")
def test_a_process_that_has_too_little_memory(tmp_path):
    malloc = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, env={**os.environ, **malloc}
    )
    lines = done.stdout.splitlines()
    assert lines[:1] == ["ran out"] and len(lines) == 4, done.stdout + done.stderr
    assert all(line.startswith("True True") for line in lines[1:]), done.stdout


# -- another budget ---------------------------------------------------------------------------------------------------
def predicted(settings: TrainingSettings) -> list[Prediction]:
    """What takes less memory takes more time."""
    found = []
    for index, (policy, away) in enumerate(product((None, "save_matmuls", "block"), (False, True))):
        for micro in (1, 2, 4, 8):
            one = replace(settings, checkpoint=policy, offload_states=away, micro_batches=micro)
            found.append(Prediction(one, 1000 * (1000 - 100 * index - 10 * micro), 1.0 + index + micro / 10))
    return [*found, Prediction(replace(settings, bits=8 if settings.bits == 32 else 32), 1, 0.1)]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("case", CASES)
def test_ten_budgets_lose_no_step_and_no_bit(case, tmp_path):
    """Of what changes no bit: checkpoints and the place of states. The prediction of other bits is left alone."""
    _, batch, _, settings, _ = CASES[case]
    plain, run = made(case, settings), made(case, settings, tmp_path)
    run._predictions = [one for one in predicted(settings) if one.settings.micro_batches == 1]
    run._whole = lambda batch: lambda one: one  # what is predicted is made up
    if case in ("draws", "batch norm"):  # which have no products to save
        run._predictions = [one for one in run._predictions if one.settings.checkpoint != "save_matmuls"]
    taken = set[TrainingSettings]()
    seeded(9)
    losses, after = [plain.step(batch) for _ in range(10)], remembered(plain)
    seeded(9)
    for step, loss in enumerate(losses):
        budget = 1000 * (1000, 900, 500, 990, 650, 590, 800, 1200, 495, 700)[step]
        fit = [one for one in run._predictions if one.peak_bytes <= budget and one.settings.bits == settings.bits]
        assert run.refit(budget).settings == min(fit, key=lambda one: one.seconds).settings == run.settings
        taken.add(run.settings)
        assert run.step(batch) == loss
    assert_same(remembered(run), after)
    assert len(taken) > 3


def test_other_parts_leave_losses_close(tmp_path):
    plain, run = made("plain", TrainingSettings()), made("plain", TrainingSettings(), tmp_path)
    run._predictions, run._plain = predicted(TrainingSettings()), 990_000
    run._whole = lambda batch: lambda one: one  # what is predicted is made up
    for budget, micro in (("100%", 1), ("99%", 2), (965_000, 4), (925_000, 8), ("100%", 1)):
        run.refit(budget)
        assert run.settings.micro_batches == micro and run.step(ROWS) == pytest.approx(plain.step(ROWS), rel=1e-5)


def test_what_would_fit_and_a_plan_from_a_file(tmp_path):
    plan = lb.fit(GPT(CONFIG), ROWS[:2], "100%", require=("fp32", "adamw", "everything kept"))
    torch.manual_seed(0)
    model = GPT(CONFIG)
    run = TrainingPlan.load(plan.save(tmp_path / "plan.json")).apply_(copy.deepcopy(model), lr=1e-3, directory=tmp_path)
    plain = plan.apply_(model, lr=1e-3)
    losses = [run.step(ROWS[:2])]
    least = min(plan._refits(), key=lambda one: one.peak_bytes)
    with pytest.raises(ValueError, match=r"into 1000 B; the least is .* KiB, with .*The run continues") as error:
        run.refit(1000)
    assert lb.sizes.amount(least.peak_bytes) in str(error.value) and run.settings == plan.settings
    assert [*losses, run.step(ROWS[:2])] == [plain.step(ROWS[:2]) for _ in range(2)]
    assert run.refit(least.peak_bytes).settings == least.settings == run.settings != plan.settings
    assert run.step(ROWS[:2]) == pytest.approx(plain.step(ROWS[:2]), rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("keep", [("fp32", "adamw"), ("bf16", "adamw8bit"), ("fp8-compressed", "adamw4bit")])
def test_another_budget_is_kept_where_the_sums_of_the_plan_say_too_little(keep, tmp_path):
    config = GPTConfig(vocab=512, layers=2, heads=2, dim=96, hidden=256)
    rows = torch.randint(512, (4, 128), generator=torch.Generator().manual_seed(0))
    plan = lb.fit(GPT(config), rows, "100%", require=(*keep, "memory", "activations in memory"))
    run = plan.apply_(GPT(config), lr=1e-3, directory=tmp_path)
    run._predictions = [one._replace(peak_bytes=one.peak_bytes * 2 // 3) for one in run._predictions]
    run.step(rows)
    least = min(one.peak_bytes for one in plan._refits())
    for budget in (plan.peak_bytes, (plan.peak_bytes + least) // 2, int(1.05 * least)):
        predicted = run.refit(budget)
        gc.collect()
        found = profile(run.model, rows, run.step)
        held = found.peak_bytes - found.by_kind.get("other", 0)
        assert held <= budget * 1.01 and 0.96 * predicted.peak_bytes <= held <= 1.01 * predicted.peak_bytes


def test_a_run_without_a_plan_has_nothing_to_choose_from():
    run = made("plain", TrainingSettings())
    with pytest.raises(ValueError, match="whose predictions say what fits, got one without"):
        run.refit("1GiB")
    with pytest.raises(ValueError, match="a share of plain training needs a run of a plan"):
        run.refit("50%")


def test_a_change_that_fails_leaves_the_run_as_it_was(tmp_path, monkeypatch):
    assert {field for _, technique in FALLBACKS for field in technique.changes} == set(LIVE)
    run = made("plain", TrainingSettings(), tmp_path)
    run.step(ROWS)
    monkeypatch.setitem(LIVE, "offload_states", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run._change(replace(run.settings, checkpoint="block", offload_states=True))
    assert run.settings == TrainingSettings() and "Checkpointed" not in type(run.model.blocks[0]).__name__
    with pytest.raises(ValueError, match="same arithmetic, got bits=8 instead of 32"):
        run._change(replace(run.settings, bits=8))


def test_states_on_disk_do_not_permit_activations_there():
    predictions = [Prediction(TrainingSettings(offload_states=away), 1, 1.0) for away in (False, True)]
    states, activations = TECHNIQUES["states"][1], TECHNIQUES["activations"][1]
    assert permits(predictions, states) and not permits(predictions, activations)
    assert permits([], activations)


def test_without_adapting_a_step_keeps_no_snapshot(monkeypatch, tmp_path):
    """``adapt=False`` skips the copies and the walk over modules; steps are bit-identical, and errors are raised."""
    plain, bare = (
        Run(GPT(CONFIG, seed=0), TrainingSettings(), None, tmp_path, {"lr": 1e-3}, adapt=adapt)
        for adapt in (True, False)
    )
    expected = [plain.step(ROWS) for _ in range(2)]
    monkeypatch.setattr("lowbit.plan.fitting.run.StepSnapshot", lambda model: pytest.fail("a snapshot was taken"))
    assert [bare.step(ROWS) for _ in range(2)] == expected
    assert all(map(torch.equal, bare.model.parameters(), plain.model.parameters()))
    monkeypatch.setattr(bare, "_attempt", lambda batch: (_ for _ in ()).throw(MemoryError("none left")))
    with pytest.raises(MemoryError, match="none left"):
        bare.step(ROWS)
