"""Writes docs/reference/events.md from the comments beside the events: python docs/_generate/events.py"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import get_args

from oncemore._ledger import events

PAGE = Path(__file__).parents[1] / "reference" / "events.md"

HEAD = """\
# Events

A guard tells its observers of every transition of an operation. An observer is a function of one `Event`; it runs where the operation does, so it must be quick. One
that raises is logged, and disturbs nothing.

```python
from oncemore import Guard, Operation

seen = []
guard = Guard("memory://", observers=[lambda event: seen.append(event.kind)])
for attempt in range(2):
    guard.run(Operation("refunds", "rf-1"), lambda op: "done")
assert seen == ["claimed", "settled", "replayed"]
```

`oncemore.observe.logging.log_events` is an observer that writes each to the log, [with keys as digests](../howto/encryption.md#keys-in-logs) if wanted.

*This page is made from the source: `python docs/_generate/events.py`.*

| kind | when |
| --- | --- |
"""

FIELDS = """
## What an event has

| field | default | |
| --- | --- | --- |
"""

# What each field is.
MEANING = {
    "kind": "one of the above",
    "operation": "what it is about: `scope`, `key`, `fingerprint`, `name`",
    "token": "the lease's, where there is one",
    "attempt": "which claim of the operation it is",
    "from_state": "the record's state before",
    "to_state": "and after",
    "status": "the HTTP status of the outcome, or 0",
    "code": "of the error, for refusals and failures: see [Errors](../errors/index.md)",
    "detail": "its sentence",
    "duration": "seconds that the transition took",
    "tier": "where a replayed outcome was found",
}


def page() -> str:
    said = dict(re.findall(r'^    "(\w+)",  # (.*)$', inspect.getsource(events), re.MULTILINE))
    kinds = "".join(f"| `{kind}` | {said[kind]} |\n" for kind in get_args(events.EventKind))
    fields = events.Event.__struct_fields__
    given = [f"`{value!r}`" for value in events.Event.__struct_defaults__]
    rows = zip(fields, [""] * (len(fields) - len(given)) + given, strict=True)  # those without a default come first
    return HEAD + kinds + FIELDS + "".join(f"| `{name}` | {value} | {MEANING[name]} |\n" for name, value in rows)


if __name__ == "__main__":
    PAGE.write_text(page())
