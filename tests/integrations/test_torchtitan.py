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
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.bits import same_bits
from support.processes import run_processes
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import lowbit as lb
from lowbit.integrations.torchtitan import BEYOND, JobConfig, LowbitConverter, PlanConverter, register
from lowbit.plan import Plan
from lowbit.plan.fitting.predict import Prediction
from lowbit.plan.fitting.subject import Subject
from lowbit.plan.settings import Settings, make_optimizer, prepare_model_
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

    def __init__(self, parts: list[nn.Module], settings: Settings = Settings()) -> None:  # noqa: B008
        self.inner = [make_optimizer(part.parameters(), settings, lr=1e-2) for part in parts]
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
    assert protocols._registry_model_converter_cls == {"lowbit": LowbitConverter, "lowbit_plan": PlanConverter}
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


# -- plans -------------------------------------------------------------------------------------------------------------
class Blocks(nn.Module):
    """A model of repeated blocks, which policies of checkpointing find."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 24), nn.SiLU(), nn.Linear(24, 16)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x

    def init_weights(self) -> None:
        generator = torch.Generator().manual_seed(0)
        for param in self.parameters():
            param.data.copy_(torch.randn(param.shape, generator=generator) / 4)


def plan_of(settings: Settings) -> Plan:
    chosen, plain = Prediction(settings, 1, 1.0), Prediction(Settings(), 1, 1.0)
    return Plan(chosen, 1, plain, [], subject=Subject("Toy", {}, None))


def by_plan(convert: object, settings: Settings) -> tuple[list[float], nn.Module]:
    """Losses of three steps in the order of torchtitan's trainer; its optimizers are the job's part of the plan."""
    with torch.device("meta"):
        model = Blocks()
    convert(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    optimizers, losses = Optimizers([model], settings), []
    for step in range(3):
        loss = model(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        optimizers.step()
        optimizers.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize(
    ("settings", "job_does"),
    [
        (Settings(checkpoint="block", recipe="fp8"), ()),
        (Settings(checkpoint="sqrt", recipe="fp8", compress=True, mixed="bf16", bits=8), ("optimizer",)),
    ],
)
def test_a_job_names_the_file_of_a_plan(settings, job_does, tmp_path):
    protocols = ModuleType("protocols")
    exec(STAND_IN, vars(protocols))
    register(protocols)
    path = plan_of(settings).save(tmp_path / "plan.json")
    config = job(plan=str(path), done_by_job=job_does)
    config.model.converters = ["lowbit_plan"]
    (converter,) = protocols.build_model_converters(config, dims())
    losses, model = by_plan(converter.convert, settings)
    expected, other = by_plan(lambda one: prepare_model_(one, settings), settings)
    assert losses == expected and losses[-1] < losses[0]
    assert all(map(same_bits, (p.detach() for p in model.parameters()), (p.detach() for p in other.parameters())))
    assert "Checkpointed" in type(model.layers[0]).__name__ and isinstance(model.layers[0][0], TrainLinear)
    listed = config.lowbit.build(parallel_dims=dims())
    assert type(listed) is PlanConverter and listed.plan.settings == settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro": 4}, r"'parts'.*divide training.local_batch_size by 4, and add 'parts' to lowbit.done"),
        ({"bits": 8}, r"AdamW with bits=8.*give the TrainSpec a build_optimizers_fn.*add 'optimizer'"),
        ({"mixed": "bf16"}, r"AdamW with bits=32.*add 'optimizer'"),
        ({"offload_states": True}, r"'disk' \(states.*call lb.optim.offload_.*add 'states'"),
        (
            {"offload_activations": True},
            r"'activations on disk'.*with lb.memory.offload_activations.*add 'activations'",
        ),
    ],
)
def test_what_a_converter_cannot_do_is_the_jobs(changes, message):
    plan = plan_of(Settings(**changes))
    with pytest.raises(ValueError, match=message):
        PlanConverter(plan=plan)
    assert PlanConverter(plan=plan, done_by_job=BEYOND).plan is plan


def test_plans_that_do_not_go_with_the_job_are_refused():
    plan = plan_of(Settings(checkpoint="block"))
    with pytest.raises(ValueError, match=r"expected a plan, got none; set lowbit.plan"):
        PlanConverter(job())
    with pytest.raises(ValueError, match=r"has the plan 'plan.json'; name the converter of plans.*lowbit_plan"):
        LowbitConverter(job(plan="plan.json"))
    with pytest.raises(
        ValueError, match=r"names part, and there is optimizer, states, activations, weights, way, parts"
    ):
        PlanConverter(plan=plan, done_by_job=("part",))
    with pytest.raises(ValueError, match=r"recomputes by 'block', and torchtitan by 'full'.*mode = 'none'"):
        PlanConverter(SimpleNamespace(activation_checkpoint=SimpleNamespace(mode="full")), plan=plan)
    with pytest.raises(ValueError, match=r"set parallelism.pipeline_parallel_degree = 1"):
        PlanConverter(parallel_dims=dims(pp_enabled=True), plan=plan)
    with pytest.raises(ValueError, match=r"PlanConverter: expected whole layers.*tensor_parallel_degree = 1"):
        PlanConverter(parallel_dims=dims(tp_enabled=True), plan=plan)


# -- sharded -----------------------------------------------------------------------------------------------------------
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
