"""URLs of stores: the scheme finds the module, options are read by type, and passwords are never shown."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncemore import Guard
from oncemore._ledger.connect import EXTRAS, SCHEMES, connect, hide_password, schema, store_module, take_options
from oncemore.errors import ConfigurationError
from oncemore.stores.memory import MemoryStore

# From a URL to its module


@pytest.mark.parametrize("url", ["memory://", "MEMORY://", "memory://?"])
def test_a_scheme_names_its_store_in_either_case(url: str) -> None:
    assert isinstance(connect(url), MemoryStore)
    assert schema(url) == ""


@pytest.mark.parametrize(
    ("url", "lower"),
    [
        ("SQLite:///Once.db", "sqlite:///Once.db"),
        ("PostgreSQL://localhost/Shop", "postgresql://localhost/Shop"),
        ("REDIS://localhost", "redis://localhost"),
        ("RedisS://localhost", "rediss://localhost"),
        ("Redis+Cluster://localhost", "redis+cluster://localhost"),
    ],
)
def test_drivers_get_the_scheme_as_they_know_it(url: str, lower: str) -> None:
    assert connect(url).url == lower
    assert schema(url) == schema(lower)


@pytest.mark.parametrize("url", ["mongodb://u:secret@h/db", "memory", "memory:/", "", "://", "sqlite:file"])
def test_unknown_url_scheme_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError, match="names no store; known are memory://, sqlite://") as refused:
        connect(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("shop.db", "write 'sqlite:///shop.db'"),
        ("sqllite:///shop.db", r"\(did you mean 'sqlite'\?\)"),
        ("postgress://h/db", r"\(did you mean 'postgres'\?\)"),
    ],
)
def test_mistyped_url_is_refused_with_the_likely_spelling(url: str, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=f"names no store.*{hint}"):
        connect(url)


@pytest.mark.parametrize(
    ("url", "plain"),
    [
        ("postgresql+asyncpg://u:secret@h/db", "postgresql://"),
        ("postgres+psycopg://h/db", "postgres://"),
        ("sqlite+aiosqlite:///shop.db", "sqlite://"),
    ],
)
def test_sqlalchemy_url_is_refused_with_the_right_spelling(url: str, plain: str) -> None:
    with pytest.raises(ConfigurationError, match=f"names no store; write {plain}, without a driver; known") as refused:
        connect(url)
    assert "secret" not in str(refused.value)


def test_url_object_is_refused_without_its_password() -> None:
    """A settings library may give such an object in place of a text."""

    class Dsn:
        def __repr__(self) -> str:
            return "Dsn('redis://user:secret@host/0?sentinel_password=secret')"

    with pytest.raises(ConfigurationError, match=r"Dsn\('redis://user:.*is no ledger") as refused:
        connect(Dsn())
    assert "secret" not in str(refused.value)


WITHOUT_DRIVER = """
import sys
from oncemore._ledger.connect import connect

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
try:
    connect(sys.argv[2])
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.parametrize(("driver", "scheme"), [("psycopg", "postgresql"), ("redis", "redis+sentinel")])
def test_missing_driver_names_the_pip_command(driver: str, scheme: str) -> None:
    command = [sys.executable, "-c", WITHOUT_DRIVER, driver, f"{scheme}://user:secret@host"]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    expected = f"{scheme}:// needs a driver; install it with: pip install 'oncemore[{EXTRAS[driver]}]'"
    assert told == f"MissingDriver: {expected}\n"


def test_a_driver_that_is_not_whole_is_missing_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """psycopg alone, on a machine without the library that it wraps."""
    monkeypatch.setenv("PSYCOPG_IMPL", "binary")
    command = [sys.executable, "-c", WITHOUT_DRIVER, "psycopg_binary", "postgresql://user:secret@host"]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert told == ("MissingDriver: postgresql:// needs a driver; install it with: pip install 'oncemore[postgres]'\n")


def test_other_import_error_is_raised_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEMES, "broken", "oncemore.stores.no_such_module")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        connect("broken://")


# Stores of other packages


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An installed distribution that announces a store."""
    (tmp_path / "acme_ledger.py").write_text(
        "from oncemore.stores.memory import MemoryStore\n"
        "def connect(url):\n    return MemoryStore(url)\n"
        "def schema(url):\n    return 'CREATE ACME'\n"
    )
    info = tmp_path / "acme_ledger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-ledger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[oncemore.stores]\nacme = acme_ledger\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield "acme://somewhere"
    sys.modules.pop("acme_ledger", None)


def test_another_packages_store_is_found_by_its_entry_point(other_package: str) -> None:
    assert connect(other_package).url == other_package
    assert schema(other_package) == "CREATE ACME"
    assert Guard(other_package).store.url == other_package


def test_another_packages_store_is_among_the_known(other_package: str) -> None:
    with pytest.raises(ConfigurationError, match=r"known are memory://.*, acme://"):
        store_module("typo://")


# Passwords


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://user:secret@host:5432/db?sslmode=require", "postgresql://user:***@host:5432/db?sslmode=require"),
        ("redis://:secret@host", "redis://:***@host"),
        ("redis://:@host", "redis://:***@host"),
        ("postgresql://user@host:5432/db", "postgresql://user@host:5432/db"),
        ("postgresql://u:secret@h1:5432,h2:5432/db", "postgresql://u:***@h1:5432,h2:5432/db"),
        ("postgresql:///db?user=u&password=secret&x=1", "postgresql:///db?user=u&password=***&x=1"),
        ("redis+sentinel://h/0?sentinel_password=secret", "redis+sentinel://h/0?sentinel_password=***"),
        ("postgresql://h/db?sslPassword=secret", "postgresql://h/db?sslPassword=***"),
        ("sqlite:///C:/once@home.db", "sqlite:///C:/once@home.db"),
        ("memory://", "memory://"),
        # not escaped as they should be: then rather too little is shown
        ("postgresql://u:secr@et@h/db", "postgresql://u:***@h/db"),
        ("redis://:sec/ret@host/0", "redis://:***@host/0"),
        ("redis://:sec?ret@host/0", "redis://:***@host/0"),
        ("postgresql://u:se[cret@h/db", "postgresql://u:***@h/db"),
    ],
)
def test_a_url_is_shown_without_its_passwords(url: str, shown: str) -> None:
    assert hide_password(url) == shown


@given(st.text(st.characters(exclude_characters="&", codec="ascii"), min_size=1))
def test_no_password_is_shown_however_it_is_spelt(password: str) -> None:
    mark = f"Wq{password}Zq"
    assert mark not in hide_password(f"postgresql://user:{mark}@host/db")
    assert mark not in hide_password(f"postgresql://host/db?password={mark}")


# Options

KNOWN: dict[str, Any] = {"create": True, "prefix": "once_", "timeout": 5.0, "most": 256}


def test_url_options_are_typed_and_others_are_the_drivers() -> None:
    url, options = take_options(
        "postgresql:///db?create=FALSE&options=-c%20search_path%3Da%26b&prefix=my%20own+&timeout=1.5&most=7&flag", KNOWN
    )
    assert url == "postgresql:///db?options=-c%20search_path%3Da%26b&flag"
    assert options == {"create": False, "prefix": "my own ", "timeout": 1.5, "most": 7}


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:///once.db",
        "sqlite:////var/lib/once.db",
        "memory://",
        "postgresql://",
        "postgresql:///db",
        "redis://h/0?socket_timeout=3",
        "postgresql://h1:1,h2:2/db?target_session_attrs=any#x",
    ],
)
def test_a_url_without_our_options_stays_as_it_is(url: str) -> None:
    assert take_options(url, KNOWN) == (url, KNOWN)


def test_last_url_option_wins_and_defaults_stay() -> None:
    assert take_options("memory://?most=1&&most=2&", KNOWN) == ("memory://", {**KNOWN, "most": 2})
    assert KNOWN["most"] == 256


@pytest.mark.parametrize(("text", "expected"), [("true", True), ("1", True), ("0", False), ("False", False)])
def test_a_yes_or_no(text: str, expected: bool) -> None:
    assert take_options(f"memory://?create={text}", KNOWN)[1]["create"] is expected


@pytest.mark.parametrize(("text", "expected"), [("2", 2.0), ("0.25", 0.25), ("250ms", 0.25), ("1h30m", 5400.0)])
def test_a_duration(text: str, expected: float) -> None:
    assert take_options(f"memory://?timeout={text}", KNOWN)[1]["timeout"] == expected


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("create=yes", "write true or false"),
        ("create", "write true or false"),
        ("most=many", "write a whole number"),
        ("most=-1", "write a whole number"),
        ("most=%C2%B2", "write a whole number"),
        ("timeout=soon", "is not a duration"),
        ("timeout=-1", "is not a duration"),
        ("timeout=25d", "at most 24 days"),
        ("timeout=%C2%B2", "is not a duration"),
        ("timeout=.", "is not a duration"),
    ],
)
def test_bad_url_option_is_refused_by_name(option: str, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{option.partition('=')[0]}=.* in the store's URL: .*{hint}"):
        take_options(f"memory://?{option}", KNOWN)
