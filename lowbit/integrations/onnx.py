"""Refusals of ``torch.onnx.export(dynamo=False)``, which finds out that an op has no ONNX operator once it has traced.

A trace runs the ops' kernels, of which those in C++ do not know of it. So the exporter's own table of how ops are
written has a row for each op of lowbit, which raises what the fakes raise for ``dynamo=True``.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

from lowbit.backends.dispatch import no_onnx
from lowbit.op_calls import OVERLOADS

__all__ = ["refuse_ops"]

#: The lowest version of ONNX's operators that the exporter writes; a row serves later ones too.
_OPSET = 9


def refuse_ops(onnx: Any) -> None:
    """Give ``torch.onnx`` the rows."""
    for name in OVERLOADS:
        onnx.register_custom_op_symbolic(f"lowbit::{name}", partial(_refuse, name), _OPSET)


def _refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(no_onnx(name))
