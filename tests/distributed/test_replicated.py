"""``zero2-replicated``: gradients are DDP's in every bit, and each process keeps its rows of them alone."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.bits import same_bits
from support.processes import run_processes
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import lowbit as lb
from lowbit.distributed.replicated import ShardedGradients


@dataclass
class Output:
    logits: Tensor


class Network(nn.Module):
    """A tied weight, a number, fewer rows than processes, rows that do not divide, a frozen part, two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(24, 13, bias=False)
        self.embed = nn.Embedding(13, 24)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(3))
        self.norm = nn.BatchNorm1d(24)
        self.act = nn.PReLU()
        self.narrow = nn.Linear(24, 24, bias=False, dtype=torch.bfloat16)
        self.blocks[1][0].bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Output:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        x = self.act(self.norm(x)) + self.narrow(x.bfloat16()).float()
        return Output(self.head(x) * self.scale)


def meet(rank: int, path: str, world: int = 2) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/meet", rank=rank, world_size=world)


def whole(model: nn.Module) -> list[Tensor | None]:
    grads = [p.grad for p in model.parameters()]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]


def alike(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return all(a is b if a is None else same_bits(a, b) for a, b in zip(one, other, strict=True))


def tokens(step: int, rank: int) -> Tensor:
    return torch.randint(13, (7,), generator=torch.Generator().manual_seed(10 * step + rank))


def sharded(strategy: str, model: nn.Module, **options: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return lb.distributed.shard_(model, optimizer, strategy, **options)


# -- bits -------------------------------------------------------------------------------------------------------------
def _same(rank: int, path: str) -> None:
    meet(rank, path)
    for bucket, local in ((None, 0), (1000, 0), ("1MB", 0), (None, 2)):
        ddp, of_ddp = sharded("ddp", Network())
        model, optimizer = sharded("zero2-replicated", Network(), bucket=bucket)
        for step in range(4):
            for one in (ddp, model):
                for part in range(local + 1):
                    with one.no_sync() if part < local else nullcontext():
                        one(tokens(10 * step + part, rank)).logits.square().mean().backward()
            assert alike(whole(model), whole(ddp)), (bucket, local, step)
            of_ddp.step()
            optimizer.step()
            of_ddp.zero_grad()
            optimizer.zero_grad()
            tensors = (m.state_dict() if not local else dict(m.named_parameters()) for m in (model, ddp))
            assert all(map(same_bits, *(state.values() for state in tensors))), (bucket, local, step)
    dist.destroy_process_group()


def test_gradients_and_steps_are_those_of_ddp(tmp_path: Path):
    run_processes(_same, (str(tmp_path),))


def _kept(rank: int, path: str) -> None:
    meet(rank, path)
    plain = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    model, optimizer = sharded("zero2-replicated", plain)
    x = torch.randn(4, 64)
    for _ in range(2):
        model(x).square().mean().backward()
    assert isinstance(model, ShardedGradients)
    kept = [p.grad.to_local() for p in model.parameters()]
    assert sum(g.untyped_storage().nbytes() for g in kept) == sum(p.nbytes for p in model.parameters()) / 2
    once = [g.clone() for g in whole(model)]
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in once]))
    found = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5 * float(norm))
    assert float(found.full_tensor()) == pytest.approx(float(norm), rel=1e-6)
    for clipped, before in zip(whole(model), once, strict=True):
        torch.testing.assert_close(clipped, 0.5 * before, rtol=1e-5, atol=0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert all(not g.any() for g in whole(model))
    torch.autograd.grad(model(x).sum(), list(plain.parameters()))
    assert all(not g.any() for g in whole(model)), "torch.autograd.grad leaves gradients as they are"
    with pytest.raises(
        RuntimeError, match=r"3.weight is sharded already.*use no_sync for all micro-batches but the last"
    ):
        plain(x).sum().backward()
    layer, _ = sharded("zero2-replicated", nn.Linear(64, 8))
    output = layer(torch.randn(2, 3, 64))
    output.mul_(0.5)
    output.sum().backward()
    assert all(isinstance(p.grad, DTensor) for p in layer.parameters()), "the output was a view that is written to"
    dist.destroy_process_group()


def test_a_process_keeps_its_rows_alone_and_clips_by_the_norm_of_all(tmp_path: Path):
    run_processes(_kept, (str(tmp_path),))


class Experts(nn.Module):
    """Each call uses one of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, number: int) -> Tensor:
        return self.experts[number](x)


def _unused(rank: int, path: str) -> None:
    meet(rank, path)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(rank))
    found = []
    for strategy in ("ddp", "zero2-replicated"):
        model, optimizer = sharded(strategy, Experts(), find_unused_parameters=True)
        for step in range(3):
            for part in range(2):
                model(x, (rank if part == 0 else 2 + step % 2)).square().mean().backward()
            found.append([None if g is None else g.clone() for g in whole(model)])
            optimizer.step()
            optimizer.zero_grad()
    for ddp, ours in zip(found[:3], found[3:], strict=True):
        assert alike(ddp, ours) and any(g is None for g in ours)
    model, _ = sharded("zero2-replicated", Experts())
    with pytest.raises(ValueError, match=r"6 parameters got no gradient .*experts.* pass find_unused_parameters=True"):
        model(x, rank).sum().backward()
    dist.destroy_process_group()


def test_unused_parameters(tmp_path: Path):
    run_processes(_unused, (str(tmp_path),))


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        raise RuntimeError("out of memory")


def _goes_on(rank: int, path: str) -> None:
    """After an error in backward, with reentrant checkpoints, and with a sparse gradient."""
    meet(rank, path)
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(3)]
    model, optimizer = sharded("zero2-replicated", nn.Sequential(*layers))
    x = torch.randn(4, 8)
    handle = layers[1].register_forward_hook(lambda module, args, output: Fails.apply(output))
    with pytest.raises(RuntimeError, match="out of memory"):
        model(x).square().mean().backward()
    handle.remove()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    expected = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    expected.load_state_dict(model.module.state_dict())
    expected(x).square().mean().backward()
    assert all(map(same_bits, whole(model), [p.grad for p in expected.parameters()]))
    optimizer.zero_grad()
    layers[1].forward = lambda x, forward=layers[1].forward: torch.utils.checkpoint.checkpoint(  # type: ignore[method-assign]
        forward, x, use_reentrant=True
    )
    model(x).square().mean().backward()
    assert all(map(same_bits, whole(model), [p.grad for p in expected.parameters()]))
    model, _ = sharded("zero2-replicated", nn.Embedding(8, 8, sparse=True))
    with pytest.raises(ValueError, match="got a sparse one"):
        model(torch.tensor([1])).sum().backward()
    dist.destroy_process_group()


def test_errors_in_backward_and_reentrant_checkpoints(tmp_path: Path):
    run_processes(_goes_on, (str(tmp_path),))


# -- arguments --------------------------------------------------------------------------------------------------------
def _arguments(rank: int, path: str) -> None:
    meet(rank, path)
    for strategy, size in (("ddp", 1), ("zero1", 1), ("zero2-replicated", 1)):
        counts = []
        for bucket in ("64KB", "1GB"):
            model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(4)))
            model, optimizer = sharded(strategy, model, bucket=bucket)
            for _ in range(3):
                with lb.distributed.traffic() as traffic:
                    model(torch.randn(2, 128)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            counts.append(sum(traffic.calls.values()))
        assert counts[0] > counts[1] >= size, (strategy, counts)
    for depth in (1, 2):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
        expected = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
        expected.load_state_dict(model.state_dict())
        x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
        model, _ = sharded("zero3", model, prefetch=depth)
        ahead = [len(block._get_fsdp_state()._states_to_forward_prefetch) for block in model]
        assert ahead == [min(depth, 3 - index) for index in range(4)]
        behind = [len(block._get_fsdp_state()._states_to_backward_prefetch) for block in model]
        assert behind == [min(depth, index) for index in range(4)]
        model(x).square().mean().backward()
        expected(x).square().mean().backward()
        assert all(map(same_bits, whole(model), [p.grad for p in expected.parameters()]))
    for strategy, options, message in (
        (
            "zero3",
            {"forward_prefetch": True},
            r"fully_shard has no option 'forward_prefetch' \(pass prefetch= of shard_",
        ),
        ("zero3", {"mixed": 1}, "fully_shard has no option 'mixed'.*its options are mesh, reshard_after_forward"),
        ("ddp", {"find_unused": True}, "did you mean find_unused_parameters"),
        ("zero1", {"bucket_size": 3}, "DistributedDataParallel has no option 'bucket_size'"),
        ("zero2-replicated", {"gradient_as_bucket_view": True}, "its options are find_unused_parameters, broadcast"),
    ):
        model = nn.Sequential(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters())
        before = dict(vars(optimizer)), list(model.parameters())
        with pytest.raises(ValueError, match=message):
            lb.distributed.shard_(model, optimizer, strategy, **options)
        assert vars(optimizer) == before[0] and list(map(id, model.parameters())) == list(map(id, before[1]))
    dist.destroy_process_group()


def test_buckets_prefetch_and_options_that_nothing_has(tmp_path: Path):
    run_processes(_arguments, (str(tmp_path),))
