"""The rule as programs read it in an OpenAPI document: `x-idempotency`, which says what callers may rely on."""

from __future__ import annotations

from ..._contract.keysource import KeySource
from ..._contract.rule import Rule
from .parts import Json


def extension(rule: Rule) -> Json:
    """What the rule promises and asks for; durations are in seconds."""
    if not rule.idempotent:
        return {"name": rule.name, "idempotent": False}
    if rule.key.source == "none":
        return {"name": rule.name, "key": {"from": "none"}}
    policy = rule.policy
    told: Json = {
        "name": rule.name,
        "reverses": rule.reverses,
        "key": key_told(rule.key),
        "scope": own(rule.scope),
        "fingerprint": fingerprint_told(rule),
        "ttl": number(policy.ttl),
        "ttl_from": policy.ttl_from,
        "in_flight": policy.in_flight,
        "wait": number(policy.wait) if policy.in_flight == "wait" else None,
        "retry_after": number(rule.retry_after),
        "on_duplicate": policy.on_duplicate,
        "on_mismatch": policy.on_mismatch,
        "keep": own(policy.keep),
        "effect": policy.effect,
        "on_unknown": policy.on_unknown,
        "unique_by": rule.unique_by.text if rule.unique_by else None,
        "late": policy.late,
        "if_match": rule.if_match or None,
        "rate": {"count": rule.rate.count, "window": number(rule.rate.window)} if rule.rate else None,
    }
    return {name: value for name, value in told.items() if value is not None}


def key_told(key: KeySource) -> Json:
    told: Json = {"from": key.source, "required": key.required, "max_length": key.max_length}
    if key.template is not None:
        told["template"] = key.template.text
    elif key.source == "body":
        told |= {"at": "/" + "/".join(key.at), "format": key.format}
    else:
        told |= {"name": key.name, "format": key.format}
    return told


def fingerprint_told(rule: Rule) -> Json:
    fields = {"include": list(rule.fingerprint.include), "exclude": list(rule.fingerprint.exclude)}
    return {"mode": rule.fingerprint.mode, **{name: value for name, value in fields.items() if value}}


def own(value: object) -> object:
    """A setting's word; a function of the application's own has none that callers would know."""
    return value if isinstance(value, str) else "custom"


def number(seconds: float) -> float:
    return int(seconds) if seconds == int(seconds) else seconds
