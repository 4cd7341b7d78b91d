"""Peak bandwidth and matmul throughput of a GPU per architecture, and the minimum time of work.

This is an estimate, not a measurement: launches and other computations of kernels are not counted, and kernels reach
neither limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from lowbit.tables import markdown

__all__ = ["PEAKS", "Peak", "peaks_table", "seconds"]


class Peak(NamedTuple):
    """Memory bytes per second of a GPU, and dense tensor-core operations per second in 16-bit floats with fp32 sums, in
    int8, and in FP8 and FP4 with fp32 sums.
    """

    gpu: str
    bandwidth: float
    bf16: float
    int8: float
    fp8: float | None
    fp4: float | None
    source: str


#: Peaks by architecture.
PEAKS: dict[int, Peak] = {
    80: Peak("A100 SXM, 80 GB", 2.039e12, 312e12, 624e12, None, None, "NVIDIA A100 Tensor Core GPU, datasheet"),
    89: Peak("L40S", 0.864e12, 362e12, 733e12, 733e12, None, "NVIDIA L40S, datasheet (dense)"),
    90: Peak(
        "H200 SXM", 4.8e12, 989e12, 1979e12, 1979e12, None, "NVIDIA H200 Tensor Core GPU, datasheet (halved: dense)"
    ),
    100: Peak("B200", 8e12, 2250e12, 4500e12, 4500e12, 9000e12, "NVIDIA HGX B200, datasheet (an eighth, dense)"),
    120: Peak("RTX 5090", 1.792e12, 209.5e12, 838e12, 419e12, 1676e12, "NVIDIA RTX Blackwell GPU Architecture"),
}


def seconds(work: Iterable[dict[str, Any]], architecture: int) -> float:
    """The minimum time of sequential work. Each entry has ``bytes``, ``flops`` and the operand types ``multiplies``."""
    peak = PEAKS[architecture]
    fp8 = peak.fp8 or peak.bf16
    rates = {"bf16": peak.bf16, "int8": peak.int8, "fp8": fp8, "fp4": peak.fp4 or fp8, "": peak.bf16}
    return sum(max(one["bytes"] / peak.bandwidth, one["flops"] / rates[one["multiplies"]]) for one in work)


def peaks_table() -> str:
    """The peaks as Markdown."""
    cells = [
        (f"sm_{name}", peak.gpu, f"{peak.bandwidth / 1e12:g}", *(f"{rate / 1e12:g}" if rate else "-" for rate in rates),
         peak.source)
        for name, peak in PEAKS.items()
        for rates in [(peak.bf16, peak.int8, peak.fp8, peak.fp4)]
    ]  # fmt: skip
    head = ("architecture", "GPU", "TB/s", "bf16 TFLOP/s", "int8 TOP/s", "FP8 TFLOP/s", "FP4 TFLOP/s", "source")
    return markdown(head, cells, numbers=range(2, 7))
