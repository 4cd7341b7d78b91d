"""What cannot be combined is refused with the words of the table, each pair in a real run."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

import lowbit as lb
from lowbit.cli import app
from lowbit.combinations import COMBINATIONS, refusal
from lowbit.demo.config import TrainConfig
from lowbit.demo.experiment import RunSettings
from lowbit.finetune import Session, TuneConfig, add_adapters
from lowbit.finetune.session import check_pairs


def network():
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))


@pytest.fixture
def group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def ddp(tmp_path, group):
    lb.optim.in_backward_(DistributedDataParallel(network()), lb.optim.AdamW)


def whole(tmp_path, group, monkeypatch):
    monkeypatch.setattr("lowbit.optim.in_backward.processes", lambda: 2)
    lb.optim.in_backward_(network(), lb.optim.AdamW)


def offload_second(tmp_path):
    lb.optim.offload_(lb.optim.in_backward_(network(), lb.optim.AdamW), tmp_path)


def offload_first(tmp_path):
    model = network()
    lb.optim.in_backward_(model, lb.optim.offload_(lb.optim.AdamW(model.parameters()), tmp_path))


def scaler(tmp_path):
    model, scale = network(), lb.train.LossScaler()
    optimizer = lb.optim.in_backward_(model, lb.optim.AdamW)
    scale.scale(model(torch.ones(2, 64)).sum()).backward()
    scale.unscale_(optimizer)


def clip(tmp_path):
    lb.optim.clip_grad_norm_(lb.optim.in_backward_(network(), lb.optim.AdamW), 1.0)


def accumulation(tmp_path):
    model = network()
    optimizer = lb.optim.in_backward_(model, lb.optim.AdamW)
    for part, weight in lb.memory.micro_batches(torch.ones(4, 64), 1):
        (weight * model(part).sum()).backward()
    optimizer.step()
    for part, weight in lb.memory.micro_batches(torch.ones(4, 64), 2):
        (weight * model(part).sum()).backward()


def offload_sharded(tmp_path, group):
    model = fully_shard(network(), mesh=group)
    lb.optim.offload_(lb.optim.AdamW(model.parameters()), tmp_path)


def shard_offloaded(tmp_path, group):
    model = network()
    lb.distributed.shard_(model, lb.optim.offload_(lb.optim.AdamW(model.parameters()), tmp_path), "zero1")


def stream_sharded(tmp_path, group):
    lb.memory.stream_blocks_(fully_shard(network(), mesh=group), tmp_path)


def estimate_wrapped(tmp_path, group):
    lb.estimate(DistributedDataParallel(network()), torch.ones(2, 64))


def estimate_wrapped_by_fsdp(tmp_path, group):
    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    lb.memory.plan_checkpoints(model, torch.ones(2, 64), "80%")


def estimate_sharded(tmp_path, group):
    lb.estimate(fully_shard(network(), mesh=group), torch.ones(2, 64))


def estimate_streamed(tmp_path):
    model = network()
    lb.memory.stream_blocks_(model, tmp_path)
    lb.estimate(model, torch.ones(2, 64))


def stream_in_an_estimate(tmp_path):
    stream = partial(lb.memory.stream_blocks_, to=tmp_path)
    lb.estimate(network(), torch.ones(2, 64), prepare=stream)


def offload_in_an_estimate(tmp_path):
    make = lambda params: lb.optim.offload_(lb.optim.AdamW(params), tmp_path)
    lb.estimate(network(), torch.ones(2, 64), optimizer=make)


def segments_compiled(tmp_path):
    model = network()
    lb.memory.checkpoint_(model, "sqrt")
    torch.compile(model, backend="eager", fullgraph=True)(torch.ones(2, 64))


def profiled(tmp_path):
    with torch.profiler.profile(), lb.memory.profile(network()):
        pass


def fitted(*names, dtype=torch.float32, **options):
    """A plan that is asked for both."""

    def run(tmp_path):
        lb.fit(network().to(dtype), torch.ones(8, 64, dtype=dtype), "400%", quality="any", require=names, **options)

    return run


def func(transform):
    """A gradient, or what else ``transform`` makes of a checkpointed model."""

    def run(tmp_path):
        model, x = network(), torch.ones(2, 64)
        lb.memory.checkpoint_(model, "block")
        transform(model, x)

    return run


def dual(model, x):
    with forward_ad.dual_level():
        model(forward_ad.make_dual(x, x))


def by_weights(model, x):
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    torch.func.grad(lambda given: torch.func.functional_call(model, given, (x,)).sum())(weights)


FUNC = (
    by_weights, dual, lambda model, x: torch.func.vmap(model)(x), lambda model, x: torch.func.jacrev(model)(x),
    lambda model, x: torch.func.jvp(model, (x,), (x,)), lambda model, x: torch.func.hessian(model)(x),
)  # fmt: skip


def tied(tie, strategy="zero3", **options):
    def run(tmp_path, group):
        model = network()
        tie(model)
        lb.distributed.shard_(model, lb.optim.AdamW(model.parameters()), strategy, **options)

    return run


def weights(model):
    model[2][0].weight = model[0][0].weight


def modules(model):
    model[3][0] = model[1][0]


def with_the_rest(model):
    model.append(nn.Linear(64, 64))
    model[4].weight = model[0][0].weight


TIED = (
    tied(weights), tied(weights, "zero2"), tied(modules), tied(weights, "hsdp", group_size=1), tied(with_the_rest)
)  # fmt: skip


def settings(**changes):
    def run(tmp_path):
        of_train = {name: changes[name] for name in ("tail", "checkpointing") if name in changes}
        RunSettings(train=TrainConfig(**of_train), **{k: v for k, v in changes.items() if k not in of_train})

    return run


def explain(tmp_path):
    answer = CliRunner().invoke(app, ["train", "--explain", "--memory", "60%"], catch_exceptions=False)
    raise ValueError(" ".join(answer.output.split()))


def fused_and_sharded(tmp_path, group):
    model = network()
    lb.memory.fuse_loss_(model, head="3.0")
    sharded, _ = lb.distributed.shard_(model, lb.optim.AdamW(model.parameters()), "zero3")
    sharded(torch.ones(2, 64))


def recipe_on_a_quantized_base(tmp_path):
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 64, "n_embd": 64, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))
    lb.quantize_(model, "nf4")
    Session(add_adapters(model, 2), [], [], TuneConfig(precision="fp8"), tmp_path)


def fine_tuning(planned=False, shared=False, **values):
    def run(tmp_path):
        check_pairs(TuneConfig(precision="fp8", **values), planned=planned, shared=shared)

    return run


RUNS = {
    "fused loss fully_shard": (fused_and_sharded,),
    "checkpoint func": tuple(map(func, FUNC)),
    "tied blocks": TIED,
    "base recipe": (recipe_on_a_quantized_base,),
    "memory strategy": (settings(memory="60%", strategy="ddp"),),
    "tail strategy": (settings(tail=0.5, strategy="zero1"), fine_tuning(shared=True, tail=0.5)),
    "watch strategy": (settings(watch=1, strategy="ddp"), fine_tuning(shared=True, watch=1)),
    "profile strategy": (settings(profile_memory=True, strategy="zero3"),),
    "checkpointing memory": (settings(checkpointing=True, memory="60%"),),
    "tail memory": (settings(tail=0.5, memory="60%"), fine_tuning(planned=True, tail=0.5)),
    "watch memory": (settings(watch=1, memory="60%"), fine_tuning(planned=True, watch=1)),
    "explain memory": (explain,),
    "in_backward ddp": (ddp,),
    "in_backward processes": (whole,),
    "in_backward offload": (offload_second, offload_first),
    "in_backward scaler": (scaler,),
    "in_backward clip": (clip,),
    "in_backward accumulation": (accumulation,),
    "offload dtensor": (offload_sharded,),
    "offload shard": (shard_offloaded, fitted("zero1", "disk", gpus=2)),
    "offload activations shard": (fitted("zero3", "memory", "activations on disk", gpus=2),),
    "stream processes": (fitted("ddp", "disk", "weights on disk", gpus=2),),
    "stochastic fp32": (fitted("fp32", "stochastic"),),
    "stochastic fp16": (fitted("as loaded", "stochastic", dtype=torch.float16),),
    "stream dtensor": (stream_sharded,),
    "wrapped estimate": (estimate_wrapped, estimate_wrapped_by_fsdp),
    "dtensor estimate": (estimate_sharded,),
    "stream estimate": (estimate_streamed, stream_in_an_estimate),
    "offload estimate": (offload_in_an_estimate,),
    "segments compile": (segments_compiled,),
    "profile profiler": (profiled,),
}


def test_every_pair_that_raises_has_a_run():
    assert RUNS.keys() == {name for name, pair in COMBINATIONS.items() if pair.raises}


@pytest.mark.parametrize(("name", "run"), [(name, run) for name, runs in RUNS.items() for run in runs])
def test_a_pair_is_refused_with_the_words_of_the_table(name, run, tmp_path, request):
    needs = run.__code__.co_varnames[1 : run.__code__.co_argcount]
    given = [request.getfixturevalue(need) for need in needs]
    words = refusal(name, "")[2:]
    with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
        run(tmp_path, *given)
    assert words in str(error.value)


def test_clipping_by_torch_finds_nothing_and_steps_one_by_one_go_on():
    model = network()
    optimizer = lb.optim.in_backward_(model, lb.optim.AdamW)
    for _ in range(3):
        model(torch.ones(2, 64)).sum().backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) == 0
        optimizer.step()


def test_a_checkpointed_model_is_transformed_without_gradients_and_derived_by_autograd():
    model, x = network(), torch.ones(2, 64)
    jacobian = torch.autograd.functional.jacobian
    expected = [model(x), *(jacobian(model, x, vectorize=vectorize) for vectorize in (False, True))]
    lb.memory.checkpoint_(model, "block")
    with torch.no_grad():
        assert torch.equal(torch.func.vmap(model)(x), expected[0])
    for vectorize in (False, True):
        assert torch.equal(jacobian(model, x, vectorize=vectorize), expected[1 + vectorize])
    with forward_ad.dual_level():  # without derivatives in it
        model(x).sum().backward()


def test_weights_that_are_shared_within_what_is_gathered_are_sharded(group):
    """One block in two places; blocks that are one unit."""
    for tie, blocks in ((lambda model: model.__setitem__(3, model[1]), None), (weights, [])):
        model = network()
        tie(model)
        ids = torch.ones(2, 64)
        expected = model(ids)
        sharded, _ = lb.distributed.shard_(model, lb.optim.AdamW(model.parameters()), "zero3", blocks=blocks)
        assert torch.equal(sharded(ids), expected)
