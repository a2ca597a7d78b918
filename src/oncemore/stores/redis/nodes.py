"""One batcher for each node, so that a node that is slow or down delays only the callers who need it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..._runtime.batching import Lane
from .connection import Address
from .topology import Topology


class NodeBatchers:
    """The batchers of one kind of store call, made by *make* as nodes are found; *topology* tells the node of a key."""

    def __init__(self, topology: Topology, make: Callable[[], Lane[Any]]) -> None:
        self._topology = topology
        self._make = make
        self._batchers: dict[Address, Lane[Any]] = {}

    def for_key(self, key: str) -> Lane[Any]:
        address = self._topology.address(key)
        return self._batchers.get(address) or self._batchers.setdefault(address, self._make())

    async def drain(self) -> None:
        for batcher in tuple(self._batchers.values()):
            await batcher.drain()
