"""Cross-entropy without logits, against torch's with them in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowbit.memory import allocated_peak, linear_cross_entropy

IGNORED = -100


def given_tensors(rows: int, features: int, classes: int, seed: int = 0, dtype: torch.dtype = torch.float64):
    """hidden, weight, bias, and targets of which some are ignored."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((rows, features), (classes, features), (classes,))
    )
    targets = torch.randint(classes, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < 0.25] = IGNORED
    return hidden, weight, targets, bias


def with_logits(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, softcap: float | None = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    logits = F.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    return F.cross_entropy(logits, targets, **options)


def gradients(loss: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(
        (loss * torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).view_as(loss)).sum(), leaves
    )


@given(
    rows=st.integers(1, 9), features=st.integers(1, 5), classes=st.integers(1, 23), chunk=st.integers(1, 60),
    reduction=st.sampled_from(["mean", "sum", "none"]), smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    softcap=st.sampled_from([None, 1.5]), has_bias=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_fp64_losses_and_gradients_are_torchs(
    rows, features, classes, chunk, reduction, smoothing, softcap, has_bias, seed
):
    hidden, weight, targets, bias = given_tensors(rows, features, classes, seed)
    leaves = (hidden, weight, bias) if has_bias else (hidden, weight)
    options = {"reduction": reduction, "label_smoothing": smoothing, "softcap": softcap}
    loss = linear_cross_entropy(hidden, weight, targets, bias if has_bias else None, chunk=chunk, **options)
    expected = with_logits(hidden, weight, targets, bias if has_bias else None, **options)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    for found, wanted in zip(gradients(loss, *leaves), gradients(expected, *leaves), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_in_fp32(dtype):
    rows, features, classes = 64, 32, 700
    hidden, weight, targets, bias = given_tensors(rows, features, classes, dtype=dtype)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    loss = linear_cross_entropy(hidden, weight, targets, bias, chunk=4000)
    expected = with_logits(exact[0], exact[1], targets, exact[2])
    assert loss.dtype == torch.float32
    # A logit sums 33 terms, and a row's log-sum-exp classes more of them: relative rounding 2^-24 each.
    terms = F.linear(exact[0].abs(), exact[1].abs(), exact[2].abs()).amax().item()
    logit = 2.0**-24 * (features + 2) * terms
    assert abs(loss - expected) <= 2 * logit + 2.0**-24 * classes
    found = torch.autograd.grad(loss, (hidden, weight, bias))
    wanted = torch.autograd.grad(expected, exact)
    counted = (targets != IGNORED).sum()
    # A probability is off by exp of a logit's and the log-sum-exp's error; sums of them round once a term.
    share = 3 * logit + 2.0**-24 * (classes + 4)
    hidden_terms, weight_terms = exact[1].abs().amax().item(), exact[0].abs().amax().item()
    bounds = (2 * hidden_terms / counted, rows * weight_terms / counted, rows / counted)
    lost = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0
    for got, want, bound in zip(found, wanted, bounds, strict=True):
        assert got.dtype == dtype
        subnormal = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        assert ((got.double() - want).abs() <= bound * (share + 2.0**-24 * rows) + lost * want.abs() + subnormal).all()


def test_rounded_products_are_those_of_linear_in_half_precision():
    """Losses are those of F.linear's logits, and gradients are not further from exact ones than F.linear's."""
    hidden, weight, targets, bias = given_tensors(64, 32, 700, dtype=torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, targets, bias, reduction="none", chunk=4000, rounded=True)
    products = F.linear(hidden, weight).float() + bias.float()
    by_hand = F.cross_entropy(products, targets, ignore_index=IGNORED, reduction="none")
    torch.testing.assert_close(loss, by_hand, rtol=2e-6, atol=2e-6)
    found = torch.autograd.grad(loss.sum(), (hidden, weight, bias))
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    expected = with_logits(exact[0], exact[1], targets, exact[2], reduction="sum")
    plain = F.cross_entropy(F.linear(hidden, weight, bias).float(), targets, ignore_index=IGNORED, reduction="sum")
    theirs = torch.autograd.grad(plain, (hidden, weight, bias))
    for got, their, want in zip(found, theirs, torch.autograd.grad(expected, exact), strict=True):
        assert got.dtype == torch.bfloat16
        assert (got.double() - want).norm() < 1.1 * (their.double() - want).norm()
    full = hidden.detach().float(), weight.detach().float(), targets
    assert torch.equal(linear_cross_entropy(*full, rounded=True), linear_cross_entropy(*full))


def test_autocast_casts_what_it_casts_of_linear():
    hidden, weight, targets, bias = given_tensors(8, 16, 40, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets, bias)
    rounded = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight, bias)]
    expected = linear_cross_entropy(rounded[0], rounded[1], targets, rounded[2])
    assert torch.equal(loss, expected) and loss.dtype == torch.float32
    found, wanted = (torch.autograd.grad(*pair) for pair in ((loss, (hidden, weight)), (expected, rounded[:2])))
    assert all(torch.equal(a, b.float()) and a.dtype == torch.float32 for a, b in zip(found, wanted, strict=True))


def test_all_targets_ignored_gives_what_torch_gives():
    hidden, weight, targets, _ = given_tensors(4, 3, 5)
    targets.fill_(IGNORED)
    for reduction in ("mean", "sum", "none"):
        loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction)
        expected = with_logits(hidden, weight, targets, reduction=reduction)
        torch.testing.assert_close(loss, expected, rtol=0, atol=0, equal_nan=True)
        for found, wanted in zip(
            gradients(loss, hidden, weight), gradients(expected, hidden, weight), strict=True
        ):  # fmt: skip
            assert torch.equal(found, wanted) and not found.any()


@pytest.mark.parametrize("frozen", [0, 1, 3])
def test_what_needs_no_gradient_has_none(frozen):
    tensors = list(given_tensors(6, 3, 11))
    tensors[frozen] = tensors[frozen].detach()
    leaves = [t for t in tensors if t.requires_grad]
    found = torch.autograd.grad(linear_cross_entropy(*tensors, chunk=20), leaves)
    wanted = torch.autograd.grad(with_logits(*tensors), leaves)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-13) for a, b in zip(found, wanted, strict=True))
    with torch.no_grad():
        assert not linear_cross_entropy(*tensors).requires_grad


def test_repeated_calls_and_repeated_backward_have_equal_bits():
    hidden, weight, targets, bias = given_tensors(65, 33, 1000, dtype=torch.float32)
    first, second = (linear_cross_entropy(hidden, weight, targets, bias, chunk=9000) for _ in range(2))
    assert torch.equal(first, second)
    runs = [torch.autograd.grad(first, (hidden, weight, bias), retain_graph=True) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_sequences_and_transposed_weights():
    hidden, weight, targets, _ = given_tensors(6, 3, 11)
    of_columns = weight.detach().t().contiguous().t().requires_grad_()
    assert not of_columns.is_contiguous()
    loss = linear_cross_entropy(hidden.view(2, 3, 3), of_columns, targets.view(2, 3), reduction="none")
    expected = with_logits(hidden, weight, targets, reduction="none")
    torch.testing.assert_close(loss, expected.view(2, 3), rtol=1e-12, atol=1e-12)
    (found,), (wanted,) = gradients(loss, of_columns), gradients(expected, weight)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_no_rows():
    hidden, weight, targets, _ = given_tensors(0, 3, 5)
    loss = linear_cross_entropy(hidden, weight, targets, reduction="sum")
    assert loss == 0 and not torch.autograd.grad(loss, weight)[0].any()
    assert linear_cross_entropy(hidden, weight, targets).isnan()


def test_logits_are_never_made():
    rows, classes, chunk = 256, 20_000, 1 << 16
    hidden, weight, targets, _ = given_tensors(rows, 16, classes, dtype=torch.float32)

    def peak(loss: Any, **options: int) -> int:
        def run() -> object:
            return torch.autograd.grad(loss(hidden, weight, targets, **options), (hidden, weight))

        return allocated_peak(run)

    gradient, tile = 4 * classes * 16, 4 * chunk
    assert peak(linear_cross_entropy, chunk=chunk) <= gradient + 3 * tile + 4 * rows * 64
    assert peak(with_logits) > 2 * 4 * rows * classes


def test_compiled_code_has_the_same_gradients():
    hidden, weight, targets, bias = given_tensors(8, 4, 30)

    def loss(*tensors: Tensor) -> Tensor:
        return linear_cross_entropy(*tensors, label_smoothing=0.1, softcap=2.0, chunk=60)

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    expected = loss(hidden, weight, targets, bias)
    found = compiled(hidden, weight, targets, bias)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    for got, want in zip(
        torch.autograd.grad(found, (hidden, weight, bias)),
        torch.autograd.grad(expected, (hidden, weight, bias)),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


# -- what is refused ---------------------------------------------------------------------------------------------------
def test_gradients_of_gradients_are_refused_with_words():
    hidden, weight, targets, _ = given_tensors(4, 3, 5)
    loss = linear_cross_entropy(hidden, weight, targets)
    with pytest.raises(RuntimeError, match=r"no gradients of gradients.*use F\.cross_entropy"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight": torch.ones(5, 4)}, ValueError, r"\[classes, features\], got hidden \[4, 3\] and weight \[5, 4"),
        ({"targets": torch.ones(3).long()}, ValueError, r"expected a target for each row, shape \[4\], got \[3\]"),
        ({"targets": torch.ones(4)}, TypeError, "classes in int64, got torch.float32"),
        ({"targets": torch.tensor([0, 5, 1, 1])}, IndexError, "classes from 0 to 4, got 5"),
        ({"targets": torch.tensor([0, -1, 1, 1])}, IndexError, "classes from 0 to 4, got -1"),
        ({"bias": torch.ones(4)}, ValueError, r"expected bias \[5\], got \[4\]"),
        ({"weight": torch.ones(5, 3).half()}, TypeError, "expected one floating-point dtype"),
        ({"reduction": "all"}, ValueError, "reduction is one of mean, sum, none; got 'all'"),
        ({"label_smoothing": 2.0}, ValueError, "label_smoothing is from 0 to 1, got 2.0"),
        ({"softcap": 0.0}, ValueError, "softcap is positive, got 0.0"),
        ({"chunk": 0}, ValueError, "chunk is positive, got 0"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_words(change, error, message):
    arguments = {"hidden": torch.ones(4, 3), "weight": torch.ones(5, 3), "targets": torch.ones(4).long()}
    with pytest.raises(error, match=message):
        linear_cross_entropy(**(arguments | change))
