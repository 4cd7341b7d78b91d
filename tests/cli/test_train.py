"""``lowbit train``: Ctrl-C loses nothing, and nothing of others' is overwritten."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import lowbit as lb
from lowbit.demo import experiment, planned
from lowbit.plan import TrainingPlan
from lowbit.plan.fitting.choices import words
from lowbit.sizes import amount

ENGLISH = Path(__file__).parents[1] / "data" / "english.txt"
TINY = (
    f"--data {ENGLISH} --batch 2 --context 32 --dim 32 --heads 2 --hidden 64 --layers 2 --vocab 300 --steps 60 "
    "--eval-every 20 --save-every 5 --precision bf16 --precision fp8 --recipe int8 --recipe int4-weight-only:group32"
).split()


@pytest.fixture(autouse=True)
def one_turn(monkeypatch):
    """The median of many turns is a fair speed, and one is a speed."""
    monkeypatch.setattr(experiment, "SPEED_TURNS", 1)


@pytest.fixture
def one_thread():
    """As the interrupted process runs: another number of threads could round otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def interrupted(directory: Path, number: int) -> str:
    """Start a run in a process of its own, stop it with a signal once it has saved a state, return what it says."""
    command = [sys.executable, "-m", "lowbit", "train", "--out", str(directory), *TINY]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    while not (directory / "bf16" / "checkpoint.pt").exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(number)
    err = process.communicate(timeout=120)[1]
    assert process.returncode == 130, err
    assert "Traceback" not in err
    return err


@pytest.mark.slow
def test_ctrl_c_loses_nothing(tmp_path, run, one_thread):
    pytest.importorskip("matplotlib")
    straight, stopped = str(tmp_path / "a"), str(tmp_path / "b")
    assert f"lowbit train --out {stopped} --resume" in interrupted(tmp_path / "b", signal.SIGINT)
    assert "unfinished run" in run("train", "--out", stopped, *TINY, code=1)
    assert "continues with lr 0.005, got 0.5" in run("train", "--out", stopped, "--resume", "--lr", "0.5", code=1)
    resumed = json.loads(run("train", "--out", stopped, "--resume", "--json"))
    whole = json.loads(run("train", "--out", straight, *TINY, "--json"))
    for precision in ("bf16", "fp8"):
        for curve in ("train", "held_out"):
            assert resumed["runs"][precision][curve] == whole["runs"][precision][curve]
    kept = ("recipe", "loss", "bytes", "sample")
    assert [[row[k] for k in kept] for row in resumed["recipes"]] == [
        [row[k] for k in kept] for row in whole["recipes"]
    ]

    report = (tmp_path / "a" / "report.md").read_text()
    for link in re.findall(r"!\[.*?\]\((.*?)\)", report):
        assert (tmp_path / "a" / link).read_bytes().startswith(b"\x89PNG")
    assert all(name in report for name in ("fp32", "bf16", "fp8", "int8", "int4-weight-only:group32"))

    quantize = ("quantize", str(tmp_path / "a" / "model"), "int4-weight-only:group32")
    made = json.loads(run(*quantize, "--json"))
    assert made["bytes"] < 0.75 * made["bytes_before"] and list(made["left"]) == ["lm_head"]
    model = lb.load_model(made["out"])
    assert (Path(made["out"]) / "tokenizer.json").read_bytes() == (tmp_path / "a/model/tokenizer.json").read_bytes()
    assert model(torch.zeros(1, 4, dtype=torch.long)).shape == (1, 4, 300)
    assert "exists" in run(*quantize, code=1)


@pytest.mark.slow
def test_a_watched_run_reports_what_its_casts_lose(tmp_path, run, one_thread):
    pytest.importorskip("matplotlib")
    directory = tmp_path / "run"
    few = (
        "--steps",
        "6",
        "--recipe",
        "int8",
        "--precision",
        "bf16",
        "--precision",
        "mxfp8",
        "--tail",
        "0.3",
        "--watch",
        "3",
    )
    run("train", "--out", str(directory), *TINY, *few)
    report = (directory / "report.md").read_text()
    assert "## Quantization error of the mxfp8 run" in report and "The lowest SQNR in step 3." in report
    assert "The mxfp8 run computes only in bf16 from step 4 on (its tail)." in report
    assert "without gradient checkpointing" in report and "| mxfp8, codes, adamw |" in report
    assert (directory / "mxfp8" / "watch.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((directory / "mxfp8" / "watch.json").read_text())["rows"]
    assert {row["step"] for row in rows} == {0, 3} and not (directory / "bf16" / "watch.json").exists()
    assert "continues with watch 3, got 2" in run("train", "--out", str(directory), "--resume", "--watch", "2", code=1)
    run("train", "--out", str(directory), *TINY, *few[:-2], "--overwrite")
    assert not list(directory.glob("*/watch.*"))


@pytest.mark.slow
def test_profiling_the_memory_of_a_step_changes_no_loss(tmp_path, run, one_thread):
    few = ("--steps", "4", "--recipe", "int8", "--precision", "bf16")
    tiny = TINY[: TINY.index("--precision")]
    plain, profiled = tmp_path / "plain", tmp_path / "profiled"
    run("train", "--out", str(plain), *tiny, *few)
    told = run("train", "--out", str(profiled), *tiny, *few, "--profile-memory")
    losses = lambda directory: json.loads((directory / "report.json").read_text())["runs"]["bf16"]["train"]
    assert losses(plain) == losses(profiled) and not list(plain.glob("*/memory.*"))
    saved = json.loads((profiled / "bf16" / "memory.json").read_text())
    assert saved["by_phase"].keys() == {"forward", "backward", "step"}
    assert sum(saved["by_kind"].values()) == saved["peak_bytes"] == max(m["bytes"] for m in saved["timeline"])
    assert "memory of step 2 in bf16" in told and all(kind in told for kind in ("activations", "optimizer state"))


@pytest.mark.slow
def test_runs_within_a_memory_say_what_was_chosen_and_what_it_held(tmp_path, run, one_thread, monkeypatch):
    names = ["fp32", "adamw8bit", "block", "disk", "activations in memory"]  # fewer choices are quicker
    monkeypatch.setattr(planned, "_options", lambda optimizer: names)
    few = ("--steps", "4", "--recipe", "int8", "--precision", "bf16", "--memory", "70%")
    told = run("train", "--out", str(tmp_path), *TINY[: TINY.index("--precision")], *few)
    plan, report = TrainingPlan.load(tmp_path / "bf16" / "plan.json"), (tmp_path / "report.md").read_text()
    data = json.loads((tmp_path / "report.json").read_text())
    measured = data["runs"]["bf16"]["peak_bytes"]
    assert 0 < measured <= plan.budget < plan.plain.peak_bytes and data["plans"]["bf16"] == plan.as_dict()
    for value in (words(plan.settings), *map(amount, (plan.peak_bytes, measured, plan.budget))):
        assert value in told and value in report
    assert "bf16 training, peak step memory relative to budget" in report and "adamw8bit, block, disk" in report
    assert json.loads((tmp_path / "bf16" / "memory.json").read_text())["peak_bytes"] >= measured

    assert "continues with memory 70%, got 1GiB" in run(
        "train", "--out", str(tmp_path), "--resume", "--memory", "1GiB", code=1
    )
    before = [path.read_bytes() for path in (tmp_path / "bf16/plan.json", tmp_path / "bf16/checkpoint.pt")]
    small = ("--precision", "fp32", "--memory", "10KiB", "--overwrite")
    message = run(
        "train", "--out", str(tmp_path), *TINY[: TINY.index("--precision")], "--recipe", "int8", *small, code=1
    )
    assert "the fp32 run: fit: no choice fits a step into 10.00 KiB; the least is" in message
    assert before == [path.read_bytes() for path in (tmp_path / "bf16/plan.json", tmp_path / "bf16/checkpoint.pt")]
    run("train", "--out", str(tmp_path), *TINY[: TINY.index("--precision")], *few[:-2], "--overwrite")
    assert not (tmp_path / "bf16" / "plan.json").exists() and "plans" in (tmp_path / "report.json").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--checkpointing",), "the plan chooses checkpointing; drop --checkpointing"),
        (("--tail", "0.1"), "its last steps are not quantized"),
        (("--watch", "5"), "watched steps need more memory than is planned"),
        (
            ("--optimizer", "lion16bit"),
            "got the optimizer 'lion16bit'",
        ),
        (("--explain",), "it explains runs without a plan; drop --memory"),
    ],
)
def test_what_no_plan_knows_of_is_told(run, tmp_path, options, message):
    assert message in run("train", "--out", str(tmp_path / "run"), *TINY, "--memory", "1GiB", *options, code=1)
    assert not (tmp_path / "run" / "settings.json").exists()


@pytest.mark.slow
def test_a_recipe_with_options_and_training_state_may_be_the_first_run(tmp_path, run, one_thread):
    """Its directory has a name that links may have, and its model is saved without the state."""
    recipe = "nvfp4:rule=four-over-six"
    few = ("--steps", "3", "--layers", "3", "--recipe", "int8", "--precision", recipe, "--precision", "bf16")
    run("train", "--out", str(tmp_path), *TINY[: TINY.index("--precision")], *few)
    report = (tmp_path / "report.md").read_text()
    assert "computes blocks 1, 3 of 3 in bf16, because its recipe leaves out the first and the last blocks." in report
    assert (tmp_path / "nvfp4+rule=four-over-six" / "checkpoint.pt").exists()
    assert not any("lowbit_state" in name for name in lb.load_model(tmp_path / "model").state_dict())


def test_training_needs_no_matplotlib(tmp_path, run, monkeypatch, one_thread):
    from lowbit.demo import report

    find = report.find_spec
    monkeypatch.setattr(report, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    directory = tmp_path / "run"
    run("train", "--out", str(directory), *TINY, "--steps", "2", "--precision", "bf16", "--recipe", "int8")
    text = (directory / "report.md").read_text()
    assert "![" not in text and "| int8 |" in text
    assert not list(directory.glob("*.png")) and (directory / "report.json").exists()
    assert f"{sys.executable} -m pip install matplotlib" in report.without_plots()


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("given", "precisions", "outside"),
    [
        ([], "{default} fp8", "{default}"),
        (["--precision", "fp8"], "fp8", "{default}"),
        (["--precision", "fp32", "--precision", "mxfp8"], "fp32 mxfp8", "fp32"),
        (["--precision", "fp8", "--precision", "bf16"], "fp8 bf16", "bf16"),
        (["--precision", "fp16", "--precision", "fp8"], "fp16 fp8", "{default}"),
    ],
    ids=str,
)
@pytest.mark.parametrize("default", ["bf16", "fp32"])
def test_the_precision_of_a_run_is_the_processors_unless_given(
    run, monkeypatch, tmp_path, default, given, precisions, outside
):
    """Stopped before the first step, which leaves the settings that the run would have had."""
    from lowbit.demo.experiment import RunSettings

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    command = importlib.import_module("lowbit.cli.train")  # the package has a function of that name
    monkeypatch.setattr(command, "float_precision", lambda: default)
    monkeypatch.setattr(command, "_train", stop)
    run("train", "--out", str(tmp_path), "--data", str(ENGLISH), "--vocab", "300", *given, code=130)
    settings = RunSettings.load(tmp_path)
    assert settings.precisions == tuple(precisions.format(default=default).split())
    assert settings.train.outside == outside.format(default=default)
    assert {settings.of("fp8").outside, settings.of("fp8").precision} == {settings.train.outside, "fp8"}


def test_explain_prints_the_table_of_mixed_precision_and_the_bytes_of_a_step(run, tmp_path, monkeypatch):
    from lowbit.train.mixed import PARTS

    monkeypatch.chdir(tmp_path)
    options = "--vocab 300 --dim 32 --heads 2 --hidden 64 --layers 2 --precision fp16 --precision fp8-tensor".split()
    told = json.loads(run("train", "--explain", *options, "--json"))
    assert [part["name"] for part in told["parts"]] == [part.name for part in PARTS]
    matrices, head, vectors = 2 * (3 * 32 * 32 + 32 * 32 + 2 * 64 * 32 + 64 * 32), 300 * 32, 5 * 32
    numbers = matrices + 2 * head + vectors
    floats = {"weights": 4 * numbers, "copies": 0, "gradients": 4 * numbers}
    first, second, *others = told["bytes"]
    for held, precision, copies in ((first, "fp32", 0), (second, "fp16", 2 * (matrices + head))):
        assert [held.pop(name) for name in ("precision", "compress_activations", "optimizer")] == [
            precision, False, "adamw"]  # fmt: skip
        states, step, total = (held.pop(name) for name in ("states", "step", "total"))
        assert states - 8 * numbers in range(1000), "two states, and a step for each parameter"
        assert step > held["gradients"] + held["copies"] and total == held["weights"] + states + step
        assert held == {**floats, "copies": copies}
    steps = [("fp8-tensor", False, "adamw"), ("fp8-tensor", True, "adamw"), ("fp8-tensor", True, "adamw8bit")]
    assert [(row["precision"], row["compress_activations"], row["optimizer"]) for row in others] == steps
    plain, compressed, fp8 = others
    assert plain["step"] > compressed["step"] == fp8["step"] and plain["states"] == compressed["states"] > fp8["states"]
    scales, casts = 8 * 4, (0, 2 * head)  # the head is computed in what the processor multiplies
    assert fp8["copies"] - matrices - scales in casts and fp8["states"] < 8 * numbers
    text = run("train", "--explain", *options[:-4], "--precision", "fp8-tensor")
    assert all(word in text for word in ("residual sums", "masters", "gradients", "fp8-tensor", "MiB"))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_precision_that_is_slow_here_is_one_warning(tmp_path):
    """In a process of its own, whose warnings no test collects."""
    few = ("--steps", "1", "--layers", "1", "--recipe", "int8", "--precision", "fp16")
    command = [*TINY[: TINY.index("--steps")], *few]
    script = "import lowbit.train.mixed as m; m.multiplies = lambda _: False; import lowbit.demo.experiment as e; "
    script += "e.SPEED_TURNS = 1; import lowbit.cli as c; c.main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "train", "--out", str(tmp_path), *command], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True,
    )  # fmt: skip
    told = [line for line in done.stderr.splitlines() if "mixed_" in line]
    assert len(told) == 1 and told[0].startswith("warning: train.mixed_: this processor has no instructions"), told


@pytest.mark.slow
def test_sigterm_saves_as_well(tmp_path):
    assert "saved in" in interrupted(tmp_path / "c", signal.SIGTERM)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "name", ["report.md", "report.json", "loss.png", "model/notes.txt", "bf16/checkpoint.pt", "fp8/plan.json"]
)
def test_train_overwrites_no_file_that_it_did_not_write(run, tmp_path, name):
    mine = tmp_path / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    for options in ([], ["--overwrite"]):
        told = run("train", "--out", str(tmp_path), *TINY, *options, code=1)
        assert "no settings.json of lowbit train next to it" in told and "another --out" in told
    assert mine.read_text() == "mine" and not (tmp_path / "settings.json").exists()


def test_train_refuses_the_settings_of_something_else(run, tmp_path):
    for text in ('{"editor.tabSize": 4}', "[]", "no json", "\xff"):
        (tmp_path / "settings.json").write_bytes(text.encode("latin-1"))
        (tmp_path / "report.md").write_text("mine")
        told = run("train", "--out", str(tmp_path), *TINY, "--overwrite", code=1)
        assert "is not what this lowbit train writes" in told and "another --out" in told
        assert (tmp_path / "report.md").read_text() == "mine"


def test_a_new_run_removes_the_states_of_the_last_one_alone(tmp_path):
    from lowbit.cli import train

    settings = experiment.RunSettings(precisions=("bf16", "fp8"))
    train._begin(settings, tmp_path, overwrite=False)
    for name in ("bf16", "fp8", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoint.pt").write_text(name)
    with pytest.raises(ValueError, match="holds an unfinished run; add --resume to continue it, --overwrite to"):
        train._begin(settings, tmp_path, overwrite=False)
    (tmp_path / "report.md").write_text("of this run")
    with pytest.raises(ValueError, match="holds a finished run; add --overwrite to start over, or pass another --out"):
        train._begin(settings, tmp_path, overwrite=False)
    train._begin(experiment.RunSettings(precisions=("fp32",)), tmp_path, overwrite=True)
    assert [path.parent.name for path in tmp_path.glob("*/checkpoint.pt")] == ["other"]
