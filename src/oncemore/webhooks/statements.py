"""The statements of webhooks that are sent, written once for both databases.

Times are seconds since 1970 outside the database.  In a statement:

    EPOCH(column)                  reads a time
    TIME($3)                       writes one
    ROWS($3, seq bigint, ...)      the objects of a JSON array as rows
"""

from __future__ import annotations

import re

from .._ledger.tables import Sql

EPOCH = re.compile(r"EPOCH\(([\w.]+)\)")
TIME = re.compile(r"TIME\(([$\w.]+)\)")
ROWS = re.compile(r"ROWS\((\$\d+), ([^)]*)\) (\w+)")


def both(text: str) -> Sql:
    """The statement for each database."""

    def postgres_rows(found: re.Match[str]) -> str:
        return f"jsonb_to_recordset({found[1]}::text::jsonb) AS {found[3]}({found[2]})"

    def sqlite_rows(found: re.Match[str]) -> str:
        names = [column.split(" ")[0] for column in found[2].split(", ")]
        columns = ", ".join(f"json_extract(value, '$.{name}') AS {name}" for name in names)
        return f"(SELECT {columns} FROM json_each({found[1]})) AS {found[3]}"

    postgres = TIME.sub(
        r"to_timestamp(\1)", EPOCH.sub(r"extract(epoch FROM \1)::float8", ROWS.sub(postgres_rows, text))
    )
    sqlite = TIME.sub(r"\1", EPOCH.sub(r"\1", ROWS.sub(sqlite_rows, text)))
    sqlite = re.sub(r"FOR (NO KEY UPDATE|UPDATE|KEY SHARE)( OF \w+(, \w+)*)?( SKIP LOCKED)?", "", sqlite)
    sqlite = sqlite.replace("'infinity'", "9e15").replace("IS NOT DISTINCT FROM", "IS").replace("greatest(", "max(")
    return Sql(postgres, re.sub(r"\$(\d)", r"?\1", sqlite))


# Endpoints

ENDPOINT_COLUMNS = """id, tenant, url, events, headers, secrets, signature, ordering, rate, description, state, reason,
    EPOCH(created_at), EPOCH(failing_since), EPOCH(paced_until)"""
CREATE_ENDPOINT = both(
    "INSERT INTO {p}webhook_endpoints (id, tenant, url, events, headers, secrets, signature, ordering, rate, description, "
    "state, reason, created_at) VALUES ($2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, {now}) "
    "ON CONFLICT (id) DO NOTHING"
)
FIND_ENDPOINT = both(f"SELECT {ENDPOINT_COLUMNS} FROM {{p}}webhook_endpoints WHERE id = $1")
LOCK_ENDPOINT = both(f"SELECT {ENDPOINT_COLUMNS} FROM {{p}}webhook_endpoints WHERE id = $1 FOR NO KEY UPDATE")
LIST_ENDPOINTS = both(
    f"SELECT {ENDPOINT_COLUMNS} FROM {{p}}webhook_endpoints WHERE id > $1 AND tenant = coalesce($2, tenant) "
    "AND state = coalesce($3, state) ORDER BY id LIMIT $4"
)
ENDPOINTS_OF = both(
    f"SELECT {ENDPOINT_COLUMNS} FROM {{p}}webhook_endpoints WHERE tenant IN (SELECT tenant FROM ROWS($1, tenant text) r)"
)
UPDATE_ENDPOINT = both(
    "UPDATE {p}webhook_endpoints SET url = $2, events = $3, headers = $4, ordering = $5, rate = $6, description = $7 "
    "WHERE id = $1"
)
SET_SECRETS = both("UPDATE {p}webhook_endpoints SET secrets = $2 WHERE id = $1")
NOW = both("SELECT EPOCH(moment) FROM (SELECT {now} AS moment) AS clock")
SET_STATE = both(
    "UPDATE {p}webhook_endpoints SET state = $2, reason = $3, failing_since = NULL, paused_until = NULL "
    "WHERE id = $1 AND state <> $2 RETURNING id, tenant, url"
)
DELETE_ENDPOINT = both("DELETE FROM {p}webhook_endpoints WHERE id = $1 RETURNING id")
# A request that is under way is finished, and FINISH parks its delivery if it fails.  What was resent by hand is sent.
PARK = both(
    "UPDATE {p}webhook_deliveries SET state = 'parked', token = NULL WHERE seq IN ("
    "SELECT seq FROM {p}webhook_deliveries WHERE endpoint = $2 AND state = 'pending' AND former IS NULL "
    "AND (token IS NULL OR next_at <= {now}) ORDER BY next_at, seq LIMIT 5000) "
    "AND (token IS NULL OR next_at <= {now}) RETURNING seq"  # once more, because a sender may just have claimed it
)
DISABLED_WITH_PENDING = both(
    "SELECT id FROM {p}webhook_endpoints e WHERE state = 'disabled' AND EXISTS (SELECT 1 FROM {p}webhook_deliveries d "
    "WHERE d.endpoint = e.id AND d.state = 'pending' AND d.former IS NULL AND "
    "(d.token IS NULL OR d.next_at <= {now}))"
)

# Messages

ADD_MESSAGE = both(
    "INSERT INTO {p}webhook_messages (id, tenant, type, subject, data, created_at) VALUES ($2, $3, $4, $5, $6, {now}) "
    "ON CONFLICT (tenant, id) DO NOTHING"
)
# One sender at a time gives the deliveries their order.  NEW_MESSAGES finds nothing unless this has got the lock; so
# both go in one round trip, and each has a snapshot of its own.
FAN_OUT_LOCK = Sql(
    "SELECT set_config('oncemore.fan_out', "
    "pg_try_advisory_xact_lock(hashtextextended('{p}webhook_messages', 0))::text, true)",
    "SELECT 1",
)
# A message is settled if no older transaction is open, which might still add one that comes before it.  $3 is the limit of
# settled transactions that the first page of a pass has found: later pages judge by the same one.
NEW_MESSAGES = Sql(
    "SELECT seq, tenant, type, subject, xid < coalesce($3::text::xid8, pg_snapshot_xmin(pg_current_snapshot())), "
    "coalesce($3::text, pg_snapshot_xmin(pg_current_snapshot())::text) FROM {p}webhook_messages "
    "WHERE current_setting('oncemore.fan_out') = 'true' AND is_new AND seq > $1 ORDER BY seq LIMIT $2",
    "SELECT seq, tenant, type, subject, 1, ?3 FROM {p}webhook_messages WHERE is_new AND seq > ?1 ORDER BY seq LIMIT ?2",
)
# Locked, so that no delivery of the endpoint ends between the look at its predecessors and the commit.
ORDERED_ENDPOINTS = both(
    "SELECT id, sequence FROM {p}webhook_endpoints WHERE id IN (SELECT id FROM ROWS($1, id text) r) ORDER BY id FOR NO KEY UPDATE"
)
BUSY_KEYS = both(
    "SELECT r.endpoint, r.order_key FROM ROWS($1, endpoint text, order_key text) r WHERE EXISTS ("
    "SELECT 1 FROM {p}webhook_deliveries d WHERE d.state = 'pending' AND d.order_key IS NOT NULL "
    "AND d.endpoint = r.endpoint AND d.order_key = r.order_key)"
)
# Locks message and endpoint against being deleted meanwhile; nothing is added for those that are gone.
ADD_DELIVERIES = both(
    "INSERT INTO {p}webhook_deliveries (message, endpoint, tenant, type, order_key, sequence, state, created_at, next_at) "
    "SELECT m.seq, e.id, m.tenant, m.type, r.order_key, r.sequence, r.state, {now}, "
    "CASE WHEN r.waits THEN 'infinity' ELSE {now} END "
    "FROM ROWS($2, message bigint, endpoint text, order_key text, sequence bigint, state text, waits boolean) r "
    "JOIN {p}webhook_messages m ON m.seq = r.message JOIN {p}webhook_endpoints e ON e.id = r.endpoint "
    "WHERE true ORDER BY m.seq FOR KEY SHARE OF m, e ON CONFLICT (message, endpoint) DO NOTHING"
)
SET_SEQUENCES = both(
    "UPDATE {p}webhook_endpoints AS e SET sequence = r.sequence FROM ROWS($1, id text, sequence bigint) r "
    "WHERE e.id = r.id"
)
FANNED_OUT = both("UPDATE {p}webhook_messages SET is_new = false WHERE seq IN (SELECT seq FROM ROWS($1, seq bigint) r)")

# Sending

# The endpoints with something due, from $2 on in the order of their ids: each costs two looks into the index, and the
# number of deliveries that wait for one of them does not matter.  If an endpoint is disabled or pauses, only those that
# were resent by hand are sent.  The last columns are whether all are, and the time.
DUE = (
    "(SELECT 1 FROM {p}webhook_deliveries d WHERE d.endpoint = found.id AND d.state = 'pending' AND d.next_at <= {now}"
)
DUE_ENDPOINTS = both(
    "WITH RECURSIVE waiting(endpoint) AS ("
    "SELECT (SELECT endpoint FROM {p}webhook_deliveries WHERE state = 'pending' AND endpoint > $2 ORDER BY endpoint LIMIT 1) "
    "UNION ALL SELECT (SELECT d.endpoint FROM {p}webhook_deliveries d WHERE d.state = 'pending' AND "
    "d.endpoint > waiting.endpoint ORDER BY d.endpoint LIMIT 1) FROM waiting WHERE waiting.endpoint IS NOT NULL), "
    f"found AS (SELECT {ENDPOINT_COLUMNS}, e.state = 'enabled' AND (paused_until IS NULL OR paused_until <= {{now}}) AS is_open "
    "FROM waiting JOIN {p}webhook_endpoints e ON e.id = waiting.endpoint "
    "WHERE id NOT IN (SELECT id FROM ROWS($3, id text) r)) "
    "SELECT found.*, EPOCH(moment) FROM found CROSS JOIN (SELECT {now} AS moment) AS clock "
    f"WHERE CASE WHEN is_open THEN {DUE} ORDER BY d.next_at LIMIT 1) ELSE {DUE} AND d.former IS NOT NULL LIMIT 1) END "
    "IS NOT NULL ORDER BY found.id LIMIT $4"
)


def claim(condition: str) -> Sql:
    """$2 token, $3 end of the lease, $4 endpoints, $5 most of each, $6 those that were due by then, as `run_once` wants it"""
    text = (
        "UPDATE {p}webhook_deliveries SET token = $2, due_at = next_at, next_at = TIME($3), attempts = attempts + 1, "
        "first_at = coalesce(first_at, {now}) WHERE seq IN ("
        "SELECT c.seq FROM ROWS($4, id text) r CROSS JOIN LATERAL (SELECT d.seq FROM {p}webhook_deliveries d "
        "WHERE d.endpoint = r.id AND d.state = 'pending' AND d.next_at <= {now} AND d.next_at <= TIME($6)"
        f"{condition} ORDER BY d.next_at, d.seq LIMIT $5 FOR UPDATE SKIP LOCKED) c)"
    )
    found = both(text)
    found.sqlite = found.sqlite.replace(  # SQLite has no LATERAL
        "CROSS JOIN LATERAL (SELECT d.seq", "JOIN {p}webhook_deliveries c ON c.seq IN (SELECT d.seq"
    ).replace(") c)", "))")
    return found


# A lease moves `next_at`, so that what is being sent is not among those that are due.
CLAIM = claim("")
CLAIM_RESENT = claim(" AND d.former IS NOT NULL")
CLAIMED = both(
    "SELECT d.seq, d.endpoint, d.attempts, EPOCH(d.first_at), EPOCH(d.due_at), d.sequence, d.former, "
    "m.id, m.tenant, m.type, m.subject, m.data, EPOCH(m.created_at), d.order_key "
    "FROM {p}webhook_deliveries d JOIN {p}webhook_messages m ON m.seq = d.message WHERE d.token = $1 ORDER BY d.seq"
)
RATED_ENDPOINTS = both(
    "SELECT id, EPOCH(paced_until) FROM {p}webhook_endpoints WHERE id IN (SELECT id FROM ROWS($1, id text) r) "
    "FOR NO KEY UPDATE SKIP LOCKED"
)
PACE = both(
    "UPDATE {p}webhook_endpoints AS e SET paced_until = TIME(r.until) FROM ROWS($1, id text, until float8) r "
    "WHERE e.id = r.id"
)
# The result of a sender that was too slow, so that another has taken over, changes nothing.
FINISH = both(
    "UPDATE {p}webhook_deliveries AS d SET state = CASE WHEN r.state = 'pending' AND r.former IS NULL AND EXISTS ("
    "SELECT 1 FROM {p}webhook_endpoints e WHERE e.id = d.endpoint AND e.state = 'disabled') THEN 'parked' ELSE r.state END, "
    "next_at = TIME(r.next_at), first_at = TIME(r.first_at), "
    "attempts = r.attempts, token = NULL, ended_at = TIME(r.ended_at), status = r.status, "
    "error = r.error, former = r.former "
    "FROM ROWS($1, seq bigint, token text, state text, next_at float8, first_at float8, attempts int, ended_at float8, "
    "status int, error text, former text) r WHERE d.seq = r.seq AND d.token = r.token"
)
# Each claim has a number of its own, so an attempt is logged once, also if the answer to the commit was lost.
ADD_ATTEMPTS = both(
    "INSERT INTO {p}webhook_attempts (delivery, number, at, status, duration, response, error) "
    "SELECT r.seq, r.attempts, TIME(r.at), r.status, r.duration, r.response, r.error FROM ROWS($1, seq bigint, "
    "attempts int, at float8, status int, duration float8, response text, error text, logged boolean) r "
    "WHERE r.logged AND EXISTS (SELECT 1 FROM {p}webhook_deliveries d WHERE d.seq = r.seq) "
    "ON CONFLICT (delivery, number) DO NOTHING"
)
# One delivery of an order_key is due at a time.  If it has ended, the next one is due since it was made.
NEXT_IN_ORDER = both(
    "UPDATE {p}webhook_deliveries SET next_at = created_at WHERE next_at = 'infinity' AND seq IN ("
    "SELECT (SELECT min(d.seq) FROM {p}webhook_deliveries d WHERE d.endpoint = r.endpoint AND d.order_key = r.order_key "
    "AND d.state = 'pending') FROM ROWS($1, endpoint text, order_key text) r WHERE NOT EXISTS ("
    "SELECT 1 FROM {p}webhook_deliveries o WHERE o.endpoint = r.endpoint AND o.order_key = r.order_key "
    "AND o.state = 'pending' AND o.next_at < 'infinity'))"
)
HEALTH = both(
    "UPDATE {p}webhook_endpoints AS e SET "
    "failing_since = CASE WHEN r.healthy THEN NULL ELSE coalesce(e.failing_since, {now}) END, "
    "paused_until = CASE WHEN r.pause IS NULL THEN e.paused_until ELSE TIME(r.pause) END "
    "FROM ROWS($2, id text, healthy boolean, pause float8) r "
    "WHERE e.id = r.id AND (NOT r.healthy OR e.failing_since IS NOT NULL OR r.pause IS NOT NULL)"
)
# Those of $2 that have only failed for $3 seconds, and for how long.
FAILING = Sql(
    postgres="SELECT id, extract(epoch FROM {now} - failing_since)::float8 FROM {p}webhook_endpoints WHERE state = 'enabled' "
    "AND id IN (SELECT id FROM jsonb_to_recordset($2::text::jsonb) AS r(id text)) "
    "AND failing_since <= {now} - make_interval(secs => $3)",
    sqlite="SELECT id, {now} - failing_since FROM {p}webhook_endpoints WHERE state = 'enabled' "
    "AND id IN (SELECT json_extract(value, '$.id') FROM json_each(?2)) AND failing_since <= {now} - ?3",
)
# Deliveries

DELIVERY_COLUMNS = """d.seq, m.id, d.endpoint, d.tenant, d.type, m.subject, d.state, d.attempts, EPOCH(d.created_at),
    EPOCH(d.next_at), EPOCH(d.ended_at), d.status, d.error, d.sequence"""
DELIVERIES = "FROM {p}webhook_deliveries d JOIN {p}webhook_messages m ON m.seq = d.message"
FIND_DELIVERY = both(f"SELECT {DELIVERY_COLUMNS} {DELIVERIES} WHERE d.seq = $1")
ATTEMPTS = both(
    "SELECT number, EPOCH(at), status, duration, response, error FROM {p}webhook_attempts WHERE delivery = $1 ORDER BY seq"
)
# Not while it is being sent, nor while it waits for an earlier one.
RESEND = both(
    "UPDATE {p}webhook_deliveries SET state = 'pending', next_at = {now}, token = NULL, "
    "former = coalesce(former, state) WHERE seq = $2 AND (token IS NULL OR next_at <= {now}) "
    "AND (state <> 'pending' OR next_at < 'infinity') RETURNING seq"
)
LAST_DELIVERY = both("SELECT coalesce(max(seq), 0) FROM {p}webhook_deliveries")
UNMATCHED = both(
    "SELECT m.seq, m.type, m.subject FROM {p}webhook_messages m WHERE m.tenant = $1 AND m.created_at >= TIME($2) "
    "AND m.seq > $3 AND NOT m.is_new AND NOT EXISTS (SELECT 1 FROM {p}webhook_deliveries d WHERE d.message = m.seq "
    "AND d.endpoint = $4) ORDER BY m.seq LIMIT $5"
)


def requeue(states: tuple[str, ...]) -> Sql:
    """Make deliveries in one of the *states* pending again, as if they were new; those that are ordered wait at first.

    $2 endpoint, $3 since when, $4 and $5 behind and up to which seq, $6 the most
    """
    listed = ", ".join(f"'{state}'" for state in states)
    return both(
        "UPDATE {p}webhook_deliveries SET state = 'pending', first_at = NULL, former = NULL, token = NULL, "
        "ended_at = NULL, next_at = CASE WHEN order_key IS NULL THEN {now} ELSE 'infinity' END WHERE seq IN ("
        f"SELECT seq FROM {{p}}webhook_deliveries WHERE endpoint = $2 AND state IN ({listed}) AND created_at >= TIME($3) "
        "AND seq > $4 AND seq <= $5 ORDER BY seq LIMIT $6) RETURNING seq, order_key"
    )


# The states of the deliveries that `recover` sends again, all in one pass, so that none is sent twice.
REQUEUES = {
    "failed": requeue(("dead",)),
    "missing": requeue(("parked",)),
    "all": requeue(("dead", "parked", "delivered")),
}
COUNTS = both("SELECT state, count(*) FROM {p}webhook_deliveries GROUP BY state")
OLD_MESSAGES = both(
    "SELECT seq FROM {p}webhook_messages m WHERE created_at < TIME($1) AND NOT is_new AND NOT EXISTS ("
    "SELECT 1 FROM {p}webhook_deliveries d JOIN {p}webhook_endpoints e ON e.id = d.endpoint "
    "WHERE d.message = m.seq AND d.state = 'pending') ORDER BY created_at LIMIT $2"
)
MESSAGES_OF = both("SELECT seq FROM {p}webhook_messages WHERE tenant = $1 LIMIT $2")
DELIVERIES_OF = both(
    "SELECT seq FROM {p}webhook_deliveries WHERE endpoint = $1 AND (state = 'pending' OR state <> 'pending') LIMIT $2"
)


def delete_deliveries(column: str) -> tuple[Sql, ...]:
    """Delete deliveries by their *column*, with their attempts.  They are locked first, so that no attempt is added."""
    these = f"{{p}}webhook_deliveries WHERE {column} IN (SELECT seq FROM ROWS($1, seq bigint) r)"
    return (
        both(f"SELECT seq FROM {these} ORDER BY seq FOR UPDATE"),
        both(f"DELETE FROM {{p}}webhook_attempts WHERE delivery IN (SELECT seq FROM {these})"),
        both(f"DELETE FROM {these}"),
    )


DELETE_DELIVERIES = delete_deliveries("seq")
THESE_MESSAGES = "{p}webhook_messages WHERE seq IN (SELECT seq FROM ROWS($1, seq bigint) r)"
# They are locked first, so that no delivery is added.
DELETE_MESSAGES = (
    both(f"SELECT seq FROM {THESE_MESSAGES} ORDER BY seq FOR UPDATE"),
    *delete_deliveries("message"),
    both(f"DELETE FROM {THESE_MESSAGES}"),
)
PING = both(
    "INSERT INTO {p}webhook_messages (id, tenant, type, data, created_at, is_new) "
    "VALUES ($2, $3, $4, $5, {now}, false) RETURNING seq"
)
PING_DELIVERY = both(
    "INSERT INTO {p}webhook_deliveries (message, endpoint, tenant, type, state, created_at, next_at, former) "
    "VALUES ($2, $3, $4, $5, 'pending', {now}, {now}, 'dead') RETURNING seq"
)


def list_deliveries(filters: tuple[str, ...], state: str | None) -> Sql:
    """The page of deliveries behind $1, at most $2 of them; each filter has a parameter from $3 on.

    The state is in the text, so that the database uses the index of those that are in it.
    """
    conditions = "".join(f" AND d.{column} = ${number}" for number, column in enumerate(filters, 3))
    select = f"SELECT {DELIVERY_COLUMNS} {DELIVERIES} WHERE d.seq > $1{conditions}"
    if state is None and "endpoint" in filters:  # each part has an index of its own
        page = f"SELECT d.seq FROM {{p}}webhook_deliveries d WHERE d.seq > $1{conditions} AND d.state"
        parts = (
            f"SELECT * FROM ({page} {which} 'pending' ORDER BY d.seq LIMIT $2) p{n}"
            for n, which in enumerate(("=", "<>"))
        )
        return both(f"{select} AND d.seq IN ({' UNION ALL '.join(parts)}) ORDER BY d.seq LIMIT $2")
    condition = f" AND d.state = '{state}'" if state else ""
    return both(f"{select}{condition} ORDER BY d.seq LIMIT $2")
