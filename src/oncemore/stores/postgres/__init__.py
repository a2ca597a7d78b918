"""A ledger in PostgreSQL (13 or later), for many processes on many machines; it needs `pip install 'oncemore[postgres]'`.

    postgresql://user:password@host/database?schema=payments&timeout=3s

These options are ours; all others (`sslmode`, `target_session_attrs`, `options`, several hosts, ...) are libpq's:

    schema    where the tables are (public); it is created if need be
    prefix    what the tables' names begin with (oncemore_)
    create    false: never create or change tables; run the script that `oncemore.stores.schema(url)` returns (true)
    timeout   how long a verb may take, with all its attempts to reach the server (5s)
    poll      how often one who waits looks for itself, besides being told (1s)
    pool      how many connections may be lent at a time to operations with effect = "transaction" (16)
    listen    false: hear no messages of other processes, and look four times a second instead (true)

A process holds up to four connections, each opened when it is first needed: two for claims and what owners write, one
for operators' questions, and one for messages.  An event loop has the first three to itself.  Behind a pooler in
transaction mode nothing is prepared, set for the session or listened for; so where `synchronous_commit` is off, it stays
off.
"""

from .store import OPTIONS, PostgresStore, connect, enlist, schema, url_of

__all__ = ["OPTIONS", "PostgresStore", "connect", "enlist", "schema", "url_of"]
