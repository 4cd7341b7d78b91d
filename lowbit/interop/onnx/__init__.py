"""ONNX files, in which layers keep their codes: operators of ONNX and of ONNX Runtime.

Integer parts are exact. Float products are summed in another order.
"""

from lowbit.interop.onnx.writing import TARGET

__all__ = ["TARGET"]
