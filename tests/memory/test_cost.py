"""What ops are said to cost."""

from __future__ import annotations

import pytest
import torch

from lowbit.memory.cost import work

ATTENTION = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention")


@pytest.mark.parametrize("name", ATTENTION)
def test_grouped_queries_cost_what_as_many_heads_of_keys_do(name):
    """CUDA kernels take fewer heads of keys and values; torch's own count of operations refuses them."""
    batch, heads, length, width = 2, 6, 128, 64
    op = getattr(torch.ops.aten, name).default
    query = torch.empty(batch, heads, length, width, device="meta")
    more = (None, False) if "efficient" in name else ()
    flops = {}
    for few in (heads, 2):
        key = torch.empty(batch, few, length, width, device="meta")
        flops[few] = work(op, (query, key, key, *more), {}, (torch.empty_like(query),)).flops
    assert flops[2] == flops[heads] == 4 * batch * heads * length * length * width
