"""Runs of the demo within a budget: a step holds what its plan says, changes no arithmetic, and resumes by its plan."""

from __future__ import annotations

import io
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.runs import ENGLISH, SHORT, TINY, made

import lowbit as lb
from lowbit.demo import planned
from lowbit.demo.data import Corpus
from lowbit.demo.experiment import RunSettings, model_of, trainers
from lowbit.demo.loop import Trainer
from lowbit.files import read_checked
from lowbit.interrupts import Interrupted
from lowbit.plan import TECHNIQUES, TrainingPlan
from lowbit.plan.fitting.identity import Identity
from lowbit.plan.fitting.predict import Prediction
from lowbit.plan.settings import TrainingSettings

WHOLE = torch.zeros(4, 32, dtype=torch.long)


@pytest.fixture(autouse=True, scope="module")
def times(steady_times):
    """Of every test here: plans do not depend on how busy the machine is."""


@pytest.fixture(scope="module")
def corpus():
    return Corpus.load(ENGLISH, TINY.vocab)


@pytest.fixture
def choose(monkeypatch):
    """Let plans choose among these names alone, which is quicker."""
    return lambda *names: monkeypatch.setattr(planned, "_options", lambda optimizer: ["fp32", *names])


@pytest.fixture
def follow(monkeypatch):
    """Let every plan be one of these settings, whatever fits."""

    def planned_so(**settings: object) -> None:
        one = Prediction(TrainingSettings(**settings), 1, 1.0)
        monkeypatch.setattr(
            planned, "fit", lambda *_, **__: TrainingPlan(one, 1 << 30, one, [one], identity=Identity("GPT", {}, None))
        )

    return planned_so


def settings_of(memory: str | None, *precisions: str, **changes: object) -> RunSettings:
    train = replace(SHORT, batch=4, steps=6, **changes)
    return RunSettings(model=TINY, train=train, precisions=precisions, recipes=("int8",), memory=memory)


def run_of(settings: RunSettings, corpus: Corpus, directory: Path, resume: bool = False) -> Trainer:
    """The only run, not started yet."""
    plans = None if settings.memory is None else planned.plans(settings, corpus, directory if resume else None)
    planned.save(plans or {}, directory)
    (trainer,) = trainers(settings, corpus, directory, resume, plans)
    return trainer


# -- bytes -------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "names"),
    [
        ("bf16", ("adamw8bit", "save_matmuls", "memory")),
        ("mxfp8", ("adamw", "everything kept", "disk")),
    ],
)
def test_a_step_holds_what_the_plan_says(corpus, tmp_path, choose, precision, names):
    choose(*names)
    trainer = run_of(settings_of("70%", precision, compress_activations=True), corpus, tmp_path)
    trainer.run()
    assert trainer.history.peak_bytes <= trainer.plan.budget
    assert trainer.history.peak_bytes == pytest.approx(trainer.plan.peak_bytes, rel=0.03)
    assert trainer.memory.peak_bytes >= trainer.history.peak_bytes > 0
    (row,) = planned.written([trainer])
    assert row[0] == precision and all(
        name in row[1] for name in names if name not in ("adamw", "memory", "everything kept")
    )


# -- bits --------------------------------------------------------------------------------------------------------------
@pytest.mark.thinned(3)
@pytest.mark.parametrize("precision", ["mxfp8", "fp16", "fp32"])
def test_checkpoints_and_states_on_disk_change_no_bit_of_a_run(corpus, tmp_path, follow, precision):
    follow(checkpoint="block", offload_states=True)
    settings = replace(settings_of(None, precision), optimizer="adamw")
    plain = run_of(settings, corpus, tmp_path / "plain")
    within = run_of(replace(settings, memory="1GiB"), corpus, tmp_path / "within")
    assert within.run().train == plain.run().train and within.history.held_out == plain.history.held_out
    assert all(map(torch.equal, within.model.parameters(), plain.model.parameters()))
    assert plain.plan is None and plain.history.peak_bytes == 0


@pytest.mark.thinned(2)
@pytest.mark.parametrize("parts", [2, 3])
def test_parts_of_a_batch_have_the_mean_loss_and_the_step_of_the_whole(corpus, tmp_path, follow, parts):
    follow(micro_batches=parts)
    plain = run_of(settings_of(None, "fp32"), corpus, tmp_path / "plain")
    within = run_of(settings_of("1GiB", "fp32"), corpus, tmp_path / "within")
    assert within.run().train == pytest.approx(plain.run().train, rel=1e-5)
    assert within.history.held_out[-1][1] == pytest.approx(plain.history.held_out[-1][1], rel=1e-5)
    assert within.history.peak_bytes < 0.8 * lb.estimate(model_of(settings_of(None), corpus), WHOLE).peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "nvfp4:keep_blocks=0"])
def test_a_run_that_stops_goes_on_by_its_plan_in_every_bit(corpus, tmp_path, follow, precision, monkeypatch):
    follow(checkpoint="block", bits=8, offload_states=True, micro_batches=2)
    settings = settings_of("1GiB", precision, compress_activations=precision != "bf16")
    straight = run_of(settings, corpus, tmp_path / "straight")
    assert straight.config.optimizer == "adamw8bit"
    straight.run()

    def stop(now: Trainer) -> None:
        if now.step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        run_of(settings, corpus, tmp_path / "stopped").run(stop)
    monkeypatch.setattr(planned, "fit", lambda *_, **__: pytest.fail("the plan is not made again"))
    resumed = run_of(settings, corpus, tmp_path / "stopped", resume=True)
    assert resumed.step == 4 and resumed.plan.settings == straight.plan.settings
    assert resumed.run().train == straight.history.train and resumed.history.held_out == straight.history.held_out
    assert resumed.history.peak_bytes > 0, "as measured before the stop"
    theirs = straight.model.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in resumed.model.state_dict().items())


def test_a_state_of_another_plan_is_refused_and_one_from_without_plans_is_read(corpus, tmp_path, follow):
    follow(checkpoint="block")
    settings = settings_of("1GiB", "fp32")
    run_of(settings, corpus, tmp_path).run()
    planned.path_of(tmp_path, "fp32").unlink()
    follow(micro_batches=2)
    with pytest.raises(ValueError, match=r"is of another run \(checkpoint block -> None, micro_batches 1 -> 2\)"):
        run_of(settings, corpus, tmp_path, resume=True)
    plain = made(corpus, tmp_path / "plain", precision="fp32", steps=2)
    plain.run()
    state = torch.load(io.BytesIO(read_checked(plain.path)), weights_only=True)
    del state["plan"], state["history"]["peak_bytes"]
    plain._restore(state)
    assert plain.step == 2


# -- what is chosen ----------------------------------------------------------------------------------------------------
def test_a_plan_chooses_what_the_loop_does_and_the_plain_choice_elsewhere():
    names = set(planned._options(None))
    assert {"adamw", "adamw8bit", "adamw4bit", "block", "everything kept", "memory", "disk"} <= names
    assert names & {choice.name for choice in TECHNIQUES["precision"]} == {"fp32", "as loaded"}, "both change nothing"
    for row in TECHNIQUES.values():
        assert names & {choice.name for choice in row}, "no dimension is left to what the loop knows nothing of"
    assert set(planned._options("adamw8bit")) == names - {"adamw", "adamw4bit"}
    assert set(planned._options("lion8bit")) == names - {"adamw", "adamw8bit", "adamw4bit"} | {"lion8bit"}
    with pytest.raises(ValueError, match=r"plans runs with adamw or adamw8bit .*, got the optimizer 'lion16bit'"):
        set(planned._options("lion16bit"))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"watch": 3}, "watched steps need more memory than is planned; drop one"),
        ({"train": replace(SHORT, tail=0.1)}, r"--tail.*its last steps are not quantized"),
        ({"train": replace(SHORT, checkpointing=True)}, "the plan chooses checkpointing"),
    ],
)
def test_what_no_plan_knows_of_is_refused_beside_one(changes, told):
    with pytest.raises(ValueError, match=told):
        RunSettings(recipes=("int8",), memory="1GiB", **changes)
    RunSettings(recipes=("int8",), **changes)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("recipe", ["fp8", "nvfp4:keep_blocks=0"])
def test_an_estimate_of_a_prepared_model_is_that_of_its_recipe(corpus, recipe):
    settings = settings_of(None, "fp8")
    prepared = model_of(settings, corpus)
    before = lb.estimate(model_of(settings, corpus), WHOLE, recipe=recipe)
    lb.train.prepare_(prepared, recipe)
    after = lb.estimate(prepared, WHOLE)
    assert (after.peak_bytes, after.by_kind) == (before.peak_bytes, before.by_kind)
