"""The formats of graphs, and the model that other exporters can take."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn

from lowbit.interop import onnx, openvino, torch_export
from lowbit.interop.graphs import Target, with_operators
from lowbit.name_tables import did_you_mean

__all__ = ["TARGETS", "exportable"]

TARGETS: dict[str, Target] = {
    target.name: target for target in (onnx.TARGET, openvino.TARGET, torch_export.TARGET)
}  # fmt: skip


def exportable(model: nn.Module, format: str = "onnx") -> AbstractContextManager[tuple[str, ...]]:
    """Replace the quantized layers of a model by modules of a format's operators, within the block.

    ``torch.export.export``, ``torch.onnx.export(dynamo=True)``, ``openvino.convert_model`` and the exporters of
    transformers take the model then. With ``"onnx"`` the model cannot run inside the block. With ``"openvino"``, call
    ``lowbit.interop.openvino.compress`` on the converted model: it turns bytes into low-bit constants.

    Args:
        model: A model in fp32 on the CPU.
        format: ``"onnx"``, ``"openvino"`` or ``"torch"``.

    Yields:
        The differences to lowbit's results beyond the order of sums.

    Raises:
        ValueError: The format is unknown, a layer has no operator, is prepared for training, or has another dtype than
            fp32.
    """
    target = TARGETS.get(format)
    if target is None:
        names = ", ".join(TARGETS)
        raise ValueError(f"exportable: unknown format {format!r}{did_you_mean(str(format), TARGETS)}; expected {names}")
    return with_operators(model, target)
