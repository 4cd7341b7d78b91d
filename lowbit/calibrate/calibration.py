"""Calibration: the result of ``calibrate``, in memory and on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lowbit._version import __version__
from lowbit.calibrate.identity import digest
from lowbit.convert.maker import decibel
from lowbit.files import is_file_name, read_json, replaced, shown, write_json
from lowbit.nn.linear import INPUT_PARTS, PARTS, empty, empty_scales, plain_state
from lowbit.ops.spec import stored_global, stored_scale, stored_zero
from lowbit.recipes import Recipe
from lowbit.serialize import safetensors
from lowbit.serialize.layout import DTYPES
from lowbit.tables import aligned
from lowbit.tensor.quantized import Quantized, Scales

__all__ = ["Calibration", "Edit", "Row"]

CONFIG, FORMAT, VERSION = "calibration.json", "lowbit-calibration", 1

#: The JSON types of a Row's fields, without the recipe.
_NUMBER = (float, int)
_ROW: dict[str, tuple[type, ...]] = {
    "method": (str,), "digest": (str,), "signal": _NUMBER, "noise": _NUMBER, "output_sqnr": (*_NUMBER, type(None)),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """The calibration of one weight.

    Attributes:
        recipe: The recipe of the layer.
        method: The method that chose the codes.
        digest: The digest of the original weight.
        signal: The sum of squares of the weight after transforms.
        noise: The sum of squares of its quantization error.
        output_sqnr: SQNR of the layer's output in dB; None without statistics of its inputs.
    """

    recipe: Recipe
    method: str
    digest: str
    signal: float
    noise: float
    output_sqnr: float | None = None

    @property
    def sqnr(self) -> float:
        """SQNR of the weight, in dB."""
        return decibel(self.signal, self.noise)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, "recipe": self.recipe.to_dict()}


@dataclass(frozen=True)
class Edit:
    """A parameter that a transform changed."""

    name: str
    value: Tensor
    digest: str  # of the original parameter
    weights: tuple[str, ...]  # the weights that changed with it, and must be quantized with it


@dataclass
class Calibration:
    """Quantized weights and input scales of one model, for ``quantize_(model, recipe, calibration=...)``.

    Weights are named by their layer. Further weights of a layer are ``name#1`` and so on.

    Attributes:
        rows: Recipe, method and errors of each weight.
        weights: The quantized weights.
        inputs: Static input scales, and the name of the observer that chose them.
        edits: Parameters that transforms changed.
        data: The digest of the batches; None without data.
        seconds: The duration of the calibration.
    """

    rows: dict[str, Row] = field(default_factory=dict)
    weights: dict[str, Quantized] = field(default_factory=dict)
    inputs: dict[str, tuple[Scales, str]] = field(default_factory=dict)
    edits: list[Edit] = field(default_factory=list)
    data: str | None = None
    seconds: float = 0.0

    def weight(self, name: str, matrix: Tensor, recipe: Recipe) -> Quantized:
        """Return the quantized weight for ``matrix``. Raises ValueError if weight or recipe were not calibrated."""
        row = self.rows.get(name)
        if row is None:
            raise ValueError(
                f"the calibration has no {name!r}, but {', '.join(list(self.rows)[:3])} and others; calibrate and "
                f"quantize with the same skip=..., or name the layer in skip=..."
            )
        if row.recipe != recipe:
            raise ValueError(
                f"the calibration of {name!r} is for {_described(row.recipe)}, but the recipe is {_described(recipe)}; "
                f"give the recipe that was calibrated"
            )
        if row.digest != digest(matrix):
            raise ValueError(
                f"the weight {name!r} is not the one that was calibrated; calibrate this model, or load that one"
            )
        return replace(self.weights[name], dtype=matrix.dtype).to(matrix.device)

    def names(self) -> set[str]:
        """The names of all weights, input scales and edits."""
        return {*self.rows, *(f"{name}.input" for name in self.inputs), *(f"edit {edit.name}" for edit in self.edits)}

    def since(self, before: Collection[str]) -> Calibration:
        """Return everything whose name is not in ``before``, an earlier result of ``names()``."""
        rows = {name: row for name, row in self.rows.items() if name not in before}
        return Calibration(
            rows,
            {name: self.weights[name] for name in rows},
            {name: scales for name, scales in self.inputs.items() if f"{name}.input" not in before},
            [edit for edit in self.edits if f"edit {edit.name}" not in before],
            self.data,
        )

    def add(self, other: Calibration) -> None:
        """Add the content of another Calibration."""
        self.rows.update(other.rows)
        self.weights.update(other.weights)
        self.inputs.update(other.inputs)
        self.add_edits(other.edits)

    def add_edits(self, edits: Iterable[Edit]) -> None:
        """Add edits, and merge them with earlier edits of the same parameters."""
        by_name = {edit.name: edit for edit in self.edits}
        for edit in edits:
            first = by_name.get(edit.name)
            if first is not None:
                edit = replace(edit, digest=first.digest, weights=tuple(dict.fromkeys((*first.weights, *edit.weights))))
            by_name[edit.name] = edit
        self.edits = list(by_name.values())

    def check_edits(self, model: nn.Module, used: Collection[str]) -> dict[str, Tensor]:
        """Return the new values of parameters of ``model`` that transforms changed, by name.

        Args:
            model: The model to quantize.
            used: The weights that it takes from this calibration.

        Raises:
            ValueError: A parameter is not the calibrated one, or a weight that changed with it is not used.
        """
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for edit in self.edits:
            missing = [name for name in edit.weights if name not in used]
            if missing:
                raise ValueError(
                    f"the calibration changes {edit.name} together with the weight of {missing[0]}, which is not "
                    f"quantized here; calibrate and quantize with the same recipe and skip=..."
                )
            parameter = parameters.get(edit.name)
            fits = parameter is not None and (parameter.shape, parameter.dtype) == (edit.value.shape, edit.value.dtype)
            if not fits or digest(parameter) != edit.digest:
                raise ValueError(
                    f"the parameter {edit.name!r} is not the one that was calibrated; calibrate this model, or load "
                    f"that one"
                )
        return {edit.name: edit.value for edit in self.edits}

    def input_scales(self, name: str, recipe: Recipe) -> Scales | None:
        """Return the static input scales of the layer ``name``; None if the recipe has dynamic scales.

        Raises ValueError if the layer was not calibrated.
        """
        if not recipe.static:
            return None
        if name not in self.inputs:
            raise ValueError(
                f"the calibration has no input scales for {name!r}; calibrate with the same model and skip"
            )
        return self.inputs[name][0]

    def save(self, directory: str | Path) -> None:
        """Write ``calibration.json`` and a safetensors file with codes and scales.

        Args:
            directory: Created if missing.

        Raises:
            OSError: The directory cannot be written.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {f"{name}.{part}": t for name, q in self.weights.items() for part, t in plain_state(q).items()}
        tensors.update(
            (f"{name}.{part}", t)
            for name, (scales, _) in self.inputs.items()
            for part, t in zip(INPUT_PARTS, scales, strict=False)
            if t is not None
        )
        tensors.update((f"edit.{edit.name}", edit.value) for edit in self.edits)
        file = f"weights-{self._key()[:16]}.safetensors"
        with replaced(directory / file) as temporary:
            sha256, size = safetensors.write(temporary, tensors)
        config = {
            "format": FORMAT, "version": VERSION, "lowbit": __version__, "data": self.data, "seconds": self.seconds,
            "weights": {"file": file, "sha256": sha256, "bytes": size},
            "layers": {name: {**row.to_dict(), **_shape(self.weights[name])} for name, row in self.rows.items()},
            "inputs": {name: observer for name, (_, observer) in self.inputs.items()},
            "edits": {edit.name: {"digest": edit.digest, "weights": list(edit.weights)} for edit in self.edits},
        }  # fmt: skip
        write_json(directory / CONFIG, config)

    def _key(self) -> str:
        rows = (f"{name} {row.to_dict()} {self.data}" for name, row in self.rows.items())
        return hashlib.sha256("".join((*rows, str(self.inputs), str(self.edits))).encode()).hexdigest()

    @classmethod
    def load(cls, directory: str | Path) -> Calibration:
        """Read the files that ``save`` wrote.

        Args:
            directory: The directory given to ``save``.

        Raises:
            FileNotFoundError: A file is missing.
            ValueError: A file is damaged, or was not written by this version of ``save``.
        """
        path = Path(directory) / CONFIG
        config = read_json(path)
        if config.get("format") != FORMAT or config.get("version") != VERSION:
            raise ValueError(f"{path} was not written by this version of lowbit's Calibration.save")
        with _damage(path):
            stored = config["weights"]
            if not is_file_name(stored["file"]):
                raise ValueError(f"it names a file outside of its directory: {shown(stored['file'])}")
            file = path.with_name(stored["file"])
            sha256, size = _typed(stored, "sha256", str), _typed(stored, "bytes", int)
        tensors = safetensors.read(file, sha256, size)
        with _damage(path):
            return cls._read(config, tensors)

    @classmethod
    def _read(cls, config: dict[str, Any], tensors: dict[str, Tensor]) -> Calibration:
        """The Calibration in the file. Removes all tensors. Raises KeyError, TypeError or ValueError."""
        calibration = cls(data=_typed(config, "data", str, type(None)), seconds=_typed(config, "seconds", *_NUMBER))
        for name, row in config["layers"].items():
            recipe = Recipe.from_dict(row["recipe"])
            calibration.rows[name] = Row(recipe, *(_typed(row, field, *types) for field, types in _ROW.items()))
            calibration.weights[name] = _weight(name, row, recipe, tensors)
        for name, observer in config["inputs"].items():
            if name not in calibration.rows or not isinstance(observer, str):
                raise ValueError(f"the inputs of {shown(name)}, by {shown(observer)}, belong to no layer")
            scales = _input_scales(name, calibration.rows[name].recipe, calibration.weights[name], tensors)
            calibration.inputs[name] = scales, observer
        for name, edit in config["edits"].items():
            weights = _typed(edit, "weights", list)
            if not all(isinstance(weight, str) for weight in weights):
                raise TypeError(f"the weights of an edit are {shown(weights)}, but must be names")
            value = tensors.pop(f"edit.{name}")
            calibration.edits.append(Edit(name, value, _typed(edit, "digest", str), tuple(weights)))
        if tensors:
            raise ValueError(f"no layer and no edit has the tensors {', '.join(list(tensors)[:4])}")
        return calibration

    def __repr__(self) -> str:
        return f"<Calibration of {len(self.rows)} weights; print it for a table>"

    def __str__(self) -> str:
        rows = [("layer", "recipe", "method", "SQNR dB", "of output", "inputs")]
        for name, row in self.rows.items():
            output = "" if row.output_sqnr is None else f"{row.output_sqnr:.1f}"
            inputs = self.inputs[name][1] if name in self.inputs else ""
            rows.append((name, row.recipe.name, row.method, f"{row.sqnr:.1f}", output, inputs))
        return aligned(rows, (3, 4))


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Turn errors in a file's content into a ValueError that names the damaged file."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError, AssertionError) as error:
        text = f"{type(error).__name__}: {str(error)[:500]}"
        raise ValueError(f"{path} is damaged ({text}); copy or save it again") from None


def _typed(row: dict[str, Any], name: str, *types: type) -> Any:
    """A field of the file. Raises KeyError, and TypeError for another type."""
    if type(row[name]) not in types:
        expected = " or ".join("null" if cls is type(None) else cls.__name__ for cls in types)
        raise TypeError(f"{name} is {shown(row[name])}, but must be a {expected}")
    return row[name]


def _weight(name: str, row: dict[str, Any], recipe: Recipe, tensors: dict[str, Tensor]) -> Quantized:
    """A layer's weight. Raises ValueError for tensors that do not fit its recipe and shape."""
    shape = _typed(row, "shape", list)
    if len(shape) != 2 or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"the shape of {name} is {shown(shape)}, but must have two sizes")
    dtype = DTYPES.get(_typed(row, "dtype", str))
    if dtype is None:
        raise ValueError(f"the dtype of {name} is {shown(row['dtype'])}, but must be one of {', '.join(DTYPES)}")
    expected = empty(tuple(shape), recipe.weight, dtype, "meta")
    parts = {part: tensors.pop(f"{name}.{part}") for part in PARTS if f"{name}.{part}" in tensors}
    parts["scale"] = stored_scale(parts["scale"], recipe.weight.name)
    zero_point = stored_zero(parts.get("zero_point"), recipe.weight.name)
    global_scale = stored_global(parts.get("global_scale"))
    for part, stored in (("zero_point", zero_point), ("global_scale", global_scale)):
        if stored is not None:
            parts[part] = stored
    _check_parts(name, parts, expected.parts)
    return Quantized(
        parts["codes"], parts["scale"], zero_point, global_scale, recipe.weight, expected.shape, dtype
    )  # fmt: skip


def _input_scales(name: str, recipe: Recipe, weight: Quantized, tensors: dict[str, Tensor]) -> Scales:
    """The static scales of a layer's inputs. Raises ValueError for tensors that do not fit its recipe and width."""
    if not recipe.static or recipe.input is None:
        raise ValueError(f"{name} has input scales, but its recipe {recipe.name!r} has no static scales")
    expected = empty_scales(recipe.input, weight.shape[1], "meta")
    named = zip(INPUT_PARTS, (expected.scale, expected.zero_point), strict=True)
    parts = {part: tensors.pop(f"{name}.{part}") for part in INPUT_PARTS if f"{name}.{part}" in tensors}
    _check_parts(name, parts, {part: t for part, t in named if t is not None})
    return Scales(*(parts.get(part) for part in INPUT_PARTS))  # type: ignore[arg-type]  # a scale is always there


def _check_parts(name: str, parts: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raise ValueError unless ``parts`` have the same names, dtypes and shapes as ``expected``."""
    layout, wanted = ({part: (t.dtype, list(t.shape)) for part, t in row.items()} for row in (parts, expected))
    for part in (*PARTS, *INPUT_PARTS):
        if layout.get(part) != wanted.get(part):
            raise ValueError(f"{name}.{part} is {layout.get(part)}, but must be {wanted.get(part)}")


def _shape(q: Quantized) -> dict[str, Any]:
    return {"shape": list(q.shape), "dtype": str(q.dtype).removeprefix("torch.")}


def _described(recipe: Recipe) -> str:
    return f"{recipe.name} ({recipe.output})"
