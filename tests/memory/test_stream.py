"""Streamed blocks: the bits of those that are in memory, in forward, backward, training and state."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.peaks import resident_peak
from torch import nn

import lowbit as lb
from lowbit.models.wrap import wrapper_of
from lowbit.offload import streaming as stream
from lowbit.offload.streaming import stream_blocks_, unstream_


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("seen", torch.zeros(2048))

    def forward(self, x):
        self.seen += 1
        return x + self.down(F.gelu(self.up(self.norm(x))))


def network() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(64, 64), nn.Sequential(*(Block() for _ in range(4))), nn.Linear(64, 64))


@pytest.fixture(params=["mapped", "copied"])
def kind(request, monkeypatch):
    """Mapped files, as on a CPU, and copies that come and go, as on a CUDA device, whose memory a CPU stands for."""
    if request.param == "copied":
        monkeypatch.setattr(stream, "_storage_class", lambda tensors: stream._Copied)
    return request.param


def train(model, optimizer, steps=3):
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        for part in range(2):
            torch.manual_seed(10 * number + part)
            loss = model(torch.randn(32, 64)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
    return losses


def same(left, right) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


PREPARE = {
    "plain": lambda model: None,
    "frozen": lambda model: model[1].requires_grad_(False),
    "checkpointed before": lb.memory.checkpoint_,
    "fp8": lambda model: lb.train.prepare_(model, "fp8"),
}


@pytest.mark.parametrize("name", [*PREPARE, "checkpointed after"])
def test_training_keeps_its_bits(tmp_path, kind, name):
    results = []
    for streamed in (False, True):
        model = network()
        PREPARE.get(name, PREPARE["plain"])(model)
        if streamed:
            report = stream_blocks_(model, tmp_path)
            assert len(report.layers) == 4
        if name == "checkpointed after":
            lb.memory.checkpoint_(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = train(model, optimizer)
        results.append([*losses, *(value.clone() for value in model.state_dict().values())])
        if streamed and name not in ("checkpointed after",):
            unstream_(model)
            assert same(results[0], [*losses, *model.state_dict().values()])
    assert same(*results)


def test_weights_leave_memory_between_uses(tmp_path, monkeypatch):
    """Of copies that come and go at most two blocks' are there at a time, also while autograd keeps the graph."""
    monkeypatch.setattr(stream, "_storage_class", lambda tensors: stream._Copied)
    model = network()
    stream_blocks_(model, tmp_path)
    blocks = wrapper_of(model[1][0], stream.Streamed).stream.blocks
    counts = []

    def count(*_):
        counts.append(sum(block.copies is not None for block in blocks))

    for block in model[1]:
        block.up.register_forward_hook(count)
        block.up.register_full_backward_hook(count)
    loss = model(torch.randn(8, 64)).sum()
    assert not blocks[0].loaded and not blocks[1].loaded
    loss.backward()
    assert len(counts) == 8 and max(counts) == 2
    assert not any(block.loaded for block in blocks)


def test_quantized_layers_and_inference(tmp_path, kind):
    model = network().eval()
    lb.quantize_(model, "int4-weight-only:group32")
    x = torch.randn(8, 64)
    with torch.no_grad():
        expected = model(x)
        stream_blocks_(model, tmp_path)
        assert torch.equal(model(x), expected) and torch.equal(model(x), expected)
        unstream_(model)
    assert not list(tmp_path.iterdir())
    with torch.no_grad():
        assert torch.equal(model(x), expected)


def test_activations_and_states_elsewhere_as_well(tmp_path, kind):
    results = []
    for offloaded in (False, True):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if offloaded:
            stream_blocks_(model, tmp_path)
            lb.optim.offload_(optimizer, tmp_path, gradients=kind == "mapped")
        context = lb.memory.offload_activations(tmp_path, min_bytes=0)
        for _ in range(2):
            optimizer.zero_grad()
            torch.manual_seed(0)
            with context:
                loss = model(torch.randn(32, 64)).square().mean()
            loss.backward()
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    assert context.traffic.out_bytes > 0 and same(*results)


def test_state_is_loaded_into_streamed_blocks(tmp_path, kind):
    model, other = network().eval(), network().eval()
    for parameter in other.parameters():
        nn.init.normal_(parameter, std=0.1)
    x = torch.randn(4, 64)
    stream_blocks_(model, tmp_path)
    model(x)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(x), other(x))


def test_a_weight_that_changes_between_forward_and_backward_is_an_error(tmp_path, kind):
    model = network()
    stream_blocks_(model, tmp_path)
    loss = model(torch.randn(8, 64)).sum()
    with torch.no_grad():
        model[1][1].up.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 1)  # goes on


def test_shared_weights_stay_and_wrong_arguments_are_errors(tmp_path):
    model = network()
    model[1][1].up.weight = model[1][0].up.weight
    stream_blocks_(model, tmp_path)
    x = torch.randn(8, 64)
    model(x).sum().backward()
    with pytest.raises(ValueError, match="streamed already"):
        stream_blocks_(model, tmp_path)
    lb.train.compress_activations_(model)
    model[1][0].forward = partial(lambda forward, x: forward(x), model[1][0].forward)
    with pytest.raises(ValueError, match=r"the forward of 1\.0 has been replaced since"):
        unstream_(model)
    del model[1][0].forward
    assert len(unstream_(model).layers) == 4 and len(lb.train.uncompress_activations_(model).layers) > 4
    with pytest.raises(ValueError, match="found none in Linear"):
        stream_blocks_(nn.Linear(4, 4), tmp_path)
    with pytest.raises(ValueError, match="got others"):
        stream_blocks_(network(), tmp_path, blocks=[nn.Linear(4, 4)])
    with pytest.raises(ValueError, match="this one is on the CPU"):
        stream_blocks_(network(), "cpu")
    with pytest.raises(ValueError, match=r"'1\.0\.norm\.weight' is on the meta device; load them first"):
        half = network()
        half[1][0].to("meta")
        stream_blocks_(half, tmp_path)
    assert len(unstream_(network()).layers) == 0


def test_resident_memory_holds_a_few_blocks(tmp_path):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(24))).requires_grad_(False)
    stream_blocks_(model, tmp_path)
    x = torch.randn(4, 1024, requires_grad=True)
    peak = resident_peak(lambda: [model(x).sum().backward() for _ in range(2)])
    assert peak < 8 * (4 << 20), "of 24 blocks of 4 MiB"


def test_weights_that_are_not_in_files_any_more_are_left_alone(tmp_path):
    """After ``double`` and in copies they lie on the heap, of which no page may be dropped."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32)) for _ in range(64)))
    x = torch.randn(4, 32)
    want = model(x).detach()
    lb.memory.stream_blocks_(model, tmp_path)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(twin(x), want)
            assert torch.equal(model(x), want)
        model.double()
        for _ in range(2):
            assert torch.allclose(model(x.double()), want.double(), atol=1e-5)


def pages_of_files(directory: Path) -> int:
    """Bytes of the scratch files in a directory that are the process's."""
    ours, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line[:1].isupper():
            ours = str(directory) in line
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not tell of its pages")
def test_pages_of_one_block_at_a_time_are_the_process_s_and_none_after_a_step(tmp_path):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(6)))
    lb.memory.stream_blocks_(model, tmp_path)
    optimizer = lb.optim.offload_(torch.optim.AdamW(model.parameters()), tmp_path, gradients=True)
    found, x = [], torch.randn(4, 512)
    for block in model:
        block.register_forward_hook(lambda *_: found.append(pages_of_files(tmp_path)))
    for _ in range(3):
        model(x).sum().backward()
        optimizer.step()
        assert pages_of_files(tmp_path) == 0
        optimizer.zero_grad()
    one = 512 * 512 * 4
    assert len(found) == 18 and one <= max(found) <= one + 4 * 4096
