"""Recipes: which scheme each role of a Linear layer gets, for inference and for each of training's three products.

A recipe's name may carry a scaling for the weight: ``"int4-weight-only:group32"``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from lowbit.scaling import Scheme, find_scaling, scheme

__all__ = ["RECIPES", "Recipe", "Training", "recipe"]


@dataclass(frozen=True)
class Training:
    """How the two backward products of ``y = x @ w.T`` are computed (x ``[M, K]``, w ``[N, K]``, g ``[M, N]``).

    Each product contracts another axis than the forward one, and a scale along a contracted axis cannot be factored
    out afterwards. So each names the scheme of ``g`` and what becomes of the operand saved by forward: ``"fold"`` (its
    scales multiply g before g is encoded), ``"keep"`` (the kernel takes its scales as they lie), or a scheme (it is
    decoded and encoded anew).
    """

    grad_input: tuple[str, str]
    grad_weight: tuple[str, str]


@dataclass(frozen=True, init=False)
class Recipe:
    """Schemes by role, or their names; ``input`` None leaves activations alone, ``training`` None: inference only.

    Raises ValueError for an unknown scheme, TypeError for what is none, a name that is no string, or another training.
    """

    name: str
    weight: Scheme
    input: Scheme | None = None
    training: Training | None = None
    about: str = ""

    def __init__(
        self,
        name: str,
        weight: Scheme | str,
        input: Scheme | str | None = None,
        training: Training | None = None,
        about: str = "",
    ) -> None:
        if not isinstance(name, str):
            raise TypeError(f"a recipe's name must be a string, got {type(name).__name__}")
        if training is not None and not isinstance(training, Training):
            raise TypeError(f"recipe {name!r}: training must be a Training or None, got {type(training).__name__}")
        held = (name, scheme(weight), None if input is None else scheme(input), training, about)
        for field, value in zip(fields(self), held, strict=True):
            object.__setattr__(self, field.name, value)

    def __str__(self) -> str:
        return self.name


#: Every named recipe. Names are API.
RECIPES: dict[str, Recipe] = {
    row.name: row
    for row in (
        Recipe("int8", "int8:row", "int8:row", about="8-bit weights and activations (dynamic, a scale a token)"),
        Recipe("int8-weight-only", "int8:row", about="8-bit weights"),
        Recipe(
            "int4-weight-only", "int4:group128", about="4-bit weights, a scale for 128; say :group32 for finer ones",
        ),
        Recipe("nf4", "nf4", about="4-bit NormalFloat weights (QLoRA)"),
        Recipe(
            "fp8", "fp8_e4m3:row", "fp8_e4m3:row",
            Training(("fp8_e5m2:row", "fold"), ("fp8_e5m2:col", "fold")), "FP8, a scale a row; trains",
        ),
        Recipe(
            "fp8-tensor", "fp8_e4m3:tensor", "fp8_e4m3:tensor",
            Training(("fp8_e5m2:tensor", "keep"), ("fp8_e5m2:tensor", "keep")), "FP8, a scale a tensor; trains",
        ),
        Recipe(
            "fp8-block", "fp8_e4m3:block128x128", "fp8_e4m3:group128",
            Training(
                ("fp8_e4m3:group128", "keep"), ("fp8_e4m3:group128:T", "fp8_e4m3:group128:T"),
            ),
            "FP8 in blocks of 1x128 and 128x128 (DeepSeek-V3, arXiv 2412.19437); trains",
        ),
        Recipe("fp8-weight-only", "fp8_e4m3:row", about="FP8 weights"),
        Recipe(
            "mxfp8", "mxfp8:ceil", "mxfp8:ceil",
            Training(("mxfp8:ceil", "mxfp8:ceil:T"), ("mxfp8:ceil:T", "mxfp8:ceil:T")), "OCP MX, FP8 elements; trains",
        ),
        Recipe("mxfp6", "mxfp6", "mxfp6", about="OCP MX, FP6 (E2M3) elements"),
        Recipe("mxfp4", "mxfp4", "mxfp4", about="OCP MX, FP4 elements"),
        Recipe("nvfp4", "nvfp4", "nvfp4:global_row", about="NVFP4: FP4 elements, a scale for 16, one for the tensor"),
        Recipe("w4a8", "int4:group128", "int8:row", about="4-bit weights, 8-bit activations"),
    )
}  # fmt: skip


def recipe(name: str | Recipe, *, group: int | None = None) -> Recipe:
    """The recipe of that name; ``group`` (or ``NAME:SCALING``) changes how finely its weight is scaled.

    Raises ValueError for an unknown name, listing the known ones, and for another scaling of a recipe that trains or
    whose weight's scales are not fp32 (MX, NVFP4: the scaling is part of the format). TypeError for what is neither.
    """
    if isinstance(name, Recipe):
        return name if group is None else _rescaled(name, f"group{group}")
    if not isinstance(name, str):
        raise TypeError(f"a recipe is a Recipe or one of {', '.join(RECIPES)}; got {type(name).__name__}")
    base, _, scaling = name.partition(":")
    if base not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}; expected one of {', '.join(RECIPES)}")
    if group is not None:
        if scaling:
            raise ValueError(f"recipe {name!r} already says {scaling!r}; leave out group={group} or the suffix")
        scaling = f"group{group}"
    return _rescaled(RECIPES[base], scaling) if scaling else RECIPES[base]


def _rescaled(base: Recipe, scaling: str) -> Recipe:
    if base.training is not None:
        raise ValueError(f"recipe {base.name!r} fixes its scalings, because its training products depend on them")
    if find_scaling(scaling.split(":")[0]) is None:
        raise ValueError(f"recipe {base.name!r}: unknown scaling {scaling!r}; write for instance {base.name}:group32")
    if base.weight.scale_format.name != "fp32":
        plain = f"{base.weight.format.name}:{scaling}"
        raise ValueError(
            f"recipe {base.name!r} has scales in {base.weight.scale_format.name}, and another scaling would make it "
            f"another format; use one with fp32 scales, such as int4-weight-only:{scaling}, "
            f"or Recipe('mine', {plain!r})"
        )
    affine = ":affine" if base.weight.affine and "affine" not in scaling.split(":") else ""
    weight = scheme(f"{base.weight.format.name}:{scaling}{affine}")
    return base if weight == base.weight else replace(base, name=f"{base.name}:{scaling}", weight=weight)
