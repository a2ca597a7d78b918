"""Options that several commands share, and the ledger or contract that they name."""

from __future__ import annotations

import base64
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from ..._contract.contract import Contract
from ..._contract.policy import duration
from ..._ledger.connect import hide_password, store_module
from ..._ledger.encrypted import Sealing
from ..._ledger.guard import Guard
from ...errors import ConfigurationError, InvalidPayload, MissingDriver, StoreTimeout, StoreUnavailable
from .output import Output

SEAL_KEYS = "ONCEMORE_SEAL_KEYS"
NO_STORE = (
    "No store is named: add --store sqlite:///once.db (or postgresql://..., redis://...), or set the environment "
    "variable ONCEMORE_STORE"
)


def set_json(ctx: click.Context, option: click.Parameter, value: bool) -> None:
    if ctx.obj is not None and value:
        ctx.obj.json = True


json_option = click.option(
    "--json", is_flag=True, is_eager=True, expose_value=False, callback=set_json, help="Print JSON, for programs."
)
yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
store_option = click.option(
    "--store", "url", envvar="ONCEMORE_STORE", show_envvar=True, metavar="URL", help="The URL of the ledger."
)


def on_ledger(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give *command* the options `--store` and `--json`, and the Output as its first argument."""
    return store_option(json_option(click.pass_obj(command)))


limit_option = click.option(
    "--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="How many to show."
)
cursor_option = click.option("--cursor", help="Continue after the last list; it printed this.")


@contextmanager
def reading_cursor(cursor: str | None) -> Iterator[None]:
    """Raise ConfigurationError inside the block if the store cannot read *cursor*."""
    try:
        yield
    except (ValueError, InvalidPayload) as error:  # stores raise one or the other
        raise ConfigurationError(
            f"--cursor {cursor!r} is not a cursor: copy it from the end of the previous list"
        ) from error


def number_or_text(read: Callable[[int | str], Any]) -> Callable[..., Any]:
    """Return an option's callback that converts the value, a number or text such as 30d or 4KiB, with *read*."""

    def callback(ctx: click.Context, option: click.Parameter, value: str) -> Any:
        try:
            return read(int(value) if value.isdecimal() else value)
        except ConfigurationError as error:
            raise click.BadParameter(error.detail) from None

    return callback


read_duration = number_or_text(duration)


def read_text(ctx: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """Return *value*, or raise BadParameter if it is not UTF-8: a shell passes on any bytes, but stores refuse them."""
    try:
        (value or "").encode()
    except UnicodeEncodeError:
        raise click.BadParameter("it is not UTF-8") from None
    return value


def confirm(question: str, *, yes: bool) -> None:
    """Ask on standard error, and abort the command unless the answer is yes.

    `click.confirm` is not used, because it passes the question to `input`, which ignores every exception while it flushes
    the question.  A Ctrl-C at that moment would be lost, and `input` would wait for the answer.
    """
    if yes:
        return
    click.echo(f"{question} [y/N]: ", nl=False, err=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise click.Abort


@contextmanager
def open_ledger(url: str | None, *, create: bool = False) -> Iterator[Guard]:
    """Open the ledger at *url*, and close it at the end.

    Without *create* it must exist, so that a mistyped URL makes no new file or table.
    """
    if not url:
        raise ConfigurationError(NO_STORE)
    guard = Guard(url if create else without_create(url), seal=seal_from_environment(), cache=0)
    try:
        path = getattr(guard.store, "path", None)
        if not create and isinstance(path, str) and path != ":memory:" and not os.path.exists(path):
            raise ConfigurationError(f"{path} does not exist: correct the URL, or create it with: {init_command(url)}")
        yield guard
    except ConfigurationError as error:
        if create or "create=false" not in error.detail or "create=false" in url:
            raise
        place = hide_password(url)
        raise ConfigurationError(
            f"{place} lacks tables of the ledger, or has old ones; create them with: {init_command(url)}"
        ) from error
    except (StoreUnavailable, StoreTimeout) as error:
        place = hide_password(url)
        raise type(error)(
            f"{error.detail}\nCheck that {place} is the right address and that the server runs"
        ) from error
    finally:
        guard.close()


def seal_from_environment() -> Sealing | None:
    """Return the Seal for encrypted outcomes.

    Its keys come from the environment only, because all users of a machine can see its command lines.
    """
    words = os.environ.get(SEAL_KEYS, "").split()
    if not words:
        return None
    try:
        keys = [base64.b64decode(word, validate=True) for word in words]
    except ValueError:
        raise ConfigurationError(f"{SEAL_KEYS} is not base64: write each key in base64, with spaces between") from None
    try:
        from ...encryption import Seal
    except ModuleNotFoundError as error:
        raise MissingDriver("Encryption needs a package: pip install 'oncemore[cryptography]'") from error
    return Seal(keys)


def without_create(url: str) -> str:
    """Return *url* with `create=false`, if the store is of a kind that would create its tables."""
    creates = "create" in getattr(store_module(url), "OPTIONS", {})
    if not creates or "create=" in url.partition("?")[2]:
        return url
    return f"{url}{'&' if '?' in url else '?'}create=false"


def init_command(url: str) -> str:
    return f"oncemore init --store '{hide_password(url)}'"


def import_from_working_folder() -> None:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def load_object(place: str, what: str, kind: type = object) -> Any:
    """Import the object `module:name`, an instance of *kind*.  The module may be in the working folder."""
    module, colon, name = place.partition(":")
    if not colon:
        raise ConfigurationError(f"{place!r} does not name {what}: write module:name")
    import_from_working_folder()
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"{place!r} cannot be found: {error}") from error
    except Exception as error:
        raise ConfigurationError(f"{place!r} cannot be imported, because its module raised {error!r}") from error
    if not isinstance(found, kind):
        raise ConfigurationError(f"{place!r} is a {type(found).__name__}, not {what} (oncemore's {kind.__name__})")
    return found


def run_or_once(output: Output, worker: Any, once: bool, name: str, text: str) -> None:
    """Run *worker* until SIGTERM or Ctrl-C.  With *once*, run it once, and show its count as *name*, or in *text*."""
    if not once:
        worker.run()
        return
    count = worker.run_once()
    output.show({name: count}, text.format(count))


def load_contract(path: str) -> Contract:
    """Load and check the contract in *path*.  It may name functions in modules of the working folder."""
    import_from_working_folder()
    contract = Contract.load(path)
    contract.check()
    return contract
