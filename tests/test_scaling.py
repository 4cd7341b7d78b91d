"""The grammar of schemes, their one canonical name, transposition, shapes, bytes, and recipes."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lowbit as lb
from lowbit import recipes, scaling
from lowbit.formats import FORMATS
from lowbit.scaling import SHORT_NAMES, Scheme, scheme
from lowbit.testing.inputs import element_formats, schemes

ELEMENTS = [f.name for f in element_formats()]
SCALING_NAMES = st.sampled_from(["tensor", "row", "col", "mx", "nvfp4"]) | st.one_of(
    st.integers(1, 512).map("group{}".format),
    st.tuples(st.integers(1, 300), st.integers(1, 300)).map("block{0[0]}x{0[1]}".format),
)
OPTIONS = st.lists(
    st.sampled_from(["affine", "e8m0", "bf16", "fp16", "e4m3", "floor", "ceil", "nearest", "full", "global_row", "T"]),
    max_size=4,
    unique=True,
)
TEXTS = st.builds(
    lambda base, options: ":".join([base, *options]),
    st.sampled_from(list(SHORT_NAMES)) | st.builds("{}:{}".format, st.sampled_from(ELEMENTS), SCALING_NAMES),
    OPTIONS,
)


def parsed(text: str) -> Scheme | None:
    try:
        return scheme(text)
    except ValueError:
        return None


@given(TEXTS)
def test_the_name_of_a_scheme_is_a_fixed_point(text):
    s = parsed(text)
    if s is None:
        return
    assert scheme(s.name) == s and scheme(s.name).name == s.name
    assert str(s) == s.name


@given(TEXTS)
def test_transposing_twice_changes_nothing(text):
    s = parsed(text)
    if s is None or s.global_scale in ("row", "superblock"):  # a row's global scale would span a column
        return
    t = s.t()
    assert t.block == s.block[::-1] and t.t() == s
    kept = ("format", "scale_format", "rounding", "affine", "global_scale", "full")
    assert [getattr(t, field) for field in kept] == [getattr(s, field) for field in kept]
    assert scheme(t.name) == t
    if "T" not in text.split(":"):
        assert scheme(f"{text}:T") == t


@given(TEXTS, st.randoms(use_true_random=False))
def test_the_order_of_options_does_not_matter(text, random):
    s = parsed(text)
    if s is None:
        return
    words = text.split(":")
    first = 1 if words[0] in SHORT_NAMES and (len(words) == 1 or scaling.find_scaling(words[1]) is None) else 2
    options = words[first:]
    random.shuffle(options)
    assert scheme(":".join([*words[:first], *options])) == s


def test_one_meaning_one_name():
    names: dict[object, list[str]] = {}
    for s in schemes():
        names.setdefault((tuple(s.params()), s.format), []).append(s.name)
    same = [meant for meant in names.values() if len(meant) > 1]
    assert not same, f"these mean the same: {same}"


@pytest.mark.parametrize(
    "text, name, block, stored",
    [
        ("fp8_e4m3:row", "fp8_e4m3:row", (1, None), "float32"),
        ("fp8_e4m3:col", "fp8_e4m3:col", (None, 1), "float32"),
        ("fp8_e4m3:row:T", "fp8_e4m3:col", (None, 1), "float32"),
        ("int8:tensor:T", "int8:tensor", (None, None), "float32"),
        ("int4:group128", "int4:group128", (1, 128), "float32"),
        ("int4:group128:T", "int4:block128x1", (128, 1), "float32"),
        ("int4:block1x128", "int4:group128", (1, 128), "float32"),
        ("fp8_e4m3:block128x128:T", "fp8_e4m3:block128x128", (128, 128), "float32"),
        ("fp8_e4m3:block64x128:T", "fp8_e4m3:block128x64", (128, 64), "float32"),
        ("fp8_e4m3:mx", "mxfp8", (1, 32), "uint8"),
        ("mxfp8:floor", "mxfp8", (1, 32), "uint8"),
        ("mxfp4:T:ceil", "mxfp4:ceil:T", (32, 1), "uint8"),
        ("mxfp6", "mxfp6", (1, 32), "uint8"),
        ("fp6_e2m3:mx", "mxfp6", (1, 32), "uint8"),
        ("fp4_e2m1:nvfp4", "nvfp4", (1, 16), "uint8"),
        ("nf4", "nf4", (1, 64), "float32"),
        ("nf4:group64", "nf4", (1, 64), "float32"),
        ("nf4:group64:e4m3", "nf4:e4m3", (1, 64), "uint8"),
        ("int4:group32:e4m3", "int4:group32:e4m3", (1, 32), "uint8"),
        ("fp4_e2m1:block16x16:e4m3", "fp4_e2m1:block16x16:e4m3", (16, 16), "uint8"),
        ("fp4_e2m1:group16:e4m3:global_row", "nvfp4:global_row", (1, 16), "uint8"),
        ("nvfp4:nearest", "nvfp4", (1, 16), "uint8"),
        ("nvfp4:global_row:ceil", "nvfp4:ceil:global_row", (1, 16), "uint8"),
        ("int4:group32:full:bf16", "int4:group32:bf16:full", (1, 32), "bfloat16"),
        ("int4:group0032", "int4:group32", (1, 32), "float32"),
        ("int4:block032x01", "int4:block32x1", (32, 1), "float32"),
        ("uint4:group128:affine", "uint4:group128:affine", (1, 128), "float32"),
        ("uint4:group128:bf16:affine", "uint4:group128:affine:bf16", (1, 128), "bfloat16"),
        ("int8:tensor:e8m0", "int8:tensor:e8m0", (None, None), "uint8"),
        ("int8:group32:e8m0", "int8:mx", (1, 32), "uint8"),
        ("int8:block32x1:e8m0:ceil", "int8:mx:ceil:T", (32, 1), "uint8"),
        ("nf4:group16:e4m3", "nf4:nvfp4", (1, 16), "uint8"),
        ("e2m1b3:group16", "e2m1b3:group16", (1, 16), "float32"),
    ],
)
def test_canonical_names(text, name, block, stored):
    s = scheme(text)
    assert (s.name, s.block, s.scale_format.dtype) == (name, block, stored)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "unknown scheme"),
        ("banana", "unknown scheme 'banana'; a scheme is SHORT or FORMAT:SCALING"),
        ("fp8_e4m3", "format 'fp8_e4m3' without a scaling"),
        ("fp8:row", "unknown format 'fp8'"),
        ("int8:rows", "unknown scaling 'rows' in 'int8:rows'"),
        ("int8:group", "unknown scaling 'group'"),
        ("int8:group0", "at least one element"),
        ("int8:block0x4", "at least one element"),
        ("int8:group-4", "unknown scaling"),
        ("int8:row:quick", "unknown or repeated option 'quick'"),
        ("int8:row:affine:affine", "unknown or repeated option 'affine'"),
        ("uint8:row", "cannot hold negative numbers without a zero point; add ':affine' or use int8"),
        ("uint4:mx", "add ':affine' or use int4"),
        ("fp8_e4m3:row:affine", "a zero point needs an integer format"),
        ("nf4:affine", "a zero point needs an integer format"),
        ("int8:row:bf16:fp16", "one scale format at most"),
        ("mxfp8:bf16", "one scale format at most; mx has e8m0"),
        ("nvfp4:e8m0", "one scale format at most"),
        ("int8:row:ceil", "['ceil'] cannot round its"),
        ("nvfp4:floor", "['floor'] cannot round its"),
        ("mxfp8:floor:ceil", "['floor', 'ceil'] cannot round its"),
        ("mxfp8:nearest", "'nearest' e8m0 scales are only defined for fp4_e2m1"),
        ("uint4:group32:affine:e4m3", "a scheme with a global scale has no zero points"),
        ("int8:row:global_row", "add ':e4m3', or use nvfp4"),
        ("nvfp4:global_row:T", "'global_row' needs blocks of one row, and those of nvfp4 have 16"),
        ("int8:col:e4m3:global_row", "'global_row' needs blocks of one row, and those of col have all"),
        ("e2m1b9:group32:e4m3", "a global scale could overflow for e2m1b9, whose maximum is below 1"),
        ("int4:mx:full", "e8m0 has no sign; leave out 'full': int4:mx already uses the codes -8 to 7"),
        ("int8:tensor:e8m0:ceil:full", "leave out 'full': int8:tensor:e8m0 already uses the codes -128 to 127"),
        ("uint4:row:affine:full", "affine ones use their whole range already"),
        ("fp8_e4m3:row:full", "'full' is for signed integers"),
        ("e8m0:row", "elements cannot have the format e8m0"),
        ("bf16:row", "elements cannot have the format bf16"),
        ("int8:row:", "unknown or repeated option ''"),
    ],
)
def test_errors_say_what_is_wrong(text, message):
    with pytest.raises(ValueError) as caught:
        scheme(text)
    assert message in str(caught.value)


@given(st.integers(-126, 120), st.floats(1.0, 2.0, exclude_max=True, width=32))
def test_power_of_two_scales_use_the_least_code_without_full(exponent, fraction):
    """As the error says: the scale is the least power of two in whose 128 multiples the amax fits."""
    amax = math.ldexp(fraction, exponent)
    q = lb.quantize(torch.tensor([[-amax, amax]]), "int8:tensor:e8m0")
    step = math.ldexp(1.0, int(q.scale) - 127)
    assert step == 2.0**-127 or amax / 128 < step <= amax / 64
    codes = q.codes.view(torch.int8).flatten().tolist()
    assert codes == [max(round(-amax / step), -128), min(round(amax / step), 127)]


def test_a_scheme_that_is_no_text():
    with pytest.raises(TypeError, match="a scheme is named by a string, got int"):
        scheme(8)


@given(st.sampled_from(schemes()), st.integers(0, 300), st.integers(0, 300))
def test_shapes_and_bytes(s, rows, cols):
    r, c = s.block_of(rows, cols)
    shape = s.scale_shape(rows, cols)
    blocks = len(range(0, rows, r)) if s.block[0] else 1, len(range(0, cols, c)) if s.block[1] else 1
    assert shape == blocks
    assert s.packed_cols(cols) == (cols * s.format.bits + 7) // 8
    size = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}[s.scale_format.dtype]
    expected = rows * s.packed_cols(cols) + shape[0] * shape[1] * (size + s.affine)
    expected += {None: 0, "tensor": 4, "row": 4 * rows}[s.global_scale]
    assert s.nbytes((rows, cols)) == expected
    first = len(s.format.params())
    assert s.params()[first : first + 2] == [extent or 0 for extent in s.block]


def test_any_rank_is_a_matrix():
    assert scaling.as_matrix(()) == (1, 1)
    assert scaling.as_matrix((7,)) == (1, 7)
    assert scaling.as_matrix((2, 3, 5)) == (6, 5)
    assert scaling.as_matrix((2, 0, 5)) == (0, 5)


def test_every_row_of_the_table_is_in_the_samples():
    """A new scaling or format is tested by being a row."""
    used = {s.format.name for s in schemes()}
    assert used >= {f.name for f in FORMATS.values() if f.bits <= 8 and f.kind != "exponent"}
    blocks = {(s.block, s.scale_format.name) for s in schemes()}
    for (rows, cols), kind in [((None, None), "fp32"), ((1, None), "fp32"), ((None, 1), "fp32"), ((1, 32), "e8m0")]:
        assert ((rows, cols), kind) in blocks
    assert ((1, 16), "fp8_e4m3") in blocks


# -- recipes -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", recipes.RECIPES)
def test_recipes_are_rows_with_real_schemes(name):
    r = recipes.recipe(name)
    assert str(r) == name and isinstance(r.weight, Scheme)
    if r.trains:
        for gemm in (r.grad_input, r.grad_weight):
            assert gemm.b == "dequantize" or isinstance(gemm.a.scheme, Scheme)
            assert gemm.b in ("fold", "reuse", "dequantize") or isinstance(gemm.b.scheme, Scheme)
    assert recipes.Recipe.from_dict(json.loads(json.dumps(r.to_dict()))) == r


def test_recipe_options():
    assert recipes.recipe("int4-weight-only", group=32).weight.name == "int4:group32"
    assert recipes.recipe("int4-weight-only:group32") == recipes.recipe("int4-weight-only", group=32)
    with pytest.raises(ValueError, match=r"unknown recipe 'int9' \(did you mean int8\?\); expected one of .*int8"):
        recipes.recipe("int9")
    with pytest.raises(ValueError, match="already says"):
        recipes.recipe("int4-weight-only:group32", group=64)
    assert recipes.recipe("w4a8", group=32).weight.name == "int4:group32"
    affine = recipes.Recipe(recipes.Gemm(None, "uint4:group128:affine"), name="mine")
    assert recipes.recipe(affine, group=32).weight.name == "uint4:group32:affine"
    for name in ("mxfp4", "mxfp6", "nvfp4"):
        for ask in (lambda name=name: recipes.recipe(name, group=16), lambda name=name: recipes.recipe(f"{name}:row")):
            with pytest.raises(
                ValueError, match=r"part of the format; use a recipe .* int4-weight-only:(group16|row), or Recipe"
            ):
                ask()
