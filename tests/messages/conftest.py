"""Fixtures: the shops of the transaction tests, on each driver, and the URL of a test's own PostgreSQL schema."""

import pytest

from tests.transactions.conftest import on_each_kind, shop, shops_url

__all__ = ["on_each_kind", "own_schema", "shop", "shops_url"]


@pytest.fixture
def own_schema(postgres_url: str, postgres_schema: str) -> str:
    """Return the URL of a ledger in a schema of the test's own."""
    return f"{postgres_url}{'&' if '?' in postgres_url else '?'}schema={postgres_schema}"
