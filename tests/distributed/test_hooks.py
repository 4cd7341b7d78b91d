"""Gradients in few bits: what is sent, what is summed, and that every process and every number of them has the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.bits import same_bits
from support.processes import run_processes
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import lowbit as lb
from lowbit.distributed import compress_gradients_, order_gradients_

STRATEGIES = ("ddp", "zero1", "zero2-replicated", "zero2", "zero3")
PARTS = 4


def network(dim: int = 96) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(dim, dim), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(dim, 5, bias=False))


def inputs(step: int, part: int, dim: int = 96) -> Tensor:
    return torch.randn(8, dim, generator=torch.Generator().manual_seed(10 * step + part)) * 2**part


def whole(model: nn.Module, gradients: bool = False) -> list[Tensor]:
    tensors = [p.grad if gradients else p for p in model.parameters()]
    return [(t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for t in tensors]


def meet(rank: int, world: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/meet{world}", rank=rank, world_size=world)


def of_parts(model: nn.Module, step: int) -> None:
    """One process that takes the parts in turn."""
    for part in range(PARTS):
        (model(inputs(step, part)).square().mean() / PARTS).backward()


# -- sums in order ----------------------------------------------------------------------------------------------------
def _ordered(rank: int, path: str) -> None:
    meet(rank, PARTS, path)
    alone = network()
    optimizer = lb.optim.AdamW(alone.parameters(), lr=1e-2)
    for step in range(3):
        of_parts(alone, step)
        optimizer.step()
        optimizer.zero_grad()
    for strategy in STRATEGIES:
        model = network()
        model, optimizer = lb.distributed.shard_(model, lb.optim.AdamW(model.parameters(), lr=1e-2), strategy)
        order_gradients_(model)
        for step in range(3):
            model(inputs(step, rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(map(same_bits, whole(model), whole(alone))), strategy
    dist.destroy_process_group()


def test_sums_in_order_are_those_of_micro_batches(tmp_path: Path):
    run_processes(_ordered, (str(tmp_path),), PARTS)


# -- few bits ---------------------------------------------------------------------------------------------------------
def by_hand(of_each: list[Tensor], scheme: str, twice: bool) -> Tensor:
    """The mean of flat gradients, quantized before it and after it; of process r's part, as every part is alike."""

    def sent(x: Tensor) -> Tensor:
        rows = nn.functional.pad(x, (0, -len(x) % 256)).view(-1, 256)
        return lb.quantize(rows, scheme).dequantize().view(-1)[: len(x)]

    chunks = zip(*(nn.functional.pad(g, (0, -len(g) % 2)).view(2, -1) for g in of_each), strict=True)
    means = [(sent(a) + sent(b)) / 2 for a, b in chunks]
    return torch.cat([sent(m) if twice else m for m in means])[: len(of_each[0])]


def _few_bits(rank: int, path: str) -> None:
    meet(rank, 2, path)
    gradients = []
    for part in range(2):
        alone = network()
        alone(inputs(0, part)).square().mean().backward()
        gradients.append([p.grad for p in alone.parameters()])
    for bits, scheme in (
        ("int8", "int8:row"),
        ("fp8", "fp8_e4m3:row"),
        ("mxfp8", "mxfp8"),
        ("int4:group64", "int4:group64"),
    ):
        model = nn.parallel.DistributedDataParallel(network(), gradient_as_bucket_view=True)
        compress_gradients_(model, bits)
        model(inputs(0, rank)).square().mean().backward()
        # one bucket, whose parameters come in the order in which gradients do
        order = [p for layer in reversed(model.module) for p in reversed(list(layer.parameters()))]
        names = [next(i for i, q in enumerate(model.module.parameters()) if q is p) for p in order]
        candidates = [names, sorted(names)]
        flat = [[torch.cat([g[i].flatten() for i in each]) for g in gradients] for each in candidates]
        found = [torch.cat([whole(model, True)[i].flatten() for i in each]) for each in candidates]
        expected = [by_hand(each, scheme, True) for each in flat]
        assert any(map(same_bits, found, expected)), bits
        everyone = [torch.empty_like(found[0]) for _ in range(2)]
        dist.all_gather(everyone, found[0])
        assert same_bits(*everyone)
    dist.destroy_process_group()


def test_the_mean_is_that_of_what_is_sent(tmp_path: Path):
    run_processes(_few_bits, (str(tmp_path),))


def _bytes(rank: int, path: str) -> None:
    meet(rank, 2, path)
    sent = {}
    for strategy in ("ddp", "zero3"):
        for bits in (None, "int8", "fp8"):
            model = network(256)
            model, _ = lb.distributed.shard_(model, torch.optim.SGD(model.parameters()), strategy)
            if bits is not None:
                compress_gradients_(model, bits)
            for _ in range(3):
                with lb.distributed.traffic() as traffic:
                    model(inputs(0, rank, 256)).sum().backward()
            sent[strategy, bits] = traffic.total - (traffic.bytes["all-gather"] if strategy == "zero3" else 0)
    for (strategy, bits), size in sent.items():
        if bits is not None:
            assert size == pytest.approx(sent[strategy, None] / 4 * (1 + 4 / 256), rel=0.01), (strategy, bits)
    dist.destroy_process_group()


def test_a_quarter_is_sent_and_scales(tmp_path: Path):
    run_processes(_bytes, (str(tmp_path),))


def _feedback(rank: int, path: str) -> None:
    meet(rank, 2, path)
    for strategy in ("ddp", "zero2-replicated", "zero2"):
        sums = {}
        for feeds_back in (None, False, True):
            model = network()
            model, _ = lb.distributed.shard_(model, torch.optim.SGD(model.parameters()), strategy)
            if feeds_back is not None:
                compress_gradients_(model, "int4:group64", error_feedback=feeds_back)
            total = torch.zeros(())
            for _ in range(32):
                model(inputs(0, rank)).square().mean().backward()
                total = total + torch.cat([g.flatten() for g in whole(model, True)])
                for p in model.parameters():
                    p.grad = None
            sums[feeds_back] = total
        errors = {key: float((sums[key] - sums[None]).norm() / sums[None].norm()) for key in (False, True)}
        assert errors[True] < 0.25 * errors[False], (strategy, errors)
    model = network()
    model, _ = lb.distributed.shard_(model, torch.optim.SGD(model.parameters()), "zero3")
    compress_gradients_(model, "int8", error_feedback=True)
    x = inputs(0, rank)
    x[0, 0] = float("inf") if rank == 0 else 1.0
    model(x).square().mean().backward()
    assert any(torch.isnan(g).any() for g in whole(model, True)), "every process sees what one has"
    for p in model.parameters():
        p.grad = None
    model(inputs(0, rank)).square().mean().backward()
    assert all(torch.isfinite(g).all() for g in whole(model, True)), "and goes on after it"
    dist.destroy_process_group()


class Unlike(nn.Module):
    """Gradients of very different sizes, in an order that DistributedDataParallel learns in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = (nn.Parameter(torch.zeros(64, 64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return 1e-4 * (self.small @ x).sum() + 1e4 * (self.large @ x).sum()


def _unlike(rank: int, path: str) -> None:
    meet(rank, 2, path)
    model = compress_gradients_(nn.parallel.DistributedDataParallel(Unlike()), "int8", error_feedback=True)
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    exact = x.sum(1).expand(64, 64)
    for step in range(4):
        model.zero_grad()
        model(x).backward()
        for parameter, factor in ((model.module.small, 1e-4), (model.module.large, 1e4)):
            error = (parameter.grad / factor - exact).norm() / exact.norm()
            assert error < 0.03, (step, factor, error)
    dist.destroy_process_group()


def test_what_is_lost_of_one_parameter_is_not_given_to_another(tmp_path: Path):
    run_processes(_unlike, (str(tmp_path),))


def test_error_feedback_and_numbers_that_are_none(tmp_path: Path):
    run_processes(_feedback, (str(tmp_path),))


def test_what_cannot_be_compressed():
    with pytest.raises(ValueError, match=r"call lowbit.distributed.shard_ first"):
        compress_gradients_(network(), "int8")
    with pytest.raises(ValueError, match="scales lie within a row"):
        compress_gradients_(network(), "fp8_e4m3:tensor")
    with pytest.raises(ValueError, match="scales lie within a row"):
        compress_gradients_(network(), "nvfp4")
