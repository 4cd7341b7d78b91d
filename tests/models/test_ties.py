"""What of a model is shared: parameters, storages, modules in several places."""

from __future__ import annotations

import torch
from torch import nn

from lowbit.models.ties import holders, model_bytes, paths, storage, storage_key, tensor_bytes


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10, bias=False))
    model[2].weight = model[0].weight
    model.append(model[1])
    return model


def test_holders_of_each_parameter_in_the_order_of_the_model():
    model = tied()
    found = holders(model)
    assert [holder.path for holder in found[id(model[0].weight)]] == ["0", "2"]
    assert [holder.path for holder in found[id(model[1].bias)]] == ["1"], "a module in two places is one holder"
    assert all(holder.module is model.get_submodule(holder.path) for several in found.values() for holder in several)


def test_paths_of_modules_in_several_places():
    model = tied()
    found = paths(model)
    assert found[id(model[1])] == ["1", "3"]
    assert found[id(model[0])] == ["0"]
    assert found[id(model)] == [""]


def test_views_share_a_storage_and_have_places_of_their_own():
    for device in ("cpu", "meta"):
        t = torch.empty(4, 6, device=device)
        views = [t, t.t(), t[:2], t[2:], t.view(torch.int32)]
        assert len({storage(view) for view in views}) == 1
        assert len({storage_key(view) for view in views}) == len(views)
        assert storage_key(nn.Parameter(t)) == storage_key(t.detach()) == storage_key(t)
        assert storage(t) != storage(torch.empty(4, 6, device=device))


def test_bytes_count_shared_storage_once():
    model = tied()
    assert model_bytes(model) == 4 * (10 * 4 + 4 * 4 + 4)
    t = torch.empty(4, 6)
    assert tensor_bytes([t, t[:2], t.t()]) == 4 * 24
    assert tensor_bytes(nn.LazyLinear(3).parameters()) == 0
