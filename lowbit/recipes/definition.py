"""A recipe as a value: what happens to each operand of a Linear layer's three matrix products.

With x ``[M, K]``, the weight w ``[N, K]`` and the gradient g ``[M, N]`` of the output:

    output       y  = x @ w.T     a = x, b = w
    grad_input   dx = g @ w       a = g, b = w
    grad_weight  dw = g.T @ x     a = g, b = x
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

from lowbit.recipes.cast import TREATMENTS, Cast, Gemm, checked, from_data, listed, set_fields
from lowbit.scaling import Scheme

__all__ = ["HADAMARD", "Recipe"]

#: What the name of a recipe ends with whose operands are transformed.
HADAMARD = ":hadamard"
_PRODUCTS = ("output", "grad_input", "grad_weight", "forward")
#: What a product of training can be computed in, besides what the recipe says ("low").
PRECISIONS = ("low", "high", "dequantized")


@dataclass(frozen=True, init=False)
class Recipe:
    """What happens to each operand of a Linear layer's three products.

    ``output`` is forward, its ``b`` the weight; it suffices for inference. ``grad_input`` and ``grad_weight`` are the
    backward products: both are given by a recipe that trains, and neither by one for inference. ``forward`` is what
    training multiplies in the place of ``output``, where that differs from inference; both operands may be float.
    ``keep_blocks``: the share of a model's blocks that training leaves as they are (``train.prepare_``).
    ``name``: by default what ``output`` multiplies. ``about`` is prose, and no part of what makes recipes equal.

    Raises TypeError for what is no Gemm or string; ValueError where the products do not fit each other.
    """

    output: Gemm
    grad_input: Gemm | None = None
    grad_weight: Gemm | None = None
    about: str = field(default="", compare=False)
    name: str = ""
    forward: Gemm | None = None
    keep_blocks: float = 0.0

    def __init__(
        self,
        output: Gemm,
        grad_input: Gemm | None = None,
        grad_weight: Gemm | None = None,
        about: str = "",
        name: str = "",
        forward: Gemm | None = None,
        keep_blocks: float = 0.0,
    ) -> None:
        given = {"output": output, "grad_input": grad_input, "grad_weight": grad_weight, "forward": forward}
        for role, value in given.items():
            if not isinstance(value, Gemm) and (role == "output" or value is not None):
                raise TypeError(
                    f"Recipe: {role} must be a Gemm, got {value!r}; write for instance "
                    f"Recipe(Gemm(None, 'int4:group32'), name='mine')"
                )
        for word, text in (("about", about), ("name", name)):
            if not isinstance(text, str):
                raise TypeError(f"Recipe: {word} must be a string, got {type(text).__name__}")
        set_fields(self, **given, about=about, name=name, keep_blocks=keep_blocks)
        if not isinstance(output.b, Cast):
            raise ValueError(f"{self._what}: output.b is the weight, and needs a scheme, got {output.b!r}")
        if not name:
            set_fields(self, name=str(output) if output.a else str(output.b))
        for role, gemm in given.items():
            self._check_transforms(role, gemm)
        for role, one in (("output", output), ("forward", forward)):
            if one is not None and one.save != "codes":
                raise ValueError(f"{self._what}: save belongs to backward products, and {role} has {one.save!r}")
        if isinstance(keep_blocks, bool) or not isinstance(keep_blocks, int | float) or not 0 <= keep_blocks < 1:
            raise ValueError(
                f"{self._what}: keep_blocks is a share of the blocks, from 0 to less than 1, got {keep_blocks!r}"
            )
        if (grad_input is None) != (grad_weight is None):
            raise ValueError(
                f"{self._what}: a recipe that trains has both grad_input and grad_weight; write "
                f"Gemm(None, None, save='high') for a product that stays float"
            )
        if grad_input is None and (forward is not None or keep_blocks):
            raise ValueError(
                f"{self._what}: forward and keep_blocks are for training, and there are no backward products"
            )
        if grad_input is not None and grad_weight is not None:
            weight = self.trained.b
            if isinstance(weight, str):
                raise ValueError(f"{self._what}: b={weight!r} is of backward products, and forward has it")
            self._check("grad_input", grad_input, weight)
            self._check("grad_weight", grad_weight, self.trained.a)

    @property
    def _what(self) -> str:
        return f"recipe {self.name!r}" if self.name else "Recipe"

    def _check_transforms(self, role: str, gemm: Gemm | None) -> None:
        """That both operands, or neither, go through one transform."""
        if gemm is None or (role == "output" and gemm.a is None):
            return
        a, b = (side.transform if isinstance(side, Cast) else None for side in (gemm.a, gemm.b))
        if a != b:
            raise ValueError(
                f"{self._what}: a transform of one operand of {role} needs the same of the other; got {a!r} and {b!r}"
            )

    def _check(self, role: str, gemm: Gemm, saved: Cast | None) -> None:
        """That the backward product can have its ``b``, which forward encoded as ``saved``."""
        if saved is None and gemm.save in ("codes", "recompute"):
            raise ValueError(f"{self._what}: {role} saves an operand that forward leaves float; say save='high'")
        if gemm.save == "high" and gemm.b in TREATMENTS:
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
    def dynamic(self) -> bool:
        """Whether scales in forward are made of each input and the weight, as inference without data does."""
        return all(side is None or cast(Cast, side).scale == "current" for side in (self.output.a, self.output.b))

    @property
    def rotation(self) -> int | None:
        """The block of the Hadamard transform that weight and input go through in forward; None: there is none."""
        return cast(Cast, self.output.b).rotation(1)

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

    @property
    def trained(self) -> Gemm:
        """The forward product of training."""
        return self.output if self.forward is None else self.forward

    def with_products(self, output: str = "low", grad_input: str = "low", grad_weight: str = "low") -> Recipe:
        """This recipe with products of training in another precision: ``recipe("fp8:grad_weight=high")`` by name.

        ``"low"``: as this recipe has it. ``"high"``: both operands stay float, so that the float operand of forward is
        kept. ``"dequantized"``: the codes of forward are kept, and decoded to be multiplied by the float gradient.
        ``output`` is ``"low"`` or ``"high"``; of codes that forward then no longer makes, backward makes its own.
        Raises ValueError for another word, for a recipe that does not train, and for ``"dequantized"`` where forward
        leaves the operand float.
        """
        self._require_training("with_products")
        made = self
        for role, precision in {"output": output, "grad_input": grad_input, "grad_weight": grad_weight}.items():
            allowed = PRECISIONS[:2] if role == "output" else PRECISIONS
            if precision not in allowed:
                raise ValueError(f"{self._what}: {role} must be one of {listed(allowed)}, got {precision!r}")
            if precision == "low":
                continue
            if role == "output":
                made = made._float_forward()
                continue
            save = getattr(self, role).save
            gemm = Gemm(None, "dequantize", "recompute" if save == "recompute" else "codes")
            gemm = Gemm(None, None, "high") if precision == "high" else gemm
            made = made._changed(role, precision, **{role: gemm})
        return made

    def with_gradients(self, format: str) -> Recipe:
        """This recipe with gradients quantized to another format, such as ``"fp8_e4m3"``, their scalings kept:
        ``recipe("fp8:gradients=e4m3")`` by name.

        Raises ValueError for an unknown format, one that the scalings do not go with, and a recipe that quantizes no
        gradient.
        """
        self._require_training("with_gradients")
        changed = {}
        for role in ("grad_input", "grad_weight"):
            gemm = getattr(self, role)
            if gemm.a is not None:
                changed[role] = replace(gemm, a=replace(gemm.a, scheme=gemm.a.scheme.with_format(format)))
        if not changed:
            raise ValueError(f"{self._what}: no gradient is quantized, so there is none to quantize to {format}")
        return self._changed("gradients", format.removeprefix("fp8_"), **changed)

    def with_rule(self, rule: str) -> Recipe:
        """This recipe with another rule by which scales of forward's operands follow in training:
        ``recipe("nvfp4:rule=four-over-six")``, ``"search"`` or ``"amax"`` (``Cast``).

        Raises ValueError for a recipe that does not train or leaves an operand of forward float, and for a rule that is
        unknown or does not go with its schemes.
        """
        self._require_training("with_rule")
        a, b = self.trained.a, self.trained.b
        if not isinstance(a, Cast) or not isinstance(b, Cast):
            raise ValueError(f"{self._what}: forward leaves an operand float, which has no scales to make by {rule!r}")
        return self._changed("rule", rule, forward=Gemm(replace(a, rule=rule), replace(b, rule=rule)))

    def with_keep_blocks(self, share: float) -> Recipe:
        """This recipe with another share of a model's blocks that stay as they are: ``recipe("nvfp4:keep_blocks=0")``.

        Raises ValueError for a recipe that does not train and for what is no share from 0 to less than 1.
        """
        self._require_training("with_keep_blocks")
        return self._changed("keep_blocks", f"{share:g}", keep_blocks=share)

    def _float_forward(self) -> Recipe:
        """Forward in high precision; backward quantizes the operands whose codes it had from forward."""
        changed = {}
        for role, cast_ in (("grad_input", self.trained.b), ("grad_weight", self.trained.a)):
            gemm = getattr(self, role)
            if gemm.save in ("codes", "recompute"):
                own = gemm.b if isinstance(gemm.b, Cast) else cast_
                changed[role] = replace(gemm, b=own, save="operand")
        return self._changed("output", "high", forward=Gemm(None, None), **changed)

    def _require_training(self, what: str) -> None:
        if not self.trains:
            raise ValueError(f"{self._what} is for inference only, and {what} changes backward products")

    def _changed(self, option: str, value: str, **products: Any) -> Recipe:
        """This recipe with other products, and the option in its name, which says each option once."""
        words = [word for word in self.name.split(":") if not word.startswith(f"{option}=")]
        return replace(self, name=":".join([*words, f"{option}={value}"]), **products)

    def casts(self, training: bool = False) -> dict[str, Cast]:
        """Every Cast by its role, such as ``grad_input.a``. ``training``: those of ``output`` are of ``trained``."""
        output = self.trained if training else self.output
        gemms = {"output": output, "grad_input": self.grad_input, "grad_weight": self.grad_weight}
        sides = {f"{role}.{one}": getattr(gemm, one, None) for role, gemm in gemms.items() for one in ("a", "b")}
        return {role: side for role, side in sides.items() if isinstance(side, Cast)}

    def to_dict(self) -> dict[str, Any]:
        """JSON data, without ``about``."""
        gemms = {role: getattr(self, role) for role in _PRODUCTS}
        made = {"name": self.name, **{role: gemm.to_dict() for role, gemm in gemms.items() if gemm is not None}}
        return {**made, "keep_blocks": self.keep_blocks} if self.keep_blocks else made

    @classmethod
    def from_dict(cls, data: Any) -> Recipe:
        """The Recipe that ``to_dict`` described. Raises ValueError for other data."""
        known = ("name", *_PRODUCTS, "keep_blocks")
        values = checked("Recipe", data, known, ("output",))
        gemms = {role: Gemm.from_dict(values[role]) for role in _PRODUCTS if values.get(role) is not None}
        return from_data(cls, {**values, **gemms}, known, ("output",))


def _folds(scheme: Scheme) -> bool:
    one_a_row = scheme.block == (1, None)
    return one_a_row and not scheme.affine and not scheme.global_scale and scheme.scale_format.dtype != "uint8"
