"""``explain``: the kernel that a call would run, and why others cannot."""

from __future__ import annotations

from typing import Any

from lowbit.backends import registry
from lowbit.functional.codec import decode, encode, pack, unpack
from lowbit.functional.fused import rms_norm, rotary, swiglu
from lowbit.functional.layers import linear
from lowbit.functional.matmul import scaled_mm
from lowbit.functional.optim import adamw_
from lowbit.functional.quantizers import fake_quantize, quantize
from lowbit.tensor.quantized import Quantized


def explain(op: str, *args: Any, **kwargs: Any) -> registry.Explanation:
    """Tells which kernel would run for a call, and why kernels with a higher priority would not. Runs no kernel.

    Args:
        op: Name of a function on tensors, such as ``"quantize"`` or ``"scaled_mm"``, or ``"dequantize"``.
        *args: Its positional arguments.
        **kwargs: Its keyword arguments.

    Returns:
        An Explanation, which prints as text.

    Raises:
        ValueError: The op is unknown.

    Example:
        ``print(lowbit.explain("scaled_mm", a, b))``
    """
    if op not in _EXPLAINED:
        raise ValueError(f"explain: unknown op {op!r}; expected one of {', '.join(_EXPLAINED)}")
    function, *variants = _EXPLAINED[op]
    return registry.explaining((op, *variants), lambda: function(*args, **kwargs))


#: The public function of each op, and the ops that it may run instead, depending on its arguments.
_EXPLAINED: dict[str, tuple[Any, ...]] = {
    "encode": (encode,),
    "decode": (decode,),
    "pack": (pack,),
    "unpack": (unpack,),
    "quantize": (quantize, "quantize_static", "quantize_global"),
    "dequantize": (Quantized.dequantize,),
    "fake_quantize": (fake_quantize,),
    "scaled_mm": (scaled_mm,),
    "linear": (linear,),
    "optimizer_step": (adamw_,),
    "rms_norm": (rms_norm,),
    "swiglu": (swiglu,),
    "rotary": (rotary,),
}
