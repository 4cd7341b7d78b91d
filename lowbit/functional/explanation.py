"""explain: which kernel a call would run, and why no other."""

from __future__ import annotations

from typing import Any

from lowbit.backends import registry
from lowbit.functional.codec import decode, encode, pack, unpack
from lowbit.functional.layers import linear
from lowbit.functional.matmul import scaled_mm
from lowbit.functional.optim import adamw_
from lowbit.functional.quantizers import fake_quantize, quantize
from lowbit.tensor.quantized import Quantized


def explain(op: str, *args: Any, **kwargs: Any) -> registry.Explanation:
    """What would run for ``op`` with these arguments (as the function of that name takes them), and why not more.

    ``print(lowbit.explain("scaled_mm", a, b))``. Nothing is computed by the op itself.
    """
    if op not in _EXPLAINED:
        raise ValueError(f"explain: unknown op {op!r}; expected one of {', '.join(_EXPLAINED)}")
    function, *variants = _EXPLAINED[op]
    return registry.explaining((op, *variants), lambda: function(*args, **kwargs))


#: What ``explain`` knows: the public function of each op, and the op that it runs instead where scales are given.
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
}
