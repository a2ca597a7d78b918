"""`oncemore init`: a first contract, and the ledger's tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..._contract.profiles import PROFILES
from ..._ledger.connect import hide_password, schema
from ...errors import ConfigurationError
from .contract import load
from .options import NO_STORE, json_option, ledger, store_option
from .screen import Screen

# Every line of it is loaded by the tests.
FIRST = """\
# What may be repeated, and how.  Check it with: oncemore contract check {path}

[defaults]
profile = "{profile}"
ttl = "24h"                      # how long outcomes are kept

[[rule]]
match = "POST /payments"
name = "payments.create"
key = "required"                 # the Idempotency-Key header
ttl = "30d"

[[rule]]
match = "POST /refunds"
name = "refunds.create"
reverses = "payments.create"
key = "required"
ttl = "30d"

[[rule]]
match = "POST /auth/refresh"
idempotent = false               # said, not forgotten
"""


@click.command()
@click.argument("path", default="oncemore.toml", type=click.Path(path_type=Path))
@click.option(
    "--profile", type=click.Choice(sorted(PROFILES)), default="default", show_default=True, help="The set of defaults."
)
@click.option("--print-schema", is_flag=True, help="Only print the script that makes the tables; change nothing.")
@store_option
@json_option
@click.pass_obj
def init(screen: Screen, url: str | None, path: Path, profile: str, print_schema: bool) -> None:
    """Write a first contract to PATH (oncemore.toml), and create the tables of the ledger at --store.

    What is there already stays as it is, so it may be called again; tables of an older version are brought up to date.
    Without --store, only the contract is written.
    """
    if print_schema:
        if not url:
            raise ConfigurationError(NO_STORE)
        script = schema(url)
        screen.answer({"schema": script}, lambda out: click.echo(script, nl=False))
        return
    written = write(path, profile)
    if url:
        with ledger(url, create=True) as guard:
            guard.find("oncemore", "init")  # the first use makes the tables

    def draw(out: Any) -> None:
        out.print(f"{path}: {'written; make it yours' if written else 'there already, and without faults'}")
        if url:
            out.print(f"{hide_password(url)}: the ledger is ready")

    screen.answer({"contract": str(path), "written": written, "store": hide_password(url) if url else None}, draw)


def write(path: Path, profile: str) -> bool:
    """Whether a new contract was written; one that is there is only checked."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(FIRST.format(path=path, profile=profile))
    except FileExistsError:
        load(str(path))
        return False
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from error
    return True
