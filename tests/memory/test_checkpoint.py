"""Gradient checkpointing by policy: no bit changes, less is kept, and what cannot be replayed is named."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from support.architectures import ARCHITECTURES, BLOCKS, ResNet
from support.bits import same_bits
from support.checkpoints import assert_equal, chain, outcome
from torch import Tensor, nn

import lowbit as lb
from lowbit.checkpointing.frame import NotReplayed
from lowbit.checkpointing.policies import POLICIES
from lowbit.memory import checkpoint_, saved_bytes, uncheckpoint_

#: Arguments of the policies that take one.
ARGUMENTS = {"every": "2", "ratio": "0.5", "segments": "3"}


def made(name: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    torch.manual_seed(0)
    return ARCHITECTURES[name]()


def policies_of(model: nn.Module) -> dict[str, str]:
    """The policies that choose modules of a model, as ``checkpoint_`` takes them."""
    arguments = {name: [row.argument(ARGUMENTS[name])] if row.argument else [] for name, row in POLICIES.items()}
    return {
        name: f"{name}:{ARGUMENTS[name]}" if row.argument else name
        for name, row in POLICIES.items()
        if row.choose(model, *arguments[name])
    }


def test_every_policy_is_tested():
    assert {policy for name in ARCHITECTURES for policy in policies_of(made(name)[0])} == set(POLICIES)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_policy_changes_a_bit(name):
    plain, loss = made(name)
    want, keys = outcome(copy.deepcopy(plain), loss), list(plain.state_dict())
    twin = copy.deepcopy(plain)
    whole = saved_bytes(lambda: loss(twin), twin)
    kept = {}
    for policy in policies_of(plain).values():
        model = copy.deepcopy(plain)
        report = checkpoint_(model, policy)
        assert report.layers and list(model.state_dict()) == keys
        assert_equal(outcome(model, loss), want)
        kept[policy] = saved_bytes(lambda model=model: loss(model), model) / whole
    assert kept["block"] < 0.7 and kept["sqrt"] < kept["block"] < kept["every:2"] < 1, kept
    if name != "resnet":
        assert kept["block"] < kept["attention"] < 1 and kept["block"] < kept["mlp"] < 1, kept


# -- what is kept -----------------------------------------------------------------------------------------------------
def test_segments_keep_as_many_inputs_as_there_are_segments():
    x = torch.randn(128, 16)
    model, one = chain(64), x.nbytes
    whole = lb.memory.allocated_peak(lambda: model(x).sum().backward())
    checkpoint_(model, "sqrt")
    kept = saved_bytes(lambda: model(x), model)
    assert 8 * one <= kept <= 2 * 8 * one
    assert lb.memory.allocated_peak(lambda: model(x).sum().backward()) < whole / 4
    checkpoint_(model, "block")
    assert saved_bytes(lambda: model(x), model) == 64 * one


def test_a_stage_is_what_comes_before_the_last_down_sampling():
    assert checkpoint_(ResNet(), "stages").converted == ("layer1.0", "layer1.1")
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU()]
    plain = nn.Sequential(*layers)
    model = copy.deepcopy(plain)
    assert checkpoint_(model, "stages").converted == ("0", "1", "2")
    x = torch.randn(2, 3, 12, 12)
    loss = lambda m: m(x).square().sum()
    assert_equal(outcome(model, loss), outcome(plain, loss))


# -- what is chosen ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (["blocks.1", "re:blocks\\.3"], ["blocks.1", "blocks.3"]),
        (["*.attention"], [f"blocks.{i}.attention" for i in range(BLOCKS)]),
        (lambda module, path: path in ("blocks.0", "blocks.0.mlp"), ["blocks.0"]),
        ("ratio:0.5", ["blocks.0", "blocks.2"]),
        ("every:3", ["blocks.0", "blocks.3"]),
    ],
)
def test_modules_by_pattern_and_function(policy, expected):
    model, loss = made("gpt")
    want = outcome(copy.deepcopy(model), loss)
    assert list(checkpoint_(model, policy).converted) == expected
    assert_equal(outcome(model, loss), want)


def test_each_pattern_of_a_mapping_has_its_policy():
    model, loss = made("t5")
    want = outcome(copy.deepcopy(model), loss)
    report = checkpoint_(model, {"encoder": "every:3", "decoder": "segments:2", "decoder.final_layer_norm": None})
    decoder = [f"decoder.block.{i}" for i in range(BLOCKS)]
    assert report.converted == ("encoder.block.0", "encoder.block.3", *decoder)
    assert_equal(outcome(model, loss), want)


# -- models that change -----------------------------------------------------------------------------------------------
def test_it_is_undone_copied_and_pickled():
    plain, loss = made("llama")
    want, model = outcome(copy.deepcopy(plain), loss), copy.deepcopy(plain)
    checkpoint_(model, "sqrt")
    block = model.model.layers[0]
    assert isinstance(block, type(plain.model.layers[0])) and type(block).__name__ == "CheckpointedLlamaDecoderLayer"
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin.model.layers[0]) is type(block)
        assert_equal(outcome(twin, loss), want)
        assert saved_bytes(lambda twin=twin: loss(twin), twin) == saved_bytes(lambda: loss(model), model)
    checkpoint_(model, "every:2")
    assert sum(type(layer).__name__.startswith("Checkpointed") for layer in model.modules()) == 2
    assert uncheckpoint_(model).converted == ("model.layers.0", "model.layers.2")
    assert uncheckpoint_(model).converted == ()
    for one, other in zip(model.modules(), plain.modules(), strict=True):
        assert type(one) is type(other) and vars(one).keys() == vars(other).keys()
    assert_equal(outcome(model, loss), want)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("first", ["prepare", "checkpoint"])
@pytest.mark.parametrize("recipe", ["int8-stochastic", "fp8-delayed"])
def test_low_bit_training_replays_in_segments(recipe, first):
    def run(policy: str | None) -> list[Tensor | None]:
        model, loss = made("gpt")
        if policy and first == "checkpoint":
            checkpoint_(model, policy)
        lb.train.prepare_(model, recipe)
        if policy and first == "prepare":
            checkpoint_(model, policy)
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(2):
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16):
                    value = loss(model)
                value.backward()
                seen.append(value.detach())
            seen += [p.grad for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    want = run(None)
    for policy in ("block", "sqrt", "attention", "save_matmuls"):
        assert_equal(run(policy), want)


def test_nothing_happens_without_gradients():
    model, loss = made("gpt")
    model.eval()
    want = loss(model)
    checkpoint_(model)
    with torch.no_grad():
        value = loss(model)
    assert same_bits(value, want.detach()) and value.grad_fn is None


def test_frozen_models_with_trained_additions_train():
    """Blocks whose inputs have no gradients, as with LoRA."""
    x, grads = torch.randn(4, 16), []
    for policy in (None, "block", "segments:2"):
        model = chain(4).requires_grad_(False)
        model[2].up.requires_grad_(True)
        if policy:
            checkpoint_(model, policy)
        model(x).sum().backward()
        grads.append(model[2].up.weight.grad)
    assert same_bits(grads[0], grads[1]) and same_bits(grads[0], grads[2])


def test_backward_goes_twice_and_second_derivatives_are_those():
    x = torch.randn(4, 16)
    found = []
    for policy in (None, "sqrt"):
        model = chain(4)
        if policy:
            checkpoint_(model, policy)
        given = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(given).square().sum(), given, create_graph=True)
        grad.square().sum().backward(retain_graph=True)
        grad.square().sum().backward()
        found.append(given.grad)
    assert same_bits(*found)


def test_segments_may_be_entered_anywhere_and_left_early():
    model = chain(6)
    checkpoint_(model, "segments:2")
    plain, x = chain(6), torch.randn(4, 16)
    for order in ([0, 2], [1, 2, 5], [4], [2, 1, 0], [0, 0, 1]):
        found = []
        for one in (plain, model):
            y = x.clone().requires_grad_()
            z = y
            for index in order:
                z = one[index](z) * 2
                z += 1  # in place, between blocks
            z.square().sum().backward()
            found.append(y.grad)
        assert same_bits(*found), order


@pytest.mark.parametrize(("policy", "inputs"), [("block", 9), ("sqrt", 3)])
def test_kept_inputs_are_moved_to_a_directory(tmp_path, policy, inputs):
    plain, x = chain(9), torch.randn(2048, 16)
    want = outcome(plain, lambda m: m(x * 1).square().sum())
    model = copy.deepcopy(plain)
    checkpoint_(model, policy, to=tmp_path)
    held = lambda: sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    for one in (model, copy.deepcopy(model)):
        loss = one(x * 1).square().sum()
        assert held() == (inputs - 2) * x.nbytes, "all but the first, which the call of the model holds, and the last"
        loss.backward()
        del loss
        one.zero_grad()
        assert held() == 0
    assert_equal(outcome(model, lambda m: m(x * 1).square().sum()), want)


@pytest.mark.parametrize("policy", ["block", "save_matmuls"])
def test_compiled_models_recompute(policy):
    plain, x = chain(3), torch.randn(4, 16)
    model = copy.deepcopy(plain)
    checkpoint_(model, policy)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss = lambda m: m(x).square().sum()
    loss(compiled).backward()
    loss(plain).backward()
    assert all(same_bits(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    checkpoint_(model, "sqrt")
    with pytest.raises(Exception, match="recomputes one module at a time"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(x)


@pytest.mark.parametrize("first", ["checkpoint", "shard"])
def test_sharded_blocks_are_gathered_for_their_segment(first):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, plain, x = chain(4), chain(4), torch.randn(4, 16)
        if first == "checkpoint":
            checkpoint_(model, "sqrt")
        mesh = dist.init_device_mesh("cpu", (1,))
        for module in (*model, model):
            fsdp.fully_shard(module, mesh=mesh)
        if first == "shard":
            checkpoint_(model, "sqrt")
        for one in (model, plain):
            one(x).square().sum().backward()
        for got, want in zip(model.parameters(), plain.parameters(), strict=True):
            assert same_bits(got.grad.to_local(), want.grad)
        assert len(uncheckpoint_(model).layers) == 4 and same_bits(model(x), plain(x))
    finally:
        dist.destroy_process_group()


def test_checkpointing_of_transformers_gives_way():
    model, loss = made("llama")
    want = outcome(copy.deepcopy(model), loss)
    model.gradient_checkpointing_enable()
    report = checkpoint_(model)
    assert not model.is_gradient_checkpointing and "takes its place" in str(report)
    model.gradient_checkpointing_enable()
    calls = []
    hook = type(model.model.layers[0].mlp).forward
    type(model.model.layers[0].mlp).forward = lambda self, x: calls.append(1) or hook(self, x)
    try:
        with pytest.warns(UserWarning, match="takes the place of transformers' gradient checkpointing"):
            got = outcome(model, loss)
    finally:
        type(model.model.layers[0].mlp).forward = hook
    assert_equal(got, want)
    assert len(calls) == 2 * BLOCKS


def test_a_cache_with_tokens_is_refused_in_training():
    model, _ = made("llama")
    tokens = torch.randint(3, 60, (1, 4))
    cache = model(tokens).past_key_values
    checkpoint_(model)
    with pytest.raises(ValueError, match=r"expected an empty cache for 'model\.layers\.0'"):
        model(tokens, past_key_values=cache)
    assert model.eval()(tokens).past_key_values.get_seq_length() == 4


# -- what cannot be replayed ------------------------------------------------------------------------------------------
class Odd(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how, self.count = nn.Linear(8, 8), how, 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.how == "in place":
            return self.inner(nn.functional.relu(x, inplace=True))
        if self.how == "counter":
            return self.inner(x).double().sin().float() if self.count == 1 else self.inner(x).sin()
        if self.how == "fewer":
            return self.inner(x).sin().cos() if self.count == 1 else self.inner(x)
        width = random.randint(1, 10**6) % 997 + 1
        return x + (self.inner(x)[..., None] * torch.ones(width)).sin().mean(-1)


@pytest.mark.parametrize("policy", ["block", "segments:1"])
@pytest.mark.parametrize("how", ["in place", "counter", "fewer", "random"])
def test_what_cannot_be_replayed_is_named_in_the_first_step(how, policy):
    model = nn.Sequential(nn.Linear(8, 8), nn.ModuleDict({"blocks": nn.Sequential(Odd(how), Odd(how))})["blocks"])
    checkpoint_(model, policy)
    message = "'1.0'.* writes to a tensor" if how == "in place" else r"'1\.[01]' computes something else in backward"
    with pytest.raises(NotReplayed, match=message):
        model(torch.randn(4, 8)).sum().backward()


def test_a_write_to_a_kept_input_afterwards_is_named():
    model = chain(2)
    checkpoint_(model)
    x = torch.randn(4, 16)
    y = model(x)
    x.zero_()
    with pytest.raises(NotReplayed, match="an input of the checkpointed '0' has been written to since"):
        y.sum().backward()


def stepped(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    y.sum().backward(retain_graph=True)
    optimizer.step()
    return y


def put_in_place(model: nn.Module, x: Tensor) -> Tensor:
    others = {name: (2 * p).detach().requires_grad_() for name, p in model.named_parameters()}
    return torch.func.functional_call(model, others, (x,))


@pytest.mark.parametrize("policy", ["block", "segments:1", "save_matmuls"])
@pytest.mark.parametrize("change", [stepped, put_in_place])
def test_weights_that_change_before_backward_are_named(change, policy):
    """Gradients would be those of weights that forward did not have."""
    model = chain(2)
    checkpoint_(model, policy)
    with pytest.raises(NotReplayed, match=r"'.*weight' of the checkpointed '[01]' has been written to or replaced"):
        change(model, torch.randn(4, 16)).sum().backward()


def test_weights_that_forward_writes_to_or_that_step_in_backward_have_changed_by_right():
    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.5, 0.5)
            return (x @ self.weight).tanh() + self.bias  # whose gradient is complete before anything is asked for

    plain = nn.Sequential(*(Clamped() for _ in range(2)))
    want, model, x = copy.deepcopy(plain), copy.deepcopy(plain), torch.randn(4, 16)
    checkpoint_(model)
    for one in (want, model):
        optimizer = lb.optim.in_backward_(one, lb.optim.AdamW)
        for _ in range(2):
            one(x).square().sum().backward()
            optimizer.step()
    assert_equal(list(model.parameters()), list(want.parameters()))


def test_threads_do_not_share_the_frames_of_a_segment():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    inputs = [torch.randn(8, 16) for _ in range(24)]

    def gradient(x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(model(x).square().sum(), x)[0]

    want = [gradient(x) for x in inputs]
    checkpoint_(model, "segments:2")
    with ThreadPoolExecutor(4) as pool:
        assert all(map(torch.equal, pool.map(gradient, inputs), want))
