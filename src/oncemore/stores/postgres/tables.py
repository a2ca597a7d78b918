"""The tables of the PostgreSQL store: scripts that are applied in order, each of which takes the schema one version on."""

from __future__ import annotations

import re

from ..._ledger.tables import Feature
from ...errors import ConfigurationError

SCHEMA = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
PREFIX = re.compile(r"([a-z_][a-z0-9_]*)?", re.ASCII)
# PostgreSQL cuts names off at 63 bytes without an error, and an index's name is its table's and more.
LONGEST = 40

FIRST = """\
-- The ledger: one row per operation.
--
-- Rights that the application needs: USAGE on the schema; SELECT, INSERT, UPDATE and DELETE on {records} and
-- {archive}; SELECT on {version}; USAGE on the sequence.
--
-- Each operation is one INSERT (the claim) and one UPDATE (its outcome), so half of all row versions die young.
-- No CHECK: PostgreSQL reads it anew for every statement, which takes as long as the rest of a claim.
-- Renewing a lease changes no indexed column (a HOT update), and the fillfactor leaves room for it and for the outcome
-- on the same page.  Vacuum runs earlier than by default, so that the dead versions do not pile up.  Outcomes above
-- 2 kB are compressed and moved out of line (TOAST); where the server has it, lz4 is cheaper than the default:
--     ALTER TABLE {records} ALTER COLUMN outcome SET COMPRESSION lz4;
CREATE TABLE IF NOT EXISTS {records} (
    scope          text COLLATE "C" NOT NULL,  -- who owns the key
    key            text COLLATE "C" NOT NULL,  -- the caller's name for the operation
    name           text NOT NULL,              -- the kind of operation
    fingerprint    text COLLATE "C" NOT NULL,  -- digest of what was asked
    state          text NOT NULL,              -- running, settled (has an outcome), released (failed), held (unknown)
    token          bigint NOT NULL,            -- grows with every claim; a late owner's no longer fits
    holder         text NOT NULL,              -- host:process:number of the latest claim
    attempts       integer NOT NULL,
    created_at     timestamptz NOT NULL,
    lease_until    timestamptz NOT NULL,       -- running: others may claim it from then on
    settled_at     timestamptz,
    expires_at     timestamptz,                -- settled and released: as good as gone from then on; others: NULL
    accessed_at    timestamptz,
    status         integer,                    -- HTTP status of the outcome, or 0
    outcome        bytea,                      -- MessagePack: kind, status, headers, body
    response_hash  text NOT NULL DEFAULT '',   -- SHA-256 of the body
    note           text NOT NULL DEFAULT '',
    audit          boolean NOT NULL DEFAULT false,  -- goes to the archive when it expires
    lapsed         boolean NOT NULL DEFAULT false,  -- the latest claim took over from a holder that vanished
    watched        boolean NOT NULL DEFAULT false,  -- another process waits: send a message when it is done
    request        bytea,                      -- the request of an operation that may be finished without its caller
    PRIMARY KEY (scope, key)
) WITH (
    fillfactor = 80,
    autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000,
    autovacuum_analyze_scale_factor = 0.05, autovacuum_analyze_threshold = 1000
);

-- For the purge; and, as those without an expiry, the running and held records.
-- Not IF NOT EXISTS: that locks the table before it looks, and all writers wait if another transaction is open.
DO $$ BEGIN IF to_regclass('{schema}.{prefix}records_expires_at') IS NULL THEN
    CREATE INDEX {prefix}records_expires_at ON {records} (expires_at);
END IF; END $$;

-- For schedules and inboxes, which look for the few that failed among the many that did not.
DO $$ BEGIN IF to_regclass('{schema}.{prefix}records_released') IS NULL THEN
    CREATE INDEX {prefix}records_released ON {records} (scope, key) WHERE state = 'released';
END IF; END $$;

-- Tokens: never reset it, or a late owner of an earlier operation might pass for the current one.
CREATE SEQUENCE IF NOT EXISTS {tokens} AS bigint CACHE 1 NO CYCLE;

-- Expired records that their rule keeps for the audit.  Nothing here is ever read or deleted by oncemore.
CREATE TABLE IF NOT EXISTS {archive} (
    scope          text COLLATE "C" NOT NULL,
    key            text COLLATE "C" NOT NULL,
    token          bigint NOT NULL,
    name           text NOT NULL,
    fingerprint    text COLLATE "C" NOT NULL,
    state          text NOT NULL,
    holder         text NOT NULL,
    attempts       integer NOT NULL,
    created_at     timestamptz NOT NULL,
    settled_at     timestamptz,
    expires_at     timestamptz,
    accessed_at    timestamptz,
    status         integer,
    outcome        bytea,
    response_hash  text NOT NULL,
    note           text NOT NULL,
    archived_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (scope, key, token)
);
"""

# Scripts are only ever added.  Each must leave a schema that the release before it can still work with, because
# during a deployment both are at work.
SCRIPTS = (FIRST,)

MAKE_SCHEMA = """\
-- Not IF NOT EXISTS: that needs the right to create schemas even where there is nothing to create.
DO $$ BEGIN IF to_regnamespace('{schema}') IS NULL THEN CREATE SCHEMA {schema}; END IF; END $$;
"""

MAKE_VERSION = """\
CREATE TABLE IF NOT EXISTS {version} (
    one      boolean PRIMARY KEY DEFAULT true CHECK (one),
    version  integer NOT NULL
);
INSERT INTO {version} (version) VALUES (0) ON CONFLICT DO NOTHING;
"""

SET_VERSION = "UPDATE {version} SET version = {number};\n"

# One process at a time changes the schema, however long the others have to wait.
BEGIN = (
    "BEGIN ISOLATION LEVEL READ COMMITTED",
    "SET LOCAL lock_timeout = 0",
    "SET LOCAL statement_timeout = 0",
    "SELECT pg_advisory_xact_lock(hashtextextended('oncemore {schema}.{prefix}', 0))",
)


def names(schema: str, prefix: str) -> dict[str, str]:
    """The values of the placeholders in scripts and statements."""
    for option, word, pattern in (("schema", schema, SCHEMA), ("prefix", prefix, PREFIX)):
        if not pattern.fullmatch(word) or len(word) > LONGEST:
            raise ConfigurationError(
                f"{option}={word} in the store's URL: write at most {LONGEST} letters, digits and _, not a digit first"
                + (", all in lower case" if option == "prefix" else "")
            )
    schema = f'"{schema}"'  # it may be in upper case, or a word that SQL has reserved
    tables = {name: f"{schema}.{prefix}{name}" for name in ("records", "archive", "version", "tokens", "features")}
    return {"schema": schema, "prefix": prefix, "p": f"{schema}.{prefix}", **tables}


# The tables of features: a version for each, apart from that of the ledger.
MAKE_FEATURES = """\
CREATE TABLE IF NOT EXISTS {features} (
    name     text PRIMARY KEY,
    version  integer NOT NULL
);
"""
SET_FEATURE = """\
INSERT INTO {features} (name, version) VALUES ('{name}', {number})
ON CONFLICT (name) DO UPDATE SET version = excluded.version;
"""
FEATURE_VERSION = "SELECT version FROM {features} WHERE name = $1"
LOCK = """\
PERFORM set_config('lock_timeout', '0', true), set_config('statement_timeout', '0', true);
PERFORM pg_advisory_xact_lock(hashtextextended('oncemore {schema}.{prefix}', 0));
"""


def feature_script(names: dict[str, str], feature: Feature) -> str:
    """The statements that create the tables of *feature*."""
    parts = [MAKE_FEATURES, *feature.postgres, SET_FEATURE]
    return "\n".join(part.format(**names, name=feature.name, number=feature.version) for part in parts)


def feature_block(names: dict[str, str], feature: Feature) -> str:
    """One statement that brings the tables of *feature* to the latest version, one process at a time."""
    parts = [LOCK, MAKE_FEATURES]
    for number, part in enumerate(feature.postgres, 1):
        known = f"(SELECT version FROM {names['features']} WHERE name = '{feature.name}')"
        parts.append(f"IF coalesce({known}, 0) < {number} THEN\n{part}\nEND IF;\n")
    text = "\n".join([*parts, SET_FEATURE]).format(**names, name=feature.name, number=feature.version)
    return f"DO $oncemore$ BEGIN\n{text}END $oncemore$"


def script(names: dict[str, str], *, since: int = 0) -> str:
    """The statements that take the schema from version *since* to the latest; from 0, they create everything."""
    parts = [MAKE_SCHEMA, MAKE_VERSION] if since == 0 else []
    parts += SCRIPTS[since:]
    return "\n".join(part.format(**names) for part in parts) + SET_VERSION.format(**names, number=len(SCRIPTS))


def block(names: dict[str, str], *, since: int) -> str:
    """The same script as one statement, because a pipeline takes no others; it must contain no line of `$oncemore$`."""
    return f"DO $oncemore$ BEGIN\n{script(names, since=since)}END $oncemore$"
