"""A lane for each node of a cluster, made as needed: a node that is slow holds up nobody who asks another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ..._runtime.batching import Lane
from .connection import Address


class NodeLanes(Lane[Any]):
    """As one lane, to those who ask; *make* makes that of a node, and *place* tells whose a key is."""

    def __init__(self, make: Callable[[], Lane[Any]], place: Callable[[str], Address]) -> None:
        first = make()
        super().__init__(first.fly, most=first.most, abandoned=first.abandoned)
        self._make = make
        self._place = place
        self._lanes: dict[Address, Lane[Any]] = {}

    def _lane(self, item: Any) -> Lane[Any]:
        address = self._place(item.key)
        return self._lanes.get(address) or self._lanes.setdefault(address, self._make())

    def submit(self, item: Any) -> Any:
        return self._lane(item).submit(item)

    def enqueue(self, item: Any) -> asyncio.Future[Any]:
        return self._lane(item).enqueue(item)

    def withdraw(self, future: asyncio.Future[Any]) -> None:
        for lane in tuple(self._lanes.values()):
            lane.withdraw(future)

    async def drain(self) -> None:
        for lane in tuple(self._lanes.values()):
            await lane.drain()
