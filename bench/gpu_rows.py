"""The rows of the table of GPU kernels: an op, its subject, and a call on a fake device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit import scaling
from lowbit.bench.gpu_trace import empty
from lowbit.kernels.cases import DUAL, STEPS
from lowbit.ops import OPS
from lowbit.ops.grouped import has_rows_of_its_own
from lowbit.ops.optim import FLOAT_STATES, RULES
from lowbit.recipes.cast import Cast
from lowbit.recipes.definition import Recipe
from lowbit.recipes.table import RECIPES
from lowbit.scaling import Scheme
from lowbit.tensor.quantized import scale_dtype, zero_dtype

__all__ = ["NO_KERNEL", "PRODUCTS", "Row", "Work", "rows", "sections"]

#: Ops without a GPU kernel, with the text in docs/gpu.md.
NO_KERNEL = {"square_sums": "sums of squares, which `Adafactor` takes, have no kernel"}

#: Input rows of matmuls, and the side of square weights and quantized matrices.
ROWS, SIZE = (1, 16, 512, 8192), 4096
#: Images, height and width, and channels of a 3 x 3 convolution.
IMAGES, PIXELS, CHANNELS = 32, 28, 128
#: Experts of a mixture, and their total rows.
EXPERTS, ROWS_OF_EXPERTS = 8, 512
#: Sections of matmuls.
PRODUCTS = (*(f"linear, {count} {'row' if count == 1 else 'rows'}" for count in ROWS), "experts", "conv")


class Work(NamedTuple):
    """Bytes and operations of the same call in bf16."""

    bytes: int
    flops: int


class Row(NamedTuple):
    """A row. ``call(architecture)`` has tensors without data. ``precision``: torch's float32 matmul precision."""

    section: str
    of: str
    op: str
    call: Callable[[int], Any]
    bf16: Work
    precision: str = "highest"


class _Codes(NamedTuple):
    data: Tensor
    scale: Tensor
    zero_point: Tensor | None
    global_scale: Tensor | None


def _codes(scheme: Scheme, count: int, cols: int, architecture: int) -> _Codes:
    made = partial(empty, architecture=architecture)
    shape = scheme.scale_shape(count, cols)
    return _Codes(
        made((count, scheme.packed_cols(cols)), torch.uint8),
        made(shape, scale_dtype(scheme)),
        made(shape, zero_dtype(scheme)) if scheme.affine else None,
        made(scheme.global_scale_shape(count, cols), torch.float32) if scheme.global_scale else None,
    )


# -- products ----------------------------------------------------------------------------------------------------------
def _with_kernels() -> list[Recipe]:
    """All recipes but those with weights that only the reference supports."""
    return [recipe for recipe in RECIPES.values() if not recipe.weight.reference_only]


def _recipes() -> dict[str, Recipe]:
    """One recipe per kind of matmul in inference, by the names of all recipes of that kind."""
    named: dict[str, list[Recipe]] = {}
    for recipe in _with_kernels():
        sides = (recipe.output.a, recipe.output.b)
        key = " by ".join(f"{side.scheme} {side.scale == 'static'}" if isinstance(side, Cast) else "" for side in sides)
        named.setdefault(key, []).append(recipe)
    return {", ".join(one.name for one in some): some[0] for some in named.values()}


def _given(recipe: Recipe, architecture: int) -> dict[str, Any]:
    """Arguments for the input's scheme, and its scales if they are static."""
    scheme = recipe.input
    if scheme is None:
        return {}
    found = {"input_scheme": scheme.name}
    if not recipe.static:
        return found
    codes = _codes(scheme, 1, 1, architecture)
    return found | {"input_scale": codes.scale, "input_zero_point": codes.zero_point}


def _linear(recipe: Recipe, count: int, architecture: int) -> Any:
    x, w = empty((count, SIZE), torch.bfloat16, architecture), _codes(recipe.weight, SIZE, SIZE, architecture)
    return OPS["linear"].args(
        x, w.data, recipe.weight.name, w.scale, w.zero_point, w.global_scale, **_given(recipe, architecture)
    )


def _conv(recipe: Recipe, architecture: int) -> Any:
    x = empty((IMAGES, PIXELS, PIXELS, CHANNELS), torch.bfloat16, architecture)
    w = _codes(recipe.weight, CHANNELS, 9 * CHANNELS, architecture)
    return OPS["conv"].args(
        x, w.data, recipe.weight.name, w.scale, w.zero_point, w.global_scale, None, (3, 3), (1, 1), (1, 1, 1, 1),
        (1, 1), **_given(recipe, architecture),
    )  # fmt: skip


def _products() -> Iterator[Row]:
    for section, count in zip(PRODUCTS, ROWS, strict=False):
        work = Work(2 * (2 * count * SIZE + SIZE * SIZE), 2 * count * SIZE * SIZE)
        for name, recipe in _recipes().items():
            yield Row(section, name, "linear", partial(_linear, recipe, count), work)
            if _has_medium(recipe):
                medium = f"{name}; precision medium"
                yield Row(section, medium, "linear", partial(_linear, recipe, count), work, "medium")


def _has_medium(recipe: Recipe) -> bool:
    """Whether "medium" precision selects another kernel: direct FP8, or codebooks rounded to bf16."""
    if recipe.input is None:
        return recipe.weight.format.kind == "codebook"
    return recipe.input.format.name.startswith("fp8") and recipe.input.scale_format.name == "fp32"


def _of_experts(recipe: Recipe, architecture: int) -> Any:
    rows, w = ROWS_OF_EXPERTS, _codes(recipe.weight, SIZE, SIZE, architecture)
    b, b_scale, b_zero_point, b_global_scale = (None if t is None else t.expand(EXPERTS, *t.shape) for t in w)
    given: dict[str, Any] = {"a": empty((rows, SIZE), torch.bfloat16, architecture)}
    if recipe.input is not None:
        x = _codes(recipe.input, rows, SIZE, architecture)
        given = {"a": x.data, "a_scheme": recipe.input.name, "a_scale": x.scale, "a_zero_point": x.zero_point,
                 "a_global_scale": x.global_scale}  # fmt: skip
    return OPS["scaled_grouped_mm"].args(
        **given, b=b, offsets=empty((EXPERTS,), torch.int32, architecture), cols=SIZE, b_scheme=recipe.weight.name,
        b_scale=b_scale, b_zero_point=b_zero_point, b_global_scale=b_global_scale,
    )  # fmt: skip


def _mixtures() -> Iterator[Row]:
    rows = ROWS_OF_EXPERTS
    work = Work(2 * (2 * rows * SIZE + EXPERTS * SIZE * SIZE), 2 * rows * SIZE * SIZE)
    for name, recipe in _recipes().items():
        if recipe.input is None or has_rows_of_its_own(recipe.input):
            yield Row("experts", name, "scaled_grouped_mm", partial(_of_experts, recipe), work)


def _convolutions() -> Iterator[Row]:
    image, filters = IMAGES * PIXELS * PIXELS * CHANNELS, 9 * CHANNELS * CHANNELS
    work = Work(2 * (2 * image + filters), 2 * image * 9 * CHANNELS)
    for name, recipe in _recipes().items():
        yield Row("conv", name, "conv", partial(_conv, recipe), work)


# -- codecs ------------------------------------------------------------------------------------------------------------
def _schemes() -> list[Scheme]:
    """All operand schemes of inference."""
    sides = [side for recipe in _with_kernels() for side in (recipe.output.a, recipe.output.b)]
    return list(dict.fromkeys(side.scheme for side in sides if isinstance(side, Cast)))


def _quantize(op: str, scheme: Scheme, architecture: int) -> Any:
    x, like = empty((SIZE, SIZE), torch.bfloat16, architecture), _codes(scheme, SIZE, SIZE, architecture)
    return OPS[op].args(x, scheme.name, global_scale=like.global_scale)


def _dequantize(scheme: Scheme, architecture: int) -> Any:
    codes = _codes(scheme, SIZE, SIZE, architecture)
    return OPS["dequantize"].args(codes.data, scheme.name, SIZE, *codes[1:], torch.bfloat16)


def _codecs() -> Iterator[Row]:
    copy = Work(4 * SIZE * SIZE, 0)
    for op in ("quantize", "fake_quantize", "dequantize"):
        for scheme in _schemes():
            call = partial(_dequantize, scheme) if op == "dequantize" else partial(_quantize, op, scheme)
            yield Row(op, scheme.name, op, call, copy)


# -- optimizers --------------------------------------------------------------------------------------------------------
def _step(index: int, architecture: int) -> Any:
    rule, moments, dtype, master, random = STEPS[index]
    made = partial(empty, architecture=architecture)
    kept: list[Tensor | None] = []
    for text in moments:
        codes = None if text in FLOAT_STATES else _codes(scaling.scheme(text), SIZE, SIZE, architecture)
        kept += [made((SIZE, SIZE), FLOAT_STATES[text]), None] if codes is None else [codes.data, codes.scale]
    kept += [None] * (4 - len(kept))
    names = dict(zip(("first_scheme", "second_scheme"), moments, strict=False))
    return OPS["optimizer_step"].args(
        made((SIZE, SIZE), dtype), made((SIZE, SIZE), dtype),
        None if master is None else made((SIZE, SIZE), master), *kept, rule, [0.5] * len(RULES[rule].factors), **names,
        param_rounding="stochastic" if random else "nearest", rng=made((2,), torch.int64) if random else None,
    )  # fmt: skip


def _hadamard(block: int, architecture: int) -> Any:
    return OPS["hadamard"].args(empty((SIZE, SIZE), torch.bfloat16, architecture), block)


def _rotations() -> Iterator[Row]:
    for block in (16, 128):
        yield Row("hadamard", f"blocks of {block}", "hadamard", partial(_hadamard, block), Work(4 * SIZE * SIZE, 0))


def _both(first: str, second: str, block: int, architecture: int) -> Any:
    return OPS["quantize_both"].args(empty((SIZE, SIZE), torch.bfloat16, architecture), first, second, block)


def _pairs() -> Iterator[Row]:
    for first, second, block in DUAL:
        turned = f", transformed in {block}" if block > 1 else ""
        name = f"{first} and {second}{turned}"
        yield Row(
            "quantize_both", name, "quantize_both", partial(_both, first, second, block), Work(6 * SIZE * SIZE, 0)
        )


def _sums(architecture: int) -> Any:
    x, exponents = empty((SIZE, SIZE), torch.float32, architecture), empty((SIZE,), torch.int32, architecture)
    return OPS["square_sums"].args(x, exponents, 0)


def _steps() -> Iterator[Row]:
    for index, (rule, moments, dtype, master, random) in enumerate(STEPS):
        words = [rule, *moments, "of", str(dtype).removeprefix("torch."), *(["stochastic"] if random else [])]
        words += [] if master is None else [f"with {str(master).removeprefix('torch.')} master"]
        numbers = 3 * dtype.itemsize + (0 if master is None else 2 * master.itemsize) + 2 * 2 * len(moments)
        yield Row(
            "optimizer_step", " ".join(words), "optimizer_step", partial(_step, index), Work(numbers * SIZE * SIZE, 0)
        )
    yield Row("square_sums", "rows of float32", "square_sums", _sums, Work(prod((2, SIZE, SIZE)), 0))


def rows() -> list[Row]:
    """All rows."""
    return [*_products(), *_mixtures(), *_codecs(), *_rotations(), *_pairs(), *_steps(), *_convolutions()]


def sections() -> list[str]:
    """The sections of ``rows``, in order."""
    return list(dict.fromkeys(row.section for row in rows()))
