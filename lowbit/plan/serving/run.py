"""A model that generates by a plan."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lowbit.models.batches import tokens_of
from lowbit.plan.serving.decoders import decoder_of, instead_of_tokens
from lowbit.plan.serving.settings import ServingSettings

__all__ = ["GenerationRun"]


class GenerationRun:
    """See ``GenerationPlan.apply_``. ``model``: quantized as planned; ``context`` and ``rows``: the most tokens of a
    sequence, prompt included, and the most sequences at a time.
    """

    def __init__(self, model: nn.Module, settings: ServingSettings, context: int, rows: int) -> None:
        self.model, self.settings, self.context, self.rows = model, settings, context, rows
        self._decoder = decoder_of(model)

    def generate(self, tokens: Tensor, max_new_tokens: int | None = None, **options: Any) -> Tensor:
        """Token ids [B, T] with those that the model writes after them, with a new cache each time.

        ``max_new_tokens``: as many as the context has room for unless given. ``options``: of the ``generate`` of a
        model of transformers, such as ``do_sample``; a model of your own takes the likeliest token and has none.
        Sequences are of one length: a mask for padding takes more than is planned.

        Raises ValueError for more sequences or tokens than planned, and for a tensor of something else; TypeError for
        what is no tensor.
        """
        is_tensor = isinstance(tokens, Tensor)
        if not is_tensor or tokens_of(tokens) is None or tokens.shape[1] == 0:
            raise (ValueError if is_tensor else TypeError)(
                f"generate: expected token ids, a tensor of whole numbers [B, T] with T >= 1, "
                f"{instead_of_tokens(tokens)}"
            )
        length = tokens.shape[1]
        count = self.context - length if max_new_tokens is None else max_new_tokens
        if count < 1 or length + count > self.context:
            raise ValueError(
                f"generate: the plan is for prompt and new tokens within {self.context}, got {length} and {count}; "
                f"shorten one of them, or plan with a larger context"
            )
        rows = len(tokens) * self._decoder.copies(self.model, options)
        if rows > self.rows:
            raise ValueError(
                f"generate: the plan is for {self.rows} sequences at a time, got {rows} (beams and sequences to return "
                f"included); give fewer, or plan with rows={rows}"
            )
        given = {**self._decoder.options(self.model, self.cache(), self.settings.part), **options}
        made: Tensor = self._decoder.generate(self.model, tokens, count, given)
        return made

    def cache(self) -> Any:
        """An empty cache, for one generation."""
        return self._decoder.cache(self.model, self.rows, self.settings.cache)

    def options(self) -> dict[str, Any]:
        """Keywords by which the model's own ``generate`` does one generation by the plan, where it is called by others:
        a new cache, and how the prompt is taken. Of a model of your own, for its forward.
        """
        return self._decoder.options(self.model, self.cache(), self.settings.part)
