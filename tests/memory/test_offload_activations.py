"""Activations in files: equal bits, what is moved and what is not, and what remains after errors."""

from __future__ import annotations

import errno
import gc
import math
import os
import re
import time
import weakref

import pytest
import torch
import torch.nn.functional as F
from support.peaks import resident_peak
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowbit as lb
from lowbit.offload import activations
from lowbit.storage import directory


class Block(nn.Module):
    """A feed-forward block with a norm, whose products are what a step keeps most of."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def chain(blocks: int = 4) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(Block() for _ in range(blocks)))


def gradients(model, x, context=None):
    """Loss and gradients of a step, whose forward is in ``context``."""
    model.zero_grad()
    torch.manual_seed(2)
    if context is None:
        loss = model(x).square().mean()
    else:
        with context:
            loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def same(left, right) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def files(directory) -> list[str]:
    return [name for _, _, names in os.walk(directory) for name in names]


PREPARE = {
    "plain": lambda model: None,
    "checkpointed": lb.memory.checkpoint_,
    "fp8": lambda model: lb.train.prepare_(model, "fp8"),
    "fp8 checkpointed": lambda model: (lb.train.prepare_(model, "fp8"), lb.memory.checkpoint_(model)),
}


@pytest.mark.parametrize("kind", PREPARE)
def test_losses_and_gradients_keep_their_bits(tmp_path, kind):
    model, x = chain(), torch.randn(64, 64)
    PREPARE[kind](model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = gradients(model, x)
    context = lb.memory.offload_activations(tmp_path, min_bytes=1024)
    for _ in range(2):
        model.load_state_dict(state)
        assert same(gradients(model, x, context), expected)
    assert context.traffic.out_bytes >= 2 * 3 * x.nbytes, "inputs of blocks at least"
    assert not files(tmp_path), "what was read back is gone"


def test_all_but_the_last_activations_are_moved(tmp_path):
    model, x = chain(), torch.randn(64, 64)
    kept = lb.memory.saved_bytes(lambda: model(x), model)
    context = lb.memory.offload_activations(tmp_path, min_bytes=0)
    gradients(model, x, context)
    assert 0.7 * kept < context.traffic.out_bytes <= kept
    assert "moved away" in str(context)


def test_checkpoint_of_torch_that_is_not_reentrant(tmp_path):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = chain()

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    model, x = Checkpointed(), torch.randn(64, 64)
    context = lb.memory.offload_activations(tmp_path, min_bytes=0)
    assert same(gradients(model, x, context), gradients(model, x))
    assert context.traffic.out_bytes == 3 * x.nbytes, "the inputs of all blocks but the caller's own"


def test_a_storage_is_moved_once_and_comes_back_as_the_views_that_were_kept(tmp_path):
    x = torch.randn(2, 32, 3 * 64, requires_grad=True)

    def run():
        q, k, v = (x * 1.5).view(2, 32, 3, 4, 16).permute(2, 0, 3, 1, 4).unbind()
        return (q @ k.mT / 4).softmax(-1).matmul(v).square().sum()

    expected = torch.autograd.grad(run(), x)[0]
    context = lb.memory.offload_activations(tmp_path, min_bytes=x.nbytes)
    with context:
        loss = run()
        (x * 2).square().sum()  # moves what is free by now
    assert context.traffic.out_bytes % x.nbytes == 0 and context.traffic.out_bytes <= 3 * x.nbytes
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


def test_what_the_caller_holds_stays(tmp_path):
    model, held = chain(), []
    for block in model:
        for layer in block.children():
            layer.register_forward_hook(lambda _, args, y: held.extend((*args, y)))
    F_gelu_inputs = 4 * 64 * 256 * 4  # what hooks see of it is its output, which the next layer is given
    context = lb.memory.offload_activations(tmp_path, min_bytes=64 * 64 * 4)
    gradients(model, torch.randn(64, 64), context)
    assert context.traffic.out_bytes <= F_gelu_inputs
    frozen = chain().requires_grad_(False)
    context = lb.memory.offload_activations(tmp_path, min_bytes=0)
    with context:
        y = F.linear(torch.randn(8, 64, requires_grad=True), frozen[0].up.weight.t().t()).sum()
    y.backward()
    assert context.traffic.out_bytes == 0, "parameters, and views of them"


def test_writing_to_a_kept_tensor_is_the_error_that_it_is_without(tmp_path):
    x = torch.randn(64, 64, requires_grad=True)
    with lb.memory.offload_activations(tmp_path, min_bytes=0):
        y = torch.sigmoid(x)
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_graph_that_is_retained_and_one_of_second_order(tmp_path):
    x = torch.randn(64, 64, requires_grad=True)

    def run():
        y = x
        for _ in range(12):
            y = (y * 1.01).sin()
        return y.sum()

    def second(loss):
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        return first.detach(), *torch.autograd.grad(first.square().sum(), x)

    expected = second(run())
    context = lb.memory.offload_activations(tmp_path, min_bytes=0)
    with context:
        loss = run()
    assert context.traffic.out_bytes > 10 * x.nbytes
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(loss, x, retain_graph=True)[0], expected[0])
    assert same(second(loss), expected)
    del loss
    gc.collect()
    assert not files(tmp_path)


def test_compiled_models(tmp_path):
    model, x = chain(2), torch.randn(64, 64)
    compiled = torch.compile(model, backend="aot_eager")
    expected = gradients(compiled, x)
    assert same(gradients(compiled, x, lb.memory.offload_activations(tmp_path, min_bytes=0)), expected)


# -- errors ------------------------------------------------------------------------------------------------------------
class Fails(torch.autograd.Function):
    """Fails on the way back."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("on the way back")


def _forward_fails(model, x):
    model(x)
    raise ArithmeticError("on the way")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_errors_leave_neither_files_nor_descriptors_nor_memory(tmp_path, where):
    model, x = chain(2), torch.randn(64, 64)
    context = lb.memory.offload_activations(tmp_path, min_bytes=0)
    alive: list[weakref.ref] = []
    model[0].up.register_forward_hook(lambda _, args, y: alive.append(weakref.ref(y)))

    def step():
        with context:
            if where == "forward":
                _forward_fails(model, x)
            y = model[1](Fails.apply(model[0](x))).sum()
        y.backward()

    descriptors = None
    for _ in range(50):
        with pytest.raises(ArithmeticError):
            step()
        if descriptors is None:
            descriptors = len(os.listdir("/proc/self/fd"))
    gc.collect()
    last = context.target.park(torch.zeros(8, dtype=torch.uint8))
    last.write.result()  # after all that was queued before
    last.discard()
    activations_left = [ref for ref in alive if ref() is not None]
    assert not activations_left and len(context._waiting) == len(context._moved) == 0
    for _, _, names in os.walk(tmp_path):
        assert not names
    assert context.target.files.used == 0
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_an_exceeded_budget_is_an_error_and_nothing_is_lost(tmp_path):
    model, x = chain(), torch.randn(64, 64)
    expected = gradients(model, x)
    with pytest.raises(OSError, match=r"in use exceed the budget of 97.66 KiB; raise budget=") as error:
        gradients(model, x, lb.memory.offload_activations(tmp_path, min_bytes=0, budget="100KB"))
    assert error.value.errno == errno.ENOSPC
    del error
    gc.collect()
    assert not files(tmp_path)
    assert same(gradients(model, x, lb.memory.offload_activations(tmp_path, budget=1 << 30)), expected)


def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"the disk has no room for 256 B more .*; free some"):
        gradients(chain(), torch.randn(64, 64), lb.memory.offload_activations(tmp_path, min_bytes=0))
    assert not files(tmp_path)


def test_a_failing_disk_loses_nothing(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    x = torch.randn(64, 64, requires_grad=True)
    context = lb.memory.offload_activations(tmp_path, min_bytes=0)
    expected = torch.autograd.grad((x * 2).sin().cos().sum(), x)[0]
    monkeypatch.setattr(directory, "write", broken)
    with pytest.raises(OSError, match=r"in memory still: .*Input/output error"):
        for _ in range(100):
            with context:
                loss = (x * 2).sin().cos().sum()
            assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


@pytest.mark.parametrize("name", ["min_bytes", "budget"])
@pytest.mark.parametrize("value", [-1, 1.5, math.nan, math.inf, True, []])
def test_numbers_of_bytes_that_are_none(tmp_path, name, value):
    with pytest.raises(ValueError, match=rf"{name} is a number of bytes.* got {re.escape(repr(value))}; "):
        lb.memory.offload_activations(tmp_path, **{name: value})
    assert not list(tmp_path.iterdir())


def test_texts_that_are_no_numbers_of_bytes(tmp_path):
    with pytest.raises(ValueError, match="min_bytes is a number of bytes, got 'a'"):
        lb.memory.offload_activations(tmp_path, min_bytes="a")
    with pytest.raises(ValueError, match="'-1GB' is no size"):
        lb.memory.offload_activations(tmp_path, budget="-1GB")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so of tensors on the CPU, wherever they come from")
def test_host_memory_for_tensors_on_the_cpu_moves_nothing_and_says_so_once(recwarn):
    activations._warn_of_cpu.cache_clear()
    model, x = chain(), torch.randn(64, 64)
    context = lb.memory.offload_activations("cpu", min_bytes=0)
    assert same(gradients(model, x, context), gradients(model, x))
    gradients(model, x, context)
    assert [str(w.message) for w in recwarn if "nothing is offloaded" in str(w.message)] and len(recwarn) == 1
    assert context.traffic.out_bytes == 0


# -- the process -------------------------------------------------------------------------------------------------------
def test_the_resident_peak_of_the_process_falls_by_most_of_the_activations(tmp_path):
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(40))), torch.randn(16384, 64)
    whole = 40 * x.nbytes  # of each layer its output
    without = resident_peak(lambda: gradients(model, x))
    with_files = resident_peak(lambda: gradients(model, x, lb.memory.offload_activations(tmp_path)))
    assert without > whole
    assert without - with_files > 0.5 * whole


def test_a_tensor_that_is_written_to_and_then_let_go_of_is_an_error_as_without(tmp_path):
    x = torch.randn(512, 1024, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"), lb.memory.offload_activations(tmp_path):
        y = x.sigmoid()
        y.mul_(2)
        z = y.exp()
        del y
        z.tanh().sum().backward()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("policy", [None, "block"])
def test_an_estimate_of_a_step_with_offload_is_what_it_holds_at_most(tmp_path, policy):
    context, x = lb.memory.offload_activations(tmp_path), torch.randn(512, 64)
    model = chain(6)

    def both(model, batch, loss):
        with context:
            loss(model(batch), batch).backward()
        model.zero_grad()

    def loss(output, batch):
        return output.square().mean()

    plain = lb.estimate(model, x, loss, optimizer=None, checkpoint=policy)
    expected = lb.estimate(model, x, loss, optimizer=None, checkpoint=policy, accumulate=both)
    assert context.traffic.out_bytes == 0, "an estimate writes nothing"
    if policy is not None:
        lb.memory.checkpoint_(model, policy)
    gc.collect()
    held = lb.memory.profile(model, x, lambda batch: both(model, batch, loss))
    held_bytes = held.peak_bytes - held.by_kind.get("other", 0)
    largest = 512 * 256 * 4  # the last copy may be on its way, or done
    assert expected.peak_bytes - largest <= held_bytes <= 1.01 * expected.peak_bytes
    assert expected.peak_bytes <= (0.7 if policy is None else 1) * plain.peak_bytes


@pytest.mark.parametrize("delay", [0.0, 0.01])
def test_how_fast_a_disk_is_does_not_change_what_is_held(tmp_path, monkeypatch, delay):
    """Bytes are dropped by the caller's thread: a profiler sees no other."""
    model, x = chain(), torch.randn(64, 64)
    context, write = lb.memory.offload_activations(tmp_path, min_bytes=0), directory.write
    monkeypatch.setattr(directory, "write", lambda *given: (time.sleep(delay), write(*given), time.sleep(delay)))
    gradients(model, x, context)

    def forward():
        with context:
            kept.append(model(x))

    kept = []
    assert lb.memory.allocated_peak(forward) < 0.5 * lb.memory.allocated_peak(lambda: kept.append(model(x)))
