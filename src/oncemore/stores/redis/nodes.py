"""A batcher for each node of a cluster, made as needed, so that a slow node delays only its own calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from ..._runtime.batching import Batcher
from .connection import Address


class NodeBatchers(Batcher[Any]):
    """Behaves as one batcher; *make* makes that of a node, and *place* finds the node of a key."""

    def __init__(self, make: Callable[[], Batcher[Any]], place: Callable[[str], Address]) -> None:
        first = make()
        super().__init__(first.run_batch, limit=first.limit, undo=first.undo)
        self._make = make
        self._place = place
        self._nodes: dict[Address, Batcher[Any]] = {}

    def _node(self, item: Any) -> Batcher[Any]:
        address = self._place(item.key)
        return self._nodes.get(address) or self._nodes.setdefault(address, self._make())

    def submit(self, item: Any) -> Any:
        return self._node(item).submit(item)

    def asubmit(self, item: Any) -> Awaitable[Any]:
        return self._node(item).asubmit(item)

    async def drain(self) -> None:
        for batcher in tuple(self._nodes.values()):
            await batcher.drain()
