"""Fixtures: a ledger's file and URL for one test."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "once.db"


@pytest.fixture
def url(path: Path) -> str:
    return f"sqlite:///{path}"
