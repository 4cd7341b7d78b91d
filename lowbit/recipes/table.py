"""The table of named recipes, and their names in other projects."""

from __future__ import annotations

from lowbit.name_tables import register
from lowbit.recipes.cast import Cast, Gemm
from lowbit.recipes.definition import Recipe

__all__ = ["ALIASES", "FOREIGN", "RECIPES", "register_recipe"]


def _delayed(format: str) -> Cast:
    return Cast(f"{format}:tensor", scale="delayed", history=1024)


def _stochastic(scheme: str) -> Cast:
    """For a gradient. The scales of ``scheme`` must not clip, so that the expected value is the gradient."""
    return Cast(scheme, rounding="stochastic")


def _hadamard(scheme: str, rounding: str = "nearest") -> Cast:
    return Cast(scheme, rounding, transform="signed-hadamard")


def _ms_eden(scheme: str) -> Cast:
    return Cast(scheme, "eden", transform="random-hadamard")


#: 4-bit training keeps the first two and the last eight of 62 blocks in high precision (arXiv 2509.25149).
_KEEP_BLOCKS = 0.16

#: One scale per row, rounded up to a power of two.
_POW2 = "fp8_e4m3:row:e8m0:ceil"

#: Every named recipe. Names are API; ``register_recipe`` adds one.
RECIPES: dict[str, Recipe] = {
    row.name: row
    for row in (
        Recipe(
            Gemm("int8:row", "int8:row"),
            Gemm("int8:row", "fold"),
            Gemm(None, "dequantize"),
            name="int8",
            about="8-bit weights and activations (dynamic, one scale per token); trains with 16-bit weight gradients",
        ),
        Recipe(
            Gemm("int8:row", "int8:row"),
            Gemm(Cast("int8:row", rounding="stochastic"), "fold"),
            Gemm(Cast("int8:col", rounding="stochastic"), "fold"),
            name="int8-stochastic", about="int8 with 8-bit, stochastically rounded gradients in all matmuls; trains",
        ),
        Recipe(
            Gemm("int8:group128", "int8:row"),
            name="int8-group",
            about="8-bit weights and activations, one scale per 128 activations: more accurate on LLMs",
        ),
        Recipe(Gemm(None, "int8:row"), name="int8-weight-only", about="8-bit weights"),
        Recipe(
            Gemm(None, "int4:group128"),
            name="int4-weight-only", about="4-bit weights, one scale per 128; use :group32 for finer scales",
        ),
        Recipe(
            Gemm(None, "uint4:group128:affine"),
            name="uint4-weight-only", about="4-bit weights with zero points, one scale per 128",
        ),
        Recipe(Gemm(None, "nf4"), name="nf4", about="4-bit NormalFloat weights (QLoRA)"),
        Recipe(
            Gemm("fp8_e4m3:row", "fp8_e4m3:row"),
            Gemm("fp8_e5m2:row", "fold"),
            Gemm("fp8_e5m2:col", "fold"),
            name="fp8", about="FP8, one scale per row; trains",
        ),
        # torchao's "rowwise". Its "rowwise_with_gw_hp" is fp8-pow2:grad_weight=high, except the weight of grad_input.
        Recipe(
            Gemm(_POW2, _POW2),
            Gemm(_POW2, f"{_POW2}:T", save="operand"),
            Gemm(f"{_POW2}:T", f"{_POW2}:T", save="operand"),
            name="fp8-pow2", about="FP8 (E4M3 only), one power-of-two scale per row; trains",
        ),
        Recipe(
            Gemm("fp8_e4m3:tensor", "fp8_e4m3:tensor"),
            Gemm("fp8_e5m2:tensor", "reuse"),
            Gemm("fp8_e5m2:tensor", "reuse"),
            name="fp8-tensor", about="FP8, one scale per tensor; trains",
        ),
        # Formats and history of TransformerEngine's DelayedScaling(), so that runs can be compared.
        Recipe(
            Gemm(_delayed("fp8_e4m3"), _delayed("fp8_e4m3")),
            Gemm(_delayed("fp8_e5m2"), "reuse"),
            Gemm(_delayed("fp8_e5m2"), "reuse"),
            name="fp8-delayed",
            about="FP8, one scale per tensor from the last 1024 steps; trains; fp8-tensor for inference",
        ),
        Recipe(
            Gemm("fp8_e4m3:group128", "fp8_e4m3:block128x128"),
            Gemm("fp8_e4m3:group128", "reuse"),
            Gemm("fp8_e4m3:group128:T", "fp8_e4m3:group128:T", save="operand"),
            name="fp8-block", about="FP8 in blocks of 1x128 and 128x128 (DeepSeek-V3, arXiv 2412.19437); trains",
        ),
        Recipe(Gemm(None, "fp8_e4m3:row"), name="fp8-weight-only", about="FP8 weights"),
        Recipe(
            Gemm("mxfp8:ceil", "mxfp8:ceil"),
            Gemm("mxfp8:ceil", "mxfp8:ceil:T", save="operand"),
            Gemm("mxfp8:ceil:T", "mxfp8:ceil:T", save="operand"),
            name="mxfp8", about="OCP MX, FP8 elements; trains",
        ),
        Recipe(Gemm("mxfp6", "mxfp6"), name="mxfp6", about="OCP MX, FP6 (E2M3) elements"),
        Recipe(
            Gemm("mxfp4", "mxfp4"),
            Gemm(_stochastic("mxfp4:ceil"), "reuse"),
            Gemm(_hadamard("mxfp4:ceil:T", "stochastic"), _hadamard("mxfp4:nearest:T"), save="operand"),
            forward=Gemm("mxfp4:nearest", "fp4_e2m1:block32x32:e8m0:nearest"), keep_blocks=_KEEP_BLOCKS,
            name="mxfp4", about="OCP MX, FP4 elements; trains",
        ),
        # arXiv 2509.25149: weights in 2D blocks, so that forward and backward multiply the same quantized weights.
        Recipe(
            Gemm("nvfp4:global_row", "nvfp4"),
            Gemm(_stochastic("nvfp4:ceil"), "reuse"),
            Gemm(_hadamard("nvfp4:ceil:T", "stochastic"), _hadamard("nvfp4:T"), save="operand"),
            forward=Gemm("nvfp4:global_row", "fp4_e2m1:block16x16:e4m3"), keep_blocks=_KEEP_BLOCKS,
            name="nvfp4", about="NVFP4: FP4, one scale per 16, one global scale per activation row or weight; trains",
        ),
        # Quartet II (arXiv 2601.22813) keeps no block in high precision.
        Recipe(
            Gemm("nvfp4:global_row", "nvfp4"),
            Gemm(_ms_eden("nvfp4"), _ms_eden("nvfp4:T"), save="operand"),
            Gemm(_ms_eden("nvfp4:T"), _ms_eden("nvfp4:T"), save="operand"),
            forward=Gemm(Cast("nvfp4:global_row", rule="four-over-six"), Cast("nvfp4", rule="four-over-six")),
            name="nvfp4-eden", about="NVFP4 with gradients by MS-EDEN (Quartet II); trains; nvfp4 for inference",
        ),
        Recipe(Gemm(None, "mxfp4"), name="mxfp4-weight-only", about="MXFP4 weights"),
        Recipe(Gemm(None, "nvfp4"), name="nvfp4-weight-only", about="NVFP4 weights"),
        Recipe(Gemm("int8:row", "int4:group128"), name="w4a8", about="4-bit weights, 8-bit activations"),
        # Block types of GGUF files (llama.cpp), whose names are Q4_0 and so on.
        Recipe(Gemm(None, "int4:group32:fp16"), name="q4-0", about="GGUF Q4_0: 4-bit weights, one fp16 scale per 32"),
        Recipe(
            Gemm(None, "uint4:group32:fp16:min"),
            name="q4-1", about="GGUF Q4_1: 4-bit weights, one fp16 scale and minimum per 32",
        ),
        Recipe(Gemm(None, "int5:group32:fp16"), name="q5-0", about="GGUF Q5_0: 5-bit weights, one fp16 scale per 32"),
        Recipe(
            Gemm(None, "uint5:group32:fp16:min"),
            name="q5-1", about="GGUF Q5_1: 5-bit weights, one fp16 scale and minimum per 32",
        ),
        Recipe(Gemm(None, "int8:group32:fp16"), name="q8-0", about="GGUF Q8_0: 8-bit weights, one fp16 scale per 32"),
        Recipe(
            Gemm(None, "q4_k"), name="q4-k", about="GGUF Q4_K: 4-bit weights, one 6-bit scale and minimum per 32"
        ),
        Recipe(
            Gemm(None, "q5_k"), name="q5-k", about="GGUF Q5_K: 5-bit weights, one 6-bit scale and minimum per 32"
        ),
        Recipe(Gemm(None, "q6_k"), name="q6-k", about="GGUF Q6_K: 6-bit weights, one 8-bit scale per 16"),
        # Static input scales: quantize_ needs a calibration.
        Recipe(
            Gemm(Cast("int8:tensor", scale="static"), "int8:row"),
            name="int8-static", about="8-bit weights and activations, one scale for all of a layer's activations",
        ),
        Recipe(
            Gemm(Cast("uint8:tensor:affine", scale="static"), "int8:row"),
            name="int8-static-affine", about="int8-static with a zero point, for activations that are rarely negative",
        ),
        Recipe(
            Gemm(Cast("fp8_e4m3:tensor", scale="static"), "fp8_e4m3:row"),
            name="fp8-static", about="FP8, one scale for all of a layer's activations",
        ),
    )
}  # fmt: skip

#: Names in llm-compressor and compressed-tensors (PRESET_SCHEMES in quant_scheme.py) with the same formats, blocks and
#: scales. NVFP4 needs no alias: it is ``nvfp4`` in upper case. There, the global scale of activations comes from
#: calibration; here, from each row at run time.
ALIASES: dict[str, str] = {
    "W8A8": "int8",
    "W4A16": "int4-weight-only",
    "W4A16_ASYM": "uint4-weight-only",
    "W4A8": "w4a8",
    "FP8_DYNAMIC": "fp8",
    "FP8_BLOCK": "fp8-block",
    "NVFP4A16": "nvfp4-weight-only",
    "MXFP4": "mxfp4",
    "MXFP8": "mxfp8",
}

#: Names of llm-compressor and compressed-tensors that mean something else here, and the names to use instead.
FOREIGN: dict[str, str] = {
    "W8A16": "W8A16 has groups of 128 in compressed-tensors, and one scale per row in its older versions; use "
    "'int8-weight-only:group128' or 'int8-weight-only'",
    "FP8": "FP8 is static per-tensor in llm-compressor; use 'fp8-static:tensor'. 'fp8' has dynamic scales per row, "
    "like FP8_DYNAMIC",
}


def register_recipe(recipe: Recipe) -> None:
    """Add a named recipe to the table that ``lowbit.recipe``, ``quantize_`` and the command line use.

    Models saved with it can be loaded without registering it again.

    Args:
        recipe: A Recipe with a name of lower case letters and digits, separated by dashes.

    Raises:
        ValueError: The name has another form or is taken.
        TypeError: ``recipe`` is not a Recipe.
    """

    if not isinstance(recipe, Recipe):
        raise TypeError(f"register_recipe: expected a Recipe, got {type(recipe).__name__}")
    register(RECIPES, recipe, (*ALIASES, *FOREIGN), "recipe")
