"""PostgreSQL decides, Redis remembers: a ledger in PostgreSQL that also copies its settled outcomes to Redis.

    redis+postgresql://user@host/db?redis=redis%3A%2F%2Fhost%3A6379%2F0

Everything before `redis=` is the URL of the PostgreSQL ledger, with all of its options; the value of `redis=` is the
URL of the Redis server, percent-encoded.  Needs `pip install 'oncemore[postgres,redis]'`.  Other options of ours:

    budget=5ms     how long a look into Redis may take before the request goes on with PostgreSQL
    cap=1h         how long a copy is kept at most, even if the outcome is kept for longer
    largest=65536  outcomes of more bytes than this are not copied

Every claim, settle and release goes to PostgreSQL.  A claim looks into Redis first: if it finds a copy of the settled
outcome, the request is answered without PostgreSQL.  Copies are safe because settled outcomes never change:

- A copy is written after the commit, never before.  That there is *no* record is never remembered.
- The name of a copy has the identity and the timeline of the PostgreSQL server.  A server that was promoted has another
  timeline, so the copies of outcomes that a failover has lost are not found any more.
- Copies are used only while this process's own connection to the primary is open and answers.
- A copy that is not whole, of another version, of another operation, for another fingerprint or past its retention is
  not used.
- A deleted or resolved record has its copy replaced by a mark, before the change and after it, and no process can write
  a copy while the mark is there.
"""

from .store import OPTIONS, TieredStore, connect, schema

__all__ = ["OPTIONS", "TieredStore", "connect", "schema"]
