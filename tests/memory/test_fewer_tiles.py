"""Estimates of loops over tiles: four of them yield the record of all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.memory import fewer_tiles
from lowbit.memory.fewer_tiles import FewerTiles
from lowbit.memory.tile_loops import alike

pytestmark = pytest.mark.usefixtures("steady_times")


class Network(nn.Module):
    """Some layers, and a loss in tiles of their output."""

    def __init__(self, loss, tied: bool = False, bias: bool = False, depth: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(depth))
        self.head = nn.Linear(32, 500, bias=bias)
        self.loss = loss
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x).relu()
        return self.loss(x, self.head, ids)


def cross_entropy(x, head, ids):
    return lb.memory.linear_cross_entropy(x, head.weight, ids, head.bias, chunk=50 * 40)


def smoothed(x, head, ids):
    return lb.memory.linear_cross_entropy(
        x, head.weight, ids, head.bias, chunk=50 * 40, softcap=3.0, label_smoothing=0.1
    )


def log_probs(x, head, ids):
    told = lb.memory.linear_log_probs(x, head.weight, ids, head.bias, chunk=20 * 40, temperature=0.5)
    return told.log_probs.sum() + told.entropy.sum()


def in_growing_tiles(x, head, ids):
    """Tiles that are not alike: each has more classes than the last."""
    total = x.new_zeros(())
    for tile in alike([slice(0, 10 * n) for n in range(1, 9)]):
        total = total + (x @ head.weight[tile].t()).square().sum()
    return total


def kept_results(x, head, ids):
    """Results of all tiles live until the end."""
    return torch.cat([x @ head.weight[tile].t() for tile in alike([slice(n, n + 50) for n in range(0, 500, 50)])]).sum()


def estimates(monkeypatch, network, **settings):
    """With some and with all tiles, and the numbers of the ops that ran in each."""
    ran = list[int]()
    extend = FewerTiles.extend

    def counted(self, *arguments):
        ran.append(len(self._ledger.ops))
        return extend(self, *arguments)

    monkeypatch.setattr(FewerTiles, "extend", counted)
    found = []
    for shown in (fewer_tiles._SHOWN, 1 << 30):
        monkeypatch.setattr(fewer_tiles, "_SHOWN", shown)
        found.append(lb.estimate(network, torch.arange(40), lambda loss, _: loss, **settings))
    return *found, ran


def assert_same(few, every):
    assert few.ops == every.ops and few.op_seconds == every.op_seconds
    assert few.peak_bytes == every.peak_bytes
    assert few.by_kind == every.by_kind and few.by_layer == every.by_layer


@pytest.mark.parametrize("settings", [{}, {"optimizer": "adamw8bit", "micro_batches": 2}, {"device": "h100"}])
@pytest.mark.parametrize(
    ("loss", "options"),
    [(cross_entropy, {}), (smoothed, {"tied": True}), (cross_entropy, {"bias": True, "depth": 7}), (log_probs, {})],
)
def test_some_tiles_stand_for_all(loss, options, settings, monkeypatch):
    few, every, (ran, ran_all) = estimates(monkeypatch, Network(loss, **options), **settings)
    assert ran < 0.8 * ran_all
    assert_same(few, every)


@pytest.mark.parametrize("loss", [in_growing_tiles, kept_results])
def test_every_tile_runs_if_they_differ(loss, monkeypatch):
    few, every, ran = estimates(monkeypatch, Network(loss), device="h100")
    assert len(ran) == 3 and ran[1] == ran[2], "the first of three attempts had too few tiles"
    assert_same(few, every)
