"""The checklist for out of memory: what it says of a technique is what the technique saves."""

from __future__ import annotations

import gc
import json
import re

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.distributed import STRATEGIES
from lowbit.memory import checklist, checkpoint_, profile, system_memory, usual_loss
from lowbit.optim.names import find_optimizer
from lowbit.plan.checklist import ADVISED

CONFIG = GPTConfig(vocab=256, layers=3, heads=2, dim=128, hidden=256)


def peak(change, batch, optimizer="adamw"):
    """Of a real step of a model to which ``change`` was done."""
    model = GPT(CONFIG)
    change(model)
    stepper = find_optimizer(optimizer).make(model.parameters())

    def step(given):
        usual_loss(model(given), given).backward()
        stepper.step()
        stepper.zero_grad()

    gc.collect()
    found = profile(model, batch, step)
    return found.peak_bytes - found.by_kind.get("other", 0)


@pytest.mark.slow
def test_what_is_said_is_what_is_saved():
    batch = torch.randint(256, (8, 128))
    found = checklist(GPT(CONFIG), batch)
    said = {row.technique: row for row in found.rows}
    assert said.keys() == {technique.name for technique in ADVISED}
    plain_peak = found.plain.peak_bytes
    assert plain_peak == pytest.approx(peak(lambda model: None, batch), rel=0.005)
    real = {
        "half the batch": peak(lambda model: None, batch[:4]),
        "block": peak(checkpoint_, batch),
        "attention": peak(lambda model: checkpoint_(model, "attention"), batch),
        "bf16": peak(lb.train.mixed_, batch),
        "adamw8bit": peak(lambda model: None, batch, "adamw8bit"),
    }
    for name, held in real.items():
        assert said[name].peak_bytes == plain_peak - said[name].saves == pytest.approx(held, rel=0.01), name
    assert said["disk"].saves == found.plain.by_kind["optimizer state"]
    assert said["block"].time > said["attention"].time > 0
    assert said["half the batch"].time < -0.3
    (line,) = (line for line in str(found).splitlines() if line.startswith("half the batch"))
    assert re.match(r"half the batch +\S+ [KM]iB less +\d+% less +\d+% less +estimated", line), line


def test_what_does_nothing_comes_last_with_its_reason():
    """A model of one large matrix, whose peak is in the optimizer's step or the end of backward."""
    model = nn.Sequential(nn.Linear(1024, 1024))
    found = checklist(model, torch.zeros(1, 1024), precision="bf16", optimizer="adamw8bit")
    notes = {row.technique: row.reason for row in found.rows}
    assert notes["bf16"] == "precision is already bf16"
    assert "already low-bit" in notes["adamw8bit"]
    assert notes["half the batch"] == "the batch has one row"
    assert "no ModuleList" in notes["block"]
    useful = [row.applies for row in found.rows]
    assert useful == sorted(useful, reverse=True)
    assert json.dumps(found.as_dict()) and "precision is already bf16" in str(found)


def test_shards_are_rows_and_the_systems_memory_is_below_them():
    """Each process of eight has an eighth of the states with ``zero1``, and of all with ``zero3``."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = checklist(model, torch.zeros(2, 64), optimizer="adamw32bit")
    rows = {row.technique: row for row in found.rows}
    assert {name for name, row in STRATEGIES.items() if row.states} <= rows.keys()
    kinds = found.plain.by_kind
    states = kinds["optimizer state"]
    assert rows["zero1"].saves == states - -(-states // 8)
    assert rows["zero1"].call == 'lb.distributed.shard_(model, optimizer, "zero1")'
    assert found.system.device == "cpu"
    memory, unused = str(found).rpartition("\n\n")[2].splitlines()
    assert memory == f"memory of cpu: {found.system}"
    assert unused.startswith("lb.memory.clear() frees") and "clear" not in rows
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_memory_of_the_host_is_the_kernels():
    psutil = pytest.importorskip("psutil")
    found, there = system_memory(), psutil.virtual_memory()
    assert found.total == there.total and 0 < found.free <= found.total
    assert found.free == pytest.approx(there.available, rel=0.2)
    assert found.process == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)


@pytest.mark.slow
def test_the_command(run, tmp_path, monkeypatch):
    said = json.loads(run("doctor", "--memory", "demo", "--batch", "2", "--length", "32", "--json"))
    assert said["plain"]["peak_bytes"] > 0 and len(said["rows"]) == len(ADVISED)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_to_fit.py").write_text(
        "import torch\n\ndef made():\n    return torch.nn.Linear(4, 4), torch.zeros(2, 4)\n"
    )
    assert "best first" in run("doctor", "--memory", "mine_to_fit:made")


@pytest.mark.parametrize(
    ("name", "words"),
    [("nothing", "MODULE:FUNCTION"), ("nothing:made", "No module named"), ("math:pi", "not callable|expected")],
)
def test_a_name_that_is_no_model_says_what_is(run, name, words):
    assert any(word in run("doctor", "--memory", name, code=1) for word in words.split("|"))
