"""What kernels are said to allocate for themselves, beside what torch's allocator gave them: on CUDA that of an H200.

The allocator rounds up to 512 bytes, and hands out up to 1 MiB more than was asked for where it cannot split a block.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import lowbit as lb
from lowbit.memory.scratch import scratch_bytes

BF16, FP32 = torch.bfloat16, torch.float32
UNSPLIT = 1 << 20

#: Rows and columns of a sum over rows, and bytes.
SUMS = (
    (1024, 1536, 12583424), (1040, 768, 6685184), (1024, 384, 3670528), (1040, 192, 1671680), (1000, 192, 0),
)  # fmt: skip

#: Input, weight, stride, padding, dtype, and bytes.
CONVOLUTIONS = (
    ((16, 512, 2, 2), (512, 512, 3, 3), 1, 1, FP32, 9699840),
    ((16, 256, 4, 4), (512, 256, 3, 3), 2, 1, FP32, 5636096),
    ((16, 256, 3, 3), (256, 256, 3, 3), 1, 1, FP32, 2703872),
    ((16, 512, 2, 2), (512, 512, 3, 3), 1, 1, BF16, 4850176),
    ((16, 256, 4, 4), (512, 256, 3, 3), 2, 1, BF16, 2556416),
    ((16, 32, 24, 24), (64, 32, 1, 1), 2, 0, BF16, 885248),
)

#: Query, heads of keys, dtype, and bytes.
ATTENTIONS = (
    ((4, 4, 256, 64), 4, 1065472), ((8, 12, 128, 32), 12, 1622528), ((2, 6, 256, 64), 6, 799232),
    ((2, 9, 256, 64), 3, 2473984),
)  # fmt: skip


@pytest.fixture
def fake():
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield lambda shape, dtype: torch.empty(shape, dtype=dtype, device="cuda")


def assert_close(found: int, measured: int) -> None:
    assert found - 512 <= measured <= found + UNSPLIT


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("rows", "cols", "measured"), SUMS)
def test_sums_over_rows_keep_partial_sums(fake, rows, cols, measured, dtype):
    x = fake((rows, cols), dtype)
    assert_close(scratch_bytes("aten.sum.dim_IntList", (x, [0], True), fake((1, cols), dtype)), measured)


def test_sums_over_columns_keep_none(fake):
    x = fake((1024, 4096), FP32)
    assert scratch_bytes("aten.sum.dim_IntList", (x, [-1]), fake((1024,), FP32)) == 0


@pytest.mark.parametrize(("x", "weight", "stride", "padding", "dtype", "measured"), CONVOLUTIONS)
def test_convolutions_copy_between_layouts(fake, x, weight, stride, padding, dtype, measured):
    x, weight = fake(x, dtype), fake(weight, dtype)
    out = torch.nn.functional.conv2d(x, weight, None, stride, padding)
    assert_close(scratch_bytes("aten.convolution.default", (x, weight, None, [stride, stride]), out), measured)


@pytest.mark.parametrize(("query", "heads", "measured"), ATTENTIONS)
def test_the_backward_of_attention_sums_in_fp32(fake, query, heads, measured):
    q, k = fake(query, BF16), fake((query[0], heads, *query[2:]), BF16)
    name = "aten._scaled_dot_product_cudnn_attention_backward.default"
    assert_close(scratch_bytes(name, (q, q, k, k), ()), measured)


def test_on_a_cpu_others_are_known():
    x, weight = torch.empty(1, 4, 8, 8), torch.empty(4, 4, 3, 3)
    out = torch.nn.functional.conv2d(x, weight)
    sizes = [4 * t.numel() for t in (x, weight, out)]
    assert scratch_bytes("aten.convolution.default", (x, weight, None, [1, 1]), out) == max(
        sizes[0] + sizes[1], sizes[2]
    )


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_masks_of_softmax_on_the_cpu(dtype):
    x = torch.randn(2, 64, 200, dtype=dtype)
    measured = lb.memory.allocated_peak(lambda: torch.ops.aten._safe_softmax(x, -1), "cpu") - x.nbytes
    assert measured - 1024 <= scratch_bytes("aten._safe_softmax.default", (x, -1), x) <= measured
