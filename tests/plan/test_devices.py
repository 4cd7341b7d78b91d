"""Estimates and plans for GPUs that this machine lacks: sizes by CUDA's rules, times by rooflines of data sheets."""

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.memory.cost import Work
from lowbit.memory.devices import UNIT, device_in
from lowbit.plan import DEVICES, Device

TOKENS = torch.zeros(4, 64, dtype=torch.long)


def gpt():
    with torch.device("meta"):
        return GPT(GPTConfig(layers=2, dim=64))


#: One technique in most dimensions, so that a plan takes few estimates.
FEW = ("fp32", "adamw", "adamw8bit", "block", "own attention", "own loss", "activations in memory", "whole batch")


def plan(budget="60%", require=(), **options):
    options["require"] = (*FEW, *(require or ("memory", "weights in memory")))
    return lb.fit(gpt(), TOKENS, budget, progress=False, **options)


@pytest.mark.parametrize("name", ["rtx-4090", "RTX 4090", "NVIDIA GeForce RTX 4090", "4090", "rtx_4090"])
def test_a_device_has_the_names_that_people_write(name):
    assert device_in(name, "fit") is DEVICES["rtx-4090"]


def test_an_unknown_device_is_an_error_with_the_nearest_names():
    for run in (lambda: plan(device="h1000"), lambda: lb.estimate(gpt(), TOKENS, device="h1000")):
        with pytest.raises(ValueError, match=r"no device is called 'h1000'; there are h100 \(79.65 GiB\)"):
            run()


def test_every_row_has_the_fields_of_its_data_sheet():
    for name, row in DEVICES.items():
        assert row.name == name and row.memory > 10 << 30 and row.host <= row.bandwidth
        assert row.rate("fp4") >= row.rate("fp8") >= row.rate("bf16") >= row.rate("fp32") > 0


def test_a_missing_arithmetic_is_computed_in_the_next_wider_one():
    row = Device("old", 1 << 30, 1e12, {"fp32": 1e12, "fp16": 4e12})
    assert row.rate("fp8") == row.rate("bf16") == 1e12 and row.rate("fp16") == 4e12


def test_times_are_rooflines():
    row = DEVICES["h100"]
    assert row.seconds(Work(0, 0)) == 0
    assert row.seconds(Work(989 * 10**9, 8, "bf16")) == pytest.approx(1e-3)
    assert row.seconds(Work(1979 * 10**9, 8, "fp8")) == pytest.approx(1e-3)
    assert row.seconds(Work(1, 3350 * 10**6)) == pytest.approx(1e-3)


@pytest.mark.parametrize(("recipe", "rate"), [(None, 67e12), ("fp8", 1979e12), ("int8", 1979e12), ("nvfp4", 1979e12)])
def test_matmuls_take_the_arithmetic_of_their_codes(recipe, rate):
    """The gradient of the weight is a matmul in fp32 in some recipes."""
    n = 4096
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(n, n, bias=False))
    estimate = lb.estimate(
        model, torch.zeros(n, n, requires_grad=True), lambda y, batch: y.sum(), recipe, None, device="h100"
    )
    products = [
        seconds for op, seconds in zip(estimate.ops, estimate.op_seconds, strict=True) if "mm" in op.name
    ]  # fmt: skip
    assert products and min(products) == pytest.approx(2 * n**3 / rate, rel=1e-3)


def test_sizes_are_multiples_of_the_unit_of_the_allocator():
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    estimate = lb.estimate(model, torch.zeros(2, 3), lambda y, batch: y.sum(), device="a100-80gb")
    assert estimate.by_kind["parameters"] == 8 * UNIT and estimate.device.type == "cuda"
    assert all(holding.bytes % UNIT == 0 for holding in estimate.holdings if holding.kind != "temporaries")


class Normed(nn.Module):
    def __init__(self, layers, norm):
        super().__init__()
        self.norms = nn.ModuleList(norm() for _ in range(layers))

    def forward(self, x):
        for norm in self.norms:
            x = norm(x)
        return x


def kept(model, x, device):
    """Bytes of activations at the peak of forward and backward."""
    return lb.estimate(model, x, lambda y, batch: y.sum(), None, None, device=device).peak_bytes


def test_dropout_keeps_a_mask_of_bytes():
    x = torch.zeros(64, 1024)

    def peak(device, layers):
        return kept(nn.Sequential(nn.RMSNorm(1024), *(nn.Dropout(0.1) for _ in range(layers))), x, device)

    assert (peak("h100", 8) - peak("h100", 4)) / x.numel() == pytest.approx(4, abs=0.1)
    assert (peak(None, 8) - peak(None, 4)) / x.numel() > 12


def test_rms_norm_keeps_its_input_and_a_number_per_row():
    x = torch.zeros(64, 1024)
    fewer, more = (kept(Normed(n, lambda: nn.RMSNorm(1024)), x, "h100") for n in (2, 4))
    here = [kept(Normed(n, lambda: nn.RMSNorm(1024)), x, None) for n in (2, 4)]
    assert (more - fewer) / x.numel() == pytest.approx(2 * 4, abs=0.2) and here[1] - here[0] > 1.5 * (more - fewer)


def test_attention_with_dropout_keeps_no_scores():
    heads = [torch.zeros(2, 4, 512, 16, requires_grad=True) for _ in range(3)]

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, q, k, v):
            return nn.functional.scaled_dot_product_attention(q * self.scale, k, v, dropout_p=0.1)

    scores = 2 * 4 * 512 * 512 * 4
    assert kept(Attention(), tuple(heads), "l4") < scores < kept(Attention(), tuple(heads), None)


def test_a_plan_names_its_device_and_is_kept_in_its_file(tmp_path):
    found = plan(device="RTX 4090", adapters=4)
    assert found.device == "rtx-4090" and found.peak_bytes <= found.budget
    assert "for rtx-4090: times are rooflines of its data sheet" in str(found)
    assert lb.plan.TrainingPlan.load(found.save(tmp_path / "plan.json")) == found
    assert plan().device is None


def test_a_plan_for_a_device_takes_no_measurement_and_is_the_same_again(monkeypatch):
    def measured(*args):
        raise AssertionError("a plan for another device measures nothing")

    for name in ("timing.Timings.seconds", "footprint.Footprints.of"):
        monkeypatch.setattr(f"lowbit.memory.{name}", measured)
    assert plan(device="h100") == plan(device="h100")


def test_offload_and_other_processes_take_the_links_of_the_device():
    slow, fast = (Device(name, 80 << 30, 2e12, {"fp32": 5e13}, host=host, link=host)
                  for name, host in (("slow", 1e9), ("fast", 1e11)))  # fmt: skip
    for options in ({"require": ("disk",)}, {"gpus": 2, "require": ("ddp",)}):
        assert plan(device=slow, **options).seconds > 1.05 * plan(device=fast, **options).seconds


def test_a_budget_above_the_memory_of_the_device_is_an_error():
    with pytest.raises(ValueError, match=r"the device has 23.99 GiB, which is less than the budget of 40.00 GiB"):
        plan("40GiB", device="rtx-4090")


def test_rows_may_be_added(monkeypatch):
    monkeypatch.setitem(DEVICES, "mine", Device("mine", 8 << 30, 1e12, {"fp32": 1e13}))
    assert plan(device="mine").device == "mine"
