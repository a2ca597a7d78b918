"""The tables of the PostgreSQL store, both the ledger's and those of features: how they are created and migrated."""

from __future__ import annotations

import re

from ..._ledger.tables import Feature, features
from ...errors import ConfigurationError

SCHEMA = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
PREFIX = re.compile(r"([a-z_][a-z0-9_]*)?", re.ASCII)
LONGEST = 40  # characters; PostgreSQL cuts off names at 63 bytes without an error, and names of indexes are longer

FIRST = """\
-- The ledger: one row per operation.
--
-- Rights that the application needs: USAGE on the schema; SELECT, INSERT, UPDATE and DELETE on {records} and
-- {archive}; SELECT on {features}; USAGE on the sequence.
--
-- Each operation is one INSERT (the claim) and one UPDATE (its outcome), so half of all row versions die young.
-- No CHECK: PostgreSQL reads it anew for every statement, which takes as long as the rest of a claim.
-- Renewing a lease changes no indexed column (a HOT update), and the fillfactor leaves room for it and for the outcome
-- on the same page.  Vacuum runs earlier than by default, so that the dead versions do not pile up.  Outcomes above
-- 2 kB are compressed and moved out of line (TOAST); where the server has it, lz4 is cheaper than the default:
--     ALTER TABLE {records} ALTER COLUMN outcome SET COMPRESSION lz4;
CREATE TABLE IF NOT EXISTS {records} (
    scope          text COLLATE "C" NOT NULL,  -- the owner of the key
    key            text COLLATE "C" NOT NULL,  -- the caller's name for the operation
    name           text NOT NULL,              -- the kind of operation
    fingerprint    text COLLATE "C" NOT NULL,  -- digest of the request
    state          text NOT NULL,              -- running, settled (has an outcome), released (failed), held (unknown)
    token          bigint NOT NULL,            -- grows with every claim, and fences late owners
    holder         text NOT NULL,              -- host:process:number of the latest claim
    attempts       integer NOT NULL,
    created_at     timestamptz NOT NULL,
    lease_until    timestamptz NOT NULL,       -- if running: others may claim the record from then on
    settled_at     timestamptz,
    expires_at     timestamptz,                -- settled and released: absent from then on; others: NULL
    accessed_at    timestamptz,
    status         integer,                    -- HTTP status of the outcome, or 0
    outcome        bytea,                      -- MessagePack: kind, status, headers, body
    response_hash  text NOT NULL DEFAULT '',   -- SHA-256 of the body
    note           text NOT NULL DEFAULT '',
    audit          boolean NOT NULL DEFAULT false,  -- goes to the archive when it expires
    lapsed         boolean NOT NULL DEFAULT false,  -- the latest claim took over a lapsed lease
    watched        boolean NOT NULL DEFAULT false,  -- another process waits, so send a message at the next change
    request        bytea,                      -- the request, if the operation may be finished without its caller
    PRIMARY KEY (scope, key)
) WITH (
    fillfactor = 80,
    autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000,
    autovacuum_analyze_scale_factor = 0.05, autovacuum_analyze_threshold = 1000
);

-- For the purge, and for lists of running and held records, which have no expires_at.
-- Not IF NOT EXISTS: it locks the table before it looks, and all writers would wait while another transaction is open.
DO $$ BEGIN IF to_regclass('{schema}.{prefix}records_expires_at') IS NULL THEN
    CREATE INDEX {prefix}records_expires_at ON {records} (expires_at);
END IF; END $$;

-- For schedules and inboxes, which look for the few released records among many settled ones.
DO $$ BEGIN IF to_regclass('{schema}.{prefix}records_released') IS NULL THEN
    CREATE INDEX {prefix}records_released ON {records} (scope, key) WHERE state = 'released';
END IF; END $$;

-- The source of tokens.  Never reset it, because a late owner could then have the token of the current one.
CREATE SEQUENCE IF NOT EXISTS {tokens} AS bigint CACHE 1 NO CYCLE;

-- Expired records whose rule keeps them for the audit.  oncemore counts these rows, but never deletes them.
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

# Scripts are only ever added.  The previous release must still work with the tables after each script, because during
# a deployment both releases run.
LEDGER = Feature("ledger", FIRST)

# The table `features` has the version of the tables of the ledger and of each feature.
MAKE_FEATURES = """\
-- Not IF NOT EXISTS: it needs the right to create schemas even if the schema exists.
DO $$ BEGIN IF to_regnamespace('{schema}') IS NULL THEN CREATE SCHEMA {schema}; END IF; END $$;

CREATE TABLE IF NOT EXISTS {features} (
    name     text PRIMARY KEY,
    version  integer NOT NULL
);
"""

# The version never goes back: an older process may have waited while a newer release migrated the tables.
SET_VERSION = """\
INSERT INTO {features} AS known (name, version) VALUES ('{name}', {number})
ON CONFLICT (name) DO UPDATE SET version = greatest(known.version, excluded.version);
"""

# One process at a time changes the tables; the others wait without a time limit.
BEGIN = (
    "BEGIN ISOLATION LEVEL READ COMMITTED",
    "SET LOCAL lock_timeout = 0",
    "SET LOCAL statement_timeout = 0",
    "SELECT pg_advisory_xact_lock(hashtextextended('oncemore {schema}.{prefix}', 0))",
)


def names(schema: str, prefix: str) -> dict[str, str]:
    """Return the values of the placeholders in scripts and statements."""
    for option, word, pattern in (("schema", schema, SCHEMA), ("prefix", prefix, PREFIX)):
        if not pattern.fullmatch(word) or len(word) > LONGEST:
            raise ConfigurationError(
                f"{option}={word} in the store's URL: write at most {LONGEST} letters, digits and _, not a digit first"
                + (", all in lower case" if option == "prefix" else "")
            )
    schema = f'"{schema}"'  # quoted, because it may be in upper case or a reserved word of SQL
    tables = {name: f"{schema}.{prefix}{name}" for name in ("records", "archive", "tokens", "features")}
    return {"schema": schema, "prefix": prefix, "p": f"{schema}.{prefix}", **tables}


def script(names: dict[str, str]) -> str:
    """Return the script that creates all tables."""
    parts = [MAKE_FEATURES.format(**names)]
    for feature in (LEDGER, *features()):
        parts += [part.format(**names) for part in feature.postgres]
        parts.append(set_version(names, feature))
    return "\n".join(parts)


def set_version(names: dict[str, str], feature: Feature) -> str:
    return SET_VERSION.format(**names, name=feature.name, number=feature.version)


def block(names: dict[str, str], feature: Feature) -> str:
    """Return one statement that brings the tables of *feature* to the latest version.

    A pipeline takes no scripts.  Precondition: the feature's scripts do not contain `$oncemore$`.
    """
    known = f"coalesce((SELECT version FROM {names['features']} WHERE name = '{feature.name}'), 0)"
    parts = [MAKE_FEATURES.format(**names)]
    for number, part in enumerate(feature.postgres, 1):
        parts.append(f"IF {known} < {number} THEN\n{part.format(**names)}\nEND IF;")
    text = "\n".join([*parts, set_version(names, feature)])
    return f"DO $oncemore$ BEGIN\n{text}END $oncemore$"
