"""Scales of forward's operands by the least squared error: against every candidate in fp64, and the same everywhere."""

from __future__ import annotations

import pytest
import torch
from support.bits import same_bits
from support.layers import training_layer
from torch import Tensor

import lowbit as lb
from lowbit.reference import in_blocks
from lowbit.train.rules import ruled

SCHEMES = [
    "nvfp4:global_row",
    "fp4_e2m1:block16x16:e4m3",
    "nvfp4:T",
    "int4:group7:e4m3",
    "mxfp4:nearest",
    "mxfp8:ceil:T",
]


def errors(x: Tensor, q: lb.Quantized) -> Tensor:
    """Of each block, in fp64."""
    return in_blocks((q.dequantize(torch.float32).double() - x.double()).square(), q.scheme).sum((1, 3))


def candidates(x: Tensor, cast: lb.Cast) -> list[lb.Quantized]:
    """By the words of docs/numerics.md section 14."""
    plain = lb.quantize(x, cast.scheme)
    if cast.rule == "search":
        e4m3 = cast.scheme.scale_format.name == "fp8_e4m3"
        offsets, most = (range(-2, 6), 126) if e4m3 else (range(-1, 2), 254)
        moved = [(plain.scale.int() + by).clamp(1, most).to(torch.uint8) if by else plain.scale for by in offsets]
        return [lb.quantize(x, cast.scheme, scale, None, plain.global_scale) for scale in moved]
    above = plain.global_scale * (448 / 256)
    amax = in_blocks(x.float().abs(), cast.scheme).amax((1, 3))
    scales = [lb.encode(fraction / above, "fp8_e4m3") for fraction in (amax / 6, amax * 1.5 / 6)]
    return [lb.quantize(x, cast.scheme, scale, None, above) for scale in scales]


RULES = [*((scheme, "search") for scheme in SCHEMES), *((scheme, "four-over-six") for scheme in SCHEMES[:3])]
SHAPES = [(1, 16), (33, 50), (7, 130), (48, 32)]


def matrix(*shape: int) -> Tensor:
    return torch.randn(shape).mul(torch.rand(shape[0], 1))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("scheme", "rule"), RULES)
def test_each_block_has_the_best_of_the_candidates(scheme, rule, shape):
    x, cast = matrix(*shape), lb.Cast(scheme, rule=rule)
    q = ruled(x, cast)
    every = torch.stack([errors(x, candidate) for candidate in candidates(x, cast)])
    assert bool((errors(x, q) <= every.amin(0) * (1 + 1e-5) + 1e-30).all())
    scales = torch.stack([candidate.scale for candidate in candidates(x, cast)])
    assert bool((scales == q.scale).any(0).all())
    with lb.use_backend("reference"):
        again = ruled(x, cast)
    assert all(map(same_bits, q.parts.values(), again.parts.values()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_candidates_of_16_bits_are_those_of_the_same_numbers_in_fp32(dtype):
    for scheme, rule in RULES:
        for shape in SHAPES:
            x, cast = matrix(*shape).to(dtype), lb.Cast(scheme, rule=rule)
            wide = ruled(x.float(), cast).parts.values()
            assert all(map(same_bits, ruled(x, cast).parts.values(), wide)), (scheme, rule, shape)
            with lb.use_backend("reference"):
                assert all(map(same_bits, ruled(x, cast).parts.values(), wide)), (scheme, rule, shape)


def test_blocks_of_zeros_and_of_nan_stay_so():
    x = torch.randn(3, 48)
    x[0, :16], x[1, 20], x[2, 40] = 0.0, torch.nan, torch.inf
    for rule in ("search", "four-over-six"):
        y = ruled(x, lb.Cast("nvfp4:global_row", rule=rule)).dequantize()
        assert not y[0, :16].any() and bool(y[1, 16:32].isnan().all()) and bool(y[2, 32:].isnan().all())
        assert int(y.isnan().sum()) == 32 and ruled(x[:0], lb.Cast("nvfp4", rule=rule)).shape == (0, 48)


@pytest.mark.parametrize("name", ["nvfp4:rule=search", "nvfp4:rule=four-over-six", "mxfp4:rule=search"])
def test_forward_of_training_errs_less(name):
    torch.manual_seed(0)
    layers = [training_layer(512, 64, one) for one in (name.partition(":")[0], name)]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(64, 512)
    exact = torch.nn.functional.linear(x, layers[0].weight, layers[0].bias)
    plain, better = ((layer(x) - exact).norm() for layer in layers)
    assert better < 0.93 * plain if name.startswith("nvfp4") else better < 1.02 * plain
    row = lb.recipe(name)
    assert row == lb.recipe(row.name) and row.output == lb.recipe(name.partition(":")[0]).output


@pytest.mark.slow
@torch.no_grad()
def test_a_search_compiles():
    """The rule with the most candidates; that of nvfp4-eden compiles with its recipe, backward included."""
    layer, x = training_layer(50, 21, "nvfp4:rule=search"), torch.randn(9, 50)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert same_bits(compiled(x), layer(x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lb.recipe("mxfp4:rule=four-over-six"), "FP4 elements with E4M3 scales, got mxfp4:nearest; use nvfp4"),
        (lambda: training_layer(4, 4, "int8:rule=search"), "output.a: rule='search' needs e4m3 or e8m0 scales"),
        (lambda: lb.recipe("nvfp4:output=high:rule=search"), "forward leaves an operand float, which has no scales"),
        (
            lambda: training_layer(4, 4, lb.Recipe(
                lb.Gemm("nvfp4", "nvfp4"), lb.Gemm(None, None, "high"),
                lb.Gemm(lb.Cast("nvfp4:T", "stochastic", rule="search"), "nvfp4:T"),
            )),
            "grad_weight.a: rule='search' may clip, which makes stochastic rounding biased",
        ),
        (
            lambda: training_layer(4, 4, lb.Recipe(
                lb.Gemm("nvfp4", "nvfp4"), lb.Gemm(None, None, "high"),
                lb.Gemm(*[lb.Cast("nvfp4", "eden", "random-hadamard")] * 2),
            )),
            "grad_weight.a: eden needs blocks along the contracted axis, and nvfp4 has them along",
        ),
    ],
)  # fmt: skip
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()
