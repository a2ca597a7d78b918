"""Profiles: named sets of settings, each with the published rules that it follows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .settings import SETTINGS

# The playbook.  Key scoped to route and principal, 24–72 h; a replay has the first status and body and says
# `Idempotency-Status: replayed`; 409 on another payload; a duplicate waits for the running one, or gets 409.
DEFAULT: dict[str, Any] = {
    "match": "POST|PATCH *",
    **{name: setting.default for name, setting in SETTINGS.items() if setting.default is not None},
}

# The settings that each profile changes.
CHANGES: dict[str, dict[str, Any]] = {
    "default": {},
    # draft-ietf-httpapi-idempotency-key-header-07: the key is a structured-field string; 400 when a required one is
    # missing, 422 when it comes with another payload, 409 while the first is running; success and error are repeated.
    "ietf": {
        "key": {**DEFAULT["key"], "strict": True},
        "in_flight": "conflict",
        "on_mismatch": 422,
    },
    # Stripe API v1: POST only; kept at least 24 h; once execution began, its outcome is kept, 500s too; 409 while running; 400
    # with other parameters or on another endpoint; `Idempotent-Replayed: true` on replays, nothing on the first.
    # Parameters are forms, in any order.  `oncemore.web.stripe` adds Stripe's error bodies, and the connected account.
    "stripe": {
        "match": "POST *",
        "across_routes": "conflict",
        "fingerprint": "unordered",
        "in_flight": "conflict",
        "on_mismatch": 400,
        "keep": "all",
        "status_header": {"name": "Idempotent-Replayed", "replayed": "true", "expires": ""},
    },
    # Stripe API v2: POST and DELETE; 30 days; a key belongs to one API of one account; a success is not repeated,
    # and a failure is executed again, and its new response returned.
    "stripe-v2": {
        "match": "POST|DELETE *",
        "ttl": "30d",
        "in_flight": "conflict",
        "on_mismatch": 400,
        "keep": "success",
        "status_header": {"name": "Idempotent-Replayed", "replayed": "true", "expires": ""},
    },
    # OASIS Repeatable Requests 1.0 as Azure applies it: a GUID and the time of the first sending; 5 minutes are tracked,
    # older is 412; 400 on another payload, 409 while running; 2xx and 4xx repeated, 5xx executed again.
    "azure": {
        "match": "POST|PUT|PATCH|DELETE *",
        "key": {**DEFAULT["key"], "name": "Repeatability-Request-ID", "format": "uuid"},
        "ttl": "5m",
        "in_flight": "conflict",
        "on_mismatch": 400,
        "late": "refuse",
        "first_sent": "Repeatability-First-Sent",
        "status_header": {
            "name": "Repeatability-Result",
            "stored": "accepted",
            "replayed": "accepted",
            "unstored": "accepted",
            "refused": "rejected",
        },
    },
    # Zalando RESTful guidelines, rule 230: an optional key, 24 h; the response is kept whether it succeeded or failed;
    # a changed request is rejected with 400.
    "zalando": {"on_mismatch": 400, "keep": "all"},
    # The matchmaking contract: every operation that is not a read carries a UUID v4, for 24 h; the same key with
    # another endpoint or payload is 409; of ten concurrent requests, one runs and nine get its response.
    "matchmaking": {
        "match": "POST|PUT|PATCH|DELETE *",
        "key": {**DEFAULT["key"], "required": True, "format": "uuid4"},
        "across_routes": "conflict",
    },
    # The patterns: 24 h for payments; changed parameters are 400; concurrent retries wait for the first; the same request
    # by the same user under another key within 30 s is suspicious, and logged.
    "patterns": {"on_mismatch": 400, "suspect": {"action": "log", "window": "30s"}},
    # The knowledge contract: 202 with a status URL while running (or 409), 409 on a collision, the same key may be
    # retried after a failure, whether it was permanent or an interruption.
    "knowledge": {"in_flight": "accepted", "keep": "success"},
    # The Spring pattern: a required key of at most 100 characters, 3 days; 409 with `Retry-After: 3` while running; a
    # failure is kept, and repeated until the caller changes the key.
    "spring": {
        "key": {**DEFAULT["key"], "required": True, "max_length": 100},
        "ttl": "72h",
        "in_flight": "conflict",
        "retry_after": "3s",
        "keep": "all",
    },
}

PROFILES: Mapping[str, Mapping[str, Any]] = {name: {**DEFAULT, **changes} for name, changes in CHANGES.items()}
