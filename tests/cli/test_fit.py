"""``lowbit fit``, of a model and with ``--ladder``: what it prints and writes, and what it refuses."""

import importlib
import json
import sys

import pytest
import torch

import lowbit as lb
from lowbit.plan import TrainingPlan
from lowbit.plan.fitting.choices import words
from lowbit.plan.ladder import RUNGS, ascent
from lowbit.plan.ladder.cell import Result
from lowbit.plan.ladder.shape import textbook

MADE = """
import torch
from torch import nn

def made():
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))
    return model, torch.ones(256, 64)

def model_alone():
    return nn.Linear(2, 2)

def with_targets():
    batch = torch.ones(64, 64), torch.zeros(64, dtype=torch.long)
    return made()[0], batch, lambda output, batch: nn.functional.cross_entropy(output, batch[1])
"""


@pytest.fixture(autouse=True, scope="module")
def times(steady_times):
    """Of every test here: plans do not depend on how busy the machine is."""


# -- of a model --------------------------------------------------------------------------------------------------------
@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module in the directory that one is in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_to_plan.py").write_text(MADE)
    return "mine_to_plan:made"


def taken(text):
    """What the lines of Python leave that the command prints."""
    lines = text.splitlines()
    code = "\n".join(lines[lines.index("apply it") + 1 :])
    names: dict = {}
    exec(compile(code, "printed", "exec"), names)
    return names


def test_a_plan_in_words_a_table_and_python_that_applies_it(run, mine):
    options = ("--memory", "40%", "--require", "fp32", "--exclude", "disk")
    told = run("fit", mine, *options)
    names = taken(told)
    plan = names["plan"]
    assert plan.settings.precision is None and plan.settings.offload_states is False and plan.settings.micro_batches > 1
    assert str(plan) in told and plan.table() in told and "(chosen)" in told
    assert names["run"].settings == plan.settings and 0 < names["loss"] < 10
    assert json.loads(run("fit", mine, *options, "--json")) == json.loads(json.dumps(plan.as_dict()))


@pytest.mark.slow
def test_a_loss_of_its_own_is_planned_for_and_printed(run, mine):
    names = taken(run("fit", "mine_to_plan:with_targets", "--memory", "90%", "--out", "saved"))
    assert names["plan"].identity.loss is not None and 3 < names["loss"] < 6


def test_a_plan_for_a_gpu_that_is_not_here(run):
    few = [word for name in ("fp32", "adamw", "block", "memory") for word in ("--require", name)]
    told = run("fit", "demo", "--memory", "200%", "--device", "RTX 4090", "--rows", "2", "--length", "32", *few)
    assert "for rtx-4090: times are rooflines" in told and "device='RTX 4090'" in told


@pytest.mark.slow
def test_a_config_alone_is_enough(run, tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5")
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0,
        architectures=["T5ForConditionalGeneration"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    told = run("fit", str(tmp_path), "--memory", "90%", "--rows", "2", "--length", "8", "--require", "fp32")
    assert (
        "'labels': torch.zeros(2, 8).to(torch.int64)" in told and "T5ForConditionalGeneration.from_pretrained" in told
    )


def test_a_plan_of_several_processes_in_words(run, mine):
    told = run(
        "fit", mine, "--memory", "80%", "--gpus", "4", "--link", "1GB/s", "--require", "fp32", "--exclude", "disk"
    )
    assert "on each of 4 processes" in told and all(strategy in told for strategy in ("ddp", "zero1", "zero2", "zero3"))
    assert "torchrun --nproc-per-node 4" in told
    assert "lb.fit(model, batch, '80%', require=('fp32',), exclude=('disk',), gpus=4, link='1GB/s')" in told


def test_out_has_the_plan_its_words_and_its_plot(run, mine, tmp_path):
    pytest.importorskip("matplotlib")
    told = run("fit", mine, "--memory", "60%", "--out", "saved")
    loaded = taken(told)["plan"]
    assert loaded.as_dict() == TrainingPlan.load(tmp_path / "saved/plan.json").as_dict()
    text = (tmp_path / "saved/plan.md").read_text()
    assert loaded.table() in text and "![peaks and times to choose from](plan.png)" in text
    assert (tmp_path / "saved/plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_demo_takes_rows_and_length(run):
    keep = [option for name in ("fp32", "adamw", "everything kept", "memory") for option in ("--require", name)]
    told = run("fit", "demo", "--memory", "100%", "--rows", "2", "--length", "32", *keep)
    names = taken(told)
    assert names["batch"].shape == (2, 32) and words(names["plan"].settings) == "plain training"
    plain = lb.estimate(names["model"], names["batch"], optimizer=torch.optim.AdamW)
    kept = torch.get_rng_state().nbytes  # what a step is put back to where it fails
    assert names["plan"].peak_bytes == plain.peak_bytes + kept


def test_without_matplotlib_there_is_no_plot(run, mine, tmp_path, monkeypatch):
    command = importlib.import_module("lowbit.cli.fit")  # the package has a function of that name
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    run("fit", mine, "--memory", "60%", "--out", "saved")
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"plan.json", "plan.md"}
    assert "plan.png" not in (tmp_path / "saved/plan.md").read_text()


def test_a_plot_shows_budget_and_choice(mine, tmp_path, monkeypatch):
    """What is drawn, as matplotlib was told."""
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    model, batch = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Linear(512, 64)), torch.ones(256, 64)
    plan = lb.fit(model, batch, "40%", require="fp32")
    plan.plot(tmp_path / "plan.png")
    (axes,) = drawn[0].axes
    (dashed,) = (line for line in axes.lines if line.get_linestyle() == "--")
    assert set(dashed.get_xdata()) == {plan.budget / 2**20}
    (ring,) = (line for line in axes.lines if line.get_markerfacecolor() == "none")
    assert (ring.get_xdata()[0], ring.get_ydata()[0]) == (plan.peak_bytes / 2**20, plan.seconds / plan.plain.seconds)
    assert {words(plan.settings), "plain training"} <= {text.get_text() for text in axes.texts}
    (legend,) = drawn[0].legends
    assert {text.get_text() for text in legend.texts} == {"chosen", "budget", "plain training", "least time by peak"}
    assert min(text.get_fontsize() for text in (*axes.texts, *legend.texts)) >= 8
    (frontier,) = (line for line in axes.lines if line.get_linestyle() == "-")
    points = {(one.peak_bytes / 2**20, one.seconds / plan.plain.seconds) for one in plan.frontier}
    assert set(zip(frontier.get_xdata(), frontier.get_ydata(), strict=True)) == points


@pytest.mark.slow
def test_a_plot_without_matplotlib_says_how_to_get_it(mine, tmp_path, monkeypatch):
    model, batch = torch.nn.Linear(4, 4), torch.ones(4, 4)
    plan = lb.fit(model, batch, "100%")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plan.plot(tmp_path / "plan.png")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "lowbit fit demo --memory 60%"),
        (("demo",), "expects a budget: --memory 6GiB"),
        (("demo", "--memory", "1GiB", "--quick"), "--quick applies only to lowbit fit --ladder; leave it out"),
        (("demo", "--memory", "1GiB", "--search", "6"), "--search applies only to lowbit fit --ladder; leave it out"),
        (("demo", "--memory", "1GiB", "--device", "cpu"), "device='cpu' is not a row of lb.plan.DEVICES"),
        (("demo", "--ladder", "--quick"), "--quick applies to the ladder's own models, not to MODEL; leave it out"),
        (("demo", "--ladder", "--gpus", "2"), "--gpus applies to the ladder's own models, not to MODEL"),
        (("demo", "--ladder", "--exclude", "disk"), "--exclude applies to a plan, not to --ladder"),
        (("mine_to_plan:made", "--ladder", "--rows", "4"), "--rows sets the batch that lowbit creates, but"),
        (("mine_to_plan:made", "--ladder", "--memory", "much"), "'much' is no size"),
        (("--ladder", "--require", "bf16"), "--require applies to lowbit fit MODEL"),
        (("--ladder", "--rows", "8"), "--rows applies to lowbit fit MODEL"),
        (
            ("mine:made", "--memory", "80%", "--rows", "4"),
            "--rows sets the batch that lowbit creates, but mine:made returns",
        ),
        (("--ladder", "--link", "1GB/s"), "--link applies to lowbit fit MODEL"),
        (("--ladder", "--gpus", "3"), "expected 1, 2, 4, ... processes, whose means are exact, got 3"),
        (("mine_to_plan:made", "--memory", "1GiB", "--gpus", "2", "--link", "fast"), "such as '25GB/s', got 'fast'"),
        (("nothing", "--memory", "1GiB"), "error: MODEL nothing: expected 'demo', a Hugging Face model directory"),
        (("nothing:made", "--memory", "1GiB"), "error: MODEL nothing:made: No module named"),
        (
            ("mine_to_plan:model_alone", "--memory", "1GiB"),
            "expected (model, batch) or (model, batch, loss) from model_alone(), got",
        ),
        (("mine_to_plan:made", "--memory", "much"), "'much' is no size"),
        (
            ("mine_to_plan:made", "--memory", "1KiB", "--require", "fp32"),
            "no choice fits a step into 1.00 KiB; the least is",
        ),
        (("mine_to_plan:made", "--memory", "1GiB", "--require", "bf17"), "no choice is called 'bf17'"),
    ],
)
def test_mistakes_of_a_plan_are_told(run, mine, options, message):
    assert message in run("fit", *options, code=1)


# -- the ladder --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--memory", "much"), "'much' is no size"),
        (("--memory", "1MiB"), "the need of its smallest transformer"),
        (("--search", "-1"), "--search expects a number of models, got -1"),
        (("--device", "tpu"), "--device is one of cpu, cuda, got 'tpu'"),
    ],
)
def test_mistakes_are_told(run, options, message):
    assert message in run("fit", "--ladder", *options, code=1)


@pytest.fixture
def ruled(monkeypatch):
    """A process of a cell is replaced by a rule: each rung halves what is held."""

    def fake(cell):
        changed = sum(bool(v) for v in (cell.settings.checkpoint, cell.settings.precision, cell.settings.bits == 8))
        peak = sum(textbook(cell.shape).values()) >> (
            changed + bool(cell.settings.recipe) + (cell.settings.micro_batches > 1)
        )
        if cell.budget is not None and peak > cell.budget:
            return Result(0, cell.budget, None, (), "backward")
        return Result(0, peak, 0.25, (6.0,) * cell.steps)

    monkeypatch.setattr(ascent, "measure", fake)


def test_quick_prints_a_row_a_rung_and_no_largest_model(run, ruled):
    text = run("fit", "--ladder", "--memory", "100MiB", "--quick")
    assert "times the budget of 100.00 MiB" in text
    for rung in RUNGS:
        first = rung.name.partition(" ")[0]  # a narrow table folds the name
        assert sum(line.startswith(first) for line in text.splitlines()) >= 2, (rung.name, text)
    assert "largest" not in text and "Under the limit memory runs out in backward." in text
    data = json.loads(run("fit", "--ladder", "--memory", "100MiB", "--quick", "--json"))
    assert [row["name"] for row in data["rungs"]] == [rung.name for rung in RUNGS]
    assert data["budget"] == 100 << 20 and all(row["largest"] is None for row in data["rungs"])


def test_out_has_report_numbers_and_cells(run, ruled, tmp_path):
    run("fit", "--ladder", "--memory", "100MiB", "--out", str(tmp_path))
    data = json.loads((tmp_path / "ladder.json").read_text())
    sizes = [row["largest"]["parameters"] for row in data["rungs"] if row["kept"]]
    assert sizes == sorted(set(sizes)), "each rung that halves what is held trains a larger model"
    assert "| fp32 |" in (tmp_path / "ladder.md").read_text() and list((tmp_path / "cells").glob("fp32-size*.json"))


@pytest.mark.slow
def test_the_ladder_of_estimated_peaks(run, mine, tmp_path):
    """Two Linear layers and no repeated blocks: checkpoints and streaming do not apply."""
    text = run("fit", "--ladder", mine, "--memory", "60%", "--out", str(tmp_path / "out"))
    data = json.loads((tmp_path / "out" / "ladder.json").read_text())
    rows = {row["name"]: row for row in data["rungs"]}
    assert list(rows) == [rung.name for rung in RUNGS]
    first = rows["fp32"]["prediction"]["peak_bytes"]
    assert data["budget"] == int(0.6 * first)
    model, batch = sys.modules["mine_to_plan"].made()
    assert first == pytest.approx(lb.estimate(model, batch).peak_bytes, rel=0.02)
    assert rows["block"]["prediction"] is None and "no ModuleList" in rows["block"]["reason"]
    assert rows["bf16"]["kept"] and rows["bf16"]["prediction"]["settings"]["precision"] == "bf16"
    assert "Left out: " in text and "fits" in text
    assert "| fp32 |" in (tmp_path / "out" / "ladder.md").read_text()
