"""The batch sizes of DeepSpeed: ``train_batch_size`` is the product of three factors, and may replace one of them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

__all__ = ["MICRO_BATCHES", "PROCESSES", "SAMPLES", "TOTAL", "missing_factors", "with_quotient"]

#: Samples of a step, of all processes.
TOTAL = "train_batch_size"
#: Its factors: samples of a process per micro-batch, micro-batches per step, and processes.
SAMPLES, MICRO_BATCHES, PROCESSES = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "world_size"


def missing_factors(factors: Mapping[str, int | None]) -> list[str]:
    """The factors without a number."""
    return [key for key, number in factors.items() if number is None]


def with_quotient(total: int, factors: Mapping[str, int | None]) -> dict[str, int | None]:
    """The factors of ``total``. A single missing one is the quotient; several stay None.

    Raises:
        ValueError: The product of the factors is not ``total``, or does not divide it.
    """
    missing = missing_factors(factors)
    given = {key: number for key, number in factors.items() if number is not None}
    product = prod(given.values())
    if total % product or (not missing and total != product):
        numbers = ", ".join(f"{key}={number}" for key, number in given.items())
        raise ValueError(
            f"from_deepspeed: {TOTAL} must be {'a multiple of ' if missing else ''}{product} with {numbers}, got "
            f"{total}; correct one of these numbers, or leave one out"
        )
    return {**factors, **dict.fromkeys(missing, total // product)} if len(missing) == 1 else dict(factors)
