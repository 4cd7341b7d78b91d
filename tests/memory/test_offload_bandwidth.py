"""Bandwidths and the report of what was moved and waited for."""

from __future__ import annotations

import time

import pytest

from lowbit.storage import directory
from lowbit.storage.bandwidth import bandwidth
from lowbit.storage.traffic import Traffic


def test_a_place_is_measured_once(tmp_path, monkeypatch):
    slow = 0.02
    move = directory._transfer

    def delayed(*arguments):
        time.sleep(slow)
        move(*arguments)

    monkeypatch.setattr(directory, "_transfer", delayed)
    found = bandwidth(tmp_path)
    assert 0 < found.write < (32 << 20) / slow and 0 < found.read < (32 << 20) / slow
    monkeypatch.setattr(directory, "_transfer", None)
    assert bandwidth(str(tmp_path)) is found and not list(tmp_path.iterdir())
    assert bandwidth("cpu") is bandwidth("cpu") and min(bandwidth("cpu")) > 1e8


def test_time_that_is_waited_for_is_no_hidden_time_and_too_much_of_it_is_said_once(recwarn, monkeypatch):
    clock = iter([0.0, 0.0, 4.0, 4.0, 5.0])
    monkeypatch.setattr("lowbit.storage.traffic.time.perf_counter", lambda: next(clock))
    traffic = Traffic("somewhere")
    traffic.begin()
    traffic.moved(out=3_000_000, back=1_000_000)
    with traffic.timed("copying"):
        pass
    with traffic.timed("waited"):
        pass
    assert (traffic.copying, traffic.waited, traffic.hidden, traffic.elapsed) == pytest.approx((4, 1, 3, 5))
    assert "hidden      3.000 s" in str(traffic) and "waited      1.000 s of 5.000 s" in str(traffic)
    traffic.judge()
    traffic.judge()
    assert [str(w.message).split(" of the time")[0] for w in recwarn] == ["offload to somewhere: 20%"]
