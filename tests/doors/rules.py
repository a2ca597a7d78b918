"""The rules of the `DoorContract`'s app: the first part of a path names the rule."""

from __future__ import annotations

from typing import Any, Unpack

from oncemore._contract.rule import Rule
from oncemore._contract.settings import Settings
from oncemore._ledger.context import Op
from oncemore._ledger.decisions import Resolution
from oncemore._ledger.model import Outcome
from oncemore.testing.crashes import CLAIM_FAILS, CLAIM_HANGS, SETTLE_FAILS


def rule(first: str, **settings: Unpack[Settings]) -> Rule:
    return Rule(f"POST|PUT|PATCH|DELETE /{first}/{{act}}", **settings)


class NoAnswer(Exception):
    """A time-out of the app itself: servers treat an OSError, such as TimeoutError, as the loss of their client."""


def broken(request: Any) -> str:
    raise RuntimeError("The owner cannot be found out, as it was asked")


def nobody(request: Any) -> str:
    return ""


def it_had_happened(op: Op) -> Resolution:
    return Resolution.settled(Outcome("response", 201, (("content-type", "text/plain"),), b"it had happened"))


RULES = (
    Rule("POST /named", name="things.create", key={"format": "uuid"}),
    rule("default"),
    rule("required", key="required"),
    rule("strict", key={"strict": True}),
    rule("uuid", key={"format": "uuid"}),
    rule("uuid4", key={"format": "uuid4"}),
    rule("uuid7", key={"format": "uuid7"}),
    rule("custom", key={"name": "X-Request-Id", "required": True}),
    rule("body", key="body:/id"),
    rule("template", key="template:{principal}:{body.subject}"),
    rule("unguarded", idempotent=False),
    rule("one-route", across_routes="conflict"),
    rule("broken-owner", scope=broken),
    rule("no-owner", scope=nobody),
    rule("exclude", fingerprint={"exclude": ["timestamp", "description", "metadata"]}),
    rule("include", fingerprint={"include": ["amount"]}),
    rule("mismatch-422", on_mismatch=422),
    rule("mismatch-400", on_mismatch=400),
    rule("conflict", in_flight="conflict", retry_after="3s"),
    rule("accepted", in_flight="accepted"),
    rule("impatient", wait="200ms", retry_after="2s"),
    rule("reject", on_duplicate="reject"),
    rule("ok", on_duplicate="ok"),
    rule("keep-all", keep="all"),
    rule("keep-success", keep="success"),
    rule("doubtful", doubt=(502, 504, NoAnswer)),
    rule("doubtful-page", doubt=(500,)),
    rule("doubtful-stream", doubt=(502,), streams="release"),
    rule("buffered", streams="store"),
    rule("released", streams="release"),
    rule("small", max_request=1000, max_response=1000),
    rule("short-lease", lease="600ms", on_unknown="hold"),
    rule("brief", ttl="600ms"),
    rule("late", late="refuse", ttl="1h", key={"format": "uuid7"}),
    rule("first-sent", late="refuse", ttl="1h", first_sent="Repeatability-First-Sent"),
    rule("conditional", if_match=True),
    rule("unique", unique_by="{body.order}"),
    rule("suspicious", suspect={"action": "reject", "window": "30s"}),
    rule("crash-hold", lease="600ms"),
    rule("crash-retry", lease="600ms", on_unknown="retry"),
    rule("crash-resolve", lease="600ms", on_unknown="resolve", resolver=it_had_happened),
    rule("down-claim", name=CLAIM_FAILS),
    rule("down-run", name=f"{CLAIM_FAILS}.run", store_down="run"),
    rule("down-late", name=CLAIM_HANGS),
    rule("down-settle", name=SETTLE_FAILS, lease="600ms", on_unknown="retry"),
)
