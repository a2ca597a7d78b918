"""The records of shadow mode: they count requests by the decision that the guard would have made."""

from __future__ import annotations

from collections import Counter
from typing import Literal, get_args

from .._runtime.plan import Plan
from .store import Filter, Store

SHADOW = "shadow"  # the beginning of the scopes of these records
# The decision about a duplicate: it gets the stored outcome, is refused, waits for the running one, or is held as unknown.
Verdict = Literal["replayed", "refused", "waited", "held"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
PAGE = 1000


def count_verdicts(store: Store) -> Plan[dict[str, dict[str, int]]]:
    """Return the number of requests for each verdict and name of operation."""
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
