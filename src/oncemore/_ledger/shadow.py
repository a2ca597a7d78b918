"""The records of shadow mode: what would have been done with requests that were passed on untouched."""

from __future__ import annotations

from collections import Counter
from typing import Literal, get_args

from .._runtime.plan import Plan
from .store import Filter, Store

SHADOW = "shadow"  # begins the scopes of these records
# A repeat would have got the stored outcome; been refused; waited for the running one; or met an unknown outcome.
Verdict = Literal["replayed", "refused", "waited", "held"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
PAGE = 1000


def count_verdicts(store: Store) -> Plan[dict[str, dict[str, int]]]:
    """How many requests would have been replayed, refused, and so on, by the name of their operation."""
    counts: dict[str, dict[str, int]] = {}
    for verdict in VERDICTS:
        found: Counter[str] = Counter()
        cursor: str | None = None
        while True:
            page = yield from store.list(Filter(scope=f"{SHADOW}|{verdict}"), limit=PAGE, cursor=cursor)
            found.update(record.name for record in page.records)
            cursor = page.cursor
            if not cursor:
                break
        if found:
            counts[verdict] = dict(found)
    return counts
