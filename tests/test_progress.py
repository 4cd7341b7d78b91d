"""What takes minutes shows a bar on a terminal, and lines of the log elsewhere."""

from __future__ import annotations

import io
import logging
import sys
import time

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.progress import reporting


class Terminal(io.StringIO):
    """Standard error of a terminal."""

    def isatty(self) -> bool:
        return True


def calibrate(model: nn.Module, batches: list, out: object, **how: object) -> None:
    lb.calibrate(model, "int8", batches, skip=(), **how)


def sensitivity(model: nn.Module, batches: list, out: object, **how: object) -> None:
    lb.sensitivity(model, ["int8"], batches, skip=(), **how)


def quantize_files(model: nn.Module, batches: list, out: object, **how: object) -> None:
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(32, 32))
    lb.quantize_files(out / "model", "int8", out / "small", model=empty, skip=(), **how)


CASES = ((calibrate, "calibrating: "), (sensitivity, "measuring layers: batch"), (quantize_files, "quantizing: file"))


@pytest.mark.parametrize(("function", "shown"), CASES, ids=lambda one: getattr(one, "__name__", ""))
@pytest.mark.parametrize("how", ["terminal", "no terminal", "silent", "callable"])
def test_a_bar_is_shown_on_a_terminal_alone(tmp_path, monkeypatch, function, shown, how):
    model, told = nn.Sequential(nn.Linear(32, 32)), []
    safetensors = pytest.importorskip("safetensors.torch")
    (tmp_path / "model").mkdir()
    safetensors.save_file(
        {k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "model" / "model.safetensors"
    )
    errors = Terminal() if how != "no terminal" else io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    given = {"silent": False, "callable": lambda *what: told.append(what)}.get(how)
    function(model, [torch.randn(4, 32)], tmp_path, progress=given)
    assert (shown in errors.getvalue()) == (how == "terminal"), errors.getvalue()
    if how != "terminal":
        assert errors.getvalue() == ""
    assert bool(told) == (how == "callable") and all(0 <= done <= total for _, done, total in told)


def test_a_bar_on_request(monkeypatch):
    monkeypatch.setattr(sys, "stderr", errors := io.StringIO())
    with reporting(True, "waiting") as told:
        told("block", 1, 2)
    assert "waiting: block" in errors.getvalue()


def test_without_a_terminal_a_line_is_logged_every_few_seconds(monkeypatch, caplog):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    clock = iter([0.0, 0.0, 1.0, 4.0, 6.0, 6.0, 7.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with caplog.at_level(logging.INFO, "lowbit"), reporting(None, "planning") as progress:
        for number in range(4):
            progress("fp32", number, 9)
    assert [one.getMessage() for one in caplog.records] == ["planning: fp32 (0 of 9)", "planning: fp32 (3 of 9)"]
