"""What the public functions ask of their arguments, refuse or differentiate: seeds, scales, zero points, outputs."""

import zlib

import pytest
import torch
from support.bits import assert_same_bits
from torch import Tensor

import lowbit as lb
from lowbit import autograd
from lowbit.ops import OPS
from lowbit.testing.inputs import random_matrix


def test_a_seed_is_drawn_on_the_cpu_whatever_the_default_device():
    x = torch.randn(4, 32)
    torch.manual_seed(3)
    expected = lb.encode(x, "fp4_e2m1", rounding="stochastic")
    torch.manual_seed(3)
    with torch.device("meta"):
        assert torch.equal(lb.encode(x, "fp4_e2m1", rounding="stochastic"), expected)


@pytest.mark.parametrize(("name", "bits"), [("seed", 64), ("step", 32), ("stream", 32), ("offset", 64), ("pitch", 64)])
def test_words_of_the_random_bits_are_signed_or_unsigned_and_never_wrap(name, bits):
    x = torch.randn(4, 32)
    code = lambda word: lb.encode(x, "fp4_e2m1", lb.Rounding(**{"seed": 1, name: word}))
    assert torch.equal(code(-1), code((1 << bits) - 1)) and torch.equal(code(-1 << bits - 1), code(1 << bits - 1))
    for word in (1 << bits, (-1 << bits - 1) - 1):
        with pytest.raises(
            ValueError, match=rf"{name}: expected an integer of {bits} bits, got {word}; take it modulo"
        ):
            code(word)


@pytest.mark.parametrize(
    ("rounding", "message"),
    [
        (lambda: 3, r"'nearest', 'stochastic' or a lowbit.Rounding\(seed\), got int"),
        (lambda: None, "got NoneType"),
        (lambda: lb.Rounding, "got type"),
        (lambda: lb.Rounding(3.5), "a seed is an integer, an int64 tensor .* or None, got float"),
        (lambda: lb.Rounding(torch.Generator()), "got Generator"),
        (lambda: lb.Rounding(1, step=2.0), "step: expected an integer, got float"),
        (lambda: lb.Rounding(1, step="2"), "step: expected an integer, got str"),
        (lambda: lb.Rounding(1, stream=None), "stream: expected an integer, got NoneType"),
    ],
)
def test_what_is_no_rounding_is_refused(rounding, message):
    with pytest.raises(TypeError, match=message):
        lb.quantize(torch.randn(4, 32), "int8:row", rounding=rounding())


@pytest.mark.parametrize("stream", ["w/input", "\u00e9", ""])
def test_a_stream_named_by_text_is_its_crc_and_compiles(stream):
    def compute(x: Tensor) -> Tensor:
        return lb.encode(x, "fp4_e2m1", lb.Rounding(1, stream=stream))

    x = torch.randn(4, 32)
    expected = lb.encode(x, "fp4_e2m1", lb.Rounding(1, stream=zlib.crc32(stream.encode())))
    assert_same_bits(compute(x), expected)
    assert_same_bits(torch.compile(compute, fullgraph=True, backend="eager")(x), expected)


# -- second derivatives, and what has no gradient ----------------------------------------------------------------------
def second(f, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the squared norm of all gradients."""
    grads = torch.autograd.grad(f(*inputs), inputs, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in grads), inputs)


def test_second_derivatives_of_fake_quantize():
    x = torch.tensor([[0.5, -3.0, 500.0, 2.0]], requires_grad=True)
    y = lb.fake_quantize(2 * x, "fp8_e4m3:tensor", scale=1.0)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    assert grad.tolist() == [[4.0, -24.0, 0.0, 16.0]]  # 1000 is out of range
    assert torch.autograd.grad(grad.sum(), x)[0].tolist() == [[8.0, 8.0, 0.0, 8.0]]
    (grad,) = torch.autograd.grad(lb.fake_quantize(x, "int8:row").sum(), x, create_graph=True)
    assert torch.autograd.grad(grad.sum(), x)[0].tolist() == [[0.0] * 4]


def test_second_derivatives_with_a_learned_scale():
    x, scale = torch.tensor([[0.5, -3.0, 500.0, 2.0]], requires_grad=True), torch.ones(1, 1, requires_grad=True)
    y = lb.fake_quantize(x, "int8:tensor", scale=scale)
    grad, grad_scale = torch.autograd.grad(y.square().sum(), (x, scale), create_graph=True)
    by_x, by_scale = torch.autograd.grad(grad.sum(), (x, scale), retain_graph=True)
    assert by_x.tolist() == [[2.0, 2.0, 0.0, 2.0]] and by_scale.tolist() == [[-1.0]]
    with pytest.raises(RuntimeError, match=r"gradient of its scale has no derivative; .*scale.detach\(\)"):
        torch.autograd.grad(grad_scale.sum(), x)


def test_second_derivatives_of_scaled_mm():
    a, bias = (random_matrix(rows, 32, seed=rows).div_(4096).requires_grad_() for rows in (3, 1))
    w = lb.quantize(random_matrix(32, 32, seed=9), "mxfp4")
    mine = second(lambda a, c: lb.scaled_mm(a, w, c[0], out_dtype=torch.float32).pow(3).sum(), a, bias)
    torchs = second(lambda a, c: (a @ w.dequantize().T + c[0]).pow(3).sum(), a, bias)
    b = w.dequantize().requires_grad_()
    both = second(lambda a, b: lb.scaled_mm(a, b, out_dtype=torch.float32).pow(3).sum(), a, b)
    expected = second(lambda a, b: (a @ b.T).pow(3).sum(), a, b)
    for got, want in zip((*mine, *both), (*torchs, *expected), strict=True):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def test_opcheck_of_the_second_derivative():
    x, grad = (random_matrix(3, 40, seed=s).requires_grad_() for s in (1, 2))
    torch.library.opcheck(torch.ops.lowbit.fake_quantize_backward.default, (grad, x, "mxfp8"))


def test_scales_that_would_get_no_gradient_are_refused():
    x, one = torch.randn(2, 32), torch.ones((), requires_grad=True)
    with pytest.raises(RuntimeError, match=r"global_scale requires grad.*global_scale.detach"):
        lb.fake_quantize(x, "nvfp4", global_scale=one)
    with pytest.raises(RuntimeError, match=r"scale requires grad, but .* stores scales as e8m0 codes"):
        lb.fake_quantize(x, "mxfp8", scale=one)
    with torch.no_grad():
        lb.fake_quantize(x, "nvfp4", global_scale=one)
        lb.fake_quantize(x, "mxfp8", scale=one)
    q = lb.quantize(x, "int8:row").map(lambda part: part.clone())
    q.scale.requires_grad_()
    with pytest.raises(RuntimeError, match=r"lowbit.scaled_mm: b_scale requires grad.*b_scale.detach"):
        lb.scaled_mm(x, q)


# -- outputs that are given --------------------------------------------------------------------------------------------
def test_an_output_that_overlaps_an_input_is_refused():
    memory = torch.randn(4, 32)
    a, b = memory, torch.randn(32, 32)
    for out in (memory, memory[1:3].view(2, 32)):
        with pytest.raises(ValueError, match=r"lowbit.scaled_mm: out shares memory with a, .* give another tensor"):
            lb.scaled_mm(a[: len(out)] if out is memory else a[:2], b, out_dtype=torch.float32, out=out)
    q = lb.quantize(b, "int8:row")
    with pytest.raises(ValueError, match="out shares memory with b_scale"):
        lb.scaled_mm(a[:1], q, out_dtype=torch.float32, out=q.scale.t())
    codes = torch.zeros(4, 32, dtype=torch.uint8)
    with pytest.raises(ValueError, match="zero_point shares memory with codes"):
        zero_point = codes.view(-1)[100:104].view(4, 1)
        torch.ops.lowbit.quantize_out(a, "uint8:row:affine", codes=codes, scale=torch.ones(4, 1), zero_point=zero_point)


def test_an_output_beside_or_between_its_inputs_is_filled():
    memory, b = torch.randn(8, 64), torch.randn(32, 32)
    a = memory[:4, :32]
    expected = lb.scaled_mm(a.clone(), b, out_dtype=torch.float32)
    for out in (memory[4:].view(-1)[:128].view(4, 32), memory[:4, 32:], memory[4:, :32]):
        lb.scaled_mm(a, b, out_dtype=torch.float32, out=out)
        assert_same_bits(out, expected)
    empty = torch.empty(0, 32)
    lb.scaled_mm(empty, b, out_dtype=torch.float32, out=empty)


@pytest.mark.parametrize("scheme", ["int4:row:affine", "uint4:group32:affine"])
def test_ops_take_any_zero_point_that_its_dtype_holds(scheme):
    x = random_matrix(16, 64, seed=4, extremes=True)
    q = lb.quantize(x, scheme)
    info = torch.iinfo(q.zero_point.dtype)
    zero = torch.linspace(info.min, info.max, q.zero_point.numel()).round().to(q.zero_point.dtype).view_as(q.scale)
    scale = torch.ones_like(q.scale)
    results = []
    for backend in dict.fromkeys(impl.backend for impl in lb.impls("fake_quantize")):
        with lb.use_backend(backend):
            codes = torch.ops.lowbit.quantize_static(x, scheme, scale, zero)
            results.append((
                codes, torch.ops.lowbit.dequantize(codes, scheme, 64, scale, zero),
                torch.ops.lowbit.fake_quantize(x, scheme, scale, zero),
            ))  # fmt: skip
        assert_same_bits(results[-1][1], results[-1][2])
        for got, want in zip(results[-1], results[0], strict=True):
            assert_same_bits(got, want, backend)
    with pytest.raises(ValueError, match="zero_point must be integers in"):
        lb.quantize(x, scheme, scale=scale, zero_point=zero)


def test_forward_mode_derivatives_are_refused():
    x, w = torch.randn(4, 8), torch.randn(3, 8)
    for function in (lambda t: lb.fake_quantize(t, "int8:row"), lambda t: lb.scaled_mm(t, w)):
        with pytest.raises(NotImplementedError, match="no forward-mode derivative; use reverse mode"):
            torch.func.jvp(function, (x,), (torch.ones_like(x),))
    assert torch.func.jvp(lambda t: (t * lb.scaled_mm(w, w).sum()).sum(), (x,), (torch.ones_like(x),))[1] != 0


def test_explain_draws_no_seed():
    before = torch.get_rng_state()
    lb.explain("encode", torch.randn(3), "fp8_e4m3", rounding="stochastic")
    torch.rand(0)
    lb.explain("quantize", torch.ones(3, 4), "int8:row", rounding="stochastic")
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    torch.randn(3)
    assert torch.equal(torch.get_rng_state(), after)


# -- rounding as one value ---------------------------------------------------------------------------------------------
def test_a_tensor_of_seed_and_step_is_the_integers():
    x, place = torch.randn(4, 32), {"stream": "blocks.0/output.a", "offset": 5, "pitch": 40}
    numbers, tensor = lb.Rounding(7, 3, **place), lb.Rounding(torch.tensor([7, 3]), **place)
    assert torch.equal(lb.encode(x, "fp4_e2m1", numbers), lb.encode(x, "fp4_e2m1", tensor))
    for scale in (None, 0.5):
        codes = [lb.quantize(x, "int8:tensor", scale, rounding=rounding).codes for rounding in (numbers, tensor)]
        assert torch.equal(*codes)
    assert_same_bits(*(lb.fake_quantize(x, "mxfp4", rounding=rounding) for rounding in (numbers, tensor)))
    assert numbers.place()[0] == lb.Rounding(stream="blocks.0/output.a").place()[0] and hash(numbers)


def test_what_is_no_seed_and_step_is_refused():
    with pytest.raises(ValueError, match="a tensor of seed and step contains the step; leave step=3 out"):
        lb.Rounding(torch.tensor([7, 3]), 3)
    for seed in (torch.tensor([7]), torch.tensor([7.0, 3.0]), torch.tensor([7, 3], dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"stochastic rounding takes rng, an int64 tensor \[seed, step\], got"):
            lb.encode(torch.ones(3), "fp4_e2m1", lb.Rounding(seed))
    with pytest.raises(ValueError, match=r"all tensors must be on one device, got .*rng"):
        lb.encode(torch.ones(3), "fp4_e2m1", lb.Rounding(torch.zeros(2, dtype=torch.int64, device="meta")))


def test_the_step_of_adamw_is_the_step_of_its_rounding():
    def stepped(rounding_at):
        p, moments = torch.ones(4, 32), [lb.quantize(torch.zeros(4, 32), "fp8_e4m3:group32") for _ in "mr"]
        for step in (1, 2):
            grad = torch.linspace(-1, 1, 128).reshape(4, 32)
            lb.adamw_(p, grad, *moments, step=step, rounding=rounding_at(step))
        return [p, *(part for moment in moments for part in moment.parts.values())]

    seed_alone = stepped(lambda step: lb.Rounding(7, stream=3))
    assert all(map(torch.equal, seed_alone, stepped(lambda step: lb.Rounding(torch.tensor([7, step]), stream=3))))
    with pytest.raises(ValueError, match=r"has another step than step=1; leave out the step"):
        stepped(lambda step: lb.Rounding(7, step=2))


def test_a_seed_of_more_bits_is_refused():
    with pytest.raises(ValueError, match="seed: expected an integer of 64 bits"):
        lb.Rounding(1 << 64)


def test_gradients_are_given_by_the_names_of_arguments():
    x, bias = torch.zeros(2), torch.ones(3)
    grads = dict(zip(OPS["linear"].args._fields, autograd._grads("linear", bias=bias, x=x), strict=True))
    assert grads["x"] is x and grads["bias"] is bias
    assert all(grads[name] is None for name in grads if name not in ("x", "bias"))
    with pytest.raises(TypeError, match="linear has no argument beta"):
        autograd._grads("linear", beta=x)
