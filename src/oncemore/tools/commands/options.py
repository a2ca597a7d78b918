"""What several commands ask for: a store, JSON, a yes."""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from ..._contract.policy import duration
from ..._ledger.connect import hide_password, store_module
from ..._ledger.encrypted import Sealing
from ..._ledger.guard import Guard
from ...errors import ConfigurationError, MissingDriver, StoreTimeout, StoreUnavailable

F = TypeVar("F", bound=Callable[..., Any])

SEAL_KEYS = "ONCEMORE_SEAL_KEYS"
NO_STORE = "No store is named: say --store sqlite:///once.db (or postgresql://, redis://), or set ONCEMORE_STORE"


def set_json(ctx: click.Context, option: click.Parameter, value: bool) -> None:
    if ctx.obj is not None and value:
        ctx.obj.json = True


json_option = click.option(
    "--json", is_flag=True, is_eager=True, expose_value=False, callback=set_json, help="Answer in JSON, for programs."
)
yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask.")
store_option = click.option(
    "--store", "url", envvar="ONCEMORE_STORE", show_envvar=True, metavar="URL", help="Where the ledger is."
)


def read_span(ctx: click.Context, option: click.Parameter, value: str) -> float:
    """A duration: seconds, or text such as 30d."""
    try:
        return duration(float(value) if value.isdecimal() else value)
    except ConfigurationError as error:
        raise click.BadParameter(error.detail) from None


def read_text(ctx: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """What a ledger can hold; a shell passes on any bytes."""
    try:
        (value or "").encode()
    except UnicodeEncodeError:
        raise click.BadParameter("it is not UTF-8") from None
    return value


class Number(click.FloatRange):
    """A number within a range that one can count with: `nan` is within every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        return number if math.isfinite(number) else self.fail(f"{value} is not a number to count with", param, ctx)


@contextmanager
def ledger(url: str | None, *, create: bool = False) -> Iterator[Guard]:
    """The ledger at *url*, closed at the end.  Unless it is to *create* one, it must be there: a typo makes no new one."""
    if not url:
        raise ConfigurationError(NO_STORE)
    guard = Guard(url if create else existing(url), seal=seal(), cache=0)
    try:
        path = getattr(guard.store, "path", None)
        if not create and isinstance(path, str) and path != ":memory:" and not os.path.exists(path):
            raise ConfigurationError(f"{path} does not exist: mend the URL, or make it with: {init_command(url)}")
        yield guard
    except ConfigurationError as error:
        if create or "create=false" not in error.detail or "create=false" in url:
            raise
        where = hide_password(url)
        raise ConfigurationError(f"{where} has no ledger yet, or an old one; run: {init_command(url)}") from error
    except (StoreUnavailable, StoreTimeout) as error:
        where = hide_password(url)
        raise type(error)(f"{error.detail}\nIs {where} the right address, and does the server run?") from error
    finally:
        guard.close()


def seal() -> Sealing | None:
    """What opens and seals outcomes, where the environment has the keys: never the command line, which others can see."""
    words = os.environ.get(SEAL_KEYS, "").split()
    if not words:
        return None
    try:
        keys = [base64.b64decode(word, validate=True) for word in words]
    except ValueError:
        raise ConfigurationError(f"{SEAL_KEYS} is not base64: write each key so, with blanks between them") from None
    try:
        from ...encryption import Seal
    except ModuleNotFoundError as error:
        raise MissingDriver("Seals need a package; install it with: pip install 'oncemore[cryptography]'") from error
    return Seal(keys)


def existing(url: str) -> str:
    """The URL with which a store makes no tables, where it is of a kind that does."""
    creates = "create" in getattr(store_module(url), "OPTIONS", {})
    if not creates or "create=" in url.partition("?")[2]:
        return url
    return f"{url}{'&' if '?' in url else '?'}create=false"


def init_command(url: str) -> str:
    return f"oncemore init --store '{hide_password(url)}'"


def agreed(question: str, *, yes: bool) -> None:
    """Go on only if whoever called has said yes, on the command line or when asked."""
    if not yes:
        click.confirm(question, abort=True, err=True)
