"""Goals of CPU kernels, in percent of the machine's limit: the first row whose pattern matches.

Patterns are searched in 'OP VARIANT SUBJECT', as ``lowbit bench --list`` prints it.
"""

from __future__ import annotations

import re

_GOALS: tuple[tuple[str, int], ...] = (
    (r"^encode (fp32|bf16) ", 95),
    (r"^decode ", 88),
    (r"^(quantize|quantize_static|fake_quantize|fake_quantize_backward) ", 80),
    (r"^dequantize ", 90),
    # 0.65 times the time of torch's fused step with fp32 moments, which moves 28 bytes per element; this moves 16.
    (r"^optimizer_step \w+ adamw fp32", 88),
    (r"^optimizer_step ", 70),
    # A matmul with few rows is memory-bound; 91% of the limit is 1.1 times its time.
    (r"^(linear|scaled_mm) (1|4|16)x", 91),
    (r" (fp32|bf16|fp16) x ", 88),
    (r"int8:row x int8:row$", 97),
    (r"int8:row x int4", 80),
    (r"x (mx|nvfp4)", 85),
    (r"group128 x fp8\S*block", 88),
    (r"fp8\S* x fp8", 93),
    (r"^(linear|scaled_mm) ", 88),
)


def goal(op: str, subject: str) -> int | None:
    """Percent of the limit; None without a goal."""
    return next((percent for pattern, percent in _GOALS if re.search(pattern, f"{op} {subject}")), None)
