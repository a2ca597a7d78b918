"""A ledger in a file of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from oncemore.stores.sqlite import SqliteStore, connect


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "once.db"


@pytest.fixture
def url(path: Path) -> str:
    return f"sqlite:///{path}"


@pytest.fixture
def store(url: str) -> Iterator[SqliteStore]:
    store = connect(url)
    yield store
    store.close()


@pytest.fixture
def other(url: str) -> Iterator[SqliteStore]:
    """A second store on the same file, as another process would have it."""
    store = connect(url)
    yield store
    store.close()
