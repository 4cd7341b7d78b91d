"""Compares the loss in fp32 and in a lower precision, for losses without recorded changes.

The records are for a mean of cross-entropies. Other losses may amplify rounding: for instance, a sum of
log-probabilities over a sequence adds up errors that a mean averages out.
"""

from __future__ import annotations

import copy
import math
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lowbit.models.batches import call, copied
from lowbit.models.losses import usual_loss
from lowbit.plan.fitting.adapt import StepSnapshot
from lowbit.plan.settings import TrainingSettings
from lowbit.plan.subject import Subject
from lowbit.sizes import share_changed
from lowbit.torch_private import FakeTensor, without_modes
from lowbit.train import mixed_, prepare_
from lowbit.train.micro_batches import samples

__all__ = ["Comparison", "compare", "is_mean_of_cross_entropies"]

_SHORT = (torch.float16, torch.bfloat16)


class Comparison(NamedTuple):
    """The loss of the same rows in two precisions.

    Attributes:
        precision: Name of the lower precision, from ``TECHNIQUES["precision"]``.
        rows: Number of rows of the batch.
        reference: The loss in fp32, or in fp64 for a model in fp64; None if not compared.
        lower: The loss in ``precision``; None if not compared.
        why: Why it was not compared.
    """

    precision: str
    rows: int
    reference: float | None = None
    lower: float | None = None
    why: str = ""

    @property
    def change(self) -> float | None:
        """The relative difference in percent; None if there is none."""
        if self.reference is None or self.lower is None or not self.reference:
            return None
        return 100 * (self.lower - self.reference) / abs(self.reference)

    def words(self, is_chosen: bool) -> str:
        """Return a description in one line."""
        aside = "" if is_chosen else " (not chosen)"
        if self.reference is None or self.lower is None:
            return f"the loss is not a mean of cross-entropies; {self.precision}{aside} was not compared: {self.why}"
        change = "" if self.change is None else f", {share_changed(self.change / 100, 2)}"
        return (
            f"the loss is not a mean of cross-entropies: one forward of {self.rows} rows yields {self.reference:.4g} "
            f"in fp32 and {self.lower:.4g} in {self.precision}{aside}{change}"
        )


# -- kinds of losses ---------------------------------------------------------------------------------------------------
#: Autograd nodes that select, move, average or add: a mean of cross-entropies stays one.
_LINEAR = frozenset(
    """Add Alias Cat Clone Diagonal Div Expand Gather Index IndexSelect MaskedFill MaskedSelect Mean Mul Neg NllLoss
    NllLoss2D Permute ReshapeAlias Select Slice Split SplitWithSizes Squeeze Stack Sub Sum T ToCopy Transpose Unbind
    UnsafeView Unsqueeze View""".split()
)
#: Nodes of ``_LINEAR`` that change the sign of their first operand.
_NEGATING = frozenset({"Neg", "NllLoss", "NllLoss2D"})
#: Nodes of log-probabilities, and of the cross-entropy of ``linear_cross_entropy``.
_LOG_PROBABILITIES, _CROSS_ENTROPY = "LogSoftmax", "_LinearCrossEntropy"


def is_mean_of_cross_entropies(value: Tensor) -> bool:
    """Return whether a loss is a sum or mean, with positive weights, of cross-entropies of logits.

    This is read from the autograd graph, which fake tensors have too. If the graph does not tell, the result is False.

    Args:
        value: The loss, with its graph.
    """
    pending, known, entropies = [(value.grad_fn, False)], set[Any](), list[Any]()
    while pending:
        node, is_negative = pending.pop()
        if node is None or (node, is_negative) in known:
            continue
        known.add((node, is_negative))
        name = _name(node)
        if name in (_LOG_PROBABILITIES, _CROSS_ENTROPY):
            if is_negative != (name == _LOG_PROBABILITIES):
                return False
            entropies.append(node)
            continue
        signs = _signs(node, name)
        if signs is None:
            return False
        operands = [operand for operand, _ in node.next_functions]
        pending += [(node, is_negative != sign) for node, sign in zip(operands, signs, strict=True) if node is not None]
    return bool(entropies) and not _depend_on_others(entropies)


def _name(node: Any) -> str:
    return re.sub(r"Backward\d*$", "", node.name())


def _signs(node: Any, name: str) -> list[bool] | None:
    """Return the signs of a linear node's operands (True: minus); None for other nodes and unknown weights."""
    operands = [operand for operand, _ in node.next_functions]
    if name not in _LINEAR:
        return None
    if name in ("Mul", "Div"):
        if all(operand is not None for operand in operands[:2]) and len(operands) > 1:
            return None  # a product of two operands with gradients
        if name == "Mul":
            sign = _sign(getattr(node, "_saved_other" if operands[0] is not None else "_saved_self", None))
            return None if sign is None else [sign] * len(operands)
        return [False] * len(operands) if operands[0] is not None else None  # by a count
    if name in ("Add", "Sub"):
        alpha = _sign(getattr(node, "_saved_alpha", 1))
        return (
            None
            if alpha is None
            else [False, alpha != (name == "Sub"), *[False] * (len(operands) - 2)][: len(operands)]
        )
    return [name in _NEGATING] * len(operands)


def _sign(weight: Any) -> bool | None:
    """Return whether a number is negative; None for several or unknown numbers."""
    if isinstance(weight, Tensor):
        if weight.numel() != 1 or isinstance(weight, FakeTensor) or weight.is_meta:
            return None
        with without_modes():  # a real number, even in an estimate
            weight = weight.item()
    return None if weight is None else bool(weight < 0)


def _depend_on_others(entropies: list[Any]) -> bool:
    """Return whether logits depend on other log-probabilities, as scores of whole sequences do."""
    pending = [below for node in entropies for below, _ in node.next_functions]
    known = set[Any]()
    while pending:
        node = pending.pop()
        if node is None or node in known:
            continue
        if _name(node) in (_LOG_PROBABILITIES, _CROSS_ENTROPY):
            return True
        known.add(node)
        pending += [below for below, _ in node.next_functions]
    return False


# -- the comparison ----------------------------------------------------------------------------------------------------
def compare(subject: Subject, settings: TrainingSettings, name: str, most: int) -> Comparison:
    """Compute the loss in fp32 and in the precision of ``settings``. The model and random states do not change.

    The copies of the modules share the parameters; 16-bit parameters have an fp32 copy during the fp32 forward.
    Dropout is off, unless the model or the loss fails in evaluation mode.

    Args:
        subject: A model with its weights, and some rows of its batch.
        settings: Settings; only the precision, the recipe and the loaded precision matter.
        name: Name of the precision, for the result.
        most: Limit on the bytes of the weights together with an fp32 copy.

    Returns:
        The two losses, or why there are none.
    """
    model, part, loss = subject.model, subject.batch, subject.loss
    rows = samples(part)
    leaves = [leaf for leaf in tree_leaves(part) if isinstance(leaf, Tensor)]
    if any(
        tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in (*model.parameters(), *model.buffers(), *leaves)
    ):
        return Comparison(name, rows, why="the model or the batch is on meta, without data")
    widens = any(tensor.dtype in _SHORT for tensor in model.parameters())
    if widens and sum(p.nbytes + 4 * p.numel() * (p.dtype in _SHORT) for p in model.parameters()) > most:
        return Comparison(name, rows, why="its weights with an fp32 copy need more memory than a step of the plan")
    before = StepSnapshot(model)
    error: Exception | None = None
    for training in dict.fromkeys((False, model.training)):
        try:
            with torch.inference_mode(False), torch.no_grad():
                reference = _loss(_copy(model, widens), part, loss, training, widens)
                before.restore()
                return Comparison(name, rows, reference, _loss(_lowered(model, settings), part, loss, training))
        except Exception as failed:  # the model and the loss are user code
            error = failed
        finally:
            before.restore()
    return Comparison(name, rows, why=f"a forward failed ({type(error).__name__}: {str(error).splitlines()[0]})")


def _loss(model: nn.Module, part: Any, loss: Any, training: bool, widens: bool = False) -> float:
    device = next(model.parameters()).device
    moved = tree_map_only(Tensor, lambda x: x.to(device, torch.float32 if widens and x.dtype in _SHORT else None), part)
    batch = copied(moved)
    value = (loss or usual_loss)(call(model.train(training), batch, rest=loss is not None), batch)
    number = float(value)
    if math.isnan(number):
        raise ValueError("the loss is not a number")
    return number


def _lowered(model: nn.Module, settings: TrainingSettings) -> nn.Module:
    """Return a copy that computes in the precision of the settings, with the parameters of ``model``."""
    lowered = _copy(model, False)
    if settings.recipe is not None:
        prepare_(lowered, settings.recipe, reuse_weights=False)
    if settings.precision is not None:
        mixed_(lowered, settings.precision)
    return lowered


def _copy(model: nn.Module, widens: bool) -> nn.Module:
    """Copy the modules and buffers. The copy shares the parameters, except 16-bit ones if ``widens``."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor.detach().to(torch.float32 if widens and tensor.dtype in _SHORT else tensor.dtype, copy=True)

    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        is_widened = widens and parameter.dtype in _SHORT
        memo[id(parameter)] = nn.Parameter(moved(parameter), parameter.requires_grad) if is_widened else parameter
    for module in model.modules():
        for value in (*module._buffers.values(), *tree_leaves(list(vars(module).values()))):
            if isinstance(value, Tensor) and id(value) not in memo:
                memo[id(value)] = moved(value)
    return copy.deepcopy(model, memo)
