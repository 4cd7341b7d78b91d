"""Casts, GEMMs and recipes as values: what happens to each operand of a Linear layer's three matrix products.

With x ``[M, K]``, the weight w ``[N, K]`` and the gradient g ``[M, N]`` of the output:

    output       y  = x @ w.T     a = x, b = w
    grad_input   dx = g @ w       a = g, b = w
    grad_weight  dw = g.T @ x     a = g, b = x

No torch is needed here. The table of named recipes is ``lowbit.recipes``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar, cast

from lowbit.scaling import Scheme
from lowbit.scaling import scheme as find_scheme

__all__ = ["HADAMARD", "Cast", "Gemm", "Recipe", "refuse_beyond"]

T = TypeVar("T")

#: What each field of a Cast may be. Not every caller supports every value; each refuses the others.
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "rounding": ("nearest", "stochastic"),
    "transform": (None, "hadamard"),
    "scale": ("current", "static", "delayed"),
    "rule": ("amax", "search"),
}
#: What the name of a recipe ends with whose operands are transformed, and the sizes of the blocks that can be.
HADAMARD = ":hadamard"
_ROTATIONS = (16, 32, 64, 128)

_SAVE = ("codes", "recompute", "high")
_TREATMENTS = ("reuse", "fold")


@dataclass(frozen=True, init=False)
class Cast:
    """How one operand is quantized.

    ``scheme``: a Scheme or its name. ``rounding``: ``"nearest"`` or ``"stochastic"``. ``transform``: what multiplies
    the operand first, None or ``"hadamard"``. ``scale``: ``"current"`` (from the tensor itself), ``"delayed"`` (from
    the largest magnitude of the last ``history`` training steps) or ``"static"`` (from calibration). ``rule``: how a
    block's scale follows from its elements, ``"amax"`` or ``"search"`` (least squared error).
    Raises ValueError for another value, and for delayed scaling of a scheme that has more than one fp32 scale for the
    tensor; TypeError for a scheme that is none.
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
                raise ValueError(f"Cast: {name} must be one of {_listed(_CHOICES[name])}, got {value!r}")
        if not isinstance(history, int) or isinstance(history, bool) or history < 1:
            raise ValueError(f"Cast: history counts training steps, an integer of at least 1, got {history!r}")
        found = find_scheme(scheme)
        _set(self, scheme=found, **values, history=history)
        if rounding == "stochastic" and found.format.kind == "codebook":
            raise ValueError(
                f"Cast: {found} is of a codebook, which rounds to nearest alone; use a float or integer format"
            )
        one_scale = found.block == (None, None) and found.scale_format.name == "fp32" and not found.affine
        if scale == "delayed" and not one_scale:
            raise ValueError(
                f"Cast: delayed scaling keeps one fp32 scale for the tensor, and {found} has others; "
                f"use {found.format.name}:tensor, or scale='current'"
            )

    def __str__(self) -> str:
        more = [f"{name}={value}" for name, value in self._chosen().items()]
        return " ".join([self.scheme.name, *more])

    def _chosen(self) -> dict[str, Any]:
        """The fields, but the scheme, that are not the default."""
        mine = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return {name: value for name, value in mine.items() if name != "scheme"}

    def to_dict(self) -> str | dict[str, Any]:
        """JSON data: the scheme's name, or a dict where more than the scheme is chosen."""
        chosen = self._chosen()
        return {"scheme": self.scheme.name, **chosen} if chosen else self.scheme.name

    @classmethod
    def from_dict(cls, data: Any) -> Cast:
        """The Cast that ``to_dict`` described. Raises ValueError for other data."""
        if isinstance(data, str):
            return cls(data)
        return _made(cls, data, [f.name for f in fields(cls)], ("scheme",))


@dataclass(frozen=True, init=False)
class Gemm:
    """What happens to both operands of one product. A scheme or its name stands for its Cast; None: it stays float.

    In a backward product ``b`` is an operand that forward had (the weight for grad_input, the input for grad_weight),
    and it may also be

    - ``"reuse"``: the codes of forward are multiplied again, with their scales (reuse codes);
    - ``"fold"``: these codes are multiplied without their scales, which multiply g before g is quantized (fold
      scales). It needs scales that are floating-point numbers, one a row.

    A Cast there means that the operand is quantized again (requantize), because the product contracts another axis.
    ``save`` says what of ``b`` is kept from forward to backward:

    - ``"codes"``: the codes; a Cast quantizes what these decode to;
    - ``"recompute"``: the float operand, quantized again in backward, with the bits of ``"codes"``. It costs time, and
      no memory where the operand is kept anyhow: the weight, which FSDP2 gathers again for backward;
    - ``"high"``: the float operand; a Cast quantizes this itself, with one rounding less.

    Raises TypeError for what is no Cast, scheme or treatment; ValueError for another ``save``.
    """

    a: Cast | None
    b: Cast | Literal["reuse", "fold"] | None
    save: str = "codes"

    def __init__(self, a: Cast | Scheme | str | None, b: Cast | Scheme | str | None, save: str = "codes") -> None:
        if save not in _SAVE:
            raise ValueError(f"Gemm: save must be one of {_listed(_SAVE)}, got {save!r}")
        if isinstance(a, str) and a in _TREATMENTS:
            raise ValueError(f"Gemm: a cannot be {a!r}, which says what becomes of an operand of forward: that is b")
        _set(self, a=_as_cast(a), b=b if isinstance(b, str) and b in _TREATMENTS else _as_cast(b), save=save)

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
        values = _checked("Gemm", data, ("a", "b", "save"), ("a", "b"))
        a, b = (None if values[one] is None else values[one] for one in ("a", "b"))
        return _made(
            cls,
            {
                **values,
                "a": None if a is None else Cast.from_dict(a),
                "b": b if b is None or b in _TREATMENTS else Cast.from_dict(b),
            },
            ("a", "b", "save"),
            ("a", "b"),
        )


@dataclass(frozen=True, init=False)
class Recipe:
    """What happens to each operand of a Linear layer's three products.

    ``output`` is forward, its ``b`` the weight; it suffices for inference. ``grad_input`` and ``grad_weight`` are the
    backward products: both are given by a recipe that trains, and neither by one for inference.
    ``name``: by default what ``output`` multiplies. ``about`` is prose, and no part of what makes recipes equal.

    Raises TypeError for what is no Gemm or string; ValueError where the products do not fit each other.
    """

    output: Gemm
    grad_input: Gemm | None = None
    grad_weight: Gemm | None = None
    about: str = field(default="", compare=False)
    name: str = ""

    def __init__(
        self,
        output: Gemm,
        grad_input: Gemm | None = None,
        grad_weight: Gemm | None = None,
        about: str = "",
        name: str = "",
    ) -> None:
        for role, value in (("output", output), ("grad_input", grad_input), ("grad_weight", grad_weight)):
            if not isinstance(value, Gemm) and (role == "output" or value is not None):
                raise TypeError(
                    f"Recipe: {role} must be a Gemm, got {value!r}; write for instance "
                    f"Recipe(Gemm(None, 'int4:group32'), name='mine')"
                )
        for word, text in (("about", about), ("name", name)):
            if not isinstance(text, str):
                raise TypeError(f"Recipe: {word} must be a string, got {type(text).__name__}")
        _set(self, output=output, grad_input=grad_input, grad_weight=grad_weight, about=about, name=name)
        if not isinstance(output.b, Cast):
            raise ValueError(f"{self._what}: output.b is the weight, and needs a scheme, got {output.b!r}")
        if not name:
            _set(self, name=str(output) if output.a else str(output.b))
        if output.a is not None and output.a.transform != output.b.transform:
            raise ValueError(
                f"{self._what}: a transform of one operand of output needs the same of the other; got "
                f"{output.a.transform!r} and {output.b.transform!r}"
            )
        if output.save != "codes":
            raise ValueError(f"{self._what}: save belongs to backward products, and output has {output.save!r}")
        if (grad_input is None) != (grad_weight is None):
            raise ValueError(
                f"{self._what}: a recipe that trains has both grad_input and grad_weight; write "
                f"Gemm(None, None, save='high') for a product that stays float"
            )
        if grad_input is not None and grad_weight is not None:
            self._check("grad_input", grad_input, output.b)
            self._check("grad_weight", grad_weight, output.a)

    @property
    def _what(self) -> str:
        return f"recipe {self.name!r}" if self.name else "Recipe"

    def _check(self, role: str, gemm: Gemm, saved: Cast | None) -> None:
        """That the backward product can have its ``b``, which forward encoded as ``saved``."""
        if saved is None and gemm.save != "high":
            raise ValueError(f"{self._what}: {role} saves an operand that forward leaves float; say save='high'")
        if gemm.save == "high" and gemm.b in _TREATMENTS:
            raise ValueError(
                f"{self._what}: {role} has b={gemm.b!r}, which needs the codes of forward, and save='high' keeps none; "
                f"say save='codes' or 'recompute'"
            )
        if gemm.save != "high" and gemm.b is None:
            raise ValueError(f"{self._what}: {role} multiplies a float operand, which save='high' keeps; say so")
        if gemm.b == "fold" and saved is not None and not _folds(saved.scheme):
            raise ValueError(
                f"{self._what}: {role} can only fold scales that are floating-point numbers, one a row, into g; "
                f"{saved.scheme} has others; say 'reuse', or a scheme to quantize the operand to again"
            )

    def __str__(self) -> str:
        return self.name

    @property
    def weight(self) -> Scheme:
        """The weight's scheme in forward."""
        return cast(Cast, self.output.b).scheme

    @property
    def input(self) -> Scheme | None:
        """The input's scheme in forward; None: it stays float."""
        return None if self.output.a is None else self.output.a.scheme

    @property
    def static(self) -> bool:
        """Whether the input's scales in forward are given, by calibration, and not made of each input."""
        return self.output.a is not None and self.output.a.scale == "static"

    @property
    def rotation(self) -> int | None:
        """The block of the Hadamard transform that weight and input go through in forward; None: there is none.

        It is the block that shares a scale where that is a power of two from 16 to 128, and else 128.
        """
        if cast(Cast, self.output.b).transform is None:
            return None
        group = self.weight.block[1]
        return group if group in _ROTATIONS else _ROTATIONS[-1]

    def rotated(self) -> Recipe:
        """This recipe with a Hadamard transform of weight and input, for inference: without backward products."""
        a, b = (
            replace(side, transform="hadamard") if isinstance(side, Cast) else None
            for side in (self.output.a, self.output.b)
        )
        return Recipe(Gemm(a, b), about=self.about, name=f"{self.name.removesuffix(HADAMARD)}{HADAMARD}")

    @property
    def trains(self) -> bool:
        """Whether the recipe says how the backward products are computed."""
        return self.grad_input is not None

    def casts(self) -> dict[str, Cast]:
        """Every Cast by its role, such as ``grad_input.a``."""
        gemms = {"output": self.output, "grad_input": self.grad_input, "grad_weight": self.grad_weight}
        sides = {f"{role}.{one}": getattr(gemm, one, None) for role, gemm in gemms.items() for one in ("a", "b")}
        return {role: side for role, side in sides.items() if isinstance(side, Cast)}

    def to_dict(self) -> dict[str, Any]:
        """JSON data, without ``about``."""
        gemms = {"output": self.output, "grad_input": self.grad_input, "grad_weight": self.grad_weight}
        return {"name": self.name, **{role: gemm.to_dict() for role, gemm in gemms.items() if gemm is not None}}

    @classmethod
    def from_dict(cls, data: Any) -> Recipe:
        """The Recipe that ``to_dict`` described. Raises ValueError for other data."""
        roles = ("output", "grad_input", "grad_weight")
        values = _checked("Recipe", data, ("name", *roles), ("output",))
        gemms = {role: Gemm.from_dict(values[role]) for role in roles if values.get(role) is not None}
        return _made(cls, {**values, **gemms}, ("name", *roles), ("output",))


def _folds(scheme: Scheme) -> bool:
    one_a_row = scheme.block == (1, None)
    return one_a_row and not scheme.affine and not scheme.global_scale and scheme.scale_format.dtype != "uint8"


def refuse_beyond(recipe: Recipe, what: str, roles: Iterable[str], **able: tuple[str | None, ...]) -> None:
    """Raise ValueError where a Cast of ``recipe`` in one of ``roles`` asks for what ``what`` does not do, or for static
    scales in a scheme that has scales for rows.

    ``able``: the values of a field that it does besides the default one.
    """
    casts = recipe.casts()
    for role in roles:
        if role in casts and casts[role].scale == "static" and "static" in able.get("scale", ()):
            found = casts[role].scheme
            if found.block[0] is not None or found.global_scale:
                raise ValueError(
                    f"recipe {recipe.name!r}: static scales are the same for every row, and {role} is in {found}, "
                    f"which has scales for rows; use {found.format.name}:tensor, or scale='current'"
                )
        for name, value in casts[role]._chosen().items() if role in casts else ():
            if name != "history" and value not in able.get(name, ()):
                can = _listed([*(f.default for f in fields(Cast) if f.name == name), *able.get(name, ())])
                raise ValueError(
                    f"recipe {recipe.name!r}: {what} does not do {name}={value!r}, which {role} asks for; it does {can}"
                )


def _as_cast(value: Any) -> Cast | None:
    return value if value is None or isinstance(value, Cast) else Cast(value)


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(repr, values))


def _set(frozen: Any, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(frozen, name, value)


def _checked(what: str, data: Any, known: Iterable[str], needed: Iterable[str]) -> dict[str, Any]:
    """``data``, if it is a dict with these keys. Raises ValueError."""
    if not isinstance(data, dict):
        raise ValueError(f"{what}: expected a dict, got {data!r}")
    unknown, missing = sorted(map(str, data.keys() - set(known))), sorted(set(needed) - data.keys())
    if unknown or missing:
        raise ValueError(f"{what}: expected the keys {', '.join(known)}; unknown {unknown}, missing {missing}")
    return data


def _made(kind: type[T], data: Any, known: Iterable[str], needed: Iterable[str]) -> T:
    """``kind(**data)``; data of other types raises ValueError, because data is what is wrong."""
    try:
        return kind(**_checked(kind.__name__, data, known, needed))
    except TypeError as error:
        raise ValueError(str(error)) from None
