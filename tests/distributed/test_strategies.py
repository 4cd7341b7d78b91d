"""Every way to shard has the bits of one process, sends what its row says, and loads what the others have saved."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.bits import same_bits
from support.processes import run_processes
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import lowbit as lb
from lowbit.distributed import STRATEGIES
from lowbit.distributed.zero import SHARES

SHARDING = ("ddp", "zero1", "zero2-replicated", "zero2", "zero3", "hsdp")
OPTIMIZERS: dict[str, Any] = {
    "torch": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "8 bits": lambda params: lb.optim.AdamW(params, lr=1e-2),
    "4 bits": lambda params: lb.optim.AdamW(params, lr=1e-2, bits=4),
    "muon": lambda params: lb.optim.Muon(params, lr=1e-2, bits=8),
    "galore": lambda params: lb.optim.GaLore(params, lr=1e-2, rank=48, refresh=3),
    "apollo": lambda params: lb.optim.Apollo(params, lr=1e-2, rank=1, refresh=3),
}


def network() -> nn.Module:
    """Blocks, rows that no number of processes divides, fewer rows than processes, a number, and one that is frozen."""
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(96, 96), nn.Tanh())
    model = nn.Sequential(nn.Linear(24, 96), nn.Sequential(block(), block(), block()), nn.Linear(96, 3), nn.PReLU())
    model[1][1][0].bias.requires_grad_(False)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """The same batch on every process: the mean of a power of two of gradients is what one process has."""
    for step in steps:
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(100 + step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module) -> list[Tensor]:
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]


def expected(name: str, steps: int) -> list[Tensor]:
    model = network()
    train(model, OPTIMIZERS[name](p for p in model.parameters() if p.requires_grad), range(steps))
    return whole(model)


def sharded(strategy: str, name: str, steps: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """After so many steps in one process."""
    model = network()
    optimizer = OPTIMIZERS[name](p for p in model.parameters() if p.requires_grad)
    train(model, optimizer, range(steps))
    size = {"group_size": max(dist.get_world_size() // 2, 1)} if strategy == "hsdp" else {}
    return lb.distributed.shard_(model, optimizer, strategy, **size)


def meet(rank: int, world: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/meet{world}", rank=rank, world_size=world)


# -- bits, bytes, files -----------------------------------------------------------------------------------------------
def _steps(rank: int, world: int, path: str) -> None:
    meet(rank, world, path)
    for name, strategy in itertools.product(OPTIMIZERS, SHARDING):
        if name in ("muon", "galore", "apollo") and strategy not in ("zero1", "zero3"):
            continue
        for before in (0, 2):
            model, optimizer = sharded(strategy, name, before)
            train(model, optimizer, range(before, 4))
            for mine, whole_one in zip(whole(model), expected(name, 4), strict=True):
                assert same_bits(mine, whole_one), f"{strategy}, {name}, after {before} steps"
        lb.distributed.save(f"{path}/{strategy} {name}", model, optimizer, steps=4)
    dist.destroy_process_group()


def _resume(rank: int, world: int, path: str) -> None:
    if world > 1:
        meet(rank, world, path)
    strategies = SHARDING if world > 1 else (None,)
    pairs = [(name, pair) for name in ("torch", "8 bits") for pair in itertools.product(SHARDING, strategies)]
    pairs += [("galore", (saved, strategy)) for saved in ("zero1", "zero3") for strategy in (*strategies[-2:],)]
    for name, (saved, strategy) in pairs:
        if strategy is None:
            model = network()
            optimizer = OPTIMIZERS[name](p for p in model.parameters() if p.requires_grad)
        else:
            model, optimizer = sharded(strategy, name)
        assert lb.distributed.load(f"{path}/{saved} {name}", model, optimizer) == {"steps": 4}
        train(model, optimizer, range(4, 6))
        for mine, whole_one in zip(whole(model), expected(name, 6), strict=True):
            assert same_bits(mine, whole_one), f"{saved} to {strategy} on {world}, {name}"
    if world > 1:
        dist.destroy_process_group()


@pytest.mark.slow
def test_bits_are_those_of_one_process_and_checkpoints_fit_every_way_and_number(tmp_path: Path):
    run_processes(_steps, (4, str(tmp_path)), 4)
    run_processes(_resume, (2, str(tmp_path)), 2)
    _resume(0, 1, str(tmp_path))


def _bytes(rank: int, path: str) -> None:
    meet(rank, 2, path)
    torch.manual_seed(0)
    for strategy in SHARDING:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        optimizer = torch.optim.AdamW(model.parameters())
        size = sum(p.nbytes for p in model.parameters())
        options = {"group_size": 2} if strategy == "hsdp" else {}
        model, optimizer = lb.distributed.shard_(model, optimizer, strategy, **options)
        for _ in range(3):  # the first makes buckets, and the second makes them anew
            with lb.distributed.traffic() as traffic:
                model(torch.randn(4, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert traffic.total == STRATEGIES[strategy].sent * size / 2, f"{strategy}: {traffic}"
        held = {s.data_ptr(): s.nbytes() for s in _storages(model, optimizer)}
        assert sum(held.values()) == STRATEGIES[strategy].bytes(size, 0, 2 * size, 2), strategy
        frozen, optimizer = _with_frozen()
        trained = sum(p.nbytes for p in frozen.parameters() if p.requires_grad)
        frozen, optimizer = lb.distributed.shard_(frozen, optimizer, strategy, **options)
        for _ in range(3):
            with lb.distributed.traffic() as traffic:
                frozen(torch.randn(4, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert traffic.total == sum(STRATEGIES[strategy].sends(size, trained)) / 2, f"frozen, {strategy}: {traffic}"
    dist.destroy_process_group()


def _with_frozen() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    for layer in (model[1], model[2]):
        layer.requires_grad_(False)
    return model, torch.optim.AdamW(model.parameters())


def _masters(rank: int, path: str) -> None:
    meet(rank, 2, path)
    for strategy in (None, "ddp", "zero1", "zero2-replicated"):
        model = network()
        lb.train.mixed_(model, "bf16", working_copies=True)
        optimizer: torch.optim.Optimizer = lb.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        wrapped = model
        if strategy is not None:
            wrapped, optimizer = lb.distributed.shard_(model, optimizer, strategy)
        train(wrapped, optimizer, range(2))
        if strategy is None:
            alone = whole(model)
        assert all(map(same_bits, whole(model), alone)), strategy
    dist.destroy_process_group()


def test_working_copies_begin_with_all_bits_of_their_weights(tmp_path: Path):
    """DistributedDataParallel writes to the parameters before the first step."""
    run_processes(_masters, (str(tmp_path),))


def _storages(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Of parameters and states of this process, between steps."""
    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor) and v.dim()]
    tensors = [t.to_local() if isinstance(t, DTensor) else t for t in (*model.parameters(), *states)]
    return [t.untyped_storage() for t in tensors]


def test_a_process_sends_and_holds_what_the_table_says(tmp_path: Path):
    run_processes(_bytes, (str(tmp_path),))


# -- what an optimizer is used with -----------------------------------------------------------------------------------
def _with_others(rank: int, path: str) -> None:
    meet(rank, 2, path)
    found = []
    for strategy in (None, "zero1", "zero2-replicated", "zero3"):
        model = network()
        optimizer = lb.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        before = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        if strategy is not None:
            model, optimizer = lb.distributed.shard_(model, optimizer, strategy)
        for step in range(3):
            for micro_batch in range(2):
                x = torch.randn(8, 24, generator=torch.Generator().manual_seed(10 * step + micro_batch))
                model(x).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
            before.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 8)
        found.append(whole(model))
    for alone, zero1, *others in zip(*found, strict=True):
        assert same_bits(alone, zero1)
        for other in others:
            torch.testing.assert_close(alone, other, rtol=1e-5, atol=1e-7)  # the norm is a sum in another order
    losses = []
    for strategy in ("ddp", "zero2-replicated", "zero1"):
        model, optimizer = sharded(strategy, "torch")

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(8, 24)).square().mean()
            loss.backward()
            return loss

        losses.append([optimizer.step(closure).item() for _ in range(3)])
    assert losses[0] == losses[1] == losses[2] and len(set(losses[0])) == 3
    optimizer.zero_grad(set_to_none=False)
    assert all(float(p.grad.abs().sum()) == 0 for p in model.parameters() if p.grad is not None)
    names = {name for name, _ in getattr(optimizer, SHARES).model.named_parameters()}
    assert names == {name for name, p in model.module.named_parameters() if p.requires_grad}
    with pytest.raises(ValueError, match="2 parameters that the model does not have"):
        lb.distributed.shard_(network(), torch.optim.SGD(nn.Linear(3, 3).parameters()), "zero3")
    other = network()
    with pytest.raises(ValueError, match="give a divisor of 2"):
        lb.distributed.shard_(other, torch.optim.SGD(other.parameters()), "hsdp", group_size=3)
    with pytest.raises(ValueError, match="holds no checkpoint"):
        lb.distributed.load(f"{path}/nothing", model, optimizer)
    dist.destroy_process_group()


def _scaled(rank: int, path: str) -> None:
    """What looks at the optimizer between steps finds whole parameters and gradients."""
    meet(rank, 2, path)
    found = []
    for strategy in (None, "zero1", "zero2-replicated"):
        model = network()
        optimizer = lb.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        if strategy is not None:
            model, optimizer = lb.distributed.shard_(model, optimizer, strategy)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step in range(4):
            x = torch.randn(8, 24, generator=torch.Generator().manual_seed(step)) * (float("inf") if step == 1 else 1)
            scaler.scale(model(x).square().mean()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e3)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append((whole(model), scaler.get_scale()))
    for weights, scale in found:
        assert scale == 2.0**10, "halved once, doubled once"
        assert all(map(same_bits, found[0][0], weights))
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    lb.train.prepare_(model, "int8-stochastic", skip=())
    state = lb.train.state(model)
    model, optimizer = lb.distributed.shard_(model, lb.optim.AdamW(model.parameters()), "zero1")
    for _ in range(3):
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert int(state.step) == 3, "random bits go on from step to step"
    dist.destroy_process_group()


def test_scalers_and_the_state_of_recipes_with_shared_states(tmp_path: Path):
    run_processes(_scaled, (str(tmp_path),))


def test_schedulers_clipping_accumulation_and_what_is_refused(tmp_path: Path):
    run_processes(_with_others, (str(tmp_path),))


def _working_copies(rank: int, path: str) -> None:
    meet(rank, 2, path)
    found = {}
    for strategy in ("zero1", "zero2-replicated", "zero2", "zero3"):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(64, 64, bias=False), nn.LayerNorm(64)) for _ in range(2)]
        model = nn.Sequential(*blocks, nn.Linear(64, 8, bias=False))
        lb.train.mixed_(model, "bf16", working_copies=True)
        optimizer = lb.optim.AdamW(model.parameters(), lr=1e-2, master="residual")
        model, optimizer = lb.distributed.shard_(model, optimizer, strategy)
        lb.distributed.order_gradients_(model)
        for step in range(3):
            generator = torch.Generator().manual_seed(2 * step + rank)
            model(torch.randn(4, 64, generator=generator)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found[strategy] = whole(model)
    assert {t.dtype for t in found["zero3"]} == {torch.bfloat16, torch.float32}
    for strategy in ("zero2-replicated", "zero2", "zero3"):
        assert all(map(same_bits, found[strategy], found["zero1"])), strategy
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    lb.train.mixed_(model, "bf16", working_copies=True)
    with pytest.raises(ValueError, match=r"0 \(Linear\) has torch.bfloat16, torch.float32; keep parameters in fp32"):
        lb.distributed.shard_(model, torch.optim.SGD(model.parameters()), "zero3")
    dist.destroy_process_group()


def test_working_copies_are_sharded_beside_what_stays_in_fp32(tmp_path: Path):
    run_processes(_working_copies, (str(tmp_path),), 2)


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        ("zero4", {}, "did you mean zero3"),
        ("zero3", {}, "start the script with torchrun"),
        ("ddp", {"offload": True}, "offload are for zero2, zero3, hsdp"),
        ("zero3", {"group_size": 2}, "group_size is for hsdp"),
        ("zero1", {"prefetch": 2}, "prefetch are for zero2, zero3, hsdp"),
        ("zero3", {"prefetch": 0}, "blocks that are gathered ahead, from 1, got 0"),
        ("zero3", {"bucket": "25MB"}, "bucket is for ddp, zero1, zero2-replicated, got strategy='zero3'"),
        ("ddp", {"bucket": 25}, "a size such as '25MB', got 25"),
        ("ddp", {"bucket": "25"}, "no size, since it has no unit"),
        ("dp", {"buckets": 3}, "DataParallel has no option 'buckets'; its options are device_ids"),
    ],
)
def test_arguments_that_do_not_go_together(strategy, options, message):
    model = network()
    with pytest.raises(ValueError, match=message):
        lb.distributed.shard_(model, torch.optim.SGD(model.parameters()), strategy, **options)
