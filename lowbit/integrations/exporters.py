"""A quantizer for the exporters of transformers: ``OnnxConfig(quantizer=Quantizer("int8-static", batches))``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx
from transformers.exporters.configs import ExportFormat
from transformers.exporters.quantizers.base import ExportQuantizer

from lowbit.calibrate import calibrate
from lowbit.convert.quantize import quantize_
from lowbit.convert.select import DEFAULT_SKIP, Skip
from lowbit.interop.exportable import TARGETS
from lowbit.interop.graphs.modules import with_layers
from lowbit.interop.graphs.replacing import put_operators_

__all__ = ["Quantizer"]

#: The format of layers in each format of transformers.
_FORMATS = {ExportFormat.ONNX: "onnx", ExportFormat.OPENVINO: "openvino", ExportFormat.DYNAMO: "torch"}


class Quantizer(ExportQuantizer):  # type: ignore[misc]
    """Quantizes a float model with a recipe while an exporter of transformers exports it.

    The exported model has the operators of ``lb.export``. After an export to OpenVINO, call
    ``lowbit.interop.openvino.compress(exported.program)``.

    A model that is quantized already needs no quantizer: export it within ``lowbit.interop.exportable``.

    Args:
        recipe: As for ``quantize_``.
        calibration_dataset: Batches of inputs for recipes with static scales, and for ``method``.
        method: A method of ``calibrate``. None: round to nearest, with the static scales of the batches.
        skip: As for ``quantize_``. The default leaves output layers in high precision.
    """

    quantizes_fx_graph = True
    supported_formats = tuple(_FORMATS)
    required_packages = ("torch",)

    def __init__(
        self,
        recipe: Any,
        calibration_dataset: Iterable[dict[str, Any]] | None = None,
        method: str | None = None,
        skip: Skip = DEFAULT_SKIP,
    ) -> None:
        super().__init__(calibration_dataset)
        self.recipe, self.method, self.skip = recipe, method, skip

    def quantize(self, model: fx.GraphModule, sample_inputs: dict[str, Any], export_format: ExportFormat) -> Any:
        """Quantize a traced program.

        Raises:
            ValueError: The program has lowbit's ops, or a layer cannot be quantized or exported.
        """
        if any(str(node.target).startswith("lowbit.") for node in model.graph.nodes):
            raise ValueError(
                "the model is quantized already; leave out the quantizer and export it within "
                f"lowbit.interop.exportable(model, {_FORMATS[export_format]!r})"
            )
        with_layers(model)
        calibration = None
        if self.calibration_dataset is not None or self.method is not None:
            batches = list(self.traced_calibration(sample_inputs))
            calibration = calibrate(model, self.recipe, batches, method=self.method or "nearest", skip=self.skip)
        quantize_(model, self.recipe, calibration, skip=self.skip)
        put_operators_(model, TARGETS[_FORMATS[export_format]])
        return model
