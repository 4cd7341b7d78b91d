"""Casts and GEMMs as values: what happens to the operands of a matrix product."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from lowbit.scaling import Scheme
from lowbit.scaling import scheme as find_scheme

__all__ = ["EDEN_BLOCK", "TREATMENTS", "Cast", "Gemm", "checked", "from_data", "listed", "set_fields"]

T = TypeVar("T")

#: What each field of a Cast may be. Not every caller supports every value; each refuses the others.
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "rounding": ("nearest", "stochastic", "eden"),
    "transform": (None, "hadamard", "signed-hadamard", "random-hadamard"),
    "scale": ("current", "static", "delayed"),
    "rule": ("amax", "search", "four-over-six"),
}
#: The sizes of the blocks that can be transformed.
_ROTATIONS = (16, 32, 64, 128)
#: The vectors that eden turns and corrects.
EDEN_BLOCK = 128
#: What can be kept for backward.
_SAVE = ("codes", "recompute", "high", "operand")
#: What becomes of an operand of a backward product that forward has quantized, besides a Cast.
TREATMENTS = ("reuse", "fold", "dequantize")


@dataclass(frozen=True, init=False)
class Cast:
    """How one operand is quantized.

    ``scheme``: a Scheme or its name.
    ``rounding``: ``"nearest"``, ``"stochastic"`` or ``"eden"`` (codes to nearest, and scales that make up for it and
    are rounded stochastically, arXiv 2601.22813).
    ``transform``: what multiplies the operand first along the axis that the product contracts: None, ``"hadamard"``,
    ``"signed-hadamard"`` after fixed signs or ``"random-hadamard"`` after random ones, which eden needs.
    ``scale``: ``"current"`` (from the tensor itself), ``"delayed"`` (from the largest magnitude of the last ``history``
    training steps) or ``"static"`` (from calibration).
    ``rule``: how a block's scale follows from its elements: ``"amax"``, ``"search"`` (least squared error) or
    ``"four-over-six"`` (the largest becomes FP4's 6 or 4, whichever has the smaller squared error).
    Raises ValueError for another value, for delayed scaling of a scheme that has more than one fp32 scale for the
    tensor, for four-over-six of one that is not FP4 with E4M3 scales, and for eden of another than nvfp4; TypeError for
    a scheme that is none.
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
        found = find_scheme(scheme)
        set_fields(self, scheme=found, **values, history=history)
        one_scale = found.block == (None, None) and found.scale_format.name == "fp32" and not found.affine
        if scale == "delayed" and not one_scale:
            raise ValueError(
                f"Cast: delayed scaling keeps one fp32 scale for the tensor, and {found} has others; "
                f"use {found.format.name}:tensor, or scale='current'"
            )

        if rule == "four-over-six" and (found.format.name, found.scale_format.name) != ("fp4_e2m1", "fp8_e4m3"):
            raise ValueError(
                f"Cast: four-over-six chooses E4M3 scales of FP4 numbers, got {found}; use nvfp4, or search"
            )

        if (rounding == "eden") != (transform == "random-hadamard"):
            raise ValueError(
                "Cast: rounding='eden' and transform='random-hadamard' belong together; say both or neither"
            )
        fits = found.block in ((1, 16), (16, 1)) and found.global_scale == "tensor"
        if rounding == "eden" and (not fits or rule != "amax" or scale != "current"):
            raise ValueError(f"Cast: eden corrects scales of nvfp4 or nvfp4:T by the amax, got {self}")

    def rotation(self, axis: int) -> int | None:
        """The block of the transform along the operand's ``axis``, which is contracted; None: there is none.

        It is the block that shares a scale where that is a power of two from 16 to 128, and else 128.
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
        """The fields, but the scheme, that are not the default."""
        mine = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {name: value for name, value in mine.items() if name != "scheme"}

    def to_dict(self) -> str | dict[str, Any]:
        """JSON data: the scheme's name, or a dict where more than the scheme is chosen."""
        chosen = self.chosen()
        return {"scheme": self.scheme.name, **chosen} if chosen else self.scheme.name

    @classmethod
    def from_dict(cls, data: Any) -> Cast:
        """The Cast that ``to_dict`` described. Raises ValueError for other data."""
        if isinstance(data, str):
            return cls(data)
        return from_data(cls, data, [f.name for f in fields(cls)], ("scheme",))


@dataclass(frozen=True, init=False)
class Gemm:
    """What happens to both operands of one product. A scheme or its name stands for its Cast; None: it stays float.

    In a backward product ``b`` is an operand that forward had (the weight for grad_input, the input for grad_weight),
    and it may also be

    - ``"reuse"``: the codes of forward are multiplied again, with their scales (reuse codes);
    - ``"fold"``: these codes are multiplied without their scales, which multiply g before g is quantized (fold
      scales). It needs scales that are floating-point numbers, one a row;
    - ``"dequantize"``: the codes are decoded to the dtype of g, and the product is one of floats. ``a`` is None.

    A Cast there means that the operand is quantized again (requantize), because the product contracts another axis.
    ``save`` says what of ``b`` is kept from forward to backward:

    - ``"codes"``: the codes; a Cast quantizes what these decode to;
    - ``"recompute"``: the float operand, quantized again in backward, with the bits of ``"codes"``. It costs time, and
      no memory where the operand is kept anyhow: the weight, which FSDP2 gathers again for backward;
    - ``"high"``: the float operand; a Cast quantizes this itself, with one rounding less;
    - ``"operand"``: the codes that the Cast ``b`` makes of the float operand in forward. It rounds as ``"high"`` does,
      and takes the memory of ``"codes"``.

    Raises TypeError for what is no Cast, scheme or treatment; ValueError for another ``save``, and for an ``a`` or a
    ``save`` that does not fit ``b``.
    """

    a: Cast | None
    b: Cast | Literal["reuse", "fold", "dequantize"] | None
    save: str = "codes"

    def __init__(self, a: Cast | Scheme | str | None, b: Cast | Scheme | str | None, save: str = "codes") -> None:
        if save not in _SAVE:
            raise ValueError(f"Gemm: save must be one of {listed(_SAVE)}, got {save!r}")
        if isinstance(a, str) and a in TREATMENTS:
            raise ValueError(f"Gemm: a cannot be {a!r}, which says what becomes of an operand of forward: that is b")
        set_fields(self, a=_as_cast(a), b=b if isinstance(b, str) and b in TREATMENTS else _as_cast(b), save=save)
        if self.b == "dequantize" and self.a is not None:
            raise ValueError(f"Gemm: b='dequantize' makes a product of floats, so a must be None, got {self.a}")
        if save == "operand" and not isinstance(self.b, Cast):
            raise ValueError(f"Gemm: save='operand' keeps what the Cast b makes, and b is {self.b!r}; give a scheme")

    def __str__(self) -> str:
        return f"{self.a or 'float'} x {self.b or 'float'}"

    def to_dict(self) -> dict[str, Any]:
        """JSON data."""
        b = self.b.to_dict() if isinstance(self.b, Cast) else self.b
        made = {"a": None if self.a is None else self.a.to_dict(), "b": b}
        return made if self.save == "codes" else {**made, "save": self.save}

    @classmethod
    def from_dict(cls, data: Any) -> Gemm:
        """The Gemm that ``to_dict`` described. Raises ValueError for other data."""
        values = checked("Gemm", data, ("a", "b", "save"), ("a", "b"))
        a, b = (None if values[one] is None else values[one] for one in ("a", "b"))
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
    """``data``, if it is a dict with these keys. Raises ValueError."""
    if not isinstance(data, dict):
        raise ValueError(f"{what}: expected a dict, got {data!r}")
    unknown, missing = sorted(map(str, data.keys() - set(known))), sorted(set(needed) - data.keys())
    if unknown or missing:
        raise ValueError(f"{what}: expected the keys {', '.join(known)}; unknown {unknown}, missing {missing}")
    return data


def from_data(kind: type[T], data: Any, known: Iterable[str], needed: Iterable[str]) -> T:
    """``kind(**data)``; data of other types raises ValueError, because data is what is wrong."""
    try:
        return kind(**checked(kind.__name__, data, known, needed))
    except TypeError as error:
        raise ValueError(str(error)) from None
