"""The loss of a model that the caller gives none for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from lowbit.memory.fake import fake_tensors
from lowbit.models.losses import own_loss, token_loss, token_targets, usual_loss

IDS = torch.tensor([[3, 1, 4, 1], [5, 9, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


def logits(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.mark.parametrize(
    "wrap", [lambda y: {"loss": y}, lambda y: SimpleNamespace(loss=y)], ids=["mapping", "attribute"]
)
def test_a_models_own_loss_comes_first(wrap):
    own = logits(1).sum()
    assert own_loss(wrap(own)) is own and usual_loss(wrap(own), IDS) is own
    assert own_loss(wrap(None)) is None and own_loss(own) is None


@pytest.mark.parametrize("wrap", [lambda y: y, lambda y: {"logits": y}, lambda y: SimpleNamespace(logits=y)])
def test_padding_does_not_count_in_the_loss_of_tokens(wrap):
    y = logits(2, 4, 11)
    scores, targets = torch.cat([y[0, :3], y[1, :1]]), torch.tensor([1, 4, 1, 9])
    batch = {"input_ids": IDS, "attention_mask": MASK}
    for reduction in ("sum", "mean"):
        loss = token_loss(wrap(y), batch, reduction)
        torch.testing.assert_close(loss, F.cross_entropy(scores, targets, reduction=reduction))
    assert torch.equal(usual_loss(wrap(y), batch), token_loss(wrap(y), batch, "mean"))
    assert token_targets(batch).tolist() == [[1, 4, 1], [9, -100, -100]]
    every = F.cross_entropy(y[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    assert torch.equal(usual_loss(wrap(y), IDS), every)


def test_a_decoders_tokens_are_predicted():
    y = logits(2, 3, 11)
    batch = {
        "input_ids": IDS, "attention_mask": MASK,
        "decoder_input_ids": IDS[:, 1:], "decoder_attention_mask": MASK[:, 1:],
    }  # fmt: skip
    scores, targets = y[0, :2], torch.tensor([4, 1])
    torch.testing.assert_close(token_loss(y, batch), F.cross_entropy(scores, targets, reduction="sum"))


def test_what_is_no_logits_of_tokens_has_no_loss_of_tokens():
    for output, batch in (
        (logits(2, 4, 9), IDS),
        (logits(2, 5, 11), IDS),
        (logits(2, 4, 11), IDS.float()),
        (None, IDS),
    ):
        assert token_loss(output, batch) is None
    assert torch.equal(usual_loss(y := logits(2, 5, 11), IDS), y.square().mean())
    with pytest.raises(ValueError, match="without a tensor that has a gradient"):
        usual_loss({"ids": IDS}, IDS)


def test_the_loss_of_a_step_reads_no_values():
    with fake_tensors():
        ids, mask = torch.empty(2, 4, dtype=torch.long), torch.empty(2, 4, dtype=torch.long)
        y = torch.empty(2, 4, 11, requires_grad=True)
        assert usual_loss(y, {"input_ids": ids, "attention_mask": mask}).shape == ()
        assert usual_loss(torch.empty(2, 5, requires_grad=True), ids).shape == ()
