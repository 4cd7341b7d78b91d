"""Buckets of parameters, which ``zero1`` gathers and ``zero2-replicated`` reduces."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowbit.distributed.zero import in_buckets

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
parameters = st.lists(st.builds(torch.empty, st.integers(0, 9), dtype=st.sampled_from(DTYPES)), max_size=20)


def greedy(parameters: list[Tensor], limit: int) -> list[list[int]]:
    """Each parameter joins the newest bucket of its dtype, or begins a bucket."""
    buckets: list[list[int]] = []
    for number, parameter in enumerate(parameters):
        same = [bucket for bucket in buckets if parameters[bucket[0]].dtype == parameter.dtype]
        if same and sum(parameters[n].nbytes for n in same[-1]) + parameter.nbytes <= limit:
            same[-1].append(number)
        else:
            buckets.append([number])
    return buckets


@given(parameters, st.integers(1, 60))
def test_buckets_keep_the_order_of_parameters_and_the_limit(parameters: list[Tensor], limit: int):
    number = {id(parameter): index for index, parameter in enumerate(parameters)}
    buckets = in_buckets(iter(parameters), limit)
    assert [[number[id(parameter)] for parameter in bucket] for bucket in buckets] == greedy(parameters, limit)
    assert all(len(bucket) == 1 or sum(p.nbytes for p in bucket) <= limit for bucket in buckets)


def test_devices_have_buckets_of_their_own():
    cpu, meta = [torch.empty(2) for _ in range(2)], [torch.empty(2, device="meta") for _ in range(2)]
    found = in_buckets([cpu[0], meta[0], cpu[1], meta[1]], 1000)
    assert [[p.device.type for p in bucket] for bucket in found] == [["cpu"] * 2, ["meta"] * 2]
