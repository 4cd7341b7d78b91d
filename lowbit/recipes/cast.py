"""Cast and Gemm: how one operand, and both operands of one matmul, are quantized."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from lowbit.scaling import Scheme
from lowbit.scaling import scheme as find_scheme

__all__ = ["EDEN_BLOCK", "TREATMENTS", "Cast", "Gemm", "checked", "from_data", "listed", "set_fields"]

T = TypeVar("T")

#: The values of each field of a Cast. Callers that do not support all of them raise ValueError for the rest.
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "rounding": ("nearest", "stochastic", "eden"),
    "transform": (None, "hadamard", "signed-hadamard", "random-hadamard"),
    "scale": ("current", "static", "delayed"),
    "rule": ("amax", "search", "four-over-six"),
}
#: Block sizes of the Hadamard transform.
_ROTATIONS = (16, 32, 64, 128)
#: The length of the vectors that MS-EDEN rotates and corrects.
EDEN_BLOCK = 128
_SAVE = ("codes", "recompute", "high", "operand")
#: How a backward matmul uses an operand that forward has quantized, if it does not quantize it again by a Cast.
TREATMENTS = ("reuse", "fold", "dequantize")


@dataclass(frozen=True, init=False)
class Cast:
    """How one operand is quantized.

    Args:
        scheme: A Scheme or its name.
        rounding: ``"nearest"``, ``"stochastic"`` or ``"eden"``: codes rounded to nearest, with corrected scales that
            are rounded stochastically (MS-EDEN, arXiv 2601.22813).
        transform: Hadamard transform of the operand along the axis that the matmul contracts: None, ``"hadamard"``,
            ``"signed-hadamard"`` (after fixed signs) or ``"random-hadamard"`` (after random signs; ``"eden"`` needs
            it).
        scale: ``"current"`` (from the tensor itself), ``"delayed"`` (from the largest magnitude of the last
            ``history`` training steps) or ``"static"`` (from calibration).
        rule: How a block's scale is computed from its elements: ``"amax"``, ``"search"`` (least squared error) or
            ``"four-over-six"`` (the largest element becomes FP4's 6 or 4, whichever has the smaller squared error).
        history: Training steps that delayed scaling looks back.

    Raises:
        ValueError: An unknown value; delayed scaling of a scheme with more than one fp32 scale per tensor;
            four-over-six of a scheme other than FP4 with E4M3 scales; ``"eden"`` of a scheme other than nvfp4.
        TypeError: ``scheme`` is neither a Scheme nor a name.
    """

    scheme: Scheme
    rounding: str = "nearest"
    transform: str | None = None
    scale: str = "current"
    rule: str = "amax"
    history: int = 16

    def __init__(
        self,
        scheme: Scheme | str,
        rounding: str = "nearest",
        transform: str | None = None,
        scale: str = "current",
        rule: str = "amax",
        history: int = 16,
    ) -> None:
        values = {"rounding": rounding, "transform": transform, "scale": scale, "rule": rule}
        for name, value in values.items():
            if value not in _CHOICES[name]:
                raise ValueError(f"Cast: {name} must be one of {listed(_CHOICES[name])}, got {value!r}")
        if not isinstance(history, int) or isinstance(history, bool) or history < 1:
            raise ValueError(f"Cast: history counts training steps, an integer of at least 1, got {history!r}")
        scheme = find_scheme(scheme)
        set_fields(self, scheme=scheme, **values, history=history)
        one_scale = scheme.block == (None, None) and scheme.scale_format.name == "fp32" and not scheme.affine
        if scale == "delayed" and not one_scale:
            raise ValueError(
                f"Cast: delayed scaling needs a scheme with one fp32 scale per tensor, got {scheme}; "
                f"use {scheme.format.name}:tensor, or scale='current'"
            )
        if scale == "static" and scheme.reference_only:
            raise ValueError(
                f"Cast: static scales need a scheme without minima and superblocks, got {scheme}; "
                f"use {scheme.format.name}:tensor{':affine' * (not scheme.format.signed)}, or scale='current'"
            )
        if rule == "four-over-six" and (scheme.format.name, scheme.scale_format.name) != ("fp4_e2m1", "fp8_e4m3"):
            raise ValueError(
                f"Cast: four-over-six needs FP4 elements with E4M3 scales, got {scheme}; use nvfp4, or rule='search'"
            )
        if (rounding == "eden") != (transform == "random-hadamard"):
            raise ValueError(
                "Cast: rounding='eden' and transform='random-hadamard' belong together; give both or neither"
            )
        fits = scheme.block in ((1, 16), (16, 1)) and scheme.global_scale == "tensor"
        if rounding == "eden" and (not fits or rule != "amax" or scale != "current"):
            raise ValueError(
                f"Cast: rounding='eden' needs nvfp4 or nvfp4:T with rule='amax' and scale='current', got {self}"
            )

    def rotation(self, axis: int) -> int | None:
        """Return the block size of the transform along the contracted ``axis`` of the operand; None without transform.

        It is the number of elements that share a scale if that is a power of two from 16 to 128, otherwise 128.
        """
        if self.transform is None:
            return None
        if self.transform == "random-hadamard":
            return EDEN_BLOCK
        group = self.scheme.block[axis]
        return group if group in _ROTATIONS else _ROTATIONS[-1]

    def __str__(self) -> str:
        more = [f"{name}={value}" for name, value in self.chosen().items()]
        return " ".join([self.scheme.name, *more])

    def chosen(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, without ``scheme``."""
        options = [f for f in fields(self) if f.name != "scheme"]
        return {f.name: getattr(self, f.name) for f in options if getattr(self, f.name) != f.default}

    def to_dict(self) -> str | dict[str, Any]:
        """Return JSON data: the scheme's name, or a dict if other fields differ from their defaults."""
        chosen = self.chosen()
        return {"scheme": self.scheme.name, **chosen} if chosen else self.scheme.name

    @classmethod
    def from_dict(cls, data: Any) -> Cast:
        """Return the Cast that ``to_dict`` described. Raises ValueError for other data."""
        if isinstance(data, str):
            return cls(data)
        return from_data(cls, data, [f.name for f in fields(cls)], ("scheme",))


@dataclass(frozen=True, init=False)
class Gemm:
    """How both operands of one matmul are quantized.

    Args:
        a: A Cast, or a scheme or its name as the Cast with defaults. None: the operand stays float.
        b: As ``a``. In a backward matmul ``b`` is an operand of forward: the weight for grad_input, the input for
            grad_weight. A Cast quantizes it again, because the matmul contracts another axis. It may also be

            - ``"reuse"``: multiply the quantized values of forward, codes and scales;
            - ``"fold"``: multiply the codes of forward, and fold their scales into g before g is quantized. This needs
              floating-point scales, one per row;
            - ``"dequantize"``: decode the codes of forward to the dtype of g and multiply floats. ``a`` must be None.
        save: The form in which ``b`` is saved for backward:

            - ``"codes"``: quantized as in forward; a Cast ``b`` quantizes the decoded values;
            - ``"recompute"``: float, and quantized again in backward, bit-identical to ``"codes"``. It costs time. It
              costs no memory if the operand is stored anyway, such as a weight that FSDP2 gathers again for backward;
            - ``"high"``: float; a Cast ``b`` quantizes this directly, with one rounding less;
            - ``"operand"``: quantized by the Cast ``b`` in forward. It rounds like ``"high"`` and uses the memory of
              ``"codes"``.

    Raises:
        TypeError: An operand is not a Cast, a scheme or one of the words above.
        ValueError: Unknown ``save``; ``a`` or ``save`` does not fit ``b``.
    """

    a: Cast | None
    b: Cast | Literal["reuse", "fold", "dequantize"] | None
    save: str = "codes"

    def __init__(self, a: Cast | Scheme | str | None, b: Cast | Scheme | str | None, save: str = "codes") -> None:
        if save not in _SAVE:
            raise ValueError(f"Gemm: save must be one of {listed(_SAVE)}, got {save!r}")
        if isinstance(a, str) and a in TREATMENTS:
            raise ValueError(f"Gemm: a cannot be {a!r}, which is for an operand of forward; give it as b")
        set_fields(self, a=_as_cast(a), b=b if isinstance(b, str) and b in TREATMENTS else _as_cast(b), save=save)
        if self.b == "dequantize" and self.a is not None:
            raise ValueError(f"Gemm: b='dequantize' multiplies floats, so a must be None, got {self.a}")
        if save == "operand" and not isinstance(self.b, Cast):
            raise ValueError(f"Gemm: save='operand' needs a Cast or scheme as b, which quantizes it; got {self.b!r}")

    def __str__(self) -> str:
        return f"{self.a or 'float'} x {self.b or 'float'}"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        b = self.b.to_dict() if isinstance(self.b, Cast) else self.b
        data = {"a": None if self.a is None else self.a.to_dict(), "b": b}
        return data if self.save == "codes" else {**data, "save": self.save}

    @classmethod
    def from_dict(cls, data: Any) -> Gemm:
        """Return the Gemm that ``to_dict`` described. Raises ValueError for other data."""
        values = checked("Gemm", data, ("a", "b", "save"), ("a", "b"))
        a, b = values["a"], values["b"]
        return from_data(
            cls,
            {
                **values,
                "a": None if a is None else Cast.from_dict(a),
                "b": b if b is None or b in TREATMENTS else Cast.from_dict(b),
            },
            ("a", "b", "save"),
            ("a", "b"),
        )


def _as_cast(value: Any) -> Cast | None:
    return value if value is None or isinstance(value, Cast) else Cast(value)


# -- frozen values, to and from JSON data ----------------------------------------------------------------------------
def listed(values: Iterable[Any]) -> str:
    return ", ".join(map(repr, values))


def set_fields(frozen: Any, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(frozen, name, value)


def checked(what: str, data: Any, known: Iterable[str], needed: Iterable[str]) -> dict[str, Any]:
    """Return ``data`` if it is a dict with these keys. Raises ValueError otherwise."""
    if not isinstance(data, dict):
        raise ValueError(f"{what}: expected a dict, got {data!r}")
    unknown, missing = sorted(map(str, data.keys() - set(known))), sorted(set(needed) - data.keys())
    if unknown or missing:
        raise ValueError(f"{what}: expected the keys {', '.join(known)}; unknown {unknown}, missing {missing}")
    return data


def from_data(cls: type[T], data: Any, known: Iterable[str], needed: Iterable[str]) -> T:
    """``cls(**data)``; values of wrong types raise ValueError, because the data is damaged."""
    try:
        return cls(**checked(cls.__name__, data, known, needed))
    except TypeError as error:
        raise ValueError(str(error)) from None
