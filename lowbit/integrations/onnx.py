"""Errors for lowbit ops in ``torch.onnx.export(dynamo=False)``: they have no ONNX operator.

The exporter traces the ops' kernels, and C++ kernels do not notice. Each op therefore has a row in the exporter's
symbolic table, which raises the error that the fakes raise for ``dynamo=True``.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

from lowbit.backends.dispatch import no_onnx
from lowbit.op_calls import OVERLOADS

__all__ = ["refuse_ops"]

#: The lowest ONNX opset of the exporter; a row is valid for later ones too.
_OPSET = 9


def refuse_ops(onnx: Any) -> None:
    """Register the rows with ``torch.onnx``."""
    for name in OVERLOADS:
        onnx.register_custom_op_symbolic(f"lowbit::{name}", partial(_refuse, name), _OPSET)


def _refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(no_onnx(name))
