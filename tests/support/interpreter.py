"""Triton's interpreter without what it does again for every call: the same operations on the same numbers, sooner."""

from __future__ import annotations

import functools
from typing import Any


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
