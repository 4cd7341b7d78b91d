"""Preference and policy-gradient losses from log-probabilities, such as those of ``lb.memory.linear_log_probs``.

They never see logits. For a causal language model, the log-probability of a completion is the sum over its tokens::

    hidden = model.model(input_ids=ids, attention_mask=mask).last_hidden_state[:, :-1]
    result = lb.memory.linear_log_probs(hidden, model.lm_head.weight, labels[:, 1:])
    completions = result.log_probs.sum(1)  # tokens with label -100 count as 0

Sources: Rafailov et al., "Direct Preference Optimization", arXiv 2305.18290; Azar et al., "IPO", arXiv 2310.12036;
Ethayarajh et al., "KTO", arXiv 2402.01306; Hong et al., "ORPO", arXiv 2403.07691; Shao et al., "DeepSeekMath" (GRPO),
arXiv 2402.03300; Yu et al., "DAPO", arXiv 2503.14476; Liu et al., "Dr. GRPO", arXiv 2503.20783.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lowbit.name_tables import did_you_mean

__all__ = ["dpo_loss", "group_advantages", "grpo_loss", "kto_loss", "orpo_loss"]

#: Added to the standard deviation of a group's rewards.
_EPSILON = 1e-4

_DPO_KINDS = ("sigmoid", "hinge", "ipo")


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    kind: str = "sigmoid",
) -> Tensor:
    """Return the mean DPO loss of pairs of completions.

    Args:
        chosen: ``[pairs]``, log-probabilities of the preferred completions.
        rejected: ``[pairs]``, log-probabilities of the others.
        reference_chosen: The same of the reference model.
        reference_rejected: The same of the reference model.
        beta: Strength of the reference.
        label_smoothing: Share of pairs whose preference is assumed to be the wrong way round, below 0.5. Only for
            ``"sigmoid"``.
        kind: ``"sigmoid"`` (DPO), ``"hinge"`` or ``"ipo"``. For ``"ipo"``, pass mean log-probabilities per token.

    Raises:
        ValueError: Shapes differ or an option is out of range.
    """
    who = "train.dpo_loss"
    _same_shape(
        who, chosen=chosen, rejected=rejected, reference_chosen=reference_chosen, reference_rejected=reference_rejected
    )
    _positive(who, beta=beta)
    if kind not in _DPO_KINDS:
        raise ValueError(f"{who}: kind is one of {', '.join(_DPO_KINDS)}; got {kind!r}{did_you_mean(kind, _DPO_KINDS)}")
    if not 0 <= label_smoothing < 0.5 or (label_smoothing and kind != "sigmoid"):
        raise ValueError(
            f"{who}: label_smoothing is from 0 to below 0.5, for kind='sigmoid'; got {label_smoothing} for {kind!r}"
        )
    margin = (chosen - rejected) - (reference_chosen - reference_rejected)
    if kind == "hinge":
        return F.relu(1 - beta * margin).mean()
    if kind == "ipo":
        return (margin - 1 / (2 * beta)).square().mean()
    agrees, disagrees = F.logsigmoid(beta * margin), F.logsigmoid(-beta * margin)
    return -((1 - label_smoothing) * agrees + label_smoothing * disagrees).mean()


def kto_loss(
    log_probs: Tensor,
    reference: Tensor,
    desirable: Tensor,
    *,
    divergence: Tensor | float = 0.0,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Return the mean KTO loss of single completions with a thumb up or down.

    Args:
        log_probs: ``[completions]``, their log-probabilities.
        reference: ``[completions]``, those of the reference model.
        desirable: ``[completions]``, bool.
        divergence: Estimate of the KL divergence from the reference: the mean difference of log-probabilities for
            completions of other prompts. It is clamped to 0 from below, and gets no gradient.
        beta: Strength of the reference.
        desirable_weight: Weight of desirable completions.
        undesirable_weight: Weight of the others.

    Raises:
        ValueError: Shapes differ or an option is out of range.
        TypeError: ``desirable`` is not bool.
    """
    who = "train.kto_loss"
    _same_shape(who, log_probs=log_probs, reference=reference, desirable=desirable)
    _positive(who, beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    if desirable.dtype != torch.bool:
        raise TypeError(f"{who}: desirable is bool, got {desirable.dtype}; compare the labels with a threshold")
    anchor = torch.as_tensor(divergence, dtype=log_probs.dtype, device=log_probs.device).detach().clamp_min(0)
    reward = beta * (log_probs - reference - anchor)
    losses = torch.where(
        desirable, desirable_weight * torch.sigmoid(-reward), undesirable_weight * torch.sigmoid(reward)
    )
    return losses.mean()


def orpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float = 0.1) -> Tensor:
    """Return the mean ORPO loss: the negative log-likelihood of the chosen completions, and an odds-ratio term.

    There is no reference model.

    Args:
        chosen: ``[pairs]``, mean log-probabilities per token of the preferred completions, below 0.
        rejected: ``[pairs]``, the same of the others.
        beta: Weight of the odds-ratio term.

    Raises:
        ValueError: Shapes differ or ``beta`` is not positive.
    """
    who = "train.orpo_loss"
    _same_shape(who, chosen=chosen, rejected=rejected)
    _positive(who, beta=beta)
    log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    return -chosen.mean() - beta * F.logsigmoid(log_odds).mean()


def grpo_loss(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    old: Tensor | None = None,
    reference: Tensor | None = None,
    beta: float = 0.04,
    clip: float = 0.2,
    clip_high: float | None = None,
    per: str | int = "sequence",
) -> Tensor:
    """Return the GRPO loss of sampled completions.

    Args:
        log_probs: ``[completions, tokens]``, the log-probabilities of the tokens.
        advantages: ``[completions]``, see ``group_advantages``.
        mask: ``[completions, tokens]``, bool: tokens of the completion. A completion without any counts as 0.
        old: Log-probabilities of the model that sampled; None if that is this model, before its update.
        reference: Log-probabilities of a reference model, from which the divergence is penalized. None: no penalty.
        beta: Weight of that penalty.
        clip: Limit of the probability ratio to ``old`` below 1.
        clip_high: The limit above 1; None: ``clip``. DAPO uses 0.28.
        per: ``"sequence"`` (GRPO: mean of each completion's mean), ``"token"`` (DAPO: mean over all tokens), or the
            largest length as a number (Dr. GRPO: sums over completions, divided by it).

    Raises:
        ValueError: Shapes differ or an option is out of range.
        TypeError: ``mask`` is not bool.
    """
    who = "train.grpo_loss"
    optional = {name: value for name, value in (("old", old), ("reference", reference)) if value is not None}
    _same_shape(who, log_probs=log_probs, mask=mask, **optional)
    if log_probs.dim() != 2 or advantages.shape != log_probs.shape[:1]:
        raise ValueError(
            f"{who}: expected log_probs [completions, tokens] and advantages [completions], got "
            f"{list(log_probs.shape)} and {list(advantages.shape)}"
        )
    if mask.dtype != torch.bool:
        raise TypeError(f"{who}: mask is bool, got {mask.dtype}; pass labels != -100")
    high = clip if clip_high is None else clip_high
    _positive(who, clip=clip, clip_high=high)
    if per not in ("sequence", "token") and (isinstance(per, str | bool) or per < 1):
        raise ValueError(f"{who}: per is 'sequence', 'token' or a length from 1, got {per!r}")
    ratio = (log_probs - (log_probs.detach() if old is None else old)).exp()
    weight = advantages.to(ratio.dtype).unsqueeze(1)
    losses = -torch.minimum(ratio * weight, ratio.clamp(1 - clip, 1 + high) * weight)
    if reference is not None:
        difference = reference - log_probs
        losses = losses + beta * (difference.exp() - difference - 1)
    losses = torch.where(mask, losses, 0)
    tokens = mask.sum(1)
    if per == "token":
        return losses.sum() / tokens.sum().clamp_min(1)
    if per == "sequence":
        return (losses.sum(1) / tokens.clamp_min(1)).mean()
    return losses.sum() / (len(losses) * int(per))


def group_advantages(rewards: Tensor, group: int, *, scaled: bool = True) -> Tensor:
    """Return each reward minus the mean of its group, divided by the group's standard deviation.

    Args:
        rewards: ``[prompts * group]``, completions of the same prompt next to each other.
        group: Completions per prompt, at least 2.
        scaled: Whether to divide; Dr. GRPO does not.

    Raises:
        ValueError: The rewards are not whole groups.
    """
    if group < 2 or rewards.dim() != 1 or len(rewards) % group:
        raise ValueError(
            f"train.group_advantages: expected a multiple of group={group} rewards and group from 2, got "
            f"{list(rewards.shape)}"
        )
    groups = rewards.view(-1, group)
    centered = groups - groups.mean(1, keepdim=True)
    return (centered / (groups.std(1, keepdim=True) + _EPSILON) if scaled else centered).flatten()


def _log1mexp(x: Tensor) -> Tensor:
    """Return ``log(1 - exp(x))`` for negative ``x``, accurate near 0 and far from it."""
    near = x > -0.6931
    small = torch.where(near, x, -1.0)  # the other branch must not make NaN gradients
    large = torch.where(near, -1.0, x)
    return torch.where(near, (-torch.expm1(small)).log(), torch.log1p(-large.exp()))


def _same_shape(who: str, **tensors: Tensor) -> None:
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if len({tuple(shape) for shape in shapes.values()}) > 1:
        raise ValueError(f"{who}: expected equal shapes, got " + ", ".join(f"{n} {s}" for n, s in shapes.items()))


def _positive(who: str, **options: float) -> None:
    for name, value in options.items():
        if not value > 0:
            raise ValueError(f"{who}: {name} is positive, got {value}")
