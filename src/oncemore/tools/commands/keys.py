"""`oncemore keys`: list, show, resolve and delete the records of operations."""

from __future__ import annotations

import base64
import json
import re
import shlex
from typing import Any

import click
import msgspec

from ..._contract.keysource import HEADER_NAME
from ..._ledger.context import derive as derive_key
from ..._ledger.decisions import Resolution
from ..._ledger.guard import Guard
from ..._ledger.model import Operation, Outcome, Record
from ..._ledger.store import Filter
from ...errors import ConfigurationError, NotFound, WrongState
from .options import (
    confirm,
    cursor_option,
    limit_option,
    on_ledger,
    open_ledger,
    read_duration,
    read_text,
    reading_cursor,
    yes_option,
)
from .output import Output, date, escape, iso_date, print_csv, print_page, print_pairs

STATES = ("running", "settled", "released", "held", "lapsed")
CSV_COLUMNS = ("key", "payload_hash", "status", "http_code", "result_id", "notes")
COLUMNS = ("key", "scope", "state", "attempts", "created (UTC)", "expires (UTC)", "status", "note")
# The value of a header that a server can send: text without line breaks.
HEADER_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
MOST_SCOPES = 20  # at most, listed if a key exists in several

key_argument = click.argument("key", callback=read_text)
scope_option = click.option(
    "--scope",
    callback=read_text,
    help="The scope of the key.  Needed only if the key exists in several; saves a scan on Redis.",
)


@click.group()
def keys() -> None:
    """List, show, resolve and delete the records of operations."""


@keys.command("list", short_help="list records, all or some")
@click.option("--state", type=click.Choice(STATES), help="Only records in this state.")
@click.option("--lapsed", is_flag=True, help="As --state lapsed: running records that a crashed process has left.")
@click.option("--scope", callback=read_text, help="Only records of this scope.")
@click.option("--key", callback=read_text, help="Only records with this key.")
@click.option("--name", callback=read_text, help="Only records of the operation with this name.")
@limit_option
@cursor_option
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, with the result's id if the response has one.")
@on_ledger
def list_keys(
    output: Output,
    url: str | None,
    state: Any,
    lapsed: bool,
    scope: str | None,
    key: str | None,
    name: str | None,
    limit: int,
    cursor: str | None,
    as_csv: bool,
) -> None:
    """List records, without their outcomes: see keys show."""
    lapsed, state = lapsed or state == "lapsed", None if state == "lapsed" else state
    selected = Filter(state=state, scope=scope, key=key, name=name, lapsed=True if lapsed else None)
    with open_ledger(url) as guard, reading_cursor(cursor):
        page = guard.list(selected, limit=limit, cursor=cursor)
    if as_csv:
        print_csv(CSV_COLUMNS, map(csv_cells, page.records), page.cursor)
        return
    output.show(
        {"records": [record_fields(record) for record in page.records], "cursor": page.cursor},
        lambda: print_page(COLUMNS, map(record_cells, page.records), page.cursor),
    )


@keys.command(short_help="show one record")
@key_argument
@scope_option
@click.option("--outcome", is_flag=True, help="Also show its outcome, which may be confidential.")
@click.option("--derive", metavar="NAME", help="Also show the key that op.derive(NAME) gave the provider.")
@on_ledger
def show(output: Output, url: str | None, key: str, scope: str | None, outcome: bool, derive: str | None) -> None:
    """Show the record of KEY."""
    with open_ledger(url) as guard:
        record = find_record(guard, key, scope)
    fields = record_fields(record)
    if derive is not None:
        fields["derived"] = derive_key(Operation(record.scope, record.key), derive)
    if outcome:
        fields["outcome"] = outcome_fields(record.outcome)
    output.show(fields, lambda: print_pairs((name, one_line(value)) for name, value in fields.items()))


@keys.command(short_help="decide an unknown outcome")
@key_argument
@scope_option
@click.option("--released", is_flag=True, help="It did not happen: the next request with this key performs it.")
@click.option("--value", metavar="JSON", help="It happened, and the function returned this value.")
@click.option("--status", type=click.IntRange(100, 599), help="It happened, and its response has this status.")
@click.option("--header", "headers", multiple=True, metavar="'NAME: VALUE'", help="With --status; may be repeated.")
@click.option(
    "--body", type=click.File("rb"), help="With --status: the file with the response's body; - is standard input."
)
@click.option(
    "--ttl",
    metavar="TIME",
    callback=read_duration,
    default="1d",
    show_default=True,
    help="How long to keep the decision.",
)
@click.option("--note", default="", callback=read_text, help="The reason, stored with the record.")
@yes_option
@on_ledger
def resolve(
    output: Output,
    url: str | None,
    key: str,
    scope: str | None,
    released: bool,
    value: str | None,
    status: int | None,
    headers: tuple[str, ...],
    body: Any,
    ttl: float,
    note: str,
    yes: bool,
) -> None:
    """Decide the unknown outcome of an operation: it did not happen, or it did and this is its outcome.

    Only a held operation, or one that a crash interrupted, can be decided.  Find out first whether it happened: look at your
    tables, or at the provider's records.
    """
    resolution = read_resolution(released, value, status, headers, body)
    meaning = "it did not happen, and may be performed" if released else "it happened, and repeats get this outcome"
    with open_ledger(url) as guard:
        record = find_record(guard, key, scope)
        confirm_unchanged(guard, record, f"Decide for {record_label(record)}: {meaning}?", yes=yes)
        decided = guard.resolve(record.scope, record.key, resolution, retention=ttl, note=note)
    output.show(record_fields(decided), f"{escape(key)} is {decided.state} now.")


@keys.command(short_help="delete one, so that its key is new")
@key_argument
@scope_option
@yes_option
@on_ledger
def delete(output: Output, url: str | None, key: str, scope: str | None, yes: bool) -> None:
    """Delete the record of KEY.  The next request with it performs the operation, even if it already happened."""
    with open_ledger(url) as guard:
        record = find_record(guard, key, scope)
        confirm_unchanged(guard, record, f"Delete {record_label(record)} ({record.state})?", yes=yes)
        deleted = guard.delete(record.scope, record.key)
    output.show(
        {"scope": record.scope, "key": record.key, "deleted": deleted},
        f"{escape(key)} is deleted." if deleted else f"{escape(key)} was deleted already.",
    )


# ── Finding a record


def find_record(guard: Guard, key: str, scope: str | None) -> Record:
    """Return the record of *key*.  Raise an error if there is none, or if several scopes have one."""
    if scope is not None:
        record = guard.find(scope, key)
        found = [record] if record else []
    else:
        found = find_in_all_scopes(guard, key)
    if not found:
        raise NotFound(f"No record has the key {key!r}{f' in {scope!r}' if scope else ''}; see: oncemore keys list")
    if len(found) > 1:
        scopes = "".join(f"\n  --scope {shlex.quote(escape(one.scope))}" for one in found)
        raise ConfigurationError(f"Several scopes have the key {key!r}; choose one:{scopes}")
    return found[0]


def find_in_all_scopes(guard: Guard, key: str) -> list[Record]:
    """Return the unexpired records with this key, in up to MOST_SCOPES scopes."""
    page = guard.list(Filter(key=key), limit=MOST_SCOPES)
    listed = list(page.records)
    while page.cursor and len(listed) < MOST_SCOPES:
        page = guard.list(Filter(key=key), limit=MOST_SCOPES, cursor=page.cursor)
        listed += page.records
    # A list may contain a record twice, or an expired record.  `find` returns only current ones.
    found = (guard.find(record.scope, record.key) for record in {record.id: record for record in listed}.values())
    return [record for record in found if record]


def confirm_unchanged(guard: Guard, record: Record, question: str, *, yes: bool) -> None:
    """Ask the question, and raise WrongState if the record changed before it was answered."""
    confirm(question, yes=yes)
    now = guard.find(record.scope, record.key)
    if now is None or (now.token, now.state) != (record.token, record.state):
        raise WrongState(
            "The record has changed since you were asked, so nothing was done; look at it again: oncemore keys show"
        )


# ── Reading the options of `resolve`


def read_resolution(
    released: bool, value: str | None, status: int | None, headers: tuple[str, ...], body: Any
) -> Resolution:
    """Return the decision, or raise UsageError unless the options give exactly one."""
    if [released, value is not None, status is not None].count(True) != 1:
        raise click.UsageError("Say what happened, by one of --released, --value JSON and --status NUMBER.")
    if (headers or body) and status is None:
        raise click.UsageError("--header and --body describe a response: give its --status, too.")
    if released:
        return Resolution.released()
    if status is not None:
        return Resolution.settled(
            Outcome("response", status, tuple(map(read_header, headers)), body.read() if body else b"")
        )
    try:
        return Resolution.settled(json.loads(value or ""))
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"--value is not JSON: {error}; a text needs its quotes: --value '\"text\"'") from None


def read_header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not HEADER_NAME.fullmatch(name.strip()) or not HEADER_VALUE.fullmatch(value.strip()):
        raise click.UsageError(f"--header {text!r}: write it as 'Content-Type: application/json'")
    return name.strip().lower(), value.strip()


# ── Showing a record


def state_of(record: Record) -> str:
    """Return the record's state, or "lapsed" if it is running and its lease is over."""
    return "lapsed" if record.state == "running" and record.lease_until <= record.now else record.state


def record_label(record: Record) -> str:
    return f"{escape(record.key)} of {escape(record.scope)}"


def record_cells(record: Record) -> list[object]:
    """Return the cells of a record's line in the table."""
    return [
        record.key,
        record.scope,
        state_of(record),
        record.attempts,
        None if record.created_at is None else date(record.created_at).strftime("%Y-%m-%d %H:%M:%S"),
        None if record.expires_at is None else date(record.expires_at).strftime("%Y-%m-%d %H:%M:%S"),
        record.outcome.status or record.outcome.kind if record.outcome else None,
        record.note,
    ]


def csv_cells(record: Record) -> list[object]:
    """Return the cells of a record's line in the CSV."""
    code = record.outcome.status or "" if record.outcome else ""
    return [record.key, record.fingerprint, state_of(record), code, result_id(record.outcome), record.note]


def result_id(outcome: Outcome | None) -> object:
    """Return the `id` in the response's JSON object, if there is one."""
    if outcome is None or outcome.kind != "response":
        return ""
    try:
        body = json.loads(outcome.body)
    except (ValueError, RecursionError):
        return ""
    found = body.get("id") if isinstance(body, dict) else None
    return found if isinstance(found, str | int) else ""


def record_fields(record: Record) -> dict[str, Any]:
    """Return all fields of a record except its outcome.  Times are from the store's clock."""
    return {
        "scope": record.scope,
        "key": record.key,
        "name": record.name,
        "state": state_of(record),
        "fingerprint": record.fingerprint,
        "token": record.token,
        "attempts": record.attempts,
        "holder": record.holder,
        "created_at": iso_date(record.created_at),
        "lease_until": iso_date(record.lease_until),
        "settled_at": iso_date(record.settled_at),
        "expires_at": iso_date(record.expires_at),
        "accessed_at": iso_date(record.accessed_at),
        "kind": record.outcome.kind if record.outcome else None,
        "status": record.outcome.status if record.outcome else None,
        "bytes": len(record.outcome.body) if record.outcome else None,
        "response_hash": record.response_hash,
        "note": record.note,
    }


def outcome_fields(outcome: Outcome | None) -> dict[str, Any] | None:
    """Return the fields of an outcome.  A body that is not text is in base64."""
    if outcome is None:
        return None
    fields: dict[str, Any] = {
        "kind": outcome.kind,
        "status": outcome.status,
        "headers": list(map(list, outcome.headers)),
    }
    if outcome.kind in ("value", "error"):
        try:  # as plain data, because the application's classes are not imported here
            return {**fields, "value": msgspec.to_builtins(msgspec.msgpack.decode(outcome.body), str_keys=True)}
        except (msgspec.MsgspecError, TypeError):
            pass  # it is encrypted, or of another version
    try:
        return {**fields, "body": outcome.body.decode()}
    except UnicodeDecodeError:
        return {**fields, "base64": base64.b64encode(outcome.body).decode()}


def one_line(value: object) -> object:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value
