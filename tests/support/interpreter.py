"""Triton's interpreter, sooner: without what it does again for every call. And with a check of kernels' addresses."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch


def hasten() -> None:
    """Make each table of constants once, and patch the language once for a kernel, not for each function it calls.

    A table is a selection for each of up to 256 numbers, in every program of a grid; the interpreter knows nothing of
    constants. And it patches the language for a function that finds it patched by its caller.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    from lowbit.kernels import bits

    bits.constants = functools.cache(bits.constants)
    patch, unchanged = interpreter._patch_lang, getattr(interpreter, "_LangPatchScope", None)
    if unchanged is None:  # an older Triton
        return

    @functools.cache
    def languages(function: Any) -> tuple[Any, ...]:
        return tuple(lang for lang in (tl, tl.core) if any(value is lang for value in function.__globals__.values()))

    def patch_once(function: Any) -> Any:
        patched = not any(tl.core.is_builtin(lang.arange) for lang in languages(function))
        return unchanged() if patched else patch(function)

    interpreter._patch_lang = patch_once


@contextmanager
def within_arguments() -> Iterator[None]:
    """Fails where an interpreted kernel reads or writes an address that is in no tensor that it was given."""
    from triton.runtime import interpreter

    from lowbit.kernels import start

    begin_one, builder, known = start._start, interpreter.interpreter_builder, []

    def note(one: Any) -> None:
        known[:] = [_extent(x) for x in one.arguments.values() if isinstance(x, torch.Tensor)]
        begin_one(one)

    def check(pointers: Any, mask: Any) -> None:
        first = np.broadcast_to(pointers.data, mask.data.shape)[mask.data]
        size = np.uint64(max(pointers.dtype.element_ty.primitive_bitwidth // 8, 1))
        inside = np.zeros(first.shape, bool)
        for low, high in known:
            inside |= (first >= low) & (first + size <= high)
        assert inside.all(), "an address that belongs to no argument"

    load, store = builder.create_masked_load, builder.create_masked_store

    def checked_load(pointers: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return load(pointers, mask, *rest)

    def checked_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return store(pointers, value, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "_start", note)
        patch.setattr(builder, "create_masked_load", checked_load)
        patch.setattr(builder, "create_masked_store", checked_store)
        yield


def _extent(x: torch.Tensor) -> tuple[Any, Any]:
    """The first address of a tensor's elements, and that behind the last."""
    steps = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    low = x.data_ptr()
    return np.uint64(low), np.uint64(low + (steps + 1) * x.element_size() if x.numel() else low)
