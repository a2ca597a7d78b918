"""The PostgreSQL store's tables: how they are created, checked and migrated, and which indexes are used."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg import sql

from oncemore._ledger.model import Lease, Operation
from oncemore._ledger.store import Filter
from oncemore._ledger.tables import Feature
from oncemore._runtime.plan import run
from oncemore.errors import (
    ConfigurationError,
)
from oncemore.stores import connect, schema
from oncemore.stores.postgres import PostgresStore, tables
from oncemore.stores.postgres.statements import LOOK_UP
from oncemore.testing.stores import DONE, LEASE, RETENTION

from .parts import same, until

# Speed of look-ups


@pytest.mark.parametrize("rows", [0, 2, 40, 3000])
def test_kept_plans_look_rows_up_by_key(store: PostgresStore, server: psycopg.Connection[Any], rows: int) -> None:
    """A plan that reads the whole table is fast while the table is small, and very slow when it has grown."""
    run(store.stats())
    names = store.database.names
    fill(server, names, rows)
    server.execute(f"ANALYZE {names['records']}")
    server.execute(f"SELECT set_config(name, value, false) FROM (VALUES {LOOK_UP.lstrip(', ')}) AS s (name, value)")
    known = store.database.sql
    several = "'[]', 0"
    statements = {
        known.claim: f"{several}, NULL",
        known.change: f"{several}, '{{}}'",
        known.unclaim: several,
        known.find: several,
        known.touch: several,
        known.watch: several,
    }
    for statement, values in statements.items():
        plan = explain(server, statement.text, values)
        assert plan.count(" on oncemore_records_pkey ") == plan.count("Index Scan on"), plan
        assert plan.count("Bitmap Heap Scan") == plan.count("Scan on oncemore_records ") == 1, plan


def explain(server: psycopg.Connection[Any], text: str, values: str) -> str:
    server.execute(f"PREPARE p AS {text}")
    plan = "\n".join(row[0] for row in server.execute(f"EXPLAIN EXECUTE p({values})").fetchall())
    server.execute("DEALLOCATE p")
    return plan


def test_purge_and_list_use_their_index(store: PostgresStore, server: psycopg.Connection[Any]) -> None:
    run(store.stats())
    names = store.database.names
    fill(server, names, 3000)
    server.execute(f"ANALYZE {names['records']}")
    plan = explain(server, store.database.sql.purge.text, "0, 100")
    assert "records_expires_at" in plan
    assert "Seq Scan" not in plan
    listing, _ = store.database.sql.list(Filter(state="held"), None, limit=10, shift=0.0)
    assert "records_expires_at" in explain(server, listing.text, "0, 'held', 10")
    listing, _ = store.database.sql.list(Filter(scope="a", state="released"), None, limit=10, shift=0.0)
    assert "records_released" in explain(server, listing.text, "0, 'a', 'released', 10")


def fill(server: psycopg.Connection[Any], names: dict[str, str], rows: int) -> None:
    server.execute(
        f"""INSERT INTO {names["records"]} (scope, key, name, fingerprint, state, token, holder, attempts, created_at,
                lease_until, expires_at)
            SELECT 'user:' || mod(n, 50), md5(n::text), 'name', 'fp', 'settled', n, 'holder', 1, now(), now(),
                now() + n * interval '1 minute' FROM generate_series(1, %s) AS n""",
        [rows],
    )


def test_renewing_a_lease_changes_no_index(store: PostgresStore, server: psycopg.Connection[Any]) -> None:
    lease = run(store.claim(Operation("s", "k"), lease=LEASE))
    for _ in range(5):
        run(store.renew(lease, lease=LEASE))
    store.close()  # a server process that ends reports what it has done
    counts = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_all_tables WHERE relid = %s::regclass"
    assert until(lambda: server.execute(counts, [store.database.names["records"]]).fetchone() == (5, 5))


# The schema


def test_schema_script_creates_the_tables(url: str, server: psycopg.Connection[Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"oncemore\.stores\.schema\(url\)"):
        run(PostgresStore(f"{url}&create=false").stats())
    server.execute(schema(url))
    server.execute(schema(url))  # also where it is there already
    store = PostgresStore(f"{url}&create=false")
    assert isinstance(run(store.claim(Operation("s", "k"), lease=LEASE)), Lease)
    store.close()


def test_names_can_be_chosen(url: str, server: psycopg.Connection[Any], postgres_schema: str) -> None:
    store = connect(f"{url}&prefix=my_")
    run(store.stats())
    store.close()
    found = server.execute("SELECT to_regclass(%s)::text", [f"{postgres_schema}.my_records"]).fetchone()
    assert found != (None,)


@pytest.mark.parametrize("query", ["schema=a-b", "schema=", 'schema="', "prefix=A", "prefix=1a", "prefix=" + "x" * 41])
def test_invalid_names_are_refused(query: str) -> None:
    with pytest.raises(ConfigurationError, match=query.partition("=")[0]):
        connect(f"postgresql://localhost/?{query}")


@pytest.mark.parametrize("query", ["nonsense=1", "timeout=0", "poll=0", "pool=0", "timeout=soon", "create=maybe"])
def test_invalid_options_are_refused(query: str) -> None:
    with pytest.raises(ConfigurationError, match=query.partition("=")[0]):
        connect(f"postgresql://localhost/?{query}")


def test_password_with_stray_percent_sign_is_not_shown() -> None:
    with pytest.raises(ConfigurationError, match="write it as %25") as told:
        connect("postgresql://user:secret%zz1@localhost/db")
    assert "secret" not in str(told.value)


def test_no_password_is_shown() -> None:
    store = connect("postgresql://user:secret1@localhost/db?password=secret2&sslpassword=secret3&poll=2s")
    assert store.url == "postgresql://user:***@localhost/db?password=***&sslpassword=***&poll=2s"
    assert store.poll == 2.0


def test_missing_right_to_create_names_the_script(
    postgres_url: str, server: psycopg.Connection[Any], postgres_schema: str
) -> None:
    role, password = f"r{postgres_schema}", secrets.token_hex(8)
    server.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(sql.Identifier(role), sql.Literal(password)))
    try:
        poor = psycopg.conninfo.conninfo_to_dict(postgres_url)
        url = f"postgresql://{role}:{password}@{poor['host']}:{poor['port']}/{poor['dbname']}?schema={postgres_schema}"
        store = PostgresStore(url)
        with pytest.raises(ConfigurationError, match=r"permission denied.*oncemore\.stores\.schema\(url\)"):
            run(store.claim(Operation("s", "k"), lease=LEASE))
        server.execute(schema(url))
        with pytest.raises(ConfigurationError, match="permission denied"):
            run(store.claim(Operation("s", "k"), lease=LEASE))
        names = tables.names(postgres_schema, "oncemore_")
        server.execute(f"""
            GRANT USAGE ON SCHEMA {names["schema"]} TO {role};
            GRANT SELECT, INSERT, UPDATE, DELETE ON {names["records"]}, {names["archive"]} TO {role};
            GRANT SELECT ON {names["features"]} TO {role};
            GRANT USAGE ON SEQUENCE {names["tokens"]} TO {role}""")
        lease = run(store.claim(Operation("s", "k"), lease=LEASE))  # what the script lists is enough
        run(store.settle(lease, DONE, retention=RETENTION, audit=True))
        store.shift += RETENTION + 1
        assert run(store.purge()) == 1
        assert run(store.stats()).archived == 1
        store.close()
    finally:
        server.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(role)))


def test_missing_table_is_named(store: PostgresStore, server: psycopg.Connection[Any]) -> None:
    run(store.claim(Operation("s", "k"), lease=LEASE))
    server.execute(f"DROP TABLE {store.database.names['records']}")
    for verb in (store.claim(Operation("s", "k"), lease=LEASE), store.stats(), store.find("s", "k")):
        with pytest.raises(ConfigurationError, match=r"oncemore_records.*oncemore\.stores\.schema\(url\)"):
            run(verb)


def test_statement_is_prepared_again_after_a_migration(store: PostgresStore, server: psycopg.Connection[Any]) -> None:
    """The server refuses the kept plans once, and no caller notices."""
    run(store.claim(Operation("s", "k"), lease=LEASE))
    assert run(store.find("s", "k")) is not None
    server.execute(f"ALTER TABLE {store.database.names['records']} ALTER COLUMN note TYPE varchar")
    assert run(store.find("s", "k")) is not None
    assert not store.database.pooled


def test_tables_of_a_newer_release_are_left_alone(store: PostgresStore, server: psycopg.Connection[Any]) -> None:
    run(store.stats())
    server.execute(f"UPDATE {store.database.names['features']} SET version = 99")
    with pytest.raises(ConfigurationError, match="99, made by a newer release"):
        run(PostgresStore(same(store)).stats())


def test_older_schema_is_migrated_once(
    store: PostgresStore, server: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(store.stats())
    more = "ALTER TABLE {records} ADD COLUMN more integer NOT NULL DEFAULT 7;\n"
    monkeypatch.setattr(tables, "LEDGER", Feature("ledger", tables.FIRST, more))
    stores = [PostgresStore(same(store)) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda each: run(each.stats()), stores))
    version = server.execute(f"SELECT version FROM {store.database.names['features']}").fetchone()
    assert version == (2,)
    for each in stores:
        each.close()


def test_tables_are_made_once_by_processes_that_start_together(
    url: str, server: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes have found no tables, and wait for the lock of the first one, which creates them."""
    count = "DO $$ BEGIN PERFORM nextval('{tokens}'); END $$;\n"  # a sequence counts what is rolled back, too
    monkeypatch.setattr(tables, "LEDGER", Feature("ledger", tables.FIRST + count))
    stores = [PostgresStore(url) for _ in range(4)]
    names = stores[0].database.names
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    with ThreadPoolExecutor(4) as pool:
        with server.transaction():
            server.execute(tables.BEGIN[-1].format(**names))
            made = [pool.submit(run, store.stats()) for store in stores]
            assert until(lambda: server.execute(waiting).fetchone() == (4,))
        for each in made:
            each.result()
    assert server.execute(f"SELECT last_value FROM {names['tokens']}").fetchone() == (1,)
    for store in stores:
        store.close()


def test_older_process_does_not_set_a_version_back(store: PostgresStore, server: psycopg.Connection[Any]) -> None:
    """An older process found no tables and waits while a newer release creates them: it must not lower the version."""
    run(store.ready())
    names = store.database.names
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    things = Feature("things", "CREATE TABLE IF NOT EXISTS {p}things (id integer);\n")
    with ThreadPoolExecutor(1) as pool:
        with server.transaction():
            server.execute(tables.BEGIN[-1].format(**names))
            made = pool.submit(run, store.tables.ready(things))
            assert until(lambda: server.execute(waiting).fetchone() == (1,))
            server.execute(f"CREATE TABLE IF NOT EXISTS {names['features']} (name text PRIMARY KEY, version integer)")
            server.execute(f"INSERT INTO {names['features']} VALUES ('things', 2)")
        made.result()
    version = f"SELECT version FROM {names['features']} WHERE name = 'things'"
    assert server.execute(version).fetchone() == (2,)


def test_schema_script_does_not_wait_for_open_transactions(url: str, server: psycopg.Connection[Any]) -> None:
    """A lock on the table would make all claims wait, too."""
    store = PostgresStore(url)
    transaction = run(store.lender.open())
    run(transaction.begin(Operation("s", "k"), lease=LEASE, wait=1.0))
    server.execute("SET lock_timeout = '5s'")
    server.execute(schema(url))
    run(transaction.abort())
    store.close()
