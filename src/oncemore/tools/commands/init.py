"""`oncemore init`: write a first contract, and create the ledger's tables."""

from __future__ import annotations

from pathlib import Path

import click

from ..._contract.profiles import PROFILES
from ..._ledger.connect import hide_password, schema
from ..._ledger.tables import features
from ..._runtime.plan import run
from ...errors import ConfigurationError
from .options import NO_STORE, load_contract, on_ledger, open_ledger
from .output import Output

FIRST_CONTRACT = """\
# Which requests are idempotent, and how.  Check this file with: oncemore contract check {path}

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
idempotent = false               # runs unguarded, on purpose
"""


@click.command()
@click.argument("path", default="oncemore.toml", type=click.Path(path_type=Path))
@click.option(
    "--profile",
    type=click.Choice(sorted(PROFILES)),
    default="default",
    show_default=True,
    help="The set of defaults to start from.",
)
@click.option("--print-schema", is_flag=True, help="Only print the script that creates the tables; change nothing.")
@on_ledger
def init(output: Output, url: str | None, path: Path, profile: str, print_schema: bool) -> None:
    """Write a first contract to PATH (oncemore.toml), and create the tables of the ledger at --store.

    Running it again changes nothing: an existing contract is only checked, and existing tables are kept, or migrated if
    they are of an older version.  Without --store, only the contract is written.
    """
    if print_schema:
        if not url:
            raise ConfigurationError(NO_STORE)
        script = schema(url)
        output.show({"schema": script}, lambda: click.echo(script, nl=False))
        return
    written = write_contract(path, profile)
    text = f"{path}: {'written; edit it for your service' if written else 'exists, and has no faults'}"
    if url:
        with open_ledger(url, create=True) as guard:
            guard.find("oncemore", "init")  # the first use creates the tables
            if hasattr(guard.store, "tables"):
                for feature in features():
                    run(guard.store.tables.ready(feature))
        text += f"\n{hide_password(url)}: the ledger is ready"
    output.show({"contract": str(path), "written": written, "store": hide_password(url) if url else None}, text)


def write_contract(path: Path, profile: str) -> bool:
    """Write a first contract and return True.  If *path* exists, only check it, and return False."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(FIRST_CONTRACT.format(path=path, profile=profile))
    except FileExistsError:
        load_contract(str(path))
        return False
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from error
    return True
