"""Where tensors are that processes exchange."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lowbit.dist_utils import exchange_device


@pytest.mark.parametrize(
    ("backend", "device"),
    [("gloo", "cpu"), ("nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cpu"), ("mpi", "cpu")],
)
def test_values_of_the_host_are_exchanged_where_the_group_can(monkeypatch, backend, device):
    config = str(dist.BackendConfig(dist.Backend(backend)))
    monkeypatch.setattr(dist, "get_backend_config", lambda: config)
    assert exchange_device() == torch.device(device)
