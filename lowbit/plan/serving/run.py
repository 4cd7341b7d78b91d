"""GenerationRun: a model that generates with the settings of a plan."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lowbit.models.batches import tokens_of
from lowbit.plan.serving.decoders import decoder_of, instead_of_tokens
from lowbit.plan.serving.settings import ServingSettings

__all__ = ["GenerationRun"]


class GenerationRun:
    """A model that generates as planned, from ``GenerationPlan.apply_``.

    Attributes:
        model: The quantized model.
        settings: Settings of the plan.
        context: Most tokens of a sequence, prompt included.
        rows: Most sequences at a time.
    """

    def __init__(self, model: nn.Module, settings: ServingSettings, context: int, rows: int) -> None:
        self.model, self.settings, self.context, self.rows = model, settings, context, rows
        self._decoder = decoder_of(model)

    def generate(self, tokens: Tensor, max_new_tokens: int | None = None, **options: Any) -> Tensor:
        """Generate tokens with a new cache.

        All sequences have the same length: a padding mask would need more memory than planned.

        Args:
            tokens: Token ids [B, T].
            max_new_tokens: Number of new tokens; by default as many as fit the context.
            options: Arguments of a Hugging Face model's ``generate``, such as ``do_sample``. Custom models generate
                greedily, without options.

        Returns:
            Token ids, with the new ones after ``tokens``.

        Raises:
            ValueError: For more sequences or tokens than planned, or a tensor that is not token ids.
            TypeError: If ``tokens`` is not a tensor.
        """
        is_tensor = isinstance(tokens, Tensor)
        if not is_tensor or tokens_of(tokens) is None or tokens.shape[1] == 0:
            raise (ValueError if is_tensor else TypeError)(
                f"generate: expected token ids, an integer tensor [B, T] with T >= 1, {instead_of_tokens(tokens)}"
            )
        length = tokens.shape[1]
        count = self.context - length if max_new_tokens is None else max_new_tokens
        if count < 1 or length + count > self.context:
            raise ValueError(
                f"generate: expected at most {self.context} tokens, the planned context, got a prompt of {length} and "
                f"{count} new ones; shorten one of them, or plan with a larger context"
            )
        rows = len(tokens) * self._decoder.copies(self.model, options)
        if rows > self.rows:
            raise ValueError(
                f"generate: expected at most {self.rows} sequences, as planned, got {rows} (with beams and returned "
                f"sequences); pass fewer, or plan with rows={rows}"
            )
        new_tokens: Tensor = self._decoder.generate(self.model, tokens, count, {**self.options(), **options})
        return new_tokens

    def cache(self) -> Any:
        """Return a new cache, for one generation."""
        return self._decoder.cache(self.model, self.rows, self.settings.cache)

    def options(self) -> dict[str, Any]:
        """Return keyword arguments for one generation as planned, with a new cache, for code that calls the model.

        They are for ``generate`` of Hugging Face models, and for forward of custom models.
        """
        return self._decoder.options(self.model, self.cache(), self.settings.part)
