"""What ops allocate is measured: estimates against torch's own profiler, and what becomes of ops that are not run."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.bench.estimate_cases import Case, cases, random_network
from lowbit.memory import allocated_peak, footprint, runnable
from lowbit.memory.footprint import Footprints
from lowbit.memory.runnable import call_of, sources_of
from lowbit.models.batches import call

CPU = torch.device("cpu")
CASES = list(cases())


@pytest.fixture
def measured(tmp_path):
    return Footprints(CPU, tmp_path / "footprints.json")


def held(case: Case) -> tuple[nn.Module, object, int]:
    """The model, the batch, and the most that a step holds by torch's profiler, weights and batch included."""
    torch.manual_seed(0)
    model, batch = case.make(), case.batch()

    def step() -> None:
        case.loss(call(model, batch), batch).backward()
        model.zero_grad()

    step()
    gc.collect()
    storages = [t.untyped_storage() for t in (*model.parameters(), *model.buffers(), batch)]
    return model, batch, allocated_peak(step) + sum({s._cdata: s.nbytes() for s in storages}.values())


def test_the_list_covers_what_it_should():
    assert len(CASES) >= 150 and len({case.name for case in CASES}) == len(CASES)


@pytest.mark.slow
def test_every_op_has_an_estimate():
    """In one layout each, and on meta, where no op is run."""
    for case in {case.name.partition(",")[0]: case for case in CASES}.values():
        model = case.make().to("meta")
        assert lb.estimate(model, case.batch(), case.loss, optimizer=None, device="cpu").peak_bytes > 0, case.name


@pytest.mark.thinned(8)
@pytest.mark.parametrize("case", CASES[::11], ids=lambda case: case.name)
def test_ops_hold_what_is_estimated(case):
    model, batch, peak = held(case)
    told = lb.estimate(model, batch, case.loss, optimizer=None)
    assert 0.99 <= told.peak_bytes / peak <= 1.04
    assert not told.unmeasured


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_networks_of_random_parts_hold_what_is_estimated(seed):
    case = random_network(seed)
    model, batch, peak = held(case)
    assert 0.99 <= lb.estimate(model, batch, case.loss, optimizer=None).peak_bytes / peak <= 1.04


def test_a_copy_inside_a_kernel_is_scratch_memory(measured):
    whole = torch.empty(8, 128, 1000)
    op = torch.ops.aten._log_softmax.default
    inside = [call_of(op, (x, -1, False), {}, x) for x in (whole, whole[:, :-1], whole.transpose(1, 2))]
    found = measured.of(inside)
    assert [found[one].scratch for one in inside] == [0, 8 * 127 * 1000 * 4, whole.nbytes]
    assert found[inside[0]].results == (whole.nbytes,)


def test_a_workspace_is_that_of_the_forward():
    """A made-up one crashes oneDNN."""
    op, back = torch.ops.aten.mkldnn_rnn_layer.default, torch.ops.aten.mkldnn_rnn_layer_backward.default
    seen: list[tuple] = []

    class See(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func in (op, back):
                seen.append((func, args, kwargs or {}, out))
            return out

    with See():
        nn.LSTM(8, 16)(torch.randn(5, 4, 8))[0].sum().backward()
    (forward, *given), (backward, *taken) = seen
    made = call_of(forward, *given)
    assert made is not None and call_of(backward, *taken) is None, "without the forward it is not run"
    known = call_of(backward, *taken, sources_of(made, given[-1]))
    assert known is not None and known in Footprints(CPU, runnable.directory() / "none").of([known])


def test_footprints_are_kept_in_a_file(measured, monkeypatch):
    x = torch.empty(64, 64)
    product = call_of(torch.ops.aten.mm.default, (x, x), {}, x)
    first = measured.of([product])
    monkeypatch.setattr(footprint, "_run", lambda *_: pytest.fail("measured again"))
    assert measured.of([product]) == Footprints(CPU, measured._cache.path).of([product]) == first


def test_measuring_draws_nothing(measured):
    before = torch.get_rng_state()
    x = torch.empty(64, 64)
    assert measured.of([call_of(torch.ops.aten.bernoulli_.float, (x, 0.5), {}, x)])
    assert torch.equal(torch.get_rng_state(), before)


def test_what_an_op_refuses_and_what_is_too_large_is_left_out(measured, monkeypatch):
    x = torch.empty(3, 3)
    wrong = call_of(torch.ops.aten.mm.default, (x, torch.empty(4, 4)), {}, x)
    assert measured.of([wrong]) == {}
    monkeypatch.setattr(footprint, "MOST", 8)
    assert measured.of([call_of(torch.ops.aten.mm.default, (x, x), {}, x)]) == {}


@pytest.mark.parametrize(
    ("op", "given"),
    [
        (torch.ops.aten._log_softmax.default, lambda x: (x[:, :-1], -1, False)),
        (torch.ops.aten.native_layer_norm.default, lambda x: (x[:, :-1], [x.shape[-1]], None, None, 1e-5)),
        (torch.ops.aten.slice_backward.default, lambda x: (x[:, :-1], list(x.shape), 1, 0, -1, 1)),
        (torch.ops.aten.convolution.default, lambda x: (x.reshape(len(x), 16, 16, -1), torch.ones(8, 16, 3, 3), None,
                                                        [1, 1], [1, 1], [1, 1], False, [0, 0], 1)),
    ],
)  # fmt: skip
def test_of_an_op_that_is_too_large_some_rows_are_run(op, given, measured, tmp_path, monkeypatch):
    args = given(torch.rand(16, 64, 512))
    large = call_of(op, args, {}, op(*args))
    whole = measured.of([large])[large]
    monkeypatch.setattr(footprint, "MOST", large.bytes // 3)
    part = Footprints(CPU, tmp_path / "other.json").of([large])[large]
    assert part.scratch == pytest.approx(whole.scratch, rel=0.05)


def test_of_a_model_on_meta_nothing_is_run_and_the_estimate_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("LOWBIT_CACHE", str(tmp_path))
    footprint._footprints.cache_clear()
    monkeypatch.setattr(footprint, "_run", lambda *_: pytest.fail("run"))
    with torch.device("meta"):
        model, batch = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)), torch.empty(4, 8)
    told = lb.estimate(model, batch, lambda o, b: o.sum(), optimizer=None)
    assert "aten._softmax.default" in told.unmeasured and "not measured" in str(told)
    footprint._footprints.cache_clear()


def test_losses_that_check_their_targets_are_estimated():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(100, 16), nn.Linear(16, 100)

        def forward(self, ids: Tensor) -> Tensor:
            return lb.memory.linear_cross_entropy(self.embed(ids), self.head.weight, ids)

    sizes = set()
    for device in ("cpu", "meta"):
        ids = torch.zeros(4, 8, dtype=torch.long, device=device)
        sizes.add(lb.estimate(Model(), ids, lambda o, b: o).peak_bytes)
    assert len(sizes) == 1


def empty(*shape):
    return torch.empty(*shape, device="meta")


_ATEN = torch.ops.aten
LONG = {
    "mm": (_ATEN.mm.default, (empty(2048, 64), empty(64, 640))),
    "layer norm": (
        _ATEN.native_layer_norm_backward.default,
        (
            empty(4096, 256), empty(4096, 256), [256], empty(4096, 1), empty(4096, 1), empty(256), empty(256),
            [True] * 3,
        ),
    ),
    "softmax": (_ATEN._softmax.default, (empty(2048, 320), 1, False)),
    "convolution": (
        _ATEN.convolution.default,
        (empty(16, 8, 20, 20), empty(8, 8, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LONG)
def test_two_shorter_calls_stand_for_a_long_one(name, tmp_path, monkeypatch):
    op, args = LONG[name]
    long = call_of(op, args, {}, op(*args))
    full = Footprints(CPU, tmp_path / "full.json").of([long])[long]
    monkeypatch.setattr(footprint, "_LONG", runnable._work_of(long).seconds(footprint.rates(CPU)) / 4)
    shorter = Footprints(CPU, tmp_path / "shorter.json")
    assert len(shorter._samples(long)) == 2
    assert shorter.of([long])[long] == full
