"""The statements of the outbox and its relay: each by name, with its meaning, for PostgreSQL and SQLite."""

from __future__ import annotations

from .._ledger.tables import Sql

# Add one message.  $2 id, $3 source, $4 type, $5 subject, $6 attributes, $7 data
ADD = Sql(
    "INSERT INTO {p}outbox (id, source, type, subject, attributes, data, created_at, due_at)"
    " VALUES ($2, $3, $4, $5, $6, $7, {now}, {now})"
)
# The same with a number that was reserved before, $8.
ADD_NUMBERED = Sql(
    "INSERT INTO {p}outbox (id, source, type, subject, attributes, data, seq, created_at, due_at)"
    " VALUES ($2, $3, $4, $5, $6, $7, $8, {now}, {now})"
)
RESERVE = Sql("SELECT nextval(pg_get_serial_sequence('{p}outbox', 'seq')) FROM generate_series(1, $1)")
# The same for later: $8 seconds from now, or $9 seconds since 1970
ADD_LATER = Sql(
    postgres="INSERT INTO {p}outbox (id, source, type, subject, attributes, data, created_at, due_at)"
    " VALUES ($2, $3, $4, $5, $6, $7, {now}, coalesce(to_timestamp($9), {now} + make_interval(secs => $8)))",
    sqlite="INSERT INTO {p}outbox (id, source, type, subject, attributes, data, created_at, due_at)"
    " VALUES (?2, ?3, ?4, ?5, ?6, ?7, {now}, coalesce(?9, {now} + ?8))",
)

# A message as operators see it.
COLUMNS = Sql(
    postgres="seq, id, source, type, subject, attributes, data, state, attempts, error,"
    " date_part('epoch', created_at), date_part('epoch', due_at), date_part('epoch', ended_at)",
    sqlite="seq, id, source, type, subject, attributes, data, state, attempts, error, created_at, due_at, ended_at",
)
# $1 source, $2 state, $3 seq of the last one on the page before, $4 pattern of the type or NULL, $5 subject or NULL, $6 most
LIST = Sql(
    postgres=f"SELECT {COLUMNS.postgres} FROM {{p}}outbox WHERE source = $1 AND state = $2 AND seq > $3"
    " AND ($4::text IS NULL OR type LIKE $4) AND ($5::text IS NULL OR subject = $5) ORDER BY seq LIMIT $6",
    sqlite=f"SELECT {COLUMNS.sqlite} FROM {{p}}outbox WHERE source = ?1 AND state = ?2 AND seq > ?3"
    " AND (?4 IS NULL OR type GLOB ?4) AND (?5 IS NULL OR subject = ?5) ORDER BY seq LIMIT ?6",
)

# Whether the transactions that began before that of a row with a subject have ended; until then, an earlier row may still be
# committed.  A row whose number is not assigned yet came with a dump of another server, and none of its transactions is open.
MAY_GO = "(xid < pg_snapshot_xmin(pg_current_snapshot()) OR xid >= pg_snapshot_xmax(pg_current_snapshot()))"

# How many rows have waited for such a transaction.  $2 source, $3 seconds after which a wait counts
WAITING = Sql(
    "SELECT count(*) FROM {p}outbox WHERE source = $2 AND state = 'pending' AND subject IS NOT NULL"
    f" AND NOT {MAY_GO} AND due_at <= {{now}} - make_interval(secs => $3)",
    "",
)

# In the order of the fields of OutboxStats.  $2 source, $3 seconds after which a wait for a transaction counts
STATS = Sql(
    postgres=f"""SELECT
    (SELECT count(*) FROM {{p}}outbox WHERE source = $2 AND state = 'pending'),
    coalesce((SELECT date_part('epoch', {{now}} - min(due_at)) FROM {{p}}outbox
        WHERE source = $2 AND state = 'pending' AND due_at <= {{now}}), 0)::float8,
    (SELECT count(*) FROM {{p}}outbox WHERE source = $2 AND state = 'dead'),
    (SELECT count(*) FROM {{p}}outbox WHERE source = $2 AND state = 'sent'),
    ({WAITING.postgres})""",
    sqlite="""SELECT
    (SELECT count(*) FROM {p}outbox WHERE source = ?2 AND state = 'pending'),
    coalesce((SELECT {now} - min(due_at) FROM {p}outbox
        WHERE source = ?2 AND state = 'pending' AND due_at <= {now}), 0.0),
    (SELECT count(*) FROM {p}outbox WHERE source = ?2 AND state = 'dead'),
    (SELECT count(*) FROM {p}outbox WHERE source = ?2 AND state = 'sent'),
    CAST(0 * ?3 AS INTEGER)""",
)

SOURCES = Sql("SELECT DISTINCT source FROM {p}outbox ORDER BY source")

# Send a dead letter again, in its old place among those with its subject.  $2 source, $3 id
REQUEUE = Sql(
    "UPDATE {p}outbox SET state = 'pending', attempts = 0, due_at = {now}, token = NULL, lease_until = NULL,"
    " ended_at = NULL WHERE source = $2 AND id = $3 AND state = 'dead'"
)
# How many dead letters have this id.  $1 source, $2 id
COUNT_DEAD = Sql("SELECT count(*) FROM {p}outbox WHERE source = $1 AND id = $2 AND state = 'dead'")

# Send what was sent since $3 (seconds since 1970) again.  $2 source, $4 pattern of the type or NULL
REPLAY = Sql(
    postgres="UPDATE {p}outbox SET state = 'pending', attempts = 0, due_at = {now}, token = NULL, lease_until = NULL,"
    " ended_at = NULL WHERE source = $2 AND state = 'sent' AND ended_at >= to_timestamp($3)"
    " AND ($4::text IS NULL OR type LIKE $4)",
    sqlite="UPDATE {p}outbox SET state = 'pending', attempts = 0, due_at = {now}, token = NULL, lease_until = NULL,"
    " ended_at = NULL WHERE source = ?2 AND state = 'sent' AND ended_at >= ?3 AND (?4 IS NULL OR type GLOB ?4)",
)
COUNT_REPLAY = Sql(
    postgres="SELECT count(*) FROM {p}outbox WHERE source = $1 AND state = 'sent' AND ended_at >= to_timestamp($2)"
    " AND ($3::text IS NULL OR type LIKE $3)",
    sqlite="SELECT count(*) FROM {p}outbox WHERE source = ?1 AND state = 'sent' AND ended_at >= ?2"
    " AND (?3 IS NULL OR type GLOB ?3)",
)

# Delete some that ended at least $4 seconds ago.  $2 source, $3 state, $5 most
PURGEABLE = Sql(
    postgres="SELECT seq FROM {p}outbox WHERE source = $2 AND state = $3"
    " AND ended_at <= {now} - make_interval(secs => $4) ORDER BY ended_at LIMIT $5",
    sqlite="SELECT seq FROM {p}outbox WHERE source = ?2 AND state = ?3 AND ended_at <= {now} - ?4 ORDER BY ended_at LIMIT ?5",
)
COUNT_PURGEABLE = Sql(
    f"SELECT count(*) FROM ({PURGEABLE.postgres}) AS found", f"SELECT count(*) FROM ({PURGEABLE.sqlite}) AS found"
)
PURGE = Sql(
    f"DELETE FROM {{p}}outbox WHERE seq IN ({PURGEABLE.postgres})",
    f"DELETE FROM {{p}}outbox WHERE seq IN ({PURGEABLE.sqlite})",
)

# The relay's claim.  The order within a subject is that of seq.  Behind a row that was tried before, nothing with its
# subject is looked at.  Otherwise a row is eligible if every row before it with the same subject is in the same batch; a row
# that only waits for its first time (delay, at) holds up no other.
#
# On PostgreSQL, a row with a subject also waits until each transaction that began before its own has ended.  Rows that
# another relay has locked are skipped, but they are still seen: for each subject that has such a row, the first of them comes
# as a row that ends in true, and what comes behind it is not eligible.
# $2 source, $3 most, $4 JSON array of subjects to leave out, $5 whether a dead letter holds up its followers, $6 seconds since
# 1970: look at rows that were due since then only.  Until the server has cleaned up, an index still has the entries of all
# rows that were deleted, and $6 passes over them.
CANDIDATES_POSTGRES = (
    """
SELECT o.seq, o.id, o.type, o.subject, o.attributes, o.data, o.attempts, date_part('epoch', o.due_at) AS due
FROM {{p}}outbox o
WHERE o.source = $2 AND o.state = 'pending' AND o.due_at BETWEEN to_timestamp($6) AND {{now}} AND {which}
    AND (o.lease_until IS NULL OR o.lease_until <= {{now}})
    AND (o.subject IS NULL OR """
    + MAY_GO
    + """
        AND o.subject NOT IN (SELECT jsonb_array_elements_text($4::jsonb))
        AND NOT EXISTS (SELECT FROM {{p}}outbox b WHERE b.source = $2 AND b.subject = o.subject AND b.seq < o.seq
            AND b.attempts > 0 AND (b.state = 'pending' OR b.state = 'dead' AND $5)))
ORDER BY o.due_at, o.seq LIMIT $3 FOR UPDATE SKIP LOCKED"""
)
CLAIM_POSTGRES = (
    "WITH locked AS MATERIALIZED ("
    + CANDIDATES_POSTGRES
    # A subquery for each subject, because the table may be full before the server has any statistics of it.
    + """), blockers AS (SELECT last.subject, (
    SELECT b.seq FROM {{p}}outbox b WHERE b.source = $2 AND b.subject = last.subject AND b.seq < last.seq
        AND b.state = 'pending' AND (b.attempts > 0 OR b.due_at <= {{now}}) AND b.seq NOT IN (SELECT seq FROM locked)
    ORDER BY b.seq LIMIT 1) AS seq
    FROM (SELECT subject, max(seq) AS seq FROM locked WHERE subject IS NOT NULL GROUP BY subject) last)
SELECT *, false FROM locked
UNION ALL SELECT seq, NULL, NULL, subject, NULL, NULL, 0, 0, true FROM blockers WHERE seq IS NOT NULL"""
)
# Rows that have not failed yet, to be sent while they are locked.
CLAIM_NEW = Sql(CLAIM_POSTGRES.format(which="o.attempts = 0"), "")
# Rows that have failed, to be sent under a lease; and all rows.
CLAIM_FAILED = Sql(CLAIM_POSTGRES.format(which="o.attempts > 0"), "")
CLAIM_ALL = Sql(CLAIM_POSTGRES.format(which="true"), "")
# The same without the types in $7, a JSON array; their rows still hold up their followers.  Statements of their own, because
# the planner cannot tell how few rows the condition removes, and may choose a plan that is fifty times slower.
BUT = " AND o.type NOT IN (SELECT jsonb_array_elements_text($7::jsonb))"
CLAIM_NEW_BUT = Sql(CLAIM_POSTGRES.format(which="o.attempts = 0" + BUT), "")
CLAIM_FAILED_BUT = Sql(CLAIM_POSTGRES.format(which="o.attempts > 0" + BUT), "")
CLAIM_ALL_BUT = Sql(CLAIM_POSTGRES.format(which="true" + BUT), "")

# Lease the rows in $2, a JSON array of seqs, to the relay $3 for $4 seconds; the attempt is counted now.
LEASE = Sql(
    "UPDATE {p}outbox SET token = $3, lease_until = {now} + make_interval(secs => $4), attempts = attempts + 1"
    " WHERE seq IN (SELECT jsonb_array_elements($2::jsonb)::bigint)",
    "",
)

# On SQLite one transaction writes at a time, so rows are claimed by leasing them.
# $2 source, $3 most, $4 token, $5 whether a dead letter holds up its followers, $6 seconds, $7 types to leave out
CLAIM_SQLITE = Sql(
    "",
    """WITH candidate AS (
    SELECT o.seq, o.subject FROM {p}outbox o WHERE o.source = ?2 AND o.state = 'pending' AND o.due_at <= {now}
        AND (o.lease_until IS NULL OR o.lease_until <= {now}) AND o.type NOT IN (SELECT value FROM json_each(?7))
        AND (o.subject IS NULL OR NOT EXISTS (SELECT 1 FROM {p}outbox b WHERE b.source = ?2 AND b.subject = o.subject
            AND b.seq < o.seq AND b.attempts > 0 AND (b.state = 'pending' OR b.state = 'dead' AND ?5)))
    ORDER BY o.due_at, o.seq LIMIT ?3)
UPDATE {p}outbox SET token = ?4, lease_until = {now} + ?6, attempts = attempts + 1 WHERE seq IN (
    SELECT c.seq FROM candidate c WHERE c.subject IS NULL OR NOT EXISTS (SELECT 1 FROM {p}outbox b
        WHERE b.source = ?2 AND b.subject = c.subject AND b.seq < c.seq AND b.state = 'pending'
            AND (b.attempts > 0 OR b.due_at <= {now}) AND b.seq NOT IN (SELECT seq FROM candidate)))""",
)
LEASED = Sql(
    "",
    "SELECT seq, id, type, subject, attributes, data, attempts - 1, due_at, 0 FROM {p}outbox"
    " WHERE source = ?1 AND token = ?2 AND state = 'pending' AND attempts > 0 ORDER BY seq",
)

# The ends.  $2 JSON array of seqs, $3 the relay's token, or NULL if the rows are locked: a late relay changes nothing.
SEQS_POSTGRES = "seq IN (SELECT jsonb_array_elements($2::jsonb)::bigint) AND token IS NOT DISTINCT FROM $3::text"
SEQS_SQLITE = "seq IN (SELECT value FROM json_each(?2)) AND token IS ?3"
DELETE = Sql(
    "DELETE FROM {p}outbox WHERE " + SEQS_POSTGRES.replace("$2", "$1").replace("$3", "$2"),
    "DELETE FROM {p}outbox WHERE " + SEQS_SQLITE.replace("?2", "?1").replace("?3", "?2"),
)
MARK_SENT = Sql(
    "UPDATE {p}outbox SET state = 'sent', ended_at = {now}, token = NULL, lease_until = NULL, error = '' WHERE "
    + SEQS_POSTGRES,
    "UPDATE {p}outbox SET state = 'sent', ended_at = {now}, token = NULL, lease_until = NULL, error = '' WHERE "
    + SEQS_SQLITE,
)
# Give rows back that were leased and not tried; the attempt does not count.
GIVE_BACK = Sql(
    "UPDATE {p}outbox SET attempts = attempts - 1, token = NULL, lease_until = NULL WHERE "
    + SEQS_POSTGRES.replace("$2", "$1").replace("$3", "$2"),
    "UPDATE {p}outbox SET attempts = attempts - 1, token = NULL, lease_until = NULL WHERE "
    + SEQS_SQLITE.replace("?2", "?1").replace("?3", "?2"),
)
# $4 attempts so far, $5 seconds until the next, $6 the error
FAIL = Sql(
    "UPDATE {p}outbox SET attempts = $4, due_at = {now} + make_interval(secs => $5), error = $6, token = NULL,"
    " lease_until = NULL WHERE " + SEQS_POSTGRES,
    "UPDATE {p}outbox SET attempts = ?4, due_at = {now} + ?5, error = ?6, token = NULL, lease_until = NULL WHERE "
    + SEQS_SQLITE,
)
# $4 attempts, $5 the error
BURY = Sql(
    "UPDATE {p}outbox SET attempts = $4, state = 'dead', ended_at = {now}, error = $5, token = NULL, lease_until = NULL"
    " WHERE " + SEQS_POSTGRES,
    "UPDATE {p}outbox SET attempts = ?4, state = 'dead', ended_at = {now}, error = ?5, token = NULL, lease_until = NULL"
    " WHERE " + SEQS_SQLITE,
)
