"""Weights that are gathered in codes: the bits are those of one process, and a byte a number is sent."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.bits import same_bits
from support.processes import run_processes
from support.variants import not_2_10
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import lowbit as lb
from lowbit.distributed import all_gather

#: Schemes, and the recipe that quantizes weights in each.
RECIPES = {"fp8": "fp8", "fp8-tensor": "fp8-tensor", "int8": "int8"}
SCHEMES = {"fp8": "fp8_e4m3:row", "fp8-tensor": "fp8_e4m3:tensor", "int8": "int8:row", "mxfp8": "mxfp8"}


def network(dim: int = 64) -> nn.Module:
    """Blocks, rows that no number of processes divides, fewer rows than processes, and a frozen weight."""
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(dim, dim), nn.Tanh())
    blocks = nn.Sequential(block(), block(), block())
    model = nn.Sequential(
        nn.Linear(24, dim), blocks, nn.Linear(dim, 10, bias=False), nn.LayerNorm(10), nn.Linear(10, 3)
    )
    model[1][1][0].weight.requires_grad_(False)
    return model


def meet(rank: int, world: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/meet{world}", rank=rank, world_size=world)


def whole(model: nn.Module, gradients: bool = False) -> list[Tensor]:
    tensors = [p.grad if gradients else p for p in model.parameters() if p.requires_grad or not gradients]
    return [(t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for t in tensors]


def sharded(
    strategy: str, bits: str | None, change: Callable[[nn.Module], Any] = lambda model: None, make: Any = lb.optim.AdamW
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network()
    change(model)
    optimizer = make((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    if bits is not None:
        lb.distributed.all_gather_(model, bits, skip=())
    size = {"group_size": max(dist.get_world_size() // 2, 1)} if strategy == "hsdp" else {}
    return lb.distributed.shard_(model, optimizer, strategy, **size)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(3), parts: int = 1) -> list[Tensor]:
    """The same batch on every process, so that sums of gradients are exact. Loss and gradients of each step."""
    found = []
    for step in steps:
        for part in range(parts):
            x = torch.randn(8, 24, generator=torch.Generator().manual_seed(10 * step + part))
            loss = model(x).square().mean()
            loss.backward()
        found += [loss.detach(), *whole(model, gradients=True)]
        optimizer.step()
        optimizer.zero_grad()
    return found


# -- bits -------------------------------------------------------------------------------------------------------------
def _recipes(rank: int, world: int, path: str) -> None:
    meet(rank, world, path)
    for bits, recipe in RECIPES.items():
        prepare = lambda model, recipe=recipe: lb.train.prepare_(model, recipe, skip=())
        alone = network()
        prepare(alone)
        optimizer = lb.optim.AdamW((p for p in alone.parameters() if p.requires_grad), lr=1e-2)
        expected = train(alone, optimizer)
        for strategy in ("zero2", "zero3", "hsdp"):
            model, optimizer = sharded(strategy, bits, prepare)
            found = train(model, optimizer)
            assert all(map(same_bits, found, expected)), f"{recipe}, {strategy}"
            assert all(map(same_bits, whole(model), whole(alone))), f"{recipe}, {strategy}"
            with torch.no_grad():
                assert same_bits(model(torch.ones(2, 24)), alone(torch.ones(2, 24))), (
                    f"{recipe}, {strategy}: evaluation"
                )
    dist.destroy_process_group()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("world", [2, 1, 4])
def test_recipes_take_the_codes_and_keep_their_bits(world: int, tmp_path: Path):
    run_processes(_recipes, (world, str(tmp_path)), world)


def _plain(rank: int, world: int, path: str) -> None:
    meet(rank, world, path)
    for bits, kind in SCHEMES.items():
        for strategy in ("zero2", "zero3"):
            model, optimizer = sharded(strategy, bits)
            seen: dict[str, Tensor] = {}
            layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
            for name, layer in layers.items():
                layer.register_forward_hook(
                    lambda layer, args, y, name=name, seen=seen: seen.update({name: layer.weight.detach().clone()})
                )
            for step in range(2):
                weights = {name: layer.weight.full_tensor().detach().clone() for name, layer in layers.items()}
                train(model, optimizer, range(step, step + 1))
                for name, weight in weights.items():
                    assert same_bits(seen[name], lb.fake_quantize(weight, kind)), f"{bits}, {strategy}, {name}, {step}"
    dist.destroy_process_group()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("world", [2, 1, 4])
def test_the_gathered_weight_is_that_of_fake_quantize(world: int, tmp_path: Path):
    run_processes(_plain, (world, str(tmp_path)), world)


def _broken(rank: int, path: str) -> None:
    """What one process has of NaN and Inf, every process sees."""
    meet(rank, 2, path)
    for bits, value in (("fp8", float("nan")), ("fp8-tensor", float("nan")), ("fp8-tensor", float("inf"))):
        model, _ = sharded("zero3", bits)
        weight = model[0].weight
        if rank == 0:
            with torch.no_grad():
                weight.to_local()[0, 0] = value
        dist.barrier()
        expected = lb.fake_quantize(weight.full_tensor().detach(), SCHEMES[bits])
        x = torch.eye(24)
        found = []
        model[0].register_forward_hook(lambda layer, *_, found=found: found.append(layer.weight.detach().clone()))
        model(x)
        assert same_bits(found[0].isnan(), expected.isnan()) and expected.isnan().any(), bits
    dist.destroy_process_group()


def test_numbers_that_are_none(tmp_path: Path):
    run_processes(_broken, (str(tmp_path),))


# -- what is sent, and when -------------------------------------------------------------------------------------------
def _bytes(rank: int, path: str) -> None:
    meet(rank, 2, path)
    sent: dict[Any, int] = {}
    for bits, precision in ((None, None), (None, torch.bfloat16), ("fp8", None), ("fp8-tensor", None), ("int8", None)):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256, bias=False)) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if bits is not None:
            lb.distributed.all_gather_(model, bits, skip=())
        model, optimizer = lb.distributed.shard_(model, optimizer, "zero3", precision=precision)
        for _ in range(2):
            with lb.distributed.traffic() as traffic:
                model(torch.randn(4, 256)).sum().backward()
            optimizer.step()
        sent[bits, precision] = traffic.total - traffic.bytes["reduce-scatter"]
    plain, scales = sent[None, None], 4 * 256 * 4
    assert sent[None, torch.bfloat16] == plain / 2
    assert sent["fp8-tensor", None] == plain / 4 + 4 * 4, "an all-reduce of four magnitudes"
    assert sent["fp8", None] == sent["int8", None] == plain / 4 + scales / 2
    dist.destroy_process_group()


def test_a_quarter_of_fp32_is_sent_and_half_of_bf16(tmp_path: Path):
    run_processes(_bytes, (str(tmp_path),))


def _once(rank: int, path: str) -> None:
    meet(rank, 2, path)
    real = all_gather.quantize
    for bits in ("fp8", "fp8-tensor"):
        for make in (lb.optim.AdamW, torch.optim.AdamW):
            model, optimizer = sharded("zero3", bits, make=make)
            for step in range(3):
                with mock.patch.object(all_gather, "quantize", side_effect=real) as encoded:
                    train(model, optimizer, range(step, step + 1), parts=2)
                matrices = [call for call in encoded.call_args_list if call.args[0].shape != (1, 1)]
                weights = 6 if step == 0 else 5  # one is frozen
                assert len(matrices) == weights, f"{bits}, {make}: {len(matrices)} in step {step}"
    dist.destroy_process_group()


def test_a_weight_is_encoded_once_a_step(tmp_path: Path):
    run_processes(_once, (str(tmp_path),))


# -- what a model is used with ----------------------------------------------------------------------------------------
def _saves(rank: int, path: str) -> None:
    meet(rank, 4, path)
    for bits in ("fp8", "fp8-tensor"):
        model, optimizer = sharded("zero3", bits)
        train(model, optimizer, range(2))
        lb.distributed.save(f"{path}/{bits}", model, optimizer)
        weights = whole(model)
        again, fresh = sharded("zero3", bits)
        train(again, fresh, range(1))  # has encoded other numbers
        lb.distributed.load(f"{path}/{bits}", again, fresh)
        assert all(map(same_bits, whole(again), weights))
        torch.save(model.state_dict(), f"{path}/{rank}.pt")
        states = torch.load(f"{path}/{rank}.pt", weights_only=True)
        assert type(states["0.weight"].to_local()) is type(states["0.weight"]._local_tensor) is Tensor
        assigned, _ = sharded("zero3", bits)
        train(assigned, _, range(1))
        assigned.load_state_dict(states, assign=True)
        expected = train(model, optimizer, range(2, 3))
        assert all(map(same_bits, train(again, fresh, range(2, 3)), expected))
        assert same_bits(assigned(torch.ones(2, 24)), sharded_from(states, bits)(torch.ones(2, 24)))
        if rank == 0:
            torch.save(weights, f"{path}/{bits}.whole")
        dist.barrier()
    dist.destroy_process_group()


def sharded_from(states: dict[str, Any], bits: str) -> nn.Module:
    model, _ = sharded("zero3", bits)
    model.load_state_dict(states)
    return model


def _loads(rank: int, world: int, path: str) -> None:
    if world > 1:
        meet(rank, world, path)
    for bits in ("fp8", "fp8-tensor"):
        model = network()
        optimizer = lb.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        if world > 1:
            model, optimizer = lb.distributed.shard_(model, optimizer, "zero2")
        lb.distributed.load(f"{path}/{bits}", model, optimizer)
        assert all(map(same_bits, whole(model), torch.load(f"{path}/{bits}.whole")))
        train(model, optimizer, range(2, 3))
    if world > 1:
        dist.destroy_process_group()


def test_checkpoints_load_without_it_and_on_other_numbers_of_processes(tmp_path: Path):
    run_processes(_saves, (str(tmp_path),), 4)
    run_processes(_loads, (2, str(tmp_path)), 2)
    _loads(0, 1, str(tmp_path))


class Tied(nn.Module):
    """Two layers of one weight, and an output layer that shares a table's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.first, self.second = nn.Embedding(9, 24), nn.Linear(24, 24), nn.Linear(24, 24)
        self.out = nn.Linear(24, 9, bias=False)
        self.second.weight, self.out.weight = self.first.weight, self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(self.first(self.table(x))))


def _others(rank: int, path: str) -> None:
    meet(rank, 2, path)
    found = []
    for strategy, bits in ((None, None), ("zero3", "fp8")):
        model = Tied()
        lb.train.prepare_(model, "fp8", skip="out")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if bits is not None:
            report = lb.distributed.all_gather_(model, bits)
            assert report.converted == ("first", "second")
            assert report.left["out"] == "it shares its weight with table"
            model, optimizer = lb.distributed.shard_(model, optimizer, strategy)
        for _ in range(3):
            model(torch.arange(9)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(whole(model))
    assert all(map(same_bits, *found)), "tied weights"

    def checkpointed(model: nn.Module) -> None:
        lb.train.prepare_(model, "int8-stochastic", skip=())
        lb.memory.checkpoint_(model, "block")

    runs = [train(*sharded("zero3", bits, checkpointed)) for bits in (None, "int8")]
    assert all(map(same_bits, *runs)), "checkpoints, and a recipe that draws random bits"
    for options in ({"precision": torch.bfloat16}, {"offload": True}):
        model = network()
        lb.train.mixed_(model)
        optimizer = lb.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        lb.distributed.all_gather_(model, "fp8-tensor")
        model, optimizer = lb.distributed.shard_(model, optimizer, "zero3", **options)
        losses = []
        for _ in range(8):
            losses.append(model(torch.ones(2, 24)).square().mean())
            losses[-1].backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert losses[-1] < losses[0], options
    for make in (lb.optim.AdamW, torch.optim.AdamW):  # a process that has no rows takes part in every exchange
        model = nn.Linear(64, 1)
        optimizer = make(model.parameters(), lr=0.1)
        lb.distributed.all_gather_(model, "fp8-tensor")
        model, optimizer = lb.distributed.shard_(model, optimizer, "zero3")
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
    with pytest.raises(ValueError, match="call all_gather_ before shard_"):
        lb.distributed.all_gather_(model, "fp8")
    for strategy, options, message in (("zero1", {}, "for strategies that gather weights"),
                                       ("ddp", {}, "got strategy='ddp'"),
                                  ("zero3", {"reshard_after_forward": 2}, "give True or False")):  # fmt: skip
        model = network()
        lb.distributed.all_gather_(model, "fp8")
        with pytest.raises(ValueError, match=message):
            lb.distributed.shard_(model, torch.optim.SGD(model.parameters()), strategy, **options)
    model = network()
    lb.distributed.all_gather_(model, "fp8")
    lb.train.prepare_(model, "int8", skip=())
    with pytest.raises(ValueError, match="trains with the recipe 'int8'"):
        lb.distributed.shard_(model, torch.optim.SGD(model.parameters()), "zero3")
    dist.destroy_process_group()


def test_ties_checkpointing_mixed_precision_and_what_is_refused(tmp_path: Path):
    run_processes(_others, (str(tmp_path),))


@pytest.mark.parametrize(
    ("bits", "message"),
    [
        ("fp9", "expected one of fp8, fp8-tensor, int8, or a scheme, got 'fp9'"),
        ("int4:group32", "expected 8-bit codes"),
        ("fp8_e4m3:block32x32", "scales within a row"),
        ("uint8:row:affine", "neither zero points"),
    ],
)
def test_schemes_that_cannot_be_gathered(bits: str, message: str):
    with pytest.raises(ValueError, match=message):
        lb.distributed.all_gather_(network(), bits)


def test_layers_that_cannot_be_gathered():
    for recipe, message in (
        ("fp8-delayed", "delayed"),
        ("mxfp8", "all_gather_ would quantize it by"),
        ("fp8-pow2", "pow2"),
    ):
        model = network()
        lb.train.prepare_(model, recipe, skip=())
        with pytest.raises(ValueError, match=message):
            lb.distributed.all_gather_(model, "fp8")
    model = network()
    lb.train.prepare_(model, "fp8-pow2", skip=())
    with pytest.raises(ValueError, match="needs the weight in addition to its codes"):
        lb.distributed.all_gather_(model, "fp8_e4m3:row:e8m0:ceil")
    model = network()
    lb.quantize_(model, "int8", skip="0")
    report = lb.distributed.all_gather_(model, "fp8")
    assert report.converted == ("0", "1.0.0", "1.1.0", "1.2.0") and "quantized already" in report.left["2"]
    with pytest.raises(ValueError, match="found nothing to convert"):
        lb.distributed.all_gather_(nn.Sequential(nn.Conv2d(3, 3, 3)), "fp8")


def _sharded_otherwise(rank: int, path: str) -> None:
    meet(rank, 2, path)
    from torch.distributed.fsdp import fully_shard

    x = torch.randn(4, 24)
    for shard in (fully_shard, nn.parallel.DistributedDataParallel):
        model = network()
        lb.distributed.all_gather_(model, "fp8")
        with torch.no_grad():
            model(x)  # nothing is trained
        model = shard(model)
        with pytest.raises(RuntimeError, match="2 processes train this model, and its weights are not gathered in fp8"):
            model(x)
        del model
    model = network()
    lb.distributed.all_gather_(model, "fp8")
    lb.distributed.all_gather_(model, "int8")  # the last one holds
    model, _ = lb.distributed.shard_(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero3")
    model(x).sum().backward()
    del model
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def test_who_shards_otherwise_is_told(tmp_path: Path):
    run_processes(_sharded_otherwise, (str(tmp_path),))
    model = network()
    lb.distributed.all_gather_(model, "fp8")
    model(torch.randn(4, 24)).sum().backward()  # one process has all


# -- adapters on a quantized base -------------------------------------------------------------------------------------
def _adapters(rank: int, path: str) -> None:
    meet(rank, 2, path)
    import peft

    from lowbit.integrations.peft import get_peft_model

    found = []
    for recipe in ("nf4", "int8-weight-only"):
        found.clear()
        for strategy in (None, "zero3"):
            model = network()
            lb.quantize_(model, recipe, skip=())
            model = get_peft_model(model, peft.LoraConfig(r=4, target_modules=r"1\.\d\.0"))
            optimizer = lb.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
            if strategy is not None:
                model, optimizer = lb.distributed.shard_(model, optimizer, strategy)
            gradients = train(model, optimizer)
            found.append([*gradients, *whole(model)])
        assert len(found[0]) == len(found[1]) and all(map(same_bits, *found)), recipe
    dist.destroy_process_group()


@pytest.mark.slow
@not_2_10("FSDP2 makes shards of integer parameters require grad, which raises")
def test_adapters_on_a_quantized_base_have_the_bits_of_one_process(tmp_path: Path):
    pytest.importorskip("peft")
    run_processes(_adapters, (str(tmp_path),))
