"""The retry log, the replay outcomes and the inbox of the service, compared with example tables.

Random names (keys, hashes, ids) are replaced by those of the tables in the order in which they appear; times are compared
by their order and bounds.
"""

from __future__ import annotations

import csv
from datetime import datetime
from typing import Any

import httpx

from oncemore import Retry
from oncemore.client.httpx import RetryTransport

from .conftest import Shop
from .scripted_proxy import scripted_proxy
from .test_refunds import payouts_of, refund, refunds_of, until

RETRY_LOG = """\
attempt,delay_ms,status,code,notes
1,0,timeout,,initial timeout
2,137,5xx,502,proxy error
3,281,200,201,success
"""
REPLAY_OUTCOMES = """\
key,payload_hash,status,http_code,result_id,notes
k1,abc,complete,201,rf_123,created
k1,abc,complete,201,rf_123,replayed
k1,xyz,conflict,409,,payload mismatch
"""
CONSUMER_INBOX = """\
event_id,source,first_seen,processed,result
ev_001,payments,2025-09-15T12:00:00Z,2025-09-15T12:00:03Z,ok
ev_001,payments,2025-09-15T12:00:05Z,2025-09-15T12:00:05Z,replayed
"""

Table = list[dict[str, str]]


def table(text: str) -> Table:
    return list(csv.DictReader(text.splitlines()))


def column(rows: Table, name: str) -> list[str]:
    return [row[name] for row in rows]


def renamed(made: Table, expected: Table, *names: str) -> Table:
    """Replace the random names of *made*: each new one in a column becomes the next new name of the expected column."""
    rows = [dict(row) for row in made]
    for name in names:
        words = dict(zip(dict.fromkeys(column(made, name)), dict.fromkeys(column(expected, name)), strict=True))
        for row in rows:
            row[name] = words[row[name]]
    return rows


def test_retry_log_has_the_expected_rows(shop: Shop, name: str) -> None:
    """The first answer is lost after the refund was made, the proxy answers 502, and the third attempt replays it."""
    charge = shop.captured(name)
    retry = Retry(attempts=5, deadline=20, attempt_timeout=3)
    with scripted_proxy(shop.service.url, "lose", 502) as url:
        headers = {"Authorization": "Bearer demo"}
        with httpx.Client(transport=RetryTransport(retry), base_url=url, headers=headers) as client:
            answer = client.post("/refunds", json={"charge_id": charge, "amount": 1000})
    made, expected = table(answer.extensions["oncemore"].csv()), table(RETRY_LOG)
    for name in ("attempt", "status", "code"):
        assert column(made, name) == column(expected, name)
    assert column(made, "notes")[2] == "success"
    bands = [(0, 0), (100, 200), (200, 400)]
    for rows in (made, expected):  # both keep to the preset's bands
        delays = map(int, column(rows, "delay_ms"))
        assert all(low <= delay <= high for delay, (low, high) in zip(delays, bands, strict=True))
    assert refunds_of(shop, charge) == [answer.json()["id"]]
    assert len(payouts_of(shop, answer.json()["id"])) == 1


def outcome(shop: Shop, key: str, answer: httpx.Response) -> dict[str, str]:
    """Return a row of the replay table, from the caller's answer and the service's log."""
    line = shop.logged(
        operation="refunds.create", idempotency_key=key, **{"x-request-id": answer.headers["x-request-id"]}
    )[-1]
    body: dict[str, Any] = answer.json()
    conflict = body.get("error_code", "").removeprefix("CONFLICT.idempotency.")
    return {
        "key": line["idempotency_key"],
        "payload_hash": line["payload_hash"],
        "status": "conflict" if conflict else "complete",
        "http_code": str(answer.status_code),
        "result_id": body.get("id", ""),
        "notes": conflict.replace("_", " ") or line["outcome"],
    }


def test_replay_outcomes_have_the_expected_rows(shop: Shop, name: str) -> None:
    charge, expected = shop.captured(name), table(REPLAY_OUTCOMES)
    made = [outcome(shop, name, refund(shop, charge, name, amount)) for amount in (1000, 1000, 2000)]
    assert renamed(made, expected, "key", "payload_hash", "result_id") == expected
    assert made[0]["result_id"].startswith("rf_")


def test_inbox_has_the_expected_rows(shop: Shop, name: str) -> None:
    made_id = refund(shop, shop.captured(name), name).json()["id"]

    def event() -> dict[str, Any]:
        events = shop.provider.get("/admin/events")["events"]
        return next(event for event in events if event["data"]["reference"] == made_id)

    until(lambda: len(event()["deliveries"]) == 1)
    shop.provider.replay(event()["id"], 1)
    made, expected = event()["answers"], table(CONSUMER_INBOX)
    assert [list(row) for row in made] == [list(row) for row in expected]
    for name in ("first_seen", "processed"):
        assert column(made, name) == sorted(column(made, name))
    for rows in (made, expected):
        first, second = ((read(row["first_seen"]), read(row["processed"])) for row in rows)
        assert first[0] <= first[1] <= second[0] <= second[1]
    kept = ("event_id", "source", "result")
    found = [{name: row[name] for name in kept} for row in made]
    wanted = [{name: row[name] for name in kept} for row in expected]
    assert renamed(found, wanted, "event_id", "source") == wanted


def read(text: str) -> datetime:
    return datetime.fromisoformat(text)
