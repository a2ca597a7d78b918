"""A record as an operator reads it: in words, dates by the store's clock."""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from ..._ledger.model import Outcome, Record
from .screen import brief_moment, moment

COLUMNS = ("key", "scope", "state", "attempts", "created (UTC)", "expires (UTC)", "status", "note")


def state_of(record: Record) -> str:
    """Its state; lapsed, where it runs but its performer's lease is over."""
    return "lapsed" if record.state == "running" and record.lease_until <= record.now else record.state


def cells(record: Record) -> list[object]:
    """The columns of a list."""
    return [
        record.key,
        record.scope,
        state_of(record),
        record.attempts,
        brief_moment(record.created_at),
        brief_moment(record.expires_at),
        record.outcome.status or record.outcome.kind if record.outcome else None,
        record.note,
    ]


def fields(record: Record) -> dict[str, Any]:
    """Everything but what was answered."""
    return {
        "scope": record.scope,
        "key": record.key,
        "name": record.name,
        "state": state_of(record),
        "fingerprint": record.fingerprint,
        "token": record.token,
        "attempts": record.attempts,
        "holder": record.holder,
        "created_at": moment(record.created_at),
        "lease_until": moment(record.lease_until),
        "settled_at": moment(record.settled_at),
        "expires_at": moment(record.expires_at),
        "accessed_at": moment(record.accessed_at),
        "kind": record.outcome.kind if record.outcome else None,
        "status": record.outcome.status if record.outcome else None,
        "bytes": len(record.outcome.body) if record.outcome else None,
        "response_hash": record.response_hash,
        "note": record.note,
    }


def outcome_fields(outcome: Outcome | None) -> dict[str, Any] | None:
    """What was answered; a body that is no text is in base64."""
    if outcome is None:
        return None
    told: dict[str, Any] = {"kind": outcome.kind, "status": outcome.status, "headers": list(map(list, outcome.headers))}
    if outcome.kind in ("value", "error"):
        try:  # as it is written, without making objects of it: that would import the application's classes
            return {**told, "value": msgspec.to_builtins(msgspec.msgpack.decode(outcome.body), str_keys=True)}
        except (msgspec.MsgspecError, TypeError):
            pass  # sealed, or of another version
    try:
        return {**told, "body": outcome.body.decode()}
    except UnicodeDecodeError:
        return {**told, "base64": base64.b64encode(outcome.body).decode()}
