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
from lowbit.memory import checkpoint_, profile, usual_loss
from lowbit.optim.names import find_optimizer
from lowbit.plan.checklist import ADVISED, checklist

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
    said = {row.name: row for row in found.advice}
    assert said.keys() == {technique.name for technique in ADVISED}
    plain = peak(lambda model: None, batch)
    assert found.plain.peak_bytes == pytest.approx(plain, rel=0.005)
    real = {
        "half the batch": peak(lambda model: None, batch[:4]),
        "block": peak(checkpoint_, batch),
        "attention": peak(lambda model: checkpoint_(model, "attention"), batch),
        "bf16": peak(lb.train.mixed_, batch),
        "adamw8bit": peak(lambda model: None, batch, "adamw8bit"),
    }
    for name, held in real.items():
        assert plain - said[name].saves == pytest.approx(held, rel=0.01), name
    assert said["disk"].saves == found.plain.by_kind["optimizer state"]
    assert said["block"].time > said["attention"].time > 0
    assert said["half the batch"].time < -0.3
    (line,) = (line for line in str(found).splitlines() if line.startswith("half the batch"))
    assert re.match(r"half the batch +\S+ [KM]iB less +\d+% less +\d+% less +estimated", line), line


def test_what_does_nothing_comes_last_with_its_reason():
    """A model of one large matrix, whose peak is in the optimizer's step or the end of backward."""
    model = nn.Sequential(nn.Linear(1024, 1024))
    found = checklist(model, torch.zeros(1, 1024), precision="bf16", optimizer="adamw8bit")
    notes = {row.name: row.note for row in found.advice}
    assert notes["bf16"] == "precision is already bf16"
    assert "already low-bit" in notes["adamw8bit"]
    assert notes["half the batch"] == "the batch has one row"
    assert "no ModuleList" in notes["block"]
    useful = [bool(row.note) for row in found.advice]
    assert useful == sorted(useful)
    assert json.dumps(found.as_dict()) and "precision is already bf16" in str(found)


@pytest.mark.slow
def test_the_command(run, tmp_path, monkeypatch):
    said = json.loads(run("doctor", "--memory", "demo", "--batch", "2", "--length", "32", "--json"))
    assert said["plain"]["peak_bytes"] > 0 and len(said["advice"]) == len(ADVISED)
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
