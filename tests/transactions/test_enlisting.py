"""What a guard can be given, and what it says of what it cannot use."""

from __future__ import annotations

import ssl
import subprocess
import sys
from typing import Any

import asyncpg
import pytest
from django.db import connections, transaction
from psycopg_pool import ConnectionPool

from oncemore import Guard
from oncemore._ledger.connect import connect
from oncemore.errors import ConfigurationError

from .shops import POLICY, DjangoSqlite
from .test_transaction import asked


async def pool(*args: Any, **kwargs: Any) -> Any:
    return asyncpg.create_pool(*args, min_size=0, **kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        (["postgresql://u@h:5/d"], {}, {"host=h", "port=5", "user=u", "dbname=d"}),
        ([], {"host": ["a", "b"], "port": [1, 2], "database": "d"}, {"host=a%2Cb", "port=1%2C2", "dbname=d"}),
        (["postgresql://h/d"], {"ssl": "require", "user": "other"}, {"host=h", "sslmode=require", "user=other"}),
        (["postgresql://h/d"], {"ssl": False}, {"host=h", "sslmode=disable"}),
    ],
)
async def test_the_ledger_is_where_the_pool_of_asyncpg_leads(args: Any, kwargs: Any, expected: set[str]) -> None:
    url = Guard(await pool(*args, **kwargs)).store.url
    assert expected <= set(url.partition("?")[2].split("&"))


@pytest.mark.parametrize(
    ("kwargs", "complaint"),
    [
        ({"host": "h", "ssl": ssl.create_default_context()}, "ssl="),
        ({"host": "h", "password": lambda: "secret"}, "password is a function"),
        ({"host": "h", "connect": lambda *_, **__: None}, "function of its own"),
    ],
)
async def test_an_address_that_cannot_be_known_is_asked_for(kwargs: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        Guard(await pool(**kwargs))


async def test_the_address_can_be_said_beside_the_pool() -> None:
    given = await pool(host="h", ssl=ssl.create_default_context())
    assert "sslmode=verify-full" in connect(given, sslmode="verify-full", schema="payments").url


async def test_a_pool_that_was_not_opened_is_told_of(postgres_url: str) -> None:
    guard = Guard(await pool(postgres_url))
    with pytest.raises(ConfigurationError, match="await the pool"):
        await guard.arun(asked(), lambda op: None, policy=effect())
    await guard.aclose()


def effect() -> Any:
    from .shops import POLICY

    return POLICY


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_connections_in_another_encoding_are_refused(postgres_url: str, postgres_schema: str, encoding: str) -> None:
    """The key would be another one than in a process that has them in UTF-8, and its operation be performed there as well."""
    performed: list[str] = []
    with ConnectionPool(postgres_url, min_size=0, max_size=1, kwargs={"client_encoding": encoding}) as latin:
        guard = Guard(connect(latin, schema=postgres_schema), policy=POLICY)
        for _ in range(2):
            with pytest.raises(ConfigurationError, match=f"in {encoding}.* client_encoding=UTF8"):
                guard.run(asked("žluť"), lambda op: performed.append(op.key))
        guard.close()
    assert performed == []


def test_an_alias_that_django_does_not_know_is_refused(tmp_path: Any) -> None:
    DjangoSqlite(f"sqlite:///{tmp_path / 'shop.db'}")  # Django is configured
    with pytest.raises(ConfigurationError, match="names no database"):
        Guard("django:nowhere")


def test_a_django_database_in_memory_is_refused(tmp_path: Any) -> None:
    shop = DjangoSqlite(f"sqlite:///{tmp_path / 'shop.db'}")
    connections.settings[shop.alias]["NAME"] = "file:memorydb?mode=memory&cache=shared"
    with pytest.raises(ConfigurationError, match="needs a file"):
        Guard(f"django:{shop.alias}")


def test_an_operation_must_be_the_outermost_transaction_of_django(tmp_path: Any) -> None:
    shop = DjangoSqlite(f"sqlite:///{tmp_path / 'shop.db'}")
    with transaction.atomic(using=shop.alias):
        with pytest.raises(ConfigurationError, match="outermost"):
            shop.guard.run(asked(), lambda op: None)
    connections[shop.alias].close()


HIDDEN = """
import sys
sys.modules[{hidden!r}] = None
from oncemore._ledger.connect import connect
try:
    connect({source})
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""


@pytest.mark.parametrize(
    ("hidden", "source", "extra"),
    [
        ("django", "'django:default'", "django"),
        ("psycopg", "__import__('asyncpg').pool.Pool.__new__(__import__('asyncpg').Pool)", "postgres"),
    ],
)
def test_a_missing_driver_names_the_command_that_installs_it(hidden: str, source: str, extra: str) -> None:
    script = HIDDEN.format(hidden=hidden, source=source)
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True).stdout
    assert told.startswith("MissingDriver: ")
    assert told.endswith(f"pip install 'oncemore[{extra}]'\n")
