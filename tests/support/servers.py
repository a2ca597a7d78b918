"""PostgreSQL and Valkey servers for tests, from PyPI wheels, on free ports; they end with the test run.

    with PostgresServer() as postgres, ValkeyServer(maxmemory="64mb") as valkey:
        ...  # postgres.url, valkey.url

With *fsync*, the default, a crashed server keeps all acknowledged writes.  Without it, tests are faster, but PostgreSQL
may lose data if the machine fails, and Valkey keeps none.  Further keywords are the server's own settings.
"""

from examples.process import Server

from .postgres import PgBouncer, PostgresServer
from .valkey import ValkeyCluster, ValkeySentinel, ValkeyServer

__all__ = ["PgBouncer", "PostgresServer", "Server", "ValkeyCluster", "ValkeySentinel", "ValkeyServer"]
