"""The tables of the SQLite ledger, and the set-up of a new connection."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

from ..._ledger.tables import Feature, features
from ...errors import ConfigurationError
from .statements import SqliteStatements
from .writer import MEMORY

# Kilobytes: enough for the upper levels of a million records' indexes.
CACHE = 8192

# One list of statements per version of the schema; {p} is the prefix of all names.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """\
-- One row.
CREATE TABLE {p}meta (
    version INTEGER NOT NULL,  -- of this schema
    token   INTEGER NOT NULL   -- is never given again, nor is any lower one
)""",
        """\
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
)""",
        """\
-- Tokens never come again, whatever is deleted: a late owner of a former life must stay fenced.
CREATE TRIGGER {p}records_deleted AFTER DELETE ON {p}records WHEN OLD.token > (SELECT token FROM {p}meta)
BEGIN
    UPDATE {p}meta SET token = OLD.token;
END""",
        "-- For the purge, for lists of running and held records (which have no expires_at), and to count.\n"
        "CREATE INDEX {p}records_expiry ON {p}records (expires_at, state)",
        "-- For schedules and inboxes, which look for the few that failed among the many that did not.\n"
        "CREATE INDEX {p}records_released ON {p}records (scope) WHERE state = 'released'",
        """\
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
)""",
        "INSERT INTO {p}meta (version, token) VALUES (0, 0)",
    ),
)


def script(prefix: str) -> str:
    """The whole schema, for users that create it themselves."""
    statements = [statement.format(p=prefix) for migration in MIGRATIONS for statement in migration]
    version = f"UPDATE {prefix}meta SET version = {len(MIGRATIONS)}"
    more = [statement for feature in features() for statement in feature_statements(prefix, feature)]
    return ";\n\n".join(["PRAGMA journal_mode = WAL", "BEGIN IMMEDIATE", *statements, version, *more, "COMMIT"]) + ";\n"


# The tables of features: a version for each, apart from that of the ledger.
MAKE_FEATURES = "CREATE TABLE IF NOT EXISTS {p}features (name TEXT PRIMARY KEY, version INTEGER NOT NULL)"


def feature_statements(prefix: str, feature: Feature, *, since: int = 0) -> list[str]:
    """The statements that bring the tables of *feature* from version *since* to the latest."""
    names = {"p": prefix, "prefix": prefix}
    scripts = [statement for text in feature.sqlite[since:] for statement in split(text.format(**names))]
    version = f"INSERT OR REPLACE INTO {prefix}features VALUES ('{feature.name}', {len(feature.sqlite)})"
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


def make_ready(
    connection: sqlite3.Connection, *, sql: SqliteStatements, create: bool, pragmas: Mapping[str, object], path: str
) -> None:
    """Set up a new connection, and make or migrate the tables if they are not as this version needs them."""
    [(mode,)] = connection.execute("PRAGMA journal_mode = WAL")
    if path != MEMORY and mode != "wal":
        raise ConfigurationError(f"{path}: SQLite cannot keep a log here (mode {mode}); put the file on a local disk")
    for name, value in {**pragmas, "cache_size": -CACHE}.items():
        connection.execute(f"PRAGMA {name} = {value}")
    if schema_version(connection, sql, path) < len(MIGRATIONS):
        if not create:
            raise ConfigurationError(
                f"{path}: the tables are missing or old, and create=false; run the script from oncemore.stores.schema(url)"
            )
        migrate(connection, sql, path)


def migrate(connection: sqlite3.Connection, sql: SqliteStatements, path: str) -> None:
    """Bring the tables to this version, in one transaction."""
    connection.execute("BEGIN IMMEDIATE")
    version = schema_version(connection, sql, path)  # again: another process may just have done it
    for migration in MIGRATIONS[version:]:
        for statement in migration:
            connection.execute(statement.format(p=sql.prefix))
    connection.execute(sql.set_version, (len(MIGRATIONS),))
    connection.execute("COMMIT")


def schema_version(connection: sqlite3.Connection, sql: SqliteStatements, path: str) -> int:
    """The version of the tables: 0 if there are none, and never one that is unknown here."""
    exists = connection.execute("SELECT 1 FROM sqlite_schema WHERE name = ?", (f"{sql.prefix}meta",)).fetchall()
    [(version,)] = connection.execute(sql.version) if exists else [(0,)]
    if version > len(MIGRATIONS):
        raise ConfigurationError(f"{path}: its tables are of version {version}, newer than this oncemore; upgrade it")
    return int(version)
