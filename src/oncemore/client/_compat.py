"""Private parts of HTTP libraries that the client uses, with the versions in which they were found.

`tests/client/test_compat.py` fails by name if an upgrade moves one of them.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any


def wrap_network_backend(transport: Any, wrap: Callable[[Any], Any]) -> None:
    """Make an httpx transport open its sockets through `wrap(backend)`.  A transport without a pool is not changed.

    httpx 0.27 and 0.28 keep the pool in `_pool`, httpcore 1.0 keeps the backend in `_network_backend`.  httpcore's pools take
    a backend as a public argument, but httpx does not pass one on.
    """
    pool = getattr(transport, "_pool", None)
    backend = getattr(pool, "_network_backend", None)
    if backend is not None:
        pool._network_backend = wrap(backend)  # type: ignore[union-attr]


def base_url(session: Any) -> object:
    """Return the base URL of an aiohttp session, or None if it has none.  aiohttp 3.14 keeps it in `_base_url`."""
    return session._base_url


class ConnectHook:
    """Mixin for urllib3's connections: `open_socket(connect)` runs in place of the name lookup and the TCP connect.

    urllib3 2.x does both, without proxy tunnel and TLS, in `_new_conn`.
    """

    def _new_conn(self) -> socket.socket:
        return self.open_socket(super()._new_conn)  # type: ignore[misc]

    def open_socket(self, connect: Callable[[], socket.socket]) -> socket.socket:
        return connect()
