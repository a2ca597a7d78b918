"""Real PostgreSQL and Valkey servers for tests, from PyPI wheels: private, on free ports, gone when the test run is.

    with PostgresServer() as postgres, ValkeyServer(maxmemory="64mb") as valkey:
        ...  # postgres.url, valkey.url

With *fsync*, the default, a server that crashes keeps what it has acknowledged.  Without, it is faster: PostgreSQL may
lose data when the machine fails, and Valkey keeps none at all.  Further keywords are the server's own settings.
"""

from examples.process import Server

from .postgres import PgBouncer, PostgresServer
from .valkey import ValkeyCluster, ValkeySentinel, ValkeyServer

__all__ = ["PgBouncer", "PostgresServer", "Server", "ValkeyCluster", "ValkeySentinel", "ValkeyServer"]
