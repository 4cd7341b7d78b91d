"""Estimates know the whole numbers that a forward looks at before it chooses what to compute."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lowbit as lb
from lowbit.memory.fake import Routed, fake_batch, fake_tensors, value_of

OPS = (
    lambda t: t.cumsum(-1), lambda t: torch.diff(t, dim=-1), lambda t: t[:, 1:], lambda t: t.flip(0),
    lambda t: (t > 2), lambda t: t.masked_fill(t == 1, 5), lambda t: t.T.contiguous(), lambda t: t.sum(0, keepdim=True),
    lambda t: torch.cat((t, t * 3), 1), lambda t: t.unsqueeze(1).expand(-1, 2, -1).flatten(1),
    lambda t: torch.arange(t.shape[-1]) - t, lambda t: t.clone().clamp_(min=1), lambda t: t.nonzero(),
    lambda t: torch.where(t > 0, t, t + 7), lambda t: t.to(torch.int32), lambda t: t.unique().reshape(1, -1),
    lambda t: torch.stack(t.unbind(0)), lambda t: t.split(2, 1)[1], lambda t: t.topk(2, 0)[0], lambda t: t.sort(1)[1],
)  # fmt: skip


@given(st.lists(st.sampled_from(OPS), max_size=6), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_values_go_through_ops(chain, seed):
    start = torch.randint(4, (3, 6), generator=torch.Generator().manual_seed(seed))
    expected, lengths = start, []
    for op in chain:
        if expected.numel() == 0 or min(expected.shape) < 2:
            break
        expected = op(expected)
        lengths.append(op)
    with fake_tensors() as mode:
        found = fake_batch(start, mode, None)
        for op in lengths:
            found = op(found)
        value = value_of(found)
    assert found.shape == expected.shape and found.stride() == expected.stride() and found.dtype == expected.dtype
    assert value.dtype == expected.dtype and torch.equal(value, expected)


def test_what_is_written_by_nobody_knows_what_is_lost_in_every_view():
    with fake_tensors() as mode:
        ids = fake_batch(torch.arange(6).reshape(2, 3), mode, None)
        row, other = ids[0], ids + 1
        row.fill_(4)
        assert value_of(ids).tolist() == [[4, 4, 4], [3, 4, 5]]
        row.copy_(torch.randn(3) > 0)
        assert value_of(ids) is value_of(row) is value_of(ids[1]) is None
        assert value_of(other).tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    "write",
    [
        lambda t: torch._foreach_add_([t], 1),
        lambda t: torch._foreach_copy_([t], [torch.randint(9, (4,))]),
        lambda t: torch.sort(torch.randn(4), out=(torch.empty(4), t)),
        lambda t: setattr(t, "data", torch.randint(9, (7,))),
    ],
)
def test_every_write_is_noticed(write):
    with fake_tensors():
        numbers = torch.zeros(4, dtype=torch.long)
        assert value_of(numbers).tolist() == [0, 0, 0, 0]
        write(numbers)
        assert value_of(numbers) is None


def test_random_and_fresh_numbers_have_no_value():
    with fake_tensors():
        assert value_of(torch.randint(5, (3,))) is value_of(torch.empty(3, dtype=torch.long)) is None
        assert value_of(torch.randn(3)) is value_of(torch.ones(3)) is None
        assert value_of(torch.ones(2, dtype=torch.bool)).tolist() == [True, True]


def test_numbers_of_a_known_tensor_are_read_one_by_one():
    with fake_tensors() as mode:
        ids = fake_batch(torch.arange(6).reshape(2, 3), mode, None)
        assert ids.tolist() == [[0, 1, 2], [3, 4, 5]] and [int(one) for one in ids[1]] == [3, 4, 5]


@pytest.mark.parametrize("axis", [0, -1])
def test_a_router_chooses_the_first_experts_where_asked_to(axis):
    numbers = torch.tensor([[3, 1, 2], [1, 9, 4], [0, 5, 6]])
    with fake_tensors() as mode:
        known = fake_batch(numbers, mode, None)
        with Routed():
            chosen = torch.randn(5, 4).topk(2, axis)[1]
            largest = known.topk(1)[1]
        rows = value_of(chosen).tolist()
        assert rows == ([[0] * 4, [1] * 4] if axis == 0 else [[0, 1]] * 5) and chosen.unique().tolist() == [0, 1]
        assert value_of(largest).tolist() == [[0], [1], [2]]
        assert value_of(torch.randn(5, 4).topk(2, axis)[1]) is None


class Masked(nn.Module):
    """Needs scores of [T, T] where its mask hides something."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.register_buffer("enough", torch.tensor(4))

    def forward(self, x, mask):
        y = self.layer(x)
        if bool(mask.all()) and int(self.enough) == 4:
            return y
        scores = (y @ y.mT).masked_fill(~mask[:, None, :], 0)
        return scores.softmax(-1) @ y


def allocated(model, batch):
    def step():
        lb.memory.usual_loss(model(**batch), batch).backward()
        for parameter in model.parameters():
            parameter.grad = None

    step()
    gc.collect()
    tensors = {
        t.untyped_storage().data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers(), *batch.values())
    }
    return lb.memory.allocated_peak(step, "cpu") + sum(tensors.values())


@pytest.mark.parametrize("hidden", [0, 1])
def test_a_forward_that_looks_at_its_mask_goes_the_way_it_will_go(hidden):
    torch.manual_seed(0)
    batch = {"x": torch.randn(2, 64, 32), "mask": torch.ones(2, 64, dtype=torch.bool)}
    batch["mask"][:, 64 - hidden :] = False
    model = Masked()
    assert lb.estimate(model, batch, optimizer=None).peak_bytes == pytest.approx(allocated(model, batch), rel=0.02)
    assert torch.equal(model.enough, torch.tensor(4))


def test_a_value_that_the_forward_computes_from_others_is_not_known():
    class Routed(nn.Linear):
        def forward(self, x):
            return super().forward(x) * int(x.sum())

    with pytest.raises(ValueError, match=r"reads values of tensors.*profile a real step"):
        lb.estimate(Routed(8, 8), torch.randn(2, 8))


def llama(**settings):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, use_cache=False, attention_dropout=0.0, **settings,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("given_mask", ["none", "full", "padded"])
def test_a_mask_of_transformers_is_made_where_it_hides_something(given_mask):
    torch.manual_seed(0)
    model, batch = llama(), {"input_ids": torch.randint(256, (2, 384))}
    if given_mask != "none":
        batch["attention_mask"] = torch.ones(2, 384, dtype=torch.long)
        batch["attention_mask"][:, 384 - 40 * (given_mask == "padded") :] = 0
    assert lb.estimate(model, batch, optimizer=None).peak_bytes == pytest.approx(allocated(model, batch), rel=0.02)


def test_a_batch_without_values_takes_the_longest_way():
    model = llama()
    batch = {"input_ids": torch.zeros(2, 384, dtype=torch.long), "attention_mask": torch.ones(2, 384, dtype=torch.long)}
    known = lb.estimate(model, batch, optimizer=None).peak_bytes
    meta = {name: tensor.to("meta") for name, tensor in batch.items()}
    assert lb.estimate(model, meta, optimizer=None).peak_bytes > known


def test_a_tensor_that_a_batch_has_twice_is_one():
    ids = torch.zeros(2, 3, dtype=torch.long)
    with fake_tensors() as mode:
        made = fake_batch({"input_ids": ids, "labels": ids, "others": [ids, ids.clone()]}, mode, None)
    assert made["input_ids"] is made["labels"] is made["others"][0] is not made["others"][1]
