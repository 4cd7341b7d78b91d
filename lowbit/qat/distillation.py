"""Knowledge distillation: the loss that trains a quantized model to match the original model."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["distillation_loss"]

#: Number of logits that are processed at a time, in fp32.
_PIECE = 1 << 20


def distillation_loss(student_logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(teacher || student) of the distributions given by logits, in nats, averaged over rows.

    The computation is in fp32, a block of rows at a time. Besides the logits it stores one tensor of their size, the
    gradient. The teacher gets no gradient. Source: QAD, arXiv 2601.20088; Hinton et al., arXiv 1503.02531, for the
    temperature.

    Args:
        student_logits: ``[..., classes]``.
        teacher_logits: the same shape, without gradient.
        temperature: divides the logits. The loss is multiplied by its square, which preserves the size of gradients.

    Returns:
        The loss, an fp32 scalar.

    Raises:
        ValueError: the shapes differ, there are no rows, the temperature is not positive and finite, or the teacher
            requires grad.
        RuntimeError: a second-order gradient.
    """
    if student_logits.shape != teacher_logits.shape or student_logits.dim() < 1 or not student_logits.numel():
        raise ValueError(
            f"distillation_loss: student and teacher must have the same shape [..., classes] and one row at least, got "
            f"{list(student_logits.shape)} and {list(teacher_logits.shape)}"
        )
    if not 0 < temperature < math.inf:
        raise ValueError(f"distillation_loss: temperature must be positive and finite, got {temperature}")
    if teacher_logits.requires_grad and torch.is_grad_enabled():
        raise ValueError("distillation_loss: the teacher gets no gradient; call it under torch.no_grad()")
    loss: Tensor = _Divergence.apply(student_logits, teacher_logits, temperature)  # type: ignore[no-untyped-call]
    return loss


class _Divergence(torch.autograd.Function):
    """The loss. Forward also computes the gradient, which is only a subtraction once a row has its probabilities."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        classes = student.shape[-1]
        rows = student.numel() // classes
        grad = torch.empty_like(student, memory_format=torch.contiguous_format) if ctx.needs_input_grad[0] else None
        total = torch.zeros((), dtype=torch.float64, device=student.device)
        step = max(1, _PIECE // classes)
        for first in range(0, rows, step):
            piece = slice(first, first + step)
            log_q, log_p = (
                (t.reshape(rows, classes)[piece].float() / temperature).log_softmax(-1) for t in (student, teacher)
            )
            p = log_p.exp()
            terms = torch.where(p == 0, 0.0, p * (log_p - log_q))  # 0 for a class that the teacher excludes
            total += terms.sum(dtype=torch.float64)
            if grad is not None:
                grad.view(rows, classes)[piece] = (log_q.exp_() - p) * (temperature / rows)
        ctx.save_for_backward(grad)
        return (total * (temperature**2 / rows)).to(torch.float32)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * grad_loss.to(grad.dtype), None, None
