"""Fixtures: a ledger's URL with its own schema, and a connection that bypasses the store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest


@pytest.fixture
def url(postgres_url: str, postgres_schema: str) -> str:
    """A URL with a schema for this test, which does not exist yet."""
    return f"{postgres_url}?schema={postgres_schema}"


@pytest.fixture
def server(postgres_url: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection that bypasses the store."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        yield connection
