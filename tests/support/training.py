"""The operands of a layer's three products as docs/numerics.md sections 5, 7 and 14 have them, recipe by recipe."""

from __future__ import annotations

import zlib

import torch
from support import oracles
from torch import Tensor

import lowbit as lb
from lowbit import reference
from lowbit.reference import Operand, codec

#: Both operands of a product: codes with scales, or the matrices of a product of floats.
Sides = tuple[Operand | Tensor, Operand | Tensor]


def coded(x: Tensor, text: str, role: str | None = None) -> Operand:
    """The codes of ``x``; ``role``: of which operand of the layer at the path "", where bits are drawn for it."""
    scheme, rng = lb.scheme(text), None
    if role is not None:  # a layer that is called by itself is in micro-batch 0 of step 0
        rng = codec.Rng(oracles.training_seed(0, 0, 0), 0, zlib.crc32(f"/{role}".encode()))
    global_scale = reference.global_scale(x, scheme) if scheme.global_scale else None
    return Operand(*_placed(reference.quantize(x, scheme, global_scale, rng), scheme), global_scale)


def _placed(made: tuple, scheme: lb.Scheme) -> tuple:
    codes, scale, zero_point = made
    return codes, scheme, scale, zero_point


def turned(x: Operand | Tensor) -> Operand | Tensor:
    if isinstance(x, Tensor):
        return x.t()
    return Operand(x.data.t(), x.scheme.t(), x.scale.t(), None, x.global_scale)


def numbers(x: Operand, dtype: torch.dtype = torch.float32) -> Tensor:
    return reference.dequantize(x.data, x.scheme, x.scale, None, x.global_scale, dtype)


def bare(x: Operand) -> Operand:
    return Operand(x.data, lb.scheme(f"{x.scheme.format}:tensor"), torch.ones(1, 1))


def forward_operands(recipe: str, x: Tensor, w: Tensor) -> Sides:
    if recipe == "nvfp4-eden":
        return four_over_six(x, "nvfp4:global_row"), four_over_six(w, "nvfp4")
    if recipe == "nvfp4":
        return coded(x, "nvfp4:global_row"), coded(w, "fp4_e2m1:block16x16:e4m3")
    if recipe == "mxfp4":
        return coded(x, "mxfp4:nearest"), coded(w, "fp4_e2m1:block32x32:e8m0:nearest")
    row = lb.recipe(recipe)
    return coded(x, row.input.name), coded(w, row.weight.name)


def spread(x: Tensor, block: int) -> Tensor:
    """``x [M, K]`` after the signs of pi and the Hadamard transform of its columns, section 13."""
    digits = f"{0x243F6A8885A308D313198A2E03707344:0128b}"
    signs = torch.tensor([1.0 - 2.0 * int(digits[row % block]) for row in range(len(x))]).reshape(-1, 1)
    return lb.hadamard((x.float() * signs).to(x.dtype).t(), block).t()


def four_over_six(x: Tensor, text: str) -> Operand:
    """Each block with the scale, by which its largest element is 6 or 4, that errs less."""
    scheme = lb.scheme(text)
    above = reference.global_scale(x, scheme) * 1.75
    made = []
    for matrix in (x, x.float() * 1.5):
        scale, _ = reference.block_scales(matrix, scheme, above)
        one = Operand(reference.quantize_static(x, scheme, scale, None, above, None), scheme, scale, None, above)
        made.append((scale, _halved(reference.in_blocks((numbers(one) - x.float()).square(), scheme).squeeze(1))))
    (six, first), (four, second) = made
    scale = torch.where(second < first, four, six)
    return Operand(reference.quantize_static(x, scheme, scale, None, above, None), scheme, scale, None, above)


def eden(x: Tensor, axis: int, product: str, is_b: int) -> Operand:
    """Whole vectors of 128 along ``axis``, with random signs and the Hadamard transform; their scales make the inner
    product of codes and vector that of the vector with itself, and are rounded with the operand's random bits."""
    scheme, role = lb.scheme("nvfp4:T" if axis == 0 else "nvfp4"), f"{product}.{'b' if is_b else 'a'}"
    seed = oracles.training_seed(0, 0, 0)  # of the weight too: this is micro-batch 0 of replica 0
    stream = zlib.crc32(f"/{product}.a".encode()) + 1 & 0xFFFFFFFF
    signs = torch.tensor([-1.0 if _bits(seed, stream, i) >= 0x8000 else 1.0 for i in range(128)])
    rows = x if axis == 1 else x.t()
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 128)).float() * signs.repeat(-(-rows.shape[1] // 128))
    y = lb.hadamard(rows.to(x.dtype), 128)
    y = y if axis == 1 else y.t()
    above = reference.global_scale(y, scheme) * 1.75
    codes, scale, _ = reference.quantize(y, scheme, above, None)
    made = numbers(Operand(codes, scheme, scale, None, above))
    products = (y.float() * y.float(), y.float() * made)
    square, cross = (_halved((t if axis == 1 else t.t()).unflatten(-1, (-1, 128))) for t in products)
    factor = torch.where(cross > 0, square / cross, 1.0).repeat_interleave(8, 1)
    values = reference.decode(scale, lb.FORMATS["fp8_e4m3"]) * (factor if axis == 1 else factor.t())
    rng = codec.Rng(seed, 0, zlib.crc32(f"/{role}".encode()))
    return Operand(codes, scheme, reference.encode(values, lb.FORMATS["fp8_e4m3"], rng, True, None), None, above)


def _bits(seed: int, stream: int, place: int) -> int:
    """The 16 random bits of the element at ``place``, section 7."""
    words = oracles.philox((place >> 3, 0, 0, stream), (seed % 2**32, seed >> 32))
    return words[(place & 7) >> 1] >> 16 * (place & 1) & 0xFFFF


def _halved(values: Tensor) -> Tensor:
    """Sums over the last axis, whose length is a power of two, right halves added to left ones; 0 of none."""
    while values.shape[-1] > 1:
        values = torch.add(*values.chunk(2, -1))
    return values.squeeze(-1)


def backward_operands(recipe: str, x: Tensor, w: Tensor, g: Tensor) -> tuple[Sides, Sides]:
    """Of the gradient of x (contracting N), and of that of w (contracting M)."""
    qx, qw = forward_operands(recipe, x, w)
    if recipe in ("fp8", "int8", "int8-stochastic"):
        return _folded(recipe, qx, qw, g)
    if recipe == "fp8-pow2":
        along, down = "fp8_e4m3:row:e8m0:ceil", "fp8_e4m3:col:e8m0:ceil"
        return (coded(g, along), turned(coded(w, down))), (turned(coded(g, down)), turned(coded(x, down)))
    if recipe == "nvfp4-eden":
        for_x = [eden(t, 0 if b else 1, "grad_input", b) for b, t in enumerate((g, w))]
        for_w = [eden(t, 0, "grad_weight", b) for b, t in enumerate((g, x))]
        return (for_x[0], turned(for_x[1])), (turned(for_w[0]), turned(for_w[1]))
    if recipe in ("nvfp4", "mxfp4"):
        ceil, nearest, block = f"{recipe}:ceil", *(("nvfp4:T", 16) if recipe == "nvfp4" else ("mxfp4:nearest:T", 32))
        for_w = coded(spread(g, block), f"{ceil}:T", "grad_weight.a"), coded(spread(x, block), nearest)
        return (coded(g, ceil, "grad_input.a"), turned(qw)), (turned(for_w[0]), turned(for_w[1]))
    if recipe in ("fp8-tensor", "fp8-delayed"):  # in its first step a delayed scale is the current one
        q = coded(g, "fp8_e5m2:tensor")
        return (q, turned(qw)), (turned(q), turned(qx))
    if recipe == "fp8-block":
        down = "fp8_e4m3:group128:T"
        return (coded(g, "fp8_e4m3:group128"), turned(qw)), (
            turned(coded(g, down)), turned(coded(x, down)),
        )  # fmt: skip
    assert recipe == "mxfp8"
    down = "mxfp8:ceil:T"
    return (coded(g, "mxfp8:ceil"), turned(coded(w, down))), (
        turned(coded(g, down)), turned(coded(x, down)),
    )  # fmt: skip


def _folded(recipe: str, x: Operand, w: Operand, g: Tensor) -> tuple[Sides, Sides]:
    """Scales of the weight's and the input's rows are multiplied into g; ``int8`` decodes the input instead."""
    format = "fp8_e5m2" if recipe == "fp8" else "int8"
    drawn = ("grad_input.a", "grad_weight.a") if recipe == "int8-stochastic" else (None, None)
    for_x = coded(g.float() * w.scale.t(), f"{format}:row", drawn[0]), turned(bare(w))
    if recipe == "int8":
        return for_x, (g.t(), numbers(x, g.dtype).t())
    return for_x, (turned(coded(g.float() * x.scale, f"{format}:col", drawn[1])), turned(bare(x)))


def product(sides: Sides, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``a @ b.T`` as the specification has it."""
    a, b = sides
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return (a @ b.t()).to(dtype)
    return reference.scaled_mm(a, b, bias, dtype)
