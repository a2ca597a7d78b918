"""The SQL of the PostgreSQL store: each statement by name, with its meaning.  It does not depend on a driver.

A statement is text with numbered parameters (`$1`) and a name that is a hash of the text, so a prepared name always
stands for the same text.  psycopg, asyncpg, SQLAlchemy and Django can all run it.  There are two forms:

    many  for a batch.  $1: the items as a JSON array of objects, in which *n* tells the answers apart;
          $2: seconds to add to the server's clock, 0 except in tests; $3: their outcomes or requests, as bytea[]
    here  for one operation, inside the transaction of its effect: a parameter for each column

ON CONFLICT and UPDATE lock the row first, and decide by the row as it then is, not by the statement's snapshot.
`now` is read once, before waiting for any lock.  So it may be a little late, which never takes a live lease away.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ..._ledger.store import Filter
from ..._ledger.transactions import Query, Rows, Statement

__all__ = ["Query", "Rows", "Statement", "Statements", "prepared"]

# The columns of a Record, in the order of its fields.
RECORD = """r.scope, r.key, r.name, r.fingerprint, r.state, r.token, r.holder, r.attempts,
    date_part('epoch', r.created_at), date_part('epoch', r.lease_until), date_part('epoch', clock.now),
    date_part('epoch', r.settled_at), date_part('epoch', r.expires_at), date_part('epoch', r.accessed_at),
    r.outcome, r.response_hash, r.note, r.request"""

ARCHIVED = """scope, key, token, name, fingerprint, state, holder, attempts, created_at, settled_at, expires_at,
    accessed_at, status, outcome, response_hash, note"""

CLOCK = "clock AS MATERIALIZED (SELECT clock_timestamp() + make_interval(secs => {shift}) AS now)"


def many(columns: str = "") -> str:
    """Return the FROM item for a batch: its *columns* and the time.  OFFSET 0 makes the planner read the clock once."""
    named = ", ".join(filter(None, ("n int, scope text, key text", columns)))
    return f"""(SELECT w.*, (SELECT clock_timestamp() + make_interval(secs => $2)) AS now
    FROM json_to_recordset($1::json) AS w ({named}) OFFSET 0) AS want"""


def here(columns: str) -> str:
    """Return the FROM item for one operation: its *columns* are parameters, and the time is added."""
    named = [column.split() for column in ("scope text", "key text", *columns.split(", "))]
    given = ", ".join(f"${n}::{type} AS {name}" for n, (name, type) in enumerate(named, 1))
    return f"""(SELECT 0 AS n, {given},
    clock_timestamp() + make_interval(secs => ${len(named) + 1}) AS now OFFSET 0) AS want"""


BYTES = "($3::bytea[])[want.n + 1]"  # the outcome or request of an item in a batch; NULL if $3 is NULL

# Whether the row may be claimed.  An expired row counts as absent, but an audited one must go to the archive first.  If
# this same claim has taken the row already (the answer was lost), it is not claimed again.
FREE = """({row}.expires_at <= {now} AND NOT {row}.audit OR {row}.fingerprint = {want}.fingerprint
    AND ({row}.state = 'released'
        OR {row}.state = 'running' AND {row}.lease_until <= {now} AND {row}.holder <> {want}.holder)) IS TRUE"""

# Claim each item that no record prevents, and return a row for each granted claim.
# An item that the snapshot shows as prevented is left out, because ON CONFLICT would lock the record, which is a write.
# The others are inserted in the given order.  All processes use the same order, so they never deadlock.
CLAIMED = "name text, fingerprint text, holder text, lease float8"
CLAIM = f"""
INSERT INTO {{records}} AS r
    (scope, key, name, fingerprint, state, token, holder, attempts, created_at, lease_until, request)
SELECT want.scope, want.key, want.name, want.fingerprint, 'running', nextval('{{tokens}}'), want.holder, 1,
    want.now, want.now + make_interval(secs => want.lease), {{request}}
FROM {{want}}
LEFT JOIN {{records}} seen ON seen.scope = want.scope AND seen.key = want.key
WHERE seen.token IS NULL OR {FREE.format(row="seen", now="want.now", want="want")}
ON CONFLICT (scope, key) DO UPDATE SET
    name = EXCLUDED.name, fingerprint = EXCLUDED.fingerprint, state = 'running',
    token = nextval('{{tokens}}'), -- drawn under the row's lock: greater than any that this row has had
    holder = EXCLUDED.holder,
    attempts = CASE WHEN r.expires_at <= EXCLUDED.created_at THEN 1 ELSE r.attempts + 1 END,
    created_at = CASE WHEN r.expires_at <= EXCLUDED.created_at THEN EXCLUDED.created_at ELSE r.created_at END,
    request = CASE WHEN r.expires_at <= EXCLUDED.created_at THEN EXCLUDED.request
        ELSE COALESCE(EXCLUDED.request, r.request) END,
    lease_until = EXCLUDED.lease_until, settled_at = NULL, expires_at = NULL, accessed_at = NULL,
    status = NULL, outcome = NULL, response_hash = '', note = '', audit = false, watched = false,
    lapsed = r.state = 'running'
WHERE {FREE.format(row="r", now="EXCLUDED.created_at", want="EXCLUDED")}
RETURNING r.holder, r.token, r.attempts, date_part('epoch', r.lease_until), r.lapsed"""

# Claim an operation inside its effect's transaction, if it has no record.  That is the usual case, so the statement
# does nothing else.  If another transaction has inserted the row, it waits for that one to end, for up to $8.  It sets
# lock_timeout for this wait, and restores the performer's in the same statement, which saves a round trip.
# $1 scope, $2 key, $3 name, $4 fingerprint, $5 holder, $6 lease, $7 shift, $8 milliseconds, $9 request
RESTORED = ", set_config('lock_timeout', current_setting('oncemore.lock_timeout'), true)"
CLAIM_HERE = f"""
INSERT INTO {{records}} (scope, key, name, fingerprint, state, token, holder, attempts, created_at, lease_until, request)
SELECT $1::text, $2::text, $3::text, $4::text, 'running', nextval('{{tokens}}'), $5::text, 1,
    here.now, here.now + make_interval(secs => $6), $9::bytea
FROM (SELECT clock_timestamp() + make_interval(secs => $7) AS now,
    set_config('oncemore.lock_timeout', current_setting('lock_timeout'), true) AS former,
    set_config('lock_timeout', $8, true) AS wait OFFSET 0) AS here
ON CONFLICT (scope, key) DO NOTHING
RETURNING token, date_part('epoch', lease_until){RESTORED}"""
RESTORE = f"SELECT 1{RESTORED}"  # for a transaction that goes on although a record prevented the claim

# Find each item's record, expired or not.  The first two columns are the item's number, and whether the latest claim
# took over a lapsed lease.
FIND = f"""
SELECT want.n, r.lapsed, {RECORD.replace("clock.now", "want.now")}
FROM {many()} JOIN {{records}} r ON r.scope = want.scope AND r.key = want.key"""

# Write an owner's change (renew, settle, release, hold) if the record is running and still has the owner's token.
CHANGED = (
    "token bigint, state text, lease float8, retention float8, status int, response_hash text, note text, audit boolean"
)
CHANGE = f"""
UPDATE {{records}} r SET
    state = want.state,
    lease_until = COALESCE(want.now + make_interval(secs => want.lease), r.lease_until),
    expires_at = want.now + make_interval(secs => want.retention),
    settled_at = CASE want.state WHEN 'settled' THEN want.now END,
    accessed_at = CASE want.state WHEN 'settled' THEN want.now END,
    request = CASE want.state WHEN 'settled' THEN NULL ELSE r.request END,
    status = want.status, outcome = {BYTES}, response_hash = COALESCE(want.response_hash, ''),
    note = COALESCE(want.note, r.note), audit = COALESCE(want.audit, false)
FROM {many(CHANGED)}
WHERE r.scope = want.scope AND r.key = want.key AND r.token = want.token AND r.state = 'running'
RETURNING want.n, r.watched, date_part('epoch', r.lease_until)"""

# Write the end of an operation that was claimed in this same transaction.  If there is no such row, division by zero
# aborts the pipeline before COMMIT.  If the row's xmin is another transaction, the performer has committed a part.
STILL_HERE = """
    WHERE r.scope = $1 AND r.key = $2 AND r.token = $3 AND r.state = 'running'
        AND r.xmin = pg_current_xact_id()::xid
    RETURNING 1
)
SELECT 1 / count(*) FROM moved"""
# $1 scope, $2 key, $3 token, $4 retention, $5 shift, $6 status, $7 outcome, $8 hash, $9 note, $10 audit
SETTLE_HERE = f"""
WITH moved AS (
    UPDATE {{records}} r SET state = 'settled', request = NULL,
        settled_at = statement_timestamp() + make_interval(secs => $5),
        accessed_at = statement_timestamp() + make_interval(secs => $5),
        expires_at = statement_timestamp() + make_interval(secs => $5) + make_interval(secs => $4),
        status = $6, outcome = $7, response_hash = $8, note = $9, audit = $10{STILL_HERE}"""
# $1 scope, $2 key, $3 token, $4 retention, $5 shift
RELEASE_HERE = f"""
WITH moved AS (
    UPDATE {{records}} r SET state = 'released',
        expires_at = statement_timestamp() + make_interval(secs => $5) + make_interval(secs => $4){STILL_HERE}"""

# Find one record, expired or not, with the clock.  $1 scope, $2 key, $3 shift
FIND_HERE = f"""
WITH {CLOCK.format(shift="$3")}
SELECT {RECORD} FROM {{records}} r CROSS JOIN clock WHERE r.scope = $1 AND r.key = $2"""

# Undo claims, because their callers are gone and nobody performs.  If a claim took over a lapsed lease, the outcome of
# the attempt before it stays unknown: the lease ends now.  A first attempt gets 1970 as its expiry, so it is absent
# even if the clock is set back.  A later one is released, and remembered for a day.
UNCLAIM = f"""
UPDATE {{records}} r SET
    state = CASE WHEN r.lapsed THEN 'running' ELSE 'released' END,
    lease_until = CASE WHEN r.lapsed THEN want.now ELSE r.lease_until END,
    expires_at = CASE WHEN r.lapsed THEN NULL WHEN r.attempts = 1 THEN 'epoch' ELSE want.now + interval '1 day' END
FROM {many("holder text")}
WHERE r.scope = want.scope AND r.key = want.key AND r.holder = want.holder AND r.state = 'running'
RETURNING want.n, r.watched"""

# Extend the life of each settled record that has the item's token.
TOUCH = f"""
UPDATE {{records}} r SET accessed_at = want.now, expires_at = want.now + make_interval(secs => want.retention)
FROM {many("token bigint, retention float8")}
WHERE r.scope = want.scope AND r.key = want.key AND r.token = want.token
    AND r.state = 'settled' AND (r.expires_at > want.now) IS TRUE -- IS TRUE: no plan may use the index on expires_at
RETURNING want.n"""

# Ask each running record's owner to send a message when the record changes.
WATCH = f"""
UPDATE {{records}} r SET watched = true FROM {many("token bigint")}
WHERE r.scope = want.scope AND r.key = want.key AND r.token = want.token AND r.state = 'running'
RETURNING want.n"""

# Move expired audited records to the archive, so that they can be claimed.
ARCHIVE = f"""
WITH gone AS (
    DELETE FROM {{records}} r USING {many()}
    WHERE r.scope = want.scope AND r.key = want.key AND r.expires_at <= want.now AND r.audit
    RETURNING r.*
)
INSERT INTO {{archive}} ({ARCHIVED}) SELECT {ARCHIVED} FROM gone ON CONFLICT DO NOTHING"""

# ARCHIVE for one record, inside an effect's transaction.  $1 scope, $2 key, $3 shift
ARCHIVE_HERE = f"""
WITH gone AS (
    DELETE FROM {{records}} r
    WHERE r.scope = $1 AND r.key = $2 AND r.expires_at <= clock_timestamp() + make_interval(secs => $3) AND r.audit
    RETURNING r.*
)
INSERT INTO {{archive}} ({ARCHIVED}) SELECT {ARCHIVED} FROM gone ON CONFLICT DO NOTHING"""

# Remove expired records, and archive the audited ones.  $1: shift, $2: the most to remove
# In a partitioned table, rows of several partitions may have the same ctid, so the partition is compared as well.
PURGE = f"""
WITH {CLOCK.format(shift="$1")}, old AS MATERIALIZED (
    SELECT tableoid AS part, ctid AS place FROM {{records}} WHERE expires_at <= (SELECT now FROM clock)
    ORDER BY expires_at LIMIT $2 FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM {{records}} WHERE ctid = ANY (ARRAY(SELECT place FROM old))
        AND (tableoid, ctid) IN (SELECT part, place FROM old)
    RETURNING *
), kept AS (
    INSERT INTO {{archive}} ({ARCHIVED}) SELECT {ARCHIVED} FROM gone WHERE audit ON CONFLICT DO NOTHING
)
SELECT count(*) FROM gone"""

# Resolve an unknown outcome, and return the record.  If the outcome is not unknown, return the record unchanged.
# $1 scope, $2 key, $3 shift, $4 state, $5 retention, $6 status, $7 outcome, $8 hash, $9 note, $10 holder
RESOLVE = f"""
WITH {CLOCK.format(shift="$3")}, r AS (
    UPDATE {{records}} r SET state = $4, token = nextval('{{tokens}}'), holder = $10, note = $9,
        expires_at = clock.now + make_interval(secs => $5),
        settled_at = CASE $4 WHEN 'settled' THEN clock.now END,
        accessed_at = CASE $4 WHEN 'settled' THEN clock.now END,
        request = CASE $4 WHEN 'settled' THEN NULL ELSE r.request END,
        status = $6, outcome = $7, response_hash = $8
    FROM clock WHERE r.scope = $1 AND r.key = $2
        AND (r.state = 'held' OR r.state = 'running' AND r.lease_until <= clock.now)
    RETURNING r.*
)
SELECT {RECORD} FROM r CROSS JOIN clock
UNION ALL
SELECT {RECORD} FROM {{records}} r CROSS JOIN clock
WHERE r.scope = $1 AND r.key = $2 AND NOT EXISTS (SELECT FROM r AS done)"""

# Delete a record unless it is running or expired.  Return whether it was deleted, its state, and whether it has expired
# or lapsed.
# $1 scope, $2 key, $3 shift
DELETE = f"""
WITH {CLOCK.format(shift="$3")}, gone AS (
    DELETE FROM {{records}} r USING clock WHERE r.scope = $1 AND r.key = $2
        AND NOT (r.state = 'running' AND r.lease_until > clock.now) AND (r.expires_at > clock.now) IS NOT FALSE
    RETURNING r.state
)
SELECT true, state, false FROM gone
UNION ALL
SELECT false, r.state, COALESCE(r.expires_at, r.lease_until) <= clock.now FROM {{records}} r CROSS JOIN clock
WHERE r.scope = $1 AND r.key = $2 AND NOT EXISTS (SELECT FROM gone)"""

# Count the records, in the order of the fields of Stats.  $1: shift
STATS = f"""
WITH {CLOCK.format(shift="$1")}
SELECT count(*) FILTER (WHERE state = 'running'), count(*) FILTER (WHERE state = 'settled'),
    count(*) FILTER (WHERE state = 'released'), count(*) FILTER (WHERE state = 'held'),
    count(*) FILTER (WHERE state = 'running' AND lease_until <= now),
    count(*) FILTER (WHERE expires_at <= now), (SELECT count(*) FROM {{archive}})
FROM {{records}} CROSS JOIN clock"""

# Tell the other processes which records have changed.  $1: the channel, $2: the message
# Transactions that send messages commit one after another, so waiting up to a second for their lock is normal.
NOTIFY = "SELECT pg_notify($1, $2), set_config('lock_timeout', '1s', true)"

# Behind a pooler: set how long the next statement of the same pipeline waits for a locked row.  $1: milliseconds
LOCK_WAIT = "SELECT set_config('lock_timeout', $1, true)"

# Find out whether the database has oncemore's tables, and the version of a feature's tables.  $1: the feature's name
KNOWN = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relname = '{prefix}features' AND n.nspname = btrim('{schema}', '"'))"""
VERSION = "SELECT version FROM {features} WHERE name = $1"

# With these settings, the server notices within a minute if this machine vanishes, and ends the session with its locks.
# By default, TCP takes two hours.
NETWORK = """('tcp_keepalives_idle', '30'), ('tcp_keepalives_interval', '10'), ('tcp_keepalives_count', '3'),
    ('tcp_user_timeout', '60000')"""

# Set up the session of the ledger's own connection.  $1: the server process that the client knows, $2: milliseconds
# that a transaction may be idle.  Behind a pooler the processes differ: then nothing is set and no row comes back,
# because other clients would get the settings, too.  A performer's transactions get no other limits.
CONFIGURE = f"""
SELECT set_config(ours.name, ours.value, false) FROM (VALUES
    {NETWORK}, ('idle_in_transaction_session_timeout', $2){{more}}
) AS ours (name, value) WHERE pg_backend_pid() = $1::int"""

# More settings for the ledger's own statements.  $3: milliseconds to wait for a lock, $4: milliseconds for a statement
LIMITS = """, ('lock_timeout', $3), ('statement_timeout', $4),
    -- if a crash lost a committed claim, the operation would be performed twice
    ('synchronous_commit', replace(current_setting('synchronous_commit'), 'off', 'on'))"""

# Statements for batches are planned once, perhaps while the table is nearly empty, and the plan is kept while it grows.
# So these settings rule out every plan that reads a whole table.  Only a bitmap look-up by key remains.
LOOK_UP = """, ('plan_cache_mode', 'force_generic_plan'),
    ('enable_seqscan', 'off'), ('enable_indexscan', 'off'), ('enable_indexonlyscan', 'off')"""


@lru_cache(maxsize=256)
def prepared(text: str) -> Statement:
    """Return a statement that is worth preparing.  Its name is a hash of its text."""
    return Statement(text, b"oncemore_" + hashlib.sha256(text.encode()).hexdigest()[:24].encode())


class Statements:
    """All statements of one ledger, with the names of its tables."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names
        # In batches
        self.claim = self._prepared(CLAIM, want=many(CLAIMED), request=BYTES)
        self.change = self._prepared(CHANGE)
        self.find = self._prepared(FIND)
        self.touch = self._prepared(TOUCH)
        self.watch = self._prepared(WATCH)
        self.unclaim = self._plain(UNCLAIM)
        self.archive = self._plain(ARCHIVE)
        # Inside the transaction of an effect
        self.claim_here = self._prepared(CLAIM_HERE)
        self.take_here = self._prepared(CLAIM + RESTORED, want=here(CLAIMED), request="$8::bytea")
        self.restore = self._prepared(RESTORE)
        self.settle_here = self._prepared(SETTLE_HERE)
        self.release_here = self._prepared(RELEASE_HERE)
        self.find_here = self._prepared(FIND_HERE)
        self.archive_here = self._plain(ARCHIVE_HERE)
        # For operators, and for the session
        self.purge = self._plain(PURGE)
        self.resolve = self._plain(RESOLVE)
        self.delete = self._plain(DELETE)
        self.stats = self._plain(STATS)
        self.notify = self._plain(NOTIFY)
        self.lock_wait = self._prepared(LOCK_WAIT)
        self.known = self._plain(KNOWN)
        self.version = self._plain(VERSION)
        self.configure = Statement(CONFIGURE.format(more=LIMITS + LOOK_UP))
        self.configure_admin = Statement(CONFIGURE.format(more=LIMITS))
        self.configure_transactions = Statement(CONFIGURE.format(more=""))

    def _plain(self, template: str) -> Statement:
        return Statement(template.format(**self.names))

    def _prepared(self, template: str, **more: str) -> Statement:
        return prepared(template.format(**self.names, **more))

    def list(
        self, where: Filter, after: Sequence[str] | None, *, limit: int, shift: float
    ) -> tuple[Statement, list[Any]]:
        """Return the statement that lists matching records by scope and key, beyond *after*, and its parameters."""
        values: list[Any] = [shift]

        def given(value: Any) -> str:
            values.append(value)
            return f"${len(values)}"

        tests = ["(r.expires_at > clock.now) IS NOT FALSE"]
        for name in ("scope", "key", "name", "state"):
            value = getattr(where, name)
            if value is not None:
                tests.append(f"r.{name} = {given(value)}")
        if where.state in ("running", "held") or where.lapsed:
            tests.append("r.expires_at IS NULL")  # true only for these, and indexed
        if where.state == "released":
            tests.append("r.state = 'released'")  # the partial index needs the literal, not a parameter
        if where.lapsed is not None:
            tests.append(f"(r.state = 'running' AND r.lease_until <= clock.now) = {given(where.lapsed)}::boolean")
        if after is not None:
            tests.append(f"(r.scope, r.key) > ({given(after[0])}, {given(after[1])})")
        text = f"""WITH {CLOCK.format(shift="$1")} SELECT {RECORD} FROM {self.names["records"]} r CROSS JOIN clock
            WHERE {" AND ".join(tests)} ORDER BY r.scope, r.key LIMIT {given(limit)}"""
        return Statement(text), values
