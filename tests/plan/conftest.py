"""Plans of these tests do not depend on how busy the machine is."""

from __future__ import annotations

from importlib import import_module

import pytest

from lowbit.memory.cost import Rates
from lowbit.memory.timing import Timings


@pytest.fixture(autouse=True, scope="module")
def steady_times():
    """Ops take what their arithmetic and traffic take at fixed rates; none is run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Timings, "seconds", lambda self, call: None)
        patch.setattr(import_module("lowbit.memory.estimate"), "rates", lambda device: Rates(5e10, 8e9))
        yield
