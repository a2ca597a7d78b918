"""A ledger in PostgreSQL (13 or later), for many processes on many machines; it needs `pip install 'oncemore[postgres]'`.

    postgresql://user:password@host/database?schema=payments&timeout=3s

oncemore reads these options; all others (`sslmode`, `target_session_attrs`, `options`, several hosts, ...) are libpq's:

    schema    the schema of the tables (public); it is created if it is missing
    prefix    the beginning of the tables' names (oncemore_)
    create    false: never create or change tables; run the script that `oncemore.stores.schema(url)` returns (true)
    timeout   how long a verb may take, with all its attempts to reach the server (5s)
    poll      how long a waiting caller relies on being woken before it looks by itself (1s)
    pool      how many connections operations with effect = "transaction" may use at a time, on the threads of a
              process and on each event loop (16)
    idle_in_transaction
              how long an operation with effect = "transaction" may send no statement before the server ends its
              session; 0 for any time (5m).  If a machine vanishes, its records are locked for no longer than this
    listen    false: do not listen for messages of other processes, and look four times a second instead (true)

A process opens up to five connections, each when it is first needed: two for claims and writes, two for operators'
queries, and one for messages.  Each event loop has its own, except for messages.  Behind a pooler in transaction mode,
the store prepares nothing, listens for nothing and sets nothing for the session; so if `synchronous_commit` is off
there, it stays off.
"""

from .store import OPTIONS, PostgresStore, connect, schema, url_of

__all__ = ["OPTIONS", "PostgresStore", "connect", "schema", "url_of"]
