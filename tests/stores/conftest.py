"""A ledger wherever the test's `url` is, which each folder has its own of, and a second one on the same records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from oncemore.stores import connect


@pytest.fixture
def store(url: str) -> Iterator[Any]:
    store: Any = connect(url)
    yield store
    store.close()


@pytest.fixture
def other(url: str) -> Iterator[Any]:
    """A second store on the same records, as another process would have it."""
    store: Any = connect(url)
    yield store
    store.close()
