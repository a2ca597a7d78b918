"""The service's tables, for SQLite and PostgreSQL.  Times are seconds since 1970."""

from __future__ import annotations

TABLES = (
    """CREATE TABLE IF NOT EXISTS users (
        id text PRIMARY KEY,
        phone text UNIQUE,
        display_name text NOT NULL DEFAULT '',
        bio text NOT NULL DEFAULT '',
        timezone text NOT NULL DEFAULT 'UTC'
    )""",
    "CREATE TABLE IF NOT EXISTS sessions (id text PRIMARY KEY, user_id text NOT NULL, revoked integer NOT NULL DEFAULT 0)",
    # Tokens are stored as digests: a copy of the database signs nobody in.
    """CREATE TABLE IF NOT EXISTS tokens (
        digest text PRIMARY KEY,
        session_id text NOT NULL,
        kind text NOT NULL CHECK (kind IN ('access', 'refresh'))
    )""",
    """CREATE TABLE IF NOT EXISTS codes (
        number {number},
        request_id text NOT NULL UNIQUE,
        phone text NOT NULL,
        code text NOT NULL,
        status text NOT NULL DEFAULT 'sent' CHECK (status IN ('sent', 'used')),
        expires_at double precision NOT NULL
    )""",
    """CREATE TABLE IF NOT EXISTS photos (
        number {number},
        id text NOT NULL UNIQUE,
        user_id text NOT NULL,
        url text NOT NULL,
        sha256 text NOT NULL,
        UNIQUE (user_id, sha256)
    )""",
    """CREATE TABLE IF NOT EXISTS responses (
        user_id text NOT NULL,
        question text NOT NULL,
        answer text NOT NULL,
        PRIMARY KEY (user_id, question)
    )""",
    """CREATE TABLE IF NOT EXISTS verifications (
        id text PRIMARY KEY,
        user_id text NOT NULL,
        kind text NOT NULL,
        expires_at double precision NOT NULL
    )""",
    """CREATE TABLE IF NOT EXISTS offers (
        number {number},
        id text NOT NULL UNIQUE,
        user_id text NOT NULL,
        candidate_id text NOT NULL CHECK (candidate_id <> user_id),
        date text NOT NULL,
        status text NOT NULL DEFAULT 'offered'
            CHECK (status IN ('offered', 'accepted', 'passed', 'not_now', 'matched')),
        match_id text,
        CHECK ((status = 'matched') = (match_id IS NOT NULL))
    )""",
    "CREATE INDEX IF NOT EXISTS offers_of_a_pair ON offers (user_id, candidate_id)",
    # One set of daily offers for each user and local date, even if the user moves to another time zone.
    """CREATE TABLE IF NOT EXISTS offer_days (
        user_id text NOT NULL,
        date text NOT NULL,
        slot text NOT NULL,
        offers text NOT NULL,
        PRIMARY KEY (user_id, date)
    )""",
    """CREATE TABLE IF NOT EXISTS matches (
        number {number},
        id text NOT NULL UNIQUE,
        first_user text NOT NULL,
        second_user text NOT NULL CHECK (second_user > first_user),
        status text NOT NULL DEFAULT 'open' CHECK (status IN ('open', 'closed')),
        reason text,
        CHECK ((status = 'closed') = (reason IS NOT NULL))
    )""",
    # One open match for each pair: the last line of defence.
    "CREATE UNIQUE INDEX IF NOT EXISTS one_open_match ON matches (first_user, second_user) WHERE status = 'open'",
    """CREATE TABLE IF NOT EXISTS messages (
        number {number},
        id text NOT NULL UNIQUE,
        match_id text NOT NULL,
        sender_id text NOT NULL,
        content text NOT NULL,
        client_message_id text NOT NULL,
        created_at double precision NOT NULL
    )""",
    "CREATE INDEX IF NOT EXISTS messages_of_a_match ON messages (match_id, number)",
    """CREATE TABLE IF NOT EXISTS reads (
        match_id text NOT NULL,
        user_id text NOT NULL,
        number bigint NOT NULL,
        message_id text NOT NULL,
        PRIMARY KEY (match_id, user_id)
    )""",
    """CREATE TABLE IF NOT EXISTS reports (
        id text PRIMARY KEY,
        reporter_id text NOT NULL,
        subject_id text NOT NULL,
        category text NOT NULL,
        text text NOT NULL
    )""",
    """CREATE TABLE IF NOT EXISTS blocks (
        user_id text NOT NULL,
        subject_id text NOT NULL,
        PRIMARY KEY (user_id, subject_id)
    )""",
    """CREATE TABLE IF NOT EXISTS appeals (
        id text PRIMARY KEY,
        user_id text NOT NULL,
        decision_id text NOT NULL,
        text text NOT NULL
    )""",
    # For tests: the effects that have happened, in the order of the commits.
    "CREATE TABLE IF NOT EXISTS effects (number {number}, kind text NOT NULL, user_id text, ref text NOT NULL)",
)
TABLES_LOCK = 7_263_802  # the advisory lock for processes that start at the same time
EFFECTS_LOCK = (
    7_263_803  # held while a transaction writes effects, so that their numbers are in the order of the commits
)
PAIRS_LOCK = 7_263_804  # used together with the hash of a pair of users
