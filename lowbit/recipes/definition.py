"""Recipe: how each operand of a Linear layer's three matmuls is quantized.

With input x ``[M, K]``, weight w ``[N, K]`` and the gradient g ``[M, N]`` of the output:

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

#: Suffix of the names of recipes with a Hadamard transform.
HADAMARD = ":hadamard"
_PRODUCTS = ("output", "grad_input", "grad_weight", "forward")
#: Precisions of a training matmul. "low" is the recipe's own.
PRECISIONS = ("low", "high", "dequantized")


@dataclass(frozen=True, init=False)
class Recipe:
    """How each operand of a Linear layer's three matmuls is quantized.

    Args:
        output: The forward matmul, with the weight as its ``b``. It suffices for inference.
        grad_input: The backward matmul for the input's gradient. Recipes that train have both backward matmuls.
        grad_weight: The backward matmul for the weight's gradient.
        about: One line of prose. It does not count when recipes are compared.
        name: By default the operands of ``output``.
        forward: Replaces ``output`` in training, if that differs from inference. Both operands may be float.
        keep_blocks: Share of a model's blocks that ``train.prepare_`` leaves in high precision, from 0 to less than 1.
        reordered: Whether layers have the columns of their weights in an order of their own, as GPTQ with ``desc_act``.
            Only files of other programs have such layers.

    Raises:
        TypeError: A matmul is not a Gemm, or ``about`` or ``name`` is not a string.
        ValueError: The matmuls do not fit each other.
    """

    output: Gemm
    grad_input: Gemm | None = None
    grad_weight: Gemm | None = None
    about: str = field(default="", compare=False)
    name: str = ""
    forward: Gemm | None = None
    keep_blocks: float = 0.0
    reordered: bool = False

    def __init__(
        self,
        output: Gemm,
        grad_input: Gemm | None = None,
        grad_weight: Gemm | None = None,
        about: str = "",
        name: str = "",
        forward: Gemm | None = None,
        keep_blocks: float = 0.0,
        reordered: bool = False,
    ) -> None:
        gemms = {"output": output, "grad_input": grad_input, "grad_weight": grad_weight, "forward": forward}
        for role, value in gemms.items():
            if not isinstance(value, Gemm) and (role == "output" or value is not None):
                raise TypeError(
                    f"Recipe: {role} must be a Gemm, got {value!r}; write for instance "
                    f"Recipe(Gemm(None, 'int4:group32'), name='mine')"
                )
        for word, text in (("about", about), ("name", name)):
            if not isinstance(text, str):
                raise TypeError(f"Recipe: {word} must be a string, got {type(text).__name__}")
        set_fields(self, **gemms, about=about, name=name, keep_blocks=keep_blocks, reordered=reordered is True)
        if not isinstance(output.b, Cast):
            raise ValueError(f"{self._label}: output.b is the weight, and needs a scheme, got {output.b!r}")
        if not name:
            set_fields(self, name=str(output) if output.a else str(output.b))
        for role, gemm in gemms.items():
            self._check_transforms(role, gemm)
        for role in ("output", "forward"):
            gemm = gemms[role]
            if gemm is not None and gemm.save != "codes":
                raise ValueError(f"{self._label}: save is for backward matmuls, but {role} has save={gemm.save!r}")
        if isinstance(keep_blocks, bool) or not isinstance(keep_blocks, int | float) or not 0 <= keep_blocks < 1:
            raise ValueError(
                f"{self._label}: keep_blocks is a share of the blocks, from 0 to less than 1, got {keep_blocks!r}"
            )
        if (grad_input is None) != (grad_weight is None):
            raise ValueError(
                f"{self._label}: a recipe that trains has both grad_input and grad_weight; write "
                f"Gemm(None, None, save='high') for a matmul that stays float"
            )
        if grad_input is None and (forward is not None or keep_blocks):
            raise ValueError(f"{self._label}: forward and keep_blocks are for training, and need backward matmuls")
        if grad_input is not None and grad_weight is not None:
            weight = self.trained.b
            if isinstance(weight, str):
                raise ValueError(f"{self._label}: b={weight!r} is for backward matmuls, but forward has it")
            self._check("grad_input", grad_input, weight)
            self._check("grad_weight", grad_weight, self.trained.a)

    @property
    def _label(self) -> str:
        return f"recipe {self.name!r}" if self.name else "Recipe"

    def _check_transforms(self, role: str, gemm: Gemm | None) -> None:
        """Raise ValueError unless both operands have the same transform."""
        if gemm is None or (role == "output" and gemm.a is None):
            return
        a, b = (side.transform if isinstance(side, Cast) else None for side in (gemm.a, gemm.b))
        if a != b:
            raise ValueError(
                f"{self._label}: a transform of one operand of {role} needs the same of the other; got {a!r} and {b!r}"
            )

    def _check(self, role: str, gemm: Gemm, saved: Cast | None) -> None:
        """Raise ValueError unless the backward matmul can have its ``b``, which forward quantized as ``saved``."""
        if saved is None and gemm.save in ("codes", "recompute"):
            raise ValueError(f"{self._label}: {role} saves an operand that forward leaves float; use save='high'")
        if gemm.save == "high" and gemm.b in TREATMENTS:
            raise ValueError(
                f"{self._label}: {role} has b={gemm.b!r}, which needs the codes of forward, but save='high' saves "
                f"none; use save='codes' or 'recompute'"
            )
        if gemm.save != "high" and gemm.b is None:
            raise ValueError(f"{self._label}: {role} multiplies a float operand; use save='high', which saves it")
        if gemm.b == "fold" and saved is not None and not _folds(saved.scheme):
            raise ValueError(
                f"{self._label}: {role} can only fold floating-point scales, one per row, into g, but {saved.scheme} "
                f"has others; use 'reuse', or a scheme to quantize the operand again"
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
        """Whether forward uses input scales from calibration."""
        return self.output.a is not None and self.output.a.scale == "static"

    @property
    def dynamic(self) -> bool:
        """Whether forward computes scales from each input and the weight, so that inference needs no data."""
        return all(side is None or cast(Cast, side).scale == "current" for side in (self.output.a, self.output.b))

    @property
    def rotation(self) -> int | None:
        """The block size of the Hadamard transform of weight and input in forward; None without one."""
        return cast(Cast, self.output.b).rotation(1)

    def rotated(self) -> Recipe:
        """Return the recipe with a Hadamard transform of weight and input, for inference only."""
        a, b = (
            replace(side, transform="hadamard") if isinstance(side, Cast) else None
            for side in (self.output.a, self.output.b)
        )
        return Recipe(Gemm(a, b), about=self.about, name=f"{self.name.removesuffix(HADAMARD)}{HADAMARD}")

    @property
    def trains(self) -> bool:
        """Whether the recipe has backward matmuls."""
        return self.grad_input is not None

    @property
    def trained(self) -> Gemm:
        """The forward matmul of training."""
        return self.output if self.forward is None else self.forward

    def with_products(self, output: str = "low", grad_input: str = "low", grad_weight: str = "low") -> Recipe:
        """Return the recipe with training matmuls in another precision (by name ``recipe("fp8:grad_weight=high")``).

        Args:
            output: ``"low"`` or ``"high"``. With ``"high"``, forward makes no codes, so backward quantizes the operands
                itself.
            grad_input: ``"low"``: as in this recipe. ``"high"``: both operands stay float, so the float operand of
                forward is saved. ``"dequantized"``: the codes of forward are saved, and decoded to be multiplied by the
                float gradient.
            grad_weight: As ``grad_input``.

        Raises:
            ValueError: Another word; a recipe that does not train; ``"dequantized"`` if forward leaves the operand
                float.
        """
        self._require_training("with_products")
        changed = self
        for role, precision in {"output": output, "grad_input": grad_input, "grad_weight": grad_weight}.items():
            allowed = PRECISIONS[:2] if role == "output" else PRECISIONS
            if precision not in allowed:
                raise ValueError(f"{self._label}: {role} must be one of {listed(allowed)}, got {precision!r}")
            if precision == "low":
                continue
            if role == "output":
                changed = changed._float_forward()
                continue
            save = getattr(self, role).save
            gemm = Gemm(None, "dequantize", "recompute" if save == "recompute" else "codes")
            gemm = Gemm(None, None, "high") if precision == "high" else gemm
            changed = changed._changed(role, precision, **{role: gemm})
        return changed

    def with_gradients(self, format: str) -> Recipe:
        """Return the recipe with gradients in another format (by name ``recipe("fp8:gradients=e4m3")``).

        Args:
            format: A format's name, such as ``"fp8_e4m3"``. The scalings stay.

        Raises:
            ValueError: An unknown format; a format that does not fit the scalings; a recipe that quantizes no gradient.
        """
        self._require_training("with_gradients")
        changed = {}
        for role in ("grad_input", "grad_weight"):
            gemm = getattr(self, role)
            if gemm.a is not None:
                changed[role] = replace(gemm, a=replace(gemm.a, scheme=gemm.a.scheme.with_format(format)))
        if not changed:
            raise ValueError(f"{self._label}: no gradient is quantized, so its format cannot be {format}")
        return self._changed("gradients", format.removeprefix("fp8_"), **changed)

    def with_rule(self, rule: str) -> Recipe:
        """Return the recipe with another scale rule for forward in training (``recipe("nvfp4:rule=four-over-six")``).

        Args:
            rule: ``"amax"``, ``"search"`` or ``"four-over-six"``, as in ``Cast``.

        Raises:
            ValueError: A recipe that does not train or leaves an operand of forward float; a rule that is unknown or
                does not fit the schemes.
        """
        self._require_training("with_rule")
        a, b = self.trained.a, self.trained.b
        if not isinstance(a, Cast) or not isinstance(b, Cast):
            raise ValueError(f"{self._label}: forward leaves an operand float, which has no scales for {rule!r}")
        return self._changed("rule", rule, forward=Gemm(replace(a, rule=rule), replace(b, rule=rule)))

    def with_keep_blocks(self, share: float) -> Recipe:
        """Return the recipe with another ``keep_blocks`` (by name ``recipe("nvfp4:keep_blocks=0")``).

        Args:
            share: Share of a model's blocks that stay in high precision, from 0 to less than 1.

        Raises:
            ValueError: A recipe that does not train, or a share out of range.
        """
        self._require_training("with_keep_blocks")
        return self._changed("keep_blocks", f"{share:g}", keep_blocks=share)

    def with_reordered(self) -> Recipe:
        """Return the recipe of layers that have their columns in an order of their own."""
        return replace(self, name=f"{self.name}:reordered", reordered=True)

    def _float_forward(self) -> Recipe:
        """Forward in high precision; backward quantizes the operands whose codes came from forward."""
        changed = {}
        for role, cast_ in (("grad_input", self.trained.b), ("grad_weight", self.trained.a)):
            gemm = getattr(self, role)
            if gemm.save in ("codes", "recompute"):
                operand = gemm.b if isinstance(gemm.b, Cast) else cast_
                changed[role] = replace(gemm, b=operand, save="operand")
        return self._changed("output", "high", forward=Gemm(None, None), **changed)

    def _require_training(self, what: str) -> None:
        if not self.trains:
            raise ValueError(f"{self._label} is for inference only, and {what} changes backward matmuls")

    def _changed(self, option: str, value: str, **fields: Any) -> Recipe:
        """The recipe with other fields, and with ``option=value`` once in its name."""
        words = [word for word in self.name.split(":") if not word.startswith(f"{option}=")]
        return replace(self, name=":".join([*words, f"{option}={value}"]), **fields)

    def casts(self, training: bool = False) -> dict[str, Cast]:
        """Return every Cast by its role, such as ``grad_input.a``; with ``training``, ``output`` is ``trained``."""
        output = self.trained if training else self.output
        gemms = {"output": output, "grad_input": self.grad_input, "grad_weight": self.grad_weight}
        sides = {f"{role}.{side}": getattr(gemm, side, None) for role, gemm in gemms.items() for side in ("a", "b")}
        return {role: cast_ for role, cast_ in sides.items() if isinstance(cast_, Cast)}

    def to_dict(self) -> dict[str, Any]:
        """Return JSON data, without ``about``."""
        gemms = {role: getattr(self, role) for role in _PRODUCTS}
        data = {"name": self.name, **{role: gemm.to_dict() for role, gemm in gemms.items() if gemm is not None}}
        for name in ("keep_blocks", "reordered"):
            if getattr(self, name):
                data[name] = getattr(self, name)
        return data

    @classmethod
    def from_dict(cls, data: Any) -> Recipe:
        """Return the Recipe that ``to_dict`` described. Raises ValueError for other data."""
        known = ("name", *_PRODUCTS, "keep_blocks", "reordered")
        values = checked("Recipe", data, known, ("output",))
        gemms = {role: Gemm.from_dict(values[role]) for role in _PRODUCTS if values.get(role) is not None}
        return from_data(cls, {**values, **gemms}, known, ("output",))


def _folds(scheme: Scheme) -> bool:
    per_row = scheme.block == (1, None)
    return per_row and not scheme.affine and not scheme.global_scale and scheme.scale_format.dtype != "uint8"
