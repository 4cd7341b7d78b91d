"""Ranges and observers, against plain oracles."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.processes import run_processes
from torch import Tensor

import lowbit as lb
from lowbit.observers import OBSERVERS, Ranges, find_observer

SCHEMES = ("int8:tensor", "uint8:tensor:affine", "fp8_e4m3:tensor", "int8:col", "int4:tensor")


def seen(batches: list[Tensor], scheme: str = "int8:tensor") -> Ranges:
    ranges = Ranges(lb.scheme(scheme), batches[0].shape[-1], histogram=True)
    for x in batches:
        ranges.update(x)
    return ranges


def loss(x: Tensor, scheme: str, ranges: Ranges, observer: str) -> float:
    low, high = OBSERVERS[observer].range(ranges)
    scales = ranges.scales(low, high)
    return float((lb.fake_quantize(x, scheme, *scales) - x).square().mean())


@given(
    scheme=st.sampled_from(SCHEMES), rows=st.integers(1, 30), cols=st.integers(1, 20), scale=st.floats(1e-3, 1e3),
    shift=st.floats(-3, 3),
)  # fmt: skip
def test_minmax_makes_the_scales_of_quantize(scheme, rows, cols, scale, shift):
    x = (torch.randn(rows, cols) + shift) * scale
    ranges = seen(list(x.split(7)), scheme)
    made, expected = ranges.scales(*OBSERVERS["minmax"].range(ranges)), lb.quantize(x, scheme)
    assert torch.equal(made.scale, expected.scale)
    if made.zero_point is not None:
        assert torch.equal(made.zero_point, expected.zero_point)


def test_every_column_has_a_range_of_its_own():
    x = torch.randn(100, 80) * torch.tensor([1.0, 10.0, 100.0]).repeat_interleave(32)[:80]
    ranges = seen(list(x.split(30)), "int8:col")
    assert torch.equal(ranges.low, x.amin(0))
    assert torch.equal(ranges.high, x.amax(0))


@given(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=5), seed=st.integers(0, 50))
def test_the_histogram_counts_every_number_whatever_the_order(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    batches = [
        torch.randn(n, 3, generator=generator) * 2.0 ** float(torch.randint(-8, 8, (), generator=generator))
        for n in sizes
    ]
    one, other = seen(batches), seen(batches[::-1])
    assert int(one.counts.sum()) == 3 * sum(sizes)
    assert one.exponent == other.exponent
    assert torch.equal(one.counts, other.counts)
    values = torch.cat(batches).flatten()
    width = 2.0**one.exponent / 4096
    expected = torch.bincount(((values.double() / width).floor() + 4096).long().clamp(0, 8191), minlength=8192)
    assert torch.equal(one.counts.flatten().long(), expected)


def test_percentiles_are_those_of_the_numbers():
    x = torch.randn(2000, 16)
    ranges = seen(list(x.split(300)))
    for name, share in (("percentile", 0.9999), ("percentile:99", 0.99), ("percentile:90", 0.9)):
        low, high = find_observer(name).range(ranges)
        width, one = 2.0**ranges.exponent / 4096, 1 / x.numel()
        assert float(((x >= low) & (x <= high)).double().mean()) >= share - one
        assert float(((x >= low + 2 * width) & (x <= high - 2 * width)).double().mean()) <= share + one
    assert find_observer("percentile:100").range(ranges) == (x.min(), x.max())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_least_squared_error_is_found(scheme):
    x = torch.randn(500, 8) ** 3
    ranges = seen([x], scheme)
    found = loss(x, scheme, ranges, "mse")
    assert found <= loss(x, scheme, ranges, "minmax") * 1.001
    if scheme.endswith("col"):
        return
    brute = min(
        float((lb.fake_quantize(x, scheme, *ranges.scales(f * ranges.low, f * ranges.high)) - x).square().mean())
        for f in torch.linspace(0.05, 1, 60)
    )
    assert found <= brute * 1.02


def test_the_entropy_of_outliers_is_worth_less_than_the_resolution_of_the_rest():
    x = torch.randn(4000, 8)
    x[0, 0] = 100.0
    ranges = seen([x])
    high = float(OBSERVERS["entropy"].range(ranges)[1])
    assert 2.5 < high < 15  # a Gaussian's own range, not the outlier's
    clean = torch.rand(4000, 8) * 2 - 1  # uniform numbers: nothing is to be gained by clipping
    assert float(OBSERVERS["entropy"].range(seen([clean]))[1]) > 0.95


@pytest.mark.parametrize("scheme", ["int8:tensor", "uint8:tensor:affine"])
def test_zeros_do_not_change_the_range_of_least_entropy(scheme):
    """Every range has a code for zero: ReLU's zeros ask for no finer one."""
    x = torch.rand(4000, 8) * 6
    x[0, 0] = 6.0
    mostly_zeros = torch.cat([x, torch.zeros(40000, 8)])
    found = [float(OBSERVERS["entropy"].range(seen([one], scheme))[1]) for one in (x, mostly_zeros)]
    assert found[0] == found[1] > 5.5


def test_moving_averages_follow_the_batches():
    batches = [torch.full((2, 3), float(k)) for k in (1, 2, 3)]
    low, high = OBSERVERS["moving-average"].range(seen(batches))
    expected = 1.0
    for k in (2.0, 3.0):
        expected += 0.01 * (k - expected)
    torch.testing.assert_close(high, torch.tensor([expected]))
    torch.testing.assert_close(low, high)


def _process(rank: int, batches: list[Tensor], path: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29519")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        ranges = seen(batches[rank::2])
        ranges.reduce()
        torch.save([ranges.low, ranges.high, ranges.average, ranges.counts, ranges.exponent], f"{path}/{rank}")
    finally:
        dist.destroy_process_group()


def test_two_processes_see_what_one_does(tmp_path):
    batches = [torch.randn(50, 4) * 2.0**k for k in (0, 3, -2, 5, 1, 2)]
    whole = seen(batches)
    run_processes(_process, (batches, str(tmp_path)))
    for rank in range(2):
        low, high, average, counts, exponent = torch.load(tmp_path / str(rank))
        assert torch.equal(low, whole.low)
        assert torch.equal(high, whole.high)
        assert torch.equal(average, whole.average)
        assert torch.equal(counts, whole.counts)
        assert exponent == whole.exponent


def test_a_share_is_for_percentiles_and_between_50_and_100():
    with pytest.raises(ValueError, match="only percentile takes a share"):
        find_observer("percentile:101")
