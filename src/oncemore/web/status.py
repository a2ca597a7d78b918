"""The status of an operation by its key: performs nothing, and shows each principal only its own operations."""

from __future__ import annotations

import base64
from typing import Any
from urllib.parse import parse_qs

from .._contract.contract import Contract
from .._contract.keys import check_key
from .._contract.rule import Rule
from .._ledger.model import Outcome, Record
from .._runtime.plan import Plan
from ..errors import InvalidKey, NotFound, OncemoreError
from .door import Door
from .problem import JSON, Response, encode_json
from .request import Request, lines


def status_plan(door: Door[Any], request: Request) -> Plan[Response]:
    """Return the response to a status lookup."""
    try:
        return (yield from find_record(door, request))
    except OncemoreError as error:
        return door.refusal(error)


def find_record(door: Door[Any], request: Request) -> Plan[Response]:
    """Find the record of this principal's key: `?operation=refunds.create&key=...`, or the key in its header."""
    query = parse_qs(request.query)
    operation = query.get("operation", [""])[0]
    rule, route = rule_named(door.contract, operation)
    asked = query.get("key", [""])[0]
    if asked:  # records have UUIDs in lower case
        key = check_key(asked, max_length=rule.key.max_length, format=rule.key.format)
    else:
        key = rule.key.read(lines(request.headers, rule.key.name.lower())) or ""
    if not key or not operation:
        raise InvalidKey("Say which operation and which key: ?operation=refunds.create&key=...")
    caller = yield from door.caller(request)
    scope = yield from door.scope(rule, route, request, caller)
    record = yield from door.guard.store.find(scope, key)
    if record is None and rule is door.contract.default and " /" not in operation:
        raise InvalidKey(
            f"No rule is named {operation}: write its name as it is in the contract, or a method and a path"
        )
    if record is None:
        raise NotFound("No operation with this key is known")
    # The record of an undeclared operation has the default rule's name, which tells the caller nothing.
    name = route if rule is door.contract.default else record.name
    return Response(200, [JSON, ("cache-control", "no-store")], encode_json(render(record, name)))


def rule_named(contract: Contract, operation: str) -> tuple[Rule, str]:
    """Return the rule of an operation and the route of its keys, by its name or by its method and path."""
    for rule in contract.rules:
        if rule.name == operation:
            if rule.one_route or rule.across_routes == "conflict" or rule.scope == "global":
                return rule, operation
            raise InvalidKey(f"{operation} has keys for each path: name one, as in ?operation=POST /refunds/7&key=...")
    method, _, path = operation.partition(" ")
    match = contract.match(method, path)
    return (match.rule, match.route) if match is not None else (contract.default, operation)


def render(record: Record, name: str) -> dict[str, Any]:
    """Return the parts of the record that its owner may see."""
    found: dict[str, Any] = {
        "operation": name,
        "key": record.key,
        "state": "unknown" if record.state == "held" else record.state,
        "attempts": record.attempts,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
    }
    if record.outcome is not None:
        found["response"] = render_outcome(record.outcome)
    return found


def render_outcome(outcome: Outcome) -> dict[str, Any]:
    try:
        body: dict[str, str] = {"body": outcome.body.decode()}
    except UnicodeDecodeError:
        body = {"body_base64": base64.b64encode(outcome.body).decode()}
    return {"status": outcome.status, "kept": outcome.kind != "tombstone", "headers": outcome.headers, **body}
