"""Writes docs/reference/contract.md from the table of settings: python docs/_generate/contract.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

from oncemore._contract.contract import Undeclared
from oncemore._contract.keysource import MEMBERS
from oncemore._contract.settings import SETTINGS, Setting

PAGE = Path(__file__).parents[1] / "reference" / "contract.md"

HEAD = """\
# The contract

A contract is a TOML file with `[defaults]` and one `[[rule]]` per kind of operation.
A setting that a rule does not give comes from `[defaults]`, and else from the [profile](profiles.md).
The same names are keyword arguments in Python: `Rule("POST /refunds", key="required", ttl="30d")`.

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

`oncemore contract check` finds every problem in a file, each with its line and its remedy.
`oncemore contract show` shows the settings that hold.

*This page is made from the settings themselves: `python docs/_generate/contract.py`.*

## Which requests a rule matches

`match` is a method, or several with `|`, and a path: `POST /refunds`, `PUT|PATCH /users/{id}`, `POST /files/{rest:path}`.
The most specific path wins.
Two rules for the same requests are an error.

Durations are seconds or text (`250ms`, `30s`, `1h30m`, `30d`), sizes bytes or text (`512KiB`, `10MiB`), functions `"module:name"`.

## Settings

| setting | values | default | |
| --- | --- | --- | --- |
"""

# What may be written, if it is not one of some choices: by setting, or by reader.
VALUES = {"key": "see below", "reverses": "the name of a rule", "unique_by": "template", "rate": "`100/1m`"}
READ_BY = {
    "text": "text",
    "flag": "true, false",
    "span": "duration",
    "positive_span": "duration",
    "size": "size",
    "count": "number",
    "doubt": "list of statuses and exceptions",
    "function": "function",
    "status_header": "header name",
    "optional_header_name": "header name",
}

KEYS = {
    "from": "`header`, `body`, `template` or `none`",
    "name": "the header",
    "required": "without a key: refused with 400, or passed through unguarded",
    "strict": "only a quoted structured-field string, as in the IETF draft",
    "format": "`any`, `uuid`, `uuid4`, `uuid7` (with hyphens, or 32 hexadecimal digits), or `regex:...`",
    "max_length": "longer keys are refused; a longer name from a template is cut, and ends in its digest",
    "at": "a JSON pointer into the body",
    "template": "made of `{principal}`, `{tenant}`, `{path.id}`, `{query.x}`, `{header.x}`, `{body.a.b}`, `{body.items.0.id}`, `{body:/a/b}`, `{window:1h}`, `{date:Europe/Berlin}`",
}

BELOW = """
`[defaults]` may give all of these but {of_a_rule}.
It may also give `profile`, and `undeclared`, the treatment of requests that no rule matches: {undeclared}.

## Keys

In short: `"required"`, `"optional"`, `"none"`, `"body:/pointer"`, `"template:..."`. In full, a table:

| member | of | default | |
| --- | --- | --- | --- |
"""


def said(value: Any) -> str:
    return f"`{json.dumps(value)}`"


def row(name: str, setting: Setting) -> str:
    shown = ", ".join(map(said, setting.choices)) or VALUES.get(name) or READ_BY[getattr(setting.read, "__name__", "")]
    default = "" if name == "key" or setting.default is None else said(setting.default)
    return f"| `{name}` | {shown} | {default} | {setting.doc} |\n"


def key_row(member: str) -> str:
    sources = [source for source, members in MEMBERS.items() if member in members]
    defaults = {said(MEMBERS[source][member]) for source in sources if MEMBERS[source][member] != ""}
    shown = " or ".join(sorted(defaults))
    if member == "required":
        shown = "; ".join(f"{said(MEMBERS[source][member])} in a {source}" for source in sources)
    return f"| `{member}` | {', '.join(sources)} | {shown} | {KEYS[member]} |\n"


def page() -> str:
    undeclared = ", ".join(map(said, get_args(Undeclared)))
    of_a_rule = ", ".join(f"`{name}`" for name, setting in SETTINGS.items() if setting.only_in_rules)
    below = BELOW.format(of_a_rule=of_a_rule, undeclared=undeclared)
    return HEAD + "".join(row(*item) for item in SETTINGS.items()) + below + "".join(map(key_row, KEYS))


if __name__ == "__main__":
    PAGE.write_text(page())
