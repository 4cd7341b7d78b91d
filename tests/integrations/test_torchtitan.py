"""torchtitan's ModelConverter, against a stand-in for the modules of torchtitan that have to do with it.

The stand-in has the interface that torchtitan documents (docs/extension.md, protocols/model_converter.py): a table of
converters by name, called with a job's config and the dimensions of parallelism, and an optimizer made of others.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.bits import same_bits
from support.processes import run_processes
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import lowbit as lb
from lowbit.integrations.torchtitan import JobConfig, LowbitConverter
from lowbit.train import TrainLinear

WORLD = 2
PROTOCOLS = "torchtitan.protocols.model_converter"
STAND_IN = """
_registry_model_converter_cls = {}

def register_model_converter(converter_cls, name):
    assert name not in _registry_model_converter_cls
    _registry_model_converter_cls[name] = converter_cls

def build_model_converters(job_config, parallel_dims):
    return [_registry_model_converter_cls[name](job_config, parallel_dims) for name in job_config.model.converters]
"""
DELAYED = lb.Cast("fp8_e4m3:tensor", scale="delayed", history=3)
DRAWN = lb.Gemm(lb.Cast("fp8_e5m2:tensor", scale="delayed", rounding="stochastic", history=3), "reuse")
STATEFUL = lb.Recipe(lb.Gemm(DELAYED, DELAYED), DRAWN, DRAWN, name="both")


@pytest.fixture
def torchtitan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "torchtitan" / "protocols"
    folder.mkdir(parents=True)
    (folder / "model_converter.py").write_text(STAND_IN)
    for name in ("torchtitan", "torchtitan.protocols", PROTOCOLS):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("torchtitan", "torchtitan.protocols", PROTOCOLS):
        sys.modules.pop(name, None)


class Transformer(nn.Module):
    """A model as torchtitan's: made on the meta device, initialized once it has memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": nn.Linear(16, 24), "1": nn.Linear(24, 16)})
        self.output = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.layers["1"](nn.functional.silu(self.layers["0"](x))))

    def init_weights(self) -> None:
        generator = torch.Generator().manual_seed(0)
        for param in self.parameters():
            whole = torch.randn(param.shape, generator=generator) / 4
            param.data.copy_(whole if not hasattr(param, "placements") else dist_like(whole, param))


def dist_like(whole: Tensor, param: Tensor) -> Tensor:
    return torch.distributed.tensor.distribute_tensor(whole, param.device_mesh, param.placements)


class Optimizers(torch.optim.Optimizer):
    """torchtitan's container: an optimizer for each part of the model, and hooks of its own."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.inner = [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in parts]
        super().__init__([param for part in parts for param in part.parameters()], {})

    def step(self) -> None:
        for one in self.inner:
            one.step()

    def zero_grad(self) -> None:
        for one in self.inner:
            one.zero_grad()


def dims(**more: bool) -> SimpleNamespace:
    return SimpleNamespace(**{"tp_enabled": False, "pp_enabled": False, **more})


def job(**lowbit: object) -> SimpleNamespace:
    section = JobConfig().lowbit
    for name, value in lowbit.items():
        setattr(section, name, value)
    return SimpleNamespace(model=SimpleNamespace(converters=["lowbit"]), lowbit=section)


def trained(converter: LowbitConverter | None, steps: int, rank: int = 0, shard: bool = False) -> nn.Module:
    """The order of torchtitan's trainer: the meta device, converters, sharding, weights, optimizers."""
    with torch.device("meta"):
        model = Transformer()
    if converter is None:
        lb.train.prepare_(model, STATEFUL, skip="output")
    else:
        converter.convert(model)
    if shard:
        for module in (*model.layers.values(), model):
            fully_shard(module)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    optimizers = Optimizers([model])
    if converter is not None:
        optimizers.register_step_post_hook(lambda *_: converter.post_optimizer_hook([model]))
    for step in range(steps):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank)) * 2**step
        optimizers.zero_grad()
        model(x).square().mean().backward()
        optimizers.step()
    assert lb.train.state(model).step == steps
    return model


def test_a_job_names_the_converter(torchtitan):
    protocols = importlib.import_module(PROTOCOLS)
    assert protocols._registry_model_converter_cls == {"lowbit": LowbitConverter}
    (converter,) = protocols.build_model_converters(job(recipe=STATEFUL), dims())
    found, expected = trained(converter, 3).state_dict(), trained(None, 3).state_dict()
    assert found.keys() == expected.keys() and all(same_bits(found[name], expected[name]) for name in found)
    (plain,) = protocols.build_model_converters(SimpleNamespace(model=SimpleNamespace(converters=["lowbit"])), dims())
    assert plain.recipe == "fp8"


def test_a_job_lists_its_config():
    config = LowbitConverter.Config(recipe={"*": "fp8", "output": "mxfp8"}, skip=())
    model = Transformer()
    converter = config.build(parallel_dims=dims(), model_compile_enabled=True)
    converter.convert(model)
    assert [layer.recipe.name for layer in (*model.layers.values(), model.output)] == ["fp8", "fp8", "mxfp8"]


def test_the_output_layer_stays_unless_skip_says_otherwise():
    for skip, kind in ((None, nn.Linear), ((), TrainLinear)):
        model = Transformer()
        LowbitConverter(recipe="fp8", skip=skip).convert(model)
        assert type(model.output) is kind and type(model.layers["0"]) is TrainLinear


def test_keys_that_no_plain_checkpoint_has():
    model, keeps = trained(LowbitConverter(recipe=STATEFUL), 0), LowbitConverter().key_filter()
    assert {key for key in model.state_dict() if not keeps(key)} == set(Transformer().state_dict())


@pytest.mark.parametrize(
    ("parallel", "recipe", "message"),
    [
        ({"tp_enabled": True}, "fp8", "by tensor parallelism; set parallelism.tensor_parallel_degree = 1"),
        ({"pp_enabled": True}, STATEFUL, "without a state for pipeline parallelism.*got both; use fp8, or set"),
        ({}, "int8-weight-only", "'int8-weight-only' is for inference only"),
    ],
)
def test_what_it_does_not_do_is_refused(parallel, recipe, message):
    model = Transformer()
    with pytest.raises(ValueError, match=message):
        LowbitConverter(job(recipe=recipe), dims(**parallel)).convert(model)
    assert type(model.layers["0"]) is nn.Linear
    LowbitConverter(parallel_dims=dims(pp_enabled=True)).convert(model)


def _sharded(rank: int, path: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{path}/meeting", rank=rank, world_size=WORLD)
    model = trained(LowbitConverter(recipe=STATEFUL), 3, rank, shard=True)
    largest = torch.zeros(3)
    for step in range(3):
        for other in range(WORLD):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + other)) * 2**step
            largest[2 - step] = torch.maximum(largest[2 - step], x.abs().max())
    assert same_bits(lb.train.state(model).histories["layers.0/output.a"], largest)
    assert all(layer.weight.full_tensor().isfinite().all() for layer in model.layers.values())
    dist.destroy_process_group()


def test_sharded_in_two_processes(tmp_path):
    """The state moves on after each step of the container once, with the largest magnitudes of both processes."""
    run_processes(_sharded, (tmp_path,), WORLD)
