"""Makes the store for a URL: the scheme names a module, and that module's `connect(url)` makes the store."""

from __future__ import annotations

import importlib
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, cast
from urllib.parse import quote, unquote, unquote_plus, urlencode

from .._contract.policy import duration
from .._contract.problems import did_you_mean
from ..errors import ConfigurationError, MissingDriver
from .store import Store

# A new store is one new file in stores/ and one line here.  Stores of other packages are found by their entry points.
SCHEMES = {
    "memory": "oncemore.stores.memory",
    "sqlite": "oncemore.stores.sqlite",
    "postgresql": "oncemore.stores.postgres",
    "postgres": "oncemore.stores.postgres",
    "redis": "oncemore.stores.redis",
    "rediss": "oncemore.stores.redis",
    "redis+sentinel": "oncemore.stores.redis",
    "redis+cluster": "oncemore.stores.redis",
    "redis+postgresql": "oncemore.stores.tiered",
    "redis+postgres": "oncemore.stores.tiered",
    "redis+sqlite": "oncemore.stores.tiered",  # refused there, with the reason
}
GROUP = "oncemore.stores"
# The schemes that name a driver too in SQLAlchemy's URLs, such as postgresql+asyncpg.
WITH_DRIVERS = ("postgresql", "postgres", "sqlite")

# The extra that installs each module.
EXTRAS = {
    "psycopg": "postgres",
    "psycopg_pool": "postgres",
    "redis": "redis",
    "hiredis": "redis",
    "asyncpg": "asyncpg",
    "sqlalchemy": "sqlalchemy",
    "greenlet": "sqlalchemy",
    "aiosqlite": "aiosqlite",
    "django": "django",
    "asgiref": "django",
    "jwt": "jwt",
    "cryptography": "cryptography",
    "aiohttp": "aiohttp",
    "fastapi": "fastapi",
    "nats": "nats",
    "aio_pika": "rabbitmq",
    "aiormq": "rabbitmq",
    "confluent_kafka": "kafka",
    "boto3": "sqs",
    "botocore": "sqs",
    "cronsim": "jobs",
    "celery": "celery",
    "dramatiq": "dramatiq",
    "rq": "rq",
    "arq": "arq",
    "taskiq": "taskiq",
    "taskiq_dependencies": "taskiq",
    "huey": "huey",
    "procrastinate": "procrastinate",
}


# A guard also takes the user's own pools and engines.  By the package of their class: the module whose
# `enlist(source, options)` makes a store that can join the user's transactions.
ADAPTERS = {
    "psycopg_pool": "oncemore.stores.postgres.pool",
    "asyncpg": "oncemore.stores.postgres.asyncpg",
    "sqlalchemy": "oncemore.stores.sqlalchemy",
    "django": "oncemore.stores.django",
}
DJANGO = "django:"

LONGEST = 24 * 86400.0  # the longest wait in seconds: servers count milliseconds in 32 bits, and fail if it is longer


def connect(source: Any, **options: str) -> Store:
    """Return the store at a URL, or in the database of a pool or an engine.  Connections are opened on first use.

    *options* are the options of a store's URL, for a source without a URL: `connect(engine, schema="payments")`.
    """
    if isinstance(source, str) and not source.startswith(DJANGO):
        return cast("Store", store_module(source).connect(with_options(lower_scheme(source), options)))
    package = "django" if isinstance(source, str) else type(source).__module__.partition(".")[0]
    if package not in ADAPTERS:
        raise ConfigurationError(
            f"{hide_password(repr(source))} is no ledger: "
            "give a URL as text, a pool of psycopg_pool or asyncpg, an engine of SQLAlchemy, or 'django:alias'"
        )
    with naming_extras(f"The ledger in a database of {package}'s"):
        return cast("Store", adapter_module(package).enlist(source, options))


def adapter_module(package: str) -> Any:
    """Import and return the module for *package*'s connections; only when needed, because the package is optional."""
    return importlib.import_module(ADAPTERS[package])


def lower_scheme(url: str) -> str:
    """Return the URL with its scheme in lower case, as drivers need it."""
    scheme, mark, rest = url.partition("://")
    return scheme.lower() + mark + rest


def with_options(url: str, options: Mapping[str, str]) -> str:
    return url + ("&" if "?" in url else "?") + urlencode(options) if options else url


def schema(url: str) -> str:
    """Return the script that creates the tables of the store at *url*, for operators who run it by hand (`?create=false`)."""
    script: str = store_module(url).schema(lower_scheme(url))
    return script


def store_module(url: str) -> ModuleType:
    """Return the module for the URL's scheme."""
    scheme, mark, _ = url.partition("://")
    scheme = scheme.lower()
    if mark and scheme in SCHEMES:
        with naming_extras(f"{scheme}://"):
            return importlib.import_module(SCHEMES[scheme])
    others = entry_points(group=GROUP)
    for point in others.select(name=scheme):
        module: ModuleType = point.load()
        return module
    known = ", ".join(f"{name}://" for name in (*SCHEMES, *sorted(others.names)))
    plain, driver, _ = scheme.partition("+")
    if driver and plain in WITH_DRIVERS:
        hint = f"; write {plain}://, without a driver"
    elif not mark and url.endswith((".db", ".sqlite", ".sqlite3")):
        hint = f"; for a file write 'sqlite:///{url}'"
    else:
        hint = did_you_mean(scheme, SCHEMES) if mark else ""
    raise ConfigurationError(f"{hide_password(url)!r} names no store{hint}; known are {known}")


@contextmanager
def naming_extras(what: str, extra: str = "") -> Iterator[None]:
    """If a driver is missing, raise MissingDriver with the command that installs it: *extra*, or the extra of that driver."""
    try:
        yield
    except ImportError as error:
        brings = EXTRAS.get(_missing(error).partition(".")[0])
        if brings is None:
            raise
        raise MissingDriver(
            f"{what} needs a driver; install it with: pip install 'oncemore[{extra or brings}]'"
        ) from error


def _missing(error: ImportError) -> str:
    """Return the name of the missing module.  An incomplete psycopg counts as missing: it raises without its C library."""
    if error.name:
        return error.name
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__"))


def hide_password(url: str) -> str:
    """Return the URL without its passwords.  If a password is not escaped, more of the URL may be hidden than necessary."""
    url = re.sub(r"(?<=://)([^:/@?]*):(?:[^?]*|.*)@", r"\1:***@", url, flags=re.DOTALL)
    url = re.sub(r"([?&][^=&]*password=)[^&]*", r"\1***", url, flags=re.IGNORECASE)
    return re.sub(r"(?<=[?&]redis=)[^&]*", lambda nested: quote(hide_password(unquote(nested[0])), safe=""), url)


def take_options(url: str, known: dict[str, Any], owner: str = "store") -> tuple[str, dict[str, Any]]:
    """Return the URL without our options, and the options, each read as the type of its default in *known*.

    *owner* names the URL in error messages.
    """
    base, _, query = url.partition("?")  # urlunsplit would turn sqlite:///file into sqlite:/file
    options, rest = dict(known), []
    for part in filter(None, query.split("&")):
        name, _, text = part.partition("=")
        if name in known:
            options[name] = _read(name, unquote_plus(text), known[name], owner)
        else:
            rest.append(part)  # for the driver
    return base + "?" * bool(rest) + "&".join(rest), options


def _read(name: str, text: str, default: Any, owner: str) -> Any:
    if isinstance(default, bool):
        if text.lower() not in ("true", "false", "1", "0"):
            raise ConfigurationError(f"{name}={text} in the {owner}'s URL: write true or false")
        return text.lower() in ("true", "1")
    if isinstance(default, float):
        try:
            seconds = duration(float(text) if text.replace(".", "", 1).isdecimal() else text)
            if seconds > LONGEST and name != "retention":
                raise ConfigurationError("servers cannot wait so long; write at most 24 days")
            return seconds
        except ConfigurationError as error:
            raise ConfigurationError(f"{name}={text} in the {owner}'s URL: {error.detail}") from None
    if isinstance(default, int):
        if not text.isdecimal():
            raise ConfigurationError(f"{name}={text} in the {owner}'s URL: write a whole number")
        return int(text)
    return text
