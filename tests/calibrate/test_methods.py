"""Methods that choose codes and scales: against brute force, an oracle in float64, and the promises of each."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import lowbit as lb
from lowbit.calibrate import METHODS, OBSERVERS, TRANSFORMS
from lowbit.calibrate.choice import choose
from lowbit.calibrate.methods import Method, default_method, gptq
from lowbit.calibrate.methods.gptq import damped
from lowbit.calibrate.statistics import Statistics
from lowbit.datafree import DATA_FREE, scales

SCHEMES = (
    "int4:group32", "int4:row", "int8:row", "int4:tensor", "int4:block16x16", "uint4:group32:affine", "nf4", "mxfp4",
    "nvfp4", "fp8_e4m3:row", "mxfp8", "int4:group32:e4m3", "fp4_e2m1:block16x16:e4m3", "nvfp4:global_row",
)  # fmt: skip


def weighted_loss(weight: Tensor, decoded: Tensor, importance: Tensor | None = None) -> float:
    wrong = (weight.double() - decoded.double()).square()
    return float((wrong if importance is None else wrong * importance.double()).sum())


def seen(x: Tensor, need: str = "gram") -> Statistics:
    statistics = Statistics(x.shape[1], need)
    statistics.update(x)
    return statistics


def correlated(rows: int, cols: int) -> Tensor:
    return torch.randn(rows, cols) @ (torch.randn(cols, cols) / cols**0.5) + 0.5 * torch.randn(cols)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("name", SCHEMES)
@given(rows=st.integers(1, 40), cols=st.integers(1, 150), seed=st.integers(0, 99), tails=st.booleans())
def test_searched_scales_lose_no_more_than_those_of_quantize(name, rows, cols, seed, tails):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, cols, generator=generator)
    weight = weight**3 if tails else weight
    importance = torch.rand(cols, generator=generator) ** 4
    for h in (None, importance):
        found = lb.quantize(weight, name, *scales.search(weight, lb.scheme(name), h)).dequantize(torch.float32)
        plain = lb.quantize(weight, name).dequantize(torch.float32)
        assert weighted_loss(weight, found, h) <= weighted_loss(weight, plain, h) * (1 + 1e-5)


def test_every_e4m3_code_tried_finds_no_better_nvfp4_scale():
    weight, scheme = torch.randn(16, 64), lb.scheme("nvfp4")
    found = scales.search(weight, scheme)
    best = None
    for code in range(1, 127):
        scale = torch.full_like(found.scale, code)
        decoded = lb.quantize(weight, scheme, scale, None, found.global_scale).dequantize(torch.float32)
        loss = (weight - decoded).square().view(16, 4, 16).sum(2)
        best = loss if best is None else torch.minimum(best, loss)
    mine = (weight - lb.quantize(weight, scheme, *found).dequantize(torch.float32)).square().view(16, 4, 16).sum(2)
    torch.testing.assert_close(mine, best, rtol=1e-6, atol=0)


def test_search_reaches_the_known_signal_to_noise_ratios():
    """Published and recomputed: 21.77 dB for int4 in groups of 32, 21.80 for NVFP4, of Gaussian numbers."""
    weight = torch.randn(512, 512)

    def decibel(name):
        decoded = lb.quantize(weight, name, *scales.search(weight, lb.scheme(name))).dequantize(torch.float32)
        return float(10 * torch.log10(weight.square().sum() / (weight - decoded).square().sum()))

    assert decibel("int4:group32") > 21.7
    assert decibel("nvfp4") > 21.7


def test_signed_scales_put_the_largest_magnitude_on_the_least_code():
    weight = torch.tensor([[0.5, -1.0, 0.25, 8.0], [-8.0, 1.0, 2.0, 3.0]])
    made = METHODS["signed"].solve(weight, lb.scheme("int4:row"), None)
    assert made.scale.flatten().tolist() == [-1.0, 1.0]
    assert torch.equal(made.dequantize(torch.float32), torch.tensor([[0.0, -1.0, 0.0, 8.0], [-8.0, 1.0, 2.0, 3.0]]))


# -- GPTQ -------------------------------------------------------------------------------------------------------------
def brain_surgeon(weight: Tensor, gram: Tensor, steps: Tensor, order: Tensor, low: int, high: int) -> Tensor:
    """Optimal brain quantization in float64, a column at a time, with the inverse that is eliminated step by step."""
    damping, _ = damped(gram)
    left, step = weight.double()[:, order].clone(), steps.double()[:, order]
    inverse = torch.linalg.inv((gram.double() + damping * torch.eye(len(gram), dtype=torch.float64))[order][:, order])
    found = torch.zeros_like(left)
    for j in range(len(order)):
        found[:, j] = (left[:, j] / step[:, j]).round().clamp(low, high)
        error = (left[:, j] - found[:, j] * step[:, j]) / inverse[j, j]
        left -= error[:, None] * inverse[j]
        inverse = inverse - inverse[:, j : j + 1] @ inverse[j : j + 1] / inverse[j, j]
    codes = torch.empty_like(found)
    codes[:, order] = found
    return codes


@pytest.mark.parametrize("cols", [96, 200])
def test_gptq_has_the_codes_of_optimal_brain_quantization(cols):
    x, weight = correlated(2000, cols), torch.randn(24, cols) * 0.05
    statistics = seen(x)
    made = METHODS["gptq"].solve(weight, lb.scheme("int4:group32"), statistics)
    order = statistics.gram.diagonal().argsort(descending=True, stable=True)
    steps = made.scale.repeat_interleave(32, 1)[:, :cols]
    expected = brain_surgeon(weight, statistics.gram, steps, order, -8, 7)
    same = ((made.dequantize(torch.float32).double() / steps).round() == expected).double().mean()
    assert same > 0.999  # a sum in fp32 may fall on the other side of a tie


@pytest.mark.parametrize("name", SCHEMES)
def test_gptq_loses_less_of_the_outputs_than_nearest(name):
    x, weight = correlated(3000, 160), torch.randn(48, 160) * 0.1
    scheme = lb.scheme(name)

    def loss(made):
        return float((x.double() @ (made.dequantize(torch.float32).double() - weight.double()).t()).square().sum())

    assert loss(METHODS["gptq"].solve(weight, scheme, seen(x))) < 0.9 * loss(lb.quantize(weight, scheme))


@pytest.mark.parametrize("name", ["int4:group32", "int4:group48", "nf4", "int8:row"])
def test_scales_are_fitted_to_the_codes_of_gptq(name, monkeypatch):
    """Those of least squares, by an SVD in fp64; and no row loses more than without a fit."""
    x, weight, scheme = torch.randn(300, 80) @ torch.randn(80, 80), torch.randn(12, 80), lb.scheme(name)
    statistics = seen(x)
    full = statistics.gram + gptq.damped(statistics.gram)[0] * torch.eye(80)
    fitted = gptq.solve(weight, scheme, statistics)
    monkeypatch.setattr(gptq, "_FITS", 0)
    once = gptq.solve(weight, scheme, statistics)
    assert bool((gptq._losses(fitted, weight, full) <= gptq._losses(once, weight, full)).all())
    found = gptq._fitted(once, weight, full).scale.double()
    root = torch.linalg.cholesky(full.double()).T
    width = scheme.block_of(12, 80)[1]
    steps = once.scale.double().repeat_interleave(width, 1)[:, :80]
    codes = once.dequantize(torch.float32).double() / steps
    for row in range(12):
        parts = torch.zeros(80, found.shape[1], dtype=torch.float64)
        for column in range(80):
            parts[column, column // width] = codes[row, column]
        expected = torch.linalg.lstsq(root @ parts, (root @ weight[row].double())[:, None], driver="gelsd").solution
        torch.testing.assert_close(found[row], expected[:, 0], rtol=2e-3, atol=1e-4)


def test_gptq_of_columns_without_inputs():
    x = correlated(500, 64)
    x[:, 10:20] = 0
    made = METHODS["gptq"].solve(torch.randn(8, 64), lb.scheme("int4:group32"), seen(x))
    assert bool(made.dequantize(torch.float32).isfinite().all())


def test_a_gram_matrix_without_a_factor_is_damped_more_with_a_warning():
    broken = torch.diag(torch.tensor([1.0, -0.015]))  # no sums of squares, but what rounding may leave of them
    with pytest.warns(UserWarning, match=r"no Cholesky factor .*10 times as much"):
        damping, factor = damped(broken)
    torch.testing.assert_close(factor @ factor.t(), broken + damping * torch.eye(2))
    with pytest.raises(ValueError, match=r"no Cholesky factor .*; use method='search'"):
        damped(torch.full((2, 2), torch.nan))


def test_corrected_gptq_fits_what_the_unquantized_inputs_give():
    plain = correlated(4000, 96)
    x = plain + 0.5 * torch.randn_like(plain) + 0.2 * plain.roll(1, 1)  # as quantized layers before would leave them
    weight, scheme = torch.randn(32, 96) * 0.1, lb.scheme("int4:group32")
    statistics = Statistics(96, "cross")
    statistics.update(x, plain)

    def loss(name):
        made = METHODS[name].solve(weight, scheme, statistics).dequantize(torch.float32).double()
        return float((x.double() @ made.t() - plain.double() @ weight.double().t()).square().sum())

    assert loss("ls-gptq") < 0.9 * loss("gptq")


@pytest.mark.parametrize("name", ["uint4:group64:affine", "int4:group64"])
def test_hqq_loses_less_of_heavy_tails_in_its_norm(name):
    weight, scheme = torch.randn(64, 256) ** 3, lb.scheme(name)

    def loss(made):
        return float((weight - made.dequantize(torch.float32)).abs().pow(0.7).sum())

    assert loss(METHODS["hqq"].solve(weight, scheme, None)) < 0.98 * loss(lb.quantize(weight, scheme))


# -- the table --------------------------------------------------------------------------------------------------------
def pairs(refused: bool) -> list[tuple[str, str]]:
    """The methods and schemes that do not go together, or those that do."""
    every = itertools.product(SCHEMES, METHODS)
    return [(name, method) for name, method in every if bool(METHODS[method].refuses(lb.scheme(name))) == refused]


def test_methods_that_refuse_a_scheme_say_which():
    assert pairs(refused=True)
    for name, method in pairs(refused=True):
        assert str(lb.scheme(name)) in str(METHODS[method].refuses(lb.scheme(name))), method
    for name in SCHEMES:
        assert not default_method(lb.scheme(name), data=False).refuses(lb.scheme(name))


@pytest.mark.parametrize(("name", "method"), pairs(refused=False))
def test_every_method_serves_what_it_does_not_refuse(name, method):
    x = correlated(300, 48)
    statistics = Statistics(48, "cross")
    statistics.update(x, x)
    made = METHODS[method].solve(torch.randn(20, 48), lb.scheme(name), statistics)
    assert made.scheme == lb.scheme(name)
    assert made.shape == (20, 48)
    assert bool(made.dequantize(torch.float32).isfinite().all())


def test_names_of_methods():
    assert choose(None).weights is None
    assert choose("LS_GPTQ").weights is METHODS["ls-gptq"]
    assert choose(METHODS["hqq"]).weights is METHODS["hqq"]
    assert choose("moving_average").inputs is choose("Moving-Average").inputs is OBSERVERS["moving-average"]
    assert all(name == name.lower().replace("_", "-") for name in (*METHODS, *OBSERVERS, *TRANSFORMS, *lb.RECIPES))
    several = choose(("smoothquant", "awq", "search", "entropy"))
    assert several[:3] == (METHODS["search"], OBSERVERS["entropy"], (TRANSFORMS["smoothquant"], TRANSFORMS["awq"]))
    assert not several.rotated and choose(("hadamard", "gptq"))[::3] == (METHODS["gptq"], True)
    assert choose("mse")[:2] == (METHODS["mse"], OBSERVERS["mse"])
    assert choose(("mse", "gptq"))[:2] == (METHODS["gptq"], OBSERVERS["mse"])
    assert choose(("mse", "minmax"))[:2] == (METHODS["mse"], OBSERVERS["minmax"])
    with pytest.raises(ValueError, match=r"unknown method 'gtpq' \(did you mean gptq\?\)"):
        choose("gtpq")
    with pytest.raises(ValueError, match="one method chooses the scales of weights, got gptq and hqq"):
        choose(("gptq", "hqq"))
    with pytest.raises(ValueError, match="only percentile takes a share"):
        choose("entropy:3")
    with pytest.raises(TypeError, match=r"a method is a name.*got int"):
        choose([3])


def test_a_method_of_a_third_party_is_known_by_name():
    def halved(weight, scheme, statistics):
        return lb.quantize(weight / 2, scheme)

    model, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(4, 8)
    expected = lb.quantize(model[0].weight.detach() / 2, "int8:row")
    lb.register_method(Method("mine-half", "half of each weight", halved))
    lb.register_method(Method("mine-data", "half of each weight, with data", halved, "squares", "squares"))
    try:
        for row in ("mine_half", "mine-data"):
            found = lb.calibrate(model, "int8", [x], row)
            assert found.rows["0"].method == row.replace("_", "-")
            deployed = copy.deepcopy(model)
            lb.quantize_(deployed, "int8", found)
            assert torch.equal(deployed[0].weight.codes, expected.codes)
        changed = copy.deepcopy(model)
        lb.quantize_(changed, "int8", method="mine_half")
        assert torch.equal(changed[0].weight.codes, expected.codes), "data-free methods serve quantize_"
        with pytest.raises(ValueError, match=r"needs a data-free method.*mine-half.*lowbit\.calibrate"):
            lb.quantize_(nn.Sequential(nn.Linear(8, 8)), "int8", method="mine-data")
        with pytest.raises(ValueError, match=r"unknown method 'mine-hlaf' \(did you mean mine-half\?\)"):
            choose("mine-hlaf")
        for name in ("gptq", "mine-half", "awq", "hadamard", "minmax", "moving-average"):
            with pytest.raises(ValueError, match=f"the name '{name}' is taken"):
                lb.register_method(Method(name, "", halved))
        with pytest.raises(ValueError, match="lower case letters and digits"):
            lb.register_method(Method("moving_half", "", halved))
        with pytest.raises(TypeError, match="expected a Method, got str"):
            lb.register_method("gptq")
    finally:
        del METHODS["mine-half"], METHODS["mine-data"], DATA_FREE["mine-half"]


# -- statistics -------------------------------------------------------------------------------------------------------
@given(rows=st.integers(1, 50), pieces=st.integers(1, 4))
def test_statistics_are_the_sums_over_all_batches(rows, pieces):
    batches = [torch.randn(rows, 12) for _ in range(pieces)]
    statistics = Statistics(12, "cross")
    for x in batches:
        statistics.update(x[None], 2 * x[None])
    x = torch.cat(batches).double()
    torch.testing.assert_close(statistics.squares, x.square().mean(0).float())
    torch.testing.assert_close(statistics.gram, (x.t() @ x / len(x)).float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(statistics.cross, 2 * statistics.gram, rtol=1e-4, atol=1e-5)
    assert statistics.rows == len(x)


def test_statistics_refuse_numbers_that_are_none():
    for bad in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match="NaN or Inf; look for them in the calibration data"):
            Statistics(2, "gram").update(torch.tensor([[1.0, bad]]))
