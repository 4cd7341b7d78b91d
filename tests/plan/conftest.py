"""Plans of these tests do not depend on how busy the machine is."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def times(steady_times):
    """Of every test here."""
