"""ONNX Runtime and OpenVINO for ``lowbit bench engines``: how they open files, and their own quantizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

import lowbit as lb
from lowbit.sizes import amount

__all__ = ["PROGRAMS", "File", "Inputs", "Own", "Program", "Section", "Table", "files", "size_cells"]

Inputs = tuple[Tensor, ...]


class Own(NamedTuple):
    """A program's own quantizer, and lowbit's recipe with the same bits.

    Attributes:
        label: The quantizer.
        make: Writes a file from the fp32 file: ``make(source, target, calibration)``.
        recipe: lowbit's recipe.
        calibrated: Whether both use the batches for calibration.
        tables: Whether both quantize embeddings, and output layers that share their weight.
    """

    label: str
    make: Callable[[Path, Path, list[Inputs]], None]
    recipe: str
    calibrated: bool = False
    tables: bool = False


class Program(NamedTuple):
    """A program that runs exported models.

    Attributes:
        name: The program.
        format, suffix: Its format in ``lb.export``, and the end of its files' names.
        open: The session or compiled model of a file, for one thread.
        own: Its quantizers by the bits of a row.
    """

    name: str
    format: str
    suffix: str
    open: Callable[[Path], Any]
    own: dict[str, Own]


class File(NamedTuple):
    """A file of a model: its bits, maker and path."""

    kind: str
    maker: str
    path: Path


class Section(NamedTuple):
    """A table of the page: its title, the text above it, its columns, and the number of columns of text."""

    title: str
    about: str
    head: tuple[str, ...]
    texts: int


class Table(NamedTuple):
    """A model in a program: name of the record, a function that measures its rows in a directory, and further facts."""

    name: str
    section: Section
    rows: Callable[[Path], list[tuple[str, ...]]]
    facts: Mapping[str, str] = {}


# -- ONNX Runtime ------------------------------------------------------------------------------------------------------
def _onnxruntime(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _ort_dynamic(source: Path, target: Path, calibration: list[Inputs]) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(
        str(source), str(target), per_channel=True, weight_type=QuantType.QUInt8, op_types_to_quantize=["MatMul"]
    )  # fmt: skip


def _ort_static(source: Path, target: Path, calibration: list[Inputs]) -> None:
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared = target.with_name("prepared.onnx")
    quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
    names = [entry.name for entry in onnx.load(source).graph.input]

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        rows = iter(calibration)

        def get_next(self) -> dict[str, Any] | None:
            inputs = next(self.rows, None)
            return None if inputs is None else {n: x.numpy() for n, x in zip(names, inputs, strict=True)}

    quantize_static(
        str(prepared), str(target), Reader(), per_channel=True, activation_type=QuantType.QUInt8,
        weight_type=QuantType.QUInt8,
    )  # fmt: skip


def _ort_bits(source: Path, target: Path, calibration: list[Inputs], bits: int) -> None:
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(onnx.load(source), bits=bits, block_size=32, is_symmetric=True)
    quantizer.process()
    quantizer.model.save_model_to_file(str(target))


# -- OpenVINO ----------------------------------------------------------------------------------------------------------
def _openvino(path: Path) -> Any:
    import openvino

    options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    return openvino.Core().compile_model(path, "CPU", options)


def _nncf_static(source: Path, target: Path, calibration: list[Inputs]) -> None:
    import nncf
    import openvino

    rows = nncf.Dataset(calibration, lambda inputs: [value.numpy() for value in inputs])
    model = nncf.quantize(openvino.Core().read_model(source), rows, subset_size=len(calibration))
    openvino.save_model(model, target, compress_to_fp16=False)


def _nncf_weights(source: Path, target: Path, calibration: list[Inputs], mode: str, **options: Any) -> None:
    import nncf
    import openvino

    if options:
        options |= {"ratio": 1.0, "all_layers": True}
    model = nncf.compress_weights(openvino.Core().read_model(source), mode=nncf.CompressWeightsMode[mode], **options)
    openvino.save_model(model, target, compress_to_fp16=False)


PROGRAMS = (
    Program("ONNX Runtime", "onnx", ".onnx", _onnxruntime, {
        "static": Own("quantize_static", _ort_static, "int8-static-affine", calibrated=True),
        "dynamic": Own("quantize_dynamic", _ort_dynamic, "int8"),
        "int8": Own("MatMulNBitsQuantizer, 8 bits", partial(_ort_bits, bits=8), "int8-weight-only:group32"),
        "int4": Own("MatMulNBitsQuantizer, 4 bits", partial(_ort_bits, bits=4), "int4-weight-only:group32"),
    }),
    Program("OpenVINO", "openvino", ".xml", _openvino, {
        "static": Own("nncf.quantize", _nncf_static, "int8-static-affine", calibrated=True),
        "int8": Own("compress_weights, int8", partial(_nncf_weights, mode="INT8_SYM"), "int8-weight-only",
                    tables=True),
        "int4": Own("compress_weights, int4", partial(_nncf_weights, mode="INT4_SYM", group_size=32),
                    "int4-weight-only:group32:fp16", tables=True),
    }),
)  # fmt: skip


# -- files -------------------------------------------------------------------------------------------------------------
def files(
    program: Program,
    directory: Path,
    model: Callable[[], nn.Module],
    write: Callable[[nn.Module, Path], object],
    compared: Iterable[str],
    calibration: list[Inputs],
    tables: Iterable[str] = (),
    floats: Iterable[str] = (),
) -> list[File]:
    """Writes the fp32 file of a model, those of the program's own quantizers, and lowbit's.

    Args:
        program: The program.
        directory: An empty directory for the files.
        model: Loads the model in fp32.
        write: Exports a model to a path.
        compared: The keys of ``program.own`` that are compared; others are ignored.
        calibration: Batches of positional arguments for static quantization.
        tables: Patterns of embeddings and output layers that are quantized if the program does so.
        floats: Patterns of layers that stay floats.
    """
    written = [File("fp32", "", directory / f"fp32{program.suffix}")]
    write(model(), written[0].path)
    for kind in compared:
        quantizer = program.own.get(kind)
        if quantizer is None:
            continue
        theirs, ours = (directory / f"{kind}-{who}{program.suffix}" for who in ("own", "lowbit"))
        quantizer.make(written[0].path, theirs, calibration)
        quantized, collected = model(), None
        if quantizer.calibrated:
            lb.fold_(quantized)  # as quantize_static and NNCF do
            collected = lb.calibrate(quantized, quantizer.recipe, calibration)
        patterns = dict.fromkeys(tables if quantizer.tables else (), quantizer.recipe)
        recipes: Mapping[str, str | None] = {"*": quantizer.recipe, **dict.fromkeys(floats), **patterns}
        lb.quantize_(quantized, recipes, collected)
        write(quantized, ours)
        written += [File(kind, quantizer.label, theirs), File(kind, f"lowbit, {quantizer.recipe}", ours)]
    return written


def size_cells(file: File, whole: File) -> tuple[str, str]:
    """The size of a file, and its ratio to that of another."""
    size, other = _size(file.path), _size(whole.path)
    return amount(size), f"{size / other:.2f}"


def _size(path: Path) -> int:
    """Bytes of a file and of those with its weights."""
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.stem}.*"))
