"""Benchmarks exported models in ONNX Runtime and OpenVINO, next to files of these programs' own quantizers.

``lowbit bench engines`` writes engines.md: quality relative to fp32, size and time, at equal bits.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.evaluate import models
from lowbit.evaluate.data import Wanted
from lowbit.evaluate.tasks import Batch
from lowbit.machine import provenance
from lowbit.sizes import amount
from lowbit.tables import markdown

__all__ = ["run"]

#: Rounds in which the files of a model take turns, and held-out batches.
ROUNDS, HELD_OUT = 7, 4

Inputs = tuple[Tensor, ...]
Run = Callable[[Inputs], Tensor]


class Task(NamedTuple):
    """A model in fp32, with its batches.

    Attributes:
        name: The model.
        model: Loads it; the output is a tensor.
        calibration, held_out: Disjoint batches of positional arguments.
        compared: The rows of ``ENGINES`` that are measured.
        tables: Patterns of the embeddings that are quantized as well.
        floats: Patterns of layers that stay floats with dynamic inputs.
    """

    name: str
    model: Callable[[], nn.Module]
    calibration: list[Inputs]
    held_out: list[Inputs]
    compared: tuple[str, ...]
    tables: tuple[str, ...] = ()
    floats: tuple[str, ...] = ()


class Own(NamedTuple):
    """A program's own quantizer, and lowbit's recipe with the same bits.

    Attributes:
        label: The quantizer.
        make: Writes a file from the fp32 file: ``make(source, target, task)``.
        recipe: lowbit's recipe.
        calibrated: Whether both use the batches for calibration.
        tables: Whether both quantize embeddings.
    """

    label: str
    make: Callable[[Path, Path, Task], None]
    recipe: str
    calibrated: bool = False
    tables: bool = False


class Engine(NamedTuple):
    """A program that runs exported models."""

    name: str
    format: str
    suffix: str
    open: Callable[[Path], Run]
    own: dict[str, Own]


# -- models ------------------------------------------------------------------------------------------------------------
class Sentence(nn.Module):
    """A sentence encoder: the mean of the last hidden states."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(hidden.dtype)
        embedding: Tensor = (hidden * mask).sum(1) / mask.sum(1)
        return embedding


class Frames(nn.Module):
    """Whisper's encoder."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Tensor) -> Tensor:
        hidden: Tensor = self.model(features).last_hidden_state
        return hidden


def _evaluated(
    name: str, wrap: Callable[[nn.Module], nn.Module], of: Callable[[Batch], Inputs]
) -> tuple[Callable[[], nn.Module], list[Inputs], list[Inputs]]:
    """The loader and both parts of the data of a model of ``lowbit evaluate``."""
    row = models.find(name)
    parts = [row.load(row.location(), Wanted(limit=32, part=part)) for part in ("calibration", "held out")]
    calibration, held_out = ([of(batch) for batch in part.batches] for part in parts)
    return lambda: wrap(row.load(row.location(), Wanted(limit=2)).model.float()).eval(), calibration, held_out


def _whisper() -> nn.Module:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    torch.manual_seed(0)
    config = WhisperConfig(d_model=384, encoder_layers=4, encoder_attention_heads=6, encoder_ffn_dim=1536)
    return Frames(WhisperEncoder(config)).eval()


def _spectra(count: int) -> list[Inputs]:
    return [(torch.randn(1, 80, 3000).cumsum(-1) / 40,) for _ in range(count)]


@cache
def tasks() -> tuple[Task, ...]:
    """The models."""
    loaded = _evaluated("minilm", Sentence, lambda batch: (batch.inputs["input_ids"], batch.inputs["attention_mask"]))
    minilm = Task("MiniLM-L6", *loaded, ("dynamic", "int8", "int4"), tables=("word_embeddings",))
    images = _evaluated("efficientnet-lite0", lambda model: model, lambda batch: (batch.inputs,))
    torch.manual_seed(1)
    whisper = Task("Whisper's encoder (tiny, random weights)", _whisper, _spectra(2), _spectra(2),
                   ("dynamic", "int8", "int4"), floats=("conv1", "conv2"))  # fmt: skip
    return Task("EfficientNet-Lite0", *images, ("static",)), minilm, whisper


# -- ONNX Runtime ------------------------------------------------------------------------------------------------------
def _onnxruntime(path: Path) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(inputs: Inputs) -> Tensor:
        feed = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
        return torch.from_numpy(session.run(None, feed)[0])

    return run


def _ort_dynamic(source: Path, target: Path, task: Task) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(
        str(source), str(target), per_channel=True, weight_type=QuantType.QUInt8, op_types_to_quantize=["MatMul"]
    )  # fmt: skip


def _ort_static(source: Path, target: Path, task: Task) -> None:
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared = target.with_name("prepared.onnx")
    quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
    names = [entry.name for entry in onnx.load(source).graph.input]

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        rows = iter(task.calibration)

        def get_next(self) -> dict[str, Any] | None:
            inputs = next(self.rows, None)
            return None if inputs is None else {n: x.numpy() for n, x in zip(names, inputs, strict=True)}

    quantize_static(
        str(prepared), str(target), Reader(), per_channel=True, activation_type=QuantType.QUInt8,
        weight_type=QuantType.QUInt8,
    )  # fmt: skip


def _ort_bits(source: Path, target: Path, task: Task, bits: int) -> None:
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(onnx.load(source), bits=bits, block_size=32, is_symmetric=True)
    quantizer.process()
    quantizer.model.save_model_to_file(str(target))


# -- OpenVINO ----------------------------------------------------------------------------------------------------------
def _openvino(path: Path) -> Run:
    import openvino

    options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    compiled = openvino.Core().compile_model(path, "CPU", options)
    return lambda inputs: torch.from_numpy(compiled([value.numpy() for value in inputs])[0])


def _nncf_static(source: Path, target: Path, task: Task) -> None:
    import nncf
    import openvino

    rows = nncf.Dataset(task.calibration, lambda inputs: [value.numpy() for value in inputs])
    model = nncf.quantize(openvino.Core().read_model(source), rows, subset_size=len(task.calibration))
    openvino.save_model(model, target, compress_to_fp16=False)


def _nncf_weights(source: Path, target: Path, task: Task, mode: str, **options: Any) -> None:
    import nncf
    import openvino

    if options:
        options |= {"ratio": 1.0, "all_layers": True}
    model = nncf.compress_weights(openvino.Core().read_model(source), mode=nncf.CompressWeightsMode[mode], **options)
    openvino.save_model(model, target, compress_to_fp16=False)


ENGINES = (
    Engine("ONNX Runtime", "onnx", ".onnx", _onnxruntime, {
        "static": Own("quantize_static", _ort_static, "int8-static-affine", calibrated=True),
        "dynamic": Own("quantize_dynamic", _ort_dynamic, "int8"),
        "int8": Own("MatMulNBitsQuantizer, 8 bits", partial(_ort_bits, bits=8), "int8-weight-only:group32"),
        "int4": Own("MatMulNBitsQuantizer, 4 bits", partial(_ort_bits, bits=4), "int4-weight-only:group32"),
    }),
    Engine("OpenVINO", "openvino", ".xml", _openvino, {
        "static": Own("nncf.quantize", _nncf_static, "int8-static-affine", calibrated=True),
        "int8": Own("compress_weights, int8", partial(_nncf_weights, mode="INT8_SYM"), "int8-weight-only",
                    tables=True),
        "int4": Own("compress_weights, int4", partial(_nncf_weights, mode="INT4_SYM", group_size=32),
                    "int4-weight-only:group32:fp16", tables=True),
    }),
)  # fmt: skip


# -- measurements ------------------------------------------------------------------------------------------------------
class File(NamedTuple):
    """A file of a model: its bits, maker and path."""

    kind: str
    maker: str
    path: Path


def _size(path: Path) -> int:
    """Bytes of a file and of those with its weights."""
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.stem}.*"))


def files(task: Task, engine: Engine, directory: Path) -> list[File]:
    """Writes the fp32 file of a model, those of the engine's own quantizers, and lowbit's."""
    written = [File("fp32", "", directory / f"fp32{engine.suffix}")]
    lb.export(task.model(), engine.format, written[0].path, batch=task.held_out[0])
    for kind in task.compared:
        quantizer = engine.own.get(kind)
        if quantizer is None:
            continue
        theirs, ours = (directory / f"{kind}-{who}{engine.suffix}" for who in ("own", "lowbit"))
        quantizer.make(written[0].path, theirs, task)
        model = task.model()
        calibration = None
        if quantizer.calibrated:
            lb.fold_(model)  # as quantize_static and NNCF do
            calibration = lb.calibrate(model, quantizer.recipe, task.calibration)
        lb.quantize_(model, _recipes(task, quantizer), calibration)
        lb.export(model, engine.format, ours, batch=task.held_out[0])
        written += [File(kind, quantizer.label, theirs), File(kind, f"lowbit, {quantizer.recipe}", ours)]
    return written


def _recipes(task: Task, own: Own) -> dict[str, str | None]:
    tables = task.tables if own.tables else ()
    return {"*": own.recipe, **dict.fromkeys(task.floats), **dict.fromkeys(tables, own.recipe)}


def _error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def table(task: Task, engine: Engine, directory: Path) -> list[tuple[str, ...]]:
    """The rows of a model in an engine."""
    written = files(task, engine, directory)
    runs = [engine.open(file.path) for file in written]
    held_out = task.held_out[:HELD_OUT]
    with torch.no_grad():
        model = task.model()
        exact = [model(*inputs) for inputs in held_out]
    errors = [statistics.mean(map(_error, map(run, held_out), exact)) for run in runs]
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(ROUNDS):
        for run, times in zip(runs, seconds, strict=True):
            begin = time.perf_counter()
            run(held_out[0])
            times.append(time.perf_counter() - begin)
    whole, plain = _size(written[0].path), statistics.median(seconds[0])
    rows: list[tuple[str, ...]] = []
    for file, error, times in zip(written, errors, seconds, strict=True):
        typical = statistics.median(times)
        rows.append(
            (task.name, engine.name, file.kind, file.maker, f"{error:.2%}", f"{amount(_size(file.path))}",
             f"{_size(file.path) / whole:.2f}", f"{typical * 1e3:.1f}", f"{typical / plain:.2f}")
        )  # fmt: skip
        print(*rows[-1], sep=", ", flush=True)
    return rows


def run(directory: Path) -> Path:
    """Measure, and write ``engines.md``."""
    torch.set_num_threads(1)
    about = provenance("lowbit bench engines", packages=("onnxruntime", "openvino", "nncf", "transformers"))
    rows = []
    for task in tasks():
        for engine in ENGINES:
            with TemporaryDirectory() as scratch:
                rows += table(task, engine, Path(scratch))
    head = ("model", "program", "bits", "quantizer", "error", "size", "relative to fp32", "ms", "relative to fp32")
    lines = [
        "# Exported models in ONNX Runtime and OpenVINO\n",
        *(f"- {name}: {value}" for name, value in about.items()),
        f"\nError: norm of the difference to torch's fp32 output, relative to that output, mean of up to {HELD_OUT} "
        f"held-out batches. Milliseconds: one batch on one thread, medians of {ROUNDS} rounds in which the files of a "
        "model take turns. Both quantizers of a pair have equal bits. Only static int8 uses data: the same batches for "
        "both. OpenVINO runs with inference precision f32.\n",
        markdown(head, rows, numbers=range(4, len(head))),
    ]  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "engines.md"
    path.write_text("\n".join(lines) + "\n")
    return path
