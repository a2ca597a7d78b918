"""The SQL of the SQLite store: statements for one row and for many, the tables, and the set-up of a connection."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from itertools import chain, repeat
from typing import Any

from ..._ledger.states import HELD, RELEASED, RUNNING
from ..._ledger.store import Filter
from ..._ledger.tables import Feature, features
from ..._ledger.transactions import Rows
from ...errors import ConfigurationError
from .writer import MEMORY

# The machine's clock, which all processes on one file share, as SQLite reads it.  Parameter 1 is the store's shift.
NOW = "((julianday('now') - 2440587.5) * 86400.0 + ?1)"

# In the order of Record's fields.
COLUMNS = (
    f"scope, key, name, fingerprint, state, token, holder, attempts, created_at, lease_until, {NOW},"
    " settled_at, expires_at, accessed_at, outcome, response_hash, note, request"
)
OUTCOME, HASH, NOTE, REQUEST = 14, 15, 16, 17

Row = tuple[Any, ...]

ARCHIVED = (
    "scope, key, token, name, fingerprint, state, holder, attempts, created_at, settled_at, expires_at, accessed_at,"
    " status, outcome, response_hash, note"
)


class Grouped:
    """A statement for any number of rows of *width* values each.

    In the template, `{0}`, `{1}`, ... are a row's values, and ?1 is common to all rows.
    Many rows are one statement, because Python lets other threads run before and after each statement: a busy event
    loop would delay a batch once per row.  The number of rows is rounded up to a power of two, so that few texts are
    ever prepared.  The added rows are NULL and match nothing.  A single row needs no table of values, which is faster.
    """

    def __init__(self, template: str, *, width: int, alone: str = "", joined: str = "{values}") -> None:
        self.width = width
        self._template = template
        self._joined = joined
        self.single = template.format(*(f"?{n + 2}" for n in range(width)), source=alone)  # the text for one row
        self._texts = {1: self.single}

    def bind(self, common: float, rows: list[Row]) -> tuple[str, list[Any]]:
        """Return the statement's text and its parameters."""
        size = 1 << (len(rows) - 1).bit_length()
        parameters = [common, *chain.from_iterable(rows), *repeat(None, self.width * (size - len(rows)))]
        return self._texts.get(size) or self._text(size), parameters

    def _text(self, size: int) -> str:
        row = f"({', '.join('?' * self.width)})"
        values = f"(VALUES {', '.join([row] * size)})"
        columns = (f"column{n + 1}" for n in range(self.width))
        text = self._texts[size] = self._template.format(*columns, source=self._joined.format(values=values))
        return text


class SqliteStatements:
    """All statements of one ledger.  The names of its tables begin with *prefix*."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        meta, records, archive = f"{prefix}meta", f"{prefix}records", f"{prefix}archive"
        # Find the records of the given ids, with the time at which they were read.
        self.look = Grouped(
            f"SELECT {COLUMNS} FROM {{source}} WHERE scope = {{0}} AND key = {{1}}",
            width=2,
            alone=records,
            joined=f"{{values}} CROSS JOIN {records}",  # CROSS makes SQLite look up each value by the index
        )
        claimed = "token, scope, key, name, fingerprint, holder, state, attempts, created_at, lease_until, request"
        # Insert new records; parameter 1 is the time.  An id that exists is skipped, so the row count is lower.
        self.claim = Grouped(
            f"INSERT INTO {records} ({claimed})"
            " SELECT {0}, {1}, {2}, {3}, {4}, {5}, 'running', 1, ?1, ?1 + {6}, {7} {source} WHERE {0} IS NOT NULL"
            " ON CONFLICT (key, scope) DO NOTHING",
            width=8,
            joined="FROM {values}",
        )
        # Insert one new record, with the first token that was never given.  If its id exists, the row count is 0.
        self.claim_one = (
            f"INSERT INTO {records} ({claimed})"
            f" SELECT max(token, coalesce((SELECT max(token) FROM {records}), 0)) + 1, ?2, ?3, ?4, ?5, ?6, 'running', 1,"
            f" {NOW}, {NOW} + ?7, ?8 FROM {meta} WHERE true ON CONFLICT (key, scope) DO NOTHING"
        )
        # Undo a claim whose caller has gone.  If the claim took over a lapsed lease, the outcome stays unknown, so the
        # lease ends now.  A first attempt is deleted.  A later one is released, and remembered for a day.
        mine = "scope = ?2 AND key = ?3 AND holder = ?4 AND state = 'running'"
        self.unclaim = (
            f"UPDATE {records} SET lease_until = {NOW} WHERE {mine} AND lapsed = 1",
            f"DELETE FROM {records} WHERE {mine} AND lapsed = 0 AND attempts = 1",
            f"UPDATE {records} SET state = 'released', expires_at = {NOW} + 86400.0"
            f" WHERE {mine} AND lapsed = 0 AND attempts > 1",
        )
        # Write outcomes.  If a lease is lost, its row is skipped, so the row count is lower.
        self.settle = Grouped(
            f"UPDATE {records} SET state = 'settled', settled_at = {NOW}, accessed_at = {NOW}, expires_at = {NOW} + {{3}},"
            " status = {4}, outcome = {5}, response_hash = {6}, note = {7}, audit = {8}, request = NULL {source}"
            " WHERE token = {0} AND scope = {1} AND key = {2} AND state = 'running'",
            width=9,
            joined="FROM {values}",
        )
        # Read the first token that was never given, and the clock.
        self.next_token = f"SELECT max(token, coalesce((SELECT max(token) FROM {records}), 0)) + 1, {NOW} FROM {meta}"
        # Extend the life of a replayed record, for rules that count the retention from the last access.
        self.touch = (
            f"UPDATE {records} SET accessed_at = {NOW}, expires_at = {NOW} + ?2"
            f" WHERE token = ?3 AND scope = ?4 AND key = ?5 AND state = 'settled' AND expires_at > {NOW}"
        )
        self.delete = f"DELETE FROM {records} WHERE token = ?"
        # Copy an expired record to the archive if its rule keeps it for the audit.
        self.archive = f"INSERT INTO {archive} ({ARCHIVED}) SELECT {ARCHIVED} FROM {records} WHERE audit AND token = ?"
        # The purge archives the audited records, and then deletes all.  Parameter 1 is the time for both statements,
        # because otherwise a record that expires between the two would be lost.
        expired = f"SELECT token FROM {records} WHERE expires_at <= ?1 ORDER BY expires_at, token LIMIT ?2"
        self.archive_expired = (
            f"INSERT INTO {archive} ({ARCHIVED}) SELECT {ARCHIVED} FROM {records} WHERE audit AND token IN ({expired})"
        )
        self.delete_expired = f"DELETE FROM {records} WHERE token IN ({expired})"
        self.oldest_expired = (
            f"SELECT expires_at, {NOW} FROM {records} WHERE expires_at <= {NOW} ORDER BY expires_at LIMIT 1"
        )
        # The records that can expire are many: they are counted from the index alone.  The few others need the table.
        self.stats = (
            f"SELECT state, count(*), 0, sum(state = 'running' AND lease_until <= {NOW})"
            f" FROM {records} WHERE expires_at IS NULL GROUP BY state UNION ALL"
            f" SELECT state, count(*), sum(expires_at <= {NOW}), 0 FROM {records} WHERE expires_at IS NOT NULL GROUP BY state"
            f" UNION ALL SELECT 'archived', count(*), 0, 0 FROM {archive}"
        )
        self._page = f"SELECT {COLUMNS} FROM {records} WHERE token > ?2 AND {{conditions}} ORDER BY token LIMIT ?3"
        # A harmless change, because SQLite writes only pages that have changed: see `overwrite_log`.
        self.overwrite = f"UPDATE {meta} SET token = token + 1"
        self.lock = f"UPDATE {meta} SET token = token WHERE false"  # changes no row, but takes the write lock
        self._change = f"UPDATE {records} SET {{columns}} WHERE token = ?"

    def change(self, columns: Iterable[str]) -> str:
        """Return the statement that sets *columns* of the record with a token."""
        return self._change.format(columns=", ".join(f"{name} = ?" for name in columns))

    def page(self, where: Filter) -> tuple[str, list[str]]:
        """Return the statement that lists matching records by token, and its parameters from ?4 on."""
        asked = {"state": where.state, "scope": where.scope, "key": where.key, "name": where.name}
        equal = {name: value for name, value in asked.items() if value is not None}
        conditions = [f"(expires_at IS NULL OR expires_at > {NOW})"]
        conditions += [f"{name} = ?{number}" for number, name in enumerate(equal, start=4)]
        if where.lapsed is not None:
            conditions.append(f"(state = 'running' AND lease_until <= {NOW}) = {where.lapsed:d}")
        if where.lapsed or where.state in (RUNNING, HELD):
            conditions.append("expires_at IS NULL")  # lets the planner use the index on expires_at
        if where.state == RELEASED:
            conditions.append("state = 'released'")  # the partial index needs the literal, not a parameter
        return self._page.format(conditions=" AND ".join(conditions)), list(equal.values())


CACHE = 8192  # kilobytes: enough for the upper levels of the indexes of a million records

# Scripts are only ever added, one for each version of the tables.  {p} is the prefix of all names.
FIRST = """\
-- One row.
CREATE TABLE {p}meta (
    token INTEGER NOT NULL  -- this token and lower ones are never given again
);

-- One row per operation.  All times are seconds since 1970; a state's meaning is in the documentation.
CREATE TABLE {p}records (
    token         INTEGER PRIMARY KEY,       -- grows with every claim, and fences late owners
    scope         TEXT    NOT NULL,          -- the owner of the key
    key           TEXT    NOT NULL,          -- the caller's name for the operation
    name          TEXT    NOT NULL,          -- the kind of operation
    fingerprint   TEXT    NOT NULL,          -- digest of the request
    state         TEXT    NOT NULL           -- IN would build a temporary index at every statement
                  CHECK (state = 'running' OR state = 'settled' OR state = 'released' OR state = 'held'),
    holder        TEXT    NOT NULL,          -- host, process and number of the claim
    attempts      INTEGER NOT NULL,
    created_at    REAL    NOT NULL,
    lease_until   REAL    NOT NULL,
    settled_at    REAL,
    expires_at    REAL,                      -- only settled and released records expire
    accessed_at   REAL,
    status        INTEGER,                   -- of the HTTP response
    outcome       BLOB,                      -- MessagePack: kind, status, headers, body
    response_hash TEXT    NOT NULL DEFAULT '',
    note          TEXT    NOT NULL DEFAULT '',
    audit         INTEGER NOT NULL DEFAULT 0, -- 1: archived after it has expired
    lapsed        INTEGER NOT NULL DEFAULT 0, -- 1: the latest claim took over a lapsed lease
    request       BLOB,                      -- the request, if the operation may be finished without its caller
    UNIQUE (key, scope)                      -- key first, because keys that grow with time fill the index from one end
);

-- Tokens never repeat, also after a deletion, so that a late owner of a deleted record stays fenced.
CREATE TRIGGER {p}records_deleted AFTER DELETE ON {p}records WHEN OLD.token > (SELECT token FROM {p}meta)
BEGIN
    UPDATE {p}meta SET token = OLD.token;
END;

-- For the purge, for lists of running and held records (which have no expires_at), and for counts.
CREATE INDEX {p}records_expiry ON {p}records (expires_at, state);

-- For schedules and inboxes, which look for the few released records among many settled ones.
CREATE INDEX {p}records_released ON {p}records (scope) WHERE state = 'released';

-- Expired records whose rule keeps them for the audit.
CREATE TABLE {p}archive (
    scope         TEXT    NOT NULL,
    key           TEXT    NOT NULL,
    token         INTEGER NOT NULL,
    name          TEXT    NOT NULL,
    fingerprint   TEXT    NOT NULL,
    state         TEXT    NOT NULL,
    holder        TEXT    NOT NULL,
    attempts      INTEGER NOT NULL,
    created_at    REAL    NOT NULL,
    settled_at    REAL,
    expires_at    REAL,
    accessed_at   REAL,
    status        INTEGER,
    outcome       BLOB,
    response_hash TEXT    NOT NULL,
    note          TEXT    NOT NULL,
    PRIMARY KEY (scope, key, token)
);

INSERT INTO {p}meta (token) VALUES (0);
"""
LEDGER = Feature("ledger", FIRST)


def script(prefix: str) -> str:
    """Return the script that creates all tables, for users that run it themselves."""
    statements = [statement for feature in (LEDGER, *features()) for statement in feature_statements(prefix, feature)]
    return ";\n\n".join(["PRAGMA journal_mode = WAL", "BEGIN IMMEDIATE", *statements, "COMMIT"]) + ";\n"


# The table `features` has the version of the tables of the ledger and of each feature.
MAKE_FEATURES = "CREATE TABLE IF NOT EXISTS {p}features (name TEXT PRIMARY KEY, version INTEGER NOT NULL)"
FIND_FEATURES = "SELECT 1 FROM sqlite_schema WHERE name = '{p}features'"
FEATURE_VERSION = "SELECT version FROM {p}features WHERE name = ?1"


def feature_statements(prefix: str, feature: Feature, *, since: int = 0) -> list[str]:
    """Return the statements that bring the tables of *feature* from version *since* to the latest."""
    names = {"p": prefix, "prefix": prefix}
    scripts = [statement for text in feature.sqlite[since:] for statement in split(text.format(**names))]
    version = f"INSERT OR REPLACE INTO {prefix}features VALUES ('{feature.name}', {feature.version})"
    return [MAKE_FEATURES.format(**names), *scripts, version]


def split(text: str) -> list[str]:
    """Return the statements of a script, without the semicolons between them."""
    statements, part = [], ""
    for line in text.splitlines(keepends=True):
        part += line
        if line.rstrip().endswith(";") and sqlite3.complete_statement(part):
            statements.append(part.strip().removesuffix(";"))
            part = ""
    return [*statements, part.strip()] if part.strip() else statements


def make_ready(connection: sqlite3.Connection, *, tables: TableMaker, pragmas: Mapping[str, object]) -> None:
    """Set up a new connection, and create or migrate the ledger's tables if they are missing or old."""
    [(mode,)] = connection.execute("PRAGMA journal_mode = WAL")
    if tables.path != MEMORY and mode != "wal":
        raise ConfigurationError(
            f"{tables.path}: SQLite cannot keep a write-ahead log here (mode {mode}); put the file on a local disk"
        )
    for name, value in {**pragmas, "cache_size": -CACHE}.items():
        connection.execute(f"PRAGMA {name} = {value}")
    tables.make(connection, LEDGER)


class TableMaker:
    """Creates the tables in the file at *path*.  *prefix* begins their names.  Without *create*, they must exist."""

    def __init__(self, path: str, prefix: str, *, create: bool) -> None:
        self.path = path
        self.create = create
        self.prefix = prefix
        self.exist = FIND_FEATURES.format(p=prefix)  # returns a row if the file has any tables of ours
        self.version = FEATURE_VERSION.format(p=prefix)

    def make(self, connection: sqlite3.Connection, feature: Feature) -> None:
        """Bring the tables of *feature* to the latest version, in one transaction."""
        if self._missing_now(connection, feature):
            connection.execute("BEGIN IMMEDIATE")
            for text in self._missing_now(
                connection, feature
            ):  # look again: another process may have made them meanwhile
                connection.execute(text)
            connection.execute("COMMIT")

    def _missing_now(self, connection: sqlite3.Connection, feature: Feature) -> list[str]:
        rows = connection.execute(self.exist).fetchall()
        if rows:
            rows = connection.execute(self.version, (feature.name,)).fetchall()
        return self.missing(feature, rows)

    def missing(self, feature: Feature, rows: Rows) -> list[str]:
        """Return the statements that bring the tables of *feature* from the version in *rows* to the latest."""
        version = rows[0][0] if rows else 0
        if version == feature.version:
            return []
        if version > feature.version:
            raise ConfigurationError(
                f"{self.path}: the tables of the {feature.name} are of version {version}, made by a newer release; this one "
                f"knows {feature.version}: upgrade it"
            )
        if not self.create:
            raise ConfigurationError(
                f"{self.path}: the tables of the {feature.name} are missing or old, and create=false; run the script "
                "that oncemore.stores.schema(url) returns"
            )
        return feature_statements(self.prefix, feature, since=version)
