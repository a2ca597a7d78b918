"""Fixtures of the client tests: each library in turn, and the places of durable keyrings."""

from __future__ import annotations

from pathlib import Path

import pytest

from .clients import CLIENTS


@pytest.fixture(params=list(CLIENTS))
def library(request: pytest.FixtureRequest) -> type:
    """The client of one library after the other."""
    return CLIENTS[request.param]  # type: ignore[no-any-return]


@pytest.fixture
def postgres_place(postgres_url: str, postgres_schema: str) -> str:
    """A ledger for this test alone, in PostgreSQL."""
    return f"{postgres_url}?schema={postgres_schema}"


@pytest.fixture
def valkey_place(valkey_url: str, redis_prefix: str) -> str:
    """A ledger for this test alone, in Valkey."""
    return f"{valkey_url}?prefix={redis_prefix}"


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.server) for name in ("postgres", "valkey")])
def ledger(request: pytest.FixtureRequest) -> str:
    """The URL of one real ledger after the other."""
    return request.getfixturevalue(f"{request.param}_place")  # type: ignore[no-any-return]


@pytest.fixture(params=["file", *(pytest.param(name, marks=pytest.mark.server) for name in ("postgres", "valkey"))])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of one durable keyring after the other: a file, and the real ledgers."""
    if request.param == "file":
        return f"sqlite:///{tmp_path}/keys.db"
    return request.getfixturevalue(f"{request.param}_place")  # type: ignore[no-any-return]
