"""Where a ledger is, in a schema of the test's own, and a way past it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest


@pytest.fixture
def url(postgres_url: str, postgres_schema: str) -> str:
    """A URL with a schema of the test's own, which is not there yet."""
    return f"{postgres_url}?schema={postgres_schema}"


@pytest.fixture
def server(postgres_url: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection past the store."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        yield connection
