"""What the client tests share: one parameter for the library, and budgets that no other test has spent."""

from __future__ import annotations

import pytest

from .clients import CLIENTS


@pytest.fixture(params=list(CLIENTS))
def library(request: pytest.FixtureRequest) -> type:
    """The client of one library after the other."""
    return CLIENTS[request.param]  # type: ignore[no-any-return]
