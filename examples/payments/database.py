"""The service's tables."""

from __future__ import annotations

# PostgreSQL always checks REFERENCES; SQLite does not on the guard's connections, which leave the check off.
TABLES = (
    """CREATE TABLE IF NOT EXISTS customers (
        id text PRIMARY KEY, name text NOT NULL DEFAULT '', email text NOT NULL DEFAULT '', version bigint NOT NULL DEFAULT 1
    )""",
    """CREATE TABLE IF NOT EXISTS payments (
        id text PRIMARY KEY,
        order_id text NOT NULL,
        customer_id text NOT NULL REFERENCES customers (id) DEFERRABLE INITIALLY DEFERRED,
        amount bigint NOT NULL CHECK (amount > 0),
        currency text NOT NULL CHECK (length(currency) = 3),
        status text NOT NULL DEFAULT 'authorized' CHECK (status IN ('authorized', 'capturing', 'captured', 'voided')),
        charge_id text UNIQUE,
        refunded bigint NOT NULL DEFAULT 0 CHECK (refunded BETWEEN 0 AND amount),
        CHECK (refunded = 0 OR status = 'captured'),
        CHECK ((status = 'captured') = (charge_id IS NOT NULL))
    )""",
    # One successful payment per order, even under different keys: the last line of defence.
    "CREATE UNIQUE INDEX IF NOT EXISTS one_payment_per_order ON payments (order_id) WHERE status <> 'voided'",
    """CREATE TABLE IF NOT EXISTS refunds (
        id text PRIMARY KEY,
        payment_id text NOT NULL REFERENCES payments (id),
        amount bigint NOT NULL CHECK (amount > 0),
        currency text NOT NULL,
        status text NOT NULL DEFAULT 'pending' CHECK (status IN ('pending', 'succeeded', 'failed')),
        payout_id text UNIQUE,
        settled bigint NOT NULL DEFAULT 0,
        CHECK ((status = 'succeeded') = (payout_id IS NOT NULL))
    )""",
    # Double entry with both sides in one row, so that entries always balance.
    """CREATE TABLE IF NOT EXISTS entries (
        number {number},
        kind text NOT NULL CHECK (kind IN ('capture', 'refund', 'settlement')),
        reference text NOT NULL,
        debit text NOT NULL,
        credit text NOT NULL CHECK (credit <> debit),
        amount bigint NOT NULL CHECK (amount > 0),
        currency text NOT NULL
    )""",
    "CREATE UNIQUE INDEX IF NOT EXISTS booked_once ON entries (kind, reference) WHERE kind <> 'settlement'",
)
TABLES_LOCK = 7_263_801  # the advisory lock for processes that start at the same time
