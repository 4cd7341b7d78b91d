"""Calls of ``conv``: small ones for tests, large ones for benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit import scaling
from lowbit.ops.conv import Conv
from lowbit.ops.spec import FLOATS, dtype_name
from lowbit.testing import matmul
from lowbit.testing.inputs import Workload, large_matrix, random_matrix, schemes


class Geometry(NamedTuple):
    """Sizes of a convolution: ``x [N, *S, C]``, out channels, and what nn.ConvNd calls the rest."""

    x: tuple[int, ...]
    out: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1


def plain(x: tuple[int, ...], out: int, kernel: int, stride: int = 1, groups: int = 1) -> Geometry:
    """A kernel of one size along all axes, padded so that stride 1 keeps the size."""
    axes = len(x) - 2
    return Geometry(x, out, (kernel,) * axes, (stride,) * axes, (kernel // 2,) * 2 * axes, (1,) * axes, groups)


def make_call(
    x: Tensor, weight: Tensor, geometry: Geometry, input_scheme: str | None, scheme: str, **more: object
) -> Conv:
    """A call on the reference's quantization of a float weight ``[O, C / groups, *kernel]``."""
    matrix = weight.movedim(1, -1).flatten(1)
    b = matmul.make_call(matrix, matrix, None, scheme)
    arguments = {"input_scheme": input_scheme, **more}
    bias = arguments.pop("bias", None)
    return Conv(
        x, b.b, scheme, b.b_scale, b.b_zero_point, b.b_global_scale, bias, geometry.kernel_size, geometry.stride,  # type: ignore[arg-type]
        geometry.padding, geometry.dilation, geometry.groups, **arguments,  # type: ignore[arg-type]
    )  # fmt: skip


#: One, two and three axes; uneven strides, padding and dilation; groups of one channel, of several, and one group.
GEOMETRIES = (
    plain((2, 5, 6, 4), 5, 3),
    Geometry((1, 7, 5, 6), 9, (2, 3), (2, 1), (0, 1, 2, 2), (1, 2), 3),
    plain((2, 6, 5, 8), 8, 3, groups=8),
    Geometry((3, 11, 4), 6, (3,), (2,), (1, 0), (2,), 2),
    Geometry((1, 3, 4, 4, 3), 4, (2, 3, 1), (1, 2, 1), (1, 0, 1, 1, 0, 0), (1, 1, 1)),
    Geometry((1, 5, 4, 5), 10, (3, 2), (3, 1), (1, 1, 0, 1), (1, 1), 5),
    plain((2, 4, 4, 20), 7, 1, stride=2),
)


def random_call(
    geometry: Geometry,
    input_scheme: str | None,
    scheme: str,
    device: str = "cpu",
    seed: int = 0,
    bias: bool = False,
    out_dtype: torch.dtype = torch.float32,
    **more: object,
) -> Conv:
    """Gaussian operands, with weights and pixels of very different magnitude."""
    x = random_matrix(prod(geometry.x[:-1]), geometry.x[-1], device, seed).reshape(geometry.x)
    cols = geometry.x[-1] // geometry.groups
    weight = random_matrix(geometry.out, cols * prod(geometry.kernel_size), device, seed + 1000)
    shaped = weight.reshape(geometry.out, cols, *geometry.kernel_size)
    more["bias"] = random_matrix(1, geometry.out, device, seed=7)[0] if bias else None
    return make_call(x.to(out_dtype), shaped, geometry, input_scheme, scheme, out_dtype=out_dtype, **more)


#: Schemes of x: none, one scale for the tensor, one a patch, and finer ones.
_INPUTS = (None, "int8:tensor", "int8:row", "uint8:tensor:affine", "fp8_e4m3:tensor", "int4:row", "nvfp4")


def _samples(device: str) -> Iterator[Conv]:
    """Every scheme as a weight's and as an input's, and those of convolutions in every geometry."""
    texts = [s.name for s in schemes()]
    geometries, dtypes, inputs = cycle(GEOMETRIES), cycle(FLOATS), cycle(_INPUTS)
    for geometry in GEOMETRIES:
        for index, given in enumerate(_INPUTS):
            yield random_call(geometry, given, "int8:row", device, index, index % 2 == 0, next(dtypes))
    for index, scheme in enumerate(texts):
        dtype = next(dtypes)
        yield random_call(next(geometries), next(inputs), scheme, device, index, bool(index % 2), dtype)
        yield random_call(next(geometries), scheme, texts[index - 5], device, index, out_dtype=dtype)


def example(geometry: Geometry, input_scheme: str | None, scheme: str, static: bool, dtype: torch.dtype) -> Conv:
    """A layer on Gaussian ``x`` of ``dtype``, for benchmarks; ``static``: with a given scale."""
    cols = geometry.x[-1] // geometry.groups * prod(geometry.kernel_size)
    kind = scaling.scheme(scheme)
    codes, scale, zero = torch.ops.lowbit.quantize(large_matrix(geometry.out, cols), scheme)
    x = large_matrix(prod(geometry.x[:-1]), geometry.x[-1], dtype).reshape(geometry.x)
    given = torch.full((1, 1), 4 / 127) if static else None
    return Conv(
        x, codes, scheme, scale, zero if kind.affine else None, None, None, geometry.kernel_size, geometry.stride,
        geometry.padding, geometry.dilation, geometry.groups, input_scheme, dtype, given,
    )  # fmt: skip


#: Layers of ResNet-18 and EfficientNet-Lite0.
BENCHED: dict[str, Sequence[Geometry]] = {
    "3x3": (plain((8, 56, 56, 64), 64, 3), plain((8, 7, 7, 512), 512, 3)),
    "1x1": (plain((8, 28, 28, 192), 32, 1),),
    "depthwise": (plain((8, 56, 56, 144), 144, 3, groups=144), plain((8, 14, 14, 480), 480, 5, groups=480)),
}


def _workloads(rows: int, cols: int) -> Iterator[Workload]:
    """What networks have, whatever the size of other ops' matrices is."""
    for name, geometries in BENCHED.items():
        for geometry in geometries:
            size = "x".join(str(v) for v in geometry.x)
            for input_scheme, static in (("int8:tensor", True), ("int8:row", False), (None, False)):
                dtype = torch.float32
                arrow = "" if input_scheme is None else f" -> {input_scheme}{', given' if static else ''}"
                make = partial(example, geometry, input_scheme, "int8:row", static, dtype)
                yield Workload(f"{name} {size}", f"{dtype_name(dtype)}{arrow} x int8:row", make)


SAMPLES = {"conv": _samples}
WORKLOADS = {"conv": _workloads}
