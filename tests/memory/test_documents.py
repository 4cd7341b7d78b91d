"""Attention within documents, against softmax over all scores with a block mask; and its memory."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import lowbit as lb
from lowbit.memory import allocated_peak, attention, attention_backends
from lowbit.tiled.attention_tiles import AttentionCall, _joined_documents
from lowbit.tiled.documents import documents_of


def sequences(batch: int, kv: int, group: int, length: int, dim: int, seed: int = 0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, kv * group, length, dim), *[(batch, kv, length, dim)] * 2)
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes)


def ids_of(*rows: list[int]) -> Tensor:
    """Documents of the given lengths in each row. Neighbours differ, and numbers occur again."""
    return torch.stack([torch.arange(len(row)).remainder(2).repeat_interleave(torch.tensor(row)) for row in rows])


def block_mask(ids: Tensor) -> Tensor:
    """By definition: no number between two positions differs from theirs."""
    rows, length = ids.shape
    mask = torch.zeros(rows, 1, length, length, dtype=torch.bool)
    for row in range(rows):
        for a in range(length):
            for b in range(a, length):
                mask[row, 0, a, b] = mask[row, 0, b, a] = bool((ids[row, a : b + 1] == ids[row, a]).all())
    return mask


def all_scores(q, k, v, seen: Tensor, causal=False, window=None, softcap=None, added=None) -> Tensor:
    group, length = q.shape[1] // k.shape[1], q.shape[2]
    scores = q @ k.repeat_interleave(group, 1).transpose(-2, -1) * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if added is not None:
        scores = scores + added
    ahead = torch.arange(length) - torch.arange(length).unsqueeze(1)
    if causal:
        seen = seen & (ahead <= 0)
    if window is not None:
        seen = seen & (ahead.abs() < window)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.repeat_interleave(group, 1)


def gradients(out: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad((out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)).sum(), leaves)


def lengths(total: int):
    """Lengths of documents that fill a row."""
    return st.sets(st.integers(1, total - 1)).map(
        lambda cuts: [stop - start for start, stop in pairwise([0, *sorted(cuts), total])]
    )


@given(
    rows=st.integers(2, 12).flatmap(lambda length: st.lists(lengths(length), min_size=1, max_size=3)),
    shared=st.booleans(), kv=st.integers(1, 2), group=st.integers(1, 3), causal=st.booleans(),
    window=st.sampled_from([None, 1, 3]), softcap=st.sampled_from([None, 0.7]), added=st.booleans(),
    chunk=st.sampled_from([None, 1, 9, 40]), seed=st.integers(0, 99),
)  # fmt: skip
def test_outputs_and_gradients_are_those_of_a_block_mask(
    rows, shared, kv, group, causal, window, softcap, added, chunk, seed
):
    ids = ids_of(*rows)
    length = ids.shape[1]
    if shared:
        ids = ids[0]
    q, k, v = sequences(len(rows), kv, group, length, 4, seed)
    bias = torch.randn(kv * group, length, length, dtype=torch.float64).requires_grad_() if added else None
    out = attention(q, k, v, bias, causal, window, softcap=softcap, chunk=chunk, documents=ids)
    seen = block_mask(ids.view(-1, length))
    expected = all_scores(q, k, v, seen, causal, window, softcap, bias)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    leaves = (q, k, v, bias) if added else (q, k, v)
    for found, wanted in zip(gradients(out, *leaves), gradients(expected, *leaves), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


ROWS = ([5, 70, 1, 124], [200], [1, 1, 150, 48])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_bits_are_those_of_sdpa_on_each_document_alone(dtype, causal):
    q, k, v = sequences(3, 2, 3, 200, 16, dtype=dtype)
    ids, weight = ids_of(*ROWS), torch.randn(3, 6, 200, 16).to(dtype)
    assert attention_backends(q, k, v, causal=causal, documents=ids).chosen == "flash"
    out = attention(q, k, v, causal=causal, documents=ids)
    found = torch.autograd.grad(out, (q, k, v), weight)
    for row, sizes in enumerate(ROWS):
        bounds = torch.tensor([0, *sizes]).cumsum(0).tolist()
        for start, stop in pairwise(bounds):
            part = [t[row : row + 1, :, start:stop].detach().clone().requires_grad_() for t in (q, k, v)]
            alone = F.scaled_dot_product_attention(*part, is_causal=causal, enable_gqa=True)
            assert torch.equal(out[row, :, start:stop], alone[0])
            wanted = torch.autograd.grad(alone, part, weight[row : row + 1, :, start:stop])
            for mine, theirs in zip(found, wanted, strict=True):
                assert torch.equal(mine[row, :, start:stop], theirs[0])


def test_gradients_of_a_sum_and_of_views_are_those_of_a_block_mask():
    q, k, v = sequences(2, 2, 2, 20, 8, dtype=torch.float32)
    ids = ids_of([7, 13], [20])
    views = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    for parts in ((q, k, v), views):
        found = torch.autograd.grad(attention(*parts, causal=True, documents=ids).sum(), parts)
        wanted = torch.autograd.grad(all_scores(*parts, block_mask(ids), causal=True).sum(), parts)
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ids", [ids_of(*ROWS), ids_of([90, 110])])
def test_kernels_of_other_devices_are_joined_to_the_same_results(ids):
    q, k, v = sequences(3, 2, 2, 200, 16)
    call = AttentionCall(q, k, v, None, None, True, None, 0.25, None, 0.0, documents=documents_of(ids))
    out, wanted = _joined_documents(call, call.documents), attention(q, k, v, causal=True, documents=ids)
    assert torch.equal(out, wanted) and out.stride() == wanted.stride()
    for mine, theirs in zip(gradients(out, q, k, v), gradients(wanted, q, k, v), strict=True):
        assert torch.equal(mine, theirs)


def test_dropout_stays_within_documents():
    q, k, _ = sequences(2, 1, 2, 40, 4)
    v = torch.eye(40, dtype=torch.float64).expand(2, 1, 40, 40).contiguous()  # out: probabilities
    ids = ids_of([15, 25], [40])
    torch.manual_seed(0)
    out = attention(q, k, v, dropout=0.25, documents=ids)
    whole = all_scores(q, k, v, block_mask(ids))
    kept = out != 0
    torch.testing.assert_close(out, torch.where(kept, whole / 0.75, 0), rtol=1e-12, atol=0)
    assert abs(kept.sum() / (whole > 0).sum() - 0.75) < 0.05


def test_windows_that_no_document_exceeds_leave_the_kernel_and_one_document_is_a_plain_call():
    q, k, v = sequences(1, 1, 1, 30, 8)
    ids = ids_of([10, 20])
    chosen = {window: attention_backends(q, k, v, causal=True, window=window, documents=ids).chosen
              for window in (20, 19)}  # fmt: skip
    assert chosen == {20: "flash", 19: "tiles"}
    plain = attention(q, k, v, causal=True)
    assert torch.equal(attention(q, k, v, causal=True, documents=torch.zeros(30, dtype=torch.uint8)), plain)
    mask = torch.ones(30, 30, dtype=torch.bool)
    reasons = attention_backends(q, k, v, mask, documents=ids).reasons
    assert reasons["flash"] == "takes a mask or documents, not both"


@pytest.mark.parametrize("options", [{}, {"window": 64}, {"softcap": 5.0}])
def test_memory_is_linear_and_far_below_the_mask(options):
    def peak(length: int) -> int:
        q, k, v = sequences(1, 1, 2, length, 16, dtype=torch.float32)
        ids = ids_of([256] * (length // 256))
        return allocated_peak(lambda: attention(q, k, v, causal=True, documents=ids, **options).sum().backward())

    short, long = peak(4096), peak(8192)
    assert long < 2.1 * short and 6 * long < 8192**2


def test_an_estimate_reads_known_documents_and_equals_the_measured_peak():
    class Attends(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(32, 96)

        def forward(self, x, ids):
            q, k, v = self.inner(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
            return attention(q, k, v, causal=True, documents=ids)

    model, batch = Attends(), {"x": torch.randn(2, 2048, 32), "ids": ids_of([1000, 1048], [2000, 48])}
    estimated = lb.estimate(model, batch, lambda out, _: out.square().mean(), optimizer=None)
    measured = lb.memory.profile(model, batch, lambda batch: model(**batch).square().mean().backward())
    of_step = measured.peak_bytes - measured.by_kind.get("other", 0)
    assert estimated.peak_bytes == pytest.approx(of_step, rel=0.01)


def test_compiled_code_breaks_its_graph_for_documents():
    q, k, v = sequences(1, 1, 2, 12, 8)
    ids = ids_of([5, 7])

    def attend(q: Tensor) -> Tensor:
        return attention(q * 1, k, v, causal=True, documents=ids) * 2

    found = torch.compile(attend, backend="eager")(q)
    assert torch.equal(found, attend(q)) and torch.equal(*(gradients(out, q)[0] for out in (found, attend(q))))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"documents": torch.zeros(3, 5).long()}, ValueError, r"expected documents \[2, 5\] or \[5\].* got \[3, 5\]"),
        ({"documents": torch.zeros(4).long()}, ValueError, r"of at least one position, got \[4\]; give the document"),
        ({"documents": torch.zeros(5)}, TypeError, "documents of an integer dtype, got torch.float32"),
        ({"documents": torch.zeros(5).bool()}, TypeError, "documents of an integer dtype, got torch.bool"),
        ({"q": torch.ones(2, 2, 1, 4)}, ValueError, "as many queries as keys with documents, got 1 and 5"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_words(change, error, message):
    arguments = {name: torch.ones(2, 2, 5, 4) for name in ("q", "k", "v")} | {"documents": torch.zeros(5).long()}
    with pytest.raises(error, match=message):
        attention(**(arguments | change))


def test_gradients_of_gradients_are_refused_with_words():
    q, k, v = sequences(1, 1, 1, 6, 8)
    with pytest.raises(RuntimeError, match=r"of documents has no gradients of gradients"):
        torch.autograd.grad(attention(q, k, v, documents=ids_of([3, 3])).sum(), q, create_graph=True)
