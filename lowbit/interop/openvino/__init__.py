"""OpenVINO models, in which layers keep their codes as constants of OpenVINO's low-bit types.

Compiled with the properties ``EXACT``, results differ from lowbit's in the order of sums only. Without them OpenVINO
rounds activations by its own rules on processors that have instructions for it (int8 with VNNI, bf16 with AMX).
"""

from lowbit.interop.openvino.constants import compress
from lowbit.interop.openvino.writing import TARGET

__all__ = ["EXACT", "TARGET", "compress"]

#: Properties for ``compile_model`` that keep activations in fp32.
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
