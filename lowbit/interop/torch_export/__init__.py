"""Programs of ``torch.export`` with explicit quantization, which run without lowbit.

Weights and inputs are quantized and decoded by the ops ``quantized_decomposed`` that torch's backends match, or by
plain operations of torch. Results differ from lowbit's in the order of sums; the report names other differences.
"""

from lowbit.interop.torch_export.writing import TARGET

__all__ = ["TARGET"]
