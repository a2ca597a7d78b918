"""The SQL of the SQLite ledger: statements for one row and for many; the tables, and the set-up of a connection."""

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

# The machine's clock, as SQLite reads it: all processes on one file share it.  Parameter 1 is the store's shift.
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
    """A statement for any number of rows, each of *width* values: `{0}`, `{1}`, ... in the template; ?1 is common to all.

    Many rows go as one statement, because Python lets other threads run before and after each: a busy event loop would
    delay a batch once per row.  Sizes are rounded up, so that few statements are ever prepared; rows of NULL match
    nothing.  One row alone needs no table of values, which is the faster.
    """

    def __init__(self, template: str, *, width: int, alone: str = "", joined: str = "{values}") -> None:
        self.width = width
        self._template = template
        self._joined = joined
        self.single = template.format(*(f"?{n + 2}" for n in range(width)), source=alone)  # the text for one row
        self._texts = {1: self.single}

    def bind(self, common: float, rows: list[Row]) -> tuple[str, list[Any]]:
        """The statement's text and its parameters."""
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
    """Every statement of the ledger; the names of its tables begin with *prefix*."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        meta, records, archive = f"{prefix}meta", f"{prefix}records", f"{prefix}archive"
        # The records of some ids, with the clock at which they were read.
        self.look = Grouped(
            f"SELECT {COLUMNS} FROM {{source}} WHERE scope = {{0}} AND key = {{1}}",
            width=2,
            alone=records,
            joined=f"{{values}} CROSS JOIN {records}",  # CROSS: the values first, then the index, whatever the statistics
        )
        claimed = "token, scope, key, name, fingerprint, holder, state, attempts, created_at, lease_until, request"
        # New records, at the time that is parameter 1; an id that exists is left out, which the row count shows.
        self.claim = Grouped(
            f"INSERT INTO {records} ({claimed})"
            " SELECT {0}, {1}, {2}, {3}, {4}, {5}, 'running', 1, ?1, ?1 + {6}, {7} {source} WHERE {0} IS NOT NULL"
            " ON CONFLICT (key, scope) DO NOTHING",
            width=8,
            joined="FROM {values}",
        )
        # One new record, with the first token that was never given; none if its id exists, which the row count shows.
        self.claim_one = (
            f"INSERT INTO {records} ({claimed})"
            f" SELECT max(token, coalesce((SELECT max(token) FROM {records}), 0)) + 1, ?2, ?3, ?4, ?5, ?6, 'running', 1,"
            f" {NOW}, {NOW} + ?7, ?8 FROM {meta} WHERE true ON CONFLICT (key, scope) DO NOTHING"
        )
        # Undo a claim, because its caller has gone.  A record that was in doubt stays in doubt; a first
        # attempt is as if it had never been; a later one is released, and remembered for as long as a failure may be.
        mine = "scope = ?2 AND key = ?3 AND holder = ?4 AND state = 'running'"
        self.unclaim = (
            f"UPDATE {records} SET lease_until = {NOW} WHERE {mine} AND lapsed = 1",
            f"DELETE FROM {records} WHERE {mine} AND lapsed = 0 AND attempts = 1",
            f"UPDATE {records} SET state = 'released', expires_at = {NOW} + 86400.0"
            f" WHERE {mine} AND lapsed = 0 AND attempts > 1",
        )
        # Outcomes of leases that still hold; the others are left out, which the row count shows.
        self.settle = Grouped(
            f"UPDATE {records} SET state = 'settled', settled_at = {NOW}, accessed_at = {NOW}, expires_at = {NOW} + {{3}},"
            " status = {4}, outcome = {5}, response_hash = {6}, note = {7}, audit = {8}, request = NULL {source}"
            " WHERE token = {0} AND scope = {1} AND key = {2} AND state = 'running'",
            width=9,
            joined="FROM {values}",
        )
        # The first token that was never given, and the clock.
        self.next_token = f"SELECT max(token, coalesce((SELECT max(token) FROM {records}), 0)) + 1, {NOW} FROM {meta}"
        # A replayed record lives on, where retention counts from the last access.
        self.touch = (
            f"UPDATE {records} SET accessed_at = {NOW}, expires_at = {NOW} + ?2"
            f" WHERE token = ?3 AND scope = ?4 AND key = ?5 AND state = 'settled' AND expires_at > {NOW}"
        )
        self.delete = f"DELETE FROM {records} WHERE token = ?"
        # Keep an expired record, if its rule says so.
        self.archive = f"INSERT INTO {archive} ({ARCHIVED}) SELECT {ARCHIVED} FROM {records} WHERE audit AND token = ?"
        # The purge: the audited records are archived, then all are deleted.  Both at the time that is parameter 1, or a
        # record that expires between the two would be lost.
        expired = f"SELECT token FROM {records} WHERE expires_at <= ?1 ORDER BY expires_at, token LIMIT ?2"
        self.archive_expired = (
            f"INSERT INTO {archive} ({ARCHIVED}) SELECT {ARCHIVED} FROM {records} WHERE audit AND token IN ({expired})"
        )
        self.delete_expired = f"DELETE FROM {records} WHERE token IN ({expired})"
        self.oldest_expired = (
            f"SELECT expires_at, {NOW} FROM {records} WHERE expires_at <= {NOW} ORDER BY expires_at LIMIT 1"
        )
        # The many from the index alone, the few that are unfinished from the table.
        self.stats = (
            f"SELECT state, count(*), 0, sum(state = 'running' AND lease_until <= {NOW})"
            f" FROM {records} WHERE expires_at IS NULL GROUP BY state UNION ALL"
            f" SELECT state, count(*), sum(expires_at <= {NOW}), 0 FROM {records} WHERE expires_at IS NOT NULL GROUP BY state"
            f" UNION ALL SELECT 'archived', count(*), 0, 0 FROM {archive}"
        )
        self._page = f"SELECT {COLUMNS} FROM {records} WHERE token > ?2 AND {{conditions}} ORDER BY token LIMIT ?3"
        # A harmless change, since SQLite writes no page that stays the same: see Connection.
        self.overwrite = f"UPDATE {meta} SET token = token + 1"
        self.lock = f"UPDATE {meta} SET token = token WHERE false"  # a write that writes nothing, but takes the lock
        self._change = f"UPDATE {records} SET {{columns}} WHERE token = ?"

    def change(self, columns: Iterable[str]) -> str:
        """New values for some columns of the record with a token."""
        return self._change.format(columns=", ".join(f"{name} = ?" for name in columns))

    def page(self, where: Filter) -> tuple[str, list[str]]:
        """The records that *where* asks for, by token; and the parameters after the shift, the token and the limit."""
        asked = {"state": where.state, "scope": where.scope, "key": where.key, "name": where.name}
        equal = {name: value for name, value in asked.items() if value is not None}
        conditions = [f"(expires_at IS NULL OR expires_at > {NOW})"]
        conditions += [f"{name} = ?{number}" for number, name in enumerate(equal, start=4)]
        if where.lapsed is not None:
            conditions.append(f"(state = 'running' AND lease_until <= {NOW}) = {where.lapsed:d}")
        if where.lapsed or where.state in (RUNNING, HELD):
            conditions.append("expires_at IS NULL")  # which leads to the small index
        if where.state == RELEASED:
            conditions.append("state = 'released'")  # as the index of these has it: not as a parameter
        return self._page.format(conditions=" AND ".join(conditions)), list(equal.values())


# Kilobytes: enough for the upper levels of a million records' indexes.
CACHE = 8192

# Scripts are only ever added, one for each version of the tables; {p} is the prefix of all names.
FIRST = """\
-- One row.
CREATE TABLE {p}meta (
    token INTEGER NOT NULL  -- is never given again, nor is any lower one
);

-- One row per operation.  All times are seconds since 1970; a state's meaning is in the documentation.
CREATE TABLE {p}records (
    token         INTEGER PRIMARY KEY,       -- grows with every claim, and fences late owners
    scope         TEXT    NOT NULL,          -- who owns the key
    key           TEXT    NOT NULL,          -- the caller's name for the operation
    name          TEXT    NOT NULL,          -- the kind of operation
    fingerprint   TEXT    NOT NULL,          -- digest of what was asked
    state         TEXT    NOT NULL           -- with OR, because IN would build a temporary index at every statement
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
    audit         INTEGER NOT NULL DEFAULT 0, -- 1: archived when it expires, rather than lost
    lapsed        INTEGER NOT NULL DEFAULT 0, -- 1: the claim took over a lapsed lease, so the effect is in doubt
    request       BLOB,                      -- what was asked, if it may have to be finished without its caller
    UNIQUE (key, scope)                      -- keys that grow with time then fill the index from one end
);

-- Tokens never come again, whatever is deleted: a late owner of a former life must stay fenced.
CREATE TRIGGER {p}records_deleted AFTER DELETE ON {p}records WHEN OLD.token > (SELECT token FROM {p}meta)
BEGIN
    UPDATE {p}meta SET token = OLD.token;
END;

-- For the purge, for lists of running and held records (which have no expires_at), and to count.
CREATE INDEX {p}records_expiry ON {p}records (expires_at, state);

-- For schedules and inboxes, which look for the few that failed among the many that did not.
CREATE INDEX {p}records_released ON {p}records (scope) WHERE state = 'released';

-- Expired records of rules that keep them for the audit.
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
    """The whole schema, for users that create it themselves."""
    statements = [statement for feature in (LEDGER, *features()) for statement in feature_statements(prefix, feature)]
    return ";\n\n".join(["PRAGMA journal_mode = WAL", "BEGIN IMMEDIATE", *statements, "COMMIT"]) + ";\n"


# A version for the ledger and for each feature.
MAKE_FEATURES = "CREATE TABLE IF NOT EXISTS {p}features (name TEXT PRIMARY KEY, version INTEGER NOT NULL)"
FIND_FEATURES = "SELECT 1 FROM sqlite_schema WHERE name = '{p}features'"
FEATURE_VERSION = "SELECT version FROM {p}features WHERE name = ?1"


def feature_statements(prefix: str, feature: Feature, *, since: int = 0) -> list[str]:
    """The statements that bring the tables of *feature* from version *since* to the latest."""
    names = {"p": prefix, "prefix": prefix}
    scripts = [statement for text in feature.sqlite[since:] for statement in split(text.format(**names))]
    version = f"INSERT OR REPLACE INTO {prefix}features VALUES ('{feature.name}', {feature.version})"
    return [MAKE_FEATURES.format(**names), *scripts, version]


def split(text: str) -> list[str]:
    """The statements of a script, each without the semicolon at its end."""
    statements, part = [], ""
    for line in text.splitlines(keepends=True):
        part += line
        if line.rstrip().endswith(";") and sqlite3.complete_statement(part):
            statements.append(part.strip().removesuffix(";"))
            part = ""
    return [*statements, part.strip()] if part.strip() else statements


def make_ready(connection: sqlite3.Connection, *, tables: TableMaker, pragmas: Mapping[str, object]) -> None:
    """Set up a new connection, and make or migrate the ledger's tables if they are not as this version needs them."""
    [(mode,)] = connection.execute("PRAGMA journal_mode = WAL")
    if tables.path != MEMORY and mode != "wal":
        raise ConfigurationError(
            f"{tables.path}: SQLite cannot keep a log here (mode {mode}); put the file on a local disk"
        )
    for name, value in {**pragmas, "cache_size": -CACHE}.items():
        connection.execute(f"PRAGMA {name} = {value}")
    tables.make(connection, LEDGER)


class TableMaker:
    """Makes the tables in the file at *path*, whose names begin with *prefix*; with *create* false, they must be there."""

    def __init__(self, path: str, prefix: str, *, create: bool) -> None:
        self.path = path
        self.create = create
        self.prefix = prefix
        self.exist = FIND_FEATURES.format(p=prefix)  # any tables; a row comes back if they do
        self.version = FEATURE_VERSION.format(p=prefix)

    def make(self, connection: sqlite3.Connection, feature: Feature) -> None:
        """Bring the tables of *feature* to the latest version, in one transaction."""
        if self._missing_now(connection, feature):
            connection.execute("BEGIN IMMEDIATE")
            for text in self._missing_now(connection, feature):  # again: another process may just have done it
                connection.execute(text)
            connection.execute("COMMIT")

    def _missing_now(self, connection: sqlite3.Connection, feature: Feature) -> list[str]:
        rows = connection.execute(self.exist).fetchall()
        if rows:
            rows = connection.execute(self.version, (feature.name,)).fetchall()
        return self.missing(feature, rows)

    def missing(self, feature: Feature, rows: Rows) -> list[str]:
        """The statements that bring the tables from the version in *rows* to the latest."""
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
                f"{self.path}: the tables of the {feature.name} are missing or old, and create=false; run the script from "
                "oncemore.stores.schema(url)"
            )
        return feature_statements(self.prefix, feature, since=version)
