"""Warnings point at the line outside of the package that led to them."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit import user_warnings


class Aside(nn.Sequential):
    """No batch reaches the second layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[0](x)


def test_a_warning_of_the_caller_itself():
    with pytest.warns(UserWarning, match="of this file") as caught:
        user_warnings.warn("of this file")
    assert caught[0].filename == __file__


@pytest.mark.parametrize("blocks", [False, True], ids=["whole", "blocks"])
def test_warnings_of_calibrate_are_of_its_callers_line(blocks):
    layers = Aside(nn.Linear(8, 8), nn.Linear(8, 8))
    model = nn.Sequential(layers, Aside(nn.Linear(8, 8), nn.Linear(8, 8))) if blocks else layers
    calls = {
        "calibrate": lambda: lb.calibrate(model, "int4-weight-only:group8", [torch.randn(16, 8)], "gptq"),
        "sensitivity": lambda: lb.sensitivity(model, ["int8"], [torch.randn(16, 8)]),
    }
    for name, call in calls.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        ours = [row for row in caught if str(row.message).startswith(name)]
        assert ours and {row.filename for row in ours} == {__file__}, name
