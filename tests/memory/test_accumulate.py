"""Parts of a batch, whose weighted losses and gradients are those of the whole batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lowbit as lb
from lowbit.memory import accumulation_weights, micro_batches
from tests.support.processes import run_processes

IGNORED = -100


def language_batch(samples: int, length: int, kept: float, seed: int) -> dict[str, Tensor]:
    """Tokens, and labels of which a share ``kept`` counts, very unevenly among samples; at least one does."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.rand(samples, 1, generator=generator) * 2 * kept
    labels = torch.randint(7, (samples, length), generator=generator)
    labels[torch.rand(samples, length, generator=generator) > share] = IGNORED
    labels[samples // 2, 0] = 3
    return {"x": torch.randn(samples, length, 5, generator=generator, dtype=torch.float64), "labels": labels}


def mean_loss(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(part["x"]).flatten(0, 1), part["labels"].flatten(), ignore_index=IGNORED)


def accumulated(model: nn.Module, batch: Any, /, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for part, weight in micro_batches(batch, *args, **kwargs):
        loss = weight * mean_loss(model, part)
        loss.backward()
        total += loss.detach()
    return total, torch.cat([p.grad.flatten() for p in model.parameters()])


def whole(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    loss = mean_loss(model, batch)
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


@given(
    samples=st.integers(1, 9), length=st.integers(1, 6), parts=st.integers(1, 11), by_size=st.booleans(),
    kept=st.sampled_from([0.05, 0.5, 1.0]), seed=st.integers(0, 99),
)  # fmt: skip
def test_unequal_parts_sum_to_the_loss_and_the_gradients_of_the_whole(samples, length, parts, by_size, kept, seed):
    batch, model = language_batch(samples, length, kept, seed), nn.Linear(5, 7).double()
    how = {"size": parts} if by_size else {"parts": parts}
    loss, gradient = accumulated(model, batch, targets="labels", **how)
    expected, expected_gradient = whole(model, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


def test_in_fp32_the_sums_of_rounded_terms_bound_the_difference():
    batch = language_batch(12, 30, 0.4, 0) | {"x": language_batch(12, 30, 0.4, 0)["x"].float()}
    model = nn.Linear(5, 7)
    _, gradient = accumulated(model, batch, 5, targets="labels")
    _, expected = whole(model, batch)
    # A gradient is a sum of 360 terms p * x / count, |p| <= 1. Each side rounds a term about 16 times (the softmax of
    # 7 logits of 5 products, the product, the weight) and the sum 360 times.
    term = batch["x"].abs().amax() / (batch["labels"] != IGNORED).sum()
    assert (gradient - expected).abs().max() <= 2 * (360 + 16) * 360 * term * 2.0**-24


def test_the_mean_of_the_means_is_another_number():
    batch, model = language_batch(8, 6, 0.3, 1), nn.Linear(5, 7).double()
    with_equal_weights = torch.stack([mean_loss(model, part) for part, _ in micro_batches(batch, 3)]).mean()
    assert abs(with_equal_weights - mean_loss(model, batch)) > 1e-3


@given(samples=st.integers(1, 20), number=st.integers(1, 25))
def test_parts_hold_every_sample_once_and_in_order(samples, number):
    batch = torch.arange(3 * samples).view(samples, 3)
    by_parts = [part for part, _ in micro_batches(batch, number)]
    assert torch.equal(torch.cat(by_parts), batch) and len(by_parts) == min(samples, number)
    assert max(map(len, by_parts)) - min(map(len, by_parts)) <= 1
    by_size = [part for part, _ in micro_batches(batch, size=number)]
    assert torch.equal(torch.cat(by_size), batch)
    assert all(len(part) == number for part in by_size[:-1]) and 1 <= len(by_size[-1]) <= number
    weights = [weight for _, weight in micro_batches(batch, size=number)]
    assert sum(weights) == pytest.approx(1, abs=1e-15) and weights[0] == min(number, samples) / samples


def test_what_has_no_samples_is_in_every_part():
    class Extra(NamedTuple):
        scale: Tensor
        name: str

    mask, scale, x = torch.ones(7, 7), torch.tensor(2.0), torch.arange(8.0).view(4, 2)
    batch = {"x": x, "pair": (x + 1, [x + 2]), "mask": mask, "extra": Extra(scale, "n"), "use": None}
    first, second = (part for part, _ in micro_batches(batch, 2))
    assert torch.equal(second["x"], x[2:]) and torch.equal(second["pair"][1][0], x[2:] + 2)
    assert first["mask"] is mask and first["extra"] == Extra(scale, "n") and first["use"] is None
    assert first["x"].data_ptr() == x.data_ptr()


def test_targets_are_found_by_a_function_and_by_an_index():
    labels = torch.tensor([[5, IGNORED, IGNORED], [1, 2, 3]])
    batch = (torch.zeros(2, 3), labels)
    assert [w for _, w in micro_batches(batch, 2, targets=1)] == [1 / 4, 3 / 4]
    shifted = micro_batches(batch, 2, targets=lambda part: part[1][:, 1:])
    assert [(part[1].tolist(), w) for part, w in shifted] == [([[1, 2, 3]], 1.0)]  # the first has none, and is left out
    assert [w for _, w in micro_batches(batch, 2, targets=1, ignore_index=3)] == [3 / 5, 2 / 5]


def test_without_any_target_the_loss_is_that_of_the_whole():
    batch = {"x": torch.randn(4, 2, 5).double(), "labels": torch.full((4, 2), IGNORED)}
    model = nn.Linear(5, 7).double()
    assert accumulated(model, batch, 2, targets="labels")[0].isnan() and mean_loss(model, batch).isnan()


def test_separate_batches_have_the_weights_of_their_union():
    batch, model = language_batch(9, 6, 0.5, 2), nn.Linear(5, 7).double()
    batches = [{key: value[a:b] for key, value in batch.items()} for a, b in ((0, 2), (2, 3), (3, 9))]
    weights = accumulation_weights(batches, targets="labels")
    total = sum(w * mean_loss(model, part) for w, part in zip(weights, batches, strict=True) if w)
    torch.testing.assert_close(total, mean_loss(model, batch), rtol=1e-12, atol=0)
    assert accumulation_weights(batches) == [2 / 9, 1 / 9, 6 / 9]


def test_a_scaled_loss_accumulates_the_same_step():
    batch, model = language_batch(8, 6, 0.5, 3), nn.Linear(5, 7).double()
    _, expected = whole(model, batch)
    scaler = lb.train.LossScaler(init_scale=1024.0)
    model.zero_grad()
    for part, weight in micro_batches(batch, 3, targets="labels"):
        scaler.scale(weight * mean_loss(model, part)).backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(found, 1024 * expected, rtol=1e-12, atol=1e-12)


# -- several processes -------------------------------------------------------------------------------------------------
def _in_process(rank: int, path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}/meeting", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Linear(5, 7).double()
    batch = language_batch(6, 4, 0.5, 0)
    _, expected = whole(model, batch)
    mine = {key: value[:2] if rank == 0 else value[2:] for key, value in batch.items()}
    parallel = DistributedDataParallel(model)
    exchanges = []
    model.register_forward_pre_hook(lambda *_: exchanges.append(parallel.require_backward_grad_sync))
    _, gradient = accumulated(parallel, mine, 3 - rank, targets="labels", model=parallel)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
    assert exchanges.count(True) == 1 and exchanges[-1], "DDP exchanges gradients after the last part alone"
    if rank == 1:
        mine["labels"] = torch.full_like(mine["labels"], IGNORED)
    with pytest.raises(ValueError, match=r"targets in every process, got \[\d+, 0\] by rank"):
        micro_batches(mine, 2, targets="labels", model=parallel)
    dist.destroy_process_group()


def test_processes_exchange_once_and_have_the_gradients_of_all_batches_together(tmp_path):
    run_processes(_in_process, (str(tmp_path),))


# -- what is refused ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("batch", "arguments", "message"),
    [
        (torch.ones(4), {}, "expected parts .* got parts=None, size=None"),
        (torch.ones(4), {"parts": 2, "size": 2}, "got parts=2, size=2"),
        (torch.ones(4), {"parts": 0}, "parts must be at least 1, got 0"),
        (torch.ones(0, 4), {"size": 2}, "no samples"),
        ("text", {"parts": 2}, "expected a tensor with samples along dim 0, got a str"),
        ((torch.ones(4), torch.ones(3)), {"parts": 2}, r"expected 4 samples .* got shape \[3\] at batch\[1\]"),
        ({"x": torch.ones(4)}, {"parts": 2, "targets": "y"}, r"targets='y' names nothing .* has \['x'"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused_with_words(batch, arguments, message):
    with pytest.raises(ValueError, match=message):
        micro_batches(batch, **arguments)


def test_what_is_no_target_and_no_model_is_refused_with_words():
    with pytest.raises(TypeError, match="targets are a tensor, got int"):
        micro_batches({"x": torch.ones(4), "y": 3}, 2, targets="y")
    with pytest.raises(TypeError, match="with no_sync and process_group"):
        micro_batches(torch.ones(4), 2, model=nn.Linear(1, 1))
    with pytest.raises(ValueError, match="at least one batch"):
        accumulation_weights([])
