"""A store around another one, for those that change a verb or two and leave the rest as it is."""

from __future__ import annotations

from typing import Any

from .store import Store


class Around:
    """What it does not do itself, the *inner* store does."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    # Not left to __getattr__, which hears of no assignment: time would pass out here alone.

    @property
    def shift(self) -> float:
        return self.inner.shift

    @shift.setter
    def shift(self, seconds: float) -> None:
        self.inner.shift = seconds
