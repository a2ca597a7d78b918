"""The database of the shops, whose processes these tests kill and fork."""

from __future__ import annotations

from tests.transactions.conftest import shops_url

__all__ = ["shops_url"]  # a fixture
