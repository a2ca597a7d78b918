"""Writes docs/reference/contract.md from the settings and their readers: python docs/_generate/contract.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

from oncemore._contract.keysource import SAID_OF
from oncemore._contract.loading import ONLY_OF_A_RULE, Undeclared
from oncemore._contract.policy import CHOICES
from oncemore._contract.profiles import DEFAULT
from oncemore._contract.readers import MODES, RETRIES, SCOPES
from oncemore._contract.rule import SETTINGS

PAGE = Path(__file__).parents[1] / "reference" / "contract.md"

HEAD = """\
# The contract

A contract is a TOML file with `[defaults]` and one `[[rule]]` per kind of operation. What a rule does not say, the defaults say; what they do not, the
[profile](profiles.md) says. The same names are keyword arguments in Python: `Rule("POST /refunds", key="required", ttl="30d")`.

```toml
[defaults]
profile = "default"
undeclared = "warn"
ttl = "24h"

[[rule]]
match = "POST /refunds"
name = "refunds.create"
key = "required"
ttl = "30d"

[[rule]]
match = "POST /matches/{id}/messages"
key = "body:/clientMessageId"

[[rule]]
match = "POST /safety/report"
key = { from = "template", template = "{principal}:{body.subjectId}:{window:1h}" }
on_duplicate = "reject"

[[rule]]
match = "POST /auth/refresh"
idempotent = false
```

`oncemore contract check` finds every fault in a file, each with its line and the way to mend it; `oncemore contract show` tells what holds.

*This page is made from the settings themselves: `python docs/_generate/contract.py`.*

## Where a rule holds

`match` is a method, or several with `|`, and a path: `POST /refunds`, `PUT|PATCH /users/{id}`, `POST /files/{rest:path}`. The most specific path wins. Two rules for the same
requests are a fault.

Durations are seconds or text (`250ms`, `30s`, `1h30m`, `30d`), sizes bytes or text (`512KiB`, `10MiB`), functions `"module:name"`.

## Settings

| setting | values | default | |
| --- | --- | --- | --- |
"""

# What each means, in a sentence.  The tests see to it that none is missing.
MEANING = {
    "name": ("text", "what the operation is called in the ledger, in events and in the status lookup; its `match`, unless said"),
    "reverses": ("the name of a rule", "which operation this one undoes; both must be in the contract"),
    "idempotent": ("true, false", "false: never guarded; said, not forgotten"),
    "key": ("see below", "where the name of the operation comes from"),
    "scope": (list(SCOPES), "who owns the key; or a function. `resource` and `global` are shared by all callers, and doors warn of them"),
    "across_routes": (["separate", "conflict"], "the same key on another route: another operation, or refused"),
    "fingerprint": (list(MODES), "what counts as the same request; or a table with `include` or `exclude`, lists of members of the body"),
    "ttl": ("duration", "how long the outcome is kept: longer than anyone retries"),
    "ttl_from": (None, "counted from the creation, or from the last replay"),
    "expired": (None, "what has expired is deleted, or archived for the audit"),
    "lease": ("duration", "how long a silent performer keeps the right to perform; renewed while it works"),
    "in_flight": (None, "a duplicate of a running operation waits, gets 409, or 202 with a status URL"),
    "wait": ("duration", "how long it waits, at most"),
    "retry_after": ("duration", "the `Retry-After` of a 409 or 202"),
    "on_duplicate": (None, "a repeat gets the first outcome, 409, or an empty 200"),
    "on_mismatch": (None, "the status for another payload under a used key"),
    "keep": (None, "which outcomes are final: 2xx and deterministic 4xx, only 2xx, or all but 401, 403, 408, 425 and 429; or a function of the outcome"),
    "effect": (None, "the [level](../explain/guarantees.md) of the guarantee"),
    "on_unknown": (None, "what follows when a performer vanished in mid-operation: see [Unknown outcomes](../howto/unknown.md)"),
    "reruns": ("number", 'with `effect = "steps"`: how often a step that the database refused (a deadlock, a serialization failure) is run again; a request with `effect = "transaction"` is not, but gets 503'),
    "resolver": ("function", 'with `on_unknown = "resolve"`: asks whether it happened'),
    "unique_by": ("template", "what must happen once whatever the key: one payment per order"),
    "on_unique": (None, "what the second gets: the first outcome, 409; or `serialize`: they run one after the other"),
    "suspect": (None, "the same request under another key within 30 s; or a table with `action` and `window`"),
    "late": (None, "a key whose age is known and that is older than `ttl`: runs as new, or 412"),
    "first_sent": ("header name", "where the caller tells when it first sent the request"),
    "if_match": ("true, false", "true: 428 without `If-Match`, 412 on a stale ETag, 400 without a key, one update of a resource at a time"),
    "rate": ("`100/1m`", "how many new keys a principal may use in a time; 429 above"),
    "retry": (list(RETRIES), "which preset callers should use; shown in OpenAPI"),
    "status_header": ("header name", "tells `stored`, `replayed` or `unstored`; or a table with a text for each; empty: none"),
    "replay_status": (["same", 200], "the status of a replay"),
    "streams": (["refuse", "store", "release"], "a response without a length: a retry is refused, gets it again, or runs it again"),
    "store_down": (["refuse", "run"], "when the ledger cannot be reached: 503, or run unguarded, loudly"),
    "max_request": ("size", "a longer request is refused with 413"),
    "max_response": ("size", "a longer response is sent but not kept; a retry is told so"),
}  # fmt: skip

KEYS = {
    "from": "`header`, `body`, `template` or `none`",
    "name": "the header",
    "required": "without a key: refused with 400, or passed through unguarded",
    "strict": "only a quoted structured-field string, as in the IETF draft",
    "format": "`any`, `uuid`, `uuid4`, `uuid7`, or `regex:...`",
    "max_length": "longer keys are refused; a longer name from a template is cut, and ends in its digest",
    "at": "a JSON pointer into the body",
    "template": "made of `{principal}`, `{tenant}`, `{path.id}`, `{query.x}`, `{header.x}`, `{body.a.b}`, `{body:/a/b}`, `{window:1h}`, `{date:Europe/Berlin}`",
}

BELOW = """
`[defaults]` may say all of these but {of_a_rule}, and two more: `profile`, and `undeclared`, what is done with requests that no rule matches: {undeclared}.

## Keys

In short: `"required"`, `"optional"`, `"none"`, `"body:/pointer"`, `"template:..."`. In full, a table:

| member | of | default | |
| --- | --- | --- | --- |
"""


def said(value: Any) -> str:
    return f"`{json.dumps(value)}`"


def row(setting: str) -> str:
    values, meaning = MEANING[setting]
    shown = values if isinstance(values, str) else ", ".join(map(said, values or CHOICES[setting]))
    default = "" if setting == "key" or setting not in DEFAULT else said(DEFAULT[setting])
    return f"| `{setting}` | {shown} | {default} | {meaning} |\n"


def key_row(member: str) -> str:
    sources = [source for source, members in SAID_OF.items() if member in members]
    defaults = {said(SAID_OF[source][member]) for source in sources if SAID_OF[source][member] != ""}
    shown = " or ".join(sorted(defaults))
    if member == "required":
        shown = "; ".join(f"{said(SAID_OF[source][member])} in a {source}" for source in sources)
    return f"| `{member}` | {', '.join(sources)} | {shown} | {KEYS[member]} |\n"


def page() -> str:
    undeclared = ", ".join(map(said, get_args(Undeclared)))
    of_a_rule = ", ".join(f"`{name}`" for name in ONLY_OF_A_RULE)
    below = BELOW.format(of_a_rule=of_a_rule, undeclared=undeclared)
    return HEAD + "".join(map(row, SETTINGS)) + below + "".join(map(key_row, KEYS))


if __name__ == "__main__":
    PAGE.write_text(page())
