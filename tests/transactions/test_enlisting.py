"""The pools, engines and aliases that a guard accepts, and its errors for those that it cannot use."""

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
async def test_asyncpg_pools_address_is_the_ledgers(args: Any, kwargs: Any, expected: set[str]) -> None:
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
async def test_asyncpg_pool_with_unknown_address_is_refused(kwargs: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        Guard(await pool(**kwargs))


async def test_address_can_be_passed_with_an_asyncpg_pool() -> None:
    given = await pool(host="h", ssl=ssl.create_default_context())
    assert "sslmode=verify-full" in connect(given, sslmode="verify-full", schema="payments").url


async def test_unopened_asyncpg_pool_is_refused(postgres_url: str) -> None:
    guard = Guard(await pool(postgres_url))
    with pytest.raises(ConfigurationError, match="await the pool"):
        await guard.arun(asked(), lambda op: None, policy=effect())
    await guard.aclose()


def effect() -> Any:
    from .shops import POLICY

    return POLICY


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_connections_in_another_encoding_are_refused(postgres_url: str, postgres_schema: str, encoding: str) -> None:
    """A process with connections in UTF-8 would store another key, and perform the operation again."""
    performed: list[str] = []
    with ConnectionPool(postgres_url, min_size=0, max_size=1, kwargs={"client_encoding": encoding}) as latin:
        guard = Guard(connect(latin, schema=postgres_schema), policy=POLICY)
        for _ in range(2):
            with pytest.raises(ConfigurationError, match=f"in {encoding}.* client_encoding=UTF8"):
                guard.run(asked("žluť"), lambda op: performed.append(op.key))
        guard.close()
    assert performed == []


def test_unknown_django_alias_is_refused(tmp_path: Any) -> None:
    DjangoSqlite(f"sqlite:///{tmp_path / 'shop.db'}")  # Django is configured
    with pytest.raises(ConfigurationError, match="names no database"):
        Guard("django:nowhere")


def test_django_memory_database_is_refused(tmp_path: Any) -> None:
    shop = DjangoSqlite(f"sqlite:///{tmp_path / 'shop.db'}")
    connections.settings[shop.alias]["NAME"] = "file:memorydb?mode=memory&cache=shared"
    with pytest.raises(ConfigurationError, match="needs a file"):
        Guard(f"django:{shop.alias}")


def test_operation_inside_a_django_transaction_is_refused(tmp_path: Any) -> None:
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
def test_missing_driver_names_its_install_command(hidden: str, source: str, extra: str) -> None:
    script = HIDDEN.format(hidden=hidden, source=source)
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True).stdout
    assert told.startswith("MissingDriver: ")
    assert told.endswith(f"pip install 'oncemore[{extra}]'\n")
