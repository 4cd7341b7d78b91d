"""What ops take of time: they are run once, on tensors of their shapes, and the time is kept for the next process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowbit.memory import estimate, runnable, timing
from lowbit.memory.runnable import call_of
from lowbit.memory.timing import Timings

CPU = torch.device("cpu")
MM = torch.ops.aten.mm.default


def product(side):
    return call_of(MM, (torch.empty(side, side, device="meta"),) * 2, {})


@pytest.fixture
def timed(tmp_path):
    return Timings(CPU, tmp_path / "timings.json")


def test_more_work_takes_more_time(timed):
    assert 0 < 20 * timed.seconds(product(16)) < timed.seconds(product(1024))


def test_a_call_is_measured_once_for_all_processes(timed, monkeypatch):
    seconds = timed.seconds(product(64))
    monkeypatch.setattr(Timings, "_measured", lambda *_: pytest.fail("measured again"))
    assert timed.seconds(product(64)) == seconds
    timed.save()
    assert Timings(CPU, timed.path).seconds(product(64)) == seconds


def test_what_is_read_between_runs_goes_when_times_are_saved(timed):
    timed.seconds(product(32))
    assert timed._flush is not None
    timed.save()
    assert timed._flush is None


def test_two_processes_keep_what_both_have_measured(timed):
    other = Timings(CPU, timed.path)
    first, second = timed.seconds(product(32)), other.seconds(product(64))
    timed.save()
    other.save()
    found = Timings(CPU, timed.path)
    assert found.seconds(product(32)) == first and found.seconds(product(64)) == second


def test_a_file_that_is_damaged_or_cannot_be_written_is_no_error(timed, tmp_path):
    timed.path.write_text("{]")
    assert Timings(CPU, timed.path).seconds(product(16)) > 0
    other = Timings(CPU, tmp_path / "timings.json" / "below a file")
    assert other.seconds(product(16)) > 0
    other.save()


@pytest.mark.parametrize(
    ("a", "b"), [((96, 8), (4, 8, 16)), ((8, 96), (96, 16)), ((4, 8, 16), (16, 96)), ((4, 8, 16), (4, 16, 8))]
)
def test_grouped_products_have_rows_in_every_group(timed, a, b):
    """Whole numbers that are made up are zeros: as the ends of groups they would leave nothing to compute."""
    ends = None if len(a) == len(b) == 3 else torch.empty(4, dtype=torch.int32)
    given = (torch.empty(a), torch.empty(b), ends)
    found = runnable.prepared(call_of(torch.ops.aten._grouped_mm.default, given, {}), CPU)()
    length = a[0] if len(a) < len(b) else a[-1]
    each = length // 4 if len(a) == len(b) == 2 else a[-1]
    assert (found >= 0.25**2 * each).all() and (found <= 0.75**2 * each).all()


def test_shapes_strides_dtypes_and_scalars_are_calls_of_their_own():
    a, add = torch.empty(8, 8), torch.ops.aten.add.Tensor
    calls = [
        call_of(add, given, kwargs)
        for given, kwargs in [
            ((a, a), {}), ((a, a.t()), {}), ((a, a[:1]), {}), ((a.bfloat16(), a), {}), ((a, a), {"alpha": 2}),
        ]
    ]  # fmt: skip
    assert len(set(calls)) == len(calls) == len({call.key for call in calls})
    assert call_of(add, (a, a.clone()), {}) == calls[0]


def test_views_and_ops_of_others_are_not_run():
    a = torch.empty(4, 4)
    assert call_of(torch.ops.aten.t.default, (a,), {}) is None
    with torch.library._scoped_library("timing_test", "FRAGMENT") as library:
        library.define("send(Tensor a) -> Tensor")
        assert call_of(torch.ops.timing_test.send.default, (a,), {}) is None


def test_random_numbers_stay_what_they_were(timed):
    before = torch.get_rng_state()
    assert timed.seconds(call_of(torch.ops.aten.bernoulli_.float, (torch.empty(64, 64), 0.5), {})) > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_tensors_that_are_made_up_are_in_the_domain_of_most_functions():
    """NaN takes 20 times as long in some: a root made plain AdamW slower than it is."""
    made = runnable.Like((64, 64), (64, 1), torch.float32, "cpu").tensor(CPU)
    for function in (torch.sqrt, torch.rsqrt, torch.log, torch.acos, torch.atanh, torch.bernoulli, torch.exp):
        assert function(made).isfinite().all(), function
    assert 0.25 <= made.min() < made.max() <= 0.75


def test_what_an_op_refuses_has_no_time(timed):
    wrong = call_of(MM, (torch.empty(3, 3), torch.empty(4, 4)), {})
    assert timed.seconds(wrong) is None


def test_of_long_lists_a_part_is_run(timed, monkeypatch):
    tensors = [torch.empty(1 << 16) for _ in range(32)]
    call = call_of(torch.ops.aten._foreach_add_.List, (tensors, tensors), {"alpha": 1})
    whole = timed.seconds(call)
    monkeypatch.setattr(timing, "MOST", call.bytes // 8)
    part, share = runnable.within(call, timing.MOST)
    assert part.bytes * share == call.bytes and part.bytes <= timing.MOST and share == 8
    assert 0.2 < Timings(CPU, timed.path).seconds(call) / whole < 5
    monkeypatch.setattr(timing, "MOST", 1)
    assert Timings(CPU, timed.path).seconds(product(64)) is None


def test_what_makes_more_than_fits_is_not_run(timed, monkeypatch):
    column, row = torch.empty(1 << 20, 1, device="meta"), torch.empty(1, 1 << 20, device="meta")
    monkeypatch.setattr(timing, "prepared", lambda *_: pytest.fail("run"))
    assert timed.seconds(call_of(MM, (column, row), {}, column @ row)) is None


def test_numbers_beside_a_list_of_tensors_are_cut_with_it(timed, monkeypatch):
    tensors = [torch.empty(1 << 12) for _ in range(16)]
    op = torch.ops.aten._foreach_addcdiv_.ScalarList
    call = call_of(op, (tensors, tensors, tensors, [0.5] * 16), {})
    monkeypatch.setattr(timing, "MOST", call.bytes // 4)
    part, share = runnable.within(call, timing.MOST)
    assert share == 4 and part.leaves.count(0.5) == 4 and timed.seconds(call) > 0


def test_other_settings_have_other_timings(monkeypatch):
    before = timing.timings(CPU)
    assert timing.timings(CPU) is before
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    assert timing.timings(CPU).path != before.path
    monkeypatch.undo()
    monkeypatch.setenv("LOWBIT_ISA", "scalar")
    assert timing.timings(CPU).path != before.path


def test_the_time_of_a_step_is_that_of_its_ops():
    layer = nn.Linear(256, 256)
    found = estimate(nn.Sequential(layer, nn.Linear(256, 256)), torch.empty(64, 256))
    assert found.seconds == sum(found.op_seconds) == pytest.approx(sum(found.seconds_by_phase.values()))
    assert len(found.op_seconds) == len(found.ops)
    products = {s for op, s in zip(found.ops, found.op_seconds, strict=True) if op.name == "aten.addmm.default"}
    assert len(products) == 1 and products.pop() > 0  # one shape, one time


META = {"device": "meta"}
#: Calls that take long, with the sizes that may be cut.
LONG = {
    "mm": (MM, (torch.empty(2048, 512, **META), torch.empty(512, 8192, **META))),
    "softmax": (torch.ops.aten._softmax.default, (torch.empty(2048, 8192, **META), 1, False)),
    "sum of sizes": (torch.ops.aten.sum.dim_IntList, (torch.empty(2, 2048, 4096, **META), [1], True)),
    "transposed": (torch.ops.aten.mul.Tensor, (torch.empty(4096, 2048, **META).t(),) * 2),
    "attention": (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        (torch.empty(4, 2, 1024, 64, **META),) * 3,
    ),
}


@pytest.mark.parametrize("name", LONG)
def test_a_shorter_call_has_its_share_of_the_work_and_runs(name):
    op, given = LONG[name]
    call = call_of(op, given, {}, op(*given))
    full = runnable._work_of(call)

    def cost(work):
        return 20 * max(work.flops / max(full.flops, 1), work.bytes / full.bytes)

    part, ratio, sizes = runnable.shorter(call, cost, least=32)
    assert sizes and 8 <= ratio <= 80
    assert ratio == pytest.approx(20 / cost(runnable._work_of(part)))
    runnable.prepared(part._replace(leaves=tuple(map(on_cpu, part.leaves))), CPU)()
    for small, large in zip(part.leaves, call.leaves, strict=True):
        if isinstance(small, runnable.Like):
            assert small.numbers() == torch.Size(small.shape).numel() and small.bytes() <= large.bytes()
        else:
            assert small == large


def on_cpu(leaf):
    return leaf if not isinstance(leaf, runnable.Like) else runnable.replace(leaf, kind="cpu")


def test_a_short_call_stays():
    call = product(64)
    assert runnable.shorter(call, lambda work: 0.5, least=32) == (call, 1.0, ())
