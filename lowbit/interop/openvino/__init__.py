"""OpenVINO models, in which layers keep their codes as constants of OpenVINO's low-bit types.

Results differ from lowbit's in the order of sums. Compile with the properties ``INFERENCE_PRECISION_HINT`` f32 and
``DYNAMIC_QUANTIZATION_GROUP_SIZE`` 0; else OpenVINO may round activations by its own rules.
"""

from lowbit.interop.openvino.constants import compress
from lowbit.interop.openvino.writing import TARGET

__all__ = ["TARGET", "compress"]
