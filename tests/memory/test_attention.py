"""Attention in tiles, against softmax over all scores in fp64; and which kernels serve it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowbit.memory import allocated_peak, attention, attention_backends


def sequences(*shape: int, kv: int, keys: int, value: int | None = None, seed: int = 0, dtype=torch.float64):
    """q of ``shape``, and k and v of as many batches with ``kv`` heads."""
    generator = torch.Generator().manual_seed(seed)
    batch, _, _, dim = shape
    shapes = (shape, (batch, kv, keys, dim), (batch, kv, keys, dim if value is None else value))
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes)


def all_scores(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False, window: int | None = None,
    scale: float | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """The definition. A row that sees no key is 0."""
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask
    seen = torch.ones(scores.shape, dtype=torch.bool) if mask is None or mask.dtype != torch.bool else mask
    ahead = torch.arange(k.shape[2]) - torch.arange(q.shape[2]).unsqueeze(1)
    if causal:
        seen = seen & (ahead <= 0)
    if window is not None:
        seen = seen & (ahead.abs() < window)
    seen = seen & (scores > -torch.inf)
    weights = scores.masked_fill(~seen, -1e30).softmax(-1).masked_fill(~seen, 0)
    return weights @ v.repeat_interleave(group, 1)


def gradients(out: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad((out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)).sum(), leaves)


def masks(kind: str, batch: int, heads: int, queries: int, keys: int) -> Tensor | None:
    hidden = torch.rand(batch, heads, queries, keys) < 0.4
    return {
        "none": None,
        "of keys": ~hidden[:, :1, :1],
        "of all": ~hidden,
        "of rows": ~hidden[0, 0],
        "added": torch.randn(batch, heads, queries, keys).double().masked_fill_(hidden, -torch.inf),
        "added by head": torch.randn(heads, 1, keys).double(),
    }[kind]


@given(
    batch=st.integers(1, 2), kv=st.integers(1, 2), group=st.integers(1, 3), queries=st.integers(1, 7),
    keys=st.integers(1, 7), value=st.integers(1, 3), causal=st.booleans(), window=st.sampled_from([None, 1, 3]),
    softcap=st.sampled_from([None, 0.7]), scale=st.sampled_from([None, 0.3]), chunk=st.integers(1, 70),
    kind=st.sampled_from(["none", "of keys", "of all", "of rows", "added", "added by head"]), seed=st.integers(0, 99),
)  # fmt: skip
def test_fp64_outputs_and_gradients_are_those_of_all_scores(
    batch, kv, group, queries, keys, value, causal, window, softcap, scale, chunk, kind, seed
):
    q, k, v = sequences(batch, kv * group, queries, 2, kv=kv, keys=keys, value=value, seed=seed)
    mask = masks(kind, batch, kv * group, queries, keys)
    leaves = [q, k, v]
    if kind.startswith("added"):
        leaves.append(mask.requires_grad_())
    out = attention(q, k, v, mask, causal, window, scale, softcap, chunk=chunk)
    expected = all_scores(q, k, v, mask, causal, window, scale, softcap)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for found, wanted in zip(gradients(out, *leaves), gradients(expected, *leaves), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": "of keys"}, {"scale": 0.2}])
@pytest.mark.parametrize("kv", [4, 2])
def test_torchs_kernels_and_tiles_agree(options, kv):
    q, k, v = sequences(2, 4, 9, 8, kv=kv, keys=11)
    given_mask = masks(options["mask"], 2, 4, 9, 11) if "mask" in options else None
    options = options | {"mask": given_mask}
    assert attention_backends(q, k, v, **options).chosen == "flash"
    out, tiled = attention(q, k, v, **options), attention(q, k, v, chunk=30, **options)
    torch.testing.assert_close(out, tiled, rtol=1e-12, atol=1e-12)
    for found, wanted in zip(gradients(out, q, k, v), gradients(tiled, q, k, v), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_in_fp32(dtype):
    dim, keys = 16, 200
    q, k, v = sequences(1, 4, 60, dim, kv=2, keys=keys, dtype=dtype)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out, expected = attention(q, k, v, chunk=2000), F.scaled_dot_product_attention(*exact, enable_gqa=True)
    # A score sums dim products and is scaled; a probability is off by exp of two errors of that, and sums round a term.
    score = (
        2.0**-24 * (dim + 2) * (exact[0].abs() @ exact[1].abs().transpose(-2, -1).repeat_interleave(2, 1)).amax() / 4
    )
    share = 2 * score + 2.0**-24 * (2 * keys + 8)
    largest = exact[2].abs().amax()
    lost = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0.0
    assert out.dtype == dtype
    assert ((out.double() - expected).abs() <= share * largest + lost * expected.abs()).all()
    for found, wanted in zip(gradients(out, q, k, v), gradients(expected, *exact), strict=True):
        error = (found.double() - wanted).abs().max() / wanted.abs().max()
        assert found.dtype == dtype and error < 64 * torch.finfo(dtype).eps


def test_queries_that_see_no_key_give_zeros_and_no_gradients():
    q, k, v = sequences(1, 2, 4, 3, kv=2, keys=4)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    for chunk in (None, 3):
        out = attention(q, k, v, mask, chunk=chunk)
        assert not out[:, :, 2].any() and out[:, :, 1].all()
        found = gradients(out, q, k, v)
        assert not found[0][:, :, 2].any() and all(g.isfinite().all() for g in found)
    windowed = attention(*sequences(1, 1, 6, 3, kv=1, keys=2), causal=True, window=2)
    assert not windowed[:, :, 3:].any() and windowed[:, :, :3].all()


def test_dropout_scales_what_it_keeps_and_backward_drops_the_same():
    q, k, _ = sequences(1, 2, 40, 4, kv=1, keys=50)
    v = torch.eye(50, dtype=torch.float64).expand(1, 1, 50, 50).contiguous().requires_grad_()  # out: probabilities
    whole = all_scores(q, k, v)

    def dropped(seed: int, **options: Any) -> Tensor:
        torch.manual_seed(seed)
        return attention(q, k, v, dropout=0.25, chunk=300, **options)

    out = dropped(0)
    kept = out != 0
    torch.testing.assert_close(out, torch.where(kept, whole / 0.75, 0), rtol=1e-12, atol=0)
    assert abs(kept.double().mean() - 0.75) < 5 * (0.25 * 0.75 / kept.numel()) ** 0.5
    assert torch.equal(dropped(0), out) and not torch.equal(dropped(1), out)
    for found, wanted in zip(gradients(out, q, k), gradients(whole * kept / 0.75, q, k), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


def test_tiles_that_nobody_sees_are_skipped():
    q, k, v = sequences(1, 1, 64, 4, kv=1, keys=64)
    with torch.no_grad():
        k[:, :, 40:], v[:, :, 40:] = torch.nan, torch.nan
        out = attention(q, k, v, causal=True, window=8, chunk=64)
    assert out[:, :, :40].isfinite().all() and out[:, :, 40:].isnan().all()


@pytest.mark.parametrize("options", [{"window": 64}, {"softcap": 5.0}])
def test_memory_grows_with_the_length(options):
    def peak(length: int) -> int:
        q, k, v = sequences(1, 1, length, 8, kv=1, keys=length, dtype=torch.float32)
        return allocated_peak(lambda: attention(q, k, v, causal=True, chunk=1 << 12, **options).sum().backward())

    short, long = peak(512), peak(1024)
    assert long < 2 * short and long < 4 * (16 * 1024 * 8 + 6 * (1 << 12))


def test_autocast_casts_what_it_casts_of_sdpa():
    q, k, v = sequences(1, 2, 5, 4, kv=2, keys=5, dtype=torch.float32)
    rounded = [t.detach().bfloat16() for t in (q, k, v)]
    for options in ({}, {"softcap": 2.0}):
        with torch.autocast("cpu", torch.bfloat16):
            out = attention(q, k, v, torch.zeros(5, 5), **options)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, attention(*rounded, torch.zeros(5, 5, dtype=torch.bfloat16), **options))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "window": 3, "chunk": 12}])
def test_compiled_code_has_the_same_gradients(options):
    q, k, v = sequences(1, 2, 5, 4, kv=1, keys=5)

    def attend(*tensors: Tensor) -> Tensor:
        return attention(*tensors, causal=True, **options)

    expected = attend(q, k, v)
    found = torch.compile(attend, backend="aot_eager", fullgraph=True)(q, k, v)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)
    for got, want in zip(gradients(found, q, k, v), gradients(expected, q, k, v), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


# -- who serves --------------------------------------------------------------------------------------------------------
@given(
    heads=st.sampled_from([(4, 4), (4, 2)]), queries=st.integers(0, 3), keys=st.integers(0, 3),
    value=st.sampled_from([8, 4]), causal=st.booleans(), dropout=st.sampled_from([0.0, 0.1]),
    mask=st.sampled_from([None, (1, 1), (1, 1, 1, 1), (4, 1, 1)]), learned=st.booleans(), turned=st.booleans(),
)  # fmt: skip
def test_flash_serves_on_a_cpu_what_torch_chooses_it_for(
    heads, queries, keys, value, causal, dropout, mask, learned, turned
):
    q, k, v = sequences(2, heads[0], queries, 8, kv=heads[1], keys=keys, value=value)
    if turned:
        q = q.transpose(2, 3).contiguous().transpose(2, 3)
    mask = None if mask is None or causal else torch.zeros(mask, dtype=torch.float64, requires_grad=learned)
    chosen = torch._fused_sdp_choice(q, k, v, mask, dropout, causal, scale=None, enable_gqa=heads[0] != heads[1])
    serves = attention_backends(q, k, v, mask, causal, dropout=dropout).chosen == "flash"
    assert serves == (SDPBackend(chosen) == SDPBackend.FLASH_ATTENTION)


def test_backends_say_why_not():
    q, k, v = sequences(1, 2, 3, 4, kv=2, keys=3)
    assert str(attention_backends(q, k, v)) == "flash  supported\ntiles  supported"
    for options, reason in (
        ({"window": 2}, "has no window"),
        ({"softcap": 2.0}, "has no softcap"),
        ({"mask": torch.ones(3, 3).bool(), "causal": True}, "takes a mask or causal, not both"),
        ({"dropout": 0.1}, "has no dropout"),
    ):
        told = attention_backends(q, k, v, **options)
        assert told.reasons == {"flash": reason, "tiles": None} and told.chosen == "tiles"
    with sdpa_kernel(SDPBackend.MATH):
        assert "switched off by sdpa_kernel" in str(attention_backends(q, k, v))


# -- what is refused ---------------------------------------------------------------------------------------------------
def test_gradients_of_gradients_are_refused_with_words():
    q, k, v = sequences(1, 2, 3, 4, kv=2, keys=3)
    with pytest.raises(RuntimeError, match=r"no gradients of gradients.*use softmax"):
        torch.autograd.grad(attention(q, k, v, window=2).sum(), q, create_graph=True)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.ones(3, 4)}, ValueError, r"expected q, k and v \[batch, heads, length, dim\], got q \[3, 4\]"),
        ({"k": torch.ones(1, 2, 4, 4)}, ValueError, r"k and v of as many heads and keys, got .* k \[1, 2, 4, 4\]"),
        ({"q": torch.ones(1, 3, 3, 4)}, ValueError, "heads that are a multiple of kv heads, got 3 and 2"),
        ({"q": torch.ones(1, 2, 3, 4).half()}, TypeError, "expected one floating-point dtype"),
        ({"mask": torch.ones(3, 3).long()}, TypeError, "a mask of bool or torch.float32 as q is, got torch.int64"),
        ({"mask": torch.ones(2, 3)}, ValueError, r"a mask that broadcasts to \[1, 2, 3, 3\], got \[2, 3\]"),
        ({"window": 0}, ValueError, "window is positive, got 0"),
        ({"softcap": -1.0}, ValueError, "softcap is positive, got -1.0"),
        ({"dropout": 1.0}, ValueError, "dropout is from 0 to below 1, got 1.0"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_words(change, error, message):
    arguments = {name: torch.ones(1, 2, 3, 4) for name in ("q", "k", "v")}
    with pytest.raises(error, match=message):
        attention(**(arguments | change))


def test_rows_that_a_mask_hides_by_the_least_number_have_gradients_of_equal_weights():
    """Of the least number log n is lost: such a row's probabilities are 1/n each."""
    q, k, v = sequences(1, 1, 8, 4, kv=1, keys=8, dtype=torch.float32)
    mask = torch.full((8, 8), torch.finfo(torch.float32).min).triu(1)
    mask[:, :3] = mask[0, 1]
    expected = torch.softmax(q @ k.mT * 0.5 + mask, -1) @ v
    out = attention(q, k, v, mask, chunk=64)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    for found, wanted in zip(gradients(out, q, k, v), gradients(expected, q, k, v), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_compiled_tiles_have_gradients_of_what_is_written_in_place():
    def both(q, a, v):
        k = a.new_empty(1, 2, 8, 4)
        k[..., :2].copy_(a[..., :2])
        k[..., 2:].copy_(a[..., 2:])
        return attention(q, k, v, causal=True).sum()

    tensors = [torch.randn(1, 2, 8, dim, requires_grad=True) for dim in (4, 4, 6)]
    expected = torch.autograd.grad(both(*tensors), tensors)
    found = torch.autograd.grad(torch.compile(both, backend="eager")(*tensors), tensors)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
